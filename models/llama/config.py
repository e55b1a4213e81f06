"""The configuration of a Llama: one frozen dataclass that checks itself, and its source in Hugging Face files."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NoReturn


def _reject(name: str, value: object, allowed: str) -> NoReturn:
    raise ValueError(f"{name} must be {allowed}, got {value!r}")


def _require_positive_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        _reject(name, value, "an integer of 1 or more")


def _require_positive_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        _reject(name, value, "a number above 0")


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
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            _require_positive_number(name, getattr(self, name))
        _require_positive_int("original_max_position", self.original_max_position)
        if self.high_freq_factor <= self.low_freq_factor:
            _reject("high_freq_factor", self.high_freq_factor, f"above low_freq_factor={self.low_freq_factor}")


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
        for field in dataclasses.fields(self):
            if field.type is int:
                _require_positive_int(field.name, getattr(self, field.name))
        _require_positive_number("rope_theta", self.rope_theta)
        _require_positive_number("rms_norm_eps", self.rms_norm_eps)
        if self.num_heads % self.num_kv_heads:
            _reject("num_heads", self.num_heads, f"a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            _reject("head_dim", self.head_dim, "even, for rotary embedding turns pairs")
        for token_id in (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,))):
            if not 0 <= token_id < self.vocab_size:
                _reject("bos_token_id or eos_token_ids", token_id, f"in [0, vocab_size={self.vocab_size})")

    @property
    def group_size(self) -> int:
        """The number of query heads that share one key head."""
        return self.num_heads // self.num_kv_heads


def _only(source: Mapping[str, Any], name: str, allowed: tuple[Any, ...]) -> None:
    """Raises ValueError if a field of `source` is present with a value other than the allowed ones."""
    if source.get(name, allowed[0]) not in allowed:
        _reject(name, source[name], f"one of {list(allowed)}, the only ones of this Llama")


def _field(source: Mapping[str, Any], name: str) -> Any:
    if source.get(name) is None:
        raise ValueError(f"config.json: {name} is missing; a Llama configuration must give it")
    return source[name]


def _rope_from_huggingface(source: Mapping[str, Any]) -> tuple[float, Llama3RopeScaling | None]:
    """Reads `rope_theta` and scaling as transformers 5 (`rope_parameters`) and 4 (`rope_scaling`) write them."""
    scaling = source.get("rope_parameters") or source.get("rope_scaling") or {}
    theta = scaling.get("rope_theta", source.get("rope_theta", 10000.0))
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    _only(scaling, "partial_rotary_factor", (1.0,))
    if rope_type == "default":
        return float(theta), None
    if rope_type != "llama3":
        _reject("rope_type", rope_type, "'default' or 'llama3'")
    return float(theta), Llama3RopeScaling(
        factor=_field(scaling, "factor"),
        low_freq_factor=_field(scaling, "low_freq_factor"),
        high_freq_factor=_field(scaling, "high_freq_factor"),
        original_max_position=_field(scaling, "original_max_position_embeddings"),
    )


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


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
    for architecture in source.get("architectures") or ("LlamaForCausalLM",):
        _only({"architectures": architecture}, "architectures", ("LlamaForCausalLM",))
    _only(source, "hidden_act", ("silu", "swish"))
    _only(source, "attention_bias", (False,))
    _only(source, "mlp_bias", (False,))
    _only(source, "quantization_config", (None,))
    theta, scaling = _rope_from_huggingface(source)
    num_heads = _field(source, "num_attention_heads")
    hidden_size = _field(source, "hidden_size")
    return LlamaConfig(
        num_layers=_field(source, "num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=_field(source, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=source.get("num_key_value_heads") or num_heads,
        head_dim=source.get("head_dim") or hidden_size // num_heads,
        vocab_size=_field(source, "vocab_size"),
        max_position=source.get("max_position_embeddings", 2048),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=float(source.get("rms_norm_eps", 1e-6)),
        tie_embeddings=source.get("tie_word_embeddings", False),
        bos_token_id=source.get("bos_token_id"),
        eos_token_ids=_token_ids(source.get("eos_token_id")),
    )
