"""The threads of a warpgroup one by one, in PTX: Pallas' operations are for all of them at once.

A warp's 32 threads are eight groups of four, and a thread has a place in its group. Of an array of the layout `LAYOUT`
a thread has two neighbours of every 8 columns. Its group's number is the row's, of 8. So `mma.sync` and `wgmma` lay out
their results.
"""

import functools

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from tree_attn.kernels.interpreter import is_interpreted
from tree_attn.kernels.mlir import asm_results, i32, int32

WARPS, THREADS = 4, 128
KEYS = 16  # of a warp, among 64
LAYOUT, PER_COLUMN = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(0)


def await_all() -> None:
    """Waits until all warps have come here, and shows each what the others wrote to shared memory."""
    if is_interpreted():
        plgpu.commit_smem()
        return
    plgpu.inline_mgpu()(lambda _: utils.warpgroup_barrier())()


def thread():
    """Returns warp, group and place of this thread.

    They are read anew each time, so that no address that is seldom needed keeps a register all along the loops.
    """
    (number,) = asm_results("mov.u32 $0, %tid.x;", "r")
    return places(number)


def places(number):
    """Returns warp, group and place of the thread of this number."""
    bits = lambda shift, mask: arith.andi(arith.shrui(number, int32(shift)), int32(mask))
    return bits(5, WARPS - 1), bits(2, 7), bits(0, 3)


def element(x, i: int = 0):
    """Returns element `i` of a vector."""
    return vector.extract(x, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i]))


def pair_of(first, second):
    """Returns two values as a vector."""
    return vector.from_elements(ir.VectorType.get((2,), first.type), [first, second])


def address_of(ref):
    """Returns the address of a reference to shared memory."""
    return llvm.ptrtoint(i32(), utils.memref_ptr(ref))


def store_floats(address, pair) -> None:
    """Writes a pair of float32 to shared memory."""
    asm_results("st.shared.v2.f32 [$0], {$1, $2};", "", address, *(element(pair, i) for i in range(2)))


def halves(low, high, dtype: str = "f16"):
    """Returns two float32 rounded to 16 bits each, in one word."""
    return asm_results(f"cvt.rn.{dtype}x2.f32 $0, $2, $1;", "r", low, high, moves=True)[0]


def shuffled(x, lane, plus):
    """Returns the value that thread `lane + plus` of the warp has."""
    bits = arith.bitcast(i32(), x)
    (out,) = asm_results("shfl.sync.idx.b32 $0, $1, $2, 31, -1;", "r", bits, arith.addi(lane, plus))
    return arith.bitcast(x.type, out)


def across(x, distance: int, combine):
    """Returns the combination with the value of the thread at a distance, a power of two."""
    return combine(x, asm_results(f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, -1;", "f", x)[0])


def of_thread(x, combine):
    """Yields the two reductions over a thread's keys of each 8 columns."""
    kv, cols = x.shape
    registers = x.registers.reshape(kv // 64, cols // 8, 2)
    for block in range(cols // 8):
        pairs = list(registers[:, block].flat)
        yield [functools.reduce(combine, [element(pair, i) for pair in pairs]) for i in range(2)]


def across_groups(both, combine):
    """Returns the reductions of two values over the warp's threads of one place, as a pair."""
    for distance in (4, 8, 16):
        both = [across(x, distance, combine) for x in both]
    return pair_of(*both)


def swizzled(tiled, itemsize: int, row, chunk):
    """Returns the offset in bytes of a row's chunk of 16 bytes, in `[rows / 8, tiles, 8, width]` or in plain rows."""
    if len(tiled.shape) == 2:
        return arith.addi(arith.muli(row, int32(itemsize * tiled.shape[1])), arith.muli(chunk, int32(16)))
    (by_tile_row, by_tile, _, _), _ = tiled.get_strides_and_offset()
    width = itemsize * tiled.shape[-1]
    tile, chunk = (f(chunk, int32(width // 16)) for f in (arith.divui, arith.remui))
    tile_row, row = (f(row, int32(8)) for f in (arith.divui, arith.remui))
    within = arith.addi(arith.muli(row, int32(width)), arith.muli(chunk, int32(16)))
    within = arith.xori(within, arith.andi(arith.shrui(within, int32(3)), int32(width - 16)))
    by_tile_row, by_tile = (int32(itemsize * x) for x in (by_tile_row, by_tile))
    return arith.addi(arith.addi(arith.muli(tile_row, by_tile_row), arith.muli(tile, by_tile)), within)


def bag(count: int):
    """Returns the layout of `count` registers of each thread."""
    return plgpu.Layout.WG_STRIDED((THREADS * count,), vec_size=1)


def bagged(words):
    """Returns words of each thread as an array that Pallas passes on, of the layout `bag`."""
    vectors = [vector.broadcast(ir.VectorType.get((1,), x.type), x) for x in words]
    layout, is_signed = bag(len(words)).to_mgpu(), None if words[0].type == ir.F32Type.get() else True
    return mgpu.FragmentedArray(_registers=np.array(vectors, dtype=object), _layout=layout, _is_signed=is_signed)


def fragmented(registers, shape, layout):
    """Returns registers of each thread as an array of a shape and layout."""
    layout = layout.to_mgpu()
    array = np.empty(len(registers), dtype=object)
    array[:] = registers
    return mgpu.FragmentedArray(
        _registers=array.reshape(layout.registers_shape(tuple(shape))), _layout=layout, _is_signed=None
    )
