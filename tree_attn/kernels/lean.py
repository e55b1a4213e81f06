"""LeanAttention on Hopper as two Mosaic GPU kernels: partial states by equal runs of KV tiles, then their merge.

The shape of the first kernel, `_attend_runs`, per CTA:
- one warpgroup moves (TMA), one computes; K and V have barriers of their own, so that a stage's K refills while its V
  is in use;
- operands are swapped, S^T = K Q^T and O^T = V^T P^T: the 64 rows that a tensor core wants are keys; the few query
  columns of a decode step (T x G) are padded to a multiple of 8 only;
- the CTA walks its run over the output tiles it touches (`lean_walk.py`). It writes the results of those that it holds
  whole, and leaves one unnormalised partial state `(acc, max, sum)` for each of the others.
The second, `lean_merge.py`, folds the partials of each output tile that runs cut, in a fixed order: results are the
same in every run. It is a launch of its own (docs/log/lean.md: "The merge stays a launch of its own"). Where every run
is known to hold whole output tiles, the first kernel is the only one. Nor is there a second where an exchange with
other devices ends the first (`tree_attn/kernels/epilogue.py`).

Inside, logits are in base 2: `exp2(x log2 e)` is one instruction. Shapes are in comments: `kv` keys of a KV tile,
`cols` query columns, H head dim (Hp: padded to 64).
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.kernels.kv_parts import kv_tilings
from tree_attn.kernels.lean_garbage import zero_garbage
from tree_attn.kernels.lean_layout import (
    MAX_SPARE_COLUMNS,
    LeanConfig,
    LeanShape,
    has_whole_output_tiles,
    num_partials,
    partial_spans,
    scratch_bytes,
)
from tree_attn.kernels.lean_merge import finish, merge_cut, merge_partials
from tree_attn.kernels.lean_walk import (
    Barriers,
    move_tiles,
    num_arrivals,
    run_of_cta,
    span_of_keys,
    trims_tiles,
    visible_slots,
    walk,
)
from tree_attn.kernels.query_layout import column_index
from tree_attn.kernels.registers import LOWEST, full, launch, load, scaled_logits, spread, store_transposed, tiling

WRITES_IN_PLACE = (0, 11)  # JAX, in whose kernels results can be arguments


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
        sequences: int32 `[B, 6]` (first slot, KV tiles per output tile, KV tiles before, first and end of the visible
          slots, most runs), or None where all slots are visible, so that `shape.static_kv_tiles` is known.
        runs: int32 `[num_ctas, 4]` from `tree_attn.kernels.schedule.run_table`, or None if `shape.static_kv_tiles`.
        columns: int32 `[2, B, col_blocks * cols]`, first and end visible slot per query column, if `mask="columns"`.
        pages: int32 `[B, pages per sequence]`, if paged.
        scales: float32 `[2, K]`, factors of K and V of each head, or None.
    Returns:
      out like `query`, lse float32 `[output tiles, cols]`.
    """
    results = _results(query, shape)
    if has_whole_output_tiles(shape, config):
        return _launch_runs(query, key, value, tables, shape, config, results)
    # A state to merge with joins in the merge, which then has all output tiles.
    if merge_with is not None or not _has_registers_for_both(shape) or jax.__version_info__ < WRITES_IN_PLACE:
        partials = _launch_runs(query, key, value, tables, shape, config, _partials(shape, config))
        return merge_partials(partials, results, tables, merge_with, shape, config)
    *written, accs, stats = _launch_runs(
        query, key, value, tables, shape, config, (*results, *_partials(shape, config))
    )
    return merge_cut((accs, stats), written, tables, shape, config)


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
        scratch_bytes=scratch_bytes(shape),
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


def _has_registers_for_both(shape: LeanShape) -> bool:
    """Returns whether the first kernel has registers for two ends of a segment: a result, and a partial state."""
    return not shape.is_widened and shape.cols <= MAX_SPARE_COLUMNS


def writes_results(shape: LeanShape, config: LeanConfig, outputs) -> bool:
    """Returns whether a kernel of these outputs writes results: all of them, or those of uncut output tiles."""
    return has_whole_output_tiles(shape, config) or len(outputs) > 2


def _attend_runs(names, shape: LeanShape, config: LeanConfig, epilogue, query_ref, key_ref, value_ref, *refs):
    tables, outputs = dict(zip(names, refs)), refs[len(names) :]
    dtype, cols, block_kv, stages = shape.dtype, shape.cols, config.block_kv, config.num_stages
    # K, V and P meet in the tensor core with one swizzle, and P has the `block_kv` keys of a KV tile.
    swizzled = tiling(dtype, math.gcd(shape.head_dim, block_kv))
    smem = functools.partial(plgpu.SMEM, dtype=dtype, transforms=swizzled)
    stored = functools.partial(plgpu.SMEM, dtype=shape.key_dtype)
    key_tiling, value_tiling = kv_tilings(shape, config)
    key_arrivals, value_arrivals = num_arrivals(tables, shape, config)
    # An output tile's query is copied while the one before it is attended to, where there are registers for that.
    has_registers = has_whole_output_tiles(shape, config) or shape.cols <= MAX_SPARE_COLUMNS
    num_queries = 2 if epilogue is None and has_registers else 1
    widened = {}
    if shape.is_widened:
        widened = {"wide_key": smem((block_kv, shape.head_dim)), "wide_value": smem((block_kv, shape.padded_head_dim))}
    states_smem = {}
    if epilogue is None and writes_results(shape, config, outputs):
        states_smem |= {
            "out_smem": smem((cols, shape.padded_head_dim), transforms=tiling(dtype, math.gcd(shape.head_dim, 64))),
            "lse_smem": plgpu.SMEM((cols,), jnp.float32),
        }
    if epilogue is None and not has_whole_output_tiles(shape, config):
        states_smem |= {
            "acc_smem": plgpu.SMEM((shape.padded_head_dim, cols), jnp.float32),
            "stats_smem": plgpu.SMEM((2, cols), jnp.float32),
        }
    pl.run_scoped(
        functools.partial(
            _attend_runs_scoped, tables, shape, config, epilogue, query_ref, key_ref, value_ref, *outputs
        ),
        query_smem=smem((num_queries, cols, shape.head_dim)),
        key_smem=stored((stages, block_kv, shape.head_dim), transforms=key_tiling),
        value_smem=stored((stages, block_kv, shape.padded_head_dim), transforms=value_tiling),
        weights_smem=smem((cols, block_kv)),
        query_full=plgpu.Barrier(num_barriers=num_queries),
        query_free=plgpu.Barrier(num_barriers=num_queries),
        key_full=plgpu.Barrier(num_barriers=stages, num_arrivals=key_arrivals),
        key_free=plgpu.Barrier(num_barriers=stages),
        value_full=plgpu.Barrier(num_barriers=stages, num_arrivals=value_arrivals),
        value_free=plgpu.Barrier(num_barriers=stages),
        **states_smem,
        **widened,
        collective_axes="warpgroup",
    )


def _attend_runs_scoped(
    tables, shape: LeanShape, config: LeanConfig, epilogue, query_ref, key_ref, value_ref, *outputs,
    query_smem, key_smem, value_smem, weights_smem, query_full, query_free, key_full, key_free, value_full, value_free,
    out_smem=None, lse_smem=None, acc_smem=None, stats_smem=None, wide_key=None, wide_value=None,
):  # fmt: skip
    block_kv, stages, cols = config.block_kv, config.num_stages, shape.cols
    padded = shape.padded_head_dim
    run = run_of_cta(tables, shape, config)

    @pl.when(lax.axis_index("warpgroup") == 1)
    def _move():
        def move_query(output_tile, place):
            # G' may be less than cols: the copy fills what is out of bounds with zeros.
            columns = query_ref.at[column_index(shape, output_tile.index)]
            plgpu.copy_gmem_to_smem(columns, query_smem.at[place], query_full.at[place])

        barriers = Barriers(query_free, key_full, key_free, value_full, value_free)
        refs, smems = (key_ref, value_ref), (key_smem, value_smem)
        move_tiles(tables, shape, config, run, move_query, query_smem.shape[0], refs, smems, barriers)

    @pl.when(lax.axis_index("warpgroup") == 0)
    def _compute():
        per_column = plgpu.Layout.WGMMA.reduce(0)
        step = None if epilogue is None else epilogue.begin(tables.get("rank"))

        def attend_segment(output_tile, segment):
            query_place = segment.query_place(query_smem.shape[0])
            plgpu.barrier_wait(query_full.at[query_place])
            visible = functools.partial(visible_slots, tables, shape, output_tile, (block_kv, cols), per_column)
            seen = visible()
            span = span_of_keys(tables, output_tile)
            head_scales = (
                [tables["scales"][i, output_tile.head] for i in range(2)] if "scales" in tables else (None, None)
            )
            key_scale, value_scale = head_scales

            def kv_tile_step(i, carry):
                acc, top, total = carry
                kv_tile = segment.kv_tiles_done + i
                stage = lax.rem(kv_tile, stages)
                is_refilled = kv_tile + stages < run.num_kv_tiles  # else no warpgroup waits for it

                plgpu.barrier_wait(key_full.at[stage])

                keys = _operand(key_smem.at[stage], wide_key)

                def products(acc_ref):
                    plgpu.wgmma(acc_ref, keys, query_smem.at[query_place].transpose((1, 0)))
                    return acc_ref[...]

                logits = pl.run_scoped(products, plgpu.ACC((block_kv, cols), jnp.float32))  # [kv, cols]

                @pl.when(is_refilled)
                def _():
                    plgpu.barrier_arrive(key_free.at[stage])

                logits = scaled_logits(logits, shape.scale, shape.logits_soft_cap, key_scale)
                first_slot = output_tile.first_slot + (segment.kv_tile + i) * block_kv
                if shape.mask != "none":
                    slots = plgpu.broadcasted_iota(jnp.int32, (block_kv, cols), 0, layout=plgpu.Layout.WGMMA)
                    slots = slots + first_slot
                    # Beside an exchange there are too few registers to keep them from KV tile to KV tile.
                    first, end = seen if epilogue is None else visible()
                    logits = jnp.where((slots >= first) & (slots < end), logits, -jnp.inf)
                new_top = jnp.maximum(top, logits.max(axis=0))  # [cols]
                decay = jnp.exp2(top - new_top)
                weights = jnp.exp2(logits - spread(new_top, logits.shape))
                # Summed over keys at the end only: a sum over keys crosses warps.
                total = total * spread(decay, total.shape) + weights  # [kv, cols]
                store_transposed(weights_smem, weights.astype(shape.dtype))
                plgpu.commit_smem()

                plgpu.barrier_wait(value_full.at[stage])
                zero_garbage(value_smem.at[stage], span, first_slot, shape, trims_tiles(tables, shape, config))
                values = _operand(value_smem.at[stage], wide_value)

                def weighted(acc_ref):
                    plgpu.wgmma(acc_ref, values.transpose((1, 0)), weights_smem.transpose((1, 0)))
                    return acc_ref[...]

                update = pl.run_scoped(weighted, plgpu.ACC((padded, cols), jnp.float32))  # [Hp, cols]

                @pl.when(is_refilled)
                def _():
                    plgpu.barrier_arrive(value_free.at[stage])

                return acc * spread(decay, acc.shape) + update, new_top, total

            empty = (
                full(0.0, (padded, cols), plgpu.Layout.WGMMA),
                full(LOWEST, (cols,), per_column),
                full(0.0, (block_kv, cols), plgpu.Layout.WGMMA),
            )
            acc, top, total = lax.fori_loop(0, segment.num_kv_tiles, kv_tile_step, empty)

            @segment.if_query_is_awaited(run, query_smem.shape[0])
            def _():
                plgpu.barrier_arrive(query_free.at[query_place])

            acc = acc if value_scale is None else acc * value_scale
            partial = lax.axis_index("cta") + output_tile.index
            if epilogue is not None:
                columns = outputs[0].shape[1]
                epilogue.leave(tables.get("rank"), step, partial, acc, top, total.sum(axis=0), columns)
                return
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last segment's state has left

            def write_result():
                finish(acc, top, total.sum(axis=0), out_smem, lse_smem)
                # Columns beyond G' and head dims beyond H are out of bounds, and not written.
                head_dims = pl.ds(output_tile.index * 0, padded)
                plgpu.copy_smem_to_gmem(out_smem, outputs[0].at[*column_index(shape, output_tile.index), head_dims])
                plgpu.copy_smem_to_gmem(lse_smem, outputs[1].at[output_tile.index])

            def leave_partial():
                acc_smem[...] = acc
                stats_smem[0] = top
                stats_smem[1] = total.sum(axis=0)
                plgpu.commit_smem()
                accs_ref, stats_ref = outputs[-2:]
                plgpu.copy_smem_to_gmem(acc_smem, accs_ref.at[partial])
                plgpu.copy_smem_to_gmem(stats_smem, stats_ref.at[partial])

            if acc_smem is None:
                write_result()
            elif out_smem is None:
                leave_partial()
            else:
                is_whole = segment.num_kv_tiles == output_tile.num_kv_tiles
                pl.when(is_whole)(write_result)
                pl.when(~is_whole)(leave_partial)

        walk(run, tables, shape, attend_segment)
        plgpu.wait_smem_to_gmem(0)
        if epilogue is not None:
            epilogue.end(tables.get("rank"), step, tables["spans"], *outputs, shape.padded_head_dim)


def _operand(stored, wide):
    """Returns K or V for the tensor core: as stored, or widened to the query's dtype, which is exact for float8."""
    if wide is None:
        return stored
    narrow = load(stored, plgpu.Layout.WGMMA_UPCAST_2X)
    # Hopper converts e4m3 to float16 only; bfloat16 goes by way of float32.
    wide[...] = (
        narrow.astype(wide.dtype) if wide.dtype == jnp.float16 else narrow.astype(jnp.float32).astype(wide.dtype)
    )
    plgpu.commit_smem()
    return wide
