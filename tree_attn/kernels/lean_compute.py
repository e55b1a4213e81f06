"""A CTA's computing along its run: the states of the output tiles that it touches, and where they go.

It finds keys and values in stages that another warpgroup fills: those of the lean kernel, or of a chain's ring
(`few_rows_chain_attention.py`).
"""

import dataclasses
import functools
from typing import Any, Protocol

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.kernels import lean_prefix, warps
from tree_attn.kernels.kv_parts import kv_tilings
from tree_attn.kernels.lean_garbage import zero_garbage
from tree_attn.kernels.lean_layout import LeanConfig, LeanShape, has_whole_output_tiles, lanes, partial_of
from tree_attn.kernels.lean_merge import merge_last
from tree_attn.kernels.lean_moves import Barriers, stage_of
from tree_attn.kernels.lean_products import PER_COLUMN
from tree_attn.kernels.lean_walk import Run, span_of_keys, tile_slots, visible_slots, walk
from tree_attn.kernels.registers import scaled_logits, spread


class Stages(Protocol):
    """Stages that hold the keys and values of a run's KV tiles, which are numbered within the run."""

    def keys(self, kv_tile) -> Any:
        """Waits for the keys of a KV tile, and returns their reference."""

    def values(self, kv_tile) -> Any:
        """Waits for the values of a KV tile whose keys are there, and returns their reference."""

    def release_keys(self, kv_tile) -> None:
        """Lets other keys take the place of these."""

    def release_values(self, kv_tile) -> None:
        """Lets other values take the place of these."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeanStages:
    """The stages of the lean kernel: keys and values have barriers of their own."""

    run: Run
    config: LeanConfig
    key_smem: Any
    value_smem: Any
    barriers: Barriers

    def keys(self, kv_tile):
        """Does `Stages.keys`."""
        stage = stage_of(kv_tile, self.config)
        plgpu.barrier_wait(self.barriers.key_full.at[stage])
        return self.key_smem.at[stage]

    def values(self, kv_tile):
        """Does `Stages.values`."""
        stage = stage_of(kv_tile, self.config)
        plgpu.barrier_wait(self.barriers.value_full.at[stage])
        return self.value_smem.at[stage]

    def release_keys(self, kv_tile) -> None:
        """Does `Stages.release_keys`."""
        self._release(self.barriers.key_free, kv_tile)

    def release_values(self, kv_tile) -> None:
        """Does `Stages.release_values`."""
        self._release(self.barriers.value_free, kv_tile)

    def _release(self, barriers, kv_tile) -> None:
        is_refilled = kv_tile + self.config.num_stages < self.run.num_kv_tiles  # else no warpgroup waits for it
        stage = stage_of(kv_tile, self.config)
        pl.when(is_refilled)(lambda: plgpu.barrier_arrive(barriers.at[stage]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunCompute:
    """Computes a run.

    Attributes:
      tables: references of the kernel's tables by name, as `lean.lean_attention` takes them.
      epilogue: takes each partial state as it is made, and merges at the end (`tree_attn.local.Epilogue`); or None.
      products: of `lean_products.products_of`.
      results: of `lean_results.results_of`.
      outputs: references of what the kernel writes.
      stages: a `Stages`.
      query_smem, query_full, query_free: places of output tiles' queries, and their barriers.
      words_smem: 8 bytes, where the kernel has arrivals; merged_at_once: of `lean_merge.merges_in_launch`.
      columns: query columns of an output tile, without padding.
      fences_query: whether threads copied the queries, which tensor cores read through another proxy.
      step: the number of the epilogue's step, if the caller counts; None: the epilogue does.
      writes_results: whether this kernel writes the results of output tiles that no run cuts.
    """

    tables: dict
    shape: LeanShape
    config: LeanConfig
    run: Run
    epilogue: Any
    products: Any
    results: Any
    outputs: tuple
    stages: Stages
    query_smem: Any
    query_full: Any
    query_free: Any
    words_smem: Any
    merged_at_once: int
    columns: int
    writes_results: bool
    fences_query: bool = False
    step: Any = None

    def compute(self) -> None:
        """Attends to all of the run, and writes or leaves what that gives."""
        tables, shape, epilogue = self.tables, self.shape, self.epilogue
        step = self.step
        if epilogue is not None and step is None:
            step = epilogue.begin(tables.get("rank"))
        num_output_tiles = walk(self.run, tables, shape, self.config, functools.partial(self._attend_segment, step))
        if "arrivals" in tables:
            first = self.run.first_output_tile(shape)
            last = first + (num_output_tiles - 1) * lanes(shape, self.config)
            merge = functools.partial(
                merge_last, self.results, self.words_smem, (first, last), tables, shape, self.config,
                self.merged_at_once,
            )  # fmt: skip
            pl.when(num_output_tiles > 0)(merge)
        if epilogue is None:
            self.results.end()
        else:
            epilogue.end(tables.get("rank"), step, tables["spans"], *self.outputs, shape.padded_head_dim)

    def _attend_segment(self, step, output_tile, segment) -> None:
        tables, shape, config, products = self.tables, self.shape, self.config, self.products
        num_queries = self.query_smem.shape[0]
        query_place = segment.query_place(num_queries)
        size = config.block_kv, shape.cols

        def visible():
            slots = visible_slots(tables, shape, output_tile, 0, shape.cols, PER_COLUMN)
            return tuple(spread(x, size) for x in slots) if shape.mask == "columns" else slots

        # Beside an exchange there are too few registers to keep them from KV tile to KV tile.
        seen = visible() if self.epilogue is None else None
        span = span_of_keys(tables, output_tile)
        begun = self._begun(output_tile, segment)
        plgpu.barrier_wait(self.query_full.at[query_place])
        if self.fences_query:
            plgpu.commit_smem()
        query, factors = products.begin(self.query_smem.at[query_place])
        key_scale = self._head_scale(0, output_tile)
        if factors is not None:
            key_scale = factors if key_scale is None else factors * key_scale

        def kv_tile_step(i, carry):
            acc, top, total = carry
            kv_tile = segment.kv_tiles_done + i
            logits = products.logits(self.stages.keys(kv_tile), query)  # [kv, cols]
            self.stages.release_keys(kv_tile)
            logits = scaled_logits(logits, shape.scale, shape.logits_soft_cap, key_scale)
            first_slot, own_slot = tile_slots(shape, config, output_tile, segment.kv_tile + i)
            if shape.mask != "none":
                slots = plgpu.broadcasted_iota(jnp.int32, size, 0, layout=plgpu.Layout.WGMMA)
                slots = slots + first_slot
                first, end = visible() if seen is None else seen
                first = first if own_slot is first_slot else jnp.maximum(first, own_slot)
                logits = jnp.where((slots >= first) & (slots < end), logits, -jnp.inf)
            new_top = jnp.maximum(top, products.top_of(logits))  # [cols]
            decay = jnp.exp2(top - new_top)
            weights = jnp.exp2(logits - spread(new_top, logits.shape))
            total = products.added(total, decay, weights)
            weights = products.kept(weights)
            values = self.stages.values(kv_tile)
            zero_garbage(values, kv_tilings(shape, config)[1], span, first_slot, shape, commits=False)
            acc = products.updated(acc, decay, weights, values)
            self.stages.release_values(kv_tile)
            return acc, new_top, total

        state = lax.fori_loop(0, segment.num_kv_tiles, kv_tile_step, begun)

        @pl.when(segment.is_query_awaited(self.run, num_queries))
        def _():
            plgpu.barrier_arrive(self.query_free.at[query_place])

        self._end_segment(step, output_tile, segment, state)

    def _begun(self, output_tile, segment):
        """Returns the state before the segment: over a prefix of the output tile's queries, or over nothing."""
        if self.shape.prefix is None:
            return self.products.empty()
        state = lean_prefix.begun(self.tables, self.shape, self.config, output_tile, is_first=segment.kv_tile == 0)
        return self.products.begun(*state)

    def _head_scale(self, of: int, output_tile):
        return self.tables["scales"][of, output_tile.head] if "scales" in self.tables else None

    def _end_segment(self, step, output_tile, segment, state) -> None:
        shape, results, epilogue = self.shape, self.results, self.epilogue
        for first_dim, (acc, *stats) in self.products.parts(*state):
            value_scale = self._head_scale(1, output_tile)  # read here, for it takes a register
            part = first_dim, (acc if value_scale is None else acc * value_scale, *stats)
            partial = partial_of(shape, self.config, lax.axis_index("cta"), output_tile.index)
            if first_dim == 0:  # sums by `wgmma` pass through shared memory: on Hopper both of these are a barrier
                warps.await_all() if epilogue is not None else results.await_memory()
            if epilogue is not None:
                epilogue.leave(self.tables.get("rank"), step, partial, *part, self.columns, shape.padded_head_dim)
                continue
            if has_whole_output_tiles(shape, self.config):
                results.write(output_tile.index, *part)
            elif not self.writes_results:
                results.leave(partial, *part)
            else:
                is_whole = segment.num_kv_tiles == output_tile.num_kv_tiles
                pl.when(is_whole)(functools.partial(results.write, output_tile.index, *part))
                pl.when(~is_whole)(functools.partial(results.leave, partial, *part))
