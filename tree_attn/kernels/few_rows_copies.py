"""Copies of a stage that arrive at its barriers together.

A stage is up to 16 copies of weights, and 8 of x. For each of them `plgpu.copy_gmem_to_smem` has all threads of
the warpgroup meet, and arrive. Here they arrive once for all bytes, and one thread begins all copies.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import launch_context, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from tree_attn.kernels import mlir as ops
from tree_attn.kernels.few_rows_layout import GRAIN, IN_MULTIPLE, FewRowsConfig, FewRowsShape
from tree_attn.kernels.few_rows_of_layers import CopiesOfLayer, all_refs, grouped, layer_of
from tree_attn.kernels.kv_parts import BARRIER_BYTES, address_of_barriers
from tree_attn.kernels.registers import tiling

_SCALAR = plgpu.Layout.WG_SPLAT


def blocks_of(config: FewRowsConfig):
    """Yields slab, place in its stack, and the number of both, of each block of a stage."""
    for slab in range(config.slabs):
        for place in range(config.stack):
            yield slab, place, slab * config.stack + place


def row_of(slab: int, part: int, place: int, group: int, shape: FewRowsShape, config: FewRowsConfig) -> int:
    """Returns the row of a stage's weights at which a group of 8 out-features of a block begins."""
    return (slab * shape.parts + part) * config.stacked + place * config.tile + group * GRAIN


def copy_weights_together(
    refs, smems, barriers, stage, column, features, *, shape: FewRowsShape, config: FewRowsConfig
) -> None:
    """Begins the copies of a stage's weights, and of its norm's scale.

    Args:
      refs: weights `[parts, O, I]`, and scale `[I]` where there is a norm; smems: `weights_smem` and `scale_smem`.
      barriers: of the stages; stage: its number.
      column: the first of its in-features.
      features: the first out-feature of the tile; or of each group of 8, if they do not lie together.
    """
    rows = config.tile if len(features) == 1 else GRAIN
    stage = jnp.asarray(stage, jnp.int32)
    first_tile = stage * (config.stage_rows(shape) // GRAIN)
    targets = [smems[0], *(smem.at[stage] for smem in smems[1:])]
    num_bytes = _block_bytes(shape, config, shape.parts * config.tile + len(refs) - 1)

    def emit(ctx, copy, first_tile, column, *features):
        (weights, target), *scales = copy.pairs
        for slab, place, block in blocks_of(config):
            columns = utils.ds(_plus(column, block * config.block_in), config.block_in)
            for part in range(shape.parts):
                for group, feature in enumerate(features):
                    tile = _plus(first_tile, row_of(slab, part, place, group, shape, config) // GRAIN)
                    place_of_tile = utils.memref_slice(target, (utils.ds(tile, rows // GRAIN),))
                    copy(ctx, weights, (_index(part), utils.ds(feature, rows), columns), place_of_tile)
            for scale, scale_target in scales:
                copy(ctx, scale, (columns,), utils.memref_slice(scale_target, (block,)), is_tiled=False)

    _emit(emit, refs, targets, barriers, stage, num_bytes, [first_tile, column, *features], shape.dtype)


def copy_x_together(ref, smem, barriers, stage, column, *, shape: FewRowsShape, config: FewRowsConfig) -> None:
    """Begins the copies of a stage's x.

    Args:
      ref: `[rows, I]`; smem: `x_smem`; others as in `copy_weights_together`.
    """

    def emit(ctx, copy, column):
        ((x, target),) = copy.pairs
        is_tiled = not config.is_compact
        rows = config.x_rows(shape) // GRAIN if is_tiled else config.x_rows(shape)  # of the target's first dimension
        for *_, block in blocks_of(config):
            columns = utils.ds(_plus(column, block * config.block_in), config.block_in)
            part = utils.memref_slice(target, (slice(block * rows, (block + 1) * rows),))
            # Rows past the last are out of bounds: read as zeros.
            copy(ctx, x, (utils.ds(_index(0), config.x_rows(shape)), columns), part, is_tiled=is_tiled)

    num_bytes = _block_bytes(shape, config, config.x_rows(shape))
    num_tiled = 0 if config.is_compact else 1
    _emit(emit, [ref], [smem.at[stage]], barriers, stage, num_bytes, [column], shape.dtype, num_tiled=num_tiled)


def copy_kv_together(refs, smem, barriers, stage, place, *, block_kv: int) -> None:
    """Begins the copies of a KV tile.

    Args:
      refs: keys and values, `[B, S, K, H]`; smem: of a ring's stages, first the keys of each, then its values.
      barriers, stage: as in `copy_weights_together`.
      place: sequence, first slot, and head. What is beyond the last slot is filled with zeros.
    """
    dtype, head_dim = refs[0].dtype, refs[0].shape[-1]
    sequence, first_slot, head = place
    first_tile = stage * (2 * block_kv // GRAIN)

    def emit(ctx, copy, first_tile, sequence, first_slot, head):
        for number, (array, target) in enumerate(copy.pairs):
            tiles = utils.ds(_plus(first_tile, number * block_kv // GRAIN), block_kv // GRAIN)
            slots, head_dims = utils.ds(first_slot, block_kv), utils.ds(_index(0), head_dim)
            copy(ctx, array, (sequence, slots, head, head_dims), utils.memref_slice(target, (tiles,)))

    num_bytes = 2 * block_kv * head_dim * jnp.dtype(dtype).itemsize
    scalars = [first_tile, sequence, first_slot, head]
    _emit(emit, refs, [smem, smem], barriers, stage, num_bytes, scalars, dtype, num_tiled=2)


def await_copies(barriers, step, num_stages: int) -> None:
    """Waits until the copies of a step of the ring have arrived, which must be the last that its stage has.

    Unlike `plgpu.barrier_wait` it may leave out steps, and wait for one more than once.
    """
    address, phase = _barrier_and_phase(barriers, step, num_stages)

    @plgpu.inline_mgpu(arg_types=(_SCALAR, _SCALAR))
    def emit(_, address, phase):
        parity = arith.trunci(ir.IntegerType.get_signless(1), phase.registers.item())
        _barrier_at(address.registers.item()).wait_parity(parity)

    emit(address, phase)


def await_copies_or_x(full, step, x_step, earlier, num_stages: int) -> None:
    """Waits until the weights of a step have arrived, or both x of `x_step` and the weights of an earlier step.

    Of x the stage may have a later step by then. If that has arrived too, x counts as missing. So the wait may be
    longer than it need be, but it ends: the weights of `step` arrive in any case.

    Args:
      full: barriers of weights, and of x.
      step, earlier: as `await_copies` takes a step; x_step: one of which no other than the next may have arrived.
    """
    awaited = (full[0], step), (full[-1], x_step), (full[0], earlier)
    places = [x for barriers, step in awaited for x in _barrier_and_phase(barriers, step, num_stages)]

    @plgpu.inline_mgpu(arg_types=(_SCALAR,) * len(places))
    def emit(_, *places):
        is_there = "mbarrier.test_wait.parity.shared::cta.b64 is_there,"
        text = f"""{{
          .reg .pred is_there;
          AGAIN:
          {is_there} [$0], $1;
          @is_there bra DONE;
          {is_there} [$2], $3;
          @!is_there bra AGAIN;
          {is_there} [$4], $5;
          @!is_there bra AGAIN;
          DONE:
        }}"""
        addresses, phases = ([x.registers.item() for x in places[first::2]] for first in (0, 1))
        parities = [arith.andi(phase, ops.int32(1)) for phase in phases]
        ops.asm(text, None, *(x for place in zip(addresses, parities) for x in place))

    emit(*places)


def _barrier_and_phase(barriers, step, num_stages: int) -> tuple:
    """Returns the address of a step's barrier, and the number of its phase."""
    step = jnp.asarray(step, jnp.int32)
    address = address_of_barriers(barriers) + lax.rem(step, num_stages) * BARRIER_BYTES
    return address, lax.div(step, num_stages)


def _barrier_at(address) -> utils.BarrierRef:
    pointer = llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), address)
    return utils.BarrierRef(pointer, arith.constant(ops.i32(), 0), None, 1)


def _block_bytes(shape: FewRowsShape, config: FewRowsConfig, rows: int) -> int:
    """Returns the bytes of so many rows of all blocks of a stage."""
    return rows * config.in_features_of_stage * jnp.dtype(shape.dtype).itemsize


def _emit(body, refs, targets, barriers, stage, num_bytes: int, scalars, dtype, *, num_tiled: int = 1) -> None:
    """Emits one arrival for all bytes, and the copies of `body`; the first `num_tiled` targets lie in tiles."""
    transforms = tiling(dtype, IN_MULTIPLE)
    address = address_of_barriers(barriers) + stage * BARRIER_BYTES
    scalars = [jnp.asarray(x, jnp.int32) for x in (address, layer_of(refs), *scalars)]
    sources = [array for ref in refs for array in all_refs(ref)]
    of_targets = [plgpu.RefType(transforms)] * num_tiled + [plgpu.RefType()] * (len(targets) - num_tiled)

    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * len(sources), *of_targets, *[_SCALAR] * len(scalars)))
    def emit(ctx, *operands):
        of_refs, operands = grouped(operands[: len(sources)], refs), operands[len(sources) :]
        address, layer, *places = (x.registers.item() for x in operands[len(targets) :])
        copy = _Copy(address, layer, list(zip(of_refs, operands)))
        # A barrier of Pallas counts each thread of a warpgroup that arrives at it.
        copy.barrier.arrive_expect_tx(num_bytes // utils.WARPGROUP_SIZE)
        body(ctx, copy, *(arith.index_cast(ir.IndexType.get(), place) for place in places))

    emit(*sources, *targets, *scalars)


class _Copy:
    """Copies by one thread, which do not arrive by themselves.

    `pairs` are sources and targets, where a source is the arrays of all layers, of which that of `layer` is copied.
    """

    def __init__(self, address, layer, pairs):
        self.barrier, self.layer = _barrier_at(address), layer
        self.elected = utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)
        self.pairs = pairs

    def __call__(self, ctx, source, place, target, *, is_tiled: bool = True) -> None:
        itemsize = utils.bitwidth(ir.MemRefType(source[0].type).element_type) // 8
        if len(source) > 1:
            copy = CopiesOfLayer(ctx, source, self.layer).async_copy
        else:
            copy = functools.partial(ctx.async_copy, src_ref=source[0])
        copy(
            dst_ref=target,
            gmem_slice=place,
            gmem_transform=(launch_context.TileTransform((GRAIN, IN_MULTIPLE)),) if is_tiled else (),
            swizzle=IN_MULTIPLE * itemsize if is_tiled else None,
            barrier=self.barrier,
            arrive=False,
            predicate=self.elected,
        )


def _index(value: int):
    return arith.constant(ir.IndexType.get(), value)


def _plus(index, value: int):
    return index if value == 0 else arith.addi(index, _index(value))
