"""Attention of many query rows over keys that they share, on Hopper: a prefix that a whole batch has in common.

The other orientation of `lean_kernel.py`, with its schedule: S = Q K^T and O = P V, so that the rows of a tensor core
are queries. Sequences that share keys turn the products of a decode step from matrix by vector into matrix by matrix;
here reading K and V is nothing, and the tensor cores are what is to be kept busy. Per CTA:
- one warpgroup moves (TMA), two compute, 64 query rows each, and share the K and V that arrive;
- the two take turns: while the tensor core multiplies for one, the other has its softmax;
- the weights P go from registers to the tensor core.
A block of rows is too few CTAs' work for most shapes, so runs of tiles are equal here too, whatever rows they cut, and
`_merge_partials` puts the pieces together.

Shapes in comments: `rows` query rows of a warpgroup, `kv` keys of a tile, H head dim.

Sources: Hydragen, section 3.2; LeanAttention, section 4.3, for the schedule; FlashAttention-3, section 3.1, for turns.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.kernels.lean import scaled_logits
from tree_attn.kernels.lean_layout import (
    ROWS,
    TALL_ROWS,
    LeanConfig,
    LeanShape,
    has_whole_rows,
    num_partials,
    partials_of,
    pieces,
    scratch_bytes,
)
from tree_attn.kernels.lean_merge import finish, fold_partials, fold_state
from tree_attn.kernels.lean_walk import Barriers, move_tiles, run_of_cta, visible_slots, walk
from tree_attn.kernels.registers import LOG2_E, LOWEST, full, launch, load, spread, tiling

COMPUTING = TALL_ROWS // ROWS  # warpgroups
MERGED_AT_ONCE = 2  # partials of 64 head dims
# Of the 512 registers a thread could have if there were one warpgroup: what computes needs the accumulators.
COMPUTE_REGISTERS, MOVE_REGISTERS = 240, 24


@functools.partial(jax.jit, static_argnames=("shape", "config", "weights_in_smem"))
def tall_attention(
    query, key, value, *, sequences=None, runs=None, pages=None, scales=None, onto=None, shape: LeanShape,
    config: LeanConfig, weights_in_smem: bool = False,
):  # fmt: skip
    """As `lean_kernel.lean_attention`, for `shape.cols == TALL_ROWS`, a head dim that 64 divides, and one dtype.

    Args:
      query: `[B, T, N, H]`.
      onto: a state over other keys to merge with, as it is returned, or None; not if `has_whole_rows`, for then nothing
        is merged.
      weights_in_smem: the weights take the way through shared memory, which the interpreter knows.
    Returns:
      out like `query`, lse float32 `[rows, cols]`.
    """
    tables = {"sequences": sequences, "runs": runs, "pages": pages, "scales": scales}
    tables = {name: table for name, table in tables.items() if table is not None}
    results = (
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        jax.ShapeDtypeStruct((shape.num_rows, shape.cols), jnp.float32),
    )
    count = num_partials(shape, config)
    partials = (
        jax.ShapeDtypeStruct((count, COMPUTING, ROWS, shape.head_dim), jnp.float32),
        jax.ShapeDtypeStruct((count, COMPUTING, 2, ROWS), jnp.float32),
    )
    is_whole = has_whole_rows(shape, config)
    attended = launch(
        functools.partial(_attend_runs, tuple(tables), shape, config, weights_in_smem),
        out_type=results if is_whole else partials,
        grid=(config.num_ctas,),
        grid_names=("cta",),
        num_threads=COMPUTING + 1,
        thread_name="warpgroup",
        scratch_bytes=scratch_bytes(shape),
        name="tall_attention",
    )(query, key, value, *tables.values())
    if is_whole:
        return attended
    onto_out, onto_lse = onto or (None, None)
    optional = {"sequences": sequences, "onto_out": onto_out, "onto_lse": onto_lse}
    optional = {name: x for name, x in optional.items() if x is not None}
    # What an SM reads of partials is what takes time, so where rows are few each is many CTAs' work.
    ctas = lambda dims: shape.num_rows * COMPUTING * (shape.head_dim // dims)
    dims = next((dims for dims in (64, 32) if ctas(dims) >= config.num_ctas), 16)
    return launch(
        functools.partial(_merge_partials, tuple(optional), dims, shape, config),
        out_type=results,
        grid=(shape.num_rows, COMPUTING, shape.head_dim // dims),
        grid_names=("row", "half", "head_dims"),
        num_threads=1,
        thread_name="warpgroup",
        scratch_bytes=scratch_bytes(shape),
        name="tall_merge",
    )(*attended, *optional.values())


def _attend_runs(
    names, shape: LeanShape, config: LeanConfig, weights_in_smem: bool, query_ref, key_ref, value_ref, *refs
):
    tables, outputs = dict(zip(names, refs)), refs[len(names) :]
    stages = config.num_stages
    smem = functools.partial(plgpu.SMEM, dtype=shape.dtype, transforms=tiling(shape.dtype, shape.head_dim))
    weights = {}
    if weights_in_smem:
        transforms = tiling(shape.dtype, config.block_kv)
        weights["weights_smem"] = smem((COMPUTING, ROWS, config.block_kv), transforms=transforms)
    pl.run_scoped(
        functools.partial(_attend_runs_scoped, tables, shape, config, query_ref, key_ref, value_ref, *outputs),
        query_smem=smem((COMPUTING, ROWS, shape.head_dim)),
        key_smem=smem((stages, config.block_kv, shape.head_dim)),
        value_smem=smem((stages, config.block_kv, shape.head_dim)),
        stats_smem=plgpu.SMEM((COMPUTING, ROWS), jnp.float32),
        query_full=plgpu.Barrier(num_barriers=COMPUTING, num_arrivals=max(1, ROWS // shape.tokens)),
        query_free=plgpu.Barrier(num_barriers=1, num_arrivals=COMPUTING),
        key_full=plgpu.Barrier(num_barriers=stages),
        key_free=plgpu.Barrier(num_barriers=stages, num_arrivals=COMPUTING),
        value_full=plgpu.Barrier(num_barriers=stages),
        value_free=plgpu.Barrier(num_barriers=stages, num_arrivals=COMPUTING),
        turn=plgpu.Barrier(num_arrivals=COMPUTING),
        **weights,
        collective_axes="warpgroup",
    )


def _attend_runs_scoped(
    tables, shape: LeanShape, config: LeanConfig, query_ref, key_ref, value_ref, accs_ref, stats_ref, *,
    query_smem, key_smem, value_smem, stats_smem, query_full, query_free, key_full, key_free, value_full, value_free,
    turn, weights_smem=None,
):  # fmt: skip
    block_kv, stages = config.block_kv, config.num_stages
    warpgroup = lax.axis_index("warpgroup")
    run = run_of_cta(tables, shape, config)
    # The scale joins the subtraction of the maximum in one multiply-add, unless something else is done to logits.
    is_plain = shape.soft_cap is None and "scales" not in tables and shape.scale > 0
    factor = shape.scale * LOG2_E if is_plain else 1.0

    @pl.when(warpgroup == COMPUTING)
    def _move():
        plgpu.set_max_registers(MOVE_REGISTERS, action="decrease")

        def move_query(row, _):
            for i in range(COMPUTING):
                for offset, size, where in pieces(shape, row.index, i * ROWS, ROWS):
                    part = query_smem.at[i, pl.ds(offset, size)]
                    plgpu.copy_gmem_to_smem(query_ref.at[where], part, query_full.at[i])

        barriers = Barriers(query_free, key_full, key_free, value_full, value_free)
        refs, smems = (key_ref, value_ref), (key_smem, value_smem)
        move_tiles(tables, shape, config, run, move_query, 1, refs, smems, barriers)

    @pl.when(warpgroup < COMPUTING)
    def _compute():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        per_row = plgpu.Layout.WGMMA.reduce(1)
        own_query = query_smem.at[warpgroup]

        def take_turn():
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        def segment(row, begin):
            plgpu.barrier_wait(query_full.at[warpgroup])
            # The second is half a tile behind, until the end of the segment: the next query waits for both.
            pl.when(warpgroup == 1)(take_turn)
            first, end = visible_slots(tables, shape, row)
            key_scale, value_scale = (tables["scales"][i, row.head] if "scales" in tables else None for i in range(2))

            def tile_step(i, carry):
                acc, top, total = carry
                tile = begin.tiles_done + i
                slot = lax.rem(tile, stages)
                is_refilled = tile + stages < run.num_tiles  # else nobody waits for it

                plgpu.barrier_wait(key_full.at[slot])

                def products(acc_ref):
                    plgpu.wgmma(acc_ref, own_query, key_smem.at[slot].transpose((1, 0)))
                    take_turn()  # the other's products follow these
                    return acc_ref[...]

                logits = pl.run_scoped(products, plgpu.ACC((ROWS, block_kv), jnp.float32))

                @pl.when(is_refilled)
                def _():
                    plgpu.barrier_arrive(key_free.at[slot])

                if not is_plain:
                    logits = scaled_logits(logits, shape, key_scale)
                if shape.mask != "none":
                    logits = _masked(logits, row.first_slot + (begin.tile + i) * block_kv, first, end)
                new_top = jnp.maximum(top, logits.max(axis=1) * factor)  # [rows]
                decay = jnp.exp2(top - new_top)
                weights = jnp.exp2(logits * factor - spread(new_top, logits.shape, axis=0))
                acc, total = acc * spread(decay, acc.shape, axis=0), total * decay + weights.sum(axis=1)
                weights = weights.astype(shape.dtype)
                acc, total, new_top, weights = lax.optimization_barrier((acc, total, new_top, weights))
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(value_full.at[slot])
                plgpu.barrier_wait(turn)
                acc = _add_product(acc, weights, value_smem.at[slot], weights_smem, warpgroup)

                @pl.when(is_refilled)
                def _():
                    plgpu.barrier_arrive(value_free.at[slot])

                return acc, new_top, total

            empty = (
                full(0.0, (ROWS, shape.head_dim), plgpu.Layout.WGMMA),
                full(LOWEST, (ROWS,), per_row),
                full(0.0, (ROWS,), per_row),
            )
            acc, top, total = lax.fori_loop(0, begin.num_tiles, tile_step, empty)
            pl.when(warpgroup == 0)(take_turn)
            acc = acc if value_scale is None else acc * value_scale
            if has_whole_rows(shape, config):
                finish(acc, top, total, own_query, stats_smem.at[warpgroup], axis=0)
                for offset, size, where in pieces(shape, row.index, warpgroup * ROWS, ROWS):
                    plgpu.copy_smem_to_gmem(own_query.at[pl.ds(offset, size)], accs_ref.at[where])
                rows = pl.ds(pl.multiple_of(warpgroup * ROWS, ROWS), ROWS)
                plgpu.copy_smem_to_gmem(stats_smem.at[warpgroup], stats_ref.at[row.index, rows])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the next query takes its place
            else:
                partial = lax.axis_index("cta") + row.index
                accs_ref[partial, warpgroup] = acc
                stats_ref[partial, warpgroup, 0] = top
                stats_ref[partial, warpgroup, 1] = total

            @begin.if_query_is_awaited(run, num_slots=1)
            def _():
                plgpu.barrier_arrive(query_free.at[0])

        walk(run, tables, shape, segment)
        plgpu.wait_smem_to_gmem(0)


def _masked(logits, first_slot, first, end):
    """-inf where a slot is not visible. Within a row, most tiles are seen whole, and are not looked at."""
    block_kv = logits.shape[1]

    def masked(logits):
        slots = plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=plgpu.Layout.WGMMA) + first_slot
        return jnp.where((slots >= first) & (slots < end), logits, -jnp.inf)

    is_edge = (first_slot < first) | (first_slot + block_kv > end)
    return lax.cond(is_edge, masked, lambda logits: logits, logits)


def _add_product(acc, weights, values, weights_smem, warpgroup):
    """`acc + weights values`, `[rows, H]`."""
    if weights_smem is None:
        return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, weights, values))(plgpu.ACC.init(acc))
    own = weights_smem.at[warpgroup]
    own[...] = weights
    plgpu.commit_smem()

    def product(acc_ref):
        plgpu.wgmma(acc_ref, own, values)
        return acc_ref[...]

    return acc + pl.run_scoped(product, plgpu.ACC(acc.shape, jnp.float32))


def _merge_partials(names, dims: int, shape: LeanShape, config: LeanConfig, accs_ref, stats_ref, *refs):
    """Folds the partials of 64 rows, `dims` head dims of them, in the order of their keys."""
    optional, (out_ref, lse_ref) = dict(zip(names, refs)), refs[len(names) :]
    block_smem = plgpu.SMEM((ROWS, dims), out_ref.dtype, transforms=tiling(out_ref.dtype, dims))

    def scoped(out_smem, lse_smem, onto_smem=None, onto_full=None):
        row, half, block = (lax.axis_index(name) for name in ("row", "half", "head_dims"))
        first, count = partials_of(shape, config, optional.get("sequences"), row)
        head_dims = pl.ds(pl.multiple_of(block * dims, dims), dims)
        rows = pl.ds(pl.multiple_of(half * ROWS, ROWS), ROWS)
        places = list(pieces(shape, row, half * ROWS, ROWS))
        if onto_smem is not None:  # on its way while partials are folded
            for offset, size, where in places:
                part = onto_smem.at[pl.ds(offset, size)]
                plgpu.copy_gmem_to_smem(optional["onto_out"].at[*where, head_dims], part, onto_full)
            onto_lse = load(optional["onto_lse"].at[row, rows], plgpu.Layout.WGMMA.reduce(1))

        def end(state):
            if onto_smem is not None:
                plgpu.barrier_wait(onto_full)
                state = fold_state(state, load(onto_smem, plgpu.Layout.WGMMA), onto_lse, axis=0)
            finish(*state, out_smem, lse_smem, axis=0)
            for offset, size, where in places:
                plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(offset, size)], out_ref.at[*where, head_dims])

            @pl.when(block == 0)
            def _():
                plgpu.copy_smem_to_gmem(lse_smem, lse_ref.at[row, rows])

            plgpu.wait_smem_to_gmem(0)

        partial_of = lambda i: (accs_ref.at[first + i, half, :, head_dims], stats_ref.at[first + i, half])
        fold_partials(count, partial_of, end, (ROWS, dims), at_once=MERGED_AT_ONCE * 64 // dims, axis=0)

    scratch = {"out_smem": block_smem, "lse_smem": plgpu.SMEM((ROWS,), jnp.float32)}
    if "onto_out" in optional:
        scratch |= {"onto_smem": block_smem, "onto_full": plgpu.Barrier(num_arrivals=max(1, ROWS // shape.tokens))}
    pl.run_scoped(scoped, **scratch, collective_axes="warpgroup")
