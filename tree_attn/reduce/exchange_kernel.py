"""The exchange of `reduction="fused"` in a Mosaic GPU kernel: all write their state to all, and merge what arrives.

It is a kernel of its own, or (`Epilogue`) the end of LeanAttention's, which leaves a state in parts: these are merged
first, so that a step of decoding is one launch. Or devices write any few numbers, and add up or keep what arrives: all
exchanges of a process share buffers and steps.

Every 4 bytes of payload travel with the 4 bytes of the step's number in one 8-byte store, which memory takes whole. Who
reads a word with the right number has the payload: no flag that follows the data, no fence, one way over the link.

`_both_ways` per thread, in step = 1 + the number of exchanges before, which this device's own memory keeps:
1. each element that this device has, of `(out, lse)`, say, goes to slot `[step % 2, own rank]` of every buffer;
2. each element of every slot is read until its number is `step`, and merged (or added) in the order of ranks, so that
   all devices get the same bits.

Two slots per rank suffice: a device is in step n only if all others had begun step n - 1, and so had ended step n - 2,
whose slot step n overwrites. The model in `tests/reduce/exchange_model.py` says so for all interleavings.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref, scf

from tree_attn.ptx import asm

NUM_CTAS = 64  # that exchange, in every kernel: the others of one that ends so only leave partials
MAX_CTAS = 1024  # of a kernel that ends in an exchange
PARTIAL_WORDS = 1 << 21
THREADS = 128
WORD_BYTES = 8
# Partials that a thread reads before it waits for one: a dependent load takes longer than all arithmetic. With more, a
# kernel that ends so would need more than the 128 registers that let two CTAs share an SM.
PARTIALS_AT_ONCE = 9
LOWEST = float(np.finfo(np.float32).min)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffers:
    """Where the devices' buffers are, as their addresses (`tree_attn.peer_memory`) and the kernel know it.

    table:     where the host finds the addresses of all ranks' buffers, and then its own rank, int64 `[num_ranks + 1]`
    capacity:  elements of one slot
    A buffer is 2 * num_ranks slots of `capacity` words of 8 bytes; then the number of exchanges so far, for each of
    MAX_CTAS CTAs to read before it counts itself; then PARTIAL_WORDS for this device's own partial states.
    """

    table: int
    num_ranks: int
    capacity: int

    replace = dataclasses.replace

    @property
    def steps_offset(self) -> int:
        return 2 * self.num_ranks * self.capacity * WORD_BYTES

    @property
    def partials_offset(self) -> int:
        return self.steps_offset + MAX_CTAS * 4

    @property
    def num_bytes(self) -> int:
        return self.partials_offset + PARTIAL_WORDS * WORD_BYTES


@functools.partial(jax.jit, static_argnames="buffers")
def exchange(out, lse, rank, buffers: Buffers):
    """Merges `out [rows, columns, H]` and float32 `lse [rows, columns]` over all ranks.

    Args:
      rank: this device's, int32 `[1]`; None where a process has one device: then the table knows it, and two small
        kernels are spared.
    """
    results = jax.ShapeDtypeStruct(out.shape, out.dtype), jax.ShapeDtypeStruct(lse.shape, jnp.float32)
    return _exchanged("fused_exchange", _merging, (out, lse), results, rank, buffers)


@functools.partial(jax.jit, static_argnames="buffers")
def exchange_sum(x, rank, buffers: Buffers):
    """Adds up `x [elements]` of all ranks, in float32 and in the order of ranks; `rank` as of `exchange`."""
    (total,) = _exchanged("fused_sum", _adding, (x,), (jax.ShapeDtypeStruct(x.shape, x.dtype),), rank, buffers)
    return total


@functools.partial(jax.jit, static_argnames="buffers")
def exchange_gather(x, rank, buffers: Buffers):
    """All ranks' `x [elements]` as `[ranks, elements]`; `rank` as of `exchange`."""
    gathered = jax.ShapeDtypeStruct((buffers.num_ranks, *x.shape), x.dtype)
    (gathered,) = _exchanged("fused_gather", _gathering, (x,), (gathered,), rank, buffers)
    return gathered


def _exchanged(name: str, purpose, arrays, results, rank, buffers: Buffers):
    body = functools.partial(_exchange, purpose, rank is not None, buffers)
    body.__name__ = name
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    return plgpu.kernel(
        body,
        out_type=results,
        grid=(NUM_CTAS,),
        grid_names=("cta",),
        compiler_params=params,
        kernel_name=name,
    )(*([] if rank is None else [rank]), *arrays)


def _exchange(purpose, has_rank: bool, buffers: Buffers, *refs):
    """What all exchanges have in common. `purpose(*refs)` returns `(elements, sent, receive)`:

    how many elements, the float32 that is sent of an element, and what is done with one of which `receive(element,
    received)` has `received(element)`, the float32 of all ranks, in their order.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
    def emit(_, *refs):
        place = _place(buffers, refs[0] if has_rank else None)
        step = _step(buffers, place)
        send, receive = _both_ways(*purpose(*refs[has_rank:]), buffers, place, step)
        send()
        _count(buffers, place, step, NUM_CTAS)
        receive()

    emit(*refs)


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """The exchange as the end of the kernel that makes partial states, so that a step is one launch.

    Partials go to words of 8 bytes too, in this device's own buffer, which bear the step's number: who merges them
    reads until it is there, and nobody need wait for a CTA, or for a copy to end. Each of `num_ctas` CTAs begins,
    leaves its partials, if any, and ends, all in its first warpgroup; the first `NUM_CTAS` exchange, and wait for the
    others' partials, which wait for nobody. So there must be room for one CTA more than `NUM_CTAS` at a time, which
    nothing checks: a Hopper GPU has more SMs.

    In all of them `rank_ref` is of `exchange`'s rank, or None.
    """

    buffers: Buffers
    num_ctas: int

    def begin(self, rank_ref):
        """The number of the step, which the others take."""

        def emit(place):
            return mgpu.FragmentedArray.splat(_step(self.buffers, place), (), is_signed=True)

        return self._inline(emit, rank_ref, returned=plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR))

    def leave(self, rank_ref, step, partial, acc, top, total, columns: int) -> None:
        """Partial number `partial`: `acc [Hp, cols]`, `top` and `total [cols]` of the product's layout.

        Of `cols` those from `columns` on are padding, and left out.
        """
        head_dim = acc.shape[0]

        def emit(place, step, partial, *state):
            step, partial = step.registers.item(), partial.registers.item()
            thread, index = gpu.thread_id(gpu.Dimension.x), ir.IndexType.get()
            first = _partial_words(self.buffers, place, arith.index_cast(index, partial), head_dim, columns)
            at = functools.partial(arith.constant, index)

            def store(x, dim, column, is_mine=None):
                wanted = arith.cmpi(arith.CmpIPredicate.ult, column, at(columns))
                with mgpu.when(wanted if is_mine is None else arith.andi(wanted, is_mine)):
                    word = arith.addi(arith.muli(dim, at(columns)), column)
                    _send(_plus(first, _words(word)), x, step)

            of_dims, *of_columns = state
            of_dims.foreach(lambda x, where: store(x, *where))
            # All threads have them, the first four for all columns.
            is_mine = arith.cmpi(arith.CmpIPredicate.ult, thread, at(4))
            for i, x in enumerate(of_columns):
                x.foreach(lambda x, where, i=i: store(x, at(head_dim + i), *where, is_mine))

        per_column = plgpu.Layout.WGMMA.reduce(0)
        self._inline(
            emit, rank_ref, (step, _SCALAR), (partial, _SCALAR), (acc, plgpu.Layout.WGMMA), (top, per_column),
            (total, per_column),
        )  # fmt: skip

    def end(self, rank_ref, step, spans_ref, out_ref, lse_ref, padded_head_dim: int) -> None:
        """Exchanges: `spans_ref` of which partials are of a row, and `out_ref`, `lse_ref` of the results."""

        def emit(place, step, spans_ref, out_ref, lse_ref):
            step = step.registers.item()
            cta = gpu.block_id(gpu.Dimension.x)
            exchanges = arith.cmpi(arith.CmpIPredicate.ult, cta, arith.constant(ir.IndexType.get(), NUM_CTAS))
            with mgpu.when(exchanges):
                words = functools.partial(_partial_words, self.buffers, place, head_dim=padded_head_dim)
                purpose = _merging_partials(words, padded_head_dim, self.num_ctas, step, spans_ref, out_ref, lse_ref)
                for way in _both_ways(*purpose, self.buffers, place, step):
                    way()
            _count(self.buffers, place, step, self.num_ctas)

        refs = [(ref, plgpu.RefType()) for ref in (spans_ref, out_ref, lse_ref)]
        self._inline(emit, rank_ref, (step, _SCALAR), *refs)

    def _inline(self, emit, rank_ref, *given, returned=None):
        given = ([] if rank_ref is None else [(rank_ref, plgpu.RefType())]) + list(given)

        @plgpu.inline_mgpu(arg_types=tuple(kind for _, kind in given), return_type=returned)
        def emitted(_, *values):
            if rank_ref is None:
                return emit(_place(self.buffers, None), *values)
            return emit(_place(self.buffers, values[0]), *values[1:])

        return emitted(*(value for value, _ in given))


_SCALAR = plgpu.Layout.WG_SPLAT


class _Place(NamedTuple):
    """Addresses of the ranks' buffers and of this rank's own, and the rank: i64."""

    bases: list
    own: Any
    rank: Any


def _place(buffers: Buffers, rank_ref) -> _Place:
    with ir.InsertionPoint(_launch()):  # on the host, at every launch: the kernel gets the addresses as parameters
        pointer = ir.Type.parse("!llvm.ptr")
        entries = (_constant(buffers.table + WORD_BYTES * i) for i in range(buffers.num_ranks + 1))
        *bases, rank = [llvm.load(_i64(), llvm.inttoptr(pointer, entry)) for entry in entries]
    if rank_ref is not None:
        rank = arith.extui(_i64(), memref.load(rank_ref, [arith.constant(ir.IndexType.get(), 0)]))
    own = bases[0]
    for r in range(buffers.num_ranks):
        own = arith.select(arith.cmpi(arith.CmpIPredicate.eq, rank, _constant(r)), bases[r], own)
    return _Place(bases, own, rank)


def _counter(buffers: Buffers, place: _Place, cta):
    """Where a CTA reads how many exchanges there were."""
    offset = arith.muli(_constant(4), arith.index_cast(_i64(), cta))
    return _plus(place.own, _constant(buffers.steps_offset), offset)


def _step(buffers: Buffers, place: _Place):
    """The number of this exchange."""
    counter = _counter(buffers, place, gpu.block_id(gpu.Dimension.x))
    return arith.addi(_load(counter, _i32()), arith.constant(_i32(), 1))


def _count(buffers: Buffers, place: _Place, step, num_ctas: int) -> None:
    """Leaves the number of exchanges for this CTA's next, and for those of larger kernels that are not here."""
    at = functools.partial(arith.constant, ir.IndexType.get())
    thread, cta = gpu.thread_id(gpu.Dimension.x), gpu.block_id(gpu.Dimension.x)
    mgpu.utils.warpgroup_barrier()  # all threads know the step
    reader = arith.addi(cta, arith.muli(thread, at(num_ctas)))
    with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, reader, at(MAX_CTAS))):
        _store(_counter(buffers, place, reader), step)


def _both_ways(count: int, sent, receive, buffers: Buffers, place: _Place, step):
    """What emits the sending of an exchange, and what emits the receiving."""
    i32, index = _i32(), ir.IndexType.get()
    at = functools.partial(arith.constant, index)
    thread, cta = gpu.thread_id(gpu.Dimension.x), gpu.block_id(gpu.Dimension.x)
    parity = arith.extui(_i64(), arith.andi(step, arith.constant(i32, 1)))
    slot_bytes = buffers.capacity * WORD_BYTES
    slots = arith.muli(parity, _constant(buffers.num_ranks * slot_bytes))
    own_slot = _plus(slots, arith.muli(place.rank, _constant(slot_bytes)))

    def each_element(body):
        first = arith.addi(thread, arith.muli(cta, at(THREADS)))
        loop = scf.ForOp(first, at(count), at(NUM_CTAS * THREADS))
        with ir.InsertionPoint(loop.body):
            body(loop.induction_variable)
            scf.YieldOp([])

    def send(element):
        offset, x = _plus(own_slot, _words(element)), sent(element)
        for base in place.bases:
            _send(_plus(base, offset), x, step)

    def received(element):
        words = _words(element)
        return [
            _receive(_plus(place.own, slots, _constant(r * slot_bytes), words), step) for r in range(buffers.num_ranks)
        ]

    return lambda: each_element(send), lambda: each_element(functools.partial(receive, received=received))


def _merging(out_ref, lse_ref, merged_ref, merged_lse_ref):
    """States, as they are."""
    count, place, receive = _merged(merged_ref, merged_lse_ref)

    def sent(element):
        row, column, dim, is_lse = place(element)
        x = _widened(memref.load(out_ref, [row, column, dim]))
        return arith.select(is_lse, memref.load(lse_ref, [row, column]), x)

    return count, sent, receive


def _merging_partials(words, head_dim: int, num_ctas: int, step, spans_ref, merged_ref, merged_lse_ref):
    """States of which each row's parts are still to be merged: every thread does so for its element.

    `words(partial, columns=...)` is the address of a partial's words; each is read until it bears the number of `step`.
    """
    i1, f32, index = ir.IntegerType.get_signless(1), ir.F32Type.get(), ir.IndexType.get()
    at = functools.partial(arith.constant, index)
    real = functools.partial(arith.constant, f32)
    count, place, receive = _merged(merged_ref, merged_lse_ref)
    rows, columns, _ = ir.MemRefType(merged_ref.type).shape
    at_once = min(-(-num_ctas // rows) + 1, PARTIALS_AT_ONCE)

    def sent(element):
        row, column, dim, is_lse = place(element)
        first, end = (arith.index_cast(index, memref.load(spans_ref, [row, at(i)])) for i in range(2))
        loop = scf.ForOp(first, end, at(at_once), [real(LOWEST), real(0.0), real(0.0)])
        with ir.InsertionPoint(loop.body):
            top, total, acc = loop.inner_iter_args
            are_parts, addresses = [], []
            for i in range(at_once):
                partial = arith.addi(loop.induction_variable, at(i))
                are_parts.append(arith.cmpi(arith.CmpIPredicate.ult, partial, end))
                of_partial = words(partial, columns=columns)
                three = (arith.addi(arith.muli(d, at(columns)), column) for d in (at(head_dim), at(head_dim + 1), dim))
                addresses.append([_plus(of_partial, _words(word)) for word in three])
            until = scf.WhileOp([_i64()] * 3 * at_once, [])
            with ir.InsertionPoint(until.before.blocks.append()):
                found = [_load_relaxed(address) for three in addresses for address in three]
                is_missing = arith.constant(i1, 0)
                for i, word in enumerate(found):
                    number = arith.trunci(_i32(), arith.shrui(word, _constant(32)))
                    is_old = arith.cmpi(arith.CmpIPredicate.ne, number, step)
                    is_missing = arith.ori(is_missing, arith.andi(is_old, are_parts[i // 3]))
                scf.ConditionOp(is_missing, found)
            with ir.InsertionPoint(until.after.blocks.append(*[_i64()] * 3 * at_once)):
                scf.YieldOp([])
            payloads = [arith.bitcast(f32, arith.trunci(_i32(), word)) for word in until.results]
            nothing = (real(LOWEST), real(0.0), real(0.0))
            parts = [
                [arith.select(is_part, x, other) for x, other in zip(payloads[3 * i : 3 * i + 3], nothing)]
                for i, is_part in enumerate(are_parts)
            ]
            scf.YieldOp(_folded(parts, top, total, acc))
        return _finished(*loop.results, is_lse)

    return count, sent, receive


def _folded(parts, top, total, acc):
    """Unnormalised `(top, total, acc)` with those of `parts`."""
    new_top = functools.reduce(arith.maximumf, [part_top for part_top, _, _ in parts], top)
    decay = _exp2(arith.subf(top, new_top))
    total, acc = arith.mulf(total, decay), arith.mulf(acc, decay)
    for part_top, part_total, part_acc in parts:
        decay = _exp2(arith.subf(part_top, new_top))
        total = arith.addf(total, arith.mulf(decay, part_total))
        acc = arith.addf(acc, arith.mulf(decay, part_acc))
    return new_top, total, acc


def _finished(top, total, acc, is_lse):
    """What an element of `out` or of lse is of a merged row."""
    real = functools.partial(arith.constant, ir.F32Type.get())
    is_empty = arith.cmpf(arith.CmpFPredicate.OEQ, total, real(0.0))
    lse = arith.mulf(arith.addf(top, _log2(total)), real(math.log(2)))
    lse = arith.select(is_empty, real(-math.inf), lse)
    return arith.select(is_lse, lse, arith.select(is_empty, real(0.0), arith.divf(acc, total)))


def _partial_words(buffers: Buffers, place: _Place, partial, head_dim: int, columns: int):
    """Address of the words of a partial: for each of `head_dim` head dims, then max and sum, `columns` of them."""
    size = _constant((head_dim + 2) * columns * WORD_BYTES)
    offset = arith.muli(arith.index_cast(_i64(), partial), size)
    return _plus(place.own, _constant(buffers.partials_offset), offset)


def _merged(merged_ref, merged_lse_ref):
    """What those share that end in `out [rows, columns, H]` and `lse [rows, columns]`: `(count, place, receive)`.

    Columns vary fastest, as in LeanAttention's partials, and lse comes after the H head dims.
    """
    f32 = ir.F32Type.get()
    at = functools.partial(arith.constant, ir.IndexType.get())
    rows, columns, head_dim = ir.MemRefType(merged_ref.type).shape

    def place(element):
        """Row, column and head dim of an element, and whether it is of lse: it then has the last head dim."""
        column, rest = arith.remui(element, at(columns)), arith.divui(element, at(columns))
        row, dim = arith.divui(rest, at(head_dim + 1)), arith.remui(rest, at(head_dim + 1))
        is_lse = arith.cmpi(arith.CmpIPredicate.eq, dim, at(head_dim))
        return row, column, arith.minui(dim, at(head_dim - 1)), is_lse

    def receive(element, received):
        row, column, dim, is_lse = place(element)
        xs = received(element)
        of_lse = arith.addi(arith.muli(row, at(head_dim + 1)), at(head_dim))
        lses = received(arith.addi(arith.muli(of_lse, at(columns)), column))
        top = functools.reduce(arith.maximumf, lses)
        # A finite stand-in where no rank has a key: exp(-inf - -inf) would be NaN.
        lowest = arith.constant(f32, LOWEST)
        top = arith.select(arith.cmpf(arith.CmpFPredicate.OEQ, top, arith.constant(f32, -math.inf)), lowest, top)
        log2_e = arith.constant(f32, math.log2(math.e))
        weights = [_exp2(arith.mulf(arith.subf(x, top), log2_e)) for x in lses]
        total = functools.reduce(arith.addf, weights)
        summed = functools.reduce(arith.addf, [arith.mulf(w, x) for w, x in zip(weights, xs)])
        zero = arith.constant(f32, 0.0)
        is_empty = arith.cmpf(arith.CmpFPredicate.OEQ, total, zero)
        result = arith.select(is_empty, zero, arith.divf(summed, total))

        branch = scf.IfOp(is_lse, has_else=True)
        with ir.InsertionPoint(branch.then_block):
            log = arith.mulf(_log2(total), arith.constant(f32, math.log(2)))
            merged = arith.select(is_empty, arith.constant(f32, -math.inf), arith.addf(top, log))
            memref.store(merged, merged_lse_ref, [row, column])
            scf.YieldOp([])
        with ir.InsertionPoint(branch.else_block):
            memref.store(_narrowed(result, merged_ref), merged_ref, [row, column, dim])
            scf.YieldOp([])

    return rows * columns * (head_dim + 1), place, receive


def _adding(x_ref, total_ref):
    def receive(element, received):
        total = functools.reduce(arith.addf, received(element))
        memref.store(_narrowed(total, total_ref), total_ref, [element])

    return *ir.MemRefType(x_ref.type).shape, lambda element: _widened(memref.load(x_ref, [element])), receive


def _gathering(x_ref, gathered_ref):
    def receive(element, received):
        for r, x in enumerate(received(element)):
            rank = arith.constant(ir.IndexType.get(), r)
            memref.store(_narrowed(x, gathered_ref), gathered_ref, [rank, element])

    return *ir.MemRefType(x_ref.type).shape, lambda element: _widened(memref.load(x_ref, [element])), receive


def _exp2(x):
    return asm("ex2.approx.f32 $0, $1;", ir.F32Type.get(), x)


def _log2(x):
    return asm("lg2.approx.f32 $0, $1;", ir.F32Type.get(), x)


def _widened(x):
    return x if x.type == ir.F32Type.get() else arith.extf(ir.F32Type.get(), x)


def _narrowed(x, ref):
    dtype = ir.MemRefType(ref.type).element_type
    return x if x.type == dtype else arith.truncf(dtype, x)


def _launch():
    """The launch of the kernel that is being written."""
    op = ir.InsertionPoint.current.block.owner
    while op.name != "gpu.launch":
        op = op.parent
    return op


def _i32():
    return ir.IntegerType.get_signless(32)


def _i64():
    return ir.IntegerType.get_signless(64)


def _constant(value: int):
    return arith.constant(_i64(), value)


def _plus(*addresses):
    return functools.reduce(arith.addi, addresses)


def _words(element):
    return arith.muli(arith.index_cast(_i64(), element), _constant(WORD_BYTES))


def _load(address, dtype):
    return asm(f"ld.global.{'u64' if dtype == _i64() else 'u32'} $0, [$1];", dtype, address)


def _load_relaxed(address):
    return asm("ld.relaxed.gpu.global.b64 $0, [$1];", _i64(), address)


def _store(address, x):
    asm("st.global.u32 [$0], $1;", None, address, x)


def _send(address, x, step):
    """One store of 8 bytes, which a reader sees whole or not at all."""
    asm("{ .reg .b64 word; mov.b64 word, {$1, $2}; st.relaxed.sys.global.b64 [$0], word; }", None, address, x, step)


def _receive(address, step):
    """Waits until the word at `address` bears `step`, and returns what it holds."""
    return asm(
        "{ .reg .pred is_old; .reg .b32 number; .reg .b64 word; "
        "AGAIN: ld.relaxed.sys.global.b64 word, [$1]; mov.b64 {$0, number}, word; "
        "setp.ne.u32 is_old, number, $2; @is_old bra AGAIN; }",
        ir.F32Type.get(),
        address,
        step,
    )
