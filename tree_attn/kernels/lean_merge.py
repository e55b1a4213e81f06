"""The lean kernel's merge, and what the tall kernel's shares with it: a row's partials are folded in a fixed order."""

import functools
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.kernels.lean_layout import LeanConfig, LeanShape, columns_of, partials_of, scratch_bytes
from tree_attn.kernels.registers import LOG2_E, LOWEST, full, launch, load, spread, store_transposed, tiling

MERGE_HEAD_DIMS = 64  # of one merging CTA


def merge_partials(attended, results, sequences, onto, shape: LeanShape, config: LeanConfig):
    """Launches it over the partials `attended`; `results` are what it leaves, `sequences` the table of that name.

    `onto` is a state over other keys to merge with, as it is returned, or None.
    """
    onto_out, onto_lse = onto or (None, None)
    optional = {"sequences": sequences, "onto_out": onto_out, "onto_lse": onto_lse}
    optional = {name: x for name, x in optional.items() if x is not None}
    groups = _merge_warpgroups(shape, config)
    return launch(
        functools.partial(_merge_partials, tuple(optional), groups, shape, config),
        out_type=results,
        grid=(shape.num_rows, shape.padded_head_dim // MERGE_HEAD_DIMS),
        grid_names=("row", "head_dims"),
        num_threads=groups,
        thread_name="warpgroup",
        scratch_bytes=scratch_bytes(shape),
        name="lean_merge",
    )(*attended, *optional.values())


def _merge_warpgroups(shape: LeanShape, config: LeanConfig) -> int:
    """Few rows have many partials each, which four warpgroups share; many rows need their registers for one another."""
    most = 4 if shape.cols <= 48 else 2  # with 64 columns, four warpgroups spill
    return most if shape.num_rows * shape.padded_head_dim // MERGE_HEAD_DIMS <= config.num_ctas else 1


def _merge_partials(names, groups: int, shape: LeanShape, config: LeanConfig, accs_ref, stats_ref, *refs):
    optional, (out_ref, lse_ref) = dict(zip(names, refs)), refs[len(names) :]
    transforms = tiling(out_ref.dtype, math.gcd(shape.head_dim, MERGE_HEAD_DIMS))
    block_smem = plgpu.SMEM((shape.cols, MERGE_HEAD_DIMS), out_ref.dtype, transforms=transforms)
    scratch = {"out_smem": block_smem, "lse_smem": plgpu.SMEM((shape.cols,), jnp.float32)}
    if groups > 1:
        accs = plgpu.SMEM((groups, MERGE_HEAD_DIMS, shape.cols), jnp.float32)
        scratch["left"] = accs, plgpu.SMEM((groups, 2, shape.cols), jnp.float32), plgpu.Barrier(num_arrivals=groups)
    if "onto_out" in optional:
        scratch |= {"onto_smem": block_smem, "onto_full": plgpu.Barrier()}
    merge = functools.partial(_merge_scoped, optional, groups, shape, config, accs_ref, stats_ref, out_ref, lse_ref)
    pl.run_scoped(merge, **scratch, collective_axes="warpgroup")


def _merge_scoped(
    optional, groups: int, shape: LeanShape, config: LeanConfig, accs_ref, stats_ref, out_ref, lse_ref, *,
    out_smem, lse_smem, left=None, onto_smem=None, onto_full=None,
):  # fmt: skip
    """Warpgroup i of n folds every n-th partial from the i-th; the first folds their results and writes them."""
    row, block, group = (lax.axis_index(name) for name in ("row", "head_dims", "warpgroup"))
    first, count = partials_of(shape, config, optional.get("sequences"), row)
    head_dims = pl.ds(pl.multiple_of(block * MERGE_HEAD_DIMS, MERGE_HEAD_DIMS), MERGE_HEAD_DIMS)
    cols = shape.cols
    # What lies out of bounds, columns beyond G' and head dims beyond H, is read as zeros and not written.
    block_of = lambda ref: ref.at[*columns_of(shape, row), head_dims]
    if onto_smem is not None:  # on its way while partials are folded
        onto_lse = load(optional["onto_lse"].at[row], plgpu.Layout.WGMMA.reduce(0))

        @pl.when(group == 0)
        def _():
            plgpu.copy_gmem_to_smem(block_of(optional["onto_out"]), onto_smem, onto_full)

    partial_of = lambda i: (accs_ref.at[first + i, head_dims], stats_ref.at[first + i])

    def end(state):
        if onto_smem is not None:
            plgpu.barrier_wait(onto_full)
            state = fold_state(state, load(onto_smem.transpose((1, 0)), plgpu.Layout.WGMMA), onto_lse, axis=1)
        finish(*state, out_smem, lse_smem)
        plgpu.copy_smem_to_gmem(out_smem, block_of(out_ref))

        @pl.when(block == 0)
        def _():
            plgpu.copy_smem_to_gmem(lse_smem, lse_ref.at[row])

        plgpu.wait_smem_to_gmem(0)

    at_once = max(1, min(4 if groups > 1 else 8, 64 // cols))
    fold_partials(count, partial_of, end, (MERGE_HEAD_DIMS, cols), at_once=at_once, axis=1, left=left)


def fold_partials(count, partial_of, end, shape, *, at_once: int, axis: int, left=None) -> None:
    """Folds the partials of some queries. Of n warpgroups the i-th takes every n-th from the i-th on.

    Args:
      count: how many partials there are.
      partial_of: `(i) -> (acc, stats)`, refs of one as it is left: a sum of weighted values, of `shape`, and
        `[2, queries]`, the largest logit and the sum of weights.
      end: `(state)`, called by the first warpgroup with all of them folded, `(acc, top, total)`.
      at_once: so many are read at once: a dependent load takes longer than all arithmetic here.
      axis: of `acc`, that queries lie along.
      left: of several warpgroups, shared memory for what each has folded, `[n, ...]` of accs and of stats, and the
        barrier of n arrivals. None: there is one.
    """
    group, groups = (lax.axis_index("warpgroup"), left[0].shape[0]) if left else (0, 1)
    per_query = plgpu.Layout.WGMMA.reduce(1 - axis)

    def read(refs):
        acc_ref, stats_ref = refs
        return load(acc_ref, plgpu.Layout.WGMMA), *(load(stats_ref.at[i], per_query) for i in range(2))

    def step(i, state):
        indices = [group + groups * (i * at_once + j) for j in range(at_once)]
        # Past the end the last partial is read again and weighs nothing.
        partials = [read(partial_of(jnp.minimum(index, count - 1))) for index in indices]
        return _fold(state, partials, [jnp.where(index < count, 1.0, 0.0) for index in indices], axis)

    empty = (
        full(0.0, shape, plgpu.Layout.WGMMA),
        full(LOWEST, shape[axis : axis + 1], per_query),
        full(0.0, shape[axis : axis + 1], per_query),
    )
    rounds = lax.div(count + groups * at_once - 1, groups * at_once)
    acc, top, total = lax.fori_loop(0, rounds, step, empty)
    if left is None:
        end((acc, top, total))
        return
    accs_smem, stats_smem, written = left

    @pl.when((group > 0) & (group < count))
    def _():
        accs_smem[group] = acc
        stats_smem[group, 0] = top
        stats_smem[group, 1] = total

    plgpu.barrier_arrive(written)

    @pl.when(group == 0)
    def _():
        plgpu.barrier_wait(written)
        others = lambda i, state: _fold(state, [read((accs_smem.at[i], stats_smem.at[i]))], [1.0], axis)
        end(lax.fori_loop(1, jnp.minimum(count, groups), others, (acc, top, total)))


def fold_state(state, out, lse, *, axis: int):
    """Folds a state as it is returned, `out` and `lse`, into one that `fold_partials` ends with."""
    partial = (out.astype(jnp.float32), jnp.maximum(lse * LOG2_E, LOWEST), 1.0)
    return _fold(state, [partial], [jnp.where(lse > -jnp.inf, 1.0, 0.0)], axis)


def _fold(state, partials, weights, axis: int):
    """Folds unnormalised partials, all at once, into another; each counts `weight` times, 0 or 1."""
    acc, top, total = state
    new_top = functools.reduce(jnp.maximum, [part_top for _, part_top, _ in partials], top)
    decay = jnp.exp2(top - new_top)
    acc, total = acc * spread(decay, acc.shape, axis), total * decay
    for weight, (part_acc, part_top, part_total) in zip(weights, partials):
        decay = jnp.exp2(part_top - new_top) * weight
        acc, total = acc + part_acc * spread(decay, acc.shape, axis), total + part_total * decay
    return acc, new_top, total


def finish(acc, top, total, out_smem, lse_smem, *, axis: int = 1) -> None:
    """Leaves `acc / total`, of queries along `axis`, as rows, and `ln(total 2^top)`, in shared memory, for a copy."""
    inverse = jnp.where(total > 0, 1.0 / total, 0.0)
    out = (acc * spread(inverse, acc.shape, axis)).astype(out_smem.dtype)
    if axis == 1:
        store_transposed(out_smem, out)
    else:
        out_smem[...] = out
    lse_smem[...] = jnp.where(total > 0, (top + jnp.log2(total)) * (1 / LOG2_E), -jnp.inf)
    plgpu.commit_smem()
