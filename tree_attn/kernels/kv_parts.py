"""KV tiles of arrays whose number of slots 8 does not divide, copied by TMA: in parts at the end.

A KV tile lies in shared memory in groups of 8 slots. `plgpu.copy_gmem_to_smem` cuts the array into such groups too, so
8 must divide its slots. Arrays for which that does not hold are read through two views:
- one without the last, broken group copies a whole KV tile at once;
- one whose slots are in no groups copies 8 slots, of a KV tile that reaches the broken group.
TMA fills what lies beyond the last slot with zeros, as it does for the other arrays.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import launch_context, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import Primitive
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

from tree_attn.kernels.interpreter import is_interpreted
from tree_attn.kernels.lean_layout import SLOT_MULTIPLE, LeanConfig, LeanShape
from tree_attn.kernels.registers import tiling

BARRIER_BYTES = 8


def kv_tilings(shape: LeanShape, config: LeanConfig):
    """Returns the transforms of keys and of values in shared memory.

    K, V and P meet in the tensor core with one swizzle, and P has the `block_kv` keys of a KV tile. What is read to
    registers meets nothing as it is stored: keys whose rows no swizzle divides have no transforms, but values are
    padded.
    """
    if not shape.uses_mma:
        return (tiling(shape.dtype, math.gcd(shape.head_dim, config.block_kv)),) * 2
    keys = tiling(shape.key_dtype, shape.head_dim)
    return keys, keys or tiling(shape.key_dtype, shape.padded_head_dim)


def has_broken_group(shape: LeanShape) -> bool:
    """Returns whether 8 does not divide the array's slots."""
    return shape.page_size is None and shape.num_slots % SLOT_MULTIPLE > 0


def num_arrivals(config: LeanConfig) -> int:
    """Returns how many copies arrive at the barrier of a KV tile with a broken group."""
    # On a GPU there is one arrival for all parts together.
    return config.block_kv // SLOT_MULTIPLE if is_interpreted() else 1


def copy_slots(ref, smem, barriers, stage, place, num_slots, columns, transforms) -> None:
    """Begins the copy of a KV tile of an array with a broken group: of its first slots, then zeros.

    Args:
      ref: `[B, S, K, H]`; smem: `[stages, kv, H]`, with `transforms`; barriers: of each stage.
      place: `(block, start, head)`, where the KV tile begins; 8 divides `start`.
      num_slots: slots to copy; 7 more may be. Less than 1: none.
      columns: index of the head dims.
    """
    tile = smem.at[stage]
    block_kv = tile.shape[0]
    block, start, head = place
    if is_interpreted():
        for first in range(0, block_kv, SLOT_MULTIPLE):
            slots = pl.ds(jnp.where(first < num_slots, start + first, ref.shape[1]), SLOT_MULTIPLE)
            part = tile.at[pl.ds(first, SLOT_MULTIPLE)]
            plgpu.copy_gmem_to_smem(ref.at[block, slots, head, columns], part, barriers.at[stage])
        return
    address = address_of_barriers(barriers) + stage * BARRIER_BYTES
    scalars = [jnp.asarray(x, jnp.int32) for x in (address, block, start, head, num_slots)]
    types = (plgpu.RefType(), plgpu.RefType(transforms), *[plgpu.Layout.WG_SPLAT] * len(scalars))
    inline = lambda emit: lambda: plgpu.inline_mgpu(arg_types=types)(emit)(ref, tile, *scalars)
    whole, in_parts = (inline(functools.partial(emit, transforms)) for emit in (_emit_whole, _emit_parts))
    if not transforms:
        whole()
    elif ref.shape[1] < block_kv:
        in_parts()
    else:
        pl.when(num_slots >= block_kv)(whole)
        pl.when(num_slots < block_kv)(in_parts)


def _emit_whole(transforms, ctx, source, tile, *scalars) -> None:
    """Emits the copy of a KV tile that does not reach the broken group, or in which slots are in no groups."""
    down = launch_context.Rounding.DOWN
    grouped = [launch_context.TileTransform(x.tiling, rounding=down) for x in transforms[:1]]
    copy, _, start, _ = _emit_arrival(transforms, ctx, source, tile, scalars)
    copy(tile, start, _size(tile)[0], tuple(grouped))


def _emit_parts(transforms, ctx, source, tile, *scalars) -> None:
    """Emits copies of 8 slots each, those from `num_slots` on of none."""
    rows, width = transforms[0].tiling
    ungrouped = launch_context.TileTransform((width,)), launch_context.TransposeTransform((1, 0, 2))
    copy, at, start, num_slots = _emit_arrival(transforms, ctx, source, tile, scalars)
    loop = scf.ForOp(at(0), at(_size(tile)[0] // rows), at(1), [])
    with ir.InsertionPoint(loop.body):
        first = arith.muli(loop.induction_variable, at(rows))
        is_copied = arith.cmpi(arith.CmpIPredicate.slt, first, num_slots)
        beyond = at(ir.MemRefType(source.type).shape[1])
        slot = arith.select(is_copied, arith.addi(start, first), beyond)
        copy(utils.memref_slice(tile, (loop.induction_variable,)), slot, rows, ungrouped)
        scf.YieldOp([])


def _emit_arrival(transforms, ctx, source, tile, scalars):
    """Emits the arrival for all of a KV tile's bytes.

    Returns:
      `copy(part, slot, num_slots, gmem_transform)`, which emits a copy that does not arrive; `at(x)`, which makes a
      constant; and `start` and `num_slots` of `copy_slots`. All are indices.
    """
    index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
    address, *place = (x.registers.item() for x in scalars)
    block, start, head, num_slots = (arith.index_cast(index, x) for x in place)
    pointer = llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), address)
    barrier = utils.BarrierRef(pointer, arith.constant(i32, 0), None, 1)
    elected = utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)
    tile_type = ir.MemRefType(tile.type)
    num_bytes = math.prod(tile_type.shape) * utils.bitwidth(tile_type.element_type) // 8
    # A barrier of Pallas counts each thread of a warpgroup that arrives at it.
    barrier.arrive_expect_tx(num_bytes // utils.WARPGROUP_SIZE)
    at = functools.partial(arith.constant, index)

    def copy(part, slot, count: int, gmem_transform):
        where = block, utils.ds(slot, count), head, utils.ds(at(0), _size(tile)[1])
        ctx.async_copy(
            src_ref=source, dst_ref=part, gmem_slice=where, gmem_transform=gmem_transform, barrier=barrier,
            swizzle=transforms[1].swizzle if transforms else None, arrive=False, predicate=elected,
        )  # fmt: skip

    return copy, at, start, num_slots


def _size(tile) -> tuple[int, int]:
    """Returns slots and head dims of a tile in shared memory, maybe as `[slots / 8, tiles of head dims, 8, width]`."""
    size = ir.MemRefType(tile.type).shape
    return (size[0] * size[2], size[1] * size[3]) if len(size) == 4 else tuple(size)


def address_of_barriers(barriers):
    """Returns the address in shared memory of the first of some barriers, which Pallas itself does not give."""
    return _address_primitive().bind(barriers)


@functools.cache
def _address_primitive() -> Primitive:
    from jax._src.pallas.mosaic_gpu import lowering

    primitive = Primitive("address_of_barriers")
    primitive.def_abstract_eval(lambda barriers: jax.core.ShapedArray((), jnp.int32))

    @lowering.register_lowering_rule(primitive, plgpu.LoweringSemantics.Warpgroup)
    def lower(_, barriers):
        return llvm.ptrtoint(ir.IntegerType.get_signless(32), barriers.barrier_ref.base_address)

    return primitive
