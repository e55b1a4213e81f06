"""The configuration of a Llama: one frozen dataclass that checks itself, and its source in Hugging Face files."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

# Positions, tokens and sizes are int32 on the devices.
_MAX_INT = 2**31 - 1
# Constants are float32 there.
_SMALLEST_FLOAT, _LARGEST_FLOAT = 2.0**-126, (2 - 2.0**-23) * 2.0**127


def _reject(name: str, value: object, allowed: str) -> NoReturn:
    raise ValueError(f"{name} must be {allowed}, got {value!r:.200}")


def require_positive_int(name: str, value: object) -> None:
    """Raises ValueError unless `value` is an integer from 1 to the largest int32."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        _reject(name, value, "an integer of 1 or more")
    if value > _MAX_INT:
        _reject(name, value, f"at most {_MAX_INT}")


def _require_positive_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        _reject(name, value, "a number above 0")
    if not _SMALLEST_FLOAT <= value <= _LARGEST_FLOAT:
        _reject(name, value, "a finite number that float32 holds")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3RopeScaling:
    """The scaling of rotary frequencies by which Llama 3.1 extends the context that it was first trained on.

    Wavelengths longer than `original_max_position / low_freq_factor` are stretched by `factor`, those shorter than
    `original_max_position / high_freq_factor` are kept, and those between are interpolated.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self) -> None:
        _check_scaling(vars(self))


def _check_scaling(values: Mapping[str, Any], original_max_position: str = "original_max_position") -> None:
    """Raises ValueError unless `values` are those of a `Llama3RopeScaling`; the string is a file's name of that one."""
    for name in ("factor", "low_freq_factor", "high_freq_factor"):
        _require_positive_number(name, values[name])
    require_positive_int(original_max_position, values["original_max_position"])
    if values["high_freq_factor"] <= values["low_freq_factor"]:
        _reject("high_freq_factor", values["high_freq_factor"], f"above low_freq_factor={values['low_freq_factor']}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The shape and constants of one Llama.

    Raises:
      ValueError: a field is out of range, `num_heads` is not a multiple of `num_kv_heads`, or `head_dim` is odd.

    Example:
      >>> LlamaConfig(num_layers=2, hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, head_dim=16,
      ...             vocab_size=256, max_position=512).group_size
      2
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rope_theta: float = 10000.0
    rope_scaling: Llama3RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    tie_embeddings: bool = False
    bos_token_id: int | None = 1
    eos_token_ids: tuple[int, ...] = (2,)

    def __post_init__(self) -> None:
        check_fields(vars(self))

    @property
    def group_size(self) -> int:
        """The number of query heads that share one key head."""
        return self.num_heads // self.num_kv_heads


def check_fields(values: Mapping[str, Any], keys: Mapping[str, str] = MappingProxyType({})) -> None:
    """Raises ValueError unless `values` are the fields of a `LlamaConfig`, of its types and in range.

    Args:
      values: each required field, and optional ones.
      keys: what a file calls the fields, for the messages; a field that it does not have keeps its name.
    """
    key = lambda name: keys.get(name, name)
    for field in dataclasses.fields(LlamaConfig):
        if field.type is int:
            require_positive_int(key(field.name), values[field.name])
        elif field.type is float and field.name in values:
            _require_positive_number(key(field.name), values[field.name])
    scaling, tie_embeddings = values.get("rope_scaling"), values.get("tie_embeddings", False)
    if not isinstance(scaling, Llama3RopeScaling | None):
        _reject(key("rope_scaling"), scaling, "a Llama3RopeScaling or None")
    if not isinstance(tie_embeddings, bool):
        _reject(key("tie_embeddings"), tie_embeddings, "true or false")
    if values["num_heads"] % values["num_kv_heads"]:
        allowed = f"a multiple of {key('num_kv_heads')}={values['num_kv_heads']}"
        _reject(key("num_heads"), values["num_heads"], allowed)
    if values["head_dim"] % 2:
        _reject(key("head_dim"), values["head_dim"], "even, for rotary embedding turns pairs")
    _check_token_ids(values, key)


def _check_token_ids(values: Mapping[str, Any], key: Callable[[str], str]) -> None:
    vocab_size, bos = values["vocab_size"], values.get("bos_token_id")
    ends = values.get("eos_token_ids", ())
    if not isinstance(ends, tuple):
        _reject(key("eos_token_ids"), ends, "a tuple of token ids")
    of_fields = [("bos_token_id", bos)] * (bos is not None) + [("eos_token_ids", token_id) for token_id in ends]
    for name, token_id in of_fields:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            _reject(key(name), token_id, "an integer")
        if not 0 <= token_id < vocab_size:
            _reject(key(name), token_id, f"in [0, {key('vocab_size')}={vocab_size})")


# The keys of a Hugging Face `config.json` for the fields that it calls something else.
HUGGINGFACE_KEYS = MappingProxyType(
    {
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "max_position": "max_position_embeddings",
        "tie_embeddings": "tie_word_embeddings",
        "eos_token_ids": "eos_token_id",
    }
)


def _only(source: Mapping[str, Any], name: str, allowed: tuple[Any, ...]) -> None:
    """Raises ValueError if a field of `source` is present with a value, or type, other than the allowed ones."""
    value = source.get(name, allowed[0])
    if not any(type(value) is type(one) and value == one for one in allowed):
        _reject(name, value, f"one of {list(allowed)}, the only ones of this Llama")


def _field(source: Mapping[str, Any], name: str) -> Any:
    if source.get(name) is None:
        raise ValueError(f"{name} is missing; a Llama configuration must give it")
    return source[name]


def _rope_from_huggingface(source: Mapping[str, Any]) -> tuple[Any, Llama3RopeScaling | None]:
    """Reads `rope_theta` and scaling as transformers 5 (`rope_parameters`) and 4 (`rope_scaling`) write them."""
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(source.get(name), Mapping | None):
            _reject(name, source[name], "an object or null")
    scaling = source.get("rope_parameters") or source.get("rope_scaling") or {}
    theta = scaling.get("rope_theta", source.get("rope_theta", 10000.0))
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    _only(scaling, "partial_rotary_factor", (1.0, 1))
    if rope_type == "default":
        return theta, None
    if rope_type != "llama3":
        _reject("rope_type", rope_type, "'default' or 'llama3'")
    values = {name: _field(scaling, name) for name in ("factor", "low_freq_factor", "high_freq_factor")}
    values["original_max_position"] = _field(scaling, "original_max_position_embeddings")
    _check_scaling(values, "original_max_position_embeddings")
    return theta, Llama3RopeScaling(**values)


def from_huggingface(source: Mapping[str, Any]) -> LlamaConfig:
    """Reads the dictionary of a Hugging Face `config.json`.

    Args:
      source: the parsed file, as transformers 4 or 5 writes it.

    Raises:
      ValueError: the file describes something other than a Llama of this package (another architecture, biases,
        another activation or rotary type, quantized weights), or lacks a field; the message names the field.

    Example:
      >>> import json, pathlib
      >>> config = from_huggingface(json.loads(pathlib.Path("config.json").read_text()))  # doctest: +SKIP
    """
    _only(source, "model_type", ("llama",))
    architectures = source.get("architectures")
    if architectures is not None and not isinstance(architectures, list):
        _reject("architectures", architectures, "a list of names")
    for architecture in architectures or ():
        _only({"architectures": architecture}, "architectures", ("LlamaForCausalLM",))
    _only(source, "hidden_act", ("silu", "swish"))
    _only(source, "attention_bias", (False,))
    _only(source, "mlp_bias", (False,))
    _only(source, "quantization_config", (None,))
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
    )
    return from_values(values, HUGGINGFACE_KEYS)


def from_values(values: Mapping[str, Any], keys: Mapping[str, str]) -> LlamaConfig:
    """Returns the configuration of a file's values; `keys` are what the file calls the fields, for the messages."""
    check_fields(values, keys)
    floats = {name: float(values[name]) for name in ("rope_theta", "rms_norm_eps")}
    return LlamaConfig(**{**values, **floats})
