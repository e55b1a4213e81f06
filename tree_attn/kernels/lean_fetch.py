"""Keys and values that are fetched into L2 while the previous kernel still runs.

A kernel that begins early knows nothing yet: the previous kernel may be writing keys, and what wrote the schedule may
not be visible. A fetch needs no knowledge. Lines that are written later are written in L2, and places that a schedule
of an earlier step names are fetched in vain.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from tree_attn.kernels import mlir as ops
from tree_attn.kernels.lean_layout import RUN_FIRST_SLOT, LeanConfig, LeanShape, lanes
from tree_attn.kernels.lean_walk import run_of_cta, tile_slots
from tree_attn.kernels.schedule import quotient, remainder

_SCALAR = plgpu.Layout.WG_SPLAT


def fetch_first_tiles(tables, shape: LeanShape, config: LeanConfig, key_ref, value_ref) -> None:
    """Begins to fetch the first KV tiles of the CTA's run."""
    import os
    most = int(os.environ.get("PF", "8"))
    if shape.static_kv_tiles is None:
        cta, count = lax.axis_index("cta"), lanes(shape, config)
        lane, number = remainder(cta, count), quotient(cta, count)
        sequence, place, kv_tile, num_kv_tiles, first_slot = (
            load_whatever(tables["runs"], number, column) for column in (0, 1, 2, 3, RUN_FIRST_SLOT)
        )
        output_tile = place * count + lane
    else:
        run = run_of_cta(tables, shape, config)
        sequence, output_tile, kv_tile, num_kv_tiles = run.sequence, run.output_tile, run.kv_tile, run.num_kv_tiles
        first_slot = 0
    head = lax.div(output_tile, shape.col_blocks)
    sequence = 0 if shape.is_packed else sequence

    def fetch(i, _):
        slot = jnp.clip(first_slot + (kv_tile + i) * config.block_kv, 0, shape.num_slots - 1)
        slot = pl.multiple_of(slot // 8 * 8, 8)
        for ref in (key_ref, value_ref):
            plgpu.async_prefetch(ref.at[sequence, pl.ds(slot, config.block_kv), head])

    lax.fori_loop(0, jnp.clip(num_kv_tiles, 0, most), fetch, None)


def load_whatever(table, row, column: int):
    """Returns a number that may be that of an earlier step, and leaves no line of it in L1."""
    width = table.shape[1]
    result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR), return_type=result)
    def emit(_, table, place):
        base = llvm.ptrtoint(ops.i64(), utils.memref_ptr(table))
        offset = arith.muli(arith.extui(ops.i64(), place.registers.item()), ops.constant(4))
        found = ops.asm("ld.relaxed.gpu.global.u32 $0, [$1];", ops.i32(), ops.plus(base, offset))
        return fragmented_array.FragmentedArray.splat(found, (), is_signed=True)

    return emit(table, jnp.asarray(row * width + column, jnp.int32))
