"""Columns and rows that the threads of a warpgroup write to shared memory, with as few barriers as can be.

Products by `wgmma` need them, for their weights, maxima and sums, and for values beyond a sequence's end. Pallas has
two barriers for every 8 columns in a reduction, and two around each store.
"""

import functools

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from tree_attn.kernels.interpreter import is_interpreted
from tree_attn.kernels.lean_layout import LeanShape
from tree_attn.kernels.mlir import asm_results, int32
from tree_attn.kernels.warps import (
    KEYS,
    LAYOUT,
    PER_COLUMN,
    WARPS,
    across_groups,
    address_of,
    element,
    fragmented,
    halves,
    of_thread,
    pair_of,
    store_floats,
    swizzled,
    thread,
)


def reduced(x, smem, number: int, *, is_sum: bool):
    """Returns the sum of each column of `[kv, cols]` over all warps' keys, or the largest, `[cols]`.

    Pallas' reductions have two barriers for each 8 columns. Here is one: what is read after it stays until another
    barrier, which the caller has before it reduces to the same place again.

    Args:
      smem: float32 `[places, 4, cols]`, in shared memory; number: of the place that this reduction takes.
    """
    if is_interpreted():
        return x.sum(axis=0) if is_sum else x.max(axis=0)
    _, cols = x.shape
    result = plgpu.ShapeDtypeStruct((cols,), jnp.float32, layout=PER_COLUMN)

    @plgpu.inline_mgpu(arg_types=(LAYOUT, plgpu.RefType()), return_type=result)
    def emit(_, x, smem):
        combine = arith.addf if is_sum else arith.maximumf
        warp, group, place = thread()
        # Of a thread's two columns in each 8, of warp 0.
        first = arith.addi(address_of(smem), arith.muli(place, int32(8)))
        first = arith.addi(first, int32(4 * WARPS * cols * number))
        of_warp = arith.addi(first, arith.muli(warp, int32(4 * cols)))
        pairs = [across_groups(both, combine) for both in of_thread(x, combine)]
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, group, int32(0))):
            for block, pair in enumerate(pairs):
                store_floats(arith.addi(of_warp, int32(32 * block)), pair)
        utils.warpgroup_barrier()
        out = []
        for block in range(cols // 8):
            at = [arith.addi(first, int32(4 * cols * i + 32 * block)) for i in range(WARPS)]
            read = [asm_results("ld.shared.v2.f32 {$0, $1}, [$2];", "ff", x) for x in at]
            out.append(pair_of(*(functools.reduce(combine, both) for both in zip(*read))))
        return fragmented(out, (cols,), PER_COLUMN)

    return emit(x, smem)


def store_transposed(ref, transforms, x, *, first_row: int = 0) -> None:
    """Stores `x^T` from column `first_row` on, rounded to the 16 bits of `ref`, in shared memory: without a barrier.

    Args:
      ref: `[cols, rows]`, with `transforms`.
      x: float32 `[rows, cols]`, of the layout WGMMA.
    """
    rows, cols = x.shape
    if is_interpreted():
        ref[:, first_row : first_row + rows] = x.T.astype(ref.dtype)
        return
    dtype = "bf16" if ref.dtype == jnp.bfloat16 else "f16"

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), LAYOUT))
    def emit(_, ref, x):
        tiled = ir.MemRefType(ref.type)
        warp, group, place = thread()
        lane = arith.addi(arith.muli(group, int32(4)), place)
        # Each thread names a row of 8 elements of a matrix, which is transposed: one column's of 8 rows of x.
        column, matrix = arith.andi(lane, int32(7)), arith.shrui(lane, int32(3))
        half, second = arith.andi(matrix, int32(1)), arith.shrui(matrix, int32(1))
        first_chunk = arith.addi(arith.muli(warp, int32(2)), half)
        registers = x.registers.reshape(rows // 64, cols // 8, 2)
        blocks = [(row, block) for block in range(cols // 8) for row in range(rows // 64)]
        for (row, block), *other in (blocks[i : i + 2] for i in range(0, len(blocks), 2)):
            pairs = [pair for at in ((row, block), *other) for pair in registers[at]]
            words = [halves(element(pair, 0), element(pair, 1), dtype) for pair in pairs]
            column_of, chunk_of = column, first_chunk
            for next_row, next_block in other:
                column_of = arith.addi(column_of, arith.muli(second, int32(8 * (next_block - block))))
                chunk_of = arith.addi(chunk_of, arith.muli(second, int32(8 * (next_row - row))))
            column_of = arith.addi(column_of, int32(8 * block))
            chunk_of = arith.addi(chunk_of, int32((64 * row + first_row) // 8))
            address = arith.addi(address_of(ref), swizzled(tiled, 2, column_of, chunk_of))
            of_words = ", ".join(f"${i + 1}" for i in range(len(words)))
            text = f"stmatrix.sync.aligned.m8n8.x{len(words)}.trans.shared.b16 [$0], {{{of_words}}};"
            asm_results(text, "", address, *words)

    emit(ref, x)


def store_per_column(ref, x, number: int = 0) -> None:
    """Stores float32 `[cols]`, alike in all warps, to row `number` of `ref`, in shared memory: without a barrier.

    Args:
      ref: `[rows, cols]` or `[cols]`.
    """
    (cols,) = x.shape
    if is_interpreted():
        at = ref if ref.ndim == 1 else ref.at[number]
        at[...] = x
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), PER_COLUMN))
    def emit(_, ref, x):
        warp, group, place = thread()
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, arith.addi(warp, group), int32(0))):
            for block, pair in enumerate(x.registers.flat):
                at = arith.addi(arith.muli(place, int32(8)), int32(4 * cols * number + 32 * block))
                store_floats(arith.addi(address_of(ref), at), pair)

    emit(ref, x)


def zero_others(value_smem, transforms, start, end, shape: LeanShape) -> None:
    """Puts zeros in place of the rows of a KV tile before `start` and from `end` on.

    Each warp does so for the rows that it reads in products by `mma.sync`. For others the caller awaits all warps.
    """
    scalar = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), scalar, scalar))
    def emit(_, values, start, end):
        warp, group, place = thread()
        lane = arith.addi(arith.muli(group, int32(4)), place)
        start, end = (x.registers.item() for x in (start, end))
        tiled, itemsize = ir.MemRefType(values.type), shape.key_itemsize
        chunks = shape.padded_head_dim * itemsize // 16
        # Tiles of head dims lie at constant distances, so that few addresses take registers.
        chunks_of_tile = chunks if len(tiled.shape) == 2 else itemsize * tiled.shape[-1] // 16
        tile_bytes = itemsize * tiled.get_strides_and_offset()[0][1]
        for block_kv in range(0, value_smem.shape[0], 64):
            row = arith.addi(arith.muli(warp, int32(KEYS)), arith.andi(lane, int32(15)))
            row = arith.addi(row, int32(block_kv))
            is_before = arith.cmpi(arith.CmpIPredicate.slt, row, start)
            is_beyond = arith.cmpi(arith.CmpIPredicate.sge, row, end)
            with mgpu.when(arith.ori(is_before, is_beyond)):
                for chunk in range(0, chunks_of_tile, 2):
                    chunk_of_lane = arith.addi(int32(chunk), arith.shrui(lane, int32(4)))
                    address = arith.addi(address_of(values), swizzled(tiled, itemsize, row, chunk_of_lane))
                    for tile in range(chunks // chunks_of_tile):
                        at = arith.addi(address, int32(tile * tile_bytes))
                        asm_results("st.shared.v4.b32 [$0], {$1, $1, $1, $1};", "", at, int32(0))
        if shape.uses_mma:  # a copy may follow, and the warp's other threads read
            asm_results("fence.proxy.async.shared::cta; bar.warp.sync -1;", "")

    emit(value_smem, start, end)
