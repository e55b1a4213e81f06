"""Decode attention for Hopper, written in Pallas: LeanAttention's equal runs of KV tiles, in one launch or two.

This file validates, folds the query heads of a group into columns, and makes the schedule; `lean_kernel.py` computes,
and `tall_kernel.py` where many queries see the same keys.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tree_attn.devices import default_platform
from tree_attn.kernels.lean import lean_attention, lean_exchange
from tree_attn.kernels.lean_layout import TALL_ROWS, LeanConfig, LeanShape, has_whole_rows, num_partials
from tree_attn.kernels.schedule import MIN_TILES_PER_RUN, run_table, sequence_offsets
from tree_attn.kernels.tall import tall_attention
from tree_attn.kernels.tuning import lean_config
from tree_attn.local import xla
from tree_attn.masking import Visibility
from tree_attn.state import SoftmaxState, merge_state

HEAD_DIMS = (64, 80, 96, 128, 256)
TALL_HEAD_DIMS = (64, 128, 256)
TALL_GROUPS = (1, 2, 4, 8)  # query heads that share the rows of a tile; to move the queries of 16 takes more registers
MAX_QUERIES, MAX_GROUP = 8, 16
MOST_LEAN_COLUMNS = 32  # with more, also of many queries that see the same keys, the tall kernel is as fast or faster
OLDEST_JAX = (0, 11)
SLOT_MULTIPLE = 8  # TMA moves K and V by 8 rows
PAGE_MULTIPLE = 64  # a tile lies within one page
# Accumulators of a block of columns, with which a kernel that ends in an exchange spills no register; a quarter of
# them where keys and values are widened.
EXCHANGED_ACCUMULATORS = 4096


def unavailable() -> str | None:
    """Returns why the kernel cannot run here (no Hopper GPU, a JAX it was never run on), or None."""
    if default_platform() != "gpu":
        return f"mosaic_gpu needs a Hopper GPU; programs run on {default_platform()!r} here"
    capability = getattr(jax.local_devices()[0], "compute_capability", "")
    if capability != "9.0":
        return f"mosaic_gpu is written for compute capability 9.0 (Hopper), this GPU has {capability}"
    if jax.__version_info__ < OLDEST_JAX:
        return f"mosaic_gpu was run on a GPU with JAX 0.11 and newer only; it lowers, untried, with {jax.__version__}"
    return None


def unsupported(query, key, value, *, logits_soft_cap, visible: Visibility, scales=None) -> str | None:
    """Returns which option the kernel cannot do, or None."""
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"mosaic_gpu supports dtype bfloat16 and float16, not {query.dtype}"
    if key.dtype == jnp.int8:
        return "mosaic_gpu does not support int8 key and value"
    if query.shape[-1] not in HEAD_DIMS or value.shape[-1] != query.shape[-1]:
        return (
            f"mosaic_gpu supports one head dim of {HEAD_DIMS}, not {query.shape[-1]} for keys and "
            f"{value.shape[-1]} for values"
        )
    group = query.shape[2] // key.shape[2]
    if query.shape[1] > MAX_QUERIES and not visible.by_length_only:
        return (
            f"mosaic_gpu decodes up to {MAX_QUERIES} queries per sequence, not {query.shape[1]}, "
            "unless all of a sequence see the same keys"
        )
    if _is_tall(query.shape[1], group):
        if query.shape[-1] not in TALL_HEAD_DIMS or key.dtype != query.dtype:
            return (
                f"mosaic_gpu supports more than {MAX_QUERIES} queries per sequence with a head dim of {TALL_HEAD_DIMS} "
                f"and one dtype, not {query.shape[1]} with {query.shape[-1]}, {query.dtype} and {key.dtype}"
            )
    elif group > MAX_GROUP:
        return f"mosaic_gpu supports up to {MAX_GROUP} query heads per key head, not {group}"
    if key.shape[1] == 0 or key.shape[1] % SLOT_MULTIPLE:
        return f"mosaic_gpu needs S to be a positive multiple of {SLOT_MULTIPLE}, not {key.shape[1]}"
    return None


def attend(
    query, key, value, *, scale: float, logits_soft_cap: float | None, visible: Visibility, scales=None,
    onto: SoftmaxState | None = None, exchange=None,
) -> SoftmaxState:  # fmt: skip
    """Computes `(out, lse)` as `tree_attn.local.attend` defines them; arguments are checked already.

    Args:
      onto: a state over other keys, with which the result is merged, or None.
      exchange: a `tree_attn.reduce.fused.Exchange`: the result is that of all devices; or None.
    """
    if exchange is not None:  # it has no derivative
        how = dict(scale=scale, soft_cap=logits_soft_cap, scales=scales, onto=onto)
        return lean_padded(query, key, value, visible=visible, exchange=exchange, **how)
    return _attend(query, key, value, scales, onto, visible, scale, logits_soft_cap)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _attend(query, key, value, scales, onto, visible: Visibility, scale, soft_cap) -> SoftmaxState:
    return lean_padded(query, key, value, visible=visible, scale=scale, soft_cap=soft_cap, scales=scales, onto=onto)


def _forward(query, key, value, scales, onto, visible, scale, soft_cap):
    state = _attend(query, key, value, scales, onto, visible, scale, soft_cap)
    return state, (query, key, value, scales, onto, visible)


def _backward(scale, soft_cap, residuals, cotangents):
    """Decoding is not trained through, so XLA recomputes."""
    *arrays, visible = residuals

    def recompute(query, key, value, scales, onto):
        how = dict(scale=scale, logits_soft_cap=soft_cap, visible=visible, scales=scales)
        state = xla.attend(query, key, value, **how)
        return state if onto is None else merge_state(state, onto)

    _, pull = jax.vjp(recompute, *arrays)
    return (*pull(cotangents), None)


_attend.defvjp(_forward, _backward)


def lean_padded(query, key, value, *, visible: Visibility, config: LeanConfig | None = None, **how) -> SoftmaxState:
    """The kernel over `[B, S, K, H]`, with whatever `visible` says; `how` as in `lean_state`."""
    spans = None if visible.is_total else visible.slot_ranges()
    return lean_state(query, key, value, spans, num_slots=key.shape[1], config=config, **how)


def lean_state(
    query, key, value, spans, *, num_slots: int, scale: float, soft_cap: float | None, scales=None, pages=None,
    is_packed: bool = False, onto: SoftmaxState | None = None, exchange=None, config: LeanConfig | None = None,
) -> SoftmaxState:  # fmt: skip
    """Makes the schedule and runs the kernels; arguments are checked already.

    Args:
      query: `[B, T, N, H]`; key, value: as `lean_kernel.lean_attention` takes them.
      spans: first and end visible slot of each query, int32 `[B or 1, T or 1]` each; None where every slot is visible.
        Slots count within a sequence (padded, paged) or over all (packed).
      num_slots: slots that a sequence can have.
      scales: float32 `[2, K]`, what stored K and V are multiplied by, or None.
      pages: int32 `[B, pages]` where K and V are pages, else None.
      onto: a state over other keys, with which the result is merged, or None.
      exchange: what merges with the states of other devices, at the kernel's end if it can, or None.
    """
    batch, num_queries, num_heads, _ = query.shape
    placement = dict(page_size=None if pages is None else key.shape[1], is_packed=is_packed)
    shape = lean_shape(query, key, num_slots=num_slots, scale=scale, soft_cap=soft_cap, **placement)
    group = num_heads // shape.num_kv_heads
    config = config or lean_config(shape, is_static=spans is None)
    if pages is not None and key.shape[1] % config.block_kv:
        config = dataclasses.replace(config, block_kv=PAGE_MULTIPLE)
    tables = {"scales": scales, "pages": pages}
    if spans is None:
        mask = "none" if num_slots % config.block_kv == 0 else "span"
        shape = shape.replace(mask=mask, static_tiles=pl.cdiv(num_slots, config.block_kv))
    else:
        if num_queries > 1 and max(x.shape[1] for x in spans) > 1:
            shape = shape.replace(mask="columns")
            tables["columns"] = _columns(*(jnp.broadcast_to(x, (batch, num_queries)) for x in spans), group, shape)
        shape = shape.replace(whole_rows=_spares_rows(shape, config))
        tables["sequences"], tables["runs"] = _schedule(
            *(jnp.broadcast_to(x, (batch, x.shape[1])) for x in spans), shape, config
        )
        if num_slots <= config.block_kv and not placement["is_packed"]:
            # A tile is a row: no run cuts one, whatever the lengths.
            shape, tables["runs"] = shape.replace(static_tiles=1), None
    is_joined = onto is not None and shape.tokens is not None and not has_whole_rows(shape, config)
    if is_joined:
        tables["onto"] = _laid(onto.out, shape), _rows_of_lse(onto.lse, shape)
    laid = _laid(query, shape)
    leaves_partials = shape.tokens is None and not has_whole_rows(shape, config)
    most = EXCHANGED_ACCUMULATORS // 4 if shape.is_widened else EXCHANGED_ACCUMULATORS
    is_narrow = shape.padded_head_dim * shape.cols <= most
    epilogue = None
    if exchange is not None and onto is None and leaves_partials and is_narrow:
        columns = min(shape.cols, num_queries * group)
        result = jax.ShapeDtypeStruct((shape.num_rows, columns, query.shape[-1]), query.dtype)
        epilogue = exchange.epilogue(result, config.num_ctas, num_partials(shape, config), shape.padded_head_dim)
    how = dict(shape=shape, config=config, **tables)
    if epilogue is not None:
        out, lse = lean_exchange(laid, key, value, exchange.rank, epilogue=epilogue, result=result, **how)
    else:
        out, lse = (tall_attention if shape.is_tall else lean_attention)(laid, key, value, **how)
    state = SoftmaxState(_unlaid(out, query.shape, shape), _lse_of_rows(lse, query.shape[:3], shape))
    state = state if onto is None or is_joined else merge_state(state, onto)
    return state if exchange is None or epilogue is not None else exchange.merge(state)


def lean_shape(query, key, *, num_slots: int, scale: float, soft_cap: float | None, **placement) -> LeanShape:
    """What is static of a call with one span per sequence; `placement` says whether K and V are paged or packed."""
    batch, num_queries, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[2]
    group = num_heads // num_kv_heads
    columns = num_queries * group
    if _is_tall(num_queries, group):
        cols = TALL_ROWS
        together = group if num_kv_heads > 1 and group in TALL_GROUPS else 1  # heads in the rows of a tile
        tokens = cols // together
        blocks = pl.cdiv(columns // together, tokens)
    else:
        blocks, cols = _column_blocks(columns, head_dim, key.dtype != query.dtype)
        tokens = cols if num_queries > MAX_QUERIES else None
    return LeanShape(
        batch=batch,
        num_kv_heads=num_kv_heads,
        col_blocks=blocks,
        cols=cols,
        head_dim=head_dim,
        scale=scale,
        soft_cap=soft_cap,
        mask="span",
        num_slots=num_slots,
        tokens=tokens,
        dtype=query.dtype,
        key_dtype=key.dtype,
        **placement,
    )


def _is_tall(num_queries: int, group: int) -> bool:
    """Whether `tall_kernel.py` is faster: it reads keys no faster for rows of its tiles that are empty."""
    return num_queries > MAX_QUERIES and num_queries * group > MOST_LEAN_COLUMNS


def _column_blocks(num_columns: int, head_dim: int, is_widened: bool) -> tuple[int, int]:
    """How many blocks of how many query columns: a multiple of 8, no more than registers hold without a spill."""
    most, most_of_large = (32, 8) if is_widened else (64, 32)
    blocks = pl.cdiv(num_columns, most if head_dim <= 128 else most_of_large)
    return blocks, pl.cdiv(pl.cdiv(num_columns, blocks), 8) * 8


def _spares_rows(shape: LeanShape, config: LeanConfig) -> bool:
    """Whether runs had better not cut rows: then nothing is merged, and the longest run is but a little longer.

    That is where a row has no more tiles than what a run has at the least, or than half the rows of a CTA: each has a
    tile or more.
    """
    most_tiles = pl.cdiv(shape.num_slots, config.block_kv)
    fits = most_tiles <= max(MIN_TILES_PER_RUN, shape.num_rows // (2 * config.num_ctas))
    return fits and not shape.is_packed


def _schedule(first, end, shape: LeanShape, config: LeanConfig):
    """The tables `sequences` and `runs` from the visible slots `first .. end` of each query, int32 `[B, T]`."""
    is_seen = first < end
    span_start = jnp.min(jnp.where(is_seen, first, jnp.iinfo(jnp.int32).max), axis=1)
    span_end = jnp.max(jnp.where(is_seen, end, 0), axis=1)
    is_any = span_start < span_end
    span_start, span_end = jnp.where(is_any, span_start, 0), jnp.where(is_any, span_end, 0)
    # Packed sequences begin anywhere; a tile begins at a multiple of 8, and what comes before the span is masked.
    grain = SLOT_MULTIPLE if shape.is_packed else config.block_kv
    first_slot = span_start // grain * grain
    num_tiles = jnp.maximum(pl.cdiv(span_end - first_slot, config.block_kv), 1)  # at least one, to write an empty row
    offsets = sequence_offsets(num_tiles, shape.rows_per_sequence)
    sequences = jnp.stack([first_slot, num_tiles, offsets, span_start, span_end], axis=1).astype(jnp.int32)
    how = dict(whole_rows=shape.whole_rows)
    return sequences, run_table(num_tiles, offsets, shape.rows_per_sequence, config.num_ctas, **how)


def _columns(first, end, group: int, shape: LeanShape):
    """Visible slots of every query column, int32 `[2, B, col_blocks * cols]`; a padding column sees nothing."""
    ranges = jnp.repeat(jnp.stack([first, end]).astype(jnp.int32), group, axis=2)  # columns are (t, g)
    return jnp.pad(ranges, [(0, 0), (0, 0), (0, shape.col_blocks * shape.cols - ranges.shape[2])])


def _laid(query, shape: LeanShape):
    """`[B, T, N, H]` as the kernel takes it, which of many queries it does as they lie.

    What a block of rows cannot hold a part of each head of is given as more queries of one head, `[B, T G, K, H]`.
    """
    if shape.tokens is None:
        return _fold(query, shape)
    batch, num_queries, num_heads, head_dim = query.shape
    group = num_heads // shape.num_kv_heads
    if shape.cols // shape.tokens != group:
        grouped = query.reshape(batch, num_queries, shape.num_kv_heads, group, head_dim).swapaxes(2, 3)
        query = grouped.reshape(batch, num_queries * group, shape.num_kv_heads, head_dim)
    return jnp.pad(query, [(0, 0), (0, -query.shape[1] % 8), (0, 0), (0, 0)])  # TMA takes eights


def _unlaid(out, query_shape, shape: LeanShape):
    """The inverse of `_laid`; also for what has no head dim."""
    if shape.tokens is None:
        return _unfold(out, query_shape, shape)
    batch, num_queries, num_heads = query_shape[:3]
    out = out[:, : num_queries * num_heads // out.shape[2]]
    if out.shape[2] == num_heads:
        return out
    grouped = out.reshape(batch, num_queries, -1, shape.num_kv_heads, *out.shape[3:])
    return grouped.swapaxes(2, 3).reshape(query_shape)


def _rows_of_lse(lse, shape: LeanShape):
    """`[B, T, N]` to `[rows, cols]`, in the kernel's order; -inf where there is no query."""
    laid = _laid(lse[..., None], shape)[..., 0]
    padding = shape.col_blocks * shape.tokens - laid.shape[1]
    laid = jnp.pad(laid, [(0, 0), (0, padding), (0, 0)], constant_values=-jnp.inf)
    blocks = laid.reshape(shape.batch, shape.col_blocks, shape.tokens, shape.num_kv_heads, -1)
    return blocks.transpose(0, 3, 1, 4, 2).reshape(shape.num_rows, shape.cols)


def _lse_of_rows(lse, query_shape, shape: LeanShape):
    """The inverse of `_rows_of_lse`, and of the order in which columns are folded."""
    if shape.tokens is None:
        return _unfold(lse, query_shape, shape)
    blocks = lse.reshape(shape.batch, shape.num_kv_heads, shape.col_blocks, -1, shape.tokens).transpose(0, 2, 4, 1, 3)
    return _unlaid(blocks.reshape(shape.batch, shape.col_blocks * shape.tokens, -1), query_shape, shape)


def _fold(query, shape: LeanShape):
    """`[B, T, K G, H]` to `[rows, columns, H]`: the query columns (t, g) of each KV head, in blocks."""
    batch, num_queries, num_heads, head_dim = query.shape
    group = num_heads // shape.num_kv_heads
    if num_queries == 1 and shape.col_blocks == 1 and (group < 8 or group % 8 == 0):
        return query.reshape(shape.num_rows, group, head_dim)  # no copy; TMA fills what is missing up to 8
    grouped = query.reshape(batch, num_queries, shape.num_kv_heads, group, head_dim)
    columns = grouped.swapaxes(1, 2).reshape(batch, shape.num_kv_heads, num_queries * group, head_dim)
    padding = shape.col_blocks * shape.cols - num_queries * group
    columns = jnp.pad(columns, [(0, 0), (0, 0), (0, padding), (0, 0)])
    return columns.reshape(shape.num_rows, shape.cols, head_dim)


def _unfold(folded, query_shape, shape: LeanShape):
    """The inverse of `_fold`, for out `[rows, columns, H]` and lse `[rows, columns]`."""
    batch, num_queries, num_heads = query_shape[:3]
    group = num_heads // shape.num_kv_heads
    columns = folded.reshape(batch, shape.num_kv_heads, -1, *folded.shape[2:])[:, :, : num_queries * group]
    grouped = columns.reshape(batch, shape.num_kv_heads, num_queries, group, *folded.shape[2:])
    return grouped.swapaxes(1, 2).reshape(query_shape)
