"""The backend that does everything everywhere: plain XLA, tiled so that memory does not grow with T or S.

Queries are cut into tiles, keys into chunks; each (tile, chunk) gives a state, folded by `merge_state`. A pair without
visible keys is skipped at run time. So causal prefill costs half, and a short sequence in a long buffer costs what its
length does.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from tree_attn.devices import default_platform
from tree_attn.local.garbage import products
from tree_attn.masking import Visibility
from tree_attn.mesh import vary_as
from tree_attn.state import SoftmaxState, empty_like, merge_state

MAX_TILE_QUERIES = 512
MAX_TILE_QUERIES_ON_CPU = 128  # the logits of a tile are the largest temporary of a gradient there
# float32 logits in memory; 16 MiB. One chunk covers most decode steps, so that a GPU runs no loop at all.
MAX_LOGITS_PER_CHUNK = 1 << 22
MIN_CHUNK_KEYS = 256
# XLA's CPU dots first copy K and V into the layout they want; the chunk bounds those copies.
MAX_CHUNK_KEYS_ON_CPU = 512


def unavailable() -> str | None:
    """Returns None: XLA is always there."""
    return None


def unsupported(query, key, value, *, logits_soft_cap, visible, scales=None) -> str | None:
    """Returns None: every option is supported."""
    return None


def attend(
    query, key, value, *, scale: float, logits_soft_cap: float | None, visible: Visibility, scales=None
) -> SoftmaxState:
    """Computes `(out, lse)` as `tree_attn.local.attend` defines them; arguments are checked already."""
    num_queries = query.shape[1]
    tile = partial(_attend_tile, key=key, value=value, scale=scale, soft_cap=logits_soft_cap, scales=scales)
    on_cpu = default_platform() == "cpu"
    tile_queries = min(MAX_TILE_QUERIES, MAX_TILE_QUERIES_ON_CPU) if on_cpu else MAX_TILE_QUERIES
    if num_queries <= tile_queries:
        return tile(query, visible)
    num_tiles = -(-num_queries // tile_queries)
    if on_cpu:  # of one more query than a tile takes, tiles of half of them: what is padded takes memory too
        tile_queries = -(-num_queries // num_tiles)
    padding = num_tiles * tile_queries - num_queries

    def tiles_first(x, pad_mode):  # [B, T, ...] -> [tiles, B, tile, ...]
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2), mode=pad_mode)
        return jnp.moveaxis(x.reshape(x.shape[0], num_tiles, tile_queries, *x.shape[2:]), 1, 0)

    def queries_first(x):  # [tiles, B, tile, ...] -> [B, T, ...]
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :num_queries]

    # "edge" repeats the last position, so that padding adds no work to a tile.
    positions = visible.query_positions
    tiled_positions = None if positions is None else tiles_first(positions, "edge")

    def one_tile(args):
        tile_query, tile_positions = args
        return tile(tile_query, dataclasses.replace(visible, query_positions=tile_positions))

    state = jax.lax.map(one_tile, (tiles_first(query, "constant"), tiled_positions))
    return jax.tree.map(queries_first, state)


def _attend_tile(query, visible: Visibility, *, key, value, scale, soft_cap, scales) -> SoftmaxState:
    """Returns the state of one tile of queries over all keys. Scales multiply logits and `out`, never K and V."""
    key_scale, value_scale = (None, None) if scales is None else scales
    scale = jnp.full(1, scale, jnp.float32) if key_scale is None else jnp.float32(scale) * key_scale
    state = _fold_chunks(query, visible, key=key, value=value, scale=scale[:, None, None], soft_cap=soft_cap)
    out = state.out
    if value_scale is not None:
        out = out * jnp.repeat(value_scale, query.shape[2] // key.shape[2])[None, None, :, None]
    return SoftmaxState(out.astype(query.dtype), state.lse)


def _fold_chunks(query, visible: Visibility, *, key, value, scale, soft_cap) -> SoftmaxState:
    """Folds the state of one tile of queries over chunks of keys; float32 `out`."""
    batch, num_queries, num_heads, _ = query.shape
    num_keys = key.shape[1]
    shape = (batch, num_queries, num_heads)
    empty = empty_like(SoftmaxState(jnp.zeros((*shape, value.shape[-1]), jnp.float32), jnp.zeros(shape, jnp.float32)))
    empty = vary_as(empty, query)
    if num_keys == 0:
        return empty
    chunk_keys = min(num_keys, keys_per_chunk(batch * num_queries * num_heads))
    num_chunks = -(-num_keys // chunk_keys)

    def chunk_state(start, first_slot):
        """Returns the state of a chunk from slot `start` on; slots before `first_slot` belong to the previous chunk."""
        take = partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=chunk_keys, axis=1)
        mask = visible.mask(start, chunk_keys)
        mask = mask & (start + jnp.arange(chunk_keys, dtype=jnp.int32) >= first_slot)[None, None, :]
        is_valid = visible.is_valid(start, chunk_keys)
        return _attend_chunk(query, take(key), take(value), mask, is_valid, scale=scale, soft_cap=soft_cap)

    if num_chunks == 1:
        mask = None if visible.is_total else visible.mask()
        return _attend_chunk(query, key, value, mask, visible.is_valid(), scale=scale, soft_cap=soft_cap)

    @jax.checkpoint  # the backward pass recomputes a chunk's logits rather than keep those of all chunks
    def step(state, i):
        # The last chunk starts early rather than read past the end; its overlap is masked.
        start = jnp.minimum(i * chunk_keys, num_keys - chunk_keys)
        is_needed = jnp.any(visible.mask(start, chunk_keys))
        merged = jax.lax.cond(
            is_needed, lambda s: merge_state(s, chunk_state(start, i * chunk_keys)), lambda s: s, state
        )
        return merged, None

    state, _ = jax.lax.scan(step, empty, jnp.arange(num_chunks, dtype=jnp.int32))
    return state


def _attend_chunk(query, key, value, mask, is_valid, *, scale, soft_cap) -> SoftmaxState:
    """Computes attention over one chunk, float32 `out`.

    Args:
      mask: bool `[B or 1, T or 1, S]`; None if every key is visible.
      is_valid: bool `[B, S]`, whether a slot holds a key; None if every slot does.
      scale: float32 `[K or 1, 1, 1]`.
    """
    batch, num_queries, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[2]
    # Exact for float8. (On a CPU XLA widens float8 to float16 before it takes the chunk: it has no float8 slices.)
    key, value = key.astype(query.dtype), value.astype(query.dtype)
    logits_of, sum_of = products(key, value, is_valid, num_queries)
    grouped = query.reshape(batch, num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    logits = logits_of(grouped) * scale[None, None]  # [B, T, K, G, S]
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    if mask is not None:
        logits = jnp.where(mask[:, :, None, None, :], logits, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    shift = jnp.where(top > -jnp.inf, top, 0.0)
    weights = jnp.exp(logits - shift)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    # The sum tells an empty set of keys from undefined logits: XLA's maximum on CPUs may lose a NaN, its sum does not.
    sees_any = total != 0
    safe_total = jnp.where(sees_any, total, 1.0)
    # The weights meet V in V's dtype, as in every flash kernel; their sum was taken before that rounding.
    out = sum_of(weights.astype(value.dtype)) / safe_total
    lse = jnp.where(sees_any, shift + jnp.log(safe_total), -jnp.inf)
    shape = (batch, num_queries, num_heads)
    return SoftmaxState(out.reshape(*shape, value.shape[-1]), lse.reshape(shape))


def keys_per_chunk(num_query_rows: int) -> int:
    """Returns the number of keys per chunk that keeps `num_query_rows * keys` logits, and on CPU copies, in limits."""
    chunk_keys = max(MIN_CHUNK_KEYS, MAX_LOGITS_PER_CHUNK // num_query_rows)
    return min(chunk_keys, MAX_CHUNK_KEYS_ON_CPU) if default_platform() == "cpu" else chunk_keys
