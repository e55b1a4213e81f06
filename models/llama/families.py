"""The families that share a Llama's shape, by the `model_type` of a Hugging Face `config.json`.

Each is a configuration of the one network. What a family has of its own is a function from the file to fields of
`LlamaConfig`; all others are read alike.
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from tree_attn.models.llama.config import (
    LlamaConfig,
    from_values,
    reject,
    require_positive_int,
    require_positive_number,
)
from tree_attn.models.llama.config_json import (
    HUGGINGFACE_KEYS,
    global_layers,
    object_of,
    only,
    required,
    rope_fields,
    rope_fields_by_kind,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """The traits of one `model_type`.

    Attributes:
      architecture: the only name that `architectures` may have.
      part: the key under which the file has the text model, beside others; None: the file is the text model's.
      fields: `config.json` -> the fields of `LlamaConfig` that this family adds.
      rope: `config.json` -> the fields of its rotary embedding.
      defaults: values of keys that a file may leave out.
      only: keys that a file may have with these values alone.
    """

    architecture: str
    part: str | None = None
    fields: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda source: {}
    rope: Callable[[Mapping[str, Any]], dict[str, Any]] = rope_fields
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)


def _gemma(source: Mapping[str, Any], layers_per_global: int) -> dict[str, Any]:
    """Returns what Gemma adds. Of so many layers the last one sees all, and the others a window."""
    scalar = source["query_pre_attn_scalar"]
    require_positive_number("query_pre_attn_scalar", scalar)
    require_positive_int("sliding_window", source["sliding_window"])
    return {
        "activation": "gelu_tanh",
        "norms_add_one": True,
        "post_norms": True,
        "scales_embedding": True,
        "attention_scale": scalar**-0.5,
        "attention_soft_cap": source.get("attn_logit_softcapping"),
        "logit_soft_cap": source.get("final_logit_softcapping"),
        "window": source["sliding_window"],
        "global_layers": global_layers(source, lambda layer: (layer + 1) % layers_per_global == 0),
    }


def _gemma_3(source: Mapping[str, Any]) -> dict[str, Any]:
    pattern = source.get("sliding_window_pattern", 6)
    require_positive_int("sliding_window_pattern", pattern)
    return {**_gemma(source, pattern), "query_key_norm": True}


def _windows_after(source: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the window of Qwen's models, which layers from `max_window_layers` on have, if `use_sliding_window`."""
    only(source, "use_sliding_window", (False, True))
    window = source.get("sliding_window", 4096)
    if not source.get("use_sliding_window", False) or window is None:
        return {}
    first = source.get("max_window_layers", 28)
    if type(first) is not int or first < 0:
        reject("max_window_layers", first, "an integer of 0 or more")
    return {"window": window, "global_layers": global_layers(source, lambda layer: layer < first)}


# Keys of the number of experts in the files of gpt-oss and Mixtral, Qwen, and DeepSeek.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")

# Keys that count in the whole file, if it has them, where the text model is a part of it.
_OF_THE_WHOLE = ("architectures", "bos_token_id", "eos_token_id", "tie_word_embeddings", "quantization_config")

_NO_BIAS = {"attention_bias": (False,)}
_SILU = {"hidden_act": ("silu", "swish")}
_GEMMA = {
    **_NO_BIAS,
    # Files name it twice, and this is the one that counts.
    "hidden_activation": ("gelu_pytorch_tanh",),
    "use_bidirectional_attention": (None, False),
}
_GEMMA_DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}

_GEMMA_3_TEXT = Family(
    architecture="Gemma3ForCausalLM",
    fields=_gemma_3,
    rope=rope_fields_by_kind,
    defaults={**_GEMMA_DEFAULTS, "max_position_embeddings": 131072},
    # Transformers reads a cap of attention's logits from no Gemma 3.
    only={**_GEMMA, "attn_logit_softcapping": (None,)},
)

#: The families by the `model_type` of their `config.json`.
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(architecture="LlamaForCausalLM", only={**_SILU, **_NO_BIAS, "mlp_bias": (False,)}),
        "mistral": Family(
            architecture="MistralForCausalLM",
            fields=lambda source: {"window": source.get("sliding_window", 4096)},
            defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072},
            only={**_SILU, **_NO_BIAS},
        ),
        "qwen2": Family(
            architecture="Qwen2ForCausalLM",
            fields=lambda source: {"query_key_value_bias": True, **_windows_after(source)},
            defaults={"max_position_embeddings": 32768},
            only=_SILU,
        ),
        "qwen3": Family(
            architecture="Qwen3ForCausalLM",
            fields=lambda source: {"query_key_norm": True, **_windows_after(source)},
            defaults={"head_dim": 128, "max_position_embeddings": 32768},
            only={**_SILU, **_NO_BIAS},
        ),
        "gemma2": Family(
            architecture="Gemma2ForCausalLM",
            fields=lambda source: _gemma(source, 2),
            defaults={
                **_GEMMA_DEFAULTS,
                "max_position_embeddings": 8192,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
            },
            only=_GEMMA,
        ),
        "gemma3_text": _GEMMA_3_TEXT,
        # The larger ones read images too, which this Llama does not.
        "gemma3": dataclasses.replace(
            _GEMMA_3_TEXT,
            architecture="Gemma3ForConditionalGeneration",
            part="text_config",
            defaults={**_GEMMA_3_TEXT.defaults, "num_attention_heads": 8, "vocab_size": 262208},
        ),
    }
)


def from_huggingface(source: Mapping[str, Any]) -> LlamaConfig:
    """Reads the dictionary of a Hugging Face `config.json`.

    Args:
      source: the parsed file, as transformers 4 or 5 writes it.

    Raises:
      ValueError: the file describes none of `FAMILIES` (another architecture, a mixture of experts, other biases,
        another activation or rotary type, quantized weights), or lacks a field; the message names the field.

    Example:
      >>> import json, pathlib
      >>> config = from_huggingface(json.loads(pathlib.Path("config.json").read_text()))  # doctest: +SKIP
    """
    if any(source.get(key) for key in _EXPERTS) or source.get("model_type") == "gpt_oss":
        allowed = f"one of {list(FAMILIES)}, whose MLPs are dense; this one is a mixture of experts"
        reject("model_type", source.get("model_type"), allowed)
    only(source, "model_type", tuple(FAMILIES))
    family = FAMILIES[source.get("model_type", "llama")]
    if family.part is not None:
        whole = {key: source[key] for key in _OF_THE_WHOLE if key in source}
        source = {**object_of(source, family.part), **whole}
    source = {**family.defaults, **source}
    architectures = source.get("architectures")
    if architectures is not None and not isinstance(architectures, list):
        reject("architectures", architectures, "a list of names")
    for architecture in architectures or ():
        only({"architectures": architecture}, "architectures", (family.architecture,))
    only(source, "quantization_config", (None,))
    for name, allowed in family.only.items():
        only(source, name, allowed)
    rope = family.rope(source)
    num_heads, hidden_size = required(source, "num_attention_heads"), required(source, "hidden_size")
    require_positive_int("num_attention_heads", num_heads)
    require_positive_int("hidden_size", hidden_size)
    or_default = lambda name, default: default if source.get(name) is None else source[name]
    ends = or_default("eos_token_id", [])
    values = dict(
        num_layers=required(source, "num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=required(source, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=or_default("num_key_value_heads", num_heads),
        head_dim=or_default("head_dim", hidden_size // num_heads),
        vocab_size=required(source, "vocab_size"),
        max_position=or_default("max_position_embeddings", 2048),
        **rope,
        rms_norm_eps=or_default("rms_norm_eps", 1e-6),
        tie_embeddings=or_default("tie_word_embeddings", False),
        bos_token_id=source.get("bos_token_id"),
        eos_token_ids=tuple(ends) if isinstance(ends, list) else (ends,),
        **family.fields(source),
    )
    return from_values(values, HUGGINGFACE_KEYS)
