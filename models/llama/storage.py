"""Storage of a Llama's tokens: the order in which shards hold them, and the caches of all layers."""

from typing import Any

from jax.typing import DTypeLike

from tree_attn.cache import KVCache
from tree_attn.models.llama.config import LlamaConfig
from tree_attn.models.llama.sharding import LlamaSharding
from tree_attn.placement import PromptLayout

# One prompt token to each shard in turn: every shard then has the same share of a causal prefill, and of later growth.
BLOCK_SIZE = 1


def prompt_layout(num_tokens: int, num_shards: int) -> PromptLayout:
    """Returns the order in which prefill takes `num_tokens` tokens, and their padding."""
    return PromptLayout(num_tokens=num_tokens, num_shards=num_shards, block_size=BLOCK_SIZE)


def empty_cache(
    config: LlamaConfig, sharding: LlamaSharding, *, batch: int, capacity: int, dtype: DTypeLike, **options: Any
) -> KVCache:
    """Returns an empty cache for all layers of a model.

    Args:
      config: gives layers, KV heads and head dim.
      sharding: gives the mesh and the axes of the sequence, and of the batch where they divide it.
      batch: sequences.
      capacity: slots of each sequence, over all shards.
      dtype: of keys and values.
      options: other options of `KVCache.create`: scales, and `Attention.cache_options`.
    """
    divides = batch % sharding.num_shards("batch") == 0
    return KVCache.create(
        batch=batch,
        capacity=capacity,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        mesh=sharding.mesh,
        axis_name=sharding.sequence,
        batch_axis_name=sharding.batch if divides else None,
        block_size=BLOCK_SIZE,
        num_layers=config.num_layers,
        **options,
    )
