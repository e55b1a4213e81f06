"""The k largest of the scores in a warpgroup's registers, by bisection over the order of floats, and their list.

Registers hold one score per key, `[W, 64]`, of a chunk of W x 64 slots.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, scf

from tree_attn.kernels.interpreter import is_interpreted
from tree_attn.kernels.mlir import asm
from tree_attn.kernels.registers import LOG2_E
from tree_attn.kernels.sparq_shape import WARPS

MIN_RANK, MAX_RANK = -0x7F800000, 0x7F800000  # of the least finite float32, and of infinity


def slots_of_chunk(shape, ends_ref):
    """Returns the slots within a chunk, whether each is visible, and whether it is kept whatever it scores."""
    iota = functools.partial(plgpu.broadcasted_iota, jnp.int32, shape, layout=plgpu.Layout.WGMMA)
    slots = iota(0) * shape[1] + iota(1)
    end, recent = ends_ref[0], ends_ref[1]
    is_visible = slots < end
    return slots, is_visible, is_visible & (slots >= recent)


def scores_of(shares, is_visible, is_recent):
    """Returns the scores: infinity of keys that are always kept, -inf of invisible ones."""
    return jnp.where(is_visible, jnp.where(is_recent, jnp.inf, shares), -jnp.inf)


def log2_of_sum(x, y):
    """Returns `log2(2^x + 2^y)`: shares are added as logarithms, for the smallest would all be 0."""
    larger = jnp.maximum(x, y)
    return larger + jnp.log2(1.0 + jnp.exp2(jnp.minimum(x, y) - larger))


def lse_of(top, weight):
    """Returns `ln(weight 2^top)`."""
    return jnp.where(weight == 0, -jnp.inf, (top + jnp.log2(weight)) * (1 / LOG2_E))


def scalar_of(x, operation: str, layout, smem):
    """Returns the "add" or "max" of all of `x`: Pallas reduces a matrix along one axis only, and to a vector."""
    if is_interpreted():
        return jnp.sum(x) if operation == "add" else jnp.max(x)
    result = plgpu.ShapeDtypeStruct((), x.dtype, layout=plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()), return_type=result)
    def emit(_, x, smem):
        return x.reduce(operation, tuple(range(len(x.shape))), smem)

    return emit(x, smem)


def counting(smem):
    """Returns the function that counts a bool matrix's true elements."""
    return lambda chosen: scalar_of(jnp.where(chosen, 1, 0), "add", plgpu.Layout.WGMMA, smem)


def first_largest(scores, slots, num_slots: int, num_keys: int, count):
    """Returns whether each is one of the `num_keys` largest; of equals the earliest, and none that is -inf."""

    def halve(state):
        low, high, found = state
        middle = (low | high) - ((low ^ high) >> 1)  # rounded up, and without an overflow
        now = count(scores >= _float_of_rank(middle, scores.shape))
        is_enough, is_exact = now >= num_keys, now == num_keys
        high = jnp.where(is_enough, jnp.where(is_exact, middle, high), middle - 1)
        return jnp.where(is_enough, middle, low), high, jnp.where(is_enough, now, found)

    is_open = lambda state: state[0] < state[1]
    # The largest score that `num_keys` keys reach, or the lowest finite one where fewer are visible.
    rank, _, found = lax.while_loop(is_open, halve, (jnp.int32(MIN_RANK), jnp.int32(MAX_RANK), jnp.int32(0)))
    threshold = _float_of_rank(rank, scores.shape)
    above = count(scores > threshold)

    def halve_slots(state):
        low, high = state
        middle = (low + high) >> 1
        is_enough = above + count((scores == threshold) & (slots < middle)) >= num_keys
        return jnp.where(is_enough, low, middle + 1), jnp.where(is_enough, middle, high)

    # Only if too many keys have the threshold's score is there a last slot to find.
    first = jnp.where(found > num_keys, jnp.int32(0), jnp.int32(num_slots))
    last, _ = lax.while_loop(is_open, halve_slots, (first, jnp.int32(num_slots)))
    return (scores > threshold) | ((scores == threshold) & (slots < last))


def _float_of_rank(rank, shape):
    """Returns float32 of `shape` from its rank: int32 in the order of floats."""
    bits = jnp.broadcast_to(jnp.where(rank < 0, rank ^ 0x7FFFFFFF, rank), shape)
    return lax.bitcast_convert_type(bits, jnp.float32)


def write_lists(is_kept, lists, smem) -> None:
    """Writes the kept elements of each array of `lists`, pairs of array and reference, in the same order."""
    if not is_interpreted():
        _list(jnp.where(is_kept, 1, 0), *zip(*lists), smem)
        return
    for array, ref in lists:
        found = jnp.nonzero(is_kept.ravel(), size=ref.shape[0], fill_value=0)[0]
        ref[...] = array.ravel()[found]


def _list(is_kept, arrays, refs, smem) -> None:
    """Lists the elements of `arrays [W, 64]` where int32 `is_kept` is 1, placed by a prefix sum over threads.

    Pallas has no scatter, so this is written in MLIR, for each thread and the registers that it holds.
    """
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(arg_types=(layout, (layout,) * len(arrays), (plgpu.RefType(),) * len(refs), plgpu.RefType()))
    def emit(_, is_kept, arrays, refs, smem):
        i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
        constant = lambda x: arith.constant(i32, x)
        as_index = lambda x: arith.index_cast(index, x)
        thread = arith.remui(utils.thread_idx(), constant(32 * WARPS))
        lane, warp = arith.remui(thread, constant(32)), arith.divui(thread, constant(32))
        thread_kept = _elements(is_kept)
        thread_count = functools.reduce(arith.addi, thread_kept)
        through = thread_count  # of this lane and those before it
        for distance in (1, 2, 4, 8, 16):
            below = asm("shfl.sync.up.b32 $0, $1, $2, 0, -1;", i32, through, constant(distance))
            is_there = arith.cmpi(arith.CmpIPredicate.uge, lane, constant(distance))
            through = arith.addi(through, arith.select(is_there, below, constant(0)))
        is_last = arith.cmpi(arith.CmpIPredicate.eq, lane, constant(31))
        with ir.InsertionPoint(scf.IfOp(is_last).then_block):
            memref.store(through, smem, [as_index(warp)])
            scf.yield_([])
        utils.warpgroup_barrier()
        place = arith.subi(through, thread_count)
        for other in range(WARPS - 1):
            is_before = arith.cmpi(arith.CmpIPredicate.ugt, warp, constant(other))
            before = memref.load(smem, [arith.constant(index, other)])
            place = arith.addi(place, arith.select(is_before, before, constant(0)))
        for is_one, *values in zip(thread_kept, *map(_elements, arrays)):
            with ir.InsertionPoint(scf.IfOp(arith.cmpi(arith.CmpIPredicate.ne, is_one, constant(0))).then_block):
                for value, ref in zip(values, refs):
                    memref.store(value, ref, [as_index(place)])
                scf.yield_([])
            place = arith.addi(place, is_one)

    emit(is_kept, tuple(arrays), tuple(refs), smem)


def _elements(array) -> list[ir.Value]:
    """Returns a thread's elements of an array in registers."""
    elements = []
    array.foreach(lambda x, _: elements.append(x))
    return elements
