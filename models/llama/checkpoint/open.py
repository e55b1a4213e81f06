"""A checkpoint on disk: its format, configuration, weights and tokenizer."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tree_attn.models.llama.checkpoint import gguf, gguf_tokenizer, huggingface, tokenizer
from tree_attn.models.llama.checkpoint.reading import blaming
from tree_attn.models.llama.checkpoint.tokenizer import Tokenizer
from tree_attn.models.llama.config import LlamaConfig
from tree_attn.models.llama.model import Llama
from tree_attn.models.llama.parameters import CheckTensor, Create, abstract, checked, moved
from tree_attn.models.llama.sharding import LlamaSharding

MakeCreate = Callable[[LlamaSharding, DTypeLike, Callable[[int], None] | None], Create]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model on disk: its configuration and tokenizer, and a source of its weights.

    Example:
      >>> checkpoint = open_checkpoint(hub.resolve("smollm2"))
      >>> model = checkpoint.load(spread_over(checkpoint.config, mesh), jnp.float32)
    """

    config: LlamaConfig
    tokenizer: Tokenizer
    make_create: MakeCreate

    def load(
        self, sharding: LlamaSharding, dtype: DTypeLike, on_bytes: Callable[[int], None] | None = None,
        products: str | None = "xla",
    ) -> Llama:  # fmt: skip
        """Reads the weights onto the devices of `sharding`, stored as `dtype`; `products` are the model's."""
        return Llama(self.config, sharding, self.make_create(sharding, dtype, on_bytes), products=products)

    def num_bytes(self, dtype: DTypeLike) -> int:
        """Returns the bytes of all weights, each counted once: the total of a progress bar over `load`."""
        return num_parameters(self.config) * jnp.dtype(dtype).itemsize


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a Hugging Face folder or a GGUF file; reads headers, configuration and tokenizer, but no weights.

    Every tensor that the configuration asks for is looked for, with its shape.

    Raises:
      CheckpointError: a file is missing, damaged, or of another model than this Llama; the message names the file.
      ImportError: a package that the format needs is not installed.
    """
    with blaming(path.name):
        is_folder = path.is_dir()
    if is_folder:
        config = huggingface.read_config(path)
        files = huggingface.SafetensorsFolder(path)
        _check_tensors(config, files.check)
        return Checkpoint(
            config=config,
            tokenizer=tokenizer.from_folder(path, config.eos_token_ids),
            make_create=functools.partial(huggingface.from_safetensors, files),
        )
    file = gguf.GGUFFile(path)
    config = gguf.read_config(file)
    _check_tensors(config, file.check)
    return Checkpoint(
        config=config, tokenizer=gguf_tokenizer.from_gguf(file), make_create=functools.partial(gguf.from_gguf, file)
    )


def _check_tensors(config: LlamaConfig, check: CheckTensor) -> None:
    """Calls `check(parameter, layer)` for every tensor of a checkpoint that the model's parameters are made of."""
    Llama(config, None, checked(check), unroll_layers=False)


def move(model: Llama, sharding: LlamaSharding) -> Llama:
    """Copies a model to the devices of another sharding."""
    return Llama(model.config, sharding, moved(model, sharding))


def num_parameters(config: LlamaConfig) -> int:
    """Returns the number of weights of the model."""
    model = Llama(config, None, abstract(None, jnp.float32), unroll_layers=False)
    return sum(array.size for array in jax.tree.leaves(nnx.state(model)))
