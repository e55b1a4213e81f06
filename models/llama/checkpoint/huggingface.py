"""Weights from a Hugging Face folder: `config.json` and one or many `.safetensors`, read straight onto the devices."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from tree_attn.models.llama.checkpoint.safetensors import CheckpointError, Tensor, read_header
from tree_attn.models.llama.config import LlamaConfig, from_huggingface
from tree_attn.models.llama.parameters import Create, Index, Parameter, checkpoint_shape, from_slices
from tree_attn.models.llama.sharding import LlamaSharding

# The tensor of a Hugging Face checkpoint for each parameter of the model.
TENSOR_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm.scale": "model.norm.weight",
    "head": "lm_head.weight",
    "layers.attention_norm.scale": "model.layers.{layer}.input_layernorm.weight",
    "layers.attention.query": "model.layers.{layer}.self_attn.q_proj.weight",
    "layers.attention.key": "model.layers.{layer}.self_attn.k_proj.weight",
    "layers.attention.value": "model.layers.{layer}.self_attn.v_proj.weight",
    "layers.attention.output": "model.layers.{layer}.self_attn.o_proj.weight",
    "layers.mlp_norm.scale": "model.layers.{layer}.post_attention_layernorm.weight",
    "layers.mlp.gate": "model.layers.{layer}.mlp.gate_proj.weight",
    "layers.mlp.up": "model.layers.{layer}.mlp.up_proj.weight",
    "layers.mlp.down": "model.layers.{layer}.mlp.down_proj.weight",
}


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file; raises CheckpointError that names the file."""
    if not path.is_file():
        raise CheckpointError(f"{path.name} is missing from {path.parent}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path.name}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path.name}: must hold a JSON object")
    return content


def read_config(folder: Path) -> LlamaConfig:
    """Reads the configuration in `folder/config.json`; raises as `config.from_huggingface`."""
    return from_huggingface(read_json(folder / "config.json"))


def find_tensors(folder: Path) -> dict[str, Tensor]:
    """Finds every tensor of a folder by name, from its index if it has one, else from all its `.safetensors` files.

    Raises:
      CheckpointError: no such files, an index that names a file outside the folder or a tensor that its file lacks, a
        tensor in two files, or a damaged file.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return _indexed_tensors(folder, read_json(index).get("weight_map"))
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise CheckpointError(f"no .safetensors file in {folder}; weights in other formats are not read")
    tensors: dict[str, Tensor] = {}
    for path in paths:
        for name, tensor in read_header(path).items():
            if name in tensors:
                raise CheckpointError(f"tensor {name} is in both {tensors[name].path.name} and {path.name}")
            tensors[name] = tensor
    return tensors


def _indexed_tensors(folder: Path, weight_map: Any) -> dict[str, Tensor]:
    if not isinstance(weight_map, dict):
        raise CheckpointError("model.safetensors.index.json: weight_map must be an object of tensor name to file name")
    headers = {}
    for file_name in sorted(set(weight_map.values())):
        # Checked as written rather than resolved: download caches keep symbolic links to files elsewhere.
        written = PurePosixPath(file_name)
        if written.is_absolute() or ".." in written.parts:
            raise CheckpointError(f"model.safetensors.index.json: {file_name!r} leads out of the folder")
        if not (folder / written).is_file():
            raise CheckpointError(f"model.safetensors.index.json names {file_name}, which is missing from {folder}")
        headers[file_name] = read_header(folder / written)
    for name, file_name in weight_map.items():
        if name not in headers[file_name]:
            raise CheckpointError(f"{file_name}: tensor {name} is missing; the index says that it is here")
    return {name: headers[file_name][name] for name, file_name in weight_map.items()}


def from_safetensors(
    folder: Path, sharding: LlamaSharding, dtype: DTypeLike, on_bytes: Callable[[int], None] | None = None
) -> Create:
    """Returns a source that reads the `.safetensors` of a Hugging Face folder; see `parameters.from_slices`.

    Raises:
      CheckpointError: as `find_tensors`; or, when a parameter is created, its tensor is missing or has another shape.

    Example:
      >>> model = Llama(read_config(folder), sharding, from_safetensors(folder, sharding, jnp.bfloat16))
    """
    tensors = find_tensors(folder)
    _refuse_biases(tensors)

    def read(parameter: Parameter, layer: int | None, index: Index) -> np.ndarray:
        name = TENSOR_NAMES[parameter.name].format(layer=layer)
        if name not in tensors:
            raise CheckpointError(f"tensor {name} is missing from {folder}")
        check_shape(tensors[name].path.name, name, tensors[name].shape, parameter)
        shape = parameter.shape[1:] if parameter.is_stacked else parameter.shape
        return tensors[name].array().reshape(shape)[index]

    return from_slices(sharding, dtype, read, on_bytes)


def check_shape(file_name: str, name: str, shape: Iterable[int], parameter: Parameter) -> None:
    """Raises CheckpointError unless a file's tensor has the shape that the configuration asks for."""
    expected = checkpoint_shape(parameter)
    if tuple(shape) != expected:
        raise CheckpointError(
            f"{file_name}: tensor {name} has shape {list(shape)}; the configuration needs {list(expected)}"
        )


def _refuse_biases(tensors: dict[str, Tensor]) -> None:
    """Raises CheckpointError for biases: such a checkpoint would load without complaint and compute something else."""
    for name, tensor in tensors.items():
        if name.endswith(".bias"):
            raise CheckpointError(f"{tensor.path.name}: unexpected tensor {name}; this Llama has no biases")
