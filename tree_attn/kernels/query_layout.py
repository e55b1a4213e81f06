"""Queries, results and lse between `[B, T, N, H]` and the kernels' layouts, and where a block's queries lie.

With `shape.tokens` None, the query columns (t, g) of a KV head are folded to `[output tiles, columns, H]`. Otherwise
the kernels read and write `[B, T, N, H]` in place. A kernel's lse is `[output tiles, cols]` either way.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from tree_attn.kernels.interpreter import is_interpreted
from tree_attn.kernels.lean_layout import MAX_SPARE_COLUMNS, ROWS, LeanShape

QUERY_MULTIPLE = 8  # TMA moves multiples of it to the tiles that a tensor core reads


def is_by_rows(shape: LeanShape, queries_ref) -> bool:
    """Returns whether threads move the rows of `[B, T, N, H]`: TMA moves tiles of 8, of one head."""
    return shape.group is not None or queries_ref.shape[1] % QUERY_MULTIPLE > 0


def moves_by_rows(shape: LeanShape, num_columns: int) -> bool:
    """Returns whether threads copy the query columns of a block: TMA copies tiles of 8.

    Args:
      num_columns: of a block in memory.
    """
    is_odd = shape.tokens is None and num_columns > QUERY_MULTIPLE and num_columns % QUERY_MULTIPLE > 0
    return is_odd or not shape.target.is_hopper


def stores_by_threads(shape: LeanShape, num_columns: int) -> bool:
    """Returns whether threads write the results of such columns. The interpreter's TMA has no tiles, and does."""
    return moves_by_rows(shape, num_columns) and not (shape.target.is_hopper and is_interpreted())


def num_halves(shape: LeanShape, queries_ref) -> int:
    """Returns how many halves of 64 rows of a block of the many-query kernel hold rows: of few queries one maybe."""
    of_one_head = shape.tokens == shape.cols
    num_rows = queries_ref.shape[1] * (shape.group or 1) if of_one_head else shape.cols
    return pl.cdiv(min(num_rows, shape.cols), ROWS)


def is_padded(query_shape, shape: LeanShape, multiple: int) -> bool:
    """Returns whether the kernel's layout has more queries than there are; `shape.tokens` is not None."""
    _, num_queries, num_heads, _ = query_shape
    group = num_heads // shape.num_kv_heads
    per_token = 1 if shape.cols // shape.tokens == group else group
    return num_queries * per_token % multiple > 0


def to_kernel_layout(query, shape: LeanShape, multiple: int = QUERY_MULTIPLE):
    """Returns `[B, T, N, H]` in the kernel's layout.

    Few queries are folded to `[output tiles, columns, H]`. Many are read in place, and few with `shape.group`. If a
    block cannot hold whole groups, the group is unrolled into the query axis, `[B, T G, K, H]`.

    Args:
      multiple: of queries in place, to which they are padded.
    """
    if shape.group is not None:
        return query
    if shape.tokens is None:
        return _fold(query, shape)
    batch, num_queries, num_heads, head_dim = query.shape
    group = num_heads // shape.num_kv_heads
    if shape.cols // shape.tokens != group:
        grouped = query.reshape(batch, num_queries, shape.num_kv_heads, group, head_dim).swapaxes(2, 3)
        query = grouped.reshape(batch, num_queries * group, shape.num_kv_heads, head_dim)
    return jnp.pad(query, [(0, 0), (0, -query.shape[1] % multiple), (0, 0), (0, 0)])


def from_kernel_layout(out, query_shape, shape: LeanShape):
    """Returns the inverse of `to_kernel_layout`."""
    if shape.group is not None:
        return out
    if shape.tokens is None:
        return _unfold(out, query_shape, shape)
    return _rolled(out, query_shape, shape)


def _rolled(out, query_shape, shape: LeanShape):
    """Returns queries in place, padded or of an unrolled group, as `query_shape`; also without a head dim."""
    batch, num_queries, num_heads = query_shape[:3]
    out = out[:, : num_queries * num_heads // out.shape[2]]
    if out.shape[2] == num_heads:
        return out
    grouped = out.reshape(batch, num_queries, -1, shape.num_kv_heads, *out.shape[3:])
    return grouped.swapaxes(2, 3).reshape(query_shape)


def lse_to_kernel_layout(lse, shape: LeanShape):
    """Returns `[B, T, N]` as `[output tiles, cols]`; -inf where there is no query. `shape.tokens` is not None."""
    query_like = to_kernel_layout(lse[..., None], shape, multiple=1)[..., 0]
    padding = shape.col_blocks * shape.tokens - query_like.shape[1]
    padded = jnp.pad(query_like, [(0, 0), (0, padding), (0, 0)], constant_values=-jnp.inf)
    blocks = padded.reshape(shape.batch, shape.col_blocks, shape.tokens, shape.num_kv_heads, -1)
    return blocks.transpose(0, 3, 1, 4, 2).reshape(shape.num_output_tiles, shape.cols)


def lse_from_kernel_layout(lse, query_shape, shape: LeanShape):
    """Returns `[output tiles, cols]` as `[B, T, N]`; `query_shape` has no head dim."""
    if shape.tokens is None:
        return _unfold(lse, query_shape, shape)
    blocks = lse.reshape(shape.batch, shape.num_kv_heads, shape.col_blocks, -1, shape.tokens).transpose(0, 2, 4, 1, 3)
    query_like = blocks.reshape(shape.batch, shape.col_blocks * shape.tokens, -1)
    return _rolled(query_like, query_shape, shape)


def query_slices(shape: LeanShape, output_tile, first, count: int):
    """Yields where the query columns `first .. first + count` of an output tile lie, if `shape.tokens` is not None.

    Each is `(offset, size, index)`: the offset is from `first`, and `query[index]` of `[B, T, N, H]` is `[size, H]`. It
    may reach beyond T: copies fill that with zeros, and do not write there. With `shape.group` the index has the KV
    head, and numbers of rows (t, g) instead of queries.

    Args:
      output_tile: its number, of `shape.num_output_tiles`.
      first: a multiple of `count`.
    """
    size = min(count, shape.tokens)
    group = shape.cols // shape.tokens
    sequence = lax.div(output_tile, shape.output_tiles_per_sequence)
    within = lax.rem(output_tile, shape.output_tiles_per_sequence)
    head, block = lax.div(within, shape.col_blocks), lax.rem(within, shape.col_blocks)
    for offset in range(0, count, size):
        column = jnp.asarray(first + offset, jnp.int32)
        start = pl.multiple_of(block * shape.tokens + lax.rem(column, shape.tokens), 8)
        yield offset, size, (sequence, pl.ds(start, size), head * group + lax.div(column, shape.tokens))


def column_index(shape: LeanShape, output_tile):
    """Returns the index of an output tile's query columns in the lean kernel's query; some may lie out of bounds."""
    if shape.tokens is None:
        return output_tile, pl.ds(output_tile * 0, shape.cols)
    ((_, _, index),) = query_slices(shape, output_tile, 0, shape.cols)
    return index


def _fold(query, shape: LeanShape):
    """Returns `[B, T, K G, H]` as `[output tiles, columns, H]`: the query columns (t, g) of each KV head, in blocks."""
    batch, num_queries, num_heads, head_dim = query.shape
    group = num_heads // shape.num_kv_heads
    count = num_queries * group
    grouped = query.reshape(batch, num_queries, shape.num_kv_heads, group, head_dim)
    columns = grouped.swapaxes(1, 2).reshape(batch, shape.num_kv_heads, count, head_dim)
    if shape.col_blocks == 1 and (count == shape.cols or shape.cols <= MAX_SPARE_COLUMNS):
        return columns.reshape(shape.num_output_tiles, count, head_dim)
    columns = jnp.pad(columns, [(0, 0), (0, 0), (0, shape.col_blocks * shape.cols - count), (0, 0)])
    return columns.reshape(shape.num_output_tiles, shape.cols, head_dim)


def _unfold(folded, query_shape, shape: LeanShape):
    """Returns the inverse of `_fold`, for out `[output tiles, columns, H]` and lse `[output tiles, columns]`."""
    batch, num_queries, num_heads = query_shape[:3]
    group = num_heads // shape.num_kv_heads
    columns = folded.reshape(batch, shape.num_kv_heads, -1, *folded.shape[2:])[:, :, : num_queries * group]
    grouped = columns.reshape(batch, shape.num_kv_heads, num_queries, group, *folded.shape[2:])
    return grouped.swapaxes(1, 2).reshape(query_shape)
