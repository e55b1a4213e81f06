"""The lean kernel's merge: it folds the partial states of each row, in a fixed order."""

import functools
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.local.hopper import LOG2_E, LOWEST, full, launch, load, spread, store_transposed, tiling
from tree_attn.local.lean_layout import LeanConfig, LeanShape, columns_of, partials_of, scratch_bytes

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
    scratch = {"onto_smem": block_smem, "onto_full": plgpu.Barrier()} if "onto_out" in optional else {}
    pl.run_scoped(
        functools.partial(_merge_scoped, optional, groups, shape, config, accs_ref, stats_ref, out_ref, lse_ref),
        acc_smem=plgpu.SMEM((groups, MERGE_HEAD_DIMS, shape.cols), jnp.float32),
        stats_smem=plgpu.SMEM((groups, 2, shape.cols), jnp.float32),
        out_smem=block_smem,
        lse_smem=plgpu.SMEM((shape.cols,), jnp.float32),
        written=plgpu.Barrier(num_arrivals=groups),
        **scratch,
        collective_axes="warpgroup",
    )


def _merge_scoped(
    optional, groups: int, shape: LeanShape, config: LeanConfig, accs_ref, stats_ref, out_ref, lse_ref, *,
    acc_smem, stats_smem, out_smem, lse_smem, written, onto_smem=None, onto_full=None,
):  # fmt: skip
    """Warpgroup i of n folds every n-th partial from the i-th; the first folds their results and writes them."""
    row, block, group = (lax.axis_index(name) for name in ("row", "head_dims", "warpgroup"))
    first, count = partials_of(shape, config, optional.get("sequences"), row)
    head_dims = pl.ds(pl.multiple_of(block * MERGE_HEAD_DIMS, MERGE_HEAD_DIMS), MERGE_HEAD_DIMS)
    cols = shape.cols
    # What lies out of bounds, columns beyond G' and head dims beyond H, is read as zeros and not written.
    block_of = lambda ref: ref.at[*columns_of(shape, row), head_dims]
    if onto_smem is not None:  # on its way while partials are folded

        @pl.when(group == 0)
        def _():
            plgpu.copy_gmem_to_smem(block_of(optional["onto_out"]), onto_smem, onto_full)

    at_once = max(1, min(4 if groups > 1 else 8, 64 // cols))  # a dependent load takes longer than all arithmetic here

    def step(i, state):
        indices = [group + groups * (i * at_once + j) for j in range(at_once)]
        # Past the end the last partial is read again and weighs nothing.
        partials = [first + jnp.minimum(index, count - 1) for index in indices]
        refs = [(accs_ref.at[p, head_dims], stats_ref.at[p]) for p in partials]
        return _fold(state, refs, [jnp.where(index < count, 1.0, 0.0) for index in indices])

    rounds = lax.div(count + groups * at_once - 1, groups * at_once)
    acc, top, total = lax.fori_loop(0, rounds, step, _empty(cols))

    @pl.when((group > 0) & (group < count))
    def _():
        acc_smem[group] = acc
        stats_smem[group, 0] = top
        stats_smem[group, 1] = total

    plgpu.barrier_arrive(written)

    @pl.when(group == 0)
    def _():
        plgpu.barrier_wait(written)

        def others(i, state):
            return _fold(state, [(acc_smem.at[i], stats_smem.at[i])], [1.0])

        state = lax.fori_loop(1, jnp.minimum(count, groups), others, (acc, top, total))
        if onto_smem is not None:
            lse = load(optional["onto_lse"].at[row], plgpu.Layout.WGMMA.reduce(0))
            plgpu.barrier_wait(onto_full)
            out = load(onto_smem.transpose((1, 0)), plgpu.Layout.WGMMA).astype(jnp.float32)
            is_any = jnp.where(lse > -jnp.inf, 1.0, 0.0)
            state = _folded(state, [(out, jnp.maximum(lse * LOG2_E, LOWEST), is_any)], [is_any])
        finish(*state, out_smem, lse_smem)
        plgpu.copy_smem_to_gmem(out_smem, block_of(out_ref))

        @pl.when(block == 0)
        def _():
            plgpu.copy_smem_to_gmem(lse_smem, lse_ref.at[row])

        plgpu.wait_smem_to_gmem(0)


def finish(acc, top, total, out_smem, lse_smem) -> None:
    """Leaves `acc / total` and `ln(total 2^top)` in shared memory, for a copy."""
    inverse = jnp.where(total > 0, 1.0 / total, 0.0)
    store_transposed(out_smem, (acc * spread(inverse, acc.shape)).astype(out_smem.dtype))
    lse_smem[...] = jnp.where(total > 0, (top + jnp.log2(total)) * (1 / LOG2_E), -jnp.inf)
    plgpu.commit_smem()


def _fold(state, refs, weights):
    """Folds unnormalised partials, read from `refs` all at once, into `state`; each counts `weight` times, 0 or 1."""
    per_column = plgpu.Layout.WGMMA.reduce(0)
    accs = [load(acc_ref, plgpu.Layout.WGMMA) for acc_ref, _ in refs]
    tops = [load(stats_ref.at[0], per_column) for _, stats_ref in refs]
    totals = [load(stats_ref.at[1], per_column) for _, stats_ref in refs]
    return _folded(state, list(zip(accs, tops, totals)), weights)


def _folded(state, partials, weights):
    acc, top, total = state
    new_top = functools.reduce(jnp.maximum, [part_top for _, part_top, _ in partials], top)
    decay = jnp.exp2(top - new_top)
    acc, total = acc * spread(decay, acc.shape), total * decay
    for weight, (part_acc, part_top, part_total) in zip(weights, partials):
        decay = jnp.exp2(part_top - new_top) * weight
        acc, total = acc + part_acc * spread(decay, acc.shape), total + part_total * decay
    return acc, new_top, total


def _empty(cols: int):
    """The empty partial: `(acc, top, total)`."""
    return (
        full(0.0, (MERGE_HEAD_DIMS, cols), plgpu.Layout.WGMMA),
        full(LOWEST, (cols,), plgpu.Layout.WGMMA.reduce(0)),
        full(0.0, (cols,), plgpu.Layout.WGMMA.reduce(0)),
    )
