"""Products of one row by `wgmma`, for which nothing pads x in shared memory.

`wgmma` reads x as cores of 8 rows and 16 bytes, and a descriptor says how far cores lie apart. Rows of a core lie 16
bytes apart. Where cores do too, their first rows are the one row of x as it lies. Their other rows are what lies
behind, and give columns of the result that are dropped. So x takes an eighth of what it takes with rows that pad it.

Of a stack each block has 8 columns, the first of which is wanted for that block's rows. `in_columns` picks them.

Shapes in comments are those of `few_rows_cta.py`.

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout", matrices without swizzling.
"""

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu

from tree_attn.kernels.few_rows_copies import row_of
from tree_attn.kernels.few_rows_layout import GRAIN, IN_MULTIPLE, TENSOR_ROWS, FewRowsConfig, FewRowsShape
from tree_attn.kernels.mlir import asm_in_place, constant, i32, i64, int32
from tree_attn.kernels.registers import full, tiling
from tree_attn.kernels.warps import LAYOUT, address_of, element, fragmented, pair_of, places

STEP = 16  # in-features of an instruction
CORE_BYTES = 16  # of a core's row
UNIT = 16  # bytes, in which a descriptor counts
ELEMENT_BYTES = 2
SWIZZLED = 1 << 62  # by 128 bytes, of a descriptor


def size_of(config: FewRowsConfig) -> tuple[int, int]:
    """Returns the shape of a product: 8 columns for each block of a stack."""
    return TENSOR_ROWS, config.stack * GRAIN


def nothing(shape: FewRowsShape, config: FewRowsConfig) -> tuple:
    """Returns zeros to which `multiplied` adds: a product for each part."""
    return tuple(full(0.0, size_of(config), LAYOUT) for _ in range(shape.parts))


def multiplied(products, weights_smem, x_smem, stage, shape: FewRowsShape, config: FewRowsConfig) -> tuple:
    """Returns the products with what a stage's weights and x give, when they have been read.

    Args:
      products: of `nothing`, or of the stage before.
      weights_smem, x_smem: of all stages, as `few_rows_moves.ring_scratch` has them; the memory of x may have more
        blocks for each.
    """
    size = size_of(config)
    results = tuple(plgpu.ShapeDtypeStruct(size, jnp.float32, layout=LAYOUT) for _ in products)
    of_smems = plgpu.RefType(tiling(shape.dtype, IN_MULTIPLE)), plgpu.RefType()

    @plgpu.inline_mgpu(arg_types=(*of_smems, plgpu.Layout.WG_SPLAT, *[LAYOUT] * len(products)), return_type=results)
    def emit(_, weights, x, stage, *products):
        sums = [[element(pair, i) for pair in product.registers.flat for i in range(2)] for product in products]
        sums = multiply_stage(sums, weights, x, stage.registers.item(), shape, config)
        in_pairs = lambda of: [pair_of(*of[i : i + 2]) for i in range(0, len(of), 2)]
        return tuple(fragmented(in_pairs(of), size, LAYOUT) for of in sums)

    return emit(weights_smem, x_smem, jnp.asarray(stage, jnp.int32), *products)


def multiply_stage(sums, weights, x, stage, shape: FewRowsShape, config: FewRowsConfig) -> list:
    """Emits the products with a stage, and returns a thread's sums of each part, with those of stages before.

    Args:
      sums: of stages before; weights, x: references; stage: its number, i32.
    """
    row_bytes, count = config.block_in * ELEMENT_BYTES, len(sums[0])
    _, rows_of_stage, _ = ir.MemRefType(x.type).shape
    of_weights = _descriptor(
        weights, stage, config.stage_rows(shape) * row_bytes, by_core=CORE_BYTES, by_group=GRAIN * row_bytes,
        more=SWIZZLED,
    )  # fmt: skip
    of_x = _descriptor(x, stage, rows_of_stage * row_bytes, by_core=CORE_BYTES, by_group=row_bytes)
    kind = "bf16" if shape.dtype == jnp.bfloat16 else "f16"
    name = f"wgmma.mma_async.sync.aligned.m64n{config.stack * GRAIN}k{STEP}.f32.{kind}.{kind}"
    first_operand = shape.parts * count
    lines = [".reg .pred adds;", ".reg .b64 a, b;", "setp.eq.b32 adds, 0, 0;", "wgmma.fence.sync.aligned;"]
    for slab in range(config.slabs):
        for first in range(0, config.block_in, STEP):
            of_slab = slab * config.stack * row_bytes
            lines.append(f"add.s64 b, ${first_operand + 1}, {(of_slab + first * ELEMENT_BYTES) // UNIT};")
            tile, within = divmod(first, IN_MULTIPLE)
            of_step = tile * GRAIN * IN_MULTIPLE * ELEMENT_BYTES + within * ELEMENT_BYTES
            for part in range(shape.parts):
                row = row_of(slab, part, 0, 0, shape, config)
                lines.append(f"add.s64 a, ${first_operand}, {(row * row_bytes + of_step) // UNIT};")
                registers = ", ".join(f"${part * count + i}" for i in range(count))
                lines.append(f"{name} {{{registers}}}, a, b, adds, 1, 1, 0, 0;")
    lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"]
    text = "{ " + " ".join(lines) + " }"
    flat = asm_in_place(text, [x for of_part in sums for x in of_part], of_weights, of_x)
    return [flat[i : i + count] for i in range(0, len(flat), count)]


def _descriptor(ref, stage, stage_bytes: int, *, by_core: int, by_group: int, more: int = 0):
    """Returns a descriptor of a stage's first rows, i64.

    Args:
      by_core: bytes from a core to the next along the in-features; by_group: from 8 rows to the next 8.
    """
    address = arith.addi(address_of(ref), arith.muli(stage, int32(stage_bytes)))
    fixed = more | (by_group // UNIT) << 32 | (by_core // UNIT) << 16
    return arith.ori(arith.extui(i64(), arith.divui(address, int32(UNIT))), constant(fixed))


def in_columns(product, config: FewRowsConfig):
    """Returns a product, `[64, 8]`, with each row's result of its own block in the first column."""
    size = TENSOR_ROWS, GRAIN
    result = plgpu.ShapeDtypeStruct(size, jnp.float32, layout=LAYOUT)

    @plgpu.inline_mgpu(arg_types=(LAYOUT,), return_type=result)
    def emit(_, product):
        number = arith.index_cast(i32(), gpu.thread_id(gpu.Dimension.x))
        return fragmented(of_blocks(list(product.registers.flat), number, config), size, LAYOUT)

    return emit(product)


def of_blocks(pairs, number, config: FewRowsConfig) -> list:
    """Emits the choice of a thread's two pairs, of its rows in the upper and the lower half of its warp's.

    Args:
      pairs: of each block the two; number: the thread's, i32.
    """
    warp, group, _ = places(number)
    chosen = []
    for half in range(2):
        row = arith.addi(arith.muli(warp, int32(2 * GRAIN)), arith.addi(group, int32(half * GRAIN)))
        block = arith.divui(row, int32(config.tile))
        x = element(pairs[half])
        for place in range(1, config.stack):
            is_behind = arith.cmpi(arith.CmpIPredicate.uge, block, int32(place))
            x = arith.select(is_behind, element(pairs[2 * place + half]), x)
        chosen.append(pair_of(x, x))
    return chosen
