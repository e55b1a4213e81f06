"""The lean kernel's merge, and its parts that the many-query kernel shares.

An output tile's partial states are folded in a fixed order, so that results are the same to the bit in every run.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.kernels import columns
from tree_attn.kernels.arrivals import arrive, reset
from tree_attn.kernels.interpreter import is_interpreted
from tree_attn.kernels.launch_order import runs_kernels_in_order
from tree_attn.kernels.lean_layout import LeanConfig, LeanShape, lanes, most_partials, partials_of, static_runs
from tree_attn.kernels.overlap import await_previous_kernel, begin_next_kernel
from tree_attn.kernels.plain_copies import store_result
from tree_attn.kernels.query_layout import column_index, stores_by_threads
from tree_attn.kernels.registers import LOG2_E, LOWEST, full, launch, load, spread, tiling
from tree_attn.kernels.schedule import quotient, remainder, run_start
from tree_attn.kernels.tuning import num_sms

MERGE_HEAD_DIMS = 64  # of one merging CTA
COLUMNS = 8  # of a merging CTA at least
RESIDENT_MERGES = {4: 1, 2: 3}  # such CTAs, of 72 registers a thread, that an SM holds, by their warpgroups
# Weighted values that the kernel which made partial states reads together, where one CTA has an SM and where two have.
MERGED_ELEMENTS, MERGED_ELEMENTS_OF_TWO = 16384, 4096
MAX_ROUNDS = 4  # how often it reads so at most, in less time than another launch takes


def merge_partials(partials, results, tables, merge_with, shape: LeanShape, config: LeanConfig):
    """Launches the merge of every output tile's partial states.

    Args:
      partials: as `lean.lean_attention`'s first kernel leaves them.
      results: shapes and dtypes of out and lse.
      tables, merge_with: as in `lean.lean_attention`.
    """
    other_out, other_lse = merge_with or (None, None)
    optional = {"sequences": tables.get("sequences"), "other_out": other_out, "other_lse": other_lse}
    optional = {name: x for name, x in optional.items() if x is not None}
    launched = _launch_merge(optional, results, shape.num_output_tiles, every_output_tile, shape, config)
    return launched(*partials, *optional.values())


def merge_cut(partials, written, tables, shape: LeanShape, config: LeanConfig):
    """Launches the merge of the output tiles that runs cut, into the results, which hold the others already.

    Args:
      partials, tables: as in `merge_partials`.
      written: out and lse, as `lean.lean_attention`'s first kernel leaves them.
    """
    by_run = shape.num_output_tiles > config.num_ctas
    names = ("sequences", "runs") if by_run else ("sequences",)
    optional = {name: tables[name] for name in names if tables.get(name) is not None}
    count, of_place = (config.num_ctas, first_cut) if by_run else (shape.num_output_tiles, if_cut)
    launched = _launch_merge(optional, (), count, of_place, shape, config)

    @jax.custom_batching.sequential_vmap  # what writes in place has no rule for `jax.vmap`
    def merge(*arrays):
        return tuple(pl.run_state(lambda refs: launched(*refs))(arrays)[-2:])

    return merge(*partials, *optional.values(), *written)


def merged_at_once(shape: LeanShape, config: LeanConfig) -> int:
    """Returns how many partial states the lean kernel reads together where it merges them."""
    import os
    elements = 1024 * int(os.environ.get('AT', '16')) if config.num_ctas <= num_sms() else MERGED_ELEMENTS_OF_TWO
    return max(1, elements // (shape.padded_head_dim * shape.cols))


def merges_in_launch(shape: LeanShape, config: LeanConfig, at_once: int) -> bool:
    """Returns whether the last CTA that leaves a partial state of an output tile merges all of them (`arrivals.py`).

    The kernel is one that writes results too (`lean.writes_uncut`), which has the registers for it. Otherwise a second
    kernel does, where many CTAs share that work. The interpreter has no atomics.

    Args:
      at_once: partial states that it reads together.
    """
    if is_interpreted() or not runs_kernels_in_order():
        return False
    return most_partials(shape, config) <= MAX_ROUNDS * at_once


def merge_last(results, words_smem, output_tiles, tables, shape: LeanShape, config: LeanConfig, at_once: int) -> None:
    """Counts a run's partial states in; of output tiles for which it is the last, merges all and writes the result.

    Args:
      results: `lean_results.results_of`, which has left the partial states.
      words_smem: 8 bytes of shared memory, as `arrivals.arrive` takes them.
      output_tiles: the run's first and its last, of which a partial state is there if runs cut them.
      tables: with "arrivals", a count of each output tile.
      at_once: of `merges_in_launch`.
    """
    first, last = output_tiles
    spans = [partials_of(shape, config, tables.get("sequences"), output_tile) for output_tile in output_tiles]
    are_cut = [count > 1 for _, count in spans]
    are_cut[1] &= last != first
    before = arrive(tables["arrivals"], output_tiles, are_cut, words_smem)
    for output_tile, (first_partial, count), is_cut, found in zip(output_tiles, spans, are_cut, before):

        @pl.when(is_cut & (found == count - 1))
        def _(output_tile=output_tile, first_partial=first_partial, count=count):
            reset(tables["arrivals"], output_tile)
            _merge_own(results, output_tile, first_partial, count, shape, at_once)


def _merge_own(results, output_tile, first, count, shape: LeanShape, at_once: int) -> None:
    """Merges an output tile's partial states, from number `first` on, and writes the result."""
    accs_ref, stats_ref = results.outputs[-2:]

    def end(state):
        acc, top, total = state
        results.await_memory()
        results.write(output_tile, 0, (acc, top, lambda: total))

    partial_of = lambda i: (accs_ref.at[first + i], stats_ref.at[first + i])
    rows = shape.padded_head_dim, shape.cols
    fold_partials(count, partial_of, end, rows, at_once=at_once, axis=1)


def _launch_merge(optional, results, count: int, of_place, shape: LeanShape, config: LeanConfig):
    """Returns the launch of the merge.

    Args:
      optional: tables and the other state, by name, of which names count here.
      results: shapes and dtypes of out and lse; none where they are the last arguments.
      count: of places.
      of_place: `(tables, place, shape, config)`, returns the output tile that a place merges, and whether it does.
    """
    groups, width = _merge_layout(shape, config, optional)
    return launch(
        functools.partial(_merge_partials, tuple(optional), of_place, (groups, width), shape, config),
        out_type=results,
        grid=(count, shape.padded_head_dim // MERGE_HEAD_DIMS, shape.cols // width),
        grid_names=("place", "head_dims", "columns"),
        num_threads=groups,
        thread_name="warpgroup",
        name="lean_merge",
    )


def every_output_tile(tables, place, shape: LeanShape, config: LeanConfig):
    """Returns the output tile of that number, which is merged."""
    return place, True


def if_cut(tables, place, shape: LeanShape, config: LeanConfig):
    """Returns the output tile of that number, and whether runs cut it."""
    _, count = partials_of(shape, config, tables.get("sequences"), place)
    return place, count > 1


def first_cut(tables, place, shape: LeanShape, config: LeanConfig):
    """Returns the output tile that CTA `place`'s run begins within, and whether it is the first to begin there."""
    count = lanes(shape, config)
    lane, run = remainder(place, count), quotient(place, count)
    before = jnp.maximum(run - 1, 0)
    if shape.static_kv_tiles is None:
        runs = tables["runs"]
        sequence, within, kv_tile, num_kv_tiles = (runs[run, i] for i in range(4))
        output_tile = sequence * shape.output_tiles_per_sequence + within * count + lane
        # Runs without a KV tile begin behind the last.
        output_tile = jnp.minimum(output_tile, shape.num_output_tiles - 1)
        return output_tile, (num_kv_tiles > 0) & (kv_tile > 0) & (runs[before, 3] >= kv_tile)
    total, runs = static_runs(shape, config)
    start = run_start(run, total, runs)
    number = lax.div(start, shape.static_kv_tiles)
    first = number * shape.static_kv_tiles
    is_first = (run < runs) & (start > first) & (run_start(before, total, runs) <= first)
    return jnp.minimum(number * count + lane, shape.num_output_tiles - 1), is_first


def _merge_layout(shape: LeanShape, config: LeanConfig, optional) -> tuple[int, int]:
    """Returns how many warpgroups share an output tile's partials, and the query columns of one merging CTA.

    Few output tiles have many partials each, and are shared among more CTAs, which read more. All of these should be
    resident at once. Many output tiles need the registers for one another.
    """
    ctas = shape.num_output_tiles * shape.padded_head_dim // MERGE_HEAD_DIMS
    if ctas > config.num_ctas:
        return 1, shape.cols
    is_plain = shape.target.is_hopper and shape.tokens is None and "other_out" not in optional
    if not is_plain:
        return 4 if shape.cols <= 48 else 2, shape.cols  # with 64 columns, four warpgroups spill
    ctas *= shape.cols // COLUMNS
    groups = (groups for groups, per_sm in RESIDENT_MERGES.items() if ctas <= per_sm * num_sms())
    return next(groups, 1), COLUMNS


def _merge_partials(names, of_place, layout, shape: LeanShape, config: LeanConfig, accs_ref, stats_ref, *refs):
    optional, (out_ref, lse_ref) = dict(zip(names, refs)), refs[len(names) :]
    groups, width = layout
    block_smem = plgpu.SMEM((width, MERGE_HEAD_DIMS), out_ref.dtype, transforms=result_tiling(shape))
    scratch = {"out_smem": block_smem, "lse_smem": plgpu.SMEM((width,), jnp.float32)}
    scratch = {} if stores_by_threads(shape, out_ref.shape[1]) else scratch
    if groups > 1:
        accs = plgpu.SMEM((groups, MERGE_HEAD_DIMS, width), jnp.float32)
        scratch["folded"] = accs, plgpu.SMEM((groups, 2, width), jnp.float32), plgpu.Barrier(num_arrivals=groups)
    if "other_out" in optional:
        scratch |= {"other_smem": block_smem, "other_full": plgpu.Barrier()}
    merge = functools.partial(
        _merge_scoped, optional, of_place, layout, shape, config, accs_ref, stats_ref, out_ref, lse_ref
    )
    pl.run_scoped(merge, **scratch, collective_axes="warpgroup")


def _merge_scoped(
    optional, of_place, layout, shape: LeanShape, config: LeanConfig, accs_ref, stats_ref, out_ref, lse_ref, *,
    out_smem=None, lse_smem=None, folded=None, other_smem=None, other_full=None,
):  # fmt: skip
    """Folds every n-th partial from the i-th in warpgroup i of n; the first folds their results and writes them."""
    place, block, group = (lax.axis_index(name) for name in ("place", "head_dims", "warpgroup"))
    await_previous_kernel(shape.target)
    begin_next_kernel(shape.target)
    output_tile, merges = of_place(optional, place, shape, config)
    first, count = partials_of(shape, config, optional.get("sequences"), output_tile)
    head_dims = pl.ds(pl.multiple_of(block * MERGE_HEAD_DIMS, MERGE_HEAD_DIMS), MERGE_HEAD_DIMS)
    groups, width = layout
    columns = pl.ds(pl.multiple_of(lax.axis_index("columns") * width, COLUMNS), width)
    place_of_columns = column_index(shape, output_tile) if width == shape.cols else (output_tile, columns)
    # Columns beyond G' and head dims beyond H are out of bounds: read as zeros, and not written.
    block_of = lambda ref: ref.at[*place_of_columns, head_dims]
    if other_smem is not None:  # on its way while partials are folded
        other_lse = load(optional["other_lse"].at[output_tile], plgpu.Layout.WGMMA.reduce(0))

        @pl.when(group == 0)
        def _():
            plgpu.copy_gmem_to_smem(block_of(optional["other_out"]), other_smem, other_full)

    def end(state):
        if other_smem is not None:
            plgpu.barrier_wait(other_full)
            state = fold_state(state, load(other_smem.transpose((1, 0)), plgpu.Layout.WGMMA), other_lse, axis=1)
        if out_smem is None:
            first_dim = block * MERGE_HEAD_DIMS
            store_result(
                out_ref, lse_ref, output_tile, finished(*state), first_dim=first_dim, is_first=block == 0,
                first_column=0 if width == shape.cols else lax.axis_index("columns") * width,
            )  # fmt: skip
            return
        finish(*state, out_smem, lse_smem, shape)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, block_of(out_ref))

        @pl.when(block == 0)
        def _():
            plgpu.copy_smem_to_gmem(lse_smem, lse_ref.at[output_tile, columns])

        plgpu.wait_smem_to_gmem(0)

    @pl.when(merges)
    def _():
        partial_of = lambda i: (accs_ref.at[first + i, head_dims, columns], stats_ref.at[first + i, :, columns])
        at_once = max(1, min(4 if groups > 1 else 8, 64 // width))
        fold_partials(count, partial_of, end, (MERGE_HEAD_DIMS, width), at_once=at_once, axis=1, folded=folded)


def fold_partials(count, partial_of, end, shape, *, at_once: int, axis: int, folded=None, read=None) -> None:
    """Folds the partials of some queries. Warpgroup i of n takes every n-th partial, from the i-th on.

    Where all partials can be read together, the first warpgroup takes all and waits for no other.

    Args:
      count: how many partials there are.
      partial_of: `(i) -> (acc, stats)`, refs of partial i: a sum of weighted values, of `shape`, and `[2, queries]`,
        the largest logit and the sum of weights.
      end: `(state)`, called by the first warpgroup with the folded state `(acc, top, total)`.
      at_once: partials that are read together: a dependent load takes longer than all arithmetic here.
      axis: the axis of `acc` along which queries lie.
      folded: with n warpgroups, shared memory for the state that each has folded, `[n, ...]` of accs and of stats, and
        a barrier of n arrivals. None: there is one warpgroup.
      read: loads what `partial_of` returns: acc, the largest logits and the sums. Default: from refs.
    """
    group, groups = (lax.axis_index("warpgroup"), folded[0].shape[0]) if folded else (0, 1)
    is_shared = count > at_once if folded else False
    stride = jnp.where(is_shared, groups, 1) if folded else 1
    per_query = plgpu.Layout.WGMMA.reduce(1 - axis)

    def load_all(refs):
        acc_ref, stats_ref = refs
        return load(acc_ref, plgpu.Layout.WGMMA), *(load(stats_ref.at[i], per_query) for i in range(2))

    read = load_all if read is None else read

    def step(i, state):
        indices = [group + stride * (i * at_once + j) for j in range(at_once)]
        # Past the end the last partial is read again and weighs nothing.
        partials = [read(partial_of(jnp.minimum(index, count - 1))) for index in indices]
        return _fold(state, partials, [jnp.where(index < count, 1.0, 0.0) for index in indices], axis)

    empty = (
        full(0.0, shape, plgpu.Layout.WGMMA),
        full(LOWEST, shape[axis : axis + 1], per_query),
        full(0.0, shape[axis : axis + 1], per_query),
    )
    rounds = lax.div(count + stride * at_once - 1, stride * at_once)
    if folded:
        rounds = jnp.where(is_shared | (group == 0), rounds, 0)
    acc, top, total = lax.fori_loop(0, rounds, step, empty)
    if folded is None:
        end((acc, top, total))
        return
    accs_smem, stats_smem, written = folded

    @pl.when(is_shared & (group > 0) & (group < count))
    def _():
        accs_smem[group] = acc
        stats_smem[group, 0] = top
        stats_smem[group, 1] = total

    pl.when(is_shared)(lambda: plgpu.barrier_arrive(written))

    @pl.when(group == 0)
    def _():
        pl.when(is_shared)(lambda: plgpu.barrier_wait(written))
        others = lambda i, state: _fold(state, [load_all((accs_smem.at[i], stats_smem.at[i]))], [1.0], axis)
        folded_by = jnp.where(is_shared, jnp.minimum(count, groups), 1)
        end(lax.fori_loop(1, folded_by, others, (acc, top, total)))


def fold_state(state, out, lse, *, axis: int):
    """Folds `(out, lse)` into the state that `fold_partials` ends with."""
    partial = (out.astype(jnp.float32), jnp.maximum(lse * LOG2_E, LOWEST), 1.0)
    return _fold(state, [partial], [jnp.where(lse == -jnp.inf, 0.0, 1.0)], axis)


def _fold(state, partials, weights, axis: int):
    """Folds unnormalised partial states, all at once, into `state`; each counts `weight` times, 0 or 1."""
    acc, top, total = state
    new_top = functools.reduce(jnp.maximum, [part_top for _, part_top, _ in partials], top)
    decay = jnp.exp2(top - new_top)
    acc, total = acc * spread(decay, acc.shape, axis), total * decay
    for weight, (part_acc, part_top, part_total) in zip(weights, partials):
        decay = jnp.exp2(part_top - new_top) * weight
        acc, total = acc + part_acc * spread(decay, acc.shape, axis), total + part_total * decay
    return acc, new_top, total


def finished(acc, top, total, *, axis: int = 1):
    """Returns out and lse: `acc / total` and `ln(total 2^top)`; queries are the `axis` of `acc`."""
    is_empty = total == 0  # not of NaN, which shows in both results
    inverse = jnp.where(is_empty, 0.0, 1.0 / total)
    return acc * spread(inverse, acc.shape, axis), jnp.where(is_empty, -jnp.inf, (top + jnp.log2(total)) * (1 / LOG2_E))


def result_tiling(shape):
    """Returns the transforms of a result in shared memory, for a `LeanShape` or a `SparqShape`."""
    return tiling(shape.dtype, math.gcd(shape.head_dim, MERGE_HEAD_DIMS))


def finish(acc, top, total, out_smem, lse_smem, shape, *, first_dim: int = 0) -> None:
    """Writes `finished` of queries that are columns to shared memory, out as rows. The caller commits it.

    Args:
      out_smem: `[queries, head dims]` with `result_tiling(shape)`, of which `acc` has those from `first_dim` on.
    """
    out, lse = finished(acc, top, total)
    columns.store_transposed(out_smem, result_tiling(shape), out, first_row=first_dim)
    columns.store_per_column(lse_smem, lse)


def finish_rows(acc, top, total, out_smem, lse_smem) -> None:
    """Writes `finished` of queries that are rows to shared memory, and commits it."""
    out, lse = finished(acc, top, total, axis=0)
    out_smem[...] = out.astype(out_smem.dtype)
    lse_smem[...] = lse
    plgpu.commit_smem()
