"""The exchange of `reduction="fused"` in a Mosaic GPU kernel: all write their state to all, and merge what arrives.

It is a kernel of its own, or the end of LeanAttention's (`epilogue_kernel.py`). Or devices write any few numbers, and
add up or keep what arrives: all exchanges of a process share buffers and steps.

Every 4 bytes of payload travel with the 4 bytes of the step's number in one 8-byte store, which memory takes whole. Who
reads a word with the right number has the payload: no flag that follows the data, no fence, one way over the link.

`both_ways` per thread, in step = 1 + the number of exchanges before, which this device's own memory keeps:
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

from tree_attn.kernels import mlir as ops

NUM_CTAS = 64  # that exchange, in every kernel: the others of one that ends so only leave partials
MAX_CTAS = 1024  # of a kernel that ends in an exchange
PARTIAL_WORDS = 1 << 21
THREADS = 128
LOWEST = float(np.finfo(np.float32).min)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffers:
    """Where the devices' buffers are, as their addresses (`tree_attn.reduce.peer_memory`) and the kernel know it.

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
        return 2 * self.num_ranks * self.capacity * ops.WORD_BYTES

    @property
    def partials_offset(self) -> int:
        return self.steps_offset + MAX_CTAS * 4

    @property
    def num_bytes(self) -> int:
        return self.partials_offset + PARTIAL_WORDS * ops.WORD_BYTES


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
        place = locate(buffers, refs[0] if has_rank else None)
        step = step_number(buffers, place)
        send, receive = both_ways(*purpose(*refs[has_rank:]), buffers, place, step)
        send()
        count_step(buffers, place, step, NUM_CTAS)
        receive()

    emit(*refs)


class Place(NamedTuple):
    """Addresses of the ranks' buffers and of this rank's own, and the rank: i64."""

    bases: list
    own: Any
    rank: Any


def locate(buffers: Buffers, rank_ref) -> Place:
    """Where the buffers are; `rank_ref` is of `exchange`'s rank, or None."""
    with ir.InsertionPoint(ops.kernel_launch()):  # the host's, at every launch: parameters of the kernel
        pointer = ir.Type.parse("!llvm.ptr")
        entries = (ops.constant(buffers.table + ops.WORD_BYTES * i) for i in range(buffers.num_ranks + 1))
        *bases, rank = [llvm.load(ops.i64(), llvm.inttoptr(pointer, entry)) for entry in entries]
    if rank_ref is not None:
        rank = arith.extui(ops.i64(), memref.load(rank_ref, [arith.constant(ir.IndexType.get(), 0)]))
    own = bases[0]
    for r in range(buffers.num_ranks):
        own = arith.select(arith.cmpi(arith.CmpIPredicate.eq, rank, ops.constant(r)), bases[r], own)
    return Place(bases, own, rank)


def _counter(buffers: Buffers, place: Place, cta):
    """Where a CTA reads how many exchanges there were."""
    offset = arith.muli(ops.constant(4), arith.index_cast(ops.i64(), cta))
    return ops.plus(place.own, ops.constant(buffers.steps_offset), offset)


def step_number(buffers: Buffers, place: Place):
    """The number of this exchange."""
    counter = _counter(buffers, place, gpu.block_id(gpu.Dimension.x))
    return arith.addi(ops.load(counter), arith.constant(ops.i32(), 1))


def count_step(buffers: Buffers, place: Place, step, num_ctas: int) -> None:
    """Leaves the number of exchanges for this CTA's next, and for those of larger kernels that are not here."""
    at = functools.partial(arith.constant, ir.IndexType.get())
    thread, cta = gpu.thread_id(gpu.Dimension.x), gpu.block_id(gpu.Dimension.x)
    mgpu.utils.warpgroup_barrier()  # all threads know the step
    reader = arith.addi(cta, arith.muli(thread, at(num_ctas)))
    with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, reader, at(MAX_CTAS))):
        ops.store(_counter(buffers, place, reader), step)


def both_ways(count: int, sent, receive, buffers: Buffers, place: Place, step):
    """What emits the sending of an exchange, and what emits the receiving."""
    i32, index = ops.i32(), ir.IndexType.get()
    at = functools.partial(arith.constant, index)
    thread, cta = gpu.thread_id(gpu.Dimension.x), gpu.block_id(gpu.Dimension.x)
    parity = arith.extui(ops.i64(), arith.andi(step, arith.constant(i32, 1)))
    slot_bytes = buffers.capacity * ops.WORD_BYTES
    slots = arith.muli(parity, ops.constant(buffers.num_ranks * slot_bytes))
    own_slot = ops.plus(slots, arith.muli(place.rank, ops.constant(slot_bytes)))

    def each_element(body):
        first = arith.addi(thread, arith.muli(cta, at(THREADS)))
        loop = scf.ForOp(first, at(count), at(NUM_CTAS * THREADS))
        with ir.InsertionPoint(loop.body):
            body(loop.induction_variable)
            scf.YieldOp([])

    def send(element):
        offset, x = ops.plus(own_slot, ops.words(element)), sent(element)
        for base in place.bases:
            ops.send(ops.plus(base, offset), x, step)

    def received(element):
        words = ops.words(element)
        return [
            ops.receive(ops.plus(place.own, slots, ops.constant(r * slot_bytes), words), step)
            for r in range(buffers.num_ranks)
        ]

    return lambda: each_element(send), lambda: each_element(functools.partial(receive, received=received))


def _merging(out_ref, lse_ref, merged_ref, merged_lse_ref):
    """States, as they are."""
    count, place, receive = merged_results(merged_ref, merged_lse_ref)

    def sent(element):
        row, column, dim, is_lse = place(element)
        x = ops.widened(memref.load(out_ref, [row, column, dim]))
        return arith.select(is_lse, memref.load(lse_ref, [row, column]), x)

    return count, sent, receive


def merged_results(merged_ref, merged_lse_ref):
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
        weights = [ops.exp2(arith.mulf(arith.subf(x, top), log2_e)) for x in lses]
        total = functools.reduce(arith.addf, weights)
        summed = functools.reduce(arith.addf, [arith.mulf(w, x) for w, x in zip(weights, xs)])
        zero = arith.constant(f32, 0.0)
        is_empty = arith.cmpf(arith.CmpFPredicate.OEQ, total, zero)
        result = arith.select(is_empty, zero, arith.divf(summed, total))

        branch = scf.IfOp(is_lse, has_else=True)
        with ir.InsertionPoint(branch.then_block):
            log = arith.mulf(ops.log2(total), arith.constant(f32, math.log(2)))
            merged = arith.select(is_empty, arith.constant(f32, -math.inf), arith.addf(top, log))
            memref.store(merged, merged_lse_ref, [row, column])
            scf.YieldOp([])
        with ir.InsertionPoint(branch.else_block):
            memref.store(ops.narrowed(result, merged_ref), merged_ref, [row, column, dim])
            scf.YieldOp([])

    return rows * columns * (head_dim + 1), place, receive


def _adding(x_ref, total_ref):
    def receive(element, received):
        total = functools.reduce(arith.addf, received(element))
        memref.store(ops.narrowed(total, total_ref), total_ref, [element])

    return *ir.MemRefType(x_ref.type).shape, lambda element: ops.widened(memref.load(x_ref, [element])), receive


def _gathering(x_ref, gathered_ref):
    def receive(element, received):
        for r, x in enumerate(received(element)):
            rank = arith.constant(ir.IndexType.get(), r)
            memref.store(ops.narrowed(x, gathered_ref), gathered_ref, [rank, element])

    return *ir.MemRefType(x_ref.type).shape, lambda element: ops.widened(memref.load(x_ref, [element])), receive
