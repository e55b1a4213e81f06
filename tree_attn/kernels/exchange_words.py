"""Words by which devices exchange numbers: their buffers, the steps of all exchanges, sending and receiving.

Every 4 bytes of payload travel with the 4 bytes of the step's number in one 8-byte store, which memory takes whole. A
reader that sees the right number has the payload. So there is no flag after the data, no fence, and one trip over the
link.

A step's number is 1 + the number of exchanges before it, which each device counts in its own memory. All exchanges of a
process share buffers and steps. In a step threads write each element of this device to buffer slot `[step % 2, rank]`
of all devices. They read each element of every slot until its number is the step's.

Two buffer slots per rank suffice. A device is in step n only if all others had begun step n - 1. They had then ended
step n - 2, whose slots step n overwrites. `tests/kernels/exchange_model.py` explores all interleavings.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from jax.experimental.mosaic import gpu as mgpu
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffers:
    """The devices' buffers: their addresses (`tree_attn.reduce.peer_memory`) and their layout.

    table:          address, in host memory, of the addresses of all ranks' buffers and of this process's rank,
                    uint64 `[num_ranks + 1]`; None: there is one rank, and a kernel gets its buffer as an argument
    capacity:       elements of one slot
    num_ctas:       CTAs that exchange; one more must fit a device, so there are more multiprocessors
    partial_words:  for the device's partial states
    first:          elements of a slot before the first of the exchange

    A buffer is `2 * num_ranks` slots of `capacity` words of 8 bytes. Then comes the number of exchanges so far, once
    for each of `MAX_CTAS` CTAs. Last come `partial_words`.
    """

    table: int | None
    num_ranks: int
    capacity: int
    num_ctas: int = MIN_CTAS
    partial_words: int = PARTIAL_WORDS
    first: int = 0

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
    if buffers.first > 0:
        slots = ops.plus(slots, ops.constant(buffers.first * ops.WORD_BYTES))
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
        last = arith.constant(ir.IndexType.get(), buffers.capacity - buffers.first - 1)
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
