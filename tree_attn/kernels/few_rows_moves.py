"""A product of few rows as moving warpgroups copy it, for one CTA.

A CTA has a ring of stages in shared memory, and may run several products one after another in it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.kernels.few_rows_broadcast import Broadcast, peek_x, settle_x, steps_at_once
from tree_attn.kernels.few_rows_copies import blocks_of, copy_weights_together, copy_x_together, row_of
from tree_attn.kernels.few_rows_heads import row_of_group
from tree_attn.kernels.few_rows_layout import (
    GRAIN,
    IN_MULTIPLE,
    TENSOR_ROWS,
    FewRowsConfig,
    FewRowsShape,
    fold_shape,
    turn_shape,
    turns_in_fold,
)
from tree_attn.kernels.few_rows_norm import squares_scratch
from tree_attn.kernels.few_rows_ring import Ring, copies_together
from tree_attn.kernels.few_rows_sum import SumEnd
from tree_attn.kernels.registers import tiling


def ring_scratch(shape: FewRowsShape, config: FewRowsConfig) -> dict[str, Any]:
    """Returns the shared memory that a product needs, by the names of `CtaProduct`'s fields."""
    stages = config.num_stages
    smem = functools.partial(plgpu.SMEM, dtype=shape.dtype)
    tiled = functools.partial(smem, transforms=tiling(shape.dtype, IN_MULTIPLE))
    # Tiles lie one behind another, and 64 out-features from the last tile's first are there too.
    weight_rows = stages * config.stage_rows(shape) - config.stacked + TENSOR_ROWS
    size_of_x = stages, config.slabs * config.stack * config.x_rows(shape), config.block_in
    scratch = {
        "weights_smem": tiled((weight_rows, config.block_in)),
        "x_smem": smem(size_of_x) if config.is_compact else tiled(size_of_x),
    }
    if shape.eps is not None:
        scratch["scale_smem"] = smem((stages, config.slabs * config.stack, config.block_in))
        scratch["squares_smem"] = squares_scratch(shape, config)
    if config.stack > 1:
        scratch["fold_smem"] = plgpu.SMEM(fold_shape(shape, config), jnp.float32)
    if shape.heads is not None and not turns_in_fold(shape, config):
        scratch["turn_smem"] = plgpu.SMEM(turn_shape(shape), jnp.float32)
    return scratch


def full_barriers(shape: FewRowsShape, config: FewRowsConfig) -> list[plgpu.Barrier]:
    """Returns the barriers at which the copies of each stage arrive: of weights and of x, or one for both."""
    if copies_together():
        return [plgpu.Barrier(num_barriers=config.num_stages)] * 2
    copies = shape.parts * (1 if shape.heads is None else config.tile // GRAIN)
    arrivals = config.slabs * config.stack * (copies + 1 + (shape.eps is not None))
    return [plgpu.Barrier(num_barriers=config.num_stages, num_arrivals=arrivals)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductMoves:
    """One product of a CTA, and what its moving warpgroups copy.

    Attributes:
      refs: of its arguments in global memory, by name; out_ref: of its result.
      end: the sum over devices in which it ends, or the gather of heads; or None.
      exchange_step: the number of its step, if the caller counts; None: this does.
      x_offset: returns how many columns of x come before this device's; None: x has only those.
      x_broadcast, broadcast: of x, which is else copied from memory; and of the result; or None.
      ring: the steps that it has.
      weights_smem, x_smem, scale_smem, squares_smem, fold_smem, turn_smem: of `ring_scratch`.
    """

    shape: FewRowsShape
    config: FewRowsConfig
    refs: dict
    out_ref: Any
    ring: Ring
    weights_smem: Any
    x_smem: Any
    scale_smem: Any = None
    squares_smem: Any = None
    fold_smem: Any = None
    turn_smem: Any = None
    end: SumEnd | None = None
    exchange_step: Any = None
    x_offset: Callable | None = None
    x_broadcast: Broadcast | None = None
    broadcast: Broadcast | None = None

    @property
    def blocks(self) -> int:
        """Returns the steps of a tile."""
        return self.config.blocks(self.shape)

    @property
    def num_steps(self) -> int:
        """Returns the steps of the CTA's tiles, each of which fills a stage."""
        return self.config.tiles * self.blocks

    def move_weights(self) -> None:
        """Copies the weights of all steps, each when its stage has been read and few enough are on their way."""

        def move(step, _):
            self.ring.await_room(step)
            self.copy_weights(step)

        lax.fori_loop(0, self.num_steps, move, None)

    def move_x(self, await_all: Callable) -> None:
        """Copies x of all steps, each when its stage has been read.

        Where x is broadcast, that of the first steps is received instead.

        Args:
          await_all: waits until all of x is in memory.
        """
        num_received = self.num_received

        def move(step, _):
            self.ring.await_free(step)
            self.copy_x(step)

        if self.x_broadcast is not None:
            self._receive_x(self.x_broadcast, num_received)
        if num_received < self.num_steps:
            await_all()
            lax.fori_loop(num_received, self.num_steps, move, None)

    @property
    def num_received(self) -> int:
        """Returns the steps whose x is received, and not copied: those that the ring holds, or all of attention's."""
        if self.x_broadcast is None:
            return 0
        return self.num_steps if self.refs["x"] is None else min(self.num_steps, self.config.num_stages)

    def _receive_x(self, broadcast: Broadcast, num_steps: int) -> None:
        """Receives x of the first steps. When that of the first is there, words of others are read together."""
        options = dict(shape=self.shape, config=self.config)
        at_once = steps_at_once(broadcast, **options)
        for first in (0, *range(1, num_steps, at_once)):
            steps = range(first, min(first + (at_once if first else 1), num_steps))
            peeked = [peek_x(broadcast, self._x_column(jnp.int32(step)), **options) for step in steps]
            for step, words in zip(steps, peeked, strict=True):
                stage = self.ring.stage(step)
                self.ring.await_free(step)
                settle_x(broadcast, words, self.x_smem.at[stage], self._x_column(jnp.int32(step)), **options)
                plgpu.barrier_arrive(self.ring.full[-1].at[stage])

    def refill(self, step, _=None) -> None:
        """Copies weights and x of a later step, when its stage has been read."""
        self.ring.await_free(step)
        self.copy_weights(step)
        self.copy_x(step)

    def first_tile(self):
        """Returns the number of the CTA's first tile."""
        return lax.axis_index("cta") * self.config.tiles

    def first_feature(self, tile):
        """Returns the first out-feature of one of the CTA's tiles."""
        return pl.multiple_of((self.first_tile() + tile) * self.config.tile, GRAIN)

    def first_pair(self, tile):
        """Returns the first pair of out-features of one of the CTA's tiles, where there are heads."""
        return pl.multiple_of((self.first_tile() + tile) * (self.config.tile // 2), GRAIN)

    def weights_of(self, stage, slab: int, part: int, rows: int, place: int = 0, group: int = 0):
        """Returns rows of a stage: of a part's slab, of the block at a place of its stack, from a group of 8 on."""
        of_stage = row_of(slab, part, place, group, self.shape, self.config)
        first = stage * self.config.stage_rows(self.shape) + of_stage
        return self.weights_smem.at[pl.ds(pl.multiple_of(first, GRAIN), rows)]

    def x_of(self, stage, slab: int, place: int | None = None):
        """Returns x of the block at a place of a slab's stack, or of all of its blocks."""
        cols, stack = self.shape.columns, self.config.stack
        first, count = (slab * stack, stack) if place is None else (slab * stack + place, 1)
        return self.x_smem.at[stage, pl.ds(first * cols, count * cols)]

    def _column(self, step, block: int = 0):
        first = lax.rem(step, self.blocks) * self.config.in_features_of_stage + block * self.config.block_in
        return pl.multiple_of(first, IN_MULTIPLE)

    def _x_column(self, step):
        return self._column(step) + (0 if self.x_offset is None else self.x_offset())

    def copy_weights(self, step, _=None) -> None:
        """Copies a step's weights, and its norm's scale."""
        stage, groups = self.ring.stage(step), self._groups(step)
        full = self.ring.full[0].at[stage]
        if copies_together():
            has_scale = self.scale_smem is not None
            copy_weights_together(
                [self.refs["weights"], *([self.refs["scale"]] if has_scale else [])],
                [self.weights_smem, *([self.scale_smem] if has_scale else [])],
                self.ring.full[0], stage, self._column(step), [first for first, _ in groups], shape=self.shape,
                config=self.config,
            )  # fmt: skip
            return
        for slab, place, block in blocks_of(self.config):
            columns = pl.ds(self._column(step, block), self.config.block_in)
            for part in range(self.shape.parts):
                for group, (first, rows) in enumerate(groups):
                    source = self.refs["weights"].at[part, pl.ds(first, rows), columns]
                    target = self.weights_of(stage, slab, part, rows, place, group)
                    plgpu.copy_gmem_to_smem(source, target, full)
            if self.scale_smem is not None:
                plgpu.copy_gmem_to_smem(self.refs["scale"].at[columns], self.scale_smem.at[stage, block], full)

    def _groups(self, step) -> list[tuple[Any, int]]:
        """Returns the first out-feature, and how many, of each group of a step's tile that lies together."""
        tile = lax.div(step, self.blocks)
        if self.shape.heads is None:
            return [(self.first_feature(tile), self.config.tile)]
        row_of = functools.partial(row_of_group, self.first_pair(tile), heads=self.shape.heads)
        return [(row_of(group), GRAIN) for group in range(self.config.tile // GRAIN)]

    def copy_x(self, step, _=None) -> None:
        """Copies a step's x."""
        stage = self.ring.stage(step)
        if copies_together():
            options = dict(shape=self.shape, config=self.config)
            full = self.ring.full[-1]
            copy_x_together(self.refs["x"], self.x_smem, full, stage, self._x_column(step), **options)
            return
        assert self.x_offset is None
        rows = pl.ds(step * 0, self.shape.columns)  # those past the last are out of bounds: read as zeros
        for slab, place, block in blocks_of(self.config):
            source = self.refs["x"].at[rows, pl.ds(self._column(step, block), self.config.block_in)]
            plgpu.copy_gmem_to_smem(source, self.x_of(stage, slab, place), self.ring.full[-1].at[stage])
