"""The families that share a Llama's shape, by the `model_type` of a Hugging Face `config.json`.

Each is a configuration of the one network. What a family has of its own is a function from the file to fields of
`LlamaConfig`; all others are read alike.
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from tree_attn.models.llama.config import (
    Llama3RopeScaling,
    LlamaConfig,
    check_scaling,
    from_values,
    reject,
    require_positive_int,
    require_positive_number,
)

# The keys of a `config.json` for the fields that it calls something else.
HUGGINGFACE_KEYS = MappingProxyType(
    {
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "max_position": "max_position_embeddings",
        "tie_embeddings": "tie_word_embeddings",
        "eos_token_ids": "eos_token_id",
        "window": "sliding_window",
        "global_layers": "layer_types",
        "attention_soft_cap": "attn_logit_softcapping",
        "logit_soft_cap": "final_logit_softcapping",
    }
)


# Layers without a window are listed one by one; a damaged file must not fill the memory.
_MAX_LISTED_LAYERS = 10000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """The traits of one `model_type`.

    Attributes:
      architecture: the only name that `architectures` may have.
      fields: `config.json` -> the fields of `LlamaConfig` that this family adds.
      defaults: values of keys that a file may leave out.
      only: keys that a file may have with these values alone.
    """

    architecture: str
    fields: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda source: {}
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)


def _gemma_2(source: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what Gemma 2 adds. Every second layer sees all, the others a window."""
    scalar = source["query_pre_attn_scalar"]
    require_positive_number("query_pre_attn_scalar", scalar)
    return {
        "activation": "gelu_tanh",
        "norms_add_one": True,
        "post_norms": True,
        "scales_embedding": True,
        "attention_scale": scalar**-0.5,
        "attention_soft_cap": source["attn_logit_softcapping"],
        "logit_soft_cap": source["final_logit_softcapping"],
        "window": source["sliding_window"],
        "global_layers": _global_layers(source, lambda layer: layer % 2 == 1),
    }


def _only(source: Mapping[str, Any], name: str, allowed: tuple[Any, ...]) -> None:
    """Raises ValueError if a field of `source` is present with a value, or type, other than the allowed ones."""
    value = source.get(name, allowed[0])
    if not any(type(value) is type(one) and value == one for one in allowed):
        reject(name, value, f"one of {list(allowed)}, the only ones of this Llama")


def _field(source: Mapping[str, Any], name: str) -> Any:
    if source.get(name) is None:
        raise ValueError(f"{name} is missing; a Llama configuration must give it")
    return source[name]


def _global_layers(source: Mapping[str, Any], is_global: Callable[[int], bool]) -> tuple[int, ...]:
    """Returns the layers without a window: as `layer_types` says, or where it is absent by `is_global(layer)`."""
    num_layers = _field(source, "num_hidden_layers")
    require_positive_int("num_hidden_layers", num_layers)
    if num_layers > _MAX_LISTED_LAYERS:
        reject("num_hidden_layers", num_layers, f"at most {_MAX_LISTED_LAYERS} where layers differ")
    types = source.get("layer_types")
    if types is None:
        return tuple(filter(is_global, range(num_layers)))
    kinds = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != num_layers or not all(kind in kinds for kind in types):
        reject("layer_types", types, f"a list of {num_layers} names, each one of {list(kinds)}")
    return tuple(layer for layer, kind in enumerate(types) if kind == kinds[0])


def _windows_after(source: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the window of Qwen's models, which layers from `max_window_layers` on have, if `use_sliding_window`."""
    _only(source, "use_sliding_window", (False, True))
    window = source.get("sliding_window", 4096)
    if not source.get("use_sliding_window", False) or window is None:
        return {}
    first = source.get("max_window_layers", 28)
    if type(first) is not int or first < 0:
        reject("max_window_layers", first, "an integer of 0 or more")
    return {"window": window, "global_layers": _global_layers(source, lambda layer: layer < first)}


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
            fields=_gemma_2,
            defaults={
                **_GEMMA_DEFAULTS,
                "max_position_embeddings": 8192,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
            },
            only=_GEMMA,
        ),
    }
)


def from_huggingface(source: Mapping[str, Any]) -> LlamaConfig:
    """Reads the dictionary of a Hugging Face `config.json`.

    Args:
      source: the parsed file, as transformers 4 or 5 writes it.

    Raises:
      ValueError: the file describes none of `FAMILIES` (another architecture, other biases, another activation or
        rotary type, quantized weights), or lacks a field; the message names the field.

    Example:
      >>> import json, pathlib
      >>> config = from_huggingface(json.loads(pathlib.Path("config.json").read_text()))  # doctest: +SKIP
    """
    _only(source, "model_type", tuple(FAMILIES))
    family = FAMILIES[source.get("model_type", "llama")]
    source = {**family.defaults, **source}
    architectures = source.get("architectures")
    if architectures is not None and not isinstance(architectures, list):
        reject("architectures", architectures, "a list of names")
    for architecture in architectures or ():
        _only({"architectures": architecture}, "architectures", (family.architecture,))
    _only(source, "quantization_config", (None,))
    for name, allowed in family.only.items():
        _only(source, name, allowed)
    theta, scaling = _rope_from_huggingface(source)
    num_heads, hidden_size = _field(source, "num_attention_heads"), _field(source, "hidden_size")
    require_positive_int("num_attention_heads", num_heads)
    require_positive_int("hidden_size", hidden_size)
    or_default = lambda name, default: default if source.get(name) is None else source[name]
    ends = or_default("eos_token_id", [])
    values = dict(
        num_layers=_field(source, "num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=_field(source, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=or_default("num_key_value_heads", num_heads),
        head_dim=or_default("head_dim", hidden_size // num_heads),
        vocab_size=_field(source, "vocab_size"),
        max_position=or_default("max_position_embeddings", 2048),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=or_default("rms_norm_eps", 1e-6),
        tie_embeddings=or_default("tie_word_embeddings", False),
        bos_token_id=source.get("bos_token_id"),
        eos_token_ids=tuple(ends) if isinstance(ends, list) else (ends,),
        **family.fields(source),
    )
    return from_values(values, HUGGINGFACE_KEYS)


def _rope_from_huggingface(source: Mapping[str, Any]) -> tuple[Any, Llama3RopeScaling | None]:
    """Reads `rope_theta` and scaling as transformers 5 (`rope_parameters`) and 4 (`rope_scaling`) write them."""
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(source.get(name), Mapping | None):
            reject(name, source[name], "an object or null")
    scaling = source.get("rope_parameters") or source.get("rope_scaling") or {}
    theta = scaling.get("rope_theta", source.get("rope_theta", 10000.0))
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    _only(scaling, "partial_rotary_factor", (1.0, 1))
    if rope_type == "default":
        return theta, None
    if rope_type != "llama3":
        reject("rope_type", rope_type, "'default' or 'llama3'")
    values = {name: _field(scaling, name) for name in ("factor", "low_freq_factor", "high_freq_factor")}
    values["original_max_position"] = _field(scaling, "original_max_position_embeddings")
    check_scaling(values, "original_max_position_embeddings")
    return theta, Llama3RopeScaling(**values)
