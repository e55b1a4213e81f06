"""LeanAttention as one or two Mosaic GPU kernels: partial states by equal runs of KV tiles, and their merge.

The shape of the first kernel, `_attend_runs`, per CTA:
- one warpgroup moves (TMA, or `cp.async`: `targets.py`), one computes; K and V have barriers of their own, so that a
  stage's K refills while its V is in use;
- operands are swapped, S^T = K Q^T and O^T = V^T P^T: the 64 rows that a tensor core wants are keys; the few query
  columns of a decode step (T x G) are padded to a multiple of 8 only;
- the CTA walks its run over the output tiles it touches (`lean_walk.py`). It writes the results of those that it holds
  whole, and leaves one unnormalised partial state `(acc, max, sum)` for each of the others.
The partials of an output tile that runs cut are folded in a fixed order: results are the same in every run. The last
CTA that leaves one does so, if that takes little reading (`arrivals.py`, `lean_merge.merges_in_launch`); otherwise a
second kernel does. Where every run is known to hold whole output tiles, nothing is merged. Where an exchange with other
devices ends the kernel, that merges (`tree_attn/kernels/epilogue.py`).

Inside, logits are in base 2: `exp2(x log2 e)` is one instruction. Shapes are in comments: `kv` keys of a KV tile,
`cols` query columns, H head dim (Hp: padded to 64).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.kernels.kv_parts import kv_tilings
from tree_attn.kernels.lean_compute import LeanStages, RunCompute
from tree_attn.kernels.lean_layout import (
    MAX_SPARE_COLUMNS,
    LeanConfig,
    LeanShape,
    has_whole_output_tiles,
    num_partials,
    padding_bytes,
    partial_spans,
)
from tree_attn.kernels.lean_merge import merge_cut, merge_partials, merged_at_once, merges_in_launch
from tree_attn.kernels.lean_moves import Barriers, move_tiles, num_arrivals
from tree_attn.kernels.lean_products import products_of, query_tiling
from tree_attn.kernels.lean_results import results_of
from tree_attn.kernels.lean_walk import run_of_cta
from tree_attn.kernels.overlap import await_previous_kernel, begin_next_kernel, overlaps
from tree_attn.kernels.plain_copies import copy_rows
from tree_attn.kernels.query_layout import column_index, moves_by_rows, stores_by_threads
from tree_attn.kernels.registers import WRITES_IN_PLACE, launch
from tree_attn.kernels.tuning import MIN_SHARE_OF_CTAS, num_sms

FEW_KV_TILES = 4  # that a cache has room for, with which a kernel always begins early


# Jitted, as the other kernels are: the layers of a program then share what takes two seconds to lower and compile.
@functools.partial(jax.jit, static_argnames=("shape", "config"))
def lean_attention(query, key, value, *, merge_with=None, shape: LeanShape, config: LeanConfig, **tables):
    """Runs both kernels; every check is the caller's.

    Args:
      query: `[output tiles, G', H]` with `G' <= cols` query columns; or `[B, T, K, H]`, if `shape.tokens`.
      key, value: `[B, S, K, H]`; `[1, total, K, H]` if packed; `[pages, page_size, K, H]` if paged.
      merge_with: `(out, lse)` over other keys to merge with, in the layouts of the results, or None. It needs
        `shape.tokens`, and output tiles that runs cut: otherwise nothing is merged.
      tables: arrays by name; None, or left out, where there is none:
        sequences: int32 `[B, 7]` (first slot, KV tiles per output tile, KV tiles before, first and end of the visible
          slots, most runs, whether no run cuts an output tile) or `[B, 9]` (first and end of what all rows see), or
          None where all slots are visible, so that `shape.static_kv_tiles` is known.
        runs: int32 `[num_ctas, 7]` from `tree_attn.kernels.lean_call.schedule_tables`, or None if
          `shape.static_kv_tiles`.
        columns: int32 `[2, B, col_blocks * cols]`, first and end visible slot per query column, if `mask="columns"`.
        pages: int32 `[B, pages per sequence]`, if paged.
        scales: float32 `[2, K]`, factors of K and V of each head, or None.
        prefix_accs, prefix_stats, prefix_sequences: with `shape.prefix`, what its kernel left, and its `sequences`.
    Returns:
      out like `query`, lse float32 `[output tiles, cols]`.
    """
    results = _results(query, shape)
    if has_whole_output_tiles(shape, config):
        return _launch_runs(query, key, value, tables, shape, config, results)
    # A state to merge with joins in the merge, which then has all output tiles.
    if merge_with is not None or not writes_uncut(shape):
        partials = _launch_runs(query, key, value, tables, shape, config, _partials(shape, config))
        return merge_partials(partials, results, tables, merge_with, shape, config)
    outputs = (*results, *_partials(shape, config))
    if merges_in_launch(shape, config, merged_at_once(shape, config)):
        names = [name for name, table in tables.items() if table is not None]

        @jax.custom_batching.sequential_vmap  # CTAs of two sequences must not count together
        def attend(query, key, value, arrivals, *arrays):
            named = dict(zip(names, arrays)) | {"arrivals": arrivals}
            return tuple(_launch_runs(query, key, value, named, shape, config, outputs)[:2])

        arrivals = jnp.zeros(shape.num_output_tiles, jnp.int32)
        return attend(query, key, value, arrivals, *(tables[name] for name in names))
    *written, accs, stats = _launch_runs(query, key, value, tables, shape, config, outputs)
    return merge_cut((accs, stats), written, tables, shape, config)


@functools.partial(jax.jit, static_argnames=("shape", "config"))
def lean_partials(query, key, value, *, shape: LeanShape, config: LeanConfig, **tables):
    """Computes the partial states of all output tiles, some of which runs cut; arguments of `lean_attention`.

    Returns:
      float32 `[partial states, Hp, cols]`, sums of values weighted by `2^(x - max)`, x logits in base 2; and `[partial
      states, 2, cols]`, max and the sum of those weights. `lean_layout.partials_of` says which are an output tile's.
    """
    return _launch_runs(query, key, value, tables, shape, config, _partials(shape, config))


@functools.partial(jax.jit, static_argnames=("shape", "config", "epilogue", "result"))
def lean_exchange(query, key, value, rank, *, shape: LeanShape, config: LeanConfig, epilogue, result, **tables):
    """Computes `lean_attention` of output tiles that runs cut, merged with other devices' states, in one launch.

    Args:
      rank: this device's, int32 `[1]`, or None (`tree_attn.kernels.exchange.exchange`).
      epilogue: takes each partial state as it is made, and merges at the end (`tree_attn.local.Epilogue`).
      result: shape and dtype of out.
    Returns:
      out, like `result`: `[output tiles, columns, H]`; lse float32 `[output tiles, columns]`.
    """
    tables |= {"spans": partial_spans(shape, config, tables), "rank": rank}
    lse = jax.ShapeDtypeStruct(result.shape[:-1], jnp.float32)
    return _launch_runs(query, key, value, tables, shape, config, (result, lse), epilogue)


def _launch_runs(query, key, value, tables, shape: LeanShape, config: LeanConfig, outputs, epilogue=None):
    """Launches the first kernel.

    Args:
      outputs: shapes and dtypes of what it writes: `_results`, where no run cuts an output tile or with an `epilogue`;
        else `_partials`, after `_results` if it writes the results of output tiles that its runs hold whole.
    """
    tables = {name: table for name, table in tables.items() if table is not None}
    return launch(
        functools.partial(_attend_runs, tuple(tables), shape, config, epilogue),
        out_type=outputs,
        grid=(config.num_ctas,),
        grid_names=("cta",),
        num_threads=2,
        thread_name="warpgroup",
        name="lean_attention" if epilogue is None else "lean_exchange",
    )(query, key, value, *tables.values())


def _partials(shape: LeanShape, config: LeanConfig):
    """Returns the partial states' shapes and dtypes.

    They are sums of values weighted by `2^(x - max)`, x logits in base 2, and then max and the sum of those weights.
    """
    count = num_partials(shape, config)
    accs = jax.ShapeDtypeStruct((count, shape.padded_head_dim, shape.cols), jnp.float32)
    return accs, jax.ShapeDtypeStruct((count, 2, shape.cols), jnp.float32)


def _results(query, shape: LeanShape):
    lse = jax.ShapeDtypeStruct((shape.num_output_tiles, shape.cols), jnp.float32)
    return jax.ShapeDtypeStruct(query.shape, query.dtype), lse


def writes_uncut(shape: LeanShape) -> bool:
    """Returns whether the first kernel writes the results of output tiles that its runs hold whole.

    It leaves partial states of the others beside them, and needs registers for both ends of a segment.
    """
    return shape.cols <= MAX_SPARE_COLUMNS and jax.__version_info__ >= WRITES_IN_PLACE


def writes_results(shape: LeanShape, config: LeanConfig, outputs) -> bool:
    """Returns whether a kernel of these outputs writes results: all of them, or those of uncut output tiles."""
    return has_whole_output_tiles(shape, config) or len(outputs) > 2


def begins_early(shape: LeanShape, config: LeanConfig) -> bool:
    """Returns whether the kernel begins before the previous one has ended, and lets the next one do so.

    CTAs that begin early take the first SMs with room. Where some SMs are to have a CTA more than others, many would
    have it, and others no CTA. With 288 CTAs, of which three fit an SM, a step took 1.2 times as long so
    (docs/log/lean.md). Where a cache has room for few keys it begins early all the same: that was not timed.
    """
    sms = num_sms()
    places = -(-config.num_ctas // sms) * sms
    is_even = places == sms or config.num_ctas >= MIN_SHARE_OF_CTAS * places
    return overlaps(shape.target) and (is_even or shape.num_slots <= FEW_KV_TILES * config.block_kv)


def reads_early(shape: LeanShape, config: LeanConfig) -> bool:
    """Returns whether the kernel reads old keys before the previous one has ended (`overlap.py`)."""
    is_large = 2 * config.num_ctas > num_sms()
    return shape.num_new is not None and is_large and begins_early(shape, config)


def _attend_runs(names, shape: LeanShape, config: LeanConfig, epilogue, query_ref, key_ref, value_ref, *refs):
    tables, outputs = dict(zip(names, refs)), refs[len(names) :]
    dtype, cols, block_kv, stages = shape.dtype, shape.cols, config.block_kv, config.num_stages
    smem = functools.partial(plgpu.SMEM, dtype=dtype, transforms=query_tiling(shape, config))
    stored = functools.partial(plgpu.SMEM, dtype=shape.key_dtype)
    key_tiling, value_tiling = kv_tilings(shape, config)
    kv_arrivals = num_arrivals(shape, config)
    # An output tile's query is copied while the one before it is attended to, where there are registers for that.
    has_registers = has_whole_output_tiles(shape, config) or shape.cols <= MAX_SPARE_COLUMNS
    num_queries = 2 if epilogue is None and has_registers else 1
    has_rows, stores = (f(shape, query_ref.shape[1]) for f in (moves_by_rows, stores_by_threads))
    products_smem = products_of(shape).scratch(shape, config)
    results_smem = results_of(shape).scratch(
        shape,
        has_results=epilogue is None and writes_results(shape, config, outputs) and not stores,
        has_partials=epilogue is None and not has_whole_output_tiles(shape, config) and "arrivals" not in tables,
    )

    # Two words take a KiB as an array. Where shared memory is small they lie where warps have left states before.
    has_words = "arrivals" in tables and shape.target.is_hopper
    other_smem = {"arrival_smem": plgpu.SMEM((2,), jnp.int32)} if has_words else {}
    if begins_early(shape, config):
        unused = padding_bytes(shape, config, -(-config.num_ctas // num_sms()))
        other_smem |= {"unused_smem": plgpu.SMEM((unused,), jnp.int8)} if unused else {}

    def attend_runs(unused_smem=None, **smem):
        of = lambda names: {name: smem.pop(name) for name in names}
        products = products_of(shape)(shape=shape, config=config, **of(products_smem))
        results = results_of(shape)(shape=shape, outputs=outputs, **of(results_smem))
        refs = query_ref, key_ref, value_ref
        _attend_runs_scoped(tables, shape, config, epilogue, products, results, has_rows, *refs, *outputs, **smem)

    pl.run_scoped(
        attend_runs,
        query_smem=smem((num_queries, cols, shape.head_dim)),
        key_smem=stored((stages, block_kv, shape.head_dim), transforms=key_tiling),
        value_smem=stored((stages, block_kv, shape.padded_head_dim), transforms=value_tiling),
        query_full=plgpu.Barrier(num_barriers=num_queries),
        query_free=plgpu.Barrier(num_barriers=num_queries),
        key_full=plgpu.Barrier(num_barriers=stages, num_arrivals=kv_arrivals),
        key_free=plgpu.Barrier(num_barriers=stages),
        value_full=plgpu.Barrier(num_barriers=stages, num_arrivals=kv_arrivals),
        value_free=plgpu.Barrier(num_barriers=stages),
        **products_smem,
        **results_smem,
        **other_smem,
        collective_axes="warpgroup",
    )


def _attend_runs_scoped(
    tables, shape: LeanShape, config: LeanConfig, epilogue, products, results, has_rows: bool, query_ref, key_ref,
    value_ref, *outputs,
    query_smem, key_smem, value_smem, query_full, query_free, key_full, key_free, value_full, value_free,
    arrival_smem=None,
):  # fmt: skip
    is_early = reads_early(shape, config)
    if begins_early(shape, config):
        begin_next_kernel(shape.target)
        if not is_early:
            await_previous_kernel(shape.target)
    run = run_of_cta(tables, shape, config)
    barriers = Barriers(query_free, key_full, key_free, value_full, value_free)

    @pl.when(lax.axis_index("warpgroup") == 1)
    def _move():
        def move_query(output_tile, place):
            if has_rows:
                seen = 0, query_ref.shape[1]
                copy_rows(
                    query_ref, query_smem.at[place], query_tiling(shape, config), query_full, place, 0, seen,
                    block=output_tile.index,
                )  # fmt: skip
                return
            # The copy fills what is out of bounds with zeros: fewer columns than 8, or queries beyond T.
            columns = query_ref.at[column_index(shape, output_tile.index)]
            plgpu.copy_gmem_to_smem(columns, query_smem.at[place], query_full.at[place])

        refs, smems = (key_ref, value_ref), (key_smem, value_smem)
        move_tiles(
            tables, shape, config, run, move_query, query_smem.shape[0], refs, smems, barriers, reads_early=is_early
        )  # fmt: skip

    @pl.when(lax.axis_index("warpgroup") == 0)
    def _compute():
        if is_early:  # else it has waited already
            await_previous_kernel(shape.target)
        RunCompute(
            tables=tables, shape=shape, config=config, run=run, epilogue=epilogue, products=products, results=results,
            outputs=outputs, stages=LeanStages(
                run=run, config=config, key_smem=key_smem, value_smem=value_smem, barriers=barriers
            ),
            query_smem=query_smem, query_full=query_full, query_free=query_free,
            words_smem=getattr(products, "warp_stats_smem", None) if arrival_smem is None else arrival_smem,
            merged_at_once=merged_at_once(shape, config),
            columns=outputs[0].shape[1], fences_query=has_rows and not shape.uses_mma,
            writes_results=writes_results(shape, config, outputs),
        ).compute()  # fmt: skip
