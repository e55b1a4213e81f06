"""A CTA of the many-query kernel (`tall.py`) as its warpgroups run it: some move, two compute.

Shapes in comments: `rows` query rows of a warpgroup, `kv` keys of a KV tile, H head dim.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.kernels.interpreter import is_interpreted
from tree_attn.kernels.lean_garbage import zero_garbage
from tree_attn.kernels.lean_layout import MANY_QUERY_ROWS, ROWS, LeanConfig, LeanShape, partial_of
from tree_attn.kernels.lean_merge import finish_rows, finished
from tree_attn.kernels.lean_moves import Barriers, move_tiles, num_arrivals
from tree_attn.kernels.lean_walk import (
    OutputTile,
    Run,
    Segment,
    shared_slots,
    span_of_keys,
    tile_slots,
    visible_slots,
    walk,
)
from tree_attn.kernels.plain_copies import copy_rows, store_rows
from tree_attn.kernels.query_layout import is_by_rows, num_halves, query_slices
from tree_attn.kernels.registers import LOG2_E, LOWEST, full, scaled_logits, spread, tiling

COMPUTING = MANY_QUERY_ROWS // ROWS  # warpgroups
PART_ROWS = 16  # that threads copy at once; no block has fewer rows of a head
PER_ROW = plgpu.Layout.WGMMA.reduce(1)


def tall_scratch(shape: LeanShape, config: LeanConfig, query_ref) -> dict[str, Any]:
    """Returns the shared memory and the barriers of a CTA, by the names of `TallCta`'s fields."""
    stages, halves, queries = shape.streams * config.num_stages, shape.cols // ROWS, shape.streams * shape.query_places
    kv_arrivals = num_arrivals(shape, config)
    smem = functools.partial(plgpu.SMEM, dtype=shape.dtype, transforms=tiling(shape.dtype, shape.head_dim))
    query_arrivals = ROWS // PART_ROWS if is_by_rows(shape, query_ref) else max(1, ROWS // shape.tokens)
    weights = {}
    if is_interpreted():
        transforms = tiling(shape.dtype, config.block_kv)
        weights["weights_smem"] = smem((COMPUTING, ROWS, config.block_kv), transforms=transforms)
    return dict(
        query_smem=smem((queries * halves, ROWS, shape.head_dim)),
        key_smem=smem((stages, config.block_kv, shape.head_dim)),
        value_smem=smem((stages, config.block_kv, shape.head_dim)),
        stats_smem=plgpu.SMEM((COMPUTING, ROWS), jnp.float32),
        query_full=plgpu.Barrier(num_barriers=queries * halves, num_arrivals=query_arrivals),
        query_free=plgpu.Barrier(num_barriers=queries, num_arrivals=halves),
        key_full=plgpu.Barrier(num_barriers=stages, num_arrivals=kv_arrivals),
        key_free=plgpu.Barrier(num_barriers=stages, num_arrivals=halves),
        value_full=plgpu.Barrier(num_barriers=stages, num_arrivals=kv_arrivals),
        value_free=plgpu.Barrier(num_barriers=stages, num_arrivals=halves),
        turn=plgpu.Barrier(num_arrivals=COMPUTING),
        **weights,
    )


@dataclasses.dataclass(frozen=True)
class _Part:
    """Half of an output tile's queries, with which a warpgroup attends along a segment of the run.

    query:              of the half, in shared memory
    visible, shared:    first and end of the slots that each row sees, `[rows]` or scalars, and that all rows see
    span:               of keys that are not garbage
    key_scale:          of the head; None: keys have none
    """

    output_tile: OutputTile
    segment: Segment
    query: Any
    visible: tuple[Any, Any]
    shared: tuple[Any, Any]
    span: Any
    key_scale: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class TallCta:
    """A CTA as one of its warpgroups runs it.

    Attributes:
      tables: references by name; query_ref, key_ref, value_ref: of arguments; outputs: of what it writes.
      run: of the stream; cta: the run's number.
      stream, half: of which the warpgroup is; warpgroup: its number. One that moves has no half.
      others: of `tall_scratch`.
    """

    tables: dict
    shape: LeanShape
    config: LeanConfig
    query_ref: Any
    key_ref: Any
    value_ref: Any
    outputs: tuple
    run: Run
    cta: Any
    stream: Any
    half: Any
    warpgroup: Any
    query_smem: Any
    key_smem: Any
    value_smem: Any
    stats_smem: Any
    query_full: Any
    query_free: Any
    key_full: Any
    key_free: Any
    value_full: Any
    value_free: Any
    turn: Any
    weights_smem: Any = None

    @property
    def _halves(self) -> int:
        return self.shape.cols // ROWS

    @property
    def _has_rows(self) -> bool:
        return is_by_rows(self.shape, self.query_ref)

    @property
    def _is_plain(self) -> bool:
        """Returns whether nothing but the scale is done to logits: it joins the subtraction of the maximum then."""
        return self.shape.logits_soft_cap is None and "scales" not in self.tables and self.shape.scale > 0

    def move(self) -> None:
        """Copies queries, and keys and values of all of the run."""
        barriers = Barriers(self.query_free, self.key_full, self.key_free, self.value_full, self.value_free)
        refs, smems = (self.key_ref, self.value_ref), (self.key_smem, self.value_smem)
        places = self.shape.query_places
        of_run = self.tables, self.shape, self.config, self.run
        move_tiles(*of_run, self._move_query, places, refs, smems, barriers, self.stream)

    def _move_query(self, output_tile, place) -> None:
        shape, halves = self.shape, self._halves
        if self._has_rows:  # in a loop, for addresses of many copies at once take registers that are not there
            lax.fori_loop(0, shape.cols // PART_ROWS, functools.partial(self._copy_part, output_tile, place), None)
            return
        for i in range(halves):
            for offset, size, where in query_slices(shape, output_tile.index, i * ROWS, ROWS):
                part = self.query_smem.at[place * halves + i, pl.ds(offset, size)]
                plgpu.copy_gmem_to_smem(self.query_ref.at[where], part, self.query_full.at[place * halves + i])

    def _copy_part(self, output_tile, place, n, _) -> None:
        shape, query_ref = self.shape, self.query_ref
        ((_, _, (sequence, rows, head)),) = query_slices(shape, output_tile.index, n * PART_ROWS, PART_ROWS)
        i, first = lax.div(n, ROWS // PART_ROWS) + place * self._halves, lax.rem(n, ROWS // PART_ROWS) * PART_ROWS
        part = self.query_smem.at[i, pl.ds(pl.multiple_of(first, PART_ROWS), PART_ROWS)]
        seen = 0, query_ref.shape[1] * (shape.group or 1)
        options = {"block": sequence, "head": head * (shape.group or 1), "group": shape.group}
        copy_rows(query_ref, part, tiling(shape.dtype, shape.head_dim), self.query_full, i, rows.start, seen, **options)

    def compute(self) -> None:
        """Attends with one half of the queries of all of the run, and writes or leaves what that gives."""
        walk(self.run, self.tables, self.shape, self.config, self._attend_segment)
        plgpu.wait_smem_to_gmem(0)

    def _take_turn(self) -> None:
        self._give_turn()
        self._await_turn()

    def _give_turn(self) -> None:
        if self._halves > 1:
            plgpu.barrier_arrive(self.turn)

    def _await_turn(self) -> None:
        if self._halves > 1:
            plgpu.barrier_wait(self.turn)

    def _attend_segment(self, output_tile, segment) -> None:
        shape, tables, half = self.shape, self.tables, self.half
        place = segment.query_place(shape.query_places) + self.stream * shape.query_places
        query = self.query_smem.at[place * self._halves + half]
        plgpu.barrier_wait(self.query_full.at[place * self._halves + half])
        if self._has_rows:
            plgpu.commit_smem()  # tensor cores read through another proxy than threads copy
        # The second warpgroup is half a KV tile behind until the segment ends.
        pl.when(half == 1)(self._take_turn)
        visible = visible_slots(tables, shape, output_tile, half * ROWS, ROWS, PER_ROW)
        shared = shared_slots(tables, shape, output_tile) or visible
        span = span_of_keys(tables, output_tile)
        scales = [tables["scales"][i, output_tile.head] for i in range(2)] if "scales" in tables else (None, None)
        key_scale, value_scale = scales
        part = _Part(output_tile, segment, query, visible, shared, span, key_scale)
        empty = (
            full(0.0, (ROWS, shape.head_dim), plgpu.Layout.WGMMA),
            full(LOWEST, (ROWS,), PER_ROW),
            full(0.0, (ROWS,), PER_ROW),
        )
        step = functools.partial(self._kv_tile_step, part)
        acc, top, total = lax.fori_loop(0, segment.num_kv_tiles, step, empty)
        pl.when(half == 0)(self._take_turn)
        self._end_segment(part, (acc if value_scale is None else acc * value_scale, top, total))

        @pl.when(segment.is_query_awaited(self.run, num_places=shape.query_places))
        def _():
            plgpu.barrier_arrive(self.query_free.at[place])

    def _kv_tile_step(self, part: _Part, i, carry):
        shape, stages = self.shape, self.config.num_stages
        factor = shape.scale * LOG2_E if self._is_plain else 1.0
        acc, top, total = carry
        kv_tile = part.segment.kv_tiles_done + i
        stage = lax.rem(kv_tile, stages) + self.stream * stages
        is_refilled = kv_tile + stages < self.run.num_kv_tiles  # else no warpgroup waits for it
        logits = self._products(part.query, stage, is_refilled)
        if not self._is_plain:
            logits = scaled_logits(logits, shape.scale, shape.logits_soft_cap, part.key_scale)
        first_slot, own_slot = tile_slots(shape, self.config, part.output_tile, part.segment.kv_tile + i)
        if shape.mask != "none":
            logits = self._masked_logits(part, logits, first_slot, own_slot)
        new_top = jnp.maximum(top, logits.max(axis=1) * factor)  # [rows]
        decay = jnp.exp2(top - new_top)
        weights = jnp.exp2(logits * factor - spread(new_top, logits.shape, axis=0))
        acc, total = acc * spread(decay, acc.shape, axis=0), total * decay + weights.sum(axis=1)
        weights = weights.astype(shape.dtype)
        acc, total, new_top, weights = lax.optimization_barrier((acc, total, new_top, weights))
        self._give_turn()
        plgpu.barrier_wait(self.value_full.at[stage])
        self._await_turn()
        values = self.value_smem.at[stage]

        @pl.when(self.half == 0)
        def _():  # its product is the first with them: the other warpgroup's turn comes after
            zero_garbage(values, tiling(shape.dtype, shape.head_dim), part.span, first_slot, shape)

        acc = _add_product(acc, weights, values, self.weights_smem, self.warpgroup)

        @pl.when(is_refilled)
        def _():
            plgpu.barrier_arrive(self.value_free.at[stage])

        return acc, new_top, total

    def _products(self, query, stage, is_refilled):
        """Returns the products of a stage's keys with the queries, `[rows, kv]`, and lets other keys take its place."""
        plgpu.barrier_wait(self.key_full.at[stage])

        def products(acc_ref):
            plgpu.wgmma(acc_ref, query, self.key_smem.at[stage].transpose((1, 0)))
            self._take_turn()  # the other warpgroup's products follow these
            return acc_ref[...]

        logits = pl.run_scoped(products, plgpu.ACC((ROWS, self.config.block_kv), jnp.float32))

        @pl.when(is_refilled)
        def _():
            plgpu.barrier_arrive(self.key_free.at[stage])

        return logits

    def _masked_logits(self, part: _Part, logits, first_slot, own_slot):
        (first, end), (shared_first, shared_end) = part.visible, part.shared
        of_own = lambda first: first if own_slot is first_slot else jnp.maximum(first, own_slot)
        is_edge = (first_slot < of_own(shared_first)) | (first_slot + self.config.block_kv > shared_end)
        return _masked(logits, first_slot, of_own(first), end, is_edge)

    def _end_segment(self, part: _Part, state) -> None:
        """Writes the results of a half of an output tile, or leaves its partial state."""
        shape, outputs, half, output_tile = self.shape, self.outputs, self.half, part.output_tile
        own_smem = part.query, self.stats_smem.at[self.warpgroup]
        write = functools.partial(_write_results, shape, outputs[:2], (output_tile.index, half), own_smem, state)

        def leave():
            partial = partial_of(shape, self.config, self.cta, output_tile.index)
            pl.when(half < num_halves(shape, self.query_ref))(
                functools.partial(_leave_partials, outputs[-2:], (partial, half), state)
            )

        if len(outputs) == 2:
            lse_or_stats = outputs[1]
            (write if lse_or_stats.ndim == 2 else leave)()
        else:
            is_uncut = part.segment.num_kv_tiles == output_tile.num_kv_tiles
            pl.when(is_uncut)(write)
            pl.when(~is_uncut)(leave)


def _write_results(shape: LeanShape, results, where, smem, state) -> None:
    """Writes the results of half an output tile: by TMA from the query's place, or rows of few queries by threads.

    Args:
      results: references of out and lse.
      where: the output tile's number, and which half.
      smem: places of the half's query, and of its lse.
      state: acc, max and sum of the half's rows, in registers.
    """
    (out_ref, lse_ref), (output_tile, half), (query_smem, lse_smem) = results, where, smem
    slices = query_slices(shape, output_tile, half * ROWS, ROWS)
    if shape.group is None:
        finish_rows(*state, query_smem, lse_smem)
        for offset, size, index in slices:
            plgpu.copy_smem_to_gmem(query_smem.at[pl.ds(offset, size)], out_ref.at[index])
    else:
        out, lse_smem[...] = finished(*state, axis=0)
        ((_, size, (sequence, rows, head)),) = slices
        begin = sequence, rows.start, head * shape.group, size
        store_rows(out_ref, out, begin, first_dim=0, group=shape.group)
        plgpu.commit_smem()
    first_row = pl.multiple_of(half * ROWS, ROWS) if shape.streams == 1 else 0
    plgpu.copy_smem_to_gmem(lse_smem, lse_ref.at[output_tile, pl.ds(first_row, ROWS)])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the next query takes its place


def _leave_partials(partials, where, state) -> None:
    """Writes the partial state of half an output tile; `where` is its number, and which half."""
    (accs_ref, stats_ref), (acc, top, total) = partials, state
    accs_ref[*where] = acc
    stats_ref[*where, 0] = top
    stats_ref[*where, 1] = total


def _masked(logits, first_slot, first, end, is_edge):
    """Returns -inf where a slot is not visible. Most KV tiles are visible whole, and are returned as they are.

    Args:
      first, end: of the visible slots: scalars, or `[rows]`.
      is_edge: whether a row does not see all of the KV tile.
    """

    def masked(logits):
        slots = plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=plgpu.Layout.WGMMA) + first_slot
        of_rows = (spread(x, logits.shape, axis=0) if jnp.ndim(x) else x for x in (first, end))
        first_of_row, end_of_row = of_rows
        return jnp.where((slots >= first_of_row) & (slots < end_of_row), logits, -jnp.inf)

    return lax.cond(is_edge, masked, lambda logits: logits, logits)


def _add_product(acc, weights, values, weights_smem, warpgroup):
    """Returns `acc + weights values`, `[rows, H]`."""
    if weights_smem is None:
        return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, weights, values))(plgpu.ACC.init(acc))
    own_weights = weights_smem.at[warpgroup]
    own_weights[...] = weights
    plgpu.commit_smem()

    def product(acc_ref):
        plgpu.wgmma(acc_ref, own_weights, values)
        return acc_ref[...]

    return acc + pl.run_scoped(product, plgpu.ACC(acc.shape, jnp.float32))
