"""GGUF files: weights and configuration, through the `gguf` package. Quantized tensors are dequantized."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from tree_attn.models.llama.checkpoint.huggingface import check_shape
from tree_attn.models.llama.checkpoint.safetensors import CheckpointError
from tree_attn.models.llama.config import Llama3RopeScaling, LlamaConfig
from tree_attn.models.llama.parameters import Create, Index, Parameter, from_slices
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


class GGUFFile:
    """A GGUF file: its metadata by key and its tensors by name.

    Raises:
      ImportError: the `gguf` package is not installed.
      CheckpointError: the file is not GGUF, or is truncated.
    """

    def __init__(self, path: Path):
        try:
            import gguf
        except ImportError:
            raise ImportError(f"reading {path.name} needs the gguf package: pip install 'tree-attn[demo]'") from None
        try:
            reader = gguf.GGUFReader(path)
        except (ValueError, KeyError, IndexError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path.name}: truncated or not GGUF: {error}") from None
        self.path = path
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._fields = reader.fields
        self._dequantize = gguf.quants.dequantize

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a metadata value as Python objects."""
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        """Returns a metadata value; raises CheckpointError if it is missing."""
        if key not in self._fields:
            raise CheckpointError(f"{self.path.name}: metadata {key} is missing")
        return self.get(key)

    def rows(self, name: str, rows: slice | np.ndarray) -> np.ndarray:
        """Reads rows of a tensor as float32. Quantization blocks lie within rows, so each row can be read alone."""
        tensor = self.tensors[name]
        return self._dequantize(tensor.data[rows], tensor.tensor_type)


def read_config(file: GGUFFile) -> LlamaConfig:
    """Reads the configuration in a GGUF file's metadata.

    Raises:
      CheckpointError: another architecture than `llama`, experts, a partial rotary dimension, or a missing key.
    """
    architecture = file.require("general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"{file.path.name}: general.architecture must be 'llama', got {architecture!r}")
    if file.get("llama.expert_count", 0):
        raise CheckpointError(f"{file.path.name}: llama.expert_count: mixtures of experts are not supported")
    num_heads, hidden_size = file.require("llama.attention.head_count"), file.require("llama.embedding_length")
    head_dim = file.get("llama.attention.key_length", hidden_size // num_heads)
    rotary_dim = file.get("llama.rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        raise CheckpointError(
            f"{file.path.name}: llama.rope.dimension_count must be {head_dim}, the head's dimension, got {rotary_dim}"
        )
    theta = float(file.get("llama.rope.freq_base", 10000.0))
    bos, eos = file.get("tokenizer.ggml.bos_token_id"), file.get("tokenizer.ggml.eos_token_id")
    return LlamaConfig(
        num_layers=file.require("llama.block_count"),
        hidden_size=hidden_size,
        intermediate_size=file.require("llama.feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=file.get("llama.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=file.get("llama.vocab_size") or len(file.require("tokenizer.ggml.tokens")),
        max_position=file.require("llama.context_length"),
        rope_theta=theta,
        rope_scaling=_rope_scaling(file, theta, head_dim),
        rms_norm_eps=file.require("llama.attention.layer_norm_rms_epsilon"),
        tie_embeddings="output.weight" not in file.tensors,
        bos_token_id=bos,
        eos_token_ids=() if eos is None else (eos,),
    )


def _rope_scaling(file: GGUFFile, theta: float, head_dim: int) -> Llama3RopeScaling | None:
    """Finds the `llama3` scaling that made the table of divisors which GGUF stores; raises if there is none."""
    scaling_type = file.get("llama.rope.scaling.type", "none")
    if scaling_type != "none":
        raise CheckpointError(
            f"{file.path.name}: llama.rope.scaling.type must be 'none' or absent, got {scaling_type!r}"
        )
    if "rope_freqs.weight" not in file.tensors:
        return None
    divisors = file.rows("rope_freqs.weight", slice(None))
    scaling = Llama3RopeScaling(factor=float(divisors.max()))
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if divisors.shape != frequencies.shape or not np.allclose(
        divisors, frequency_divisors(frequencies, scaling), rtol=1e-4
    ):
        raise CheckpointError(f"{file.path.name}: rope_freqs.weight is not the scaling that Llama 3.1 and 3.2 use")
    return scaling


def from_gguf(
    file: GGUFFile, sharding: LlamaSharding, dtype: DTypeLike, on_bytes: Callable[[int], None] | None = None
) -> Create:
    """Returns a source that reads and dequantizes a GGUF file; see `parameters.from_slices`.

    Raises:
      CheckpointError: when a parameter is created, its tensor is missing or has another shape.
    """

    def read(parameter: Parameter, layer: int | None, index: Index) -> np.ndarray:
        name = TENSOR_NAMES[parameter.name].format(layer=layer)
        if name not in file.tensors:
            raise CheckpointError(f"{file.path.name}: tensor {name} is missing")
        # GGUF lists the fastest dimension first.
        check_shape(file.path.name, name, [int(size) for size in reversed(file.tensors[name].shape)], parameter)
        first = int(parameter.is_stacked)
        shape, axes = parameter.shape[first:], parameter.axes[first:]
        num_row_axes = axes.index("embed") or 1  # the axes before `embed` make up its rows, or `embed` itself
        order = np.arange(math.prod(shape[:num_row_axes])).reshape(shape[:num_row_axes])
        rows = (_halves(order) if parameter.name in _ROTATED else order)[index[:num_row_axes]]
        data = file.rows(name, rows.reshape(-1)).reshape(*rows.shape, *shape[num_row_axes:])
        return data[(..., *index[num_row_axes:])]

    return from_slices(sharding, dtype, read, on_bytes)


def _halves(rows: np.ndarray) -> np.ndarray:
    """Reorders rows `[..., H]` with rotary pairs next to each other: half a head apart, as `rope.apply_rotation`."""
    return rows.reshape(*rows.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(rows.shape)
