"""Results of the lean kernel's segments, and partial states, as they are written.

On Hopper it passes through shared memory, and TMA copies it while the next segment is attended to. On other GPUs each
thread writes what it has in registers, for shared memory is small; on Hopper too where TMA cannot, or where partial
states are counted (`arrivals.py`).

A state comes in parts of some head dims, as the products' `parts` yield them.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.kernels import columns
from tree_attn.kernels.interpreter import is_interpreted
from tree_attn.kernels.lean_layout import LeanShape
from tree_attn.kernels.lean_merge import finish, finished, result_tiling
from tree_attn.kernels.plain_copies import store_columns, store_result, store_row
from tree_attn.kernels.query_layout import column_index


def results_of(shape: LeanShape):
    """Returns the class for a call of this shape."""
    return CopiedResults if shape.target.is_hopper else StoredResults


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopiedResults:
    """Results and partial states that leave through shared memory by TMA.

    outputs:  references of out and lse, of accs and stats, or of all four
    out_smem: shared memory of a result; acc_smem: of a partial state; None: threads write it
    """

    shape: LeanShape
    outputs: tuple
    out_smem: Any = None
    lse_smem: Any = None
    acc_smem: Any = None
    stats_smem: Any = None

    @staticmethod
    def scratch(shape: LeanShape, *, has_results: bool, has_partials: bool) -> dict[str, Any]:
        """Returns the shared memory for either, by the names of fields."""
        cols, padded = shape.cols, shape.padded_head_dim
        result, partial = {}, {}
        if has_results:
            out = plgpu.SMEM((cols, padded), shape.dtype, transforms=result_tiling(shape))
            result = {"out_smem": out, "lse_smem": plgpu.SMEM((cols,), jnp.float32)}
        if has_partials:
            acc = plgpu.SMEM((padded, cols), jnp.float32)
            partial = {"acc_smem": acc, "stats_smem": plgpu.SMEM((2, cols), jnp.float32)}
        return result | partial

    def await_memory(self) -> None:
        """Waits until the last segment's state has left shared memory."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def write(self, output_tile, first_dim: int, state) -> None:
        """Writes part of out and lse of an output tile."""
        if self.out_smem is None:
            _store_result(self.outputs[:2], output_tile, first_dim, state)
            return
        acc, top, total = state
        finish(acc, top, total(), self.out_smem, self.lse_smem, self.shape, first_dim=first_dim)
        if first_dim + acc.shape[0] < self.shape.padded_head_dim:
            return
        plgpu.commit_smem()
        # Columns beyond G' and head dims beyond H are out of bounds, and not written.
        head_dims = pl.ds(output_tile * 0, self.shape.padded_head_dim)
        out_ref, lse_ref = self.outputs[:2]
        plgpu.copy_smem_to_gmem(self.out_smem, out_ref.at[*column_index(self.shape, output_tile), head_dims])
        plgpu.copy_smem_to_gmem(self.lse_smem, lse_ref.at[output_tile])

    def leave(self, partial, first_dim: int, state) -> None:
        """Writes part of partial state number `partial`."""
        if self.acc_smem is None:
            _store_partial(self.shape, self.outputs[-2:], partial, first_dim, state)
            return
        acc, top, total = state
        is_all = acc.shape[0] == self.shape.padded_head_dim
        self.acc_smem[... if is_all else pl.ds(first_dim, acc.shape[0])] = acc
        if first_dim + acc.shape[0] < self.shape.padded_head_dim:
            return
        for i, x in enumerate((top, total())):
            columns.store_per_column(self.stats_smem, x, i)
        plgpu.commit_smem()
        accs_ref, stats_ref = self.outputs[-2:]
        plgpu.copy_smem_to_gmem(self.acc_smem, accs_ref.at[partial])
        plgpu.copy_smem_to_gmem(self.stats_smem, stats_ref.at[partial])

    def end(self) -> None:
        """Waits until all is written."""
        plgpu.wait_smem_to_gmem(0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredResults:
    """Results and partial states that threads write, with the methods of `CopiedResults`."""

    shape: LeanShape
    outputs: tuple

    @staticmethod
    def scratch(shape: LeanShape, *, has_results: bool, has_partials: bool) -> dict[str, Any]:
        """Returns nothing."""
        return {}

    def await_memory(self) -> None:
        """Does nothing."""

    def write(self, output_tile, first_dim: int, state) -> None:
        """Writes part of out and lse of an output tile."""
        _store_result(self.outputs[:2], output_tile, first_dim, state)

    def leave(self, partial, first_dim: int, state) -> None:
        """Writes part of partial state number `partial`."""
        _store_partial(self.shape, self.outputs[-2:], partial, first_dim, state)

    def end(self) -> None:
        """Does nothing: the kernel's end shows what was written to the next."""


def _store_result(results, output_tile, first_dim: int, state) -> None:
    """Writes part of a result from registers; `results` are references of out and lse."""
    acc, top, total = state
    result = finished(acc, top, total())
    store_result(*results, output_tile, result, first_dim=first_dim, is_first=first_dim == 0)


def _store_partial(shape: LeanShape, partials, partial, first_dim: int, state) -> None:
    """Writes part of a partial state from registers; `partials` are references of accs and stats."""
    acc, top, total = state
    stats = top, total()
    accs_ref, stats_ref = partials
    cols, padded = shape.cols, shape.padded_head_dim
    if is_interpreted():
        accs_ref[partial, pl.ds(first_dim, acc.shape[0])] = acc
        stats_ref[partial] = jnp.stack(stats)
        return
    offset = (partial * padded + first_dim) * cols
    store_columns(accs_ref, acc, offset, strides=(cols, 1), num_rows=acc.shape[0], num_columns=cols)
    for i, x in enumerate(stats if first_dim == 0 else ()):
        store_row(stats_ref, x, (2 * partial + i) * cols)
