"""The lean kernel's layout: what is static of a call, what is tuned, and where its partial states lie."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from tree_attn.kernels.schedule import num_runs, partials_of_row

ROWS = 64  # that a tensor core takes at a time
TALL_ROWS = 2 * ROWS  # query columns of a block where they are the rows of the tensor core; else there are at most 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeanConfig:
    """What is tuned per device: tile size, pipeline depth, CTAs.

    block_kv:    keys per tile, a multiple of 64
    num_stages:  tiles of K and of V in flight per CTA
    num_ctas:    runs at most; all must be resident at once for the schedule to be fair
    """

    block_kv: int = 64
    num_stages: int = 3
    num_ctas: int = 264

    def __post_init__(self):
        if self.block_kv < ROWS or self.block_kv % ROWS:
            raise ValueError(f"block_kv must be a multiple of {ROWS}, got {self.block_kv}")
        if self.num_stages < 2:
            raise ValueError(f"num_stages must be at least 2, got {self.num_stages}")
        if self.num_ctas < 1:
            raise ValueError(f"num_ctas must be at least 1, got {self.num_ctas}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeanShape:
    """The static part of a call, as both kernels see it.

    rows_per_sequence: KV heads times blocks of query columns; block_cols of the latter per head
    cols:              query columns of a block, padded to a multiple of 8
    static_tiles:      tiles of every row if that is known when compiling (no lengths, or no slots beyond the first
                       tile), else None
    mask:              "none"; "span": one range of slots per sequence; "columns": one per query column
    num_slots:         slots per sequence, what ends the span of a static schedule
    page_size:         keys per page where K and V are paged, else None
    is_packed:         K and V hold all sequences end to end
    tokens:            queries of a block, where they are read and written as they lie, `[B, T, N, H]`: columns are then
                       (g, t), `cols = G * tokens`; None where they come folded, `[rows, columns, H]`, as (t, g)
    whole_rows:        the table of runs cuts no row
    """

    batch: int
    num_kv_heads: int
    col_blocks: int
    cols: int
    head_dim: int
    scale: float
    soft_cap: float | None
    mask: str
    num_slots: int
    static_tiles: int | None = None
    page_size: int | None = None
    is_packed: bool = False
    whole_rows: bool = False
    tokens: int | None = None
    dtype: Any  # of the query, in which tensor cores multiply
    key_dtype: Any  # of K and V as stored; float8_e4m3fn is widened in registers

    replace = dataclasses.replace

    @property
    def is_tall(self) -> bool:
        """Of the kernel that takes query columns for rows (`tall_kernel.py`)."""
        return self.cols == TALL_ROWS

    @property
    def is_widened(self) -> bool:
        return self.key_dtype != self.dtype

    @property
    def rows_per_sequence(self) -> int:
        return self.num_kv_heads * self.col_blocks

    @property
    def num_rows(self) -> int:
        return self.batch * self.rows_per_sequence

    @property
    def padded_head_dim(self) -> int:
        """V's columns are rows of O^T, which a tensor core takes 64 at a time."""
        return -(-self.head_dim // 64) * 64


def pieces(shape: LeanShape, row, first, count: int):
    """Where the query columns `first .. first + count` of a row are, if `shape.tokens`: `(offset, size, index)` each.

    The offset is from `first`, and `query[index]` of `[B, T, N, H]` is `[size, H]`. It may reach beyond T: copies fill
    that with zeros, and do not write there.

    Args:
      row: its number, of `shape.num_rows`.
      first: a multiple of `count`.
    """
    size = min(count, shape.tokens)
    group = shape.cols // shape.tokens
    sequence, within = lax.div(row, shape.rows_per_sequence), lax.rem(row, shape.rows_per_sequence)
    head, block = lax.div(within, shape.col_blocks), lax.rem(within, shape.col_blocks)
    for offset in range(0, count, size):
        column = jnp.asarray(first + offset, jnp.int32)
        start = pl.multiple_of(block * shape.tokens + lax.rem(column, shape.tokens), 8)
        yield offset, size, (sequence, pl.ds(start, size), head * group + lax.div(column, shape.tokens))


def columns_of(shape: LeanShape, row):
    """The index of all query columns of a row, in what the lean kernel is given; some may lie out of bounds."""
    if shape.tokens is None:
        return row, pl.ds(row * 0, shape.cols)
    ((_, _, where),) = pieces(shape, row, 0, shape.cols)
    return where


# Columns of the table of sequences.
FIRST_SLOT, NUM_TILES, OFFSET, SPAN_START, SPAN_END = range(5)


def smem_bytes(shape: LeanShape, config: LeanConfig) -> int:
    """Shared memory of one CTA of the first kernel."""
    itemsize = jnp.dtype(shape.dtype).itemsize
    tile = config.block_kv * (shape.head_dim + shape.padded_head_dim)
    stages = config.num_stages * tile * jnp.dtype(shape.key_dtype).itemsize + shape.is_widened * tile * itemsize
    queries = shape.cols * (2 * shape.head_dim + config.block_kv) * itemsize
    results = shape.cols * (shape.padded_head_dim + 2) * 4
    return stages + queries + results + scratch_bytes(shape) + 1024


def scratch_bytes(shape: LeanShape) -> int:
    """Of shared memory, for reductions over keys, which cross warps."""
    return 4 * 4 * 8 * shape.cols


def has_whole_rows(shape: LeanShape, config: LeanConfig) -> bool:
    """Whether no run ends within a row, as far as is known when compiling."""
    if shape.static_tiles is None:
        return shape.whole_rows
    runs = num_runs(shape.num_rows * shape.static_tiles, config.num_ctas)
    return shape.static_tiles == 1 or shape.num_rows % runs == 0


def num_partials(shape: LeanShape, config: LeanConfig) -> int:
    """That runs leave at most: one at every CTA's end and one at every row's."""
    return config.num_ctas + shape.num_rows


def partials_of(shape: LeanShape, config: LeanConfig, sequences_ref, row):
    """First partial of `row`, and how many."""
    if shape.static_tiles is not None:
        total = shape.num_rows * shape.static_tiles
        runs = num_runs(total, config.num_ctas)
        return partials_of_row(row, row * shape.static_tiles, shape.static_tiles, total, runs)
    sequence, within = lax.div(row, shape.rows_per_sequence), lax.rem(row, shape.rows_per_sequence)
    row_tiles = sequences_ref[sequence, NUM_TILES]
    first = sequences_ref[sequence, OFFSET] + within * row_tiles
    last = shape.batch - 1
    total = sequences_ref[last, OFFSET] + shape.rows_per_sequence * sequences_ref[last, NUM_TILES]
    return partials_of_row(row, first, row_tiles, total, num_runs(total, config.num_ctas))


def spans_of_rows(shape: LeanShape, config: LeanConfig, tables):
    """Which partials are of a row, int32 `[rows, 2]`: from the first up to the second."""
    if shape.static_tiles is not None:  # on the host: XLA would compute it again at every step
        spans = [partials_of(shape, config, None, row) for row in range(shape.num_rows)]
        return jnp.asarray(np.array([(first, first + count) for first, count in spans], np.int32))
    first, count = partials_of(shape, config, tables["sequences"], jnp.arange(shape.num_rows, dtype=jnp.int32))
    return jnp.stack([first, first + count], axis=1)
