"""Queries, keys and values of new tokens, as attention within a chain gets them: by words of the product before it.

A CTA receives what it attends with: of an output tile the queries, and the new key and value of its KV head. For the
cache these go to memory too, where nothing waits for them. So a KV tile may be copied without them: what its row of the
new token holds then is anything. They are written over it in shared memory.
"""

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from tree_attn.kernels import mlir as ops
from tree_attn.kernels.epilogue import SCALAR
from tree_attn.kernels.exchange_words import THREADS
from tree_attn.kernels.few_rows_broadcast import Broadcast, place_in_tiles, shared_address, thread, write_shared
from tree_attn.kernels.registers import tiling


def new_scratch(head_dim: int, dtype) -> plgpu.SMEM:
    """Returns the shared memory of a new token's key and value."""
    return plgpu.SMEM((2 * head_dim,), dtype)


def receive_heads(broadcast: Broadcast, first, query_smem, new_smem, *, group: int) -> None:
    """Waits for the words of an output tile's heads, and writes them to shared memory.

    Args:
      broadcast: of the heads, `[B, K, G + 2, H]`; first: the number of the first of them, int32.
      query_smem: bfloat16 `[cols, H]`, whose columns from G on are zero already; new_smem: of `new_scratch`.
      group: G.
    """
    head_dim, dtype = query_smem.shape[-1], query_smem.dtype
    count = (group + 2) * head_dim

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(tiling(dtype, head_dim)), *[plgpu.RefType()] * 2, SCALAR, SCALAR))
    def emit(_, query, new, words, step, first):
        elements = [arith.addi(thread(), _index(start)) for start in range(0, count, THREADS)]
        are_wanted = [arith.cmpi(arith.CmpIPredicate.ult, element, _index(count)) for element in elements]
        first = arith.index_cast(ir.IndexType.get(), first.registers.item())
        received = broadcast.transport(words, step).received(
            [arith.addi(first, element) for element in elements], are_wanted
        )
        bases = shared_address(query), shared_address(new)
        for element, is_wanted, (x,) in zip(elements, are_wanted, received, strict=True):
            element = arith.index_cast(ops.i32(), element)
            member, feature = (f(element, ops.int32(head_dim)) for f in (arith.divui, arith.remui))
            of_query = arith.addi(bases[0], place_in_tiles(member, feature, head_dim))
            of_new = arith.addi(bases[1], arith.muli(arith.subi(element, ops.int32(group * head_dim)), ops.int32(2)))
            is_query = arith.cmpi(arith.CmpIPredicate.ult, member, ops.int32(group))
            with mgpu.when(is_wanted):
                write_shared(arith.select(is_query, of_query, of_new), x)
        ops.asm("fence.proxy.async.shared::cta;", None)  # tensor cores read by the other proxy

    emit(query_smem, new_smem, broadcast.words_ref, broadcast.step, first)


def write_over(new_smem, kv_smem, rows) -> None:
    """Writes the new key and value over their rows of a KV tile, whose copies have arrived.

    Args:
      kv_smem: of all stages, `[rows, H]`; rows: of the key and of the value, int32.
    """
    head_dim, dtype = kv_smem.shape[-1], kv_smem.dtype

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(tiling(dtype, head_dim)), SCALAR, SCALAR))
    def emit(_, new, kv, *rows):
        utils.warpgroup_barrier()  # other threads have received what this one writes
        source, target = shared_address(new), shared_address(kv)
        for start in range(0, 2 * head_dim, THREADS):
            element = arith.addi(arith.index_cast(ops.i32(), thread()), ops.int32(start))
            is_key = arith.cmpi(arith.CmpIPredicate.ult, element, ops.int32(head_dim))
            row = arith.select(is_key, *(row.registers.item() for row in rows))
            place = arith.addi(target, place_in_tiles(row, arith.remui(element, ops.int32(head_dim)), head_dim))
            text = "{ .reg .b16 x; ld.shared.b16 x, [$1]; st.shared.b16 [$0], x; }"
            ops.asm(text, None, place, arith.addi(source, arith.muli(element, ops.int32(2))))
        ops.asm("fence.proxy.async.shared::cta;", None)
        utils.warpgroup_barrier()  # all have read it: the next output tile's may come

    emit(new_smem, kv_smem, *rows)


def _index(value: int):
    return arith.constant(ir.IndexType.get(), value)
