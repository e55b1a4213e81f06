"""A prompt into a cache: Ring Attention over arrays in their natural order, and the cache that new tokens follow."""

import dataclasses
from typing import Unpack

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tree_attn.arguments import AnyArray, OptionArguments, check_arrays, check_lengths, clip_to_int32, takes_options
from tree_attn.cache import KVCache
from tree_attn.cache_checks import CacheFullError, check_new, check_same_window
from tree_attn.placement import PromptLayout
from tree_attn.ring_baseline.attention import check_self_attention, ring_attention
from tree_attn.sharded import is_local

PLACEMENT = ("axis_name", "mesh", "batch_axis_name", "block_size")  # the operands that are no arrays


@takes_options(
    without=("query_positions", "key_value_seq_lengths", "key_scale", "value_scale", "reads_keys_early"), is_causal=True
)
def ring_prefill(
    cache: KVCache,
    query: Float[AnyArray, "B S N H"],
    key: Float[AnyArray, "B S K H"],
    value: Float[AnyArray, "B S K H"],
    *,
    lengths: Int[AnyArray, " B"] | None = None,
    layer: int | Int[Array, ""] | None = None,
    **options: Unpack[OptionArguments],
) -> tuple[KVCache, Float[Array, "B S N H"]]:
    """Attends within prompts, as `ring_attention`, and puts their keys and values into a cache.

    Arrays are in natural order and of any length: they are padded and put into the cache's order here, and the result
    is put back. So it takes whole arrays. For a prompt that is stored already, or read in chunks, use `ring_attention`
    and `KVCache.write_prefix`.

    Args:
      cache: takes the prompts in the place of what it holds. A window that it keeps is the attention's too.
      query: `[B, S, N, H]`; key, value: `[B, S, K, H]`, one dtype, prompts padded at their end to the longest.
      lengths: int32 `[B]`, tokens of each prompt; None: S.
      layer: of a layered cache; call this for each of its layers.
      options: the attention options of `tree_attn.attend`, but for lengths, positions and scales; `is_causal` is True
        by default.
    Returns:
      The cache, which holds `lengths` tokens, and `out [B, S, N, H]`. Beyond a prompt's length `out` is meaningless.
    Raises:
      CacheFullError: S is more than the capacity.
      ValueError, TypeError, NotImplementedError: as `ring_attention` and `KVCache.write_prefix`; inside a `shard_map`
        that binds the axes.

    Example:
      >>> cache, out = jax.jit(ring_prefill)(cache, query, key, value, lengths=lengths)

    Source: as `ring_attention`.
    """
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache must be a KVCache, got {type(cache).__name__}")
    if is_local(cache.arrays.axes):
        raise ValueError(
            f"ring_prefill takes whole arrays, and a shard_map binds axis_name {cache.arrays.axes} here: use "
            "ring_attention and KVCache.write_prefix"
        )
    check_arrays(query, key, value)
    check_new(key, value, cache.arrays, layer)
    check_self_attention(query, key)
    batch, num_tokens = key.shape[:2]
    if num_tokens > cache.capacity:
        raise CacheFullError(
            f"cache is full: prompts of {num_tokens} tokens do not fit a capacity of {cache.capacity}; create it with "
            "a larger capacity"
        )
    if cache.rolls:
        check_same_window(options.get("local_window_size"), cache.arrays)
        if options.get("local_window_size") is None:
            options["local_window_size"] = (cache.num_slots - 1, None)
    layout = PromptLayout(num_tokens=num_tokens, num_shards=cache.num_shards, block_size=cache.block_size)
    if lengths is None:
        lengths = jnp.full(batch, num_tokens, jnp.int32)
    check_lengths("lengths", lengths, batch, num_tokens)
    lengths = clip_to_int32(lengths, 0, num_tokens)
    query, key, value = map(layout.store, (query, key, value))
    operands = {name: x for name, x in cache.operands(layer).items() if name in PLACEMENT}
    out = ring_attention(query, key, value, key_value_seq_lengths=lengths, **operands, **options)
    cache = cache.write_prefix(key, value, layer, lengths=lengths).with_lengths(lengths, layer=layer)
    # Whatever was refused before: nothing of it is left.
    cache = dataclasses.replace(cache, overflowed=jnp.zeros_like(cache.overflowed))
    return cache, layout.restore(out)
