"""Products of a few rows by `mma.sync`, which takes x from registers: shared memory has no rows that pad it.

`wgmma` reads x from shared memory, of 8 rows at the least. For one row that takes a third of a stage, which can hold
weights instead (docs/log/llama.md: "x of up to four rows is not padded").

A warp multiplies 16 of a stage's 64 rows of weights. Of its 8 columns the first 4 are the rows of x that the first 8
rows of weights are multiplied with, and the last 4 those of the other 8, which may be of another block of a stack. So
a product's halves lie in different columns, and `in_columns` moves the second. Columns without a row of x repeat its
last.

The norm's scale is multiplied in registers, and rounded as in shared memory (`few_rows_norm.py`).

Shapes in comments are those of `few_rows_cta.py`.
"""

import functools
import itertools

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu

from tree_attn.kernels.few_rows_copies import row_of
from tree_attn.kernels.few_rows_layout import COMPACT_ROWS, GRAIN, IN_MULTIPLE, TENSOR_ROWS, FewRowsConfig, FewRowsShape
from tree_attn.kernels.mlir import asm_results, i32, int32
from tree_attn.kernels.mma import multiply_and_add, reader
from tree_attn.kernels.registers import full, tiling
from tree_attn.kernels.warps import (
    LAYOUT,
    THREADS,
    across,
    address_of,
    await_all,
    bag,
    bagged,
    element,
    fragmented,
    halves,
    pair_of,
    places,
)

SIZE = (TENSOR_ROWS, GRAIN)  # of a product
STEP = 16  # in-features of an instruction
STEPS_AT_ONCE = 8  # whose x is read before any is multiplied


def squares_scratch() -> plgpu.SMEM:
    """Returns the shared memory by which warps add up squares: of each 8 rows of weights those of 4 rows of x."""
    return plgpu.SMEM((TENSOR_ROWS // GRAIN * COMPACT_ROWS,), jnp.float32)


def nothing(shape: FewRowsShape):
    """Returns zeros to which `multiplied` adds: a product for each part, and squares; these are None without a norm."""
    products = tuple(full(0.0, SIZE, LAYOUT) for _ in range(shape.parts))
    return products, None if shape.eps is None else full(0.0, (THREADS,), bag(1))


def multiplied(sums, smems, stage, shape: FewRowsShape, config: FewRowsConfig):
    """Adds what a stage's weights and x give.

    Args:
      sums: of `nothing`, or of the stage before.
      smems: all stages' weights, x and the norm's scale, or None, as `few_rows_moves.ring_scratch` has them.
    """
    products, squares = sums
    smems = [smem for smem in smems if smem is not None]
    layouts = [LAYOUT] * len(products) + ([] if squares is None else [bag(1)])
    arrays = [*products, *([] if squares is None else [squares])]
    results = tuple(plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=layout) for x, layout in zip(arrays, layouts))
    of_smems = [plgpu.RefType(tiling(shape.dtype, IN_MULTIPLE)), *[plgpu.RefType()] * (len(smems) - 1)]

    @plgpu.inline_mgpu(arg_types=(*of_smems, plgpu.Layout.WG_SPLAT, *layouts), return_type=results)
    def emit(_, *values):
        refs, (stage, *arrays) = values[: len(smems)], values[len(smems) :]
        stage = stage.registers.item()
        sums = [[element(x, i) for x in array.registers.flat for i in range(2)] for array in arrays[: shape.parts]]
        square = element(arrays[-1].registers.flat[0]) if shape.eps is not None else None
        sums, square = multiply_stage(sums, square, refs, stage, shape, config)
        found = [fragmented([pair_of(*x[:2]), pair_of(*x[2:])], SIZE, LAYOUT) for x in sums]
        return (*found, *([] if square is None else [bagged([square])]))

    found = emit(*smems, jnp.asarray(stage, jnp.int32), *arrays)
    return found[: shape.parts], None if squares is None else found[-1]


def multiply_stage(sums, square, refs, stage, shape: FewRowsShape, config: FewRowsConfig):
    """Emits what a thread does with a stage, and returns its four sums of each part, and its sum of squares.

    Args:
      sums, square: of stages before; square is None without a norm.
      refs: of weights, x and, with a norm, its scale; stage: its number, i32.
    """
    row_bytes = config.block_in * 2
    places_of_x = _places_of_x(refs, stage, shape, config)
    read = reader(refs[0], 2, trans=False, offset=arith.muli(stage, int32(config.stage_rows(shape) * row_bytes)))
    steps = config.block_in // STEP
    zero = arith.constant(ir.F32Type.get(), 0.0)
    # Of odd steps the sums are others, so that products of one part overlap.
    both = [list(sums), [[zero] * 4 for _ in sums]]
    for slab, first in itertools.product(range(config.slabs), range(0, steps, STEPS_AT_ONCE)):
        some = range(first, min(first + STEPS_AT_ONCE, steps))
        right, square = _right_operands(places_of_x, slab, some, square, shape, config)
        for step, words in zip(some, right, strict=True):
            for part in range(shape.parts):
                left = read(row_of(slab, part, 0, 0, shape, config), 2 * step)
                sums_of = both[step % 2]
                sums_of[part] = multiply_and_add(left, words, sums_of[part], _operand_type(shape))
    return [[arith.addf(*two) for two in zip(*parts)] for parts in zip(*both)], square


def _places_of_x(refs, stage, shape: FewRowsShape, config: FewRowsConfig) -> list:
    """Returns the addresses of a thread's first two elements of x and, with a norm, of its scale."""
    warp, group, place = _thread()
    row_bytes, blocks = config.block_in * 2, config.slabs * config.stack
    row = arith.minui(arith.andi(group, int32(COMPACT_ROWS - 1)), int32(shape.rows - 1))
    rows_before = arith.muli(_group_of_rows(warp, group), int32(GRAIN))
    block = arith.minui(arith.divui(rows_before, int32(config.tile)), int32(config.stack - 1))
    within = arith.muli(place, int32(4))
    of_rows = lambda count, row: arith.muli(arith.addi(arith.muli(stage, int32(blocks * count)), row), int32(row_bytes))
    rows = [of_rows(shape.rows, arith.addi(arith.muli(block, int32(shape.rows)), row)), of_rows(1, block)]
    return [arith.addi(arith.addi(address_of(ref), first), within) for ref, first in zip(refs[1:], rows)]


def _right_operands(places_of_x, slab: int, steps, square, shape: FewRowsShape, config: FewRowsConfig):
    """Returns x of some steps as right operands, times the norm's scale if there is one, and the sum of squares."""
    row_bytes = config.block_in * 2

    def read(address, rows: int):
        offset = slab * config.stack * rows * row_bytes
        at = [offset + step * STEP * 2 + half * STEP for step in steps for half in range(2)]
        return [asm_results(f"ld.shared.b32 $0, [$1+{distance}];", "r", address)[0] for distance in at]

    words = read(places_of_x[0], shape.rows)
    if shape.eps is not None:
        scaled = []
        for word, scale in zip(words, read(places_of_x[1], 1), strict=True):
            pair, scales = _floats(word), _floats(scale)
            if shape.adds_one:
                scales = [arith.addf(x, arith.constant(ir.F32Type.get(), 1.0)) for x in scales]
            scaled.append(halves(*map(arith.mulf, pair, scales), "bf16"))
            square = functools.reduce(arith.addf, [arith.mulf(x, x) for x in pair], square)
        words = scaled
    return list(zip(words[::2], words[1::2], strict=True)), square


def in_columns(product):
    """Returns a product, `[64, cols]`, whose second halves have been moved to the columns of x."""

    @plgpu.inline_mgpu(arg_types=(LAYOUT,), return_type=plgpu.ShapeDtypeStruct(SIZE, jnp.float32, layout=LAYOUT))
    def emit(_, product):
        first, second = product.registers.flat
        # A thread has two columns of each half: those of the thread after the next are 4 further.
        moved = [across(element(second, i), 2, lambda _, x: x) for i in range(2)]
        return fragmented([first, pair_of(*moved)], SIZE, LAYOUT)

    return emit(product)


def totals(squares, smem, shape: FewRowsShape, config: FewRowsConfig):
    """Returns the sum of each row's squares, float32 `[64, cols]`.

    Args:
      squares: of `multiplied`; smem: of `squares_scratch`.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), bag(1)))
    def leave(_, smem, squares):
        warp, group, place = _thread()
        square = element(squares.registers.flat[0])
        for distance in (1, 2):
            square = across(square, distance, arith.addf)
        number = arith.addi(arith.muli(warp, int32(GRAIN)), group)
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, place, int32(0))):
            asm_results(
                "st.shared.f32 [$0], $1;", "", arith.addi(address_of(smem), arith.muli(number, int32(4))), square
            )

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct(SIZE, jnp.float32, layout=LAYOUT)
    )
    def read(_, smem):
        *_, place = _thread()
        sums = []
        for i in range(2):
            column = arith.addi(arith.muli(place, int32(2)), int32(i))
            column = arith.minui(column, int32(shape.rows - 1))
            address = arith.addi(address_of(smem), arith.muli(column, int32(4)))
            # Rows of weights that are of one block have read the same x: the first 8 of each count.
            first_groups = (block * config.tile // GRAIN for block in range(config.stack))
            texts = (f"ld.shared.f32 $0, [$1+{group * COMPACT_ROWS * 4}];" for group in first_groups)
            sums.append(functools.reduce(arith.addf, [asm_results(text, "f", address)[0] for text in texts]))
        return fragmented([pair_of(*sums)] * 2, SIZE, LAYOUT)

    leave(smem, squares)
    await_all()
    return read(smem)


def _thread():
    """Returns warp, group and place of this thread."""
    return places(arith.index_cast(i32(), gpu.thread_id(gpu.Dimension.x)))


def _group_of_rows(warp, group):
    """Returns which 8 of the 64 rows of weights a thread's columns are multiplied with."""
    return arith.addi(arith.muli(warp, int32(2)), arith.shrui(group, int32(2)))


def _floats(word) -> list:
    """Returns two bfloat16 of a word as float32."""
    as_float = functools.partial(arith.bitcast, ir.F32Type.get())
    return [as_float(arith.shli(word, int32(16))), as_float(arith.andi(word, int32(-65536)))]


def _operand_type(shape: FewRowsShape) -> str:
    return "bf16" if shape.dtype == jnp.bfloat16 else "f16"
