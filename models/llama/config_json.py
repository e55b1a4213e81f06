"""The reading of a Hugging Face `config.json`: what families share, value by value, each checked by its own name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from tree_attn.models.llama.config import Llama3RopeScaling, check_scaling, reject, require_positive_int

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
        "local_rope_theta": "rope_local_base_freq",
        "rope_linear_factor": "factor",
    }
)

# Layers without a window and with one, as `layer_types` and `rope_parameters` call them.
_KINDS = ("full_attention", "sliding_attention")

# Layers without a window are listed one by one; a damaged file must not fill the memory.
_MAX_LISTED_LAYERS = 10000


def only(source: Mapping[str, Any], name: str, allowed: tuple[Any, ...]) -> None:
    """Raises ValueError if a field of `source` is present with a value, or type, other than the allowed ones."""
    value = source.get(name, allowed[0])
    if not any(type(value) is type(one) and value == one for one in allowed):
        reject(name, value, f"one of {list(allowed)}, the only ones of this Llama")


def required(source: Mapping[str, Any], name: str) -> Any:
    """Returns a field of `source`; raises ValueError if it is missing or null."""
    if source.get(name) is None:
        raise ValueError(f"{name} is missing; a Llama configuration must give it")
    return source[name]


def global_layers(source: Mapping[str, Any], is_global: Callable[[int], bool]) -> tuple[int, ...]:
    """Returns the layers without a window: as `layer_types` says, or where it is absent by `is_global(layer)`."""
    num_layers = required(source, "num_hidden_layers")
    require_positive_int("num_hidden_layers", num_layers)
    if num_layers > _MAX_LISTED_LAYERS:
        reject("num_hidden_layers", num_layers, f"at most {_MAX_LISTED_LAYERS} where layers differ")
    types = source.get("layer_types")
    if types is None:
        return tuple(filter(is_global, range(num_layers)))
    if not isinstance(types, list) or len(types) != num_layers or not all(kind in _KINDS for kind in types):
        reject("layer_types", types, f"a list of {num_layers} names, each one of {list(_KINDS)}")
    return tuple(layer for layer, kind in enumerate(types) if kind == _KINDS[0])


def rope_fields(source: Mapping[str, Any]) -> dict[str, Any]:
    """Reads `rope_theta` and scaling as transformers 5 (`rope_parameters`) and 4 (`rope_scaling`) write them."""
    scaling = object_of(source, "rope_parameters") or object_of(source, "rope_scaling")
    theta, rope_type = scaling.get("rope_theta", source.get("rope_theta", 10000.0)), _rope_type(scaling)
    if rope_type == "default":
        return {"rope_theta": theta}
    if rope_type != "llama3":
        reject("rope_type", rope_type, "'default' or 'llama3'")
    values = {name: required(scaling, name) for name in ("factor", "low_freq_factor", "high_freq_factor")}
    values["original_max_position"] = required(scaling, "original_max_position_embeddings")
    check_scaling(values, "original_max_position_embeddings")
    return {"rope_theta": theta, "rope_scaling": Llama3RopeScaling(**values)}


def rope_fields_by_kind(source: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the rotations of layers without a window and with one, whose theta is their own.

    Transformers 5 writes them under `full_attention` and `sliding_attention` of `rope_parameters`, transformers 4 as
    `rope_theta`, `rope_scaling` and `rope_local_base_freq`.
    """
    by_kind = object_of(source, "rope_parameters")
    for kind in by_kind:
        only({"rope_parameters": kind}, "rope_parameters", _KINDS)
    everywhere, local = (object_of(by_kind, kind) for kind in _KINDS)
    everywhere = {**object_of(source, "rope_scaling"), **everywhere}
    if _rope_type(local) != "default":
        reject("rope_type", _rope_type(local), "'default' for sliding_attention")
    local_theta = local.get("rope_theta", source.get("rope_local_base_freq", 10000.0))
    fields = {
        "rope_theta": everywhere.get("rope_theta", source.get("rope_theta", 1000000.0)),
        "local_rope_theta": required({"rope_local_base_freq": local_theta}, "rope_local_base_freq"),
    }
    rope_type = _rope_type(everywhere)
    if rope_type not in ("default", "linear"):
        reject("rope_type", rope_type, "'default' or 'linear'")
    return fields if rope_type == "default" else {**fields, "rope_linear_factor": required(everywhere, "factor")}


def object_of(source: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns an object in `source`, empty if it is missing or null."""
    value = source.get(name)
    if not isinstance(value, Mapping | None):
        reject(name, value, "an object or null")
    return value or {}


def _rope_type(scaling: Mapping[str, Any]) -> Any:
    only(scaling, "partial_rotary_factor", (1.0, 1))
    return scaling.get("rope_type", scaling.get("type", "default"))
