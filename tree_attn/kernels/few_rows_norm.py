"""RMSNorm within a product of few rows: each stage's x is multiplied by the norm's scale, and its squares are added up.

All is by element, in place: a thread reads and writes its own elements of shared memory. So a stage takes one barrier,
that before tensor cores read x. `plgpu` has two for each block, and reads what it overwrites.
"""

import itertools

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from tree_attn.kernels import mlir as ops
from tree_attn.kernels.few_rows_broadcast import place_in_tiles, shared_address
from tree_attn.kernels.few_rows_layout import GRAIN, IN_MULTIPLE, FewRowsConfig, FewRowsShape
from tree_attn.kernels.interpreter import is_interpreted
from tree_attn.kernels.registers import full, load, store_transposed, tiling, transposable_layout

ELEMENTS_AT_ONCE = 8  # that a thread reads before it writes one, of 8 columns; of more it has registers for fewer


def no_squares(shape: FewRowsShape, config: FewRowsConfig):
    """Returns zeros, float32 `[block_in, cols]`, to which squares are added; None where there is no norm."""
    if shape.eps is None:
        return None
    return full(0.0, (config.block_in, shape.columns), transposable_layout())


def scaled(x_smem, scale_smem, squares, shape: FewRowsShape, config: FewRowsConfig):
    """Multiplies a stage's x by the norm's scale, and returns the squares with those of what x was.

    Args:
      x_smem: of the stage, `[blocks * cols, block_in]`; scale_smem: `[blocks, block_in]`.
      squares: of `no_squares`, or of the stage before.
    """
    if is_interpreted():
        for block in range(config.slabs * config.stack):
            of_block = x_smem.at[block * shape.columns : (block + 1) * shape.columns]
            squares = squares + _interpreted_scale(of_block, scale_smem.at[block], shape)
        return squares
    layout = transposable_layout()
    result = plgpu.ShapeDtypeStruct(squares.shape, jnp.float32, layout=layout)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(tiling(x_smem.dtype, IN_MULTIPLE)), plgpu.RefType(), layout), return_type=result
    )
    def emit(_, x_smem, scale_smem, squares):
        bases, places, sums = (shared_address(x_smem), shared_address(scale_smem)), [], []

        def take(square, place):
            places.append([arith.index_cast(ops.i32(), i) for i in place])
            sums.append(square)

        squares.foreach(take)
        found = iter(multiplied(bases, places, sums, shape, config))
        return squares.foreach(lambda *_: next(found), create_array=True)

    return emit(x_smem, scale_smem, squares)


def multiplied(bases, places, sums, shape: FewRowsShape, config: FewRowsConfig) -> list:
    """Emits what a thread does with its elements of all blocks, and returns their sums of squares.

    Args:
      bases: addresses of the stage's x and scale.
      places: in-feature and column of each element in a block, i32; sums: of each, of stages before.
    """
    addresses, sums = [], list(sums)
    for feature, column in places:
        of_x = arith.addi(bases[0], place_in_tiles(column, feature, config.block_in))
        addresses.append((of_x, arith.addi(bases[1], arith.muli(feature, ops.int32(2)))))
    at_once = max(1, ELEMENTS_AT_ONCE * GRAIN**2 // shape.columns**2)
    for block, first in itertools.product(range(config.slabs * config.stack), range(0, len(addresses), at_once)):
        some = addresses[first : first + at_once]
        # Blocks lie at fixed distances: a thread keeps addresses of the first only.
        distances = distances_of(block, shape, config)
        elements = [[_load(*at) for at in zip(both, distances)] for both in some]
        for number, ((address, _), (x, scale)) in enumerate(zip(some, elements, strict=True), first):
            if shape.adds_one:
                scale = arith.addf(scale, arith.constant(ir.F32Type.get(), 1.0))
            _store(address, distances[0], arith.mulf(x, scale))
            sums[number] = arith.addf(sums[number], arith.mulf(x, x))
    return sums


def distances_of(block: int, shape: FewRowsShape, config: FewRowsConfig) -> tuple[int, int]:
    """Returns how many bytes a block's x lies behind the first block's, and its scale behind the first's."""
    return block * shape.columns * config.block_in * 2, block * config.block_in * 2


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
