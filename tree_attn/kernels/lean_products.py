"""The lean kernel's two products and the state that they build: by `wgmma`, or of float8 K and V by `mma.sync`.

Each class says what one computing warpgroup holds from KV tile to KV tile, and how a KV tile changes it. Methods are
called in the kernel, in the order in which they stand here.
"""

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.kernels import columns, mma, warps
from tree_attn.kernels.kv_parts import kv_tilings
from tree_attn.kernels.lean_layout import LeanConfig, LeanShape
from tree_attn.kernels.lean_merge import fold_partials
from tree_attn.kernels.registers import LOWEST, full, spread, tiling

PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)


def query_tiling(shape: LeanShape, config: LeanConfig):
    """Returns the transforms of queries in shared memory, and of all that meets them in the tensor core there."""
    return tiling(shape.dtype, math.gcd(shape.head_dim, config.block_kv))


def products_of(shape: LeanShape):
    """Returns the class for a call of this shape."""
    return MmaProducts if shape.uses_mma else WgmmaProducts


@dataclasses.dataclass(frozen=True, kw_only=True)
class WgmmaProducts:
    """Products of a warpgroup, whose operands are in shared memory: K and V as stored, and the weights."""

    shape: LeanShape
    config: LeanConfig
    weights_smem: Any
    columns_smem: Any

    @staticmethod
    def scratch(shape: LeanShape, config: LeanConfig) -> dict[str, Any]:
        """Returns the shared memory that the products need beside their operands, by the names of fields."""
        weights = plgpu.SMEM((shape.cols, config.block_kv), shape.dtype, transforms=query_tiling(shape, config))
        return {"weights_smem": weights, "columns_smem": plgpu.SMEM((2, warps.WARPS, shape.cols), jnp.float32)}

    def begin(self, query_ref):
        """Returns the query for `logits`, and what these are to be multiplied by, `[kv, cols]` or None."""
        return query_ref, None

    def empty(self):
        """Returns the state before the first KV tile: weighted values, the largest logits, and sums of weights."""
        block_kv, cols = self.config.block_kv, self.shape.cols
        return (
            full(0.0, (self.shape.padded_head_dim, cols), plgpu.Layout.WGMMA),
            full(LOWEST, (cols,), PER_COLUMN),
            full(0.0, (block_kv, cols), plgpu.Layout.WGMMA),
        )

    def begun(self, acc, top, total):
        """Returns the state that begins with one of other keys, as `empty` does with none.

        Args:
          total: `[cols]`. One key of a KV tile takes it, whatever keys there are.
        """
        size = self.config.block_kv, self.shape.cols
        key = plgpu.broadcasted_iota(jnp.int32, size, 0, layout=plgpu.Layout.WGMMA)
        return acc, top, jnp.where(key == 0, spread(total, size), 0.0)

    def logits(self, keys, query):
        """Returns `K Q^T`, `[kv, cols]`."""

        def products(acc_ref):
            plgpu.wgmma(acc_ref, keys, query.transpose((1, 0)))
            return acc_ref[...]

        return pl.run_scoped(products, plgpu.ACC((self.config.block_kv, self.shape.cols), jnp.float32))

    def top_of(self, logits):
        """Returns the exponent, `[cols]`, beyond which a weight is to be no larger than the largest."""
        return columns.reduced(logits, self.columns_smem, 0, is_sum=False)  # `updated` has the barrier after it

    def added(self, total, decay, weights):
        """Returns the new sums of weights. They are summed over keys at the end only: such a sum crosses warps."""
        return total * spread(decay, total.shape) + weights  # [kv, cols]

    def kept(self, weights):
        """Returns the weights for `updated`, where they pass to it: through shared memory."""
        # All have read those of the last KV tile, for `top_of` has had a barrier since.
        columns.store_transposed(self.weights_smem, query_tiling(self.shape, self.config), weights)
        return self.weights_smem

    def updated(self, acc, decay, weights, values):
        """Returns the new weighted values. It commits what threads have written of weights, and of `values`."""
        plgpu.commit_smem()

        def weighted(acc_ref):
            plgpu.wgmma(acc_ref, values.transpose((1, 0)), weights.transpose((1, 0)))
            return acc_ref[...]

        update = pl.run_scoped(weighted, plgpu.ACC((self.shape.padded_head_dim, self.shape.cols), jnp.float32))
        return acc * spread(decay, acc.shape) + update  # [Hp, cols]

    def parts(self, acc, top, total):
        """Yields the first head dim of a part of the warpgroup's state, and the part.

        That is weighted values `[head dims, cols]`, largest logits `[cols]`, and a function that returns the sums of
        weights over keys, `[cols]`: it takes registers, so it is called when the values have theirs no more.
        """
        # All have read the last segment's sums, for `lean_compute` has a barrier before it asks for these.
        yield 0, (acc, top, lambda: columns.reduced(total, self.columns_smem, 1, is_sum=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MmaProducts:
    """Products of each warp, whose operands are in registers (`mma.py`), with `WgmmaProducts`' methods but `begun`."""

    shape: LeanShape
    config: LeanConfig
    warp_accs_smem: Any
    warp_stats_smem: Any

    @staticmethod
    def scratch(shape: LeanShape, config: LeanConfig) -> dict[str, Any]:
        """Returns the shared memory of what each warp leaves for the others."""
        return {
            "warp_accs_smem": plgpu.SMEM((warps.WARPS, mma.PART, shape.cols), jnp.float32),
            "warp_stats_smem": plgpu.SMEM((warps.WARPS, 2, shape.cols), jnp.float32),
        }

    def begin(self, query_ref):
        """Returns the query's fragments, and the factors that undo their scale."""
        fragments, factors = mma.query_fragments(query_ref, query_tiling(self.shape, self.config), self.shape)
        return fragments, None if factors is None else spread(factors, (self.config.block_kv, self.shape.cols))

    def empty(self):
        """Returns the state before the first KV tile: of each warp, but for the sums of weights, of each thread."""
        per_column = functools.partial(full, shape=(self.shape.cols,), layout=PER_COLUMN)
        return full(0.0, mma.acc_shape(self.shape), plgpu.Layout.WGMMA), per_column(LOWEST), per_column(0.0)

    def logits(self, keys, query):
        """Returns `K Q^T`, `[kv, cols]`."""
        return mma.logits(keys, kv_tilings(self.shape, self.config)[0], query, self.shape)

    def top_of(self, logits):
        """Returns the exponent of each warp, `[cols]`, which leaves room for large weights."""
        return mma.largest(logits, self.shape) - mma.weight_exponent(self.shape)

    def added(self, total, decay, weights):
        """Returns the new sums of weights, `[cols]`, of each thread's keys."""
        return total * decay + mma.sums(weights, self.shape)

    def kept(self, weights):
        """Returns the weights: they stay in registers."""
        return weights

    def updated(self, acc, decay, weights, values):
        """Returns the new weighted values of each warp, of `values` that are committed."""
        acc = acc * spread(decay, acc.shape)
        return mma.accumulated(acc, weights, values, kv_tilings(self.shape, self.config)[1], self.shape)

    def parts(self, acc, top, total):
        """Yields the state of the four warps together, `mma.PART` head dims at a time."""
        for first_dim in range(0, self.shape.padded_head_dim, mma.PART):
            warps.await_all()  # one may still read what was left last
            mma.leave_states(acc, top, total, first_dim, self.warp_accs_smem, self.warp_stats_smem, self.shape)
            warps.await_all()
            state = []
            fold_partials(
                jnp.int32(warps.WARPS), lambda i: (self.warp_accs_smem.at[i], self.warp_stats_smem.at[i]), state.extend,
                (mma.PART, self.shape.cols), at_once=warps.WARPS, axis=1,
            )  # fmt: skip
            *values_and_top, sums = state
            yield first_dim, (*values_and_top, lambda sums=sums: sums)
