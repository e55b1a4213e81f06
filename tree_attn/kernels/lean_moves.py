"""The warpgroup that moves an output tile's query, and the keys and values of a CTA's run of KV tiles."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.kernels import kv_parts
from tree_attn.kernels.lean_layout import (
    MAX_SPARE_COLUMNS,
    LeanConfig,
    LeanShape,
    grain_of,
    has_whole_output_tiles,
)
from tree_attn.kernels.lean_walk import OutputTile, Run, Segment, span_of_keys, tile_slots, walk
from tree_attn.kernels.overlap import await_previous_kernel
from tree_attn.kernels.plain_copies import copy_rows

MAX_TRIMMED_ACCUMULATORS = 8192  # query columns times padded head dims, from which on a register is spilled


class Barriers(NamedTuple):
    """Barriers between moving and computing warpgroups: one per query in flight, and one per stage of K and of V."""

    query_free: Any
    key_full: Any
    key_free: Any
    value_full: Any
    value_free: Any


def move_tiles(
    tables, shape: LeanShape, config: LeanConfig, run: Run, move_query, num_queries: int, refs, smems, barriers,
    stream=0, reads_early: bool = False,
) -> None:  # fmt: skip
    """Moves the query of every output tile that the run touches, and all KV tiles of the run.

    Args:
      move_query: `(output_tile, place)`, begins the copy of its query.
      num_queries: places for queries.
      refs, smems: of keys and of values.
      stream: which of `shape.streams` it is, each with places, stages and barriers of its own.
      reads_early: begin with old keys, and wait for the previous kernel then: the caller has not.
    """
    (key_ref, value_ref), (key_smem, value_smem) = refs, smems
    query_free, key_full, key_free, value_full, value_free = barriers
    stages = config.num_stages
    value_dims, tilings = value_smem.shape[-1], kv_parts.kv_tilings(shape, config)

    def move_segment(output_tile, segment):
        query_place = segment.query_place(num_queries) + stream * num_queries

        @pl.when(segment.output_tiles_done >= num_queries)
        def _():
            plgpu.barrier_wait(query_free.at[query_place])

        def kv_tile_step(i, _):
            kv_tile = segment.kv_tiles_done + i
            stage = stage_of(kv_tile, config) + stream * stages
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
            copy(value_ref, value_smem, value_full, tilings[1], columns)

        num_early = 0
        if reads_early:
            num_early = num_early_kv_tiles(shape, config, output_tile, segment)
            lax.fori_loop(0, num_early, kv_tile_step, None)
            pl.when(segment.output_tiles_done == 0)(lambda: await_previous_kernel(shape.target))
        move_query(output_tile, query_place)
        lax.fori_loop(num_early, segment.num_kv_tiles, kv_tile_step, None)

    num_output_tiles = walk(run, tables, shape, config, move_segment, is_first_to_read=True)

    def await_last(i, _):  # so that no arrival is left over
        plgpu.barrier_wait(query_free.at[lax.rem(i, num_queries) + stream * num_queries])

    if num_queries > 1:
        lax.fori_loop(jnp.maximum(num_output_tiles - num_queries, 0), num_output_tiles, await_last, None)


def num_early_kv_tiles(shape: LeanShape, config: LeanConfig, output_tile: OutputTile, segment: Segment):
    """Returns how many KV tiles of a segment may be read before the previous kernel has ended.

    They hold old keys only (`LeanShape.num_new`), and have stages that are free from the start: the first of a run.
    """
    first, _ = tile_slots(shape, config, output_tile, segment.kv_tile)
    end = shape.num_slots if output_tile.span_end is None else output_tile.span_end
    num_old = lax.div(jnp.maximum(end - shape.num_new - first, 0), config.block_kv)
    with_stages = jnp.minimum(segment.num_kv_tiles, config.num_stages)
    return jnp.where(segment.output_tiles_done == 0, jnp.minimum(num_old, with_stages), 0)


def stage_of(kv_tile, config: LeanConfig):
    """Returns the stage of a run's KV tile, by its number in the run."""
    # A stage that the compiler knows to be 0 has addresses that it computes before all loops: they took 70 registers.
    return lax.rem(kv_tile, config.num_stages) if config.num_stages > 1 else lax.shift_right_logical(kv_tile, 31)


def trims_tiles(tables, shape: LeanShape, config: LeanConfig) -> bool:
    """Returns whether an output tile's last KV tile is read up to the last visible slot only.

    That saves much where output tiles are short. Values that are not read are made zero (`lean_garbage.py`). Kernels
    with many query columns, or with an exchange, have no registers for it.
    """
    if "sequences" not in tables or shape.is_many_query or not shape.target.is_hopper:
        return False
    if shape.is_gathered:  # page by page, which takes none
        return True
    if shape.padded_head_dim * shape.cols >= MAX_TRIMMED_ACCUMULATORS:
        return False
    return has_whole_output_tiles(shape, config) or (shape.cols <= MAX_SPARE_COLUMNS and "spans" not in tables)


def num_arrivals(shape: LeanShape, config: LeanConfig) -> int:
    """Returns how many copies arrive at the barrier of a KV tile of keys, or of values."""
    if shape.is_gathered:
        return config.block_kv // shape.page_size
    return kv_parts.num_arrivals(config) if kv_parts.has_broken_group(shape) else 1


def _copy_tile(
    shape: LeanShape, config: LeanConfig, place, stage, num_seen, ref, smem, barriers, transforms, columns
) -> None:
    """Begins the copy of a KV tile.

    Args:
      place: from `_locate`.
      num_seen: visible slots; fewer than `grain_of` more are read. None: all slots of the KV tile are.
      ref, smem, barriers, transforms: of keys or values; shared memory and barriers have an axis of stages.
      columns: index of the head dims.
    """
    (block, start, head), grain = place, grain_of(shape, config)
    if kv_parts.has_broken_group(shape):
        kv_parts.copy_slots(ref, smem, barriers, stage, place, num_seen, grain, columns, transforms)
    else:
        ref_of = lambda slots: ref.at[block, slots, head, columns]
        _copy_seen(ref_of, smem.at[stage], barriers.at[stage], start, num_seen, grain)


def _pages_of_tile(tables, shape: LeanShape, config: LeanConfig, output_tile: OutputTile, first):
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


def _copy_pages(shape: LeanShape, pages, head, stage, ref, smem, barriers, transforms, columns) -> None:
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
    columns=None,
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


def _copy_seen(ref_of, smem, barrier, start, num_seen, grain: int) -> None:
    """Begins the copy of a KV tile from slot `start` on; arguments as in `_copy_tile`."""
    block_kv = smem.shape[0]
    copy = lambda size: plgpu.copy_gmem_to_smem(ref_of(pl.ds(start, size)), smem.at[pl.ds(0, size)], barrier)
    if num_seen is None:
        copy(block_kv)
        return
    grains = jnp.clip(pl.cdiv(num_seen, grain), 1, block_kv // grain)
    for size in range(grain, block_kv + 1, grain):
        pl.when(grains == size // grain)(functools.partial(copy, size))


def _locate(tables, shape: LeanShape, config: LeanConfig, output_tile: OutputTile, slot):
    """Returns `(block, start, head)`: `key[block, start:]` holds the KV tile that begins at `slot` of the sequence."""
    if shape.page_size is not None:
        page = tables["pages"][output_tile.sequence, lax.div(slot, shape.page_size)]
        return page, pl.multiple_of(lax.rem(slot, shape.page_size), 8), output_tile.head
    slot = slot if kv_parts.has_broken_group(shape) else pl.multiple_of(slot, 8)
    return 0 if shape.is_packed else output_tile.sequence, slot, output_tile.head
