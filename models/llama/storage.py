"""Storage of a Llama's tokens: the order in which shards hold them, and the caches of all layers."""

from typing import Any

from jax.typing import DTypeLike

from tree_attn.cache import KVCache
from tree_attn.models.llama.config import LlamaConfig
from tree_attn.models.llama.layer_caches import AnyCache, LayerCaches
from tree_attn.models.llama.sharding import LlamaSharding
from tree_attn.placement import PromptLayout

# One prompt token to each shard in turn: every shard then has the same share of a causal prefill, and of later growth.
BLOCK_SIZE = 1


def prompt_layout(num_tokens: int, num_shards: int) -> PromptLayout:
    """Returns the order in which prefill takes `num_tokens` tokens, and their padding."""
    return PromptLayout(num_tokens=num_tokens, num_shards=num_shards, block_size=BLOCK_SIZE)


def empty_cache(
    config: LlamaConfig,
    sharding: LlamaSharding,
    *,
    batch: int,
    capacity: int,
    dtype: DTypeLike,
    window: int | None = None,
    **options: Any,
) -> AnyCache:
    """Returns an empty cache for all layers of a model.

    Args:
      config: gives layers, KV heads and head dim.
      sharding: gives the mesh and the axes of the sequence, and of the batch where they divide it.
      batch: sequences.
      capacity: slots of each sequence, over all shards.
      dtype: of keys and values.
      window: tokens that layers with a window keep, `config.window`; None: all.
      options: other options of `KVCache.create`: scales, and `Attention.cache_options`.
    """
    divides = batch % sharding.num_shards("batch") == 0
    options |= dict(
        batch=batch,
        capacity=capacity,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        mesh=sharding.mesh,
        axis_name=sharding.sequence,
        batch_axis_name=sharding.batch if divides else None,
        block_size=BLOCK_SIZE,
    )
    if window is not None and config.has_layer_kinds:
        return LayerCaches.create(config, window, **options)
    return KVCache.create(
        num_layers=config.num_layers, window=None if config.window_of(0) is None else window, **options
    )
