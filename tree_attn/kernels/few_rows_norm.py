"""RMSNorm within a product of few rows: each stage's x is multiplied by the norm's scale, and its squares are added up.

All is by element, in place: a thread reads and writes its own elements of shared memory. So a stage takes one barrier,
that before tensor cores read x. A thread has a feature of each block, of all rows but those that pad x. Threads add
their squares up when a tile has been multiplied.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from tree_attn.kernels import mlir as ops
from tree_attn.kernels import warps
from tree_attn.kernels.few_rows_broadcast import place_of_x, shared_address, thread
from tree_attn.kernels.few_rows_layout import GRAIN, IN_MULTIPLE, TENSOR_ROWS, FewRowsConfig, FewRowsShape
from tree_attn.kernels.few_rows_results import LAYOUT
from tree_attn.kernels.interpreter import is_interpreted
from tree_attn.kernels.registers import full, load, store_transposed, tiling, transposable_layout
from tree_attn.kernels.warps import THREADS, WARPS

ELEMENTS_AT_ONCE = 8  # that a thread reads before it writes one


def rows_at_once(config: FewRowsConfig) -> int:
    """Returns of how many rows the threads have an element at a time: of two, where a block is narrower than they."""
    return -(-THREADS // config.block_in)


def num_sums(shape: FewRowsShape, config: FewRowsConfig) -> int:
    """Returns how many sums of squares a thread keeps, each of one row."""
    return -(-shape.rows // rows_at_once(config))


def squares_scratch(shape: FewRowsShape, config: FewRowsConfig) -> plgpu.SMEM:
    """Returns the shared memory by which warps add up squares."""
    return plgpu.SMEM((WARPS * num_sums(shape, config),), jnp.float32)


def no_squares(shape: FewRowsShape, config: FewRowsConfig):
    """Returns zeros to which each thread adds squares, of the layout `warps.bag`; None where there is no norm."""
    if shape.eps is None:
        return None
    if is_interpreted():
        return full(0.0, (config.block_in, shape.columns), transposable_layout())
    count = num_sums(shape, config)
    return full(0.0, (THREADS * count,), warps.bag(count))


def scaled(x_smem, scale_smem, squares, shape: FewRowsShape, config: FewRowsConfig):
    """Multiplies a stage's x by the norm's scale, and returns the squares with those of what x was.

    Args:
      x_smem: of the stage, as `few_rows_moves.ring_scratch` has it; scale_smem: `[blocks, block_in]`.
      squares: of `no_squares`, or of the stage before.
    """
    if is_interpreted():
        for block in range(config.slabs * config.stack):
            of_block = x_smem.at[block * shape.columns : (block + 1) * shape.columns]
            squares = squares + _interpreted_scale(of_block, scale_smem.at[block], shape)
        return squares
    layout = warps.bag(num_sums(shape, config))
    result = plgpu.ShapeDtypeStruct(squares.shape, jnp.float32, layout=layout)

    of_x = plgpu.RefType(() if config.is_compact else tiling(x_smem.dtype, IN_MULTIPLE))

    @plgpu.inline_mgpu(arg_types=(of_x, plgpu.RefType(), layout), return_type=result)
    def emit(_, x_smem, scale_smem, squares):
        bases, sums = (shared_address(x_smem), shared_address(scale_smem)), _elements(squares)
        return warps.bagged(multiplied(bases, sums, shape, config))

    return emit(x_smem, scale_smem, squares)


def multiplied(bases, sums, shape: FewRowsShape, config: FewRowsConfig) -> list:
    """Emits what a thread does with its elements of all blocks, and returns their sums of squares.

    Args:
      bases: addresses of the stage's x and scale.
      sums: of each of the thread's rows, of stages before.
    """
    width = min(config.block_in, THREADS)
    number = arith.index_cast(ops.i32(), thread())
    within, first_row = (f(number, ops.int32(width)) for f in (arith.remui, arith.divui))
    distances = [distances_of(block, shape, config) for block in range(config.slabs * config.stack)]
    elements = []  # the number of the sum, addresses in the first block, and distances from there
    for first_feature in range(0, config.block_in, THREADS):
        feature = arith.addi(within, ops.int32(first_feature))
        of_scale = arith.addi(bases[1], arith.muli(feature, ops.int32(2)))
        for i in range(len(sums)):
            tile, row = divmod(i * rows_at_once(config), GRAIN)
            row = arith.addi(first_row, ops.int32(row))
            of_x = arith.addi(bases[0], place_of_x(row, feature, config))
            to_tile = tile * GRAIN * config.block_in * 2  # fixed, too: a thread keeps addresses of one tile
            elements += [(i, (of_x, of_scale), (to_x + to_tile, to_scale)) for to_x, to_scale in distances]
    sums = list(sums)
    for first in range(0, len(elements), ELEMENTS_AT_ONCE):
        some = elements[first : first + ELEMENTS_AT_ONCE]
        loaded = [[_load(*at) for at in zip(*of_both)] for _, *of_both in some]
        for (i, (address, _), (distance, _)), (x, scale) in zip(some, loaded, strict=True):
            if shape.adds_one:
                scale = arith.addf(scale, arith.constant(ir.F32Type.get(), 1.0))
            _store(address, distance, arith.mulf(x, scale))
            sums[i] = arith.addf(sums[i], arith.mulf(x, x))
    return sums


def totals(squares, smem, shape: FewRowsShape, config: FewRowsConfig):
    """Returns the sum of each row's squares, float32 `[64, cols]`.

    Args:
      squares: of the last stage; smem: of `squares_scratch`.
    """
    size = (TENSOR_ROWS, shape.columns)
    if is_interpreted():
        return lax.broadcast_in_dim(squares.sum(axis=0), size, [1])

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), warps.bag(num_sums(shape, config))))
    def leave(_, smem, squares):
        leave_sums(shared_address(smem), _elements(squares))

    @plgpu.inline_mgpu(
        arg_types=(LAYOUT, plgpu.RefType()), return_type=plgpu.ShapeDtypeStruct(size, jnp.float32, layout=LAYOUT)
    )
    def read(_, zeros, smem):
        base = shared_address(smem)
        of_column = lambda _, place: left_sum(base, place[1], shape, config)
        return zeros.foreach(of_column, create_array=True)

    leave(smem, squares)
    warps.await_all()
    return read(full(0.0, size, LAYOUT), smem)


def leave_sums(base, sums) -> None:
    """Emits what a thread does to add up its warp's sums, and to write them to shared memory, `[warps, sums]`."""
    number = arith.index_cast(ops.i32(), thread())
    warp, lane = (f(number, ops.int32(THREADS // WARPS)) for f in (arith.divui, arith.remui))
    first = arith.addi(base, arith.muli(warp, ops.int32(4 * len(sums))))
    for distance in (1, 2, 4, 8, 16):
        sums = [warps.across(x, distance, arith.addf) for x in sums]
    with utils.when(arith.cmpi(arith.CmpIPredicate.eq, lane, ops.int32(0))):
        for i, x in enumerate(sums):
            ops.asm(f"st.shared.f32 [$0+{4 * i}], $1;", None, first, x)


def left_sum(base, column, shape: FewRowsShape, config: FewRowsConfig):
    """Emits the sum of a column's squares from what warps have left; columns that pad rows get another's.

    Args:
      base: the address; column: an index.
    """
    count, at_once = num_sums(shape, config), rows_at_once(config)
    at = functools.partial(arith.constant, ir.IndexType.get())
    column = arith.minui(column, at(shape.rows - 1))
    i, of_row = (f(column, at(at_once)) for f in (arith.divui, arith.remui))
    place = arith.addi(i, arith.muli(of_row, at(WARPS // at_once * count)))
    address = arith.addi(base, arith.muli(arith.index_cast(ops.i32(), place), ops.int32(4)))
    read = lambda warp: ops.asm(f"ld.shared.f32 $0, [$1+{4 * count * warp}];", ir.F32Type.get(), address)
    return functools.reduce(arith.addf, map(read, range(WARPS // at_once)))


def _elements(bag) -> list:
    """Returns a thread's numbers of an array of the layout `warps.bag`."""
    return [warps.element(x) for x in bag.registers]


def distances_of(block: int, shape: FewRowsShape, config: FewRowsConfig) -> tuple[int, int]:
    """Returns how many bytes a block's x lies behind the first block's, and its scale behind the first's."""
    return block * config.x_rows(shape) * config.block_in * 2, block * config.block_in * 2


def _load(address, offset: int):
    """Returns a bfloat16 of shared memory, as float32."""
    text = f"{{ .reg .b16 x, zero; mov.b16 zero, 0; ld.shared.b16 x, [$1+{offset}]; mov.b32 $0, {{zero, x}}; }}"
    return ops.asm(text, ir.F32Type.get(), address)


def _store(address, offset: int, x) -> None:
    """Writes a float32 to shared memory as bfloat16."""
    ops.asm(f"{{ .reg .b16 x; cvt.rn.bf16.f32 x, $1; st.shared.b16 [$0+{offset}], x; }}", None, address, x)


def _interpreted_scale(x_smem, scale_smem, shape: FewRowsShape):
    """Does `scaled` for a block, and returns its squares."""
    layout = transposable_layout()
    x = load(x_smem.transpose((1, 0)), layout).astype(jnp.float32)
    scale = load(scale_smem, layout.reduce(1)).astype(jnp.float32)
    scale = lax.broadcast_in_dim(scale + 1.0 if shape.adds_one else scale, x.shape, [0])
    store_transposed(x_smem, (x * scale).astype(shape.dtype))
    return x * x
