"""GGUF files: weights and configuration. Quantized tensors are dequantized by the `gguf` package."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from tree_attn.extras import how_to_install
from tree_attn.models.llama.checkpoint.gguf_layout import GGUFTensor, Layout
from tree_attn.models.llama.checkpoint.huggingface import biases_of, check_biases, check_shape
from tree_attn.models.llama.checkpoint.reading import CheckpointError, blaming
from tree_attn.models.llama.config import Llama3RopeScaling, LlamaConfig, from_values, require_positive_int
from tree_attn.models.llama.parameters import (
    Create,
    Index,
    Parameter,
    checkpoint_places,
    checkpoint_shape,
    from_slices,
    picked_shape,
)
from tree_attn.models.llama.rope import frequency_divisors
from tree_attn.models.llama.sharding import LlamaSharding

TENSOR_NAMES = {
    "embedding": "token_embd.weight",
    "final_norm.scale": "output_norm.weight",
    "head": "output.weight",
    "layers.attention_norm.scale": "blk.{layer}.attn_norm.weight",
    "layers.attention.query": "blk.{layer}.attn_q.weight",
    "layers.attention.key": "blk.{layer}.attn_k.weight",
    "layers.attention.value": "blk.{layer}.attn_v.weight",
    "layers.attention.query_bias": "blk.{layer}.attn_q.bias",
    "layers.attention.key_bias": "blk.{layer}.attn_k.bias",
    "layers.attention.value_bias": "blk.{layer}.attn_v.bias",
    "layers.attention.query_norm.scale": "blk.{layer}.attn_q_norm.weight",
    "layers.attention.key_norm.scale": "blk.{layer}.attn_k_norm.weight",
    "layers.attention.output": "blk.{layer}.attn_output.weight",
    "layers.mlp_norm.scale": "blk.{layer}.ffn_norm.weight",
    "layers.mlp.gate": "blk.{layer}.ffn_gate.weight",
    "layers.mlp.up": "blk.{layer}.ffn_up.weight",
    "layers.mlp.down": "blk.{layer}.ffn_down.weight",
}

# In files of these architectures, rows of these tensors have rotary pairs next to each other, as the original weights.
_ROTATED, _ROTATES = ("layers.attention.query", "layers.attention.key"), ("llama",)

# What each architecture adds to a Llama.
_FAMILIES: dict[str, dict[str, bool]] = {
    "llama": {},
    "qwen2": {"query_key_value_bias": True},
    "qwen3": {"query_key_norm": True},
}

# The metadata keys of the fields of a configuration, for the architecture `{0}`.
_KEYS = {
    "num_layers": "{0}.block_count",
    "hidden_size": "{0}.embedding_length",
    "intermediate_size": "{0}.feed_forward_length",
    "num_heads": "{0}.attention.head_count",
    "num_kv_heads": "{0}.attention.head_count_kv",
    "head_dim": "{0}.attention.key_length",
    "vocab_size": "{0}.vocab_size",
    "max_position": "{0}.context_length",
    "rope_theta": "{0}.rope.freq_base",
    "window": "{0}.attention.sliding_window",
    "rms_norm_eps": "{0}.attention.layer_norm_rms_epsilon",
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_ids": "tokenizer.ggml.eos_token_id",
}


class GGUFFile:
    """A GGUF file: its metadata by key and its tensors by name.

    Raises:
      ImportError: the `gguf` package is not installed.
      CheckpointError: the file is not GGUF, is truncated, or breaks the format; nothing is read beyond its end.
    """

    def __init__(self, path: Path):
        try:
            import gguf
        except ImportError:
            raise ImportError(f"reading {path.name} needs the gguf package: {how_to_install('demo')}") from None
        with blaming(path.name, "damaged, truncated or not GGUF: "):
            num_bytes = path.stat().st_size
            data = np.memmap(path, np.uint8, mode="r") if num_bytes else np.empty(0, np.uint8)
            self._layout = Layout(data, gguf)
        self.path = path
        self.tensors = self._layout.tensors
        self._dequantize = gguf.quants.dequantize
        self._known: dict[Any, bool] = {}

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a metadata value as Python objects."""
        if key not in self._layout.values:
            return default
        with blaming(self.path.name):
            return self._layout.get(key)

    def require(self, key: str) -> Any:
        """Returns a metadata value; raises CheckpointError if it is missing."""
        if key not in self._layout.values:
            raise CheckpointError(f"{self.path.name}: metadata {key} is missing")
        return self.get(key)

    def count(self, key: str) -> int:
        """Returns the length of a metadata array; raises CheckpointError if it is missing, or no array."""
        if key not in self._layout.values or self._layout.values[key].element_type is None:
            raise CheckpointError(f"{self.path.name}: metadata {key} must be an array")
        return self._layout.values[key].count

    def data(self, name: str) -> np.ndarray:
        """Returns a view of a tensor's bytes, uint8 `[rows, bytes of a row]`."""
        tensor = self.tensors[name]
        return self._layout.data[tensor.start : tensor.stop].reshape(tensor.num_rows, -1)

    def rows(self, name: str, rows: slice | np.ndarray) -> np.ndarray:
        """Reads rows of a tensor as float32. Quantization blocks lie within rows, so each row can be read alone.

        Of a tensor of one dimension each number is a row.
        """
        tensor = self.tensors[name]
        if len(tensor.shape) == 1:
            return self._dequantize(self.data(name), tensor.tensor_type)[0][rows]
        return self._dequantize(self.data(name)[rows], tensor.tensor_type)

    def check(self, parameter: Parameter, layer: int | None) -> None:
        """Raises CheckpointError if a parameter's tensor is missing, or has another shape or a type of no floats."""
        name = TENSOR_NAMES[parameter.name].format(layer=layer)
        if name not in self.tensors:
            raise CheckpointError(f"{self.path.name}: tensor {name} is missing")
        tensor = self.tensors[name]
        check_shape(self.path.name, name, tensor.shape, parameter)
        if not self._is_known(tensor):
            raise CheckpointError(
                f"{self.path.name}: tensor {name} has type {tensor.tensor_type.name}, which cannot be dequantized"
            )

    def _is_known(self, tensor: GGUFTensor) -> bool:
        """Returns whether the package dequantizes the tensor's type; of each type it does so for one row."""
        if tensor.tensor_type not in self._known:
            try:
                self._dequantize(self.data(tensor.name)[:1], tensor.tensor_type)
                self._known[tensor.tensor_type] = True
            except NotImplementedError:
                self._known[tensor.tensor_type] = False
        return self._known[tensor.tensor_type]

    def read(self, parameter: Parameter, layer: int | None, index: Index) -> np.ndarray:
        """Reads a slice of a parameter's tensor as float32; see `parameters.from_slices`."""
        self.check(parameter, layer)
        rows, *columns = checkpoint_places(parameter, index)
        if parameter.name in _ROTATED and self.get("general.architecture") in _ROTATES:
            sizes = checkpoint_shape(parameter)[0], parameter.shape[-2]
            rows = _halves(np.arange(sizes[0]).reshape(-1, sizes[1])).reshape(-1)[rows]
        data = self.rows(TENSOR_NAMES[parameter.name].format(layer=layer), rows)
        if columns and columns[0].size != data.shape[-1]:
            data = data[:, columns[0]]
        return data.reshape(picked_shape(parameter, index))


def read_config(file: GGUFFile) -> LlamaConfig:
    """Reads the configuration in a GGUF file's metadata.

    Raises:
      CheckpointError: an architecture that is none of `llama`, `qwen2` and `qwen3`, experts, a window in a Qwen, a bias
        that the model has not, a partial rotary dimension, a missing key, or a value of another type or out of range;
        the message names the file and the key.
    """
    with blaming(file.path.name):
        return _read_config(file)


def _read_config(file: GGUFFile) -> LlamaConfig:
    architecture = file.require("general.architecture")
    if file.get(f"{architecture}.expert_count", 0) != 0:
        raise ValueError(f"{architecture}.expert_count: mixtures of experts are not supported")
    if not isinstance(architecture, str) or architecture not in _FAMILIES:
        raise ValueError(f"general.architecture must be one of {list(_FAMILIES)}, got {architecture!r:.200}")
    keys = {field: key.format(architecture) for field, key in _KEYS.items()}
    window = file.get(keys["window"], 0)
    if window != 0 and architecture != "llama":  # the file does not say which layers have it
        raise ValueError(f"{keys['window']} must be 0 or absent, got {window!r:.200}")
    num_heads, hidden_size = file.require(keys["num_heads"]), file.require(keys["hidden_size"])
    require_positive_int(keys["num_heads"], num_heads)
    require_positive_int(keys["hidden_size"], hidden_size)
    eos, vocab_size = file.get(keys["eos_token_ids"]), file.get(keys["vocab_size"])
    values = dict(
        num_layers=file.require(keys["num_layers"]),
        hidden_size=hidden_size,
        intermediate_size=file.require(keys["intermediate_size"]),
        num_heads=num_heads,
        num_kv_heads=file.get(keys["num_kv_heads"], num_heads),
        head_dim=file.get(keys["head_dim"], hidden_size // num_heads),
        vocab_size=file.count("tokenizer.ggml.tokens") if vocab_size is None else vocab_size,
        max_position=file.require(keys["max_position"]),
        rope_theta=file.get(keys["rope_theta"], 10000.0),
        window=None if window == 0 else window,
        rms_norm_eps=file.require(keys["rms_norm_eps"]),
        tie_embeddings="output.weight" not in file.tensors,
        bos_token_id=file.get(keys["bos_token_id"]),
        eos_token_ids=() if eos is None else (eos,),
        **_FAMILIES[architecture],
    )
    config = from_values(values, keys)
    rotary_dim = file.get(f"{architecture}.rope.dimension_count", config.head_dim)
    if rotary_dim != config.head_dim:
        key = f"{architecture}.rope.dimension_count"
        raise ValueError(f"{key} must be {config.head_dim}, the head's dimension, got {rotary_dim!r:.200}")
    check_biases(dict.fromkeys(file.tensors, file.path.name), config, biases_of(TENSOR_NAMES))
    scaling = _rope_scaling(file, f"{architecture}.rope.scaling.type", config.rope_theta, config.head_dim)
    return dataclasses.replace(config, rope_scaling=scaling)


def _rope_scaling(file: GGUFFile, type_key: str, theta: float, head_dim: int) -> Llama3RopeScaling | None:
    """Finds the `llama3` scaling that made the table of divisors which GGUF stores; raises if there is none."""
    scaling_type = file.get(type_key, "none")
    if scaling_type != "none":
        raise ValueError(f"{type_key} must be 'none' or absent, got {scaling_type!r:.200}")
    if "rope_freqs.weight" not in file.tensors:
        return None
    reason = "rope_freqs.weight is not the scaling that Llama 3.1 and 3.2 use"
    if file.tensors["rope_freqs.weight"].shape != (head_dim // 2,):
        raise ValueError(reason)
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    divisors = file.rows("rope_freqs.weight", slice(None))
    scaling = Llama3RopeScaling(factor=float(divisors.max()))
    if not np.allclose(divisors, frequency_divisors(frequencies, scaling), rtol=1e-4):
        raise ValueError(reason)
    return scaling


def from_gguf(
    file: GGUFFile, sharding: LlamaSharding, dtype: DTypeLike, on_bytes: Callable[[int], None] | None = None
) -> Create:
    """Returns a source that reads and dequantizes a GGUF file; see `parameters.from_slices`.

    Raises:
      CheckpointError: when a parameter is created, its tensor is missing or has another shape.
    """
    return from_slices(sharding, dtype, file.read, on_bytes, file.check)


def _halves(rows: np.ndarray) -> np.ndarray:
    """Reorders rows `[..., H]` with rotary pairs next to each other: half a head apart, as `rope.apply_rotation`."""
    return rows.reshape(*rows.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(rows.shape)
