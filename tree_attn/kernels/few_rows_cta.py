"""A product of few rows as one CTA runs it: what its moving warpgroups copy, and what another computes.

A CTA has a ring of stages in shared memory, and may run several products one after another in it. Shapes in comments:
O out-features of a tile, cols columns.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.kernels.few_rows_copies import (
    blocks_of,
    copy_weights_together,
    copy_x_together,
    row_of,
)
from tree_attn.kernels.few_rows_heads import Gathering, read_places_of, row_of_group, turned, write_heads
from tree_attn.kernels.few_rows_layout import (
    GRAIN,
    IN_MULTIPLE,
    TENSOR_ROWS,
    FewRowsConfig,
    FewRowsShape,
    fold_shape,
    turn_shape,
)
from tree_attn.kernels.few_rows_results import LAYOUT, read_residual, write_rows
from tree_attn.kernels.few_rows_ring import Ring, copies_together
from tree_attn.kernels.few_rows_sum import SumEnd
from tree_attn.kernels.registers import LOG2_E, full, load, store_transposed, tiling, transposable_layout


def ring_scratch(shape: FewRowsShape, config: FewRowsConfig) -> dict[str, Any]:
    """Returns the shared memory that a product needs, by the names of `CtaProduct`'s fields."""
    stages = config.num_stages
    smem = functools.partial(plgpu.SMEM, dtype=shape.dtype)
    tiled = functools.partial(smem, transforms=tiling(shape.dtype, IN_MULTIPLE))
    # Tiles lie one behind another, and 64 out-features from the last tile's first are there too.
    weight_rows = stages * config.stage_rows(shape) - config.stacked + TENSOR_ROWS
    columns = config.slabs * config.stack * shape.columns
    scratch = {
        "weights_smem": tiled((weight_rows, config.block_in)),
        "x_smem": tiled((stages, columns, config.block_in)),
    }
    if shape.eps is not None:
        scratch["scale_smem"] = smem((stages, config.slabs * config.stack, config.block_in))
    if config.stack > 1:
        scratch["fold_smem"] = plgpu.SMEM(fold_shape(shape, config), jnp.float32)
    if shape.heads is not None:
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
class CtaProduct:
    """One product of a CTA.

    Attributes:
      refs: of its arguments in global memory, by name; out_ref: of its result.
      end: the sum over devices in which it ends, or the gather of heads; or None.
      x_offset: returns how many columns of x come before this device's; None: x has only those.
      ring: the steps that it has.
      weights_smem, x_smem, scale_smem, fold_smem, turn_smem: of `ring_scratch`.
    """

    shape: FewRowsShape
    config: FewRowsConfig
    refs: dict
    out_ref: Any
    ring: Ring
    weights_smem: Any
    x_smem: Any
    scale_smem: Any = None
    fold_smem: Any = None
    turn_smem: Any = None
    end: SumEnd | None = None
    x_offset: Callable | None = None

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

    def move_x(self) -> None:
        """Copies x of all steps, each when its stage has been read."""

        def move(step, _):
            self.ring.await_free(step)
            self.copy_x(step)

        lax.fori_loop(0, self.num_steps, move, None)

    def refill(self, step, _=None) -> None:
        """Copies weights and x of a later step, when its stage has been read."""
        self.ring.await_free(step)
        self.copy_weights(step)
        self.copy_x(step)

    def compute(self) -> None:
        """Multiplies all tiles of the CTA, and writes or sums what they give."""
        step, rank = None, self.refs.get("rank")
        if self.end is not None:  # the CTAs of a chain have counted the step before when x is there
            self.ring.await_first_x()
            step = self.end.begin(rank)
        lax.fori_loop(0, self.config.tiles, functools.partial(self._tile_step, step), None)
        if self.end is not None:
            self.end.end(rank, step)

    def _first_tile(self):
        return lax.axis_index("cta") * self.config.tiles

    def _first_feature(self, tile):
        return pl.multiple_of((self._first_tile() + tile) * self.config.tile, GRAIN)

    def _first_pair(self, tile):
        return pl.multiple_of((self._first_tile() + tile) * (self.config.tile // 2), GRAIN)

    def _weights_of(self, stage, slab: int, part: int, rows: int, place: int = 0, group: int = 0):
        """Returns rows of a stage: of a part's slab, of the block at a place of its stack, from a group of 8 on."""
        of_stage = row_of(slab, part, place, group, self.shape, self.config)
        first = stage * self.config.stage_rows(self.shape) + of_stage
        return self.weights_smem.at[pl.ds(pl.multiple_of(first, GRAIN), rows)]

    def _x_of(self, stage, slab: int, place: int | None = None):
        """Returns x of the block at a place of a slab's stack, or of all of its blocks."""
        cols, stack = self.shape.columns, self.config.stack
        first, count = (slab * stack, stack) if place is None else (slab * stack + place, 1)
        return self.x_smem.at[stage, pl.ds(first * cols, count * cols)]

    def _column(self, step, block: int = 0):
        first = lax.rem(step, self.blocks) * self.config.in_features_of_stage + block * self.config.block_in
        return pl.multiple_of(first, IN_MULTIPLE)

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
                    target = self._weights_of(stage, slab, part, rows, place, group)
                    plgpu.copy_gmem_to_smem(source, target, full)
            if self.scale_smem is not None:
                plgpu.copy_gmem_to_smem(self.refs["scale"].at[columns], self.scale_smem.at[stage, block], full)

    def _groups(self, step) -> list[tuple[Any, int]]:
        """Returns the first out-feature, and how many, of each group of a step's tile that lies together."""
        tile = lax.div(step, self.blocks)
        if self.shape.heads is None:
            return [(self._first_feature(tile), self.config.tile)]
        row_of = functools.partial(row_of_group, self._first_pair(tile), heads=self.shape.heads)
        return [(row_of(group), GRAIN) for group in range(self.config.tile // GRAIN)]

    def copy_x(self, step, _=None) -> None:
        """Copies a step's x."""
        stage = self.ring.stage(step)
        if copies_together():
            column = self._column(step) + (0 if self.x_offset is None else self.x_offset())
            options = dict(shape=self.shape, config=self.config)
            copy_x_together(self.refs["x"], self.x_smem, self.ring.full[-1], stage, column, **options)
            return
        assert self.x_offset is None
        rows = pl.ds(step * 0, self.shape.columns)  # those past the last are out of bounds: read as zeros
        for slab, place, block in blocks_of(self.config):
            source = self.refs["x"].at[rows, pl.ds(self._column(step, block), self.config.block_in)]
            plgpu.copy_gmem_to_smem(source, self._x_of(stage, slab, place), self.ring.full[-1].at[stage])

    def _tile_step(self, exchange_step, tile, _) -> None:
        shape, config, refs = self.shape, self.config, self.refs
        feature, first_pair = self._first_feature(tile), self._first_pair(tile)
        residual = read_residual(refs["residual"], feature, shape, config) if shape.has_residual else None
        read_places = lambda: read_places_of(refs, first_pair, shape)
        # On their way while weights are multiplied, where registers hold them: of 16 rows two CTAs fit no SM.
        places = read_places() if shape.heads is not None and shape.columns == GRAIN else None
        acc = plgpu.ACC((TENSOR_ROWS, config.stack * shape.columns), jnp.float32)
        sums, squares = pl.run_scoped(functools.partial(self._products, tile), *[acc] * shape.parts)
        self.ring.release((tile + 1) * self.blocks - 1)
        if config.stack > 1:
            sums = [_folded(x, self.fold_smem, shape, config) for x in sums]
        result = _finish(sums, squares, residual if self.end is None else None, shape)
        if self.end is not None and shape.heads is None:
            self.end.add(refs.get("rank"), exchange_step, self.out_ref, result, residual, feature, shape)
            return
        if shape.heads is None:
            write_rows(self.out_ref, result, feature, shape, config)
            return
        slots, angles = places or read_places()
        result = turned(result, angles, self.turn_smem)
        gathering = self.end and Gathering(refs.get("rank"), self.end.buffers, exchange_step)
        heads = self.out_ref, refs["key"], refs["value"]
        write_heads(heads, result, slots, first_pair, shape, config, gathering)

    def _products(self, tile, *accs):
        """Returns the tile's products, float32 `[64, stack * cols]` for each part, and the squares of x."""
        shape, config = self.shape, self.config

        def block_step(block, squares):
            step = tile * self.blocks + block
            stage = self.ring.stage(step)
            self.ring.await_full(step)
            if squares is not None:
                for slab, place, block_of_stage in blocks_of(config):
                    scale = self.scale_smem.at[stage, block_of_stage]
                    squares = squares + _scale(self._x_of(stage, slab, place), scale, shape)
                plgpu.commit_smem()
            for slab in range(config.slabs):
                for part, acc in enumerate(accs):
                    x = self._x_of(stage, slab)
                    plgpu.wgmma(acc, self._weights_of(stage, slab, part, TENSOR_ROWS), x.transpose((1, 0)))
            plgpu.wgmma_wait(config.slabs * shape.parts)  # the block before has been multiplied
            pl.when(block > 0)(lambda: self.ring.release(step - 1))
            return squares

        squares = lax.fori_loop(0, self.blocks, block_step, _no_squares(shape, config))
        return tuple(acc[...] for acc in accs), squares


def _no_squares(shape: FewRowsShape, config: FewRowsConfig):
    if shape.eps is None:
        return None
    return full(0.0, (config.block_in, shape.columns), transposable_layout())


def _scale(x_smem, scale_smem, shape: FewRowsShape):
    """Multiplies a block of x by the norm's scale, and returns the squares of what it was, float32 `[I, cols]`."""
    layout = transposable_layout()
    x = load(x_smem.transpose((1, 0)), layout).astype(jnp.float32)
    scale = load(scale_smem, layout.reduce(1)).astype(jnp.float32)
    scale = lax.broadcast_in_dim(scale + 1.0 if shape.adds_one else scale, x.shape, [0])
    store_transposed(x_smem, (x * scale).astype(shape.dtype))
    return x * x


def _folded(product, fold_smem, shape: FewRowsShape, config: FewRowsConfig):
    """Returns the sum of what a stack's blocks add to a tile, float32 `[64, cols]`; beyond the tile it is garbage."""
    fold_smem[pl.ds(0, TENSOR_ROWS)] = product
    plgpu.commit_smem()
    slice_of = lambda place: (
        pl.ds(place * config.tile, TENSOR_ROWS), pl.ds(place * shape.columns, shape.columns)
    )  # fmt: skip
    total = functools.reduce(jnp.add, [load(fold_smem.at[slice_of(place)], LAYOUT) for place in range(config.stack)])
    plgpu.commit_smem()  # all have read it
    return total


def _finish(sums, squares, residual, shape: FewRowsShape):
    """Returns the result of a tile, float32 `[64, cols]`."""
    if squares is not None:
        factor = lax.rsqrt(squares.sum(axis=0) * (1.0 / shape.in_features) + shape.eps)
        sums = [x * lax.broadcast_in_dim(factor, x.shape, [1]) for x in sums]
    if shape.activation is None:
        (result,) = sums
    else:
        gate, up = sums
        result = gate / (1.0 + jnp.exp2(gate * -LOG2_E)) * up
    return result if residual is None else result + residual
