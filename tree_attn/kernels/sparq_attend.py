"""SparQ's second gather on Hopper, step 2 of Algorithm 1: attention to the few keys and values that are kept.

`attend_kept` copies the listed keys and values, slot by slot, to where tensor cores multiply them. `sparq_select.py`
chooses them.

Source: SparQ Attention, Algorithm 1, step 2.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref

from tree_attn.kernels.interpreter import is_interpreted
from tree_attn.kernels.lean_merge import finish, result_tiling
from tree_attn.kernels.mlir import asm
from tree_attn.kernels.registers import LOG2_E, LOWEST, full, launch, store_transposed, tiling
from tree_attn.kernels.sparq_shape import COLS, REDUCTION_BYTES, WARPS, SparqShape, ctas_for

TILE = 64  # kept keys that are attended to at a time: a tile
STAGES = 1  # tiles of keys, and of values, in flight per CTA
CTAS_PER_SM = 4  # at most, by what registers hold


@functools.partial(jax.jit, static_argnames=("shape",))
def attend_kept(query, key, value, slots, counts, *, shape: SparqShape):
    """Computes attention of each choice's queries over the keys that they keep.

    Args:
      query: `[choices, G, H]`; key, value: `[B, S, K, H]`.
      slots: int32 `[choices, k]`, of which the first `counts`, int32 `[choices]`, are kept.
    Returns:
      out `[choices, G, H]` in the dtype of `query`, lse float32 `[choices, G]`.
    """
    out, lse = launch(
        functools.partial(_attend, shape),
        out_type=(
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct((shape.choices, COLS), jnp.float32),
        ),
        grid=(ctas_for(shape, shape.choices, _attend_smem_bytes(shape), max_per_sm=CTAS_PER_SM),),
        grid_names=("cta",),
        num_threads=1,
        thread_name="warpgroup",
        scratch_bytes=REDUCTION_BYTES,
        name="sparq_attend",
    )(query, key, value, slots, counts)
    return out, lse[:, : shape.group]


def _attend_smem_bytes(shape: SparqShape) -> int:
    """Returns the shared memory of the arrays in `_attend`; `ctas_for` adds room for barriers and reductions."""
    tiles = STAGES * TILE * (shape.head_dim + shape.padded_head_dim)
    return 2 * (tiles + COLS * (2 * shape.head_dim + TILE + shape.padded_head_dim))


def _attend(shape: SparqShape, *refs):
    # As in `lean.py`, K, V and the weights meet in the tensor core with one swizzle.
    swizzled = tiling(shape.dtype, math.gcd(shape.head_dim, TILE))
    smem = functools.partial(plgpu.SMEM, dtype=shape.dtype, transforms=swizzled)
    pl.run_scoped(
        functools.partial(_attend_scoped, shape, functools.partial(_copy_slots, swizzled), *refs),
        query_smem=smem((2, COLS, shape.head_dim)),
        key_smem=smem((STAGES, TILE, shape.head_dim)),
        value_smem=smem((STAGES, TILE, shape.padded_head_dim)),
        weights_smem=smem((COLS, TILE)),
        out_smem=smem((COLS, shape.padded_head_dim), transforms=result_tiling(shape)),
        lse_smem=plgpu.SMEM((COLS,), jnp.float32),
        query_full=plgpu.Barrier(num_barriers=2),
        collective_axes="warpgroup",
    )


def _attend_scoped(
    shape: SparqShape, copy, query_ref, key_ref, value_ref, slots_ref, counts_ref, out_ref, lse_ref, *,
    query_smem, key_smem, value_smem, weights_smem, out_smem, lse_smem, query_full,
):  # fmt: skip
    """Multiplies operands swapped as in `lean.py`; G of the columns are queries, and more of them cost nothing."""
    cta, num_ctas = lax.axis_index("cta"), lax.axis_size("cta")
    tiles, num_choices = pl.cdiv(shape.num_keys, TILE), lax.div(shape.choices - cta + num_ctas - 1, num_ctas)
    layout, padded = plgpu.Layout.WGMMA, shape.padded_head_dim
    columns = pl.ds(cta * 0, COLS)  # those past G are out of bounds: read as zeros, and not written

    def move_query(i):
        """Begins the copy of the queries of this CTA's i-th choice, into one of two places."""
        parity = lax.rem(i, 2)
        source = query_ref.at[cta + i * num_ctas, columns]
        plgpu.copy_gmem_to_smem(source, query_smem.at[parity], query_full.at[parity])

    def move(step):
        """Begins the copies of the tile of a step, over all choices: keys, and values; past the end both are empty."""
        choice, tile, stage = cta + lax.div(step, tiles) * num_ctas, lax.rem(step, tiles), lax.rem(step, STAGES)
        sequence, head = shape.sequence_and_head(choice)
        is_there = step < num_choices * tiles

        @pl.when(is_there)
        def _():
            keys, values = (
                (ref.at[sequence, :, head], smem.at[stage])
                for ref, smem in ((key_ref, key_smem), (value_ref, value_smem))
            )
            copy(*keys, *values, slots_ref.at[choice], tile * TILE, counts_ref[choice])

        if not is_interpreted():
            pl.when(~is_there)(lambda: _asm("cp.async.commit_group; cp.async.commit_group;"))

    spread = lambda x, size: lax.broadcast_in_dim(x, (size, COLS), [1])
    place = plgpu.broadcasted_iota(jnp.int32, (TILE, COLS), 0, layout=layout)
    move_query(jnp.int32(0))
    for step in range(STAGES):
        move(jnp.int32(step))

    def choice_step(i, _):
        choice, parity = cta + i * num_ctas, lax.rem(i, 2)
        count = counts_ref[choice]
        pl.when(i + 1 < num_choices)(lambda: move_query(i + 1))
        plgpu.barrier_wait(query_full.at[parity])

        def tile_step(tile, state):
            acc, top, total = state
            step = i * tiles + tile
            stage = lax.rem(step, STAGES)
            _await_copies(2 * STAGES - 1)
            logits = _product(key_smem.at[stage], query_smem.at[parity].transpose((1, 0)), TILE)  # [k, columns]
            logits = jnp.where(place + tile * TILE < count, logits * (shape.scale * LOG2_E), -jnp.inf)
            new_top = jnp.maximum(top, logits.max(axis=0))
            decay, weights = jnp.exp2(top - new_top), jnp.exp2(logits - spread(new_top, TILE))
            store_transposed(weights_smem, weights.astype(shape.dtype))
            _await_copies(2 * STAGES - 2)
            update = _product(value_smem.at[stage].transpose((1, 0)), weights_smem.transpose((1, 0)), padded)
            plgpu.commit_smem()  # all have read them
            move(step + STAGES)
            return acc * spread(decay, padded) + update, new_top, total * spread(decay, TILE) + weights

        empty = (
            full(0.0, (padded, COLS), layout),
            full(LOWEST, (COLS,), layout.reduce(0)),
            full(0.0, (TILE, COLS), layout),
        )
        acc, top, total = lax.fori_loop(0, tiles, tile_step, empty)
        total = total.sum(axis=0)
        acc = jnp.where(spread(total, padded) == 0, 0.0, acc)  # with none kept slot 0 was copied, whatever it holds
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last choice's result has left
        finish(acc, top, total, out_smem, lse_smem, shape)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_ref.at[choice, columns, pl.ds(cta * 0, padded)])
        plgpu.copy_smem_to_gmem(lse_smem, lse_ref.at[choice])

    lax.fori_loop(0, num_choices, choice_step, None)
    plgpu.wait_smem_to_gmem(0)


def _product(left, right, rows: int):
    """Returns `left right`, `[rows, columns]`."""

    def product(acc_ref):
        plgpu.wgmma(acc_ref, left, right)
        return acc_ref[...]

    return pl.run_scoped(product, plgpu.ACC((rows, COLS), jnp.float32))


def _copy_slots(transforms, key_ref, key_smem, value_ref, value_smem, slots_ref, first, count) -> None:
    """Begins to copy the slots `slots[first + i]` of `[S, H]` to `[TILE, H]`, keys and values as a group each.

    A slot has a few hundred bytes, which threads copy by 16 bytes: a TMA copy for each would take longer to begin. Past
    the `count` kept slots, the first of them is copied again.
    """
    if is_interpreted():
        _interpreted_copy(key_ref, key_smem, value_ref, value_smem, slots_ref, first, count)
        return
    gmem, smem, scalar = plgpu.RefType(), plgpu.RefType(transforms), plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(gmem, smem, gmem, smem, gmem, scalar, scalar))
    def emit(_, key_ref, key_smem, value_ref, value_smem, slots_ref, first, count):
        i32, i64, index = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64), ir.IndexType.get()
        constant, wide = lambda x: arith.constant(i32, x), lambda x: arith.extsi(i64, x)
        slot_at = lambda place: memref.load(slots_ref, [arith.index_cast(index, place)])
        chunks = ir.MemRefType(key_ref.type).shape[1] // 8  # of 16 bytes, in a slot
        thread = arith.remui(utils.thread_idx(), constant(32 * WARPS))
        first, count = (x.registers.item() for x in (first, count))
        last = constant(ir.MemRefType(slots_ref.type).shape[0] - 1)
        # With none kept the list is undefined.
        other = arith.select(arith.cmpi(arith.CmpIPredicate.eq, count, constant(0)), constant(0), slot_at(constant(0)))
        chunks_of_thread = []
        for start in range(0, TILE * chunks, 32 * WARPS):
            index_in_tile = arith.addi(thread, constant(start))
            place, chunk = (f(index_in_tile, constant(chunks)) for f in (arith.divui, arith.remui))
            listed = arith.addi(first, place)
            # All slots are read before the first copy begins: the compiler moves no read past a copy.
            slot = slot_at(arith.minsi(listed, last))
            slot = arith.select(arith.cmpi(arith.CmpIPredicate.slt, listed, count), slot, other)
            chunks_of_thread.append((place, chunk, slot))
        for source_ref, smem in ((key_ref, key_smem), (value_ref, value_smem)):
            (stride, _), _ = ir.MemRefType(source_ref.type).get_strides_and_offset()
            source = llvm.ptrtoint(i64, utils.memref_ptr(source_ref))
            target = llvm.ptrtoint(i32, utils.memref_ptr(smem))
            for place, chunk, slot in chunks_of_thread:
                element = arith.muli(wide(slot), arith.constant(i64, 2 * stride))
                asm(
                    "cp.async.cg.shared.global [$0], [$1], 16;",
                    None,
                    arith.addi(target, _swizzled_offset(ir.MemRefType(smem.type), place, chunk)),
                    arith.addi(source, arith.addi(element, wide(arith.muli(chunk, constant(16))))),
                )
            asm("cp.async.commit_group;", None)

    emit(key_ref, key_smem, value_ref, value_smem, slots_ref, first, count)


def _swizzled_offset(tiled: ir.MemRefType, row: ir.Value, chunk: ir.Value) -> ir.Value:
    """Returns the offset in bytes of 16 bytes of a row, in 2-byte elements `[rows / 8, tiles, 8, width]`.

    Within a tile of 8 rows, the address bits above 128 bytes permute a row's chunks.
    """
    i32 = ir.IntegerType.get_signless(32)
    constant = lambda x: arith.constant(i32, x)
    (by_tile_row, by_tile, _, _), _ = tiled.get_strides_and_offset()
    width = 2 * tiled.shape[-1]
    tile, chunk = (f(chunk, constant(width // 16)) for f in (arith.divui, arith.remui))
    tile_row, row = (f(row, constant(8)) for f in (arith.divui, arith.remui))
    within = arith.addi(arith.muli(row, constant(width)), arith.muli(chunk, constant(16)))
    within = arith.xori(within, arith.andi(arith.shrui(within, constant(3)), constant(width - 16)))
    before = arith.addi(arith.muli(tile_row, constant(2 * by_tile_row)), arith.muli(tile, constant(2 * by_tile)))
    return arith.addi(before, within)


def _asm(text: str) -> None:
    @plgpu.inline_mgpu()
    def emit(_):
        asm(text, None)

    emit()


def _await_copies(groups: int) -> None:
    """Waits until at most `groups` groups of copies are in flight; all threads see the others' copied data."""
    if not is_interpreted():
        _asm(f"cp.async.wait_group {groups};")
    plgpu.commit_smem()


def _interpreted_copy(key_ref, key_smem, value_ref, value_smem, slots_ref, first, count) -> None:
    """Does what `_copy_slots` does, by operations that the interpreter has."""
    listed, places = slots_ref[...], first + jnp.arange(TILE)
    other = jnp.where(count == 0, 0, listed[0])
    slots = jnp.where(places < count, listed[jnp.minimum(places, listed.shape[0] - 1)], other)
    for source_ref, smem in ((key_ref, key_smem), (value_ref, value_smem)):
        smem[:, pl.ds(0, source_ref.shape[-1])] = source_ref[...][slots]
