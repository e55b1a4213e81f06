"""A product of few rows as one CTA runs it: what another warpgroup computes of what is moved.

Shapes in comments: O out-features of a tile, cols columns.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.kernels import few_rows_mma
from tree_attn.kernels.few_rows_heads import Gathering, read_places_of, turned, write_heads
from tree_attn.kernels.few_rows_layout import GRAIN, TENSOR_ROWS, FewRowsConfig, FewRowsShape, turns_in_fold
from tree_attn.kernels.few_rows_moves import ProductMoves
from tree_attn.kernels.few_rows_norm import no_squares, scaled, totals
from tree_attn.kernels.few_rows_results import LAYOUT, read_residual, write_rows
from tree_attn.kernels.registers import LOG2_E, load


@dataclasses.dataclass(frozen=True, kw_only=True)
class CtaProduct(ProductMoves):
    """One product of a CTA, with what is computed of it."""

    def compute(self, tell_sent: Callable = lambda: None) -> None:
        """Multiplies all tiles of the CTA, and writes or sums what they give.

        Args:
          tell_sent: is called when all is sent of which others get x.
        """
        step, rank = self.exchange_step, self.refs.get("rank")
        is_counted = self.end is not None and step is None
        if is_counted:  # the CTAs of a chain have counted the step before when x is there
            self.ring.await_first_x()
            step = self.end.begin(rank)
        lax.fori_loop(0, self.config.tiles, functools.partial(self._tile_step, step, tell_sent), None)
        if is_counted:
            self.end.end(rank, step)

    def send_before(self, x_ref) -> None:
        """Writes and sends x, `[rows, O]`, as if it were the result: what the first layer of a launch begins with."""
        shape, config = self.shape, self.config

        def send(tile, _):
            feature = self.first_feature(tile)
            x = read_residual(x_ref, feature, shape, config)
            write_rows(self.out_ref, x, feature, shape, config, self.broadcast)

        lax.fori_loop(0, self.config.tiles, send, None)

    def _tile_step(self, exchange_step, tell_sent: Callable, tile, _) -> None:
        shape, config, refs = self.shape, self.config, self.refs
        feature, first_pair = self.first_feature(tile), self.first_pair(tile)
        residual = read_residual(refs["residual"], feature, shape, config) if shape.has_residual else None
        read_places = lambda: read_places_of(refs, first_pair, shape)
        # On their way while weights are multiplied, where registers hold them: of 16 rows two CTAs fit no SM.
        places = read_places() if shape.heads is not None and shape.columns == GRAIN else None
        if config.is_compact:
            sums, squares = self._compact_products(tile)
        else:
            acc = plgpu.ACC((TENSOR_ROWS, config.stack * shape.columns), jnp.float32)
            sums, squares = pl.run_scoped(functools.partial(self._products, tile), *[acc] * shape.parts)
        self.ring.release((tile + 1) * self.blocks - 1)
        if squares is not None:
            squares = totals(squares, self.squares_smem, shape, config)
        if config.stack > 1:
            sums = [_folded(x, self.fold_smem, shape, config) for x in sums]
        result = _finish(sums, squares, residual if self.end is None else None, shape)
        tell_if_last = lambda: pl.when(tile == config.tiles - 1)(tell_sent)
        if self.end is not None and shape.heads is None:
            of_end = refs.get("rank"), exchange_step
            self.end.send(*of_end, result, residual, feature, shape)
            if self.broadcast is None:  # others add up what is sent
                tell_if_last()
            self.end.receive(*of_end, self.out_ref, result, feature, shape, self.broadcast)
            if self.broadcast is not None:
                tell_if_last()
            return
        if shape.heads is None:
            write_rows(self.out_ref, result, feature, shape, config, self.broadcast)
            tell_if_last()
            return
        slots, angles = places or read_places()
        result = turned(result, angles, self.fold_smem if turns_in_fold(shape, config) else self.turn_smem)
        gathering = self.end and Gathering(refs.get("rank"), self.end.buffers, exchange_step)
        heads = self.out_ref, refs["key"], refs["value"]
        write_heads(heads, result, slots, first_pair, shape, config, gathering, self.broadcast)
        tell_if_last()

    def _products(self, tile, *accs):
        """Returns the tile's products, float32 `[64, stack * cols]` for each part, and squares as threads have them."""
        shape, config = self.shape, self.config

        def block_step(block, squares):
            step = tile * self.blocks + block
            stage, squares = self._await_stage(step, squares)
            for slab in range(config.slabs):
                for part, acc in enumerate(accs):
                    x = self.x_of(stage, slab)
                    plgpu.wgmma(acc, self.weights_of(stage, slab, part, TENSOR_ROWS), x.transpose((1, 0)))
            plgpu.wgmma_wait(config.slabs * shape.parts)  # the block before has been multiplied
            pl.when(block > 0)(lambda: self.ring.release(step - 1))
            return squares

        squares = lax.fori_loop(0, self.blocks, block_step, no_squares(shape, config))
        return tuple(acc[...] for acc in accs), squares

    def _compact_products(self, tile):
        """Does `_products` for x that nothing pads; its products have the columns of one block."""
        shape, config = self.shape, self.config

        def block_step(block, carried):
            products, squares = carried
            step = tile * self.blocks + block
            stage, squares = self._await_stage(step, squares)
            products = few_rows_mma.multiplied(products, self.weights_smem, self.x_smem, stage, shape, config)
            pl.when(block < self.blocks - 1)(lambda: self.ring.release(step))
            return products, squares

        nothing = few_rows_mma.nothing(shape), no_squares(shape, config)
        products, squares = lax.fori_loop(0, self.blocks, block_step, nothing)
        return tuple(map(few_rows_mma.in_columns, products)), squares

    def _await_stage(self, step, squares):
        """Waits for a step's stage, and multiplies its x by the norm's scale; returns its number, and `squares`."""
        stage = self.ring.stage(step)
        self.ring.await_full(step)
        if squares is not None:
            squares = scaled(self.x_smem.at[stage], self.scale_smem.at[stage], squares, self.shape, self.config)
            plgpu.commit_smem()
        return stage, squares


def _folded(product, fold_smem, shape: FewRowsShape, config: FewRowsConfig):
    """Returns the sum of what a stack's blocks add to a tile, float32 `[64, cols]`; beyond the tile it is garbage."""
    fold_smem[pl.ds(0, TENSOR_ROWS)] = product
    plgpu.commit_smem()
    first_column = lambda place: 0 if config.is_compact else place * shape.columns
    slice_of = lambda place: (
        pl.ds(place * config.tile, TENSOR_ROWS), pl.ds(first_column(place), shape.columns)
    )  # fmt: skip
    total = functools.reduce(jnp.add, [load(fold_smem.at[slice_of(place)], LAYOUT) for place in range(config.stack)])
    plgpu.commit_smem()  # all have read it
    return total


def _finish(sums, squares, residual, shape: FewRowsShape):
    """Returns the result of a tile, float32 `[64, cols]`; `squares` are of `totals`."""
    if squares is not None:
        factor = lax.rsqrt(squares * (1.0 / shape.in_features) + shape.eps)
        sums = [x * factor for x in sums]
    if shape.activation is None:
        (result,) = sums
    else:
        gate, up = sums
        result = gate / (1.0 + jnp.exp2(gate * -LOG2_E)) * up
    return result if residual is None else result + residual
