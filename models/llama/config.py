"""The configuration of a Llama, or of a family that shares its shape: one frozen dataclass that checks itself."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

# Positions, tokens and sizes are int32 on the devices.
_MAX_INT = 2**31 - 1
# Constants are float32 there.
_SMALLEST_FLOAT, _LARGEST_FLOAT = 2.0**-126, (2 - 2.0**-23) * 2.0**127

# The functions of an MLP's gate, which `layers.py` defines.
ACTIVATIONS = ("silu", "gelu_tanh")


def reject(name: str, value: object, allowed: str) -> NoReturn:
    """Raises the ValueError of a wrong value."""
    raise ValueError(f"{name} must be {allowed}, got {value!r:.200}")


def require_positive_int(name: str, value: object) -> None:
    """Raises ValueError unless `value` is an integer from 1 to the largest int32."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        reject(name, value, "an integer of 1 or more")
    if value > _MAX_INT:
        reject(name, value, f"at most {_MAX_INT}")


def require_positive_number(name: str, value: object) -> None:
    """Raises ValueError unless `value` is a finite number above 0 that float32 holds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        reject(name, value, "a number above 0")
    if not _SMALLEST_FLOAT <= value <= _LARGEST_FLOAT:
        reject(name, value, "a finite number that float32 holds")


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
        check_scaling(vars(self))


def check_scaling(values: Mapping[str, Any], original_max_position: str = "original_max_position") -> None:
    """Raises ValueError unless `values` are those of a `Llama3RopeScaling`; the string is a file's name of that one."""
    for name in ("factor", "low_freq_factor", "high_freq_factor"):
        require_positive_number(name, values[name])
    require_positive_int(original_max_position, values["original_max_position"])
    if values["high_freq_factor"] <= values["low_freq_factor"]:
        reject("high_freq_factor", values["high_freq_factor"], f"above low_freq_factor={values['low_freq_factor']}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The shape and constants of one Llama, or of a family that shares its shape.

    The required fields and those up to `eos_token_ids` are a Llama's. Each of the others is what another family adds.

    Attributes:
      query_key_value_bias: query, key and value have biases (Qwen2, Qwen2.5).
      query_key_norm: an RMS norm of each head of query and key, before they are rotated (Qwen3).
      window: positions that a token sees, its own included (Mistral); None: all before it.
      global_layers: layers without that window.
      activation: of the MLP's gate, one of `ACTIVATIONS` (Gemma: `gelu_tanh`).
      norms_add_one: norms multiply by one plus their scale, before they round (Gemma).
      post_norms: attention and MLP each end with a norm too, before they are added to their input (Gemma).
      scales_embedding: embeddings are multiplied by `sqrt(hidden_size)`, rounded to their dtype (Gemma).
      attention_scale: factor of attention's logits (Gemma); None: `1 / sqrt(head_dim)`.
      attention_soft_cap: attention's logits become `cap * tanh(logits / cap)` (Gemma 2).
      logit_soft_cap: so do the final logits (Gemma 2).
      rope_linear_factor: positions are divided by it before they rotate query and key (Gemma 3).
      local_rope_theta: base of the rotation in layers with the window, where nothing is divided (Gemma 3); None: as in
        all others.

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
    query_key_value_bias: bool = False
    query_key_norm: bool = False
    window: int | None = None
    global_layers: tuple[int, ...] = ()
    activation: str = "silu"
    norms_add_one: bool = False
    post_norms: bool = False
    scales_embedding: bool = False
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    rope_linear_factor: float | None = None
    local_rope_theta: float | None = None

    def __post_init__(self) -> None:
        check_fields(vars(self))

    @property
    def group_size(self) -> int:
        """The number of query heads that share one key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def has_layer_kinds(self) -> bool:
        """True if some layers have the window and others have not."""
        return self.window is not None and 0 < len(self.global_layers) < self.num_layers

    def window_of(self, layer: int) -> int | None:
        """Returns the positions that a token sees in a layer, its own included; None: all before it."""
        return None if layer in self.global_layers else self.window

    def attention_options(self, layer: int) -> dict[str, Any]:
        """Returns the options of attention in a layer, as `tree_attn.attend` takes them; a Llama has none."""
        window = self.window_of(layer)
        options = {
            "local_window_size": None if window is None else (window - 1, None),
            "scale": self.attention_scale,
            "logits_soft_cap": self.attention_soft_cap,
        }
        return {name: value for name, value in options.items() if value is not None}


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
        elif _is_number(field) and not (values.get(field.name, field.default) is None and field.default is None):
            require_positive_number(key(field.name), values.get(field.name, field.default))
        elif field.type is bool and not isinstance(values.get(field.name, False), bool):
            reject(key(field.name), values[field.name], "true or false")
    scaling = values.get("rope_scaling")
    if not isinstance(scaling, Llama3RopeScaling | None):
        reject(key("rope_scaling"), scaling, "a Llama3RopeScaling or None")
    if values["num_heads"] % values["num_kv_heads"]:
        allowed = f"a multiple of {key('num_kv_heads')}={values['num_kv_heads']}"
        reject(key("num_heads"), values["num_heads"], allowed)
    if values.get("activation", "silu") not in ACTIVATIONS:
        reject(key("activation"), values["activation"], f"one of {list(ACTIVATIONS)}")
    if values["head_dim"] % 2:
        reject(key("head_dim"), values["head_dim"], "even, for rotary embedding turns pairs")
    _check_token_ids(values, key)
    if values.get("window") is not None:
        require_positive_int(key("window"), values["window"])
    layers = values.get("global_layers", ())
    is_layer = lambda layer: type(layer) is int and 0 <= layer < values["num_layers"]
    if not isinstance(layers, tuple) or not all(map(is_layer, layers)):
        reject(key("global_layers"), layers, f"a tuple of layers below {key('num_layers')}={values['num_layers']}")


def _check_token_ids(values: Mapping[str, Any], key: Callable[[str], str]) -> None:
    vocab_size, bos = values["vocab_size"], values.get("bos_token_id")
    ends = values.get("eos_token_ids", ())
    if not isinstance(ends, tuple):
        reject(key("eos_token_ids"), ends, "a tuple of token ids")
    of_fields = [("bos_token_id", bos)] * (bos is not None) + [("eos_token_ids", token_id) for token_id in ends]
    for name, token_id in of_fields:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            reject(key(name), token_id, "an integer")
        if not 0 <= token_id < vocab_size:
            reject(key(name), token_id, f"in [0, {key('vocab_size')}={vocab_size})")


def from_values(values: Mapping[str, Any], keys: Mapping[str, str]) -> LlamaConfig:
    """Returns the configuration of a file's values; `keys` are what the file calls the fields, for the messages."""
    check_fields(values, keys)
    numbers = {field.name for field in dataclasses.fields(LlamaConfig) if _is_number(field)}
    floats = {name: float(values[name]) for name in numbers & values.keys() if values[name] is not None}
    return LlamaConfig(**{**values, **floats})


def _is_number(field: dataclasses.Field) -> bool:
    return field.type in (float, float | None)
