"""Weights from a Hugging Face folder: `config.json` and one or many `.safetensors`, read straight onto the devices."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from tree_attn.models.llama.checkpoint.reading import CheckpointError, blaming, read_json, shortened
from tree_attn.models.llama.checkpoint.safetensors import Tensor, read_header
from tree_attn.models.llama.config import LlamaConfig
from tree_attn.models.llama.families import from_huggingface
from tree_attn.models.llama.parameters import (
    Create,
    Index,
    Parameter,
    checkpoint_places,
    checkpoint_shape,
    from_slices,
    picked_shape,
)
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
    "layers.attention.query_bias": "model.layers.{layer}.self_attn.q_proj.bias",
    "layers.attention.key_bias": "model.layers.{layer}.self_attn.k_proj.bias",
    "layers.attention.value_bias": "model.layers.{layer}.self_attn.v_proj.bias",
    "layers.attention.query_norm.scale": "model.layers.{layer}.self_attn.q_norm.weight",
    "layers.attention.key_norm.scale": "model.layers.{layer}.self_attn.k_norm.weight",
    "layers.attention.output": "model.layers.{layer}.self_attn.o_proj.weight",
    "layers.mlp_norm.scale": "model.layers.{layer}.post_attention_layernorm.weight",
    "layers.mlp.gate": "model.layers.{layer}.mlp.gate_proj.weight",
    "layers.mlp.up": "model.layers.{layer}.mlp.up_proj.weight",
    "layers.mlp.down": "model.layers.{layer}.mlp.down_proj.weight",
}

# Those of a model with norms before and after, where `post_attention_layernorm` is what it says.
_POST_NORM_NAMES = {
    "layers.attention_post_norm.scale": "model.layers.{layer}.post_attention_layernorm.weight",
    "layers.mlp_norm.scale": "model.layers.{layer}.pre_feedforward_layernorm.weight",
    "layers.mlp_post_norm.scale": "model.layers.{layer}.post_feedforward_layernorm.weight",
}


# The beginning of those names where the text model is a part of a model that reads images too.
_TEXT_PART = "language_model."

CONFIG, INDEX = "config.json", "model.safetensors.index.json"


def read_config(folder: Path) -> LlamaConfig:
    """Reads the configuration in `folder/config.json`.

    Raises:
      CheckpointError: the file is missing, is no JSON object, or describes another model (`config.from_huggingface`).
    """
    source = read_json(folder / CONFIG)
    with blaming(CONFIG):
        return from_huggingface(source)


def find_tensors(folder: Path) -> dict[str, Tensor]:
    """Finds every tensor of a folder by name, from its index if it has one, else from all its `.safetensors` files.

    Raises:
      CheckpointError: no such files, an index that names a file outside the folder or a tensor that its file lacks, a
        tensor in two files, or a damaged file.
    """
    if (folder / INDEX).is_file():
        return _indexed_tensors(folder, read_json(folder / INDEX).get("weight_map"))
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise CheckpointError(f"no .safetensors file in {folder}; weights in other formats are not read")
    tensors: dict[str, Tensor] = {}
    for path in paths:
        for name, tensor in read_header(path).items():
            if name in tensors:
                raise CheckpointError(f"tensor {shortened(name)} is in both {tensors[name].path.name} and {path.name}")
            tensors[name] = tensor
    return tensors


def _indexed_tensors(folder: Path, weight_map: Any) -> dict[str, Tensor]:
    if not isinstance(weight_map, dict) or not all(isinstance(value, str) for value in weight_map.values()):
        raise CheckpointError(f"{INDEX}: weight_map must be an object of tensor name to file name")
    headers = {}
    for file_name in sorted(set(weight_map.values())):
        # Checked as written rather than resolved: download caches keep symbolic links to files elsewhere.
        written = PurePosixPath(file_name)
        if written.is_absolute() or ".." in written.parts:
            raise CheckpointError(f"{INDEX}: '{shortened(file_name)}' leads out of the folder")
        with blaming(INDEX, f"weight_map names '{shortened(file_name)}': "):
            is_there = (folder / written).is_file()
        if not is_there:
            raise CheckpointError(f"{INDEX} names {shortened(file_name)}, which is missing from {folder}")
        headers[file_name] = read_header(folder / written)
    for name, file_name in weight_map.items():
        if name not in headers[file_name]:
            raise CheckpointError(
                f"{shortened(file_name)}: tensor {shortened(name)} is missing; {INDEX} says that it is here"
            )
    return {name: headers[file_name][name] for name, file_name in weight_map.items()}


class SafetensorsFolder:
    """The weights of a Hugging Face folder: its tensors by name, checked and read as the model's parameters.

    Raises:
      CheckpointError: as `read_config` and `find_tensors`; or there is a bias that the model has not, whose sum would
        be missing from the results.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.tensors = find_tensors(folder)
        config = read_config(folder)
        names = TENSOR_NAMES | (_POST_NORM_NAMES if config.post_norms else {})
        part = _TEXT_PART if _TEXT_PART + names["embedding"] in self.tensors else ""
        self._names = {parameter: part + name for parameter, name in names.items()}
        of_text = {name: tensor.path.name for name, tensor in self.tensors.items() if name.startswith(part)}
        check_biases(of_text, config, biases_of(TENSOR_NAMES))

    def check(self, parameter: Parameter, layer: int | None) -> None:
        """Raises CheckpointError if a parameter's tensor is missing, or has another shape or no float dtype."""
        name = self._names[parameter.name].format(layer=layer)
        if name not in self.tensors:
            files = sorted({tensor.path.name for tensor in self.tensors.values()})
            place = INDEX if (self.folder / INDEX).is_file() else ", ".join(files[:3]) + ", ..." * (len(files) > 3)
            raise CheckpointError(f"{place}: tensor {name} is missing from {self.folder}; {CONFIG} needs it")
        tensor = self.tensors[name]
        check_shape(tensor.path.name, name, tensor.shape, parameter, CONFIG)
        tensor.check_dtype()

    def read(self, parameter: Parameter, layer: int | None, index: Index) -> np.ndarray:
        """Reads a slice of a parameter's tensor; see `parameters.from_slices`."""
        self.check(parameter, layer)
        tensor = self.tensors[self._names[parameter.name].format(layer=layer)]
        runs = [_runs(places) for places in checkpoint_places(parameter, index)]
        pieces = [tensor.read(run) for run in itertools.product(*runs)]
        if len(pieces) > 1:
            columns = len(runs[-1])
            rows = [pieces[i : i + columns] for i in range(0, len(pieces), columns)]
            pieces = [np.concatenate([np.concatenate(row, -1) for row in rows])]
        return pieces[0].reshape(picked_shape(parameter, index))


def biases_of(tensor_names: Mapping[str, str]) -> tuple[str, ...]:
    """Returns what the names of biases end in, among a format's names of the model's parameters."""
    return tuple(name.rpartition("{layer}")[2] for name in tensor_names.values() if name.endswith(".bias"))


def check_biases(files: Mapping[str, str], config: LlamaConfig, biases: tuple[str, ...]) -> None:
    """Raises CheckpointError for a bias that the model has not.

    Args:
      files: the file of each tensor.
      config: of the model.
      biases: ends of the names of the biases of query, key and value; see `biases_of`.
    """
    for name, file_name in files.items():
        if name.endswith(".bias") and not (config.query_key_value_bias and name.endswith(biases)):
            raise CheckpointError(f"{file_name}: unexpected tensor {shortened(name)}; this model has no such bias")


def _runs(places: np.ndarray) -> list[slice]:
    """Returns ascending places as slices of neighbours."""
    return [slice(int(run[0]), int(run[-1]) + 1) for run in np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)]


def from_safetensors(
    folder: Path | SafetensorsFolder,
    sharding: LlamaSharding,
    dtype: DTypeLike,
    on_bytes: Callable[[int], None] | None = None,
) -> Create:
    """Returns a source that reads the `.safetensors` of a Hugging Face folder; see `parameters.from_slices`.

    Raises:
      CheckpointError: as `SafetensorsFolder`; or, when a parameter is created, its tensor is missing or has another
        shape.

    Example:
      >>> model = Llama(read_config(folder), sharding, from_safetensors(folder, sharding, jnp.bfloat16))
    """
    files = SafetensorsFolder(folder) if isinstance(folder, Path) else folder
    return from_slices(sharding, dtype, files.read, on_bytes, files.check)


def check_shape(
    file_name: str, name: str, shape: Iterable[int], parameter: Parameter, config: str = "the configuration"
) -> None:
    """Raises CheckpointError unless a file's tensor has the shape that the configuration asks for."""
    expected = checkpoint_shape(parameter)
    if tuple(shape) != expected:
        raise CheckpointError(f"{file_name}: tensor {name} has shape {list(shape)}; {config} needs {list(expected)}")
