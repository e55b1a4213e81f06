"""The many-query kernel for Hopper: attention of many query rows over keys that they share, as a common prefix.

It has the schedule of `lean.py` and the other orientation, S = Q K^T and O = P V: queries are the rows of a tensor
core. Sequences that share keys turn the products of a decode step from matrix by vector into matrix by matrix. Reading
K and V then takes little time, and the tensor cores are to be kept busy. Per CTA:
- one warpgroup moves (TMA, or `cp.async` of query rows), two compute, 64 query rows each, and share the K and V that
  arrive;
- the two take turns: while the tensor core multiplies for one, the other has its softmax;
- the weights P go from registers to the tensor core.
Where a block has 64 rows, the CTA has two streams instead: each has a run of its own, one warpgroup that moves and one
that computes. While one waits for its next output tile, the other computes.

Most shapes have fewer blocks of query rows than there are CTAs. So runs of KV tiles are equal here too, whatever output
tiles they cut, and `tall_merge.py` merges the partial states. Output tiles that a run holds whole are written at once,
where there are registers for that (`writes_uncut`).

A few queries of a large group are rows too (`lean_layout.is_few_query_rows`). Each then has a range of keys of its own.
The kernel looks at it only in KV tiles that some row does not see whole.

Shapes in comments: `rows` query rows of a warpgroup, `kv` keys of a KV tile, H head dim.

Sources: Hydragen, section 3.2; LeanAttention, section 4.3, for the schedule; FlashAttention-3, section 3.1, for turns.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.kernels.interpreter import is_interpreted
from tree_attn.kernels.kv_parts import has_broken_group
from tree_attn.kernels.lean_garbage import zero_garbage
from tree_attn.kernels.lean_layout import (
    MANY_QUERY_ROWS,
    ROWS,
    LeanConfig,
    LeanShape,
    has_whole_output_tiles,
    num_partials,
    partial_of,
)
from tree_attn.kernels.lean_merge import finish_rows, finished
from tree_attn.kernels.lean_moves import Barriers, move_tiles, num_arrivals
from tree_attn.kernels.lean_walk import run_of_cta, shared_slots, span_of_keys, tile_slots, visible_slots, walk
from tree_attn.kernels.overlap import await_previous_kernel
from tree_attn.kernels.plain_copies import copy_rows, store_rows
from tree_attn.kernels.query_layout import QUERY_MULTIPLE, is_by_rows, num_halves, query_slices
from tree_attn.kernels.registers import LOG2_E, LOWEST, WRITES_IN_PLACE, full, launch, scaled_logits, spread, tiling
from tree_attn.kernels.tall_merge import merge_cut, merge_partials

COMPUTING = MANY_QUERY_ROWS // ROWS  # warpgroups
PART_ROWS = 16  # that threads copy at once; no block has fewer rows of a head


def registers_of(shape: LeanShape, has_rows: bool) -> tuple[int, int]:
    """Returns the registers per thread of a warpgroup that computes, and of one that moves.

    Of 504 for three, or 512 for four, those that compute need most, for accumulators. To copy KV tiles in parts, from
    pages for few queries, or queries row by row, takes more.
    """
    if shape.streams > 1:
        return 200, 56
    is_paged = shape.page_size is not None and (shape.is_gathered or shape.mask == "columns")
    if not (has_broken_group(shape) or has_rows or is_paged):
        return 240, 24
    return (224, 56) if shape.head_dim <= 128 else (232, 40)


@functools.partial(jax.jit, static_argnames=("shape", "config"))
def tall_attention(
    query, key, value, *, sequences=None, runs=None, columns=None, pages=None, scales=None, merge_with=None,
    shape: LeanShape, config: LeanConfig,
):  # fmt: skip
    """Computes `lean.lean_attention` for `shape.is_many_query`, a head dim that 64 divides, and one dtype.

    Args:
      query: `[B, T, N, H]`.
      sequences, runs, columns, pages, scales, merge_with: as in `lean.lean_attention`.
    Returns:
      out like `query`, lse float32 `[output tiles, cols]`.
    """
    tables = {"sequences": sequences, "runs": runs, "columns": columns, "pages": pages, "scales": scales}
    results = (
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        jax.ShapeDtypeStruct((shape.num_output_tiles, shape.cols), jnp.float32),
    )
    partials = _partials(shape, config)
    if has_whole_output_tiles(shape, config):
        return _launch_runs(query, key, value, tables, shape, config, results)
    if merge_with is None and writes_uncut(shape, query.shape[1]):
        attended = _launch_runs(query, key, value, tables, shape, config, (*results, *partials))
        return merge_cut(attended[2:], attended[:2], sequences, runs, shape, config)
    attended = _launch_runs(query, key, value, tables, shape, config, partials)
    return merge_partials(attended, results, sequences, merge_with, shape, config)


@functools.partial(jax.jit, static_argnames=("shape", "config"))
def tall_partials(query, key, value, *, shape: LeanShape, config: LeanConfig, **tables):
    """Computes the partial states of all output tiles, which no kernel here merges; arguments of `tall_attention`.

    Returns:
      float32 `[partial states, halves, 64, H]`, sums of values weighted by `2^(x - max)`, x logits in base 2; and
      `[partial states, halves, 2, 64]`, max and the sum of those weights. `lean_layout.partials_of` says which are an
      output tile's. Where half a block has no queries it has none.
    """
    return _launch_runs(query, key, value, tables, shape, config, _partials(shape, config))


def _partials(shape: LeanShape, config: LeanConfig):
    """Returns the shapes and dtypes of what `tall_partials` returns."""
    count, halves = num_partials(shape, config), shape.cols // ROWS
    accs = jax.ShapeDtypeStruct((count, halves, ROWS, shape.head_dim), jnp.float32)
    return accs, jax.ShapeDtypeStruct((count, halves, 2, ROWS), jnp.float32)


def _launch_runs(query, key, value, tables, shape: LeanShape, config: LeanConfig, outputs):
    """Launches the first kernel.

    Args:
      tables: by name; None where there is none.
      outputs: shapes and dtypes of what it writes: out and lse, of all output tiles or of uncut ones; then accs and
        stats, if it leaves partial states.
    """
    tables = {name: table for name, table in tables.items() if table is not None}
    return launch(
        functools.partial(_attend_runs, tuple(tables), shape, config),
        out_type=outputs,
        grid=(pl.cdiv(config.num_ctas, shape.streams),),
        grid_names=("cta",),
        num_threads=COMPUTING + shape.streams,
        thread_name="warpgroup",
        name="tall_attention" if shape.streams == 1 else "tall_streams",
    )(query, key, value, *tables.values())


def writes_uncut(shape: LeanShape, num_queries: int) -> bool:
    """Returns whether the first kernel writes the results of output tiles that its runs hold whole.

    It leaves partial states of the others beside them. TMA writes results if 8 divides `num_queries`. Threads write
    those of few queries. Larger heads, and blocks of more of them, take registers.
    """
    is_able = shape.head_dim <= 128 and jax.__version_info__ >= WRITES_IN_PLACE
    if shape.group is not None:
        return is_able
    is_able &= num_queries % QUERY_MULTIPLE == 0 and shape.cols // shape.tokens <= 4
    return is_able and not shape.is_gathered  # with many masks it spills a register


def run_number(cta, stream, shape: LeanShape, config: LeanConfig):
    """Returns the number of a stream's run; from `config.num_ctas` on there is none. The first runs have a CTA each."""
    return cta + stream * pl.cdiv(config.num_ctas, shape.streams)


def _attend_runs(names, shape: LeanShape, config: LeanConfig, query_ref, key_ref, value_ref, *refs):
    tables, outputs = dict(zip(names, refs)), refs[len(names) :]
    stages, halves, queries = shape.streams * config.num_stages, shape.cols // ROWS, shape.streams * shape.query_places
    kv_arrivals = num_arrivals(shape, config)
    smem = functools.partial(plgpu.SMEM, dtype=shape.dtype, transforms=tiling(shape.dtype, shape.head_dim))
    query_arrivals = ROWS // PART_ROWS if is_by_rows(shape, query_ref) else max(1, ROWS // shape.tokens)
    weights = {}
    if is_interpreted():
        transforms = tiling(shape.dtype, config.block_kv)
        weights["weights_smem"] = smem((COMPUTING, ROWS, config.block_kv), transforms=transforms)
    pl.run_scoped(
        functools.partial(_attend_runs_scoped, tables, shape, config, query_ref, key_ref, value_ref, *outputs),
        query_smem=smem((queries * halves, ROWS, shape.head_dim)),
        key_smem=smem((stages, config.block_kv, shape.head_dim)),
        value_smem=smem((stages, config.block_kv, shape.head_dim)),
        stats_smem=plgpu.SMEM((COMPUTING, ROWS), jnp.float32),
        query_full=plgpu.Barrier(num_barriers=queries * halves, num_arrivals=query_arrivals),
        query_free=plgpu.Barrier(num_barriers=queries, num_arrivals=halves),
        key_full=plgpu.Barrier(num_barriers=stages, num_arrivals=kv_arrivals),
        key_free=plgpu.Barrier(num_barriers=stages, num_arrivals=halves),
        value_full=plgpu.Barrier(num_barriers=stages, num_arrivals=kv_arrivals),
        value_free=plgpu.Barrier(num_barriers=stages, num_arrivals=halves),
        turn=plgpu.Barrier(num_arrivals=COMPUTING),
        **weights,
        collective_axes="warpgroup",
    )


def _attend_runs_scoped(
    tables, shape: LeanShape, config: LeanConfig, query_ref, key_ref, value_ref, *outputs,
    query_smem, key_smem, value_smem, stats_smem, query_full, query_free, key_full, key_free, value_full, value_free,
    turn, weights_smem=None,
):  # fmt: skip
    block_kv, stages, halves, places = config.block_kv, config.num_stages, shape.cols // ROWS, shape.query_places
    warpgroup, cta = lax.axis_index("warpgroup"), lax.axis_index("cta")
    stream, half = 0, warpgroup  # the half only where it computes
    if shape.streams > 1:
        stream, half = jnp.where(warpgroup < COMPUTING, warpgroup, warpgroup - COMPUTING), 0
        cta = run_number(cta, stream, shape, config)
    has_rows, transforms = is_by_rows(shape, query_ref), tiling(shape.dtype, shape.head_dim)
    computing, moving = registers_of(shape, has_rows)
    # The merge does not begin early: its CTAs would crowd on the few SMs that this kernel leaves registers on.
    await_previous_kernel()
    run = run_of_cta(tables, shape, config, jnp.minimum(cta, config.num_ctas - 1))
    if config.num_ctas % shape.streams:  # the last stream has no run
        run = dataclasses.replace(run, num_kv_tiles=jnp.where(cta < config.num_ctas, run.num_kv_tiles, 0))
    # The scale joins the subtraction of the maximum in one multiply-add, unless something else is done to logits.
    is_plain = shape.logits_soft_cap is None and "scales" not in tables and shape.scale > 0
    factor = shape.scale * LOG2_E if is_plain else 1.0

    @pl.when(warpgroup >= COMPUTING)
    def _move():
        plgpu.set_max_registers(moving, action="decrease")

        def move_query(output_tile, place):
            if has_rows:  # in a loop, for addresses of many copies at once take registers that are not there
                lax.fori_loop(0, shape.cols // PART_ROWS, functools.partial(copy_part, output_tile, place), None)
                return
            for i in range(halves):
                for offset, size, where in query_slices(shape, output_tile.index, i * ROWS, ROWS):
                    part = query_smem.at[place * halves + i, pl.ds(offset, size)]
                    plgpu.copy_gmem_to_smem(query_ref.at[where], part, query_full.at[place * halves + i])

        def copy_part(output_tile, place, n, _):
            ((_, _, (sequence, rows, head)),) = query_slices(shape, output_tile.index, n * PART_ROWS, PART_ROWS)
            i, first = lax.div(n, ROWS // PART_ROWS) + place * halves, lax.rem(n, ROWS // PART_ROWS) * PART_ROWS
            part = query_smem.at[i, pl.ds(pl.multiple_of(first, PART_ROWS), PART_ROWS)]
            seen = 0, query_ref.shape[1] * (shape.group or 1)
            options = {"block": sequence, "head": head * (shape.group or 1), "group": shape.group}
            copy_rows(query_ref, part, transforms, query_full, i, rows.start, seen, **options)

        barriers = Barriers(query_free, key_full, key_free, value_full, value_free)
        refs, smems = (key_ref, value_ref), (key_smem, value_smem)
        move_tiles(tables, shape, config, run, move_query, places, refs, smems, barriers, stream)

    @pl.when(warpgroup < COMPUTING)
    def _compute():
        plgpu.set_max_registers(computing, action="increase")
        per_row = plgpu.Layout.WGMMA.reduce(1)

        def take_turn():
            give_turn()
            await_turn()

        def give_turn():
            if halves > 1:
                plgpu.barrier_arrive(turn)

        def await_turn():
            if halves > 1:
                plgpu.barrier_wait(turn)

        def attend_segment(output_tile, segment):
            place = segment.query_place(places) + stream * places
            own_query = query_smem.at[place * halves + half]
            plgpu.barrier_wait(query_full.at[place * halves + half])
            if has_rows:
                plgpu.commit_smem()  # tensor cores read through another proxy than threads copy
            # The second warpgroup is half a KV tile behind until the segment ends.
            pl.when(half == 1)(take_turn)
            first, end = visible = visible_slots(tables, shape, output_tile, half * ROWS, ROWS, per_row)
            shared_first, shared_end = shared_slots(tables, shape, output_tile) or visible
            span = span_of_keys(tables, output_tile)
            head_scales = (
                [tables["scales"][i, output_tile.head] for i in range(2)] if "scales" in tables else (None, None)
            )
            key_scale, value_scale = head_scales

            def kv_tile_step(i, carry):
                acc, top, total = carry
                kv_tile = segment.kv_tiles_done + i
                stage = lax.rem(kv_tile, stages) + stream * stages
                is_refilled = kv_tile + stages < run.num_kv_tiles  # else no warpgroup waits for it

                plgpu.barrier_wait(key_full.at[stage])

                def products(acc_ref):
                    plgpu.wgmma(acc_ref, own_query, key_smem.at[stage].transpose((1, 0)))
                    take_turn()  # the other warpgroup's products follow these
                    return acc_ref[...]

                logits = pl.run_scoped(products, plgpu.ACC((ROWS, block_kv), jnp.float32))

                @pl.when(is_refilled)
                def _():
                    plgpu.barrier_arrive(key_free.at[stage])

                if not is_plain:
                    logits = scaled_logits(logits, shape.scale, shape.logits_soft_cap, key_scale)
                first_slot, own_slot = tile_slots(shape, config, output_tile, segment.kv_tile + i)
                if shape.mask != "none":
                    of_own = lambda first: first if own_slot is first_slot else jnp.maximum(first, own_slot)
                    is_edge = (first_slot < of_own(shared_first)) | (first_slot + block_kv > shared_end)
                    logits = _masked(logits, first_slot, of_own(first), end, is_edge)
                new_top = jnp.maximum(top, logits.max(axis=1) * factor)  # [rows]
                decay = jnp.exp2(top - new_top)
                weights = jnp.exp2(logits * factor - spread(new_top, logits.shape, axis=0))
                acc, total = acc * spread(decay, acc.shape, axis=0), total * decay + weights.sum(axis=1)
                weights = weights.astype(shape.dtype)
                acc, total, new_top, weights = lax.optimization_barrier((acc, total, new_top, weights))
                give_turn()
                plgpu.barrier_wait(value_full.at[stage])
                await_turn()

                @pl.when(half == 0)
                def _():  # its product is the first with them: the other warpgroup's turn comes after
                    zero_garbage(value_smem.at[stage], transforms, span, first_slot, shape)

                acc = _add_product(acc, weights, value_smem.at[stage], weights_smem, warpgroup)

                @pl.when(is_refilled)
                def _():
                    plgpu.barrier_arrive(value_free.at[stage])

                return acc, new_top, total

            empty = (
                full(0.0, (ROWS, shape.head_dim), plgpu.Layout.WGMMA),
                full(LOWEST, (ROWS,), per_row),
                full(0.0, (ROWS,), per_row),
            )
            acc, top, total = lax.fori_loop(0, segment.num_kv_tiles, kv_tile_step, empty)
            pl.when(half == 0)(take_turn)
            acc = acc if value_scale is None else acc * value_scale

            place_of = output_tile.index, half
            own_smem = own_query, stats_smem.at[warpgroup]
            write = functools.partial(_write_results, shape, outputs[:2], place_of, own_smem, (acc, top, total))

            def leave():
                partial = partial_of(shape, config, cta, output_tile.index)
                pl.when(half < num_halves(shape, query_ref))(
                    functools.partial(_leave_partials, outputs[-2:], (partial, half), (acc, top, total))
                )

            if len(outputs) == 2:
                lse_or_stats = outputs[1]
                (write if lse_or_stats.ndim == 2 else leave)()
            else:
                is_uncut = segment.num_kv_tiles == output_tile.num_kv_tiles
                pl.when(is_uncut)(write)
                pl.when(~is_uncut)(leave)

            @pl.when(segment.is_query_awaited(run, num_places=places))
            def _():
                plgpu.barrier_arrive(query_free.at[place])

        walk(run, tables, shape, config, attend_segment)
        plgpu.wait_smem_to_gmem(0)


def _write_results(shape: LeanShape, results, where, smem, state) -> None:
    """Writes the results of half an output tile: by TMA from the query's place, or rows of few queries by threads.

    Args:
      results: references of out and lse.
      where: the output tile's number, and which half.
      smem: places of the half's query, and of its lse.
      state: acc, max and sum of the half's rows, in registers.
    """
    (out_ref, lse_ref), (output_tile, half), (query_smem, lse_smem) = results, where, smem
    slices = query_slices(shape, output_tile, half * ROWS, ROWS)
    if shape.group is None:
        finish_rows(*state, query_smem, lse_smem)
        for offset, size, index in slices:
            plgpu.copy_smem_to_gmem(query_smem.at[pl.ds(offset, size)], out_ref.at[index])
    else:
        out, lse_smem[...] = finished(*state, axis=0)
        ((_, size, (sequence, rows, head)),) = slices
        begin = sequence, rows.start, head * shape.group, size
        store_rows(out_ref, out, begin, first_dim=0, group=shape.group)
        plgpu.commit_smem()
    first_row = pl.multiple_of(half * ROWS, ROWS) if shape.streams == 1 else 0
    plgpu.copy_smem_to_gmem(lse_smem, lse_ref.at[output_tile, pl.ds(first_row, ROWS)])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the next query takes its place


def _leave_partials(partials, where, state) -> None:
    """Writes the partial state of half an output tile; `where` is its number, and which half."""
    (accs_ref, stats_ref), (acc, top, total) = partials, state
    accs_ref[*where] = acc
    stats_ref[*where, 0] = top
    stats_ref[*where, 1] = total


def _masked(logits, first_slot, first, end, is_edge):
    """Returns -inf where a slot is not visible. Most KV tiles are visible whole, and are returned as they are.

    Args:
      first, end: of the visible slots: scalars, or `[rows]`.
      is_edge: whether a row does not see all of the KV tile.
    """

    def masked(logits):
        slots = plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=plgpu.Layout.WGMMA) + first_slot
        of_rows = (spread(x, logits.shape, axis=0) if jnp.ndim(x) else x for x in (first, end))
        first_of_row, end_of_row = of_rows
        return jnp.where((slots >= first_of_row) & (slots < end_of_row), logits, -jnp.inf)

    return lax.cond(is_edge, masked, lambda logits: logits, logits)


def _add_product(acc, weights, values, weights_smem, warpgroup):
    """Returns `acc + weights values`, `[rows, H]`."""
    if weights_smem is None:
        return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, weights, values))(plgpu.ACC.init(acc))
    own_weights = weights_smem.at[warpgroup]
    own_weights[...] = weights
    plgpu.commit_smem()

    def product(acc_ref):
        plgpu.wgmma(acc_ref, own_weights, values)
        return acc_ref[...]

    return acc + pl.run_scoped(product, plgpu.ACC(acc.shape, jnp.float32))
