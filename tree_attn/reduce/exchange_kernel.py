"""The exchange of `reduction="fused"` as one Mosaic GPU kernel: all write their state to all, and merge what arrives.

Every 4 bytes of payload travel with the 4 bytes of the step's number in one 8-byte store, which memory takes whole. Who
reads a word with the right number has the payload: no flag that follows the data, no fence, one way over the link.

`_exchange` per thread:
1. step = 1 + the number of exchanges before, kept in this device's own memory;
2. each element of this device's `(out, lse)` goes to slot `[step % 2, own rank]` of every device's buffer;
3. each element of every slot is read until its number is `step`, and merged in the order of ranks, so that all devices
   get the same bits.

Two slots per rank suffice: a device is in step n only if all others had begun step n - 1, and so had ended step n - 2,
whose slot step n overwrites. The model in `tests/reduce/exchange_model.py` says so for all interleavings.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref, scf

from tree_attn.ptx import asm

NUM_CTAS = 64  # in every exchange, for each counts steps by itself
THREADS = 128
WORD_BYTES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffers:
    """Where the devices' buffers are, as their addresses (`tree_attn.peer_memory`) and the kernel know it.

    table:     where the host finds the addresses of all ranks' buffers, and then its own rank, int64 `[num_ranks + 1]`
    capacity:  elements of one slot
    A buffer is 2 * num_ranks slots of `capacity` words of 8 bytes, then a step number per CTA.
    """

    table: int
    num_ranks: int
    capacity: int

    replace = dataclasses.replace

    @property
    def steps_offset(self) -> int:
        return 2 * self.num_ranks * self.capacity * WORD_BYTES

    @property
    def num_bytes(self) -> int:
        return self.steps_offset + NUM_CTAS * 4


@functools.partial(jax.jit, static_argnames="buffers")
def exchange(out, lse, rank, buffers: Buffers):
    """Merges `out [rows, H]` and float32 `lse [rows]` over all ranks.

    Args:
      rank: this device's, int32 `[1]`; None where a process has one device: then the table knows it, and two small
        kernels are spared.
    """
    body = functools.partial(_exchange, buffers)
    body.__name__ = "fused_exchange"
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    return plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct(out.shape, out.dtype), jax.ShapeDtypeStruct(lse.shape, jnp.float32)),
        grid=(NUM_CTAS,),
        grid_names=("cta",),
        compiler_params=params,
        kernel_name="fused_exchange",
    )(*([] if rank is None else [rank]), out, lse)


def _exchange(buffers: Buffers, *refs):
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
    def emit(_, *refs):
        (*rank_refs, out_ref, lse_ref, merged_ref, merged_lse_ref) = refs
        i32, i64, f32, index = ir.IntegerType.get_signless(32), _i64(), ir.F32Type.get(), ir.IndexType.get()
        rows, head_dim = ir.MemRefType(out_ref.type).shape
        dtype = ir.MemRefType(out_ref.type).element_type
        ranks = range(buffers.num_ranks)
        at = functools.partial(arith.constant, index)

        thread, cta = gpu.thread_id(gpu.Dimension.x), gpu.block_id(gpu.Dimension.x)
        with ir.InsertionPoint(_launch()):  # on the host, at every launch: the kernel gets the addresses as parameters
            pointer = ir.Type.parse("!llvm.ptr")
            entries = (_constant(buffers.table + WORD_BYTES * i) for i in range(buffers.num_ranks + 1))
            *bases, rank = [llvm.load(i64, llvm.inttoptr(pointer, entry)) for entry in entries]
        if rank_refs:
            rank = arith.extui(i64, memref.load(rank_refs[0], [at(0)]))
        own = bases[0]
        for r in ranks:
            own = arith.select(arith.cmpi(arith.CmpIPredicate.eq, rank, _constant(r)), bases[r], own)
        counter = _plus(own, _constant(buffers.steps_offset), arith.muli(_constant(4), arith.index_cast(i64, cta)))
        step = arith.addi(_load(counter, i32), arith.constant(i32, 1))
        parity = arith.extui(i64, arith.andi(step, arith.constant(i32, 1)))
        slot_bytes = buffers.capacity * WORD_BYTES
        slots = arith.muli(parity, _constant(buffers.num_ranks * slot_bytes))
        own_slot = _plus(slots, arith.muli(rank, _constant(slot_bytes)))

        first = arith.addi(thread, arith.muli(cta, at(THREADS)))
        stride, width = at(NUM_CTAS * THREADS), at(head_dim + 1)

        def each_element(body):
            loop = scf.ForOp(first, at(rows * (head_dim + 1)), stride)
            with ir.InsertionPoint(loop.body):
                element = loop.induction_variable
                row, column = arith.divui(element, width), arith.remui(element, width)
                body(element, row, column, arith.cmpi(arith.CmpIPredicate.eq, column, at(head_dim)))
                scf.YieldOp([])

        def send(element, row, column, is_lse):
            # Of lse's column the one before is read, and not sent.
            x = memref.load(out_ref, [row, arith.minui(column, at(head_dim - 1))])
            x = x if dtype == f32 else arith.extf(f32, x)
            x = arith.select(is_lse, memref.load(lse_ref, [row]), x)
            offset = _plus(own_slot, _words(element))
            for base in bases:
                _send(_plus(base, offset), x, step)

        each_element(send)
        mgpu.utils.warpgroup_barrier()  # all threads know the step before it is counted

        is_first = arith.cmpi(arith.CmpIPredicate.eq, thread, at(0))
        with mgpu.when(is_first):
            _store(counter, step)

        def merge(element, row, column, is_lse):
            lse_element = arith.addi(arith.muli(row, width), at(head_dim))
            received = [_plus(own, slots, _constant(r * slot_bytes)) for r in ranks]
            xs = [_receive(_plus(slot, _words(element)), step) for slot in received]
            lses = [_receive(_plus(slot, _words(lse_element)), step) for slot in received]
            top = functools.reduce(arith.maximumf, lses)
            # A finite stand-in where no rank has a key: exp(-inf - -inf) would be NaN.
            lowest = arith.constant(f32, float(np.finfo(np.float32).min))
            top = arith.select(arith.cmpf(arith.CmpFPredicate.OEQ, top, arith.constant(f32, -math.inf)), lowest, top)
            log2_e = arith.constant(f32, math.log2(math.e))
            weights = [asm("ex2.approx.f32 $0, $1;", f32, arith.mulf(arith.subf(x, top), log2_e)) for x in lses]
            total = functools.reduce(arith.addf, weights)
            summed = functools.reduce(arith.addf, [arith.mulf(w, x) for w, x in zip(weights, xs)])
            zero = arith.constant(f32, 0.0)
            is_empty = arith.cmpf(arith.CmpFPredicate.OEQ, total, zero)
            result = arith.select(is_empty, zero, arith.divf(summed, total))

            branch = scf.IfOp(is_lse, has_else=True)
            with ir.InsertionPoint(branch.then_block):
                log = arith.mulf(asm("lg2.approx.f32 $0, $1;", f32, total), arith.constant(f32, math.log(2)))
                merged = arith.select(is_empty, arith.constant(f32, -math.inf), arith.addf(top, log))
                memref.store(merged, merged_lse_ref, [row])
                scf.YieldOp([])
            with ir.InsertionPoint(branch.else_block):
                memref.store(result if dtype == f32 else arith.truncf(dtype, result), merged_ref, [row, column])
                scf.YieldOp([])

        each_element(merge)

    emit(*refs)


def _launch():
    """The launch of the kernel that is being written."""
    op = ir.InsertionPoint.current.block.owner
    while op.name != "gpu.launch":
        op = op.parent
    return op


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
