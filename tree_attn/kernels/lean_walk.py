"""A CTA's walk along its run of KV tiles, and the warpgroup that moves queries, keys and values."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.kernels import kv_parts
from tree_attn.kernels.lean_layout import (
    FIRST_SLOT,
    GRAIN,
    MAX_SPARE_COLUMNS,
    NUM_KV_TILES,
    RUN_FIRST_SLOT,
    RUN_NUM_KV_TILES,
    RUN_SPAN_END,
    SHARED_END,
    SHARED_START,
    SPAN_END,
    SPAN_START,
    LeanConfig,
    LeanShape,
    has_whole_output_tiles,
    lanes,
    static_runs,
)
from tree_attn.kernels.plain_copies import copy_rows
from tree_attn.kernels.registers import load
from tree_attn.kernels.schedule import quotient, remainder, run_start


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A CTA's run: where it begins and how many KV tiles it has (scalars in the kernel).

    sequence, output_tile, kv_tile:  of its first KV tile; numbers within the sequence, and within the output tile
    table, row:  the table of runs and the run's place there, or None where the schedule is known when compiling
    """

    sequence: Any
    output_tile: Any
    kv_tile: Any
    num_kv_tiles: Any
    table: Any = None
    row: Any = None

    def first_output_tile(self, shape: LeanShape):
        """Returns the number of its first output tile among those of all sequences."""
        return self.sequence * shape.output_tiles_per_sequence + self.output_tile


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OutputTile:
    """One output tile: its number, sequence, KV head, block of columns, first KV tile's first slot, and KV tiles.

    span_end:  end of the sequence's visible slots, where the walk was asked for it
    """

    index: Any
    sequence: Any
    head: Any
    col_block: Any
    first_slot: Any
    num_kv_tiles: Any
    span_end: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Segment:
    """A run's part within one output tile.

    kv_tile, num_kv_tiles:  its first KV tile within the output tile, and how many it has
    kv_tiles_done, output_tiles_done:  how many of the run come before it
    """

    kv_tile: Any
    num_kv_tiles: Any
    kv_tiles_done: Any
    output_tiles_done: Any

    def query_place(self, num_places: int):
        """Returns which of `num_places` places holds the output tile's query."""
        return 0 if num_places == 1 else lax.rem(self.output_tiles_done, num_places)

    def if_query_is_awaited(self, run: Run, num_places: int):
        """Decorates the arrival at "the query's place is free", which runs only if the moving warpgroup waits for it.

        With one place the moving warpgroup waits before the next output tile. With more places the number of output
        tiles to come is unknown, so it waits at the run's end too.
        """
        return pl.when(num_places > 1 or self.kv_tiles_done + self.num_kv_tiles < run.num_kv_tiles)


def run_of_cta(tables, shape: LeanShape, config: LeanConfig) -> Run:
    """Returns this CTA's run, from the table of runs or, if the schedule is static, from the CTA's number."""
    cta, count = lax.axis_index("cta"), lanes(shape, config)
    lane, number = remainder(cta, count), quotient(cta, count)
    if shape.static_kv_tiles is None:
        sequence, place, kv_tile, num_kv_tiles = (tables["runs"][number, i] for i in range(4))
        within = place * count + lane
        return Run(
            sequence=sequence, output_tile=within, kv_tile=kv_tile, num_kv_tiles=num_kv_tiles, table=tables["runs"],
            row=number,
        )  # fmt: skip
    # All is known but the CTA's number: no table to wait for.
    total, runs = static_runs(shape, config)
    start, end = run_start(number, total, runs), run_start(number + 1, total, runs)
    index = lax.div(start, shape.static_kv_tiles) * count + lane
    return Run(
        sequence=lax.div(index, shape.output_tiles_per_sequence),
        output_tile=lax.rem(index, shape.output_tiles_per_sequence),
        kv_tile=lax.rem(start, shape.static_kv_tiles),
        num_kv_tiles=jnp.where(number < runs, end - start, 0),
    )


def walk(run: Run, tables, shape: LeanShape, config: LeanConfig, attend_segment, *, is_first_to_read=False) -> Any:
    """Calls `attend_segment(output_tile, segment)` for every output tile that the run touches, in order.

    Args:
      is_first_to_read: nothing hides how long a table takes to read. So what is known of the first output tile from
        the table of runs is not read from the other one; and output tiles have `span_end`, if there are tables.
    Returns:
      How many output tiles those are.
    """

    def of_sequence(sequence, kv_tiles_done):
        read = lambda *columns: tuple(tables["sequences"][sequence, i] for i in columns)
        if shape.static_kv_tiles is not None:
            span_end = read(SPAN_END)[0] if is_first_to_read and "sequences" in tables else None
            return 0, shape.static_kv_tiles, span_end
        if not is_first_to_read:
            return *read(FIRST_SLOT, NUM_KV_TILES), None
        of_run = lambda: tuple(run.table[run.row, i] for i in (RUN_FIRST_SLOT, RUN_NUM_KV_TILES, RUN_SPAN_END))
        return lax.cond(kv_tiles_done == 0, of_run, lambda: read(FIRST_SLOT, NUM_KV_TILES, SPAN_END))

    def is_left(carry):
        return carry[3] < run.num_kv_tiles

    def step(carry):
        sequence, within, kv_tile, kv_tiles_done = carry
        first_slot, kv_tiles, span_end = of_sequence(sequence, kv_tiles_done)
        num_kv_tiles = jnp.minimum(run.num_kv_tiles - kv_tiles_done, kv_tiles - kv_tile)
        index = sequence * shape.output_tiles_per_sequence + within
        attend_segment(
            _OutputTile(
                index=index,
                sequence=sequence,
                head=lax.div(within, shape.col_blocks),
                col_block=lax.rem(within, shape.col_blocks),
                first_slot=first_slot,
                num_kv_tiles=kv_tiles,
                span_end=span_end,
            ),
            _Segment(
                kv_tile=kv_tile,
                num_kv_tiles=num_kv_tiles,
                kv_tiles_done=kv_tiles_done,
                output_tiles_done=quotient(index - first_index, count),
            ),
        )
        is_last = within >= shape.output_tiles_per_sequence - count
        next_sequence = jnp.where(is_last, sequence + 1, sequence)
        first_within = within + (count - shape.output_tiles_per_sequence) if count > 1 else 0
        next_within = jnp.where(is_last, first_within, within + count)
        return next_sequence, next_within, jnp.int32(0), kv_tiles_done + num_kv_tiles

    # Output tiles are counted by their numbers, not in the loop: some kernels have no register left for a count.
    count = lanes(shape, config)
    first_index = run.first_output_tile(shape)
    begin = (run.sequence, run.output_tile, run.kv_tile, jnp.int32(0))
    sequence, within, *_ = lax.while_loop(is_left, step, begin)
    return quotient(sequence * shape.output_tiles_per_sequence + within - first_index, count)


def stage_of(kv_tile, config: LeanConfig):
    """Returns the stage of a run's KV tile, by its number in the run."""
    # A stage that the compiler knows to be 0 has addresses that it computes before all loops: they took 70 registers.
    return lax.rem(kv_tile, config.num_stages) if config.num_stages > 1 else lax.shift_right_logical(kv_tile, 31)


def tile_slots(shape: LeanShape, config: LeanConfig, output_tile: _OutputTile, kv_tile):
    """Returns the first slot that is read as number `kv_tile` of an output tile, and the first that counts.

    They differ where a KV tile would reach the broken group of 8 slots at the array's end. It begins earlier then, to
    end with the array, and slots before its own do not count a second time.
    """
    first_slot = output_tile.first_slot + kv_tile * config.block_kv
    if not kv_parts.has_broken_group(shape):
        return first_slot, first_slot
    return jnp.minimum(first_slot, max(shape.num_slots - config.block_kv, 0)), first_slot


def visible_slots(tables, shape: LeanShape, output_tile: _OutputTile, first, count: int, layout):
    """Returns first and end visible slot: scalars of the sequence, or `[count]` if each query column has its own.

    Args:
      first, count: of the columns, or rows, of the block; layout: of what is returned for them.
    """
    if shape.mask == "none":
        return None, None
    if shape.mask == "span":
        if "sequences" not in tables:
            return 0, shape.num_slots
        return span_of_keys(tables, output_tile)
    columns = pl.ds(pl.multiple_of(output_tile.col_block * shape.cols + first, 8), count)
    return tuple(load(tables["columns"].at[i, output_tile.sequence, columns], layout) for i in range(2))


def shared_slots(tables, shape: LeanShape, output_tile: _OutputTile):
    """Returns first and end slot of what all rows of a sequence see; None where that is what each sees."""
    if shape.mask != "columns":
        return None
    return tuple(tables["sequences"][output_tile.sequence, i] for i in (SHARED_START, SHARED_END))


def span_of_keys(tables, output_tile: _OutputTile):
    """Returns first and end slot of what any of the sequence's queries see; None where all slots hold keys."""
    if "sequences" not in tables:
        return None
    return tuple(tables["sequences"][output_tile.sequence, i] for i in (SPAN_START, SPAN_END))


class Barriers(NamedTuple):
    """Barriers between moving and computing warpgroups: one per query in flight, and one per stage of K and of V."""

    query_free: Any
    key_full: Any
    key_free: Any
    value_full: Any
    value_free: Any


def move_tiles(
    tables, shape: LeanShape, config: LeanConfig, run: Run, move_query, num_queries: int, refs, smems, barriers
) -> None:
    """Moves the query of every output tile that the run touches, and all KV tiles of the run.

    Args:
      move_query: `(output_tile, place)`, begins the copy of its query.
      num_queries: places for queries.
      refs, smems: of keys and of values.
    """
    (key_ref, value_ref), (key_smem, value_smem) = refs, smems
    query_free, key_full, key_free, value_full, value_free = barriers
    stages = config.num_stages
    value_dims, tilings = value_smem.shape[-1], kv_parts.kv_tilings(shape, config)

    def move_segment(output_tile, segment):
        query_place = segment.query_place(num_queries)

        @pl.when(segment.output_tiles_done >= num_queries)
        def _():
            plgpu.barrier_wait(query_free.at[query_place])

        move_query(output_tile, query_place)

        def kv_tile_step(i, _):
            kv_tile = segment.kv_tiles_done + i
            stage = stage_of(kv_tile, config)
            first, _ = tile_slots(shape, config, output_tile, segment.kv_tile + i)
            if shape.is_gathered:
                pages = _pages_of_tile(tables, shape, config, output_tile, first)
                copy = functools.partial(_copy_pages, shape, pages, output_tile.head, stage)
            elif shape.target.is_hopper:
                place = _locate(tables, shape, config, output_tile, first)
                num_seen = None
                if trims_tiles(tables, shape, config):
                    num_seen = output_tile.span_end - first
                copy = functools.partial(_copy_tile, shape, config, place, stage, num_seen)
            else:
                copy = functools.partial(_copy_rows, tables, shape, config, output_tile, first, stage)
            is_refill = kv_tile >= stages

            @pl.when(is_refill)
            def _():
                plgpu.barrier_wait(key_free.at[stage])

            copy(key_ref, key_smem, key_full, tilings[0], slice(None))

            @pl.when(is_refill)
            def _():
                plgpu.barrier_wait(value_free.at[stage])

            columns = slice(None) if value_dims == shape.head_dim else pl.ds(output_tile.index * 0, value_dims)
            # A weight of zero does not make zero of what may be NaN, so what is not read of values is zero.
            beyond = value_ref.shape[1] + output_tile.index * 0
            copy(value_ref, value_smem, value_full, tilings[1], columns, zeros_from=beyond)

        lax.fori_loop(0, segment.num_kv_tiles, kv_tile_step, None)

    num_output_tiles = walk(run, tables, shape, config, move_segment, is_first_to_read=True)

    def await_last(i, _):  # so that no arrival is left over
        plgpu.barrier_wait(query_free.at[lax.rem(i, num_queries)])

    if num_queries > 1:
        lax.fori_loop(jnp.maximum(num_output_tiles - num_queries, 0), num_output_tiles, await_last, None)


def trims_tiles(tables, shape: LeanShape, config: LeanConfig) -> bool:
    """Returns whether an output tile's last KV tile is read up to the last visible slot only.

    That saves much where output tiles are short. Kernels with many query columns, or with an exchange, have no
    registers for it.
    """
    if "sequences" not in tables or shape.is_many_query or not shape.target.is_hopper:
        return False
    if shape.is_gathered:  # page by page, which takes none
        return True
    return has_whole_output_tiles(shape, config) or (shape.cols <= MAX_SPARE_COLUMNS and "spans" not in tables)


def num_arrivals(tables, shape: LeanShape, config: LeanConfig) -> tuple[int, int]:
    """Returns how many copies arrive at the barrier of a KV tile of keys, and at that of values."""
    if not shape.target.is_hopper:
        return 1, 1
    if shape.is_gathered:
        return (config.block_kv // shape.page_size,) * 2
    if kv_parts.has_broken_group(shape):
        return (kv_parts.num_arrivals(config),) * 2
    return 1, 1 + trims_tiles(tables, shape, config)


def _copy_tile(
    shape: LeanShape, config: LeanConfig, place, stage, num_seen, ref, smem, barriers, transforms, columns,
    zeros_from=None,
) -> None:  # fmt: skip
    """Begins the copy of a KV tile.

    Args:
      place: from `_locate`.
      num_seen: visible slots; fewer than `GRAIN` more are read. None: all slots of the KV tile are.
      ref, smem, barriers, transforms: of keys or values; shared memory and barriers have an axis of stages.
      columns: index of the head dims.
      zeros_from: a slot out of bounds, from which the rest is filled with zeros by a second copy. None: the rest of
        `smem` stays as it is.
    """
    block, start, head = place
    if kv_parts.has_broken_group(shape):
        fills = zeros_from is not None
        kv_parts.copy_slots(ref, smem, barriers, stage, place, num_seen, columns, transforms, fills=fills)
    else:
        ref_of = lambda slots: ref.at[block, slots, head, columns]
        _copy_seen(ref_of, smem.at[stage], barriers.at[stage], start, num_seen, zeros_from)


def _pages_of_tile(tables, shape: LeanShape, config: LeanConfig, output_tile: _OutputTile, first):
    """Returns `(page, first slot in it)` of each page of the KV tile that begins at slot `first`.

    A page of which no key is seen has its first slot out of bounds, and is not looked up: the table may have no more.
    """
    size, found = shape.page_size, []
    end = shape.num_slots if output_tile.span_end is None else output_tile.span_end
    for slot in (first + i for i in range(0, config.block_kv, size)):
        is_seen = slot < end
        page = tables["pages"][output_tile.sequence, jnp.where(is_seen, lax.div(slot, size), 0)]
        found.append((page, pl.multiple_of(jnp.where(is_seen, 0, size), 8)))
    return found


def _copy_pages(
    shape: LeanShape, pages, head, stage, ref, smem, barriers, transforms, columns, zeros_from=None
) -> None:
    """Begins the copy of a KV tile from its pages; what is out of bounds becomes zeros.

    Args:
      pages: from `_pages_of_tile`; head: the KV head; the others as in `_copy_tile`.
    """
    size = shape.page_size
    for i, (page, start) in enumerate(pages):
        part = smem.at[stage, pl.ds(i * size, size)]
        plgpu.copy_gmem_to_smem(ref.at[page, pl.ds(start, size), head, columns], part, barriers.at[stage])


def _copy_rows(
    tables, shape: LeanShape, config: LeanConfig, output_tile, first, stage, ref, smem, barriers, transforms,
    columns=None, zeros_from=None,
) -> None:  # fmt: skip
    """Begins the copy of a KV tile without TMA; arguments as in `_copy_tile`, `first` its first slot."""
    seen = span_of_keys(tables, output_tile) or (0, shape.num_slots)
    options = {"head": output_tile.head}
    if shape.page_size is None:
        options["block"] = 0 if shape.is_packed else output_tile.sequence
    elif shape.page_size % config.block_kv:
        options["pages"] = tables["pages"], output_tile.sequence
    else:
        options["block"] = tables["pages"][output_tile.sequence, lax.div(first, shape.page_size)]
        before = first - lax.rem(first, shape.page_size)
        first, seen = first - before, tuple(slot - before for slot in seen)
    copy_rows(ref, smem.at[stage], transforms, barriers, stage, first, seen, **options)


def _copy_seen(ref_of, smem, barrier, start, num_seen, zeros_from) -> None:
    """Begins the copy of a KV tile from slot `start` on; arguments as in `_copy_tile`."""
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


def _locate(tables, shape: LeanShape, config: LeanConfig, output_tile: _OutputTile, slot):
    """Returns `(block, start, head)`: `key[block, start:]` holds the KV tile that begins at `slot` of the sequence."""
    if shape.page_size is not None:
        page = tables["pages"][output_tile.sequence, lax.div(slot, shape.page_size)]
        return page, pl.multiple_of(lax.rem(slot, shape.page_size), 8), output_tile.head
    slot = slot if kv_parts.has_broken_group(shape) else pl.multiple_of(slot, 8)
    return 0 if shape.is_packed else output_tile.sequence, slot, output_tile.head
