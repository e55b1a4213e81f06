"""A CTA's walk along its run of KV tiles, and what is visible there."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from tree_attn.kernels import kv_parts
from tree_attn.kernels.lean_layout import (
    FIRST_SLOT,
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
    lanes,
    static_runs,
)
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
class OutputTile:
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
class Segment:
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

    def is_query_awaited(self, run: Run, num_places: int):
        """Returns whether the moving warpgroup waits for the query's place to be free.

        With one place the moving warpgroup waits before the next output tile. With more places the number of output
        tiles to come is unknown, so it waits at the run's end too.
        """
        return num_places > 1 or self.kv_tiles_done + self.num_kv_tiles < run.num_kv_tiles


def run_of_cta(tables, shape: LeanShape, config: LeanConfig, cta=None) -> Run:
    """Returns a CTA's run, from the table of runs or, if the schedule is static, from the CTA's number.

    Args:
      cta: its number; default: this CTA's.
    """
    cta, count = lax.axis_index("cta") if cta is None else cta, lanes(shape, config)
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
            OutputTile(
                index=index,
                sequence=sequence,
                head=lax.div(within, shape.col_blocks),
                col_block=lax.rem(within, shape.col_blocks),
                first_slot=first_slot,
                num_kv_tiles=kv_tiles,
                span_end=span_end,
            ),
            Segment(
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


def tile_slots(shape: LeanShape, config: LeanConfig, output_tile: OutputTile, kv_tile):
    """Returns the first slot that is read as number `kv_tile` of an output tile, and the first that counts.

    They differ where a KV tile would reach the broken group of 8 slots at the array's end. It begins earlier then, to
    end with the array, and slots before its own do not count a second time.
    """
    first_slot = output_tile.first_slot + kv_tile * config.block_kv
    if not kv_parts.has_broken_group(shape):
        return first_slot, first_slot
    return jnp.minimum(first_slot, max(shape.num_slots - config.block_kv, 0)), first_slot


def visible_slots(tables, shape: LeanShape, output_tile: OutputTile, first, count: int, layout):
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


def shared_slots(tables, shape: LeanShape, output_tile: OutputTile):
    """Returns first and end slot of what all rows of a sequence see; None where that is what each sees."""
    if shape.mask != "columns":
        return None
    return tuple(tables["sequences"][output_tile.sequence, i] for i in (SHARED_START, SHARED_END))


def span_of_keys(tables, output_tile: OutputTile):
    """Returns first and end slot of what any of the sequence's queries see; None where all slots hold keys."""
    if "sequences" not in tables:
        return None
    return tuple(tables["sequences"][output_tile.sequence, i] for i in (SPAN_START, SPAN_END))
