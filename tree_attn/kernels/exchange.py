"""The exchange of `reduction="fused"` in a Mosaic GPU kernel: devices write their states to all, and merge all of them.

It is a kernel of its own, or the end of LeanAttention's (`epilogue.py`). Devices can also exchange any few numbers, and
add or keep them. Sums and gathers are also ends of products (`few_rows_sum.py`, `few_rows_heads.py`). All exchanges of
a process share buffers and steps.

Every 4 bytes of payload travel with the 4 bytes of the step's number in one 8-byte store, which memory takes whole. A
reader that sees the right number has the payload. So there is no flag after the data, no fence, and one trip over the
link.

A step's number is 1 + the number of exchanges before it, which each device counts in its own memory. In a step,
`both_ways` does per thread:
1. It writes each element of this device, of `(out, lse)` for example, to buffer slot `[step % 2, rank]` of all devices.
2. It reads each element of every slot until its number is the step's, and merges (or adds) them in the order of ranks.
   So all devices get the same bits.

A thread takes several elements at once, and reads all their words before it waits for one: a read takes longer than all
arithmetic.

Two buffer slots per rank suffice. A device is in step n only if all others had begun step n - 1. They had then ended
step n - 2, whose slots step n overwrites. `tests/kernels/exchange_model.py` explores all interleavings.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref, scf

from tree_attn.kernels import mlir as ops

# CTAs that exchange, but in a product's end, by the GPU; attention's other CTAs only leave partial states. They hold
# their multiprocessors while they wait for peers. A collective of NCCL on another stream waits too, by up to 32 CTAs:
# both must fit a GPU, or two GPUs can wait for each other for ever.
MIN_CTAS, MAX_EXCHANGING_CTAS, OTHER_WAITING_CTAS = 64, 96, 32
MAX_CTAS = 1024  # of a kernel that ends in an exchange
PARTIAL_WORDS = 1 << 21
THREADS = 128
WORDS_AT_ONCE = 16  # from peers, that a thread reads before it waits for one
ELEMENTS_AT_ONCE = 4  # that a thread sends, where they are loaded from arrays
LOWEST = float(np.finfo(np.float32).min)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffers:
    """The devices' buffers: their addresses (`tree_attn.reduce.peer_memory`) and their layout.

    table:          address, in host memory, of the addresses of all ranks' buffers and of this process's rank,
                    uint64 `[num_ranks + 1]`; None: there is one rank, and a kernel gets its buffer as an argument
    capacity:       elements of one slot
    num_ctas:       CTAs that exchange; one more must fit a device, so there are more multiprocessors
    partial_words:  for the device's partial states

    A buffer is `2 * num_ranks` slots of `capacity` words of 8 bytes. Then comes the number of exchanges so far, once
    for each of `MAX_CTAS` CTAs. Last come `partial_words`.
    """

    table: int | None
    num_ranks: int
    capacity: int
    num_ctas: int = MIN_CTAS
    partial_words: int = PARTIAL_WORDS

    replace = dataclasses.replace

    @property
    def steps_offset(self) -> int:
        """Offset of the numbers of exchanges, in bytes."""
        return 2 * self.num_ranks * self.capacity * ops.WORD_BYTES

    @property
    def partials_offset(self) -> int:
        """Offset of the partial states, in bytes."""
        return self.steps_offset + MAX_CTAS * 4

    @property
    def num_bytes(self) -> int:
        """Size of a buffer."""
        return self.partials_offset + self.partial_words * ops.WORD_BYTES


def exchanging_ctas(sms: int | None) -> int:
    """Returns how many CTAs exchange on a GPU of so many multiprocessors, None if unknown."""
    has_room = sms is not None and sms >= MAX_EXCHANGING_CTAS + OTHER_WAITING_CTAS
    return MAX_EXCHANGING_CTAS if has_room else MIN_CTAS


@functools.partial(jax.jit, static_argnames="buffers")
def exchange(out, lse, rank, buffers: Buffers):
    """Merges `out [output tiles, columns, H]` and float32 `lse [output tiles, columns]` over all ranks.

    Args:
      rank: this device's, int32 `[1]`; None where a process has one device: the table then has it, which spares two
        small kernels.
    """
    results = jax.ShapeDtypeStruct(out.shape, out.dtype), jax.ShapeDtypeStruct(lse.shape, jnp.float32)
    return _exchanged("fused_exchange", _merging, (out, lse), results, rank, buffers)


@functools.partial(jax.jit, static_argnames="buffers")
def exchange_sum(x, rank, buffers: Buffers, residual=None):
    """Returns the sum of all ranks' `x [elements]`, added in float32 in the order of ranks.

    Args:
      rank: as of `exchange`.
      residual: `[elements]`, the same on all ranks, to which the sum is added before it is rounded; the result is of
        its dtype.
    """
    arrays = (x,) if residual is None else (x, residual)
    result = jax.ShapeDtypeStruct(x.shape, arrays[-1].dtype)
    (total,) = _exchanged("fused_sum", _adding, arrays, (result,), rank, buffers)
    return total


@functools.partial(jax.jit, static_argnames="buffers")
def exchange_gather(x, rank, buffers: Buffers):
    """Returns all ranks' `x [elements]` as `[ranks, elements]`; `rank` as of `exchange`."""
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
        grid=(buffers.num_ctas,),
        grid_names=("cta",),
        compiler_params=params,
        kernel_name=name,
    )(*([] if rank is None else [rank]), *arrays)


def _exchange(purpose, has_rank: bool, buffers: Buffers, *refs):
    """Emits an exchange.

    Args:
      purpose: `purpose(*refs)` returns `(count, sent, receive)`, as `both_ways` takes them.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
    def emit(_, *refs):
        place = locate(buffers, refs[0] if has_rank else None)
        step = step_number(buffers, place)
        send, receive = both_ways(*purpose(*refs[has_rank:]), buffers, place, step, buffers.num_ctas)
        send()
        count_step(buffers, place, step, buffers.num_ctas)
        receive()

    emit(*refs)


class Place(NamedTuple):
    """Addresses of all ranks' buffers and of this rank's, and the rank: i64."""

    bases: list
    local_base: Any
    rank: Any


def locate(buffers: Buffers, rank_ref) -> Place:
    """Returns where the buffers are.

    Args:
      rank_ref: of `exchange`'s rank, or None; of the buffer itself, if `buffers.table` is None.
    """
    if buffers.table is None:
        base = llvm.ptrtoint(ops.i64(), mgpu.utils.memref_ptr(rank_ref))
        return Place([base], base, ops.constant(0))
    with ir.InsertionPoint(ops.kernel_launch()):  # the host's, at every launch: parameters of the kernel
        pointer = ir.Type.parse("!llvm.ptr")
        entries = (ops.constant(buffers.table + ops.WORD_BYTES * i) for i in range(buffers.num_ranks + 1))
        *bases, rank = [llvm.load(ops.i64(), llvm.inttoptr(pointer, entry)) for entry in entries]
    if rank_ref is not None:
        rank = arith.extui(ops.i64(), memref.load(rank_ref, [arith.constant(ir.IndexType.get(), 0)]))
    local_base = bases[0]
    for r in range(buffers.num_ranks):
        is_rank = arith.cmpi(arith.CmpIPredicate.eq, rank, ops.constant(r))
        local_base = arith.select(is_rank, bases[r], local_base)
    return Place(bases, local_base, rank)


def _counter(buffers: Buffers, place: Place, cta):
    """Returns the address where a CTA reads how many exchanges there were."""
    offset = arith.muli(ops.constant(4), arith.index_cast(ops.i64(), cta))
    return ops.plus(place.local_base, ops.constant(buffers.steps_offset), offset)


def step_number(buffers: Buffers, place: Place):
    """Returns the number of this exchange."""
    counter = _counter(buffers, place, gpu.block_id(gpu.Dimension.x))
    return arith.addi(ops.load(counter), arith.constant(ops.i32(), 1))


def count_step(buffers: Buffers, place: Place, step, num_ctas: int) -> None:
    """Writes the number of exchanges for this CTA's next one, and for CTAs that only larger kernels have."""
    at = functools.partial(arith.constant, ir.IndexType.get())
    thread, cta = gpu.thread_id(gpu.Dimension.x), gpu.block_id(gpu.Dimension.x)
    mgpu.utils.warpgroup_barrier()  # all threads have read the step
    reader = arith.addi(cta, arith.muli(thread, at(num_ctas)))
    with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, reader, at(MAX_CTAS))):
        ops.store(_counter(buffers, place, reader), step)


class Transport(NamedTuple):
    """Functions of an element, an index, or of several.

    send:      `send(element, x)` writes to all devices
    addresses: `addresses(element)` returns where the words of all ranks are received
    received:  `received(elements, are_wanted)` yields the float32 of all ranks, in their order, for each; it waits for
               several at once, and of those that are not wanted it yields anything
    """

    send: Callable
    addresses: Callable
    received: Callable


def transport(buffers: Buffers, place: Place, step) -> Transport:
    """Returns the functions by which a step sends and receives."""
    parity = arith.extui(ops.i64(), arith.andi(step, arith.constant(ops.i32(), 1)))
    slot_bytes = buffers.capacity * ops.WORD_BYTES
    slots = arith.muli(parity, ops.constant(buffers.num_ranks * slot_bytes))
    rank_slot = ops.plus(slots, arith.muli(place.rank, ops.constant(slot_bytes)))

    def send(element, x):
        offset = ops.plus(rank_slot, ops.words(element))
        for base in place.bases:
            ops.send(ops.plus(base, offset), x, step)

    def addresses(element):
        words = ops.words(element)
        return [
            ops.plus(place.local_base, slots, ops.constant(r * slot_bytes), words) for r in range(buffers.num_ranks)
        ]

    def received(elements, are_wanted):
        last = arith.constant(ir.IndexType.get(), buffers.capacity - 1)
        both, size = list(zip(elements, are_wanted, strict=True)), max(1, WORDS_AT_ONCE // buffers.num_ranks)
        for first in range(0, len(both), size):
            some = both[first : first + size]
            words = [address for element, _ in some for address in addresses(arith.minui(element, last))]
            wanted = [is_wanted for _, is_wanted in some for _ in range(buffers.num_ranks)]
            found = iter(await_words(words, wanted, step, ops.load_from_peers))
            for _ in some:
                yield list(itertools.islice(found, buffers.num_ranks))

    return Transport(send, addresses, received)


def await_words(addresses, are_wanted, step, load) -> list:
    """Waits until the wanted words bear the number `step`, and returns the payloads of all, float32.

    Args:
      load: `ops.load_from_peers`, or `ops.load_relaxed` of words that this device writes.
    """
    until = scf.WhileOp([ops.i64()] * len(addresses), [])
    with ir.InsertionPoint(until.before.blocks.append()):
        found = list(map(load, addresses))
        is_missing = arith.constant(ir.IntegerType.get_signless(1), 0)
        for word, is_wanted in zip(found, are_wanted, strict=True):
            number = arith.trunci(ops.i32(), arith.shrui(word, ops.constant(32)))
            is_old = arith.cmpi(arith.CmpIPredicate.ne, number, step)
            is_missing = arith.ori(is_missing, arith.andi(is_old, is_wanted))
        scf.ConditionOp(is_missing, found)
    with ir.InsertionPoint(until.after.blocks.append(*[ops.i64()] * len(addresses))):
        scf.YieldOp([])
    return [arith.bitcast(ir.F32Type.get(), arith.trunci(ops.i32(), word)) for word in until.results]


def both_ways(
    count: int, sent, receive, buffers: Buffers, place: Place, step, num_ctas: int, sent_at_once: int = ELEMENTS_AT_ONCE
):
    """Returns two functions: one emits the sending of an exchange, the other the receiving.

    Args:
      count: of elements.
      sent: `sent(elements)` returns the float32 to send of each.
      receive: `receive(elements, are_inside, received)` writes the results of those that are inside, where
        `received` is that of `Transport`.
      num_ctas: that exchange, the first ones.
      sent_at_once: elements that a thread sends at once, at the most.
    """
    at = functools.partial(arith.constant, ir.IndexType.get())
    thread, cta = gpu.thread_id(gpu.Dimension.x), gpu.block_id(gpu.Dimension.x)
    exchange, stride = transport(buffers, place, step), num_ctas * THREADS

    def each_few(at_once: int, body):
        at_once = max(1, min(at_once, -(-count // stride)))
        first = arith.addi(thread, arith.muli(cta, at(THREADS)))
        loop = scf.ForOp(first, at(count), at(stride * at_once))
        with ir.InsertionPoint(loop.body):
            elements = [arith.addi(loop.induction_variable, at(i * stride)) for i in range(at_once)]
            are_inside = [arith.cmpi(arith.CmpIPredicate.ult, element, at(count)) for element in elements]
            body([arith.minui(element, at(count - 1)) for element in elements], are_inside)
            scf.YieldOp([])

    def send_few(elements, are_inside):
        for element, is_inside, x in zip(elements, are_inside, sent(elements), strict=True):
            with mgpu.when(is_inside):
                exchange.send(element, x)

    return (
        functools.partial(each_few, sent_at_once, send_few),
        # An element may need another's words, as those of `out` need the lse's.
        functools.partial(
            each_few, WORDS_AT_ONCE // (2 * buffers.num_ranks), functools.partial(receive, received=exchange.received)
        ),
    )


def _merging(out_ref, lse_ref, merged_ref, merged_lse_ref):
    """Returns the purpose that merges states."""
    count, place, receive = merged_results(*writing(merged_ref, merged_lse_ref))

    def sent_of(element):
        output_tile, column, dim, is_lse = place(element)
        x = ops.widened(memref.load(out_ref, [output_tile, column, dim]))
        return arith.select(is_lse, memref.load(lse_ref, [output_tile, column]), x)

    return count, lambda elements: list(map(sent_of, elements)), receive


def writing(merged_ref, merged_lse_ref):
    """Returns the arguments of `merged_results` for results that are written to references."""

    def write(x, *place):
        memref.store(ops.narrowed(x, merged_ref), merged_ref, list(place))

    return ir.MemRefType(merged_ref.type).shape, write, lambda x, *place: memref.store(x, merged_lse_ref, list(place))


def merged_results(shape, write, write_lse):
    """Returns `(count, place, receive)` of an exchange of `out [output tiles, columns, H]` and lse.

    Columns vary fastest, as in LeanAttention's partial states, and lse comes after the H head dims.

    Args:
      shape: of out.
      write, write_lse: take a result, float32, and its indices.
    """
    f32 = ir.F32Type.get()
    at = functools.partial(arith.constant, ir.IndexType.get())
    output_tiles, columns, head_dim = shape

    def place(element):
        """Returns an element's output tile, column and head dim, and whether it is an lse (with the last head dim)."""
        column, rest = arith.remui(element, at(columns)), arith.divui(element, at(columns))
        output_tile, dim = arith.divui(rest, at(head_dim + 1)), arith.remui(rest, at(head_dim + 1))
        is_lse = arith.cmpi(arith.CmpIPredicate.eq, dim, at(head_dim))
        return output_tile, column, arith.minui(dim, at(head_dim - 1)), is_lse

    def lse_of(where):
        """Returns the element that is the lse of an element's row."""
        output_tile, column, *_ = where
        lse_dim = arith.addi(arith.muli(output_tile, at(head_dim + 1)), at(head_dim))
        return arith.addi(arith.muli(lse_dim, at(columns)), column)

    def receive(elements, are_inside, received):
        wheres = list(map(place, elements))
        both = [x for element, where in zip(elements, wheres) for x in (element, lse_of(where))]
        words = received(both, [is_inside for is_inside in are_inside for _ in range(2)])
        for where, is_inside in zip(wheres, are_inside, strict=True):
            xs, lses = next(words), next(words)
            with mgpu.when(is_inside):
                write_merged(xs, lses, *where)

    def write_merged(xs, lses, output_tile, column, dim, is_lse):
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
            write_lse(merged, output_tile, column)
            scf.YieldOp([])
        with ir.InsertionPoint(branch.else_block):
            write(result, output_tile, column, dim)
            scf.YieldOp([])

    return output_tiles * columns * (head_dim + 1), place, receive


def _adding(x_ref, *refs):
    """Returns the purpose that adds, and adds the result to a residual if there is one."""
    *residual_refs, total_ref = refs

    def receive(elements, are_inside, received):
        residuals = [_loaded(ref)(elements) for ref in residual_refs]
        of_ranks = received(elements, are_inside)
        for element, is_inside, xs, *residual in zip(elements, are_inside, of_ranks, *residuals, strict=True):
            with mgpu.when(is_inside):
                total = functools.reduce(arith.addf, [*xs, *residual])
                memref.store(ops.narrowed(total, total_ref), total_ref, [element])

    return *ir.MemRefType(x_ref.type).shape, _loaded(x_ref), receive


def _gathering(x_ref, gathered_ref):
    """Returns the purpose that keeps the numbers of all ranks."""

    def receive(elements, are_inside, received):
        of_ranks = received(elements, are_inside)
        for element, is_inside, xs in zip(elements, are_inside, of_ranks, strict=True):
            with mgpu.when(is_inside):
                for r, x in enumerate(xs):
                    rank = arith.constant(ir.IndexType.get(), r)
                    memref.store(ops.narrowed(x, gathered_ref), gathered_ref, [rank, element])

    return *ir.MemRefType(x_ref.type).shape, _loaded(x_ref), receive


def _loaded(ref):
    """Returns the function that loads elements to send, as float32."""
    return lambda elements: [ops.widened(memref.load(ref, [element])) for element in elements]
