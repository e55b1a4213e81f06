"""How a CTA walks its run of tiles: which rows it touches; and the warpgroup that moves queries, keys and values."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.kernels.lean_layout import (
    FIRST_SLOT,
    NUM_TILES,
    SPAN_END,
    SPAN_START,
    LeanConfig,
    LeanShape,
    has_whole_rows,
)
from tree_attn.kernels.registers import load
from tree_attn.kernels.schedule import num_runs, run_start

GRAIN = 16  # slots by which less of a short row's last tile is read


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """A CTA's run: where it begins and how many tiles it has (scalars in the kernel)."""

    sequence: Any
    row: Any  # within the sequence
    tile: Any  # within the row
    num_tiles: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Row:
    """One output row: its number, sequence, KV head, block of columns, and the slot its first tile begins at."""

    index: Any
    sequence: Any
    head: Any
    col_block: Any
    first_slot: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Segment:
    """A run's tiles within one row: the first of them, how many, and how many tiles and rows of the run come before."""

    tile: Any
    num_tiles: Any
    tiles_done: Any
    rows_done: Any

    def query_slot(self, num_slots: int):
        """Where the row's query is, of so many places for one."""
        return 0 if num_slots == 1 else lax.rem(self.rows_done, num_slots)

    def if_query_is_awaited(self, run: _Run, num_slots: int):
        """Decorates what tells the moving warpgroup that the query's place is free, if that waits for it.

        With one place it does for the next row; with more of them, where the number of rows to come is not known, at
        the run's end too.
        """
        return pl.when(num_slots > 1 or self.tiles_done + self.num_tiles < run.num_tiles)


def run_of_cta(tables, shape: LeanShape, config: LeanConfig) -> _Run:
    cta = lax.axis_index("cta")
    if shape.static_tiles is None:
        sequence, row, tile, num_tiles = (tables["runs"][cta, i] for i in range(4))
        return _Run(sequence=sequence, row=row, tile=tile, num_tiles=num_tiles)
    # All is known but the CTA's number: no table to wait for.
    total = shape.num_rows * shape.static_tiles
    runs = num_runs(total, config.num_ctas)
    start, end = run_start(cta, total, runs), run_start(cta + 1, total, runs)
    index = lax.div(start, shape.static_tiles)
    return _Run(
        sequence=lax.div(index, shape.rows_per_sequence),
        row=lax.rem(index, shape.rows_per_sequence),
        tile=lax.rem(start, shape.static_tiles),
        num_tiles=jnp.where(cta < runs, end - start, 0),
    )


def walk(run: _Run, tables, shape: LeanShape, segment) -> Any:
    """Calls `segment(row, begin)` for every row that the run touches, in order, and returns how many those are."""

    def is_left(carry):
        return carry[3] < run.num_tiles

    def step(carry):
        sequence, row, tile, tiles_done = carry
        if shape.static_tiles is None:
            first_slot, row_tiles = (tables["sequences"][sequence, i] for i in (FIRST_SLOT, NUM_TILES))
        else:
            first_slot, row_tiles = 0, shape.static_tiles
        num_tiles = jnp.minimum(run.num_tiles - tiles_done, row_tiles - tile)
        index = sequence * shape.rows_per_sequence + row
        segment(
            _Row(
                index=index,
                sequence=sequence,
                head=lax.div(row, shape.col_blocks),
                col_block=lax.rem(row, shape.col_blocks),
                first_slot=first_slot,
            ),
            _Segment(tile=tile, num_tiles=num_tiles, tiles_done=tiles_done, rows_done=index - first_index),
        )
        is_last_row = row == shape.rows_per_sequence - 1
        next_sequence = jnp.where(is_last_row, sequence + 1, sequence)
        return next_sequence, jnp.where(is_last_row, 0, row + 1), jnp.int32(0), tiles_done + num_tiles

    # Rows are counted by their numbers, not in the loop: some kernels have no register left for it.
    first_index = run.sequence * shape.rows_per_sequence + run.row
    sequence, row, *_ = lax.while_loop(is_left, step, (run.sequence, run.row, run.tile, jnp.int32(0)))
    return sequence * shape.rows_per_sequence + row - first_index


def visible_slots(tables, shape: LeanShape, row: _Row, tile_shape=None, per_column=None):
    """First and end visible slot: scalars of the sequence, or `[kv, cols]` where each query column has its own."""
    if shape.mask == "none":
        return None, None
    if shape.mask == "span":
        if "sequences" not in tables:
            return 0, shape.num_slots
        return tuple(tables["sequences"][row.sequence, i] for i in (SPAN_START, SPAN_END))
    columns = pl.ds(pl.multiple_of(row.col_block * shape.cols, 8), shape.cols)
    refs = (tables["columns"].at[i, row.sequence, columns] for i in range(2))
    return tuple(lax.broadcast_in_dim(load(ref, per_column), tile_shape, [1]) for ref in refs)


class Barriers(NamedTuple):
    """What the moving warpgroup and those that compute wait for; one per query in flight, of K and V one per stage."""

    query_free: Any
    key_full: Any
    key_free: Any
    value_full: Any
    value_free: Any


def move_tiles(
    tables, shape: LeanShape, config: LeanConfig, run: _Run, move_query, num_queries: int, refs, smems, barriers
) -> None:
    """The moving warpgroup: the query of every row that the run touches, and all tiles of its keys and values.

    Args:
      move_query: `(row, slot)`, begins the copy of its query.
      num_queries: slots for them.
      refs, smems: of keys and of values.
    """
    (key_ref, value_ref), (key_smem, value_smem) = refs, smems
    query_free, key_full, key_free, value_full, value_free = barriers
    block_kv, stages = config.block_kv, config.num_stages
    value_dims = value_smem.shape[-1]

    def segment(row, begin):
        query_slot = begin.query_slot(num_queries)

        @pl.when(begin.rows_done >= num_queries)
        def _():
            plgpu.barrier_wait(query_free.at[query_slot])

        move_query(row, query_slot)

        def tile_step(i, _):
            tile = begin.tiles_done + i
            slot = lax.rem(tile, stages)
            first = row.first_slot + (begin.tile + i) * block_kv
            where = _locate(tables, shape, row, first)
            is_refill = tile >= stages
            num_seen = None
            if trims_tiles(tables, shape, config):
                num_seen = tables["sequences"][row.sequence, SPAN_END] - first

            @pl.when(is_refill)
            def _():
                plgpu.barrier_wait(key_free.at[slot])

            block, start, head = where
            keys = lambda rows: key_ref.at[block, rows, head]
            _copy_tile(keys, key_smem.at[slot], key_full.at[slot], start, num_seen)

            @pl.when(is_refill)
            def _():
                plgpu.barrier_wait(value_free.at[slot])

            columns = slice(None) if value_dims == shape.head_dim else pl.ds(row.index * 0, value_dims)
            values = lambda rows: value_ref.at[block, rows, head, columns]
            # A weight of zero does not make zero of what may be NaN, so what is not read of values is zero.
            beyond = value_ref.shape[1] + row.index * 0
            _copy_tile(values, value_smem.at[slot], value_full.at[slot], start, num_seen, zeros_from=beyond)

        lax.fori_loop(0, begin.num_tiles, tile_step, None)

    num_rows = walk(run, tables, shape, segment)

    def await_last(i, _):  # so that no arrival is left over
        plgpu.barrier_wait(query_free.at[lax.rem(i, num_queries)])

    if num_queries > 1:
        lax.fori_loop(jnp.maximum(num_rows - num_queries, 0), num_rows, await_last, None)


def trims_tiles(tables, shape: LeanShape, config: LeanConfig) -> bool:
    """Whether of a tile that reaches beyond a row's end no more is read than is seen: in short rows that is much."""
    return "sequences" in tables and has_whole_rows(shape, config) and not shape.is_tall


def _copy_tile(ref_of, smem, barrier, start, num_seen, zeros_from=None) -> None:
    """Begins the copy of a tile from row `start` on; given `num_seen`, of so many rows and less than `GRAIN` more.

    With `zeros_from`, a row out of bounds, the rest is zeros and there are two copies; else it stays as it is.
    """
    block_kv = smem.shape[0]
    copy = lambda start, at, size: plgpu.copy_gmem_to_smem(
        ref_of(pl.ds(start, size)), smem.at[pl.ds(at, size)], barrier
    )
    if num_seen is None:
        copy(start, 0, block_kv)
        return
    grains = jnp.clip(pl.cdiv(num_seen, GRAIN), 1, block_kv // GRAIN)
    for size in range(GRAIN, block_kv + 1, GRAIN):

        @pl.when(grains == size // GRAIN)
        def _(size=size):
            if zeros_from is None:
                copy(start, 0, size)
            elif size < block_kv:
                copy(start, 0, size)
                copy(zeros_from, size, block_kv - size)
            else:  # two, for the barrier's sake
                copy(start, 0, block_kv // 2)
                copy(start + block_kv // 2, block_kv // 2, block_kv // 2)


def _locate(tables, shape: LeanShape, row: _Row, slot):
    """Where `key[block, start:]` holds a tile that begins at `slot` of the sequence: `(block, start, head)`."""
    if shape.page_size is not None:
        page = tables["pages"][row.sequence, lax.div(slot, shape.page_size)]
        return page, pl.multiple_of(lax.rem(slot, shape.page_size), 8), row.head
    return 0 if shape.is_packed else row.sequence, pl.multiple_of(slot, 8), row.head
