"""Results that all CTAs of a chain get by words in memory, for which they need not meet.

A number travels with the step's in a word of 8 bytes, as between devices (`exchange_words.py`). Who reads the word
knows by its step whether the number is there. So a result takes one trip to the next product's x. A meeting takes
several: until all is written, to the count, from the count, and for the copy. But words are four times the bytes, and
CTAs that read all of x so read weights more slowly. So they do for the stages whose weights wait already. They copy the
rest of x, for which they have met by then.

The words are a buffer of one rank. A CTA reads the number of steps once, when a launch begins, and counts on. It writes
the number when it has all that it reads. Who sends of step n has got all results of step n - 1. Those who made these
had got all of step n - 2, if they receive x for no tile of which they send nothing
(`few_rows_chain_layout.tells_all_reads`). So two slots suffice, as between devices. Attention is another matter: a CTA
gets the heads that it attends with, if any. But some CTA attends with each head, also where nothing is to be seen. So
who has got attention's result knows that all heads have been read. On several devices a CTA reads a part of that result
only, and no more is sent. Whose sum over devices is there knows that all have got their parts.

A sum over devices may be read as what each of them adds: from the words of its exchange, which all devices write, and
which later exchanges overwrite (`few_rows_chain_layout.comes_in_parts`).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, scf, vector

from tree_attn.kernels import mlir as ops
from tree_attn.kernels.epilogue import PARTIALS_AT_ONCE, SCALAR, Epilogue, inline
from tree_attn.kernels.exchange_words import (
    MIN_CTAS,
    THREADS,
    WORDS_AT_ONCE,
    Buffers,
    Transport,
    count_step,
    locate,
    transport,
)
from tree_attn.kernels.few_rows_layout import GRAIN, IN_MULTIPLE, FewRowsConfig, FewRowsShape
from tree_attn.kernels.registers import tiling

MAX_ROWS = 4  # of a result that is broadcast: of more, words are too many for each CTA to read


def local_buffers(num_elements: int, num_partials: int = 0, partial_size: int = 0) -> Buffers:
    """Returns the layout of words.

    Args:
      num_elements: of a result, at the most.
      num_partials, partial_size: partial states of attention, and the words of each.
    """
    # The last read of an output tile's partials may reach beyond them.
    partial_words = (num_partials + PARTIALS_AT_ONCE) * partial_size
    return Buffers(table=None, num_ranks=1, capacity=num_elements, partial_words=partial_words)


def words_of(buffers: Buffers):
    """Returns an array for them, which is zero before a program's first launch, and which kernels write.

    To XLA it is constant, and arrays of one shape may be one. So no other array has such a shape, and those of one
    shape have one capacity.
    """
    words = -(-buffers.num_bytes // ops.WORD_BYTES)
    return jnp.zeros((1, -(-words // buffers.capacity), buffers.capacity, 1, 2), jnp.uint32)


@dataclasses.dataclass(frozen=True)
class Broadcast:
    """A result that is broadcast, `[rows, features]`, float32 in words: whole, or as what each device adds to it.

    words_ref, buffers: of `words_of`; where devices add, `rank_ref` and buffers of their exchange
    step: its number, int32.
    """

    words_ref: Any
    buffers: Buffers
    step: Any
    features: int

    @property
    def operands(self) -> list[tuple[Any, Any]]:
        """Returns what an operation in a kernel needs to send: values and their layouts."""
        return [*([] if self.words_ref is None else [(self.words_ref, plgpu.RefType())]), (self.step, SCALAR)]

    def transport(self, *values) -> Transport:
        """Returns the functions that send and receive, of the values of `operands`."""
        *words, step = values
        return transport(self.buffers, locate(self.buffers, *(words or [None])), step.registers.item())

    def load(self, address):
        """Returns a word that this device or another may be writing meanwhile."""
        return (ops.load_relaxed if self.buffers.table is None else ops.load_from_peers)(address)


@dataclasses.dataclass(frozen=True)
class BroadcastEnd(Epilogue):
    """Attention's end within a chain: all CTAs get the result, merged with other devices' if there are any.

    result: output tiles, columns without padding, and head dim
    num_kv_heads: of each sequence; a device sends those of its part
    """

    result: tuple[int, int, int]
    num_kv_heads: int

    @property
    def num_exchanging(self) -> int:
        """Returns how many CTAs exchange: each must have a part of the output product, or its words may be overwritten.

        It also reads what other devices keep. Only its part of the sum that follows says that it has.
        """
        return min(MIN_CTAS, self.num_ctas)

    def end(self, rank_ref, step, spans_ref, broadcast: Broadcast, padded_head_dim: int) -> None:
        """Merges, and broadcasts; a step with other devices is counted by the caller.

        Args:
          rank_ref: as of `exchange_words.locate`.
          spans_ref: the partial states of each output tile (`lean_layout.partial_spans`).
        """
        count, (_, columns, head_dim) = math.prod(self.result), self.result

        def emit(place, step, spans_ref, words, own_step):
            step, send = step.registers.item(), broadcast.transport(words, own_step).send
            at = functools.partial(arith.constant, ir.IndexType.get())

            def write(x, output_tile, column, dim):
                column = arith.addi(arith.muli(output_tile, at(columns)), column)
                with mgpu.when(self._is_of_rank(output_tile, place.rank)):
                    send(arith.addi(arith.muli(column, at(head_dim)), dim), x)

            if self.buffers.table is not None:
                self.exchange(place, step, spans_ref, (self.result, write, lambda *_: None), padded_head_dim)
                return
            merged = self.merged(place, step, spans_ref, self.result, padded_head_dim)
            is_lse = arith.constant(ir.IntegerType.get_signless(1), 0)
            first = arith.addi(thread(), arith.muli(gpu.block_id(gpu.Dimension.x), at(THREADS)))
            loop = scf.ForOp(first, at(count), at(self.num_ctas * THREADS))
            with ir.InsertionPoint(loop.body):
                column, dim = (f(loop.induction_variable, at(head_dim)) for f in (arith.divui, arith.remui))
                output_tile, column = (f(column, at(columns)) for f in (arith.divui, arith.remui))
                (x,) = merged([(output_tile, column, dim, is_lse)])
                send(loop.induction_variable, x)
                scf.YieldOp([])

        operands = [(step, SCALAR), (spans_ref, plgpu.RefType()), *broadcast.operands]
        inline(self.buffers, emit, rank_ref, *operands)

    def _is_of_rank(self, output_tile, rank):
        """Returns whether an output tile, an index, is of the KV heads that a rank's output product reads."""
        at = functools.partial(arith.constant, ir.IndexType.get())
        kv_head = arith.remui(output_tile, at(self.num_kv_heads))
        of_rank = arith.divui(kv_head, at(self.num_kv_heads // self.buffers.num_ranks))
        return arith.cmpi(arith.CmpIPredicate.eq, arith.index_cast(ops.i64(), of_rank), rank)


def clear(smem) -> None:
    """Writes zeros to shared memory, by a warpgroup."""
    num_bytes = math.prod(smem.shape) * jnp.dtype(smem.dtype).itemsize
    chunk = 16

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(_transforms(smem)),))
    def emit(_, smem):
        at = functools.partial(arith.constant, ir.IndexType.get())
        base = shared_address(smem)
        loop = scf.ForOp(thread(), at(num_bytes // chunk), at(THREADS))
        with ir.InsertionPoint(loop.body):
            offset = arith.muli(arith.index_cast(ops.i32(), loop.induction_variable), ops.int32(chunk))
            text = "{ .reg .b32 zero; mov.b32 zero, 0; st.shared.v4.b32 [$0], {zero, zero, zero, zero}; }"
            ops.asm(text, None, arith.addi(base, offset))
            scf.YieldOp([])
        ops.asm("fence.proxy.async.shared::cta;", None)  # copies by the other proxy follow
        utils.warpgroup_barrier()

    emit(smem)


def write_shared(address, x) -> None:
    """Writes a float32 to shared memory as bfloat16."""
    ops.asm("{ .reg .b16 x; cvt.rn.bf16.f32 x, $1; st.shared.b16 [$0], x; }", None, address, x)


def peek_x(broadcast: Broadcast, column, *, shape: FewRowsShape, config: FewRowsConfig):
    """Reads the words of a stage's x once, and returns what they were; nothing waits for that yet.

    Args:
      column: the first of its in-features.
      shape: of the product whose x it is.
    """
    size = _num_words(broadcast, shape, config)
    peeked = plgpu.ShapeDtypeStruct(size, jnp.int32, layout=plgpu.Layout.WG_STRIDED(size, vec_size=1))
    arguments, layouts = _arguments(broadcast, column)

    @plgpu.inline_mgpu(arg_types=layouts, return_type=(peeked, peeked))
    def emit(_, *values):
        found = map(broadcast.load, _addresses(broadcast, values, shape, config))
        of = mgpu.WGStridedFragLayout(size, 1)
        in_registers = lambda xs: mgpu.FragmentedArray(
            _registers=np.array([vector.broadcast(of.registers_element_type(ops.i32()), x) for x in xs], dtype=object),
            _layout=of, _is_signed=True,
        )  # fmt: skip
        return tuple(map(in_registers, zip(*map(_halves, found))))

    return emit(*arguments)


def settle_x(broadcast: Broadcast, peeked, smem, column, *, shape: FewRowsShape, config: FewRowsConfig) -> None:
    """Reads words until they bear the step, and writes a stage's x to shared memory, as copies would.

    What devices add to x is added in the order of ranks.

    Args:
      peeked: of `peek_x`; others as there.
      smem: a stage of `x_smem`, whose rows that pad those of x are zero already.
    """
    layout = plgpu.Layout.WG_STRIDED(_num_words(broadcast, shape, config), vec_size=1)
    arguments, layouts = _arguments(broadcast, column)

    of_x = plgpu.RefType(() if config.is_compact else _transforms(smem))

    @plgpu.inline_mgpu(arg_types=(of_x, *layouts, layout, layout))
    def emit(_, smem, *values):
        *values, payloads, numbers = values
        peeked, (*_, step, _) = (payloads, numbers), values
        addresses, step = _addresses(broadcast, values, shape, config), step.registers.item()
        first = [vector.extract(x, [], [0]) for array in peeked for x in array.registers]
        sums = awaited_sums(broadcast, addresses, first, step)
        base, column = shared_address(smem), arith.index_cast(ops.i32(), thread())
        for block, row in _words_of_stage(shape, config):
            target = arith.addi(base, place_of_x(ops.int32(block * config.x_rows(shape) + row), column, config))
            write_shared(target, next(sums))
        if not config.is_compact:
            ops.asm("fence.proxy.async.shared::cta;", None)  # tensor cores read by the other proxy

    emit(smem, *arguments, *peeked)


def awaited_sums(broadcast: Broadcast, addresses: list, first: list, step) -> Iterator:
    """Emits reads of words until all bear the step, and yields what all ranks add to each element, float32.

    Args:
      addresses: of words, for each element those of all ranks; first: what they were once, first their payloads, i32.
    """
    count = len(addresses)
    until = scf.WhileOp([ops.i32()] * 2 * count, first)
    with ir.InsertionPoint(until.before.blocks.append(*[ops.i32()] * 2 * count)) as point:
        found = list(point.block.arguments)
        is_missing = arith.constant(ir.IntegerType.get_signless(1), 0)
        for number in found[count:]:
            is_missing = arith.ori(is_missing, arith.cmpi(arith.CmpIPredicate.ne, number, step))
        scf.ConditionOp(is_missing, found)
    with ir.InsertionPoint(until.after.blocks.append(*[ops.i32()] * 2 * count)):
        again = [_halves(broadcast.load(address)) for address in addresses]
        scf.YieldOp([x for half in zip(*again) for x in half])
    payloads = (arith.bitcast(ir.F32Type.get(), x) for x in until.results[:count])
    ranks = broadcast.buffers.num_ranks
    return (functools.reduce(arith.addf, itertools.islice(payloads, ranks)) for _ in range(count // ranks))


def steps_at_once(broadcast: Broadcast, *, shape: FewRowsShape, config: FewRowsConfig) -> int:
    """Returns of how many stages words are read together, by registers."""
    return max(1, WORDS_AT_ONCE * THREADS // math.prod(_num_words(broadcast, shape, config)))


def _words_of_stage(shape: FewRowsShape, config: FewRowsConfig) -> list[tuple[int, int]]:
    """Returns block and row of each word that a thread has of a stage: it has an in-feature of each block."""
    assert config.block_in == THREADS
    return [(block, row) for block in range(config.slabs * config.stack) for row in range(shape.rows)]


def _num_words(broadcast: Broadcast, shape: FewRowsShape, config: FewRowsConfig) -> tuple[int]:
    return (THREADS * len(_words_of_stage(shape, config)) * broadcast.buffers.num_ranks,)


def _arguments(broadcast: Broadcast, column) -> tuple[list, tuple]:
    """Returns what `_addresses` takes the values of, and their layouts."""
    operands = [*broadcast.operands, (jnp.asarray(column, jnp.int32), SCALAR)]
    arguments, layouts = zip(*operands)
    return list(arguments), layouts


def _addresses(broadcast: Broadcast, values, shape: FewRowsShape, config: FewRowsConfig) -> list:
    """Returns the addresses of a thread's words of a stage, of all ranks for each; `values` are those in the kernel."""
    *values, column = values
    index = ir.IndexType.get()
    feature = arith.addi(arith.index_cast(index, column.registers.item()), thread())
    addresses_of = broadcast.transport(*values).addresses
    first_of = lambda block, row: arith.constant(index, row * broadcast.features + block * config.block_in)
    places = [arith.addi(feature, first_of(*place)) for place in _words_of_stage(shape, config)]
    return [address for place in places for address in addresses_of(place)]


def _halves(word) -> tuple:
    """Returns payload and number of a word, i32."""
    return arith.trunci(ops.i32(), word), arith.trunci(ops.i32(), arith.shrui(word, ops.constant(32)))


def count_steps(broadcast: Broadcast, num_ctas: int) -> None:
    """Counts the steps of a launch, of which this is the last, when the CTA has got all that it reads."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR))
    def emit(_, words, step):
        count_step(broadcast.buffers, locate(broadcast.buffers, words), step.registers.item(), num_ctas)

    emit(*(value for value, _ in broadcast.operands))


def place_of_x(row, column, config: FewRowsConfig):
    """Returns the bytes before an element of a stage's x, `[rows, block_in]`, in tiles, or in rows if it is compact."""
    if config.is_compact:
        return arith.addi(arith.muli(row, ops.int32(config.block_in * 2)), arith.muli(column, ops.int32(2)))
    return place_in_tiles(row, column, config.block_in)


def place_in_tiles(row, column, columns: int):
    """Returns the bytes before an element of bfloat16 `[rows, columns]` in tiles of 8 rows and 128 bytes, swizzled."""
    row_bytes, of_tile = 128, 64
    times, plus = lambda x, factor: arith.muli(x, ops.int32(factor)), arith.addi
    tile = plus(times(arith.divui(row, ops.int32(GRAIN)), columns // of_tile), arith.divui(column, ops.int32(of_tile)))
    row, within = arith.remui(row, ops.int32(GRAIN)), times(arith.remui(column, ops.int32(of_tile)), 2)
    return plus(times(tile, GRAIN * row_bytes), plus(times(row, row_bytes), arith.xori(within, times(row, 16))))


def _transforms(smem):
    return tiling(smem.dtype, IN_MULTIPLE)


def thread():
    """Returns the thread's number in its warpgroup, an index."""
    return arith.remui(gpu.thread_id(gpu.Dimension.x), arith.constant(ir.IndexType.get(), THREADS))


def shared_address(ref):
    """Returns the address of shared memory, i32, in a kernel."""
    return llvm.ptrtoint(ops.i32(), utils.memref_ptr(ref))
