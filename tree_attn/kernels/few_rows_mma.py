"""Products of a few rows by `mma.sync`, which takes x from registers: shared memory has no rows that pad it.

`wgmma` reads x from shared memory, of 8 rows at the least. For one row that takes a third of a stage, which can hold
weights instead (docs/log/llama.md: "Without padding of x the 1B takes 6 % less, and the 8B takes 3 % more").

A warp multiplies 16 of a stage's 64 rows of weights. The first 8 and the last 8 may be of two blocks of a stack. So of
its 8 columns the first 4 are x as the first 8 rows need it, and the last 4 as the others do. A product's halves then
lie in different columns, and `in_columns` moves the second. Columns without a row of x repeat its last.

Shapes in comments are those of `few_rows_cta.py`.
"""

import itertools

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu

from tree_attn.kernels.few_rows_copies import row_of
from tree_attn.kernels.few_rows_layout import COMPACT_ROWS, GRAIN, IN_MULTIPLE, TENSOR_ROWS, FewRowsConfig, FewRowsShape
from tree_attn.kernels.mlir import asm_results, i32, int32
from tree_attn.kernels.mma import multiply_and_add, reader
from tree_attn.kernels.registers import full, tiling
from tree_attn.kernels.warps import LAYOUT, across, address_of, element, fragmented, pair_of, places

SIZE = (TENSOR_ROWS, GRAIN)  # of a product
STEP = 16  # in-features of an instruction
STEPS_AT_ONCE = 8  # whose x is read before any is multiplied


def nothing(shape: FewRowsShape) -> tuple:
    """Returns zeros to which `multiplied` adds: a product for each part."""
    return tuple(full(0.0, SIZE, LAYOUT) for _ in range(shape.parts))


def multiplied(products, weights_smem, x_smem, stage, shape: FewRowsShape, config: FewRowsConfig) -> tuple:
    """Returns the products with what a stage's weights and x give.

    Args:
      products: of `nothing`, or of the stage before.
      weights_smem, x_smem: of all stages, as `few_rows_moves.ring_scratch` has them; the memory of x may have more
        blocks for each.
    """
    results = tuple(plgpu.ShapeDtypeStruct(SIZE, jnp.float32, layout=LAYOUT) for _ in products)
    of_smems = plgpu.RefType(tiling(shape.dtype, IN_MULTIPLE)), plgpu.RefType()

    @plgpu.inline_mgpu(arg_types=(*of_smems, plgpu.Layout.WG_SPLAT, *[LAYOUT] * len(products)), return_type=results)
    def emit(_, weights, x, stage, *products):
        sums = [[element(pair, i) for pair in product.registers.flat for i in range(2)] for product in products]
        sums = multiply_stage(sums, weights, x, stage.registers.item(), shape, config)
        return tuple(fragmented([pair_of(*of[:2]), pair_of(*of[2:])], SIZE, LAYOUT) for of in sums)

    return emit(weights_smem, x_smem, jnp.asarray(stage, jnp.int32), *products)


def multiply_stage(sums, weights, x, stage, shape: FewRowsShape, config: FewRowsConfig) -> list:
    """Emits what a thread does with a stage, and returns its four sums of each part.

    Args:
      sums: of stages before; weights, x: references; stage: its number, i32.
    """
    row_bytes, steps = config.block_in * 2, config.block_in // STEP
    of_x = _address_of_x(x, stage, shape, config)
    read = reader(weights, 2, trans=False, offset=arith.muli(stage, int32(config.stage_rows(shape) * row_bytes)))
    zero = arith.constant(ir.F32Type.get(), 0.0)
    # Of odd steps the sums are others, so that products of one part overlap.
    both = [list(sums), [[zero] * 4 for _ in sums]]
    for slab, first in itertools.product(range(config.slabs), range(0, steps, STEPS_AT_ONCE)):
        some = range(first, min(first + STEPS_AT_ONCE, steps))
        of_slab = slab * config.stack * shape.rows * row_bytes
        words = [
            asm_results(f"ld.shared.b32 $0, [$1+{of_slab + step * STEP * 2 + half * STEP}];", "r", of_x)[0]
            for step in some for half in range(2)
        ]  # fmt: skip
        for step, right in zip(some, zip(words[::2], words[1::2]), strict=True):
            for part, sums_of in enumerate(both[step % 2]):
                left = read(row_of(slab, part, 0, 0, shape, config), 2 * step)
                both[step % 2][part] = multiply_and_add(left, right, sums_of, _operand_type(shape))
    return [[arith.addf(*two) for two in zip(*of_part)] for of_part in zip(*both)]


def _address_of_x(x, stage, shape: FewRowsShape, config: FewRowsConfig):
    """Returns the address of a thread's first two elements of x."""
    warp, group, place = places(arith.index_cast(i32(), gpu.thread_id(gpu.Dimension.x)))
    row = arith.minui(arith.andi(group, int32(COMPACT_ROWS - 1)), int32(shape.rows - 1))
    rows_of_weights = arith.muli(arith.addi(arith.muli(warp, int32(2)), arith.shrui(group, int32(2))), int32(GRAIN))
    block = arith.minui(arith.divui(rows_of_weights, int32(config.tile)), int32(config.stack - 1))
    _, rows_of_stage, block_in = ir.MemRefType(x.type).shape
    for count, number in ((rows_of_stage, stage), (shape.rows, block)):
        row = arith.addi(row, arith.muli(number, int32(count)))
    within = arith.addi(arith.muli(row, int32(block_in * 2)), arith.muli(place, int32(4)))
    return arith.addi(address_of(x), within)


def in_columns(product):
    """Returns a product, `[64, cols]`, whose second halves have been moved to the columns of x."""

    @plgpu.inline_mgpu(arg_types=(LAYOUT,), return_type=plgpu.ShapeDtypeStruct(SIZE, jnp.float32, layout=LAYOUT))
    def emit(_, product):
        first, second = product.registers.flat
        # A thread has two columns of each half: those of the thread after the next are 4 further.
        moved = [across(element(second, i), 2, lambda _, x: x) for i in range(2)]
        return fragmented([first, pair_of(*moved)], SIZE, LAYOUT)

    return emit(product)


def _operand_type(shape: FewRowsShape) -> str:
    return "bf16" if shape.dtype == jnp.bfloat16 else "f16"
