"""A model from disk: finds which kind of checkpoint it is, and puts configuration, weights and tokenizer together."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
from jax.typing import DTypeLike

from tree_attn.models.llama.checkpoint import gguf, tokenizer
from tree_attn.models.llama.checkpoint import huggingface as weights
from tree_attn.models.llama.checkpoint.tokenizer import Tokenizer
from tree_attn.models.llama.config import LlamaConfig
from tree_attn.models.llama.model import Llama
from tree_attn.models.llama.parameters import Create, Parameter, moved
from tree_attn.models.llama.sharding import LlamaSharding

MakeCreate = Callable[[LlamaSharding, DTypeLike, Callable[[int], None] | None], Create]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model that lies on disk: its shape and tokenizer, and how to read its weights.

    Example:
      >>> checkpoint = open_checkpoint(hub.resolve("smollm2"))
      >>> model = checkpoint.load(spread_over(checkpoint.config, mesh), jnp.float32)
    """

    config: LlamaConfig
    tokenizer: Tokenizer
    make_create: MakeCreate

    def load(self, sharding: LlamaSharding, dtype: DTypeLike, on_bytes: Callable[[int], None] | None = None) -> Llama:
        """The model with its weights on the devices of `sharding`, stored as `dtype`."""
        return Llama(self.config, sharding, self.make_create(sharding, dtype, on_bytes))

    def num_bytes(self, dtype: DTypeLike) -> int:
        """Bytes of all weights, each counted once: the total of a progress bar over `load`."""
        return num_parameters(self.config) * jax.numpy.dtype(dtype).itemsize


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a Hugging Face folder or a GGUF file; reads headers, configuration and tokenizer, but no weights.

    Raises:
      CheckpointError: a file is missing or damaged.
      ValueError: a configuration that this Llama cannot be.
      ImportError: a package that the format needs is not installed.
    """
    if path.is_dir():
        config = weights.read_config(path)
        return Checkpoint(
            config=config,
            tokenizer=tokenizer.from_folder(path, config.eos_token_ids),
            make_create=lambda *where: weights.from_safetensors(path, *where),
        )
    file = gguf.GGUFFile(path)
    return Checkpoint(
        config=gguf.read_config(file),
        tokenizer=tokenizer.from_gguf(file),
        make_create=lambda *where: gguf.from_gguf(file, *where),
    )


def move(model: Llama, sharding: LlamaSharding) -> Llama:
    """The same model on the devices of another sharding."""
    return Llama(model.config, sharding, moved(model, sharding))


def num_parameters(config: LlamaConfig) -> int:
    """How many numbers the model has."""
    total = 0

    def count(parameter: Parameter) -> jax.ShapeDtypeStruct:
        nonlocal total
        shape = jax.ShapeDtypeStruct(parameter.shape, jax.numpy.float32)
        total += shape.size
        return shape

    Llama(config, None, count, unroll_layers=False)
    return total
