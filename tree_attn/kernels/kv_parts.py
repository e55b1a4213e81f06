"""KV tiles of arrays whose number of slots 8 does not divide, copied by TMA.

A KV tile lies in shared memory in groups of 8 slots. `plgpu.copy_gmem_to_smem` cuts the array into such groups too, so
8 must divide its slots. Arrays for which that does not hold are read through three views:
- `_WHOLE` has groups from the first slot on, and lacks the last, broken one;
- `_END` has groups up to the last slot, and lacks up to 7 slots at the start;
- `_GROUP` has no groups, and copies 8 slots at a time.
A KV tile that would reach the broken group begins so much earlier that it ends with the array (`lean_walk.tile_slots`),
and is read through `_END`. Only arrays that are shorter than a KV tile need `_GROUP`, for their last slots.
TMA fills what lies beyond the last slot with zeros, as it does for the other arrays.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import launch_context, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import Primitive
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from tree_attn.kernels.interpreter import is_interpreted
from tree_attn.kernels.lean_layout import SLOT_MULTIPLE, LeanConfig, LeanShape
from tree_attn.kernels.registers import tiling

BARRIER_BYTES = 8
_WHOLE, _END, _GROUP = "whole", "end", "group"


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
    """Returns whether K and V are copied by TMA, and 8 does not divide the array's slots."""
    return shape.target.is_hopper and shape.page_size is None and shape.num_slots % SLOT_MULTIPLE > 0


def num_arrivals(config: LeanConfig) -> int:
    """Returns how many copies arrive at the barrier of a KV tile of an array with a broken group."""
    # On a GPU there is one arrival for all parts together.
    return config.block_kv // SLOT_MULTIPLE if is_interpreted() else 1


def copy_slots(ref, smem, barriers, stage, place, num_seen, grain: int, columns, transforms) -> None:
    """Begins the copy of a KV tile of an array with a broken group.

    Args:
      ref: `[B, S, K, H]`; smem: `[stages, kv, H]`, with `transforms`; barriers: of each stage.
      place: `(block, start, head)`, where the KV tile begins. 8 divides `start`, or the KV tile ends with the array.
      num_seen: slots to copy; fewer than `grain` more are, if `start` is a multiple of 8, else all. None: all.
      grain: of `lean_layout.grain_of`.
      columns: index of the head dims.
    """
    tile = smem.at[stage]
    block_kv, slots = tile.shape[0], ref.shape[1]
    block, start, head = place
    if is_interpreted():
        for first in range(0, block_kv, SLOT_MULTIPLE):
            is_copied = True if num_seen is None else first < num_seen
            where = pl.ds(jnp.where(is_copied, start + first, slots), SLOT_MULTIPLE)
            part = tile.at[pl.ds(first, SLOT_MULTIPLE)]
            plgpu.copy_gmem_to_smem(ref.at[block, where, head, columns], part, barriers.at[stage])
        return
    address = address_of_barriers(barriers) + stage * BARRIER_BYTES
    scalars = [jnp.asarray(x, jnp.int32) for x in (address, block, start, head)]
    types = (plgpu.RefType(), plgpu.RefType(transforms), *[plgpu.Layout.WG_SPLAT] * len(scalars))

    def copy(*parts):
        emit = functools.partial(_emit_parts, transforms, parts)
        return plgpu.inline_mgpu(arg_types=types)(emit)(ref, tile, *scalars)

    def first_slots():
        if num_seen is None:
            copy(_Part(_WHOLE, 0, block_kv))
            return
        grains = jnp.clip(pl.cdiv(num_seen, grain), 1, block_kv // grain)
        for size in range(grain, block_kv + 1, grain):
            pl.when(grains == size // grain)(functools.partial(copy, _Part(_WHOLE, 0, size)))

    if not transforms:
        copy(_Part(_WHOLE, 0, block_kv))
    elif slots >= block_kv:
        ends = lax.rem(start, SLOT_MULTIPLE) != 0
        pl.when(ends)(lambda: copy(_Part(_END, 0, block_kv)))
        pl.when(~ends)(first_slots)
    else:
        whole = slots // SLOT_MULTIPLE * SLOT_MULTIPLE
        parts = [_Part(_WHOLE, 0, whole)] if whole else []
        parts.append(_Part(_GROUP, whole, SLOT_MULTIPLE))
        beyond = whole + SLOT_MULTIPLE
        parts += [_Part(_WHOLE, beyond, block_kv - beyond, is_beyond=True)] if beyond < block_kv else []
        if num_seen is None:
            copy(*parts)
            return
        pl.when(num_seen > whole)(lambda: copy(*parts))
        pl.when(num_seen <= whole)(first_slots)


@dataclasses.dataclass(frozen=True)
class _Part:
    """A copy of `count` slots into a KV tile, from its slot `at` on: from the same place of the array, or beyond it."""

    view: str
    at: int
    count: int
    is_beyond: bool = False


@dataclasses.dataclass(frozen=True)
class _EndTileTransform(launch_context.TileTransform):
    """Tiles slots and head dims, of an array without its first slots."""

    skipped: int = 0

    def apply(self, ref: ir.Value) -> ir.Value:
        rank = ir.MemRefType(ref.type).rank
        ref = utils.memref_slice(ref, (*[slice(None)] * (rank - 2), slice(self.skipped, None)))
        # With an offset, JAX 0.11 crashes where an element is of a type that LLVM lacks.
        kind = ir.MemRefType(ref.type)
        layout = ir.StridedLayoutAttr.get(0, kind.get_strides_and_offset()[0])
        kind = ir.MemRefType.get(kind.shape, kind.element_type, layout, kind.memory_space)
        return super().apply(utils.ptr_as_memref(utils.memref_ptr(ref), kind))

    def transform_gmem_shape(self, shape):
        *leading, slots, head_dim = shape
        return super().transform_gmem_shape((*leading, slots - self.skipped, head_dim))

    def transform_index(self, index):
        *leading, slot, dim = index
        slot = arith.subi(slot, arith.constant(ir.IndexType.get(), self.skipped))
        return super().transform_index((*leading, slot, dim))


def _transforms_of(view: str, transforms, slots: int) -> tuple:
    """Returns the transforms of the array for a view."""
    if not transforms:
        return ()
    rows, width = transforms[0].tiling
    if view == _GROUP:
        return launch_context.TileTransform((width,)), launch_context.TransposeTransform((1, 0, 2))
    if view == _END:
        return (_EndTileTransform((rows, width), skipped=slots % rows),)
    return (launch_context.TileTransform((rows, width), rounding=launch_context.Rounding.DOWN),)


def _emit_parts(transforms, parts, ctx, source, tile, *scalars) -> None:
    """Emits the arrival for all bytes of a KV tile's parts, and the copies."""
    index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
    at = functools.partial(arith.constant, index)
    address, *place = (x.registers.item() for x in scalars)
    block, start, head = (arith.index_cast(index, x) for x in place)
    pointer = llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), address)
    barrier = utils.BarrierRef(pointer, arith.constant(i32, 0), None, 1)
    elected = utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)
    slots, head_dims = ir.MemRefType(source.type).shape[1], _head_dims(tile)
    count = sum(part.count for part in parts)
    num_bytes = count * head_dims * utils.bitwidth(ir.MemRefType(tile.type).element_type) // 8
    # A barrier of Pallas counts each thread of a warpgroup that arrives at it.
    barrier.arrive_expect_tx(num_bytes // utils.WARPGROUP_SIZE)
    for part in parts:
        first = part.at // SLOT_MULTIPLE
        if part.view == _GROUP:
            destination = utils.memref_slice(tile, (first,))
        elif transforms:
            destination = utils.memref_slice(tile, (slice(first, first + part.count // SLOT_MULTIPLE),))
        else:
            destination = tile
        slot = at(slots) if part.is_beyond else arith.addi(start, at(part.at))
        ctx.async_copy(
            src_ref=source,
            dst_ref=destination,
            gmem_slice=(block, utils.ds(slot, part.count), head, utils.ds(at(0), head_dims)),
            gmem_transform=_transforms_of(part.view, transforms, slots),
            barrier=barrier,
            swizzle=transforms[1].swizzle if transforms else None,
            arrive=False,
            predicate=elected,
        )


def _head_dims(tile) -> int:
    """Returns the head dims of a tile in shared memory, maybe `[slots / 8, tiles of head dims, 8, width]`."""
    size = ir.MemRefType(tile.type).shape
    return size[1] * size[3] if len(size) == 4 else size[1]


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
