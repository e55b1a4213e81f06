"""The many-query kernel's merge: an output tile's partial states are folded in the order of their keys.

Shapes in comments: `rows` query rows of half an output tile.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.kernels.interpreter import is_interpreted
from tree_attn.kernels.lean_layout import ROWS, LeanConfig, LeanShape, partials_of
from tree_attn.kernels.lean_merge import (
    every_output_tile,
    finish_rows,
    finished,
    first_cut,
    fold_partials,
    fold_state,
    if_cut,
)
from tree_attn.kernels.overlap import await_previous_kernel, begin_next_kernel
from tree_attn.kernels.plain_copies import copy_rows, store_rows
from tree_attn.kernels.query_layout import is_by_rows, num_halves, query_slices
from tree_attn.kernels.registers import launch, load, tiling

MERGED_AT_ONCE = 2  # partials of 64 head dims
CTAS_OF_CUT = 4  # merging CTAs for each run, where those of uncut output tiles return at once


def merge_partials(partials, results, sequences, merge_with, shape: LeanShape, config: LeanConfig):
    """Launches the merge of each output tile's partial states; arguments as in `lean_merge.merge_partials`."""
    other_out, other_lse = merge_with or (None, None)
    optional = {"sequences": sequences, "other_out": other_out, "other_lse": other_lse}
    optional = {name: x for name, x in optional.items() if x is not None}
    return _launch(optional, results, results[0], shape, config)(*partials, *optional.values())


def merge_cut(partials, written, sequences, runs, shape: LeanShape, config: LeanConfig):
    """Launches the merge of the output tiles that runs cut, into the results, which hold the others already.

    Args:
      partials, sequences: as in `merge_partials`; written: out and lse; runs: as in `lean.lean_attention`.
    """
    optional = {} if sequences is None else {"sequences": sequences, "runs": runs}
    launched = _launch(optional, (), written[0], shape, config)

    @jax.custom_batching.sequential_vmap  # what writes in place has no rule for `jax.vmap`
    def merge(*arrays):
        return tuple(pl.run_state(lambda refs: launched(*refs))(arrays)[-2:])

    return merge(*partials, *optional.values(), *written)


def _launch(optional, results, out, shape: LeanShape, config: LeanConfig):
    """Returns the kernel; with no `results` it merges in place, and only output tiles that runs cut.

    Args:
      out: the result's shape.
    """
    # Reading partials is what takes an SM's time, so few output tiles are shared among many CTAs.
    halves = num_halves(shape, out)  # of an output tile, each of which a warpgroup computed
    # In place, no more output tiles are merged than there are runs.
    by_run = not results and shape.num_output_tiles > config.num_ctas
    places = config.num_ctas if by_run else shape.num_output_tiles
    of_place = first_cut if by_run else every_output_tile if results else if_cut
    ctas = lambda dims: places * halves * (shape.head_dim // dims)
    wanted = config.num_ctas * (1 if results else CTAS_OF_CUT)
    dims = next((dims for dims in (64, 32) if ctas(dims) >= wanted), 16)
    return launch(
        functools.partial(_merge_partials, tuple(optional), dims, of_place, shape, config),
        out_type=results,
        grid=(places, halves, shape.head_dim // dims),
        grid_names=("place", "half", "head_dims"),
        num_threads=1,
        thread_name="warpgroup",
        name="tall_merge",
    )


def _merge_partials(names, dims: int, of_place, shape: LeanShape, config: LeanConfig, accs_ref, stats_ref, *refs):
    """Folds the partials of 64 rows, `dims` head dims of them, in the order of their keys."""
    optional, results = dict(zip(names, refs)), refs[len(names) :]
    block_smem = plgpu.SMEM((ROWS, dims), results[0].dtype, transforms=tiling(results[0].dtype, dims))
    scratch = {"out_smem": block_smem, "lse_smem": plgpu.SMEM((ROWS,), jnp.float32)}
    if "other_out" in optional:
        arrivals = max(1, ROWS // shape.tokens)
        scratch |= {"other_smem": block_smem, "other_full": plgpu.Barrier(num_barriers=1, num_arrivals=arrivals)}
    merge = functools.partial(_merge_scoped, optional, dims, of_place, shape, config, accs_ref, stats_ref, *results)
    pl.run_scoped(merge, **scratch, collective_axes="warpgroup")


def _merge_scoped(
    optional, dims: int, of_place, shape: LeanShape, config: LeanConfig, accs_ref, stats_ref,
    out_ref, lse_ref, *, out_smem, lse_smem, other_smem=None, other_full=None,
):  # fmt: skip
    has_rows, transforms = is_by_rows(shape, out_ref), tiling(out_ref.dtype, dims)
    place, half, block = (lax.axis_index(name) for name in ("place", "half", "head_dims"))
    # Tables are older than the kernel before, which has read them too; in place, `jax.vmap` may have sliced them.
    is_in_place = of_place is not every_output_tile
    if is_in_place:
        await_previous_kernel()
    output_tile, merges = of_place(optional, place, shape, config)
    first, count = partials_of(shape, config, optional.get("sequences"), output_tile)
    if not is_in_place:
        await_previous_kernel()
    begin_next_kernel()
    head_dims = pl.ds(pl.multiple_of(block * dims, dims), dims)
    rows = pl.ds(pl.multiple_of(half * ROWS, ROWS), ROWS)
    slices = list(query_slices(shape, output_tile, half * ROWS, ROWS))
    if other_smem is not None:  # on its way while partials are folded
        for offset, size, where in slices:
            part = other_smem.at[pl.ds(offset, size)]
            if has_rows:
                sequence, queries, head = where
                copy_rows(
                    optional["other_out"], part, transforms, other_full, 0, queries.start, (0, out_ref.shape[1]),
                    block=sequence, head=head, first_dim=block * dims,
                )  # fmt: skip
            else:
                plgpu.copy_gmem_to_smem(optional["other_out"].at[*where, head_dims], part, other_full.at[0])
        other_lse = load(optional["other_lse"].at[output_tile, rows], plgpu.Layout.WGMMA.reduce(1))

    def end(state):
        if other_smem is not None:
            plgpu.barrier_wait(other_full.at[0])
            state = fold_state(state, load(other_smem, plgpu.Layout.WGMMA), other_lse, axis=0)
        if shape.group is not None or (has_rows and not is_interpreted()):
            out, lse_smem[...] = finished(*state, axis=0)
            (_, size, (sequence, queries, head)), *_ = slices  # the others follow
            begin = sequence, queries.start, head * (shape.group or 1), size
            store_rows(out_ref, out, begin, first_dim=block * dims, group=shape.group)
            plgpu.commit_smem()
        else:
            finish_rows(*state, out_smem, lse_smem)
            for offset, size, where in slices:
                plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(offset, size)], out_ref.at[*where, head_dims])

        @pl.when(block == 0)
        def _():
            plgpu.copy_smem_to_gmem(lse_smem, lse_ref.at[output_tile, rows])

        plgpu.wait_smem_to_gmem(0)

    @pl.when(merges)
    def _():
        partial_of = lambda i: (accs_ref.at[first + i, half, :, head_dims], stats_ref.at[first + i, half])
        fold_partials(count, partial_of, end, (ROWS, dims), at_once=MERGED_AT_ONCE * 64 // dims, axis=0)
