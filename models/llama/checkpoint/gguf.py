"""GGUF files: weights and configuration. Quantized tensors are dequantized by the `gguf` package."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from tree_attn.extras import how_to_install
from tree_attn.models.llama.checkpoint.gguf_layout import GGUFTensor, Layout
from tree_attn.models.llama.checkpoint.huggingface import check_shape
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
    "layers.attention.output": "blk.{layer}.attn_output.weight",
    "layers.mlp_norm.scale": "blk.{layer}.ffn_norm.weight",
    "layers.mlp.gate": "blk.{layer}.ffn_gate.weight",
    "layers.mlp.up": "blk.{layer}.ffn_up.weight",
    "layers.mlp.down": "blk.{layer}.ffn_down.weight",
}

# Rows of these tensors are in the order of the original checkpoints, rotary pairs next to each other.
_ROTATED = ("layers.attention.query", "layers.attention.key")


# The metadata keys of the fields of a configuration.
_KEYS = {
    "num_layers": "llama.block_count",
    "hidden_size": "llama.embedding_length",
    "intermediate_size": "llama.feed_forward_length",
    "num_heads": "llama.attention.head_count",
    "num_kv_heads": "llama.attention.head_count_kv",
    "head_dim": "llama.attention.key_length",
    "vocab_size": "llama.vocab_size",
    "max_position": "llama.context_length",
    "rope_theta": "llama.rope.freq_base",
    "rms_norm_eps": "llama.attention.layer_norm_rms_epsilon",
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
        if parameter.name in _ROTATED:
            sizes = checkpoint_shape(parameter)[0], parameter.shape[-2]
            rows = _halves(np.arange(sizes[0]).reshape(-1, sizes[1])).reshape(-1)[rows]
        data = self.rows(TENSOR_NAMES[parameter.name].format(layer=layer), rows)
        if columns and columns[0].size != data.shape[-1]:
            data = data[:, columns[0]]
        return data.reshape(picked_shape(parameter, index))


def read_config(file: GGUFFile) -> LlamaConfig:
    """Reads the configuration in a GGUF file's metadata.

    Raises:
      CheckpointError: another architecture than `llama`, experts, a partial rotary dimension, a missing key, or a value
        of another type or out of range; the message names the file and the key.
    """
    with blaming(file.path.name):
        return _read_config(file)


def _read_config(file: GGUFFile) -> LlamaConfig:
    architecture = file.require("general.architecture")
    if architecture != "llama":
        raise ValueError(f"general.architecture must be 'llama', got {architecture!r:.200}")
    if file.get("llama.expert_count", 0) != 0:
        raise ValueError("llama.expert_count: mixtures of experts are not supported")
    num_heads, hidden_size = file.require(_KEYS["num_heads"]), file.require(_KEYS["hidden_size"])
    require_positive_int(_KEYS["num_heads"], num_heads)
    require_positive_int(_KEYS["hidden_size"], hidden_size)
    eos = file.get(_KEYS["eos_token_ids"])
    values = dict(
        num_layers=file.require(_KEYS["num_layers"]),
        hidden_size=hidden_size,
        intermediate_size=file.require(_KEYS["intermediate_size"]),
        num_heads=num_heads,
        num_kv_heads=file.get(_KEYS["num_kv_heads"], num_heads),
        head_dim=file.get(_KEYS["head_dim"], hidden_size // num_heads),
        vocab_size=_vocab_size(file),
        max_position=file.require(_KEYS["max_position"]),
        rope_theta=file.get(_KEYS["rope_theta"], 10000.0),
        rms_norm_eps=file.require(_KEYS["rms_norm_eps"]),
        tie_embeddings="output.weight" not in file.tensors,
        bos_token_id=file.get(_KEYS["bos_token_id"]),
        eos_token_ids=() if eos is None else (eos,),
    )
    config = from_values(values, _KEYS)
    rotary_dim = file.get("llama.rope.dimension_count", config.head_dim)
    if rotary_dim != config.head_dim:
        raise ValueError(
            f"llama.rope.dimension_count must be {config.head_dim}, the head's dimension, got {rotary_dim!r:.200}"
        )
    return dataclasses.replace(config, rope_scaling=_rope_scaling(file, config.rope_theta, config.head_dim))


def _vocab_size(file: GGUFFile) -> Any:
    size = file.get(_KEYS["vocab_size"])
    return file.count("tokenizer.ggml.tokens") if size is None else size


def _rope_scaling(file: GGUFFile, theta: float, head_dim: int) -> Llama3RopeScaling | None:
    """Finds the `llama3` scaling that made the table of divisors which GGUF stores; raises if there is none."""
    scaling_type = file.get("llama.rope.scaling.type", "none")
    if scaling_type != "none":
        raise ValueError(f"llama.rope.scaling.type must be 'none' or absent, got {scaling_type!r:.200}")
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
