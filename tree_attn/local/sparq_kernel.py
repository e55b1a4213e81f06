"""SparQ's two gathers on Hopper: a few components of every key, then a few keys and values whole.

`select_keys` is step 1 of Algorithm 1. A CTA serves one choice of keys: it streams the r components of all keys that
its query is largest in, one TMA copy each, into logits that stay in registers; then it finds the k-th largest by
bisection over the order of floats, and lists the keys that are kept and what they weigh. No score reaches memory.
`attend_kept` is step 2: it copies the listed keys and values, row by row, and attends.

Shapes in comments: W = S / 64 rows of 64 keys, k keys kept, H head dim.

Source: SparQ Attention, Algorithm 1 and section 5.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, scf

from tree_attn.local.lean_kernel import LOG2_E, LOWEST, SMEM_BYTES_PER_SM, full, launch, load, tiling
from tree_attn.ptx import asm

COLUMNS = 64  # keys of a row of registers, 128 bytes: TMA is slower with shorter rows
TILE = 64  # kept keys that are attended to at a time
PADDING = 8  # elements between rows in shared memory, so that rows begin in different banks
STAGES = 3  # tiles of keys and of values on their way per CTA
WARPS = 4
LEAST_RANK, MOST_RANK = -0x7F800000, 0x7F800000  # of the least finite float32, and of infinity


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparqShape:
    """The static part of a call; of each query head its own KV head.

    rows:  choices of keys: B x T x K, in that order
    """

    batch: int
    num_queries: int
    num_kv_heads: int
    head_dim: int
    num_slots: int
    num_components: int
    num_keys: int
    scale: float
    dtype: Any
    num_sms: int
    num_stages: int = 6

    @property
    def rows(self) -> int:
        return self.batch * self.num_queries * self.num_kv_heads

    @property
    def score_rows(self) -> int:
        """W, padded to what a warpgroup holds at a time; keys beyond S are not visible."""
        return pl.cdiv(self.num_slots, 64 * COLUMNS) * 64

    @property
    def list_size(self) -> int:
        """Room for k slots, in the 16 bytes that TMA moves."""
        return pl.cdiv(self.num_keys, 4) * 4

    def sequence_and_head(self, row):
        return lax.div(row, self.num_queries * self.num_kv_heads), lax.rem(row, self.num_kv_heads)


def select_keys(key_by_component, components, weights, ends, *, shape: SparqShape, interpret: bool = False):
    """Which keys each row keeps, and what they weigh in the approximate scores.

    Args:
      key_by_component: `[B, K, H, S]`, S a multiple of 512.
      components: int32 `[rows, r]`, which components of the keys are read; r a multiple of 4.
      weights: float32 `[rows, r]`, what they are multiplied by: query, scale, temperature, and log2(e).
      ends: int32 `[rows, 4]`: end of the visible slots, first of those that are kept whatever they score; two unused.
      interpret: list by other means, which the interpreter knows.
    Returns:
      slots int32 `[rows, list_size]`, in no order, of which the first min(k, visible) mean something; lse of all and of
      what is kept, float32 `[rows, 2]`.
    """
    keys = key_by_component.reshape(*key_by_component.shape[:3], -1, COLUMNS)
    return launch(
        functools.partial(_select, shape, interpret),
        out_type=(
            jax.ShapeDtypeStruct((shape.rows, shape.list_size), jnp.int32),
            jax.ShapeDtypeStruct((shape.rows, 2), jnp.float32),
        ),
        grid=(_num_ctas(shape, shape.num_stages * shape.score_rows * COLUMNS * 2, at_most=3),),
        grid_names=("cta",),
        num_threads=1,
        thread_name="warpgroup",
        scratch_bytes=4096,
        name="sparq_select",
    )(keys, components, weights, ends)


def _num_ctas(shape: SparqShape, smem_bytes: int, at_most: int) -> int:
    """As many as run at once, `at_most` per SM for what registers hold; each takes every so many-th row."""
    return min(shape.rows, shape.num_sms * max(1, min(at_most, SMEM_BYTES_PER_SM // (smem_bytes + 4096))))


def _select(shape: SparqShape, interpret: bool, *refs):
    stages, count = shape.num_stages, shape.num_components
    pl.run_scoped(
        functools.partial(_select_scoped, shape, interpret, *refs),
        keys_smem=plgpu.SMEM((stages, shape.score_rows, COLUMNS), shape.dtype, transforms=tiling(shape.dtype, COLUMNS)),
        # A TMA copy begins at a multiple of 128 bytes.
        components_smem=plgpu.SMEM((2, pl.cdiv(count, 32) * 32), jnp.int32),
        weights_smem=plgpu.SMEM((2, pl.cdiv(count, 32) * 32), jnp.float32),
        ends_smem=plgpu.SMEM((2, 32), jnp.int32),
        count_smem=plgpu.SMEM((COLUMNS,), jnp.int32),
        weight_smem=plgpu.SMEM((COLUMNS,), jnp.float32),
        given=plgpu.Barrier(num_arrivals=3, num_barriers=2),
        filled=plgpu.Barrier(num_barriers=stages),
        collective_axes="warpgroup",
    )


def _select_scoped(
    shape: SparqShape, interpret: bool, keys_ref, components_ref, weights_ref, ends_ref, slots_ref, stats_ref, *,
    keys_smem, components_smem, weights_smem, ends_smem, count_smem, weight_smem, given, filled,
):  # fmt: skip
    cta, num_ctas = lax.axis_index("cta"), lax.axis_size("cta")
    count, stages, layout = shape.num_components, shape.num_stages, plgpu.Layout.WGMMA
    own_rows = lax.div(shape.rows - cta + num_ctas - 1, num_ctas)

    def ask(i):
        """What is to be known of this CTA's i-th row, into one of two places."""
        row, parity = cta + i * num_ctas, lax.rem(i, 2)
        refs = ((components_ref, components_smem), (weights_ref, weights_smem), (ends_ref, ends_smem))
        for ref, smem in refs:
            plgpu.copy_gmem_to_smem(ref.at[row], smem.at[parity, pl.ds(0, ref.shape[1])], given.at[parity])

    def move(i, n):
        """The n-th component of the i-th row."""
        row, slot = cta + i * num_ctas, lax.rem(i * count + n, stages)
        sequence, head = shape.sequence_and_head(row)
        # Keys beyond S are filled with zeros.
        source = keys_ref.at[sequence, head, components_smem[lax.rem(i, 2), n], pl.ds(row * 0, shape.score_rows)]
        plgpu.copy_gmem_to_smem(source, keys_smem.at[slot], filled.at[slot])

    def move_first(i):
        lax.fori_loop(0, min(stages, count), lambda n, _: move(i, n), None)

    ask(jnp.int32(0))
    plgpu.barrier_wait(given.at[0])
    move_first(jnp.int32(0))

    def row_step(i, _):
        row, parity, is_last = cta + i * num_ctas, lax.rem(i, 2), i + 1 == own_rows
        plgpu.commit_smem()  # all have read what they had to know of the last row
        pl.when(~is_last)(lambda: ask(i + 1))

        def add_component(n, logits):
            slot = lax.rem(i * count + n, stages)
            plgpu.barrier_wait(filled.at[slot])
            component = load(keys_smem.at[slot], layout).astype(jnp.float32)
            plgpu.commit_smem()  # all have read it
            pl.when(n + stages < count)(lambda: move(i, n + stages))
            return logits + component * weights_smem[parity, n]

        logits = lax.fori_loop(0, count, add_component, full(0.0, (shape.score_rows, COLUMNS), layout))

        @pl.when(~is_last)
        def _():  # the next row's components are on their way while this one's keys are chosen
            plgpu.barrier_wait(given.at[1 - parity])
            move_first(i + 1)

        _choose(
            shape,
            interpret,
            logits,
            ends_smem.at[parity],
            slots_ref.at[row],
            stats_ref.at[row],
            count_smem,
            weight_smem,
        )

    lax.fori_loop(0, own_rows, row_step, None)


def _choose(
    shape: SparqShape, interpret: bool, logits, ends_ref, slots_ref, stats_ref, count_smem, weight_smem
) -> None:
    """Lists the keys of one row that are kept, and writes what they weigh."""
    rows, layout = shape.score_rows, plgpu.Layout.WGMMA
    iota = functools.partial(plgpu.broadcasted_iota, jnp.int32, (rows, COLUMNS), layout=layout)
    slots = iota(0) * COLUMNS + iota(1)
    end, recent = ends_ref[0], ends_ref[1]
    is_visible = slots < end
    is_recent = is_visible & (slots >= recent)
    scalar = lambda x, operation, smem: _scalar(x, operation, layout, smem, interpret)
    top = scalar(jnp.where(is_visible, logits, LOWEST), "max", weight_smem)
    weight_of = lambda chosen, x: scalar(jnp.where(chosen, jnp.exp2(x - top), 0.0), "add", weight_smem)
    total, kept = weight_of(is_visible, logits), weight_of(is_recent, logits)
    # The order of logits is that of their shares. One array for all: registers are what limits CTAs here.
    scores = jnp.where(is_visible, jnp.where(is_recent, jnp.inf, logits), -jnp.inf)
    count_of = lambda chosen: scalar(jnp.where(chosen, 1, 0), "add", count_smem)
    is_kept = _first_largest(scores, slots, shape.num_keys, count_of)
    kept = kept + weight_of(is_kept & (scores < jnp.inf), scores)
    for i, weight in enumerate((total, kept)):
        stats_ref[i] = jnp.where(weight > 0, (top + jnp.log2(weight)) * (1 / LOG2_E), -jnp.inf)
    if interpret:
        found = jnp.nonzero(is_kept.ravel(), size=shape.list_size, fill_value=0)[0]
        slots_ref[...] = found.astype(jnp.int32)
    else:
        _list(jnp.where(is_kept, 1, 0), slots_ref, count_smem)


def _scalar(x, operation: str, layout, smem, interpret: bool):
    """The "add" or "max" of all of `x`: Pallas reduces a matrix along one axis only, and to a vector."""
    if interpret:
        return jnp.sum(x) if operation == "add" else jnp.max(x)
    result = plgpu.ShapeDtypeStruct((), x.dtype, layout=plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()), return_type=result)
    def emit(_, x, smem):
        return x.reduce(operation, tuple(range(len(x.shape))), smem)

    return emit(x, smem)


def _first_largest(scores, slots, num_keys: int, count):
    """Whether each is one of the `num_keys` largest; of equals the earliest, and none that is -inf."""
    num_slots = scores.shape[0] * COLUMNS

    def halve(state):
        least, most, found = state
        middle = (least | most) - ((least ^ most) >> 1)  # rounded up, and without an overflow
        now = count(scores >= _float_of_rank(middle, scores.shape))
        is_enough, is_exact = now >= num_keys, now == num_keys
        most = jnp.where(is_enough, jnp.where(is_exact, middle, most), middle - 1)
        return jnp.where(is_enough, middle, least), most, jnp.where(is_enough, now, found)

    is_open = lambda state: state[0] < state[1]
    # The largest score that as many reach as are wanted, or the least finite one where fewer are visible.
    rank, _, found = lax.while_loop(is_open, halve, (jnp.int32(LEAST_RANK), jnp.int32(MOST_RANK), jnp.int32(0)))
    threshold = _float_of_rank(rank, scores.shape)
    above = count(scores > threshold)

    def halve_slots(state):
        least, most = state
        middle = (least + most) >> 1
        is_enough = above + count((scores == threshold) & (slots < middle)) >= num_keys
        return jnp.where(is_enough, least, middle + 1), jnp.where(is_enough, middle, most)

    # Only where equals at the threshold are too many is there a last slot to find.
    first = jnp.where(found > num_keys, jnp.int32(0), jnp.int32(num_slots))
    last, _ = lax.while_loop(is_open, halve_slots, (first, jnp.int32(num_slots)))
    return (scores > threshold) | ((scores == threshold) & (slots < last))


def _float_of_rank(rank, shape):
    """float32 `shape` from its place among all: int32 in the same order."""
    bits = jnp.broadcast_to(jnp.where(rank < 0, rank ^ 0x7FFFFFFF, rank), shape)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _list(is_kept, slots_ref, smem) -> None:
    """Writes the slots where int32 `is_kept [W, 64]` is 1, one after another: a prefix sum over threads places them.

    Pallas has no scatter, so this is written in MLIR, for each thread and the registers that it holds.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), plgpu.RefType()))
    def emit(_, is_kept, slots_ref, smem):
        i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
        constant = lambda x: arith.constant(i32, x)
        as_index = lambda x: arith.index_cast(index, x)
        thread = arith.remui(utils.thread_idx(), constant(32 * WARPS))
        lane, warp = arith.remui(thread, constant(32)), arith.divui(thread, constant(32))
        own = []
        is_kept.foreach(lambda x, _: own.append(x))
        own_count = functools.reduce(arith.addi, own)
        through = own_count  # of this lane and those before it
        for distance in (1, 2, 4, 8, 16):
            below = asm("shfl.sync.up.b32 $0, $1, $2, 0, -1;", i32, through, constant(distance))
            is_there = arith.cmpi(arith.CmpIPredicate.uge, lane, constant(distance))
            through = arith.addi(through, arith.select(is_there, below, constant(0)))
        is_last = arith.cmpi(arith.CmpIPredicate.eq, lane, constant(31))
        with ir.InsertionPoint(scf.IfOp(is_last).then_block):
            memref.store(through, smem, [as_index(warp)])
            scf.yield_([])
        utils.warpgroup_barrier()
        place = arith.subi(through, own_count)
        for other in range(WARPS - 1):
            is_before = arith.cmpi(arith.CmpIPredicate.ugt, warp, constant(other))
            before = memref.load(smem, [arith.constant(index, other)])
            place = arith.addi(place, arith.select(is_before, before, constant(0)))

        def write(x, position):
            nonlocal place
            slot = arith.addi(
                arith.muli(arith.index_cast(i32, position[0]), constant(COLUMNS)), arith.index_cast(i32, position[1])
            )
            with ir.InsertionPoint(scf.IfOp(arith.cmpi(arith.CmpIPredicate.ne, x, constant(0))).then_block):
                memref.store(slot, slots_ref, [as_index(place)])
                scf.yield_([])
            place = arith.addi(place, x)

        is_kept.foreach(write)

    emit(is_kept, slots_ref, smem)


def attend_kept(query, key, value, slots, counts, *, shape: SparqShape, interpret: bool = False):
    """Attention of each row's query over the keys that it keeps.

    Args:
      query: `[rows, H]`; key, value: `[B, S, K, H]`.
      slots: as `select_keys` gives them.
      counts: int32 `[rows]`, how many of them there are.
      interpret: copy by other means, which the interpreter knows.
    Returns:
      out `[rows, H]` in the dtype of `query`, lse float32 `[rows]`.
    """
    results = jax.ShapeDtypeStruct(query.shape, query.dtype), jax.ShapeDtypeStruct(query.shape[:1], jnp.float32)
    query = query.astype(jnp.float32) * (shape.scale * LOG2_E)
    return launch(
        functools.partial(_attend, shape, interpret),
        out_type=results,
        grid=(_num_ctas(shape, STAGES * 2 * TILE * (shape.head_dim + PADDING) * 2, at_most=2),),
        grid_names=("cta",),
        num_threads=1,
        thread_name="warpgroup",
        scratch_bytes=4096,
        name="sparq_attend",
    )(query, key, value, slots, counts)


def _attend(shape: SparqShape, interpret: bool, *refs):
    rows = plgpu.SMEM((STAGES, TILE, shape.head_dim + PADDING), shape.dtype)
    pl.run_scoped(
        functools.partial(_attend_scoped, shape, interpret, *refs),
        key_smem=rows,
        value_smem=rows,
        out_smem=plgpu.SMEM((shape.head_dim,), shape.dtype),
        scalar_smem=plgpu.SMEM((COLUMNS,), jnp.float32),
        collective_axes="warpgroup",
    )


def _attend_scoped(
    shape: SparqShape, interpret: bool, query_ref, key_ref, value_ref, slots_ref, counts_ref, out_ref, lse_ref, *,
    key_smem, value_smem, out_smem, scalar_smem,
):  # fmt: skip
    cta, num_ctas = lax.axis_index("cta"), lax.axis_size("cta")
    tile_shape, tiles = (TILE, shape.head_dim), pl.cdiv(shape.num_keys, TILE)
    own_rows = lax.div(shape.rows - cta + num_ctas - 1, num_ctas)
    layout, copy = plgpu.Layout.WGMMA, _interpreted_copy if interpret else _copy_rows

    def move(step):
        """The tile of a step, across rows: two groups of copies, keys and values; past the end they are empty."""
        row, tile, stage = cta + lax.div(step, tiles) * num_ctas, lax.rem(step, tiles), lax.rem(step, STAGES)
        sequence, head = shape.sequence_and_head(row)
        for ref, smem in ((key_ref, key_smem), (value_ref, value_smem)):

            @pl.when(step < own_rows * tiles)
            def _(ref=ref, smem=smem):
                copy(ref.at[sequence, :, head], smem.at[stage], slots_ref.at[row], tile * TILE, counts_ref[row])

            _end_group(interpret)

    by_row, by_dim = layout.reduce(1), layout.reduce(0)
    spread = lambda x, axis: lax.broadcast_in_dim(x, tile_shape, [axis])
    place = plgpu.broadcasted_iota(jnp.int32, tile_shape, 0, layout=layout).max(axis=1)
    rows_of = lambda smem: load(smem, layout)[:, : shape.head_dim].astype(jnp.float32)
    scalar = lambda x, operation: _scalar(x, operation, by_row, scalar_smem, interpret)
    for step in range(STAGES):
        move(jnp.int32(step))

    def row_step(i, _):
        row = cta + i * num_ctas
        count, query = counts_ref[row], spread(load(query_ref.at[row], by_dim), 1)

        def tile_step(tile, state):
            """Each place of a tile has a softmax of its own, `top [64]`, and they meet at the end only."""
            acc, top, total = state
            step = i * tiles + tile
            stage = lax.rem(step, STAGES)
            _await_copies(2 * STAGES - 1, interpret)
            logits = (rows_of(key_smem.at[stage]) * query).sum(axis=1)
            logits = jnp.where(place + tile * TILE < count, logits, -jnp.inf)
            new_top = jnp.maximum(top, logits)
            decay, weight = jnp.exp2(top - new_top), jnp.exp2(logits - new_top)
            _await_copies(2 * STAGES - 2, interpret)
            values = rows_of(value_smem.at[stage])
            plgpu.commit_smem()  # all have read them
            move(step + STAGES)
            return acc * spread(decay, 0) + values * spread(weight, 0), new_top, total * decay + weight

        empty = full(0.0, tile_shape, layout), full(LOWEST, (TILE,), by_row), full(0.0, (TILE,), by_row)
        acc, top, total = lax.fori_loop(0, tiles, tile_step, empty)
        over_all = scalar(top, "max")
        decay = jnp.exp2(top - over_all)
        total = scalar(total * decay, "add")
        out = (acc * spread(decay, 0)).sum(axis=0) * jnp.where(total > 0, 1.0 / total, 0.0)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last row's has left
        out_smem[...] = out.astype(out_smem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_ref.at[row])
        lse_ref[row] = jnp.where(total > 0, (over_all + jnp.log2(total)) * (1 / LOG2_E), -jnp.inf)

    lax.fori_loop(0, own_rows, row_step, None)
    plgpu.wait_smem_to_gmem(0)


def _copy_rows(source_ref, smem, slots_ref, first, count) -> None:
    """Begins to copy the rows `slots[first + i]` of `source [S, H]` to `smem [64, H + 8]`, as a group of copies.

    Rows are a few hundred bytes each, which threads copy by 16 bytes: one TMA copy each takes longer to begin. The last
    of `count` slots stands for those past the end.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3 + (plgpu.Layout.WG_SPLAT,) * 2)
    def emit(_, source_ref, smem, slots_ref, first, count):
        i32, i64, index = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64), ir.IndexType.get()
        head_dim, padded = ir.MemRefType(source_ref.type).shape[1], ir.MemRefType(smem.type).shape[1]
        (stride, _), _ = ir.MemRefType(source_ref.type).get_strides_and_offset()
        constant, wide = lambda x: arith.constant(i32, x), lambda x: arith.extsi(i64, x)
        source = llvm.ptrtoint(i64, utils.memref_ptr(source_ref))
        target = llvm.ptrtoint(i32, utils.memref_ptr(smem))
        thread = arith.remui(utils.thread_idx(), constant(32 * WARPS))
        first, count = (x.registers.item() for x in (first, count))
        last = arith.maxsi(arith.subi(count, constant(1)), constant(0))
        per_row = head_dim // 8
        for start in range(0, TILE * per_row, 32 * WARPS):
            piece = arith.addi(thread, constant(start))
            place, part = arith.divui(piece, constant(per_row)), arith.remui(piece, constant(per_row))
            listed = arith.minsi(arith.addi(first, place), last)
            slot = memref.load(slots_ref, [arith.index_cast(index, listed)])
            # With none kept the list says nothing.
            slot = arith.select(arith.cmpi(arith.CmpIPredicate.eq, count, constant(0)), constant(0), slot)
            element = arith.addi(
                arith.muli(wide(slot), arith.constant(i64, stride)), wide(arith.muli(part, constant(8)))
            )
            to = arith.addi(arith.muli(place, constant(padded)), arith.muli(part, constant(8)))
            asm(
                "cp.async.cg.shared.global [$0], [$1], 16;",
                None,
                arith.addi(target, arith.muli(to, constant(2))),
                arith.addi(source, arith.muli(element, arith.constant(i64, 2))),
            )

    emit(source_ref, smem, slots_ref, first, count)


def _end_group(interpret: bool) -> None:
    if not interpret:
        plgpu.inline_mgpu()(lambda _: asm("cp.async.commit_group;", None) and None)()


def _await_copies(groups: int, interpret: bool) -> None:
    """Waits until no more than `groups` groups of copies are on their way; the values of all threads are then there."""
    if not interpret:
        plgpu.inline_mgpu()(lambda _: asm(f"cp.async.wait_group {groups};", None) and None)()
    plgpu.commit_smem()


def _interpreted_copy(source_ref, smem, slots_ref, first, count) -> None:
    """`_copy_rows` in words that the interpreter knows."""
    head_dim = source_ref.shape[-1]

    def copy(i, _):
        slot = jnp.where(count == 0, 0, slots_ref[jnp.clip(first + i, 0, jnp.maximum(count - 1, 0))])
        smem[i, pl.ds(0, head_dim)] = source_ref[slot]

    lax.fori_loop(0, TILE, copy, None)
