"""Decoding batches of unequal lengths that are not padded: packed end to end, or kept in pages.

Both are LeanAttention on a Hopper GPU (`implementation="mosaic_gpu"`), and plain XLA elsewhere.
"""

from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from tree_attn.arguments import (
    AnyArray,
    AttentionOptions,
    RaggedOptionArguments,
    check_dtypes,
    default_scale,
    takes_options,
)
from tree_attn.local import check_implementation, choose, mosaic_gpu, xla
from tree_attn.masking import Visibility, add_sinks, visibility
from tree_attn.placement import Shard
from tree_attn.state import SoftmaxState, merge_segments, merge_state

IMPLEMENTATIONS = ("mosaic_gpu", "xla")
_XLA_CHUNK = 1024  # packed keys whose states XLA holds at the same time


@takes_options()
def lean_decode(
    query: Float[AnyArray, "B T N H"],
    key: Num[AnyArray, "total K H"],
    value: Num[AnyArray, "total K H"],
    cu_seqlens: Int[AnyArray, " B+1"],
    *,
    return_lse: bool = False,
    **options: Unpack[RaggedOptionArguments],
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Exact attention over a packed ragged batch: sequence b's keys are `key[cu_seqlens[b] : cu_seqlens[b + 1]]`.

    logits = cap(scale key_scale query . key),    lse = log sum exp(logits),
    out    = value_scale sum exp(logits - lse) value

    Every CTA gets the same number of KV tiles whatever the lengths. Lengths are values on the device: changing them
    from step to step compiles nothing and does not wait for the host.

    Args:
      query: `[B, T, N, H]`, the last T positions of each sequence; bfloat16 or float16 (float32 too under "xla").
      key, value: `[total, K, H]` with `N = K * G`, in the dtype of `query`, float8_e4m3fn, or int8 under
        "xla"; the kernel needs `total` to be a multiple of 8.
      cu_seqlens: int32 `[B + 1]`, ascending from 0 to at most `total`.
      return_lse: also return `lse`, float32 `[B, T, N]`, natural log.
      options: the attention options of `tree_attn.attend`, but for lengths and positions. `implementation` is
        "mosaic_gpu" or "xla"; None takes the first that can run.
    Returns:
      `out [B, T, N, H]` in query's dtype; with `return_lse`, `(out, lse)`. An empty sequence has 0 and -inf.
    Raises:
      ValueError, TypeError: an argument does not fit; the message names it.
      NotImplementedError: the named implementation cannot do it, or cannot run here.

    Example:
      >>> out = lean_decode(query, key, value, jnp.array([0, 5, 5, 2053]))

    Source: LeanAttention, section 4.3 (lean ragged batching).
    """
    query, key, value, cu_seqlens = map(jnp.asarray, (query, key, value, cu_seqlens))
    _check_arrays(query, key, value, rank=3)
    _check_cu_seqlens(cu_seqlens, query.shape[0], key.shape[0])
    starts, ends = (jnp.asarray(x, jnp.int32) for x in (cu_seqlens[:-1], cu_seqlens[1:]))
    attention = AttentionOptions(key_value_seq_lengths=ends - starts, **options)
    view = _checked_view(query, key, value, key.shape[0], attention)
    spans = tuple(starts[:, None] + slots for slots in view.slot_ranges())
    scale, soft_cap = default_scale(attention.scale, query.shape[-1]), attention.logits_soft_cap
    scales = attention.head_scales(key.shape[-2])
    if _choose(query, key[None], value[None], view, attention, scales) == "xla":
        state = _packed_by_xla(query, key, value, spans, scale=scale, soft_cap=soft_cap, scales=scales)
    else:
        state = mosaic_gpu.lean_state(
            query, key[None], value[None], spans, num_slots=key.shape[0], is_packed=True, scale=scale,
            logits_soft_cap=soft_cap, scales=scales,
        )  # fmt: skip
    state = add_sinks(state, attention.sinks)
    return (state.out, state.lse) if return_lse else state.out


@takes_options()
def paged_decode(
    query: Float[AnyArray, "B T N H"],
    key_pages: Num[AnyArray, "P page K H"],
    value_pages: Num[AnyArray, "P page K H"],
    page_table: Int[AnyArray, "B pages"],
    key_value_seq_lengths: Int[AnyArray, " B"],
    *,
    return_lse: bool = False,
    **options: Unpack[RaggedOptionArguments],
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Exact attention over a paged cache: slot s of sequence b is `key_pages[page_table[b, s // page], s % page]`.

    The formula is that of `lean_decode`.

    Args:
      query: `[B, T, N, H]`, the last T positions of each sequence.
      key_pages, value_pages: `[P, page, K, H]`; the kernel needs pages of a multiple of 64 keys.
      page_table: int32 `[B, pages]`; entries beyond a sequence's length are not read, but must name some page.
      key_value_seq_lengths: int32 `[B]`, at most `pages * page`.
      return_lse, options: as in `lean_decode`.
    Returns:
      As `lean_decode`.
    Raises:
      ValueError, TypeError, NotImplementedError: as `lean_decode`.

    Example:
      >>> out = paged_decode(query, key_pages, value_pages, jnp.array([[4, 0], [2, 2]]), jnp.array([200, 30]))

    Source: LeanAttention, section 4.3; pages as in vLLM (PagedAttention).
    """
    query, key_pages, value_pages, page_table = map(jnp.asarray, (query, key_pages, value_pages, page_table))
    _check_arrays(query, key_pages, value_pages, rank=4)
    if page_table.ndim != 2 or page_table.shape[0] != query.shape[0]:
        raise ValueError(f"page_table must be [B, pages] with B = {query.shape[0]}, got {page_table.shape}")
    num_slots = page_table.shape[1] * key_pages.shape[1]
    attention = AttentionOptions(key_value_seq_lengths=key_value_seq_lengths, **options)
    view = _checked_view(query, key_pages, value_pages, num_slots, attention)
    scale, soft_cap = default_scale(attention.scale, query.shape[-1]), attention.logits_soft_cap
    scales = attention.head_scales(key_pages.shape[-2])
    if _choose(query, key_pages, value_pages, view, attention, scales, page_size=key_pages.shape[1]) == "xla":
        gather = lambda pages: pages[page_table].reshape(query.shape[0], num_slots, *pages.shape[2:])
        keys, values = gather(key_pages), gather(value_pages)
        state = xla.attend(query, keys, values, scale=scale, logits_soft_cap=soft_cap, visible=view, scales=scales)
    else:
        state = mosaic_gpu.lean_state(
            query, key_pages, value_pages, view.slot_ranges(), num_slots=num_slots,
            pages=page_table.astype(jnp.int32), scale=scale, logits_soft_cap=soft_cap, scales=scales,
        )  # fmt: skip
    state = add_sinks(state, attention.sinks)
    return (state.out, state.lse) if return_lse else state.out


def _checked_view(query, key, value, num_slots: int, options: AttentionOptions) -> Visibility:
    options.check(query, key, value, num_keys=num_slots)
    return visibility(options, batch=query.shape[0], num_queries=query.shape[1], num_slots=num_slots, shard=Shard())


def _check_cu_seqlens(cu_seqlens, batch: int, total: int) -> None:
    if cu_seqlens.shape != (batch + 1,) or not jnp.issubdtype(cu_seqlens.dtype, jnp.integer):
        raise ValueError(
            f"cu_seqlens must be integers [B + 1] = [{batch + 1}], got {cu_seqlens.dtype} {cu_seqlens.shape}"
        )
    if isinstance(cu_seqlens, jax.core.Tracer):
        return
    values = np.asarray(cu_seqlens)
    if values[0] < 0 or (np.diff(values) < 0).any() or values[-1] > total:
        raise ValueError(f"cu_seqlens must ascend from 0 to at most total = {total}, got {values.tolist()}")


def _check_arrays(query, key, value, rank: int) -> None:
    if query.ndim != 4:
        raise ValueError(f"query must be [B, T, N, H], got {query.shape}")
    if key.ndim != rank or key.shape != value.shape:
        raise ValueError(f"key and value must have one shape of rank {rank}, got {key.shape} and {value.shape}")
    if key.shape[-1] != query.shape[-1] or query.shape[2] % key.shape[-2]:
        raise ValueError(
            f"key must have query's head dim and a number of heads that divides query's, {query.shape}, got {key.shape}"
        )
    check_dtypes(query, key, value)


def _choose(query, key, value, view: Visibility, options: AttentionOptions, scales, page_size: int = 0) -> str:
    check_implementation(options.implementation, IMPLEMENTATIONS)
    reason = mosaic_gpu.unsupported_pages(page_size)
    obstacles = {} if reason is None else {"mosaic_gpu": reason}
    return choose(
        query, key, value, implementation=options.implementation, candidates=IMPLEMENTATIONS, obstacles=obstacles,
        logits_soft_cap=options.logits_soft_cap, visible=view, scales=scales,
    )  # fmt: skip


def _packed_by_xla(query, key, value, spans, *, scale: float, soft_cap: float | None, scales) -> SoftmaxState:
    """Merges the keys of each sequence: every key is a state of its own, `(value, logit)`."""
    batch, num_queries, num_heads, head_dim = query.shape
    total, num_kv_heads = key.shape[:2]
    group = num_heads // num_kv_heads
    padding = -total % _XLA_CHUNK
    key, value = (jnp.pad(x, [(0, padding), (0, 0), (0, 0)]) for x in (key, value))
    key_scale, value_scale = jnp.ones((2, num_kv_heads), jnp.float32) if scales is None else scales
    first, end = (jnp.broadcast_to(x, (batch, num_queries)) for x in spans)
    owner_ends = jnp.max(end, axis=1)

    def chunk(state, start):
        slots = start + jnp.arange(_XLA_CHUNK, dtype=jnp.int32)
        # Sequences ascend, so a key belongs to the first that ends after it.
        owner = jnp.minimum(jnp.sum(owner_ends[None, :] <= slots[:, None], axis=1, dtype=jnp.int32), batch - 1)

        def take(x, head_scale):  # multiplied by its scale in float32, a chunk at a time
            return jax.lax.dynamic_slice_in_dim(x, start, _XLA_CHUNK).astype(jnp.float32) * head_scale[None, :, None]

        owner_query = query[owner].reshape(-1, num_queries, num_kv_heads, group, head_dim)
        logits = jnp.einsum(
            "stkgh,skh->stkg", owner_query.astype(jnp.float32), take(key, key_scale), precision="highest"
        ) * jnp.float32(scale)
        logits = logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)
        logits = logits.reshape(-1, num_queries, num_heads)
        is_visible = (slots[:, None] >= first[owner]) & (slots[:, None] < end[owner])
        lse = jnp.where(is_visible[:, :, None], logits, -jnp.inf)
        values = jnp.repeat(take(value, value_scale), group, axis=1)[:, None]
        out = jnp.broadcast_to(values, (_XLA_CHUNK, num_queries, num_heads, head_dim))
        merged = merge_segments(SoftmaxState(out, lse), owner, batch)
        return merge_state(state, merged), None

    shape = (batch, num_queries, num_heads)
    empty = SoftmaxState(jnp.zeros((*shape, head_dim), jnp.float32), jnp.full(shape, -jnp.inf, jnp.float32))
    state, _ = jax.lax.scan(chunk, empty, jnp.arange(0, total + padding, _XLA_CHUNK, dtype=jnp.int32))
    return SoftmaxState(state.out.astype(query.dtype), state.lse)
