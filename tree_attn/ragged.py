"""Decoding batches of unequal lengths that are not padded: packed end to end, or kept in pages.

Both are LeanAttention on a Hopper GPU (`implementation="mosaic_gpu"`), and plain XLA elsewhere.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer, Num

from tree_attn.arguments import (
    AnyArray,
    AttentionOptions,
    RaggedOptionArguments,
    check_array,
    check_dtypes,
    check_lengths,
    clip_to_int32,
    concrete,
    default_scale,
    shape_and_dtype,
    takes_options,
)
from tree_attn.local import check_implementation, choose, mosaic_gpu, xla
from tree_attn.masking import Visibility, add_sinks, visibility
from tree_attn.placement import Shard
from tree_attn.state import SoftmaxState, merge_segments, merge_state

IMPLEMENTATIONS = ("mosaic_gpu", "xla")
_XLA_CHUNK = 1024  # packed keys whose states XLA holds at the same time


@overload
def lean_decode(
    query: Float[AnyArray, "B T N H"], key: Num[AnyArray, "total K H"], value: Num[AnyArray, "total K H"],
    cu_seqlens: Integer[AnyArray, " B+1"], *, return_lse: Literal[False] = ...,
    **options: Unpack[RaggedOptionArguments],
) -> Float[Array, "B T N H"]: ...  # fmt: skip
@overload
def lean_decode(
    query: Float[AnyArray, "B T N H"], key: Num[AnyArray, "total K H"], value: Num[AnyArray, "total K H"],
    cu_seqlens: Integer[AnyArray, " B+1"], *, return_lse: Literal[True], **options: Unpack[RaggedOptionArguments],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]: ...  # fmt: skip
@overload
def lean_decode(
    query: Float[AnyArray, "B T N H"], key: Num[AnyArray, "total K H"], value: Num[AnyArray, "total K H"],
    cu_seqlens: Integer[AnyArray, " B+1"], *, return_lse: bool, **options: Unpack[RaggedOptionArguments],
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]: ...  # fmt: skip
@takes_options()
def lean_decode(
    query: Float[AnyArray, "B T N H"],
    key: Num[AnyArray, "total K H"],
    value: Num[AnyArray, "total K H"],
    cu_seqlens: Integer[AnyArray, " B+1"],
    *,
    return_lse: bool = False,
    **options: Unpack[RaggedOptionArguments],
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Exact attention over a packed ragged batch: sequence b's keys are `key[cu_seqlens[b] : cu_seqlens[b + 1]]`::

      logits = cap(scale key_scale query . key),    lse = log sum exp(logits),
      out    = value_scale sum exp(logits - lse) value

    Every CTA gets the same number of KV tiles whatever the lengths. Lengths are values on the device: changing them
    from step to step compiles nothing and does not wait for the host.

    Args:
      query: `[B, T, N, H]`, the last T positions of each sequence; bfloat16 or float16 (float32 too under "xla").
      key, value: `[total, K, H]` with `N = K * G`, in the dtype of `query`, float8_e4m3fn, or int8 under
        "xla".
      cu_seqlens: int32 `[B + 1]`, ascending from 0 to at most `total`. What lies beyond is not read into any result.
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
    _check_arrays(query, key, value, "key", "value", "[total, K, H]")
    _check_cu_seqlens(cu_seqlens, query.shape[0], key.shape[0])
    attention = _checked_options(query, key, value, key.shape[0], options)
    query, key, value = map(jnp.asarray, (query, key, value))
    offsets = clip_to_int32(cu_seqlens, 0, key.shape[0])
    starts, ends = offsets[:-1], jnp.maximum(offsets[1:], offsets[:-1])
    view = _view(query, key.shape[0], dataclasses.replace(attention, key_value_seq_lengths=ends - starts))
    spans = tuple(starts[:, None] + slots for slots in view.slot_ranges())
    scale, soft_cap = default_scale(attention.scale, query.shape[-1]), attention.soft_cap
    scales = attention.head_scales(key.shape[-2])
    name = choose_backend(query, key[None], value[None], view, attention, scales)
    if key.shape[0] == 0:
        state = mosaic_gpu.no_keys(query)
    elif name == "xla":
        state = _packed_by_xla(query, key, value, starts, ends, spans, scale=scale, soft_cap=soft_cap, scales=scales)
    else:
        state = mosaic_gpu.lean_state(
            query, key[None], value[None], spans, num_slots=key.shape[0], is_packed=True, scale=scale,
            logits_soft_cap=soft_cap, scales=scales,
        )  # fmt: skip
    state = add_sinks(state, attention.sinks)
    return (state.out, state.lse) if return_lse else state.out


@overload
def paged_decode(
    query: Float[AnyArray, "B T N H"], key_pages: Num[AnyArray, "P page K H"], value_pages: Num[AnyArray, "P page K H"],
    page_table: Integer[AnyArray, "B pages"], key_value_seq_lengths: Integer[AnyArray, " B"], *,
    return_lse: Literal[False] = ..., **options: Unpack[RaggedOptionArguments],
) -> Float[Array, "B T N H"]: ...  # fmt: skip
@overload
def paged_decode(
    query: Float[AnyArray, "B T N H"], key_pages: Num[AnyArray, "P page K H"], value_pages: Num[AnyArray, "P page K H"],
    page_table: Integer[AnyArray, "B pages"], key_value_seq_lengths: Integer[AnyArray, " B"], *,
    return_lse: Literal[True], **options: Unpack[RaggedOptionArguments],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]: ...  # fmt: skip
@overload
def paged_decode(
    query: Float[AnyArray, "B T N H"], key_pages: Num[AnyArray, "P page K H"], value_pages: Num[AnyArray, "P page K H"],
    page_table: Integer[AnyArray, "B pages"], key_value_seq_lengths: Integer[AnyArray, " B"], *, return_lse: bool,
    **options: Unpack[RaggedOptionArguments],
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]: ...  # fmt: skip
@takes_options()
def paged_decode(
    query: Float[AnyArray, "B T N H"],
    key_pages: Num[AnyArray, "P page K H"],
    value_pages: Num[AnyArray, "P page K H"],
    page_table: Integer[AnyArray, "B pages"],
    key_value_seq_lengths: Integer[AnyArray, " B"],
    *,
    return_lse: bool = False,
    **options: Unpack[RaggedOptionArguments],
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Exact attention over a paged cache: slot s of sequence b is `key_pages[page_table[b, s // page], s % page]`.

    The formula is that of `lean_decode`.

    Args:
      query: `[B, T, N, H]`, the last T positions of each sequence.
      key_pages, value_pages: `[P, page, K, H]`.
      page_table: int32 `[B, pages]`; entries beyond a sequence's length may be anything.
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
    _check_arrays(query, key_pages, value_pages, "key_pages", "value_pages", "[P, page, K, H]")
    num_pages, page_size = key_pages.shape[:2]
    shape = query.shape[0], *shape_and_dtype(page_table)[0][-1:]
    check_array("page_table", page_table, "integers", jnp.integer, f"[B, pages] with B = {query.shape[0]}", shape)
    num_slots = np.shape(page_table)[1] * page_size if num_pages else 0
    check_lengths("key_value_seq_lengths", key_value_seq_lengths, query.shape[0], num_slots)
    options = {**options, "key_value_seq_lengths": key_value_seq_lengths}
    attention = _checked_options(query, key_pages, value_pages, num_slots, options)
    _check_page_numbers(page_table, key_value_seq_lengths, num_pages, page_size)
    view = _view(query, num_slots, attention)
    query, key_pages, value_pages = map(jnp.asarray, (query, key_pages, value_pages))
    table = clip_to_int32(page_table, 0, max(num_pages - 1, 0))
    scale, soft_cap = default_scale(attention.scale, query.shape[-1]), attention.soft_cap
    scales = attention.head_scales(key_pages.shape[-2])
    name = choose_backend(query, key_pages, value_pages, view, attention, scales, page_size=page_size)
    if num_slots == 0:
        state = mosaic_gpu.no_keys(query)
    elif name == "xla":
        gather = lambda pages: pages[table].reshape(query.shape[0], num_slots, *pages.shape[2:])
        keys, values = gather(key_pages), gather(value_pages)
        state = xla.attend(query, keys, values, scale=scale, logits_soft_cap=soft_cap, visible=view, scales=scales)
    else:
        state = mosaic_gpu.lean_state(
            query, key_pages, value_pages, view.slot_ranges(), num_slots=num_slots,
            pages=table, scale=scale, logits_soft_cap=soft_cap, scales=scales,
        )  # fmt: skip
    state = add_sinks(state, attention.sinks)
    return (state.out, state.lse) if return_lse else state.out


def _checked_options(query, key, value, num_slots: int, arguments: Mapping[str, Any]) -> AttentionOptions:
    options = AttentionOptions(**arguments)
    options.check(query, key, value, num_keys=num_slots)
    check_implementation(options.implementation, IMPLEMENTATIONS)
    return options


def _view(query, num_slots: int, options: AttentionOptions) -> Visibility:
    return visibility(options, batch=query.shape[0], num_queries=query.shape[1], num_slots=num_slots, shard=Shard())


def _check_arrays(query, key, value, key_name: str, value_name: str, layout: str) -> None:
    """Raises ValueError or TypeError unless the arrays fit each other; key and value may lack keys."""
    for name, x, axes in (("query", query, "[B, T, N, H]"), (key_name, key, layout), (value_name, value, layout)):
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise TypeError(f"{name} must be an array {axes}, got {type(x).__name__}")
        if x.ndim != axes.count(",") + 1:
            raise ValueError(f"{name} must be {axes}, got shape {tuple(x.shape)}")
        sizes = x.shape if name == "query" else x.shape[-2:]
        if min(sizes) < 1:
            raise ValueError(f"{name} must not have empty axes, got {tuple(x.shape)}")
    if key.shape != value.shape:
        raise ValueError(
            f"{value_name} must have the shape of {key_name}, {tuple(key.shape)}, got {tuple(value.shape)}"
        )
    if key.shape[-1] != query.shape[-1] or query.shape[2] % key.shape[-2]:
        raise ValueError(
            f"{key_name} must have query's head dim and a number of heads that divides query's, {tuple(query.shape)}, "
            f"got {tuple(key.shape)}"
        )
    check_dtypes(query, key, value, key_name, value_name)


def _check_cu_seqlens(cu_seqlens, batch: int, total: int) -> None:
    check_array("cu_seqlens", cu_seqlens, "integers", jnp.integer, f"[B + 1] = ({batch + 1},)", (batch + 1,))
    values = concrete(cu_seqlens)
    if values is not None and (values[0] < 0 or (values[1:] < values[:-1]).any() or values[-1] > total):
        raise ValueError(f"cu_seqlens must ascend from 0 to at most total = {total}, got {values.tolist()}")


def _check_page_numbers(page_table, lengths, num_pages: int, page_size: int) -> None:
    """Raises ValueError for a page that a sequence needs and that is not there, where the values are at hand."""
    table, lengths = concrete(page_table), concrete(lengths)
    if table is None or lengths is None:
        return
    is_needed = np.arange(table.shape[1]) * page_size < lengths[:, None]
    wrong = table[is_needed & ((table < 0) | (table >= num_pages))]
    if wrong.size:
        raise ValueError(f"page_table must hold pages in [0, {num_pages}) up to each length, got {wrong.tolist()}")


def choose_backend(query, key, value, view: Visibility, options: AttentionOptions, scales, page_size: int = 0) -> str:
    """Returns "mosaic_gpu" or "xla"; raises NotImplementedError where the named one cannot run.

    Args:
      query, key, value: `[B, T, N, H]` and `[B, S, K, H]`, or the pages.
      scales: as `AttentionOptions.head_scales` returns them.
      page_size: keys of a page; 0 without pages.
    """
    reason = mosaic_gpu.unsupported_pages(page_size, query.shape[1])
    obstacles = {} if reason is None else {"mosaic_gpu": reason}
    return choose(
        query, key, value, implementation=options.implementation, candidates=IMPLEMENTATIONS, obstacles=obstacles,
        logits_soft_cap=options.soft_cap, visible=view, scales=scales,
    )  # fmt: skip


def _packed_by_xla(query, key, value, starts, ends, spans, *, scale: float, soft_cap: float | None, scales):
    """Returns the state of each sequence over its keys: every key is a state of its own, `(value, logit)`.

    Args:
      starts, ends: of the sequences, int32 `[B]`. What lies between and after them is not read into any result.
      spans: first and end visible slot of each query, int32 `[B or 1, T or 1]` each.
    """
    batch, num_queries, num_heads, head_dim = query.shape
    total, num_kv_heads = key.shape[:2]
    group = num_heads // num_kv_heads
    padding = -total % _XLA_CHUNK
    key, value = (jnp.pad(x, [(0, padding), (0, 0), (0, 0)]) for x in (key, value))
    key_scale, value_scale = jnp.ones((2, num_kv_heads), jnp.float32) if scales is None else scales
    first, end = (jnp.broadcast_to(x, (batch, num_queries)) for x in spans)

    def chunk(state, start):
        slots = start + jnp.arange(_XLA_CHUNK, dtype=jnp.int32)
        # Sequences ascend, so a key belongs to the first that ends after it.
        owner = jnp.minimum(jnp.sum(ends[None, :] <= slots[:, None], axis=1, dtype=jnp.int32), batch - 1)
        is_owned = (slots >= starts[owner]) & (slots < ends[owner])

        def take(x, head_scale):  # multiplied by its scale in float32, a chunk at a time
            x = jax.lax.dynamic_slice_in_dim(x, start, _XLA_CHUNK).astype(jnp.float32)
            # A weight or cotangent of 0 times NaN would be NaN.
            return jnp.where(is_owned[:, None, None], x, 0.0) * head_scale[None, :, None]

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
