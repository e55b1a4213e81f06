"""Counts by which the CTAs of a launch know how many others are done.

The CTAs that leave partial states of an output tile merge them, in the launch that made them. Each counts itself in
when its partial state is in memory, and learns how many came before. Two ways follow:
- The last finds all partial states, merges them, and sets the count to zero. No CTA waits for another.
- Or all merge a part each. A CTA reads the count until all have arrived, but not for long, for they may not all be
  running. It merges its part, or gives up, and counts itself out. The last to leave sets the count to zero. If one had
  given up it merges all parts again, with the same results.
Partial states are folded in the order of their keys, so whichever CTA merges, results are the same to the bit.

The counts are an operand that XLA fills with zeros. Every kernel leaves them as it found them. So one array serves all
kernels of a program, and to XLA no kernel writes it. These kernels must run one after another, as XLA's
command buffers do by default. Where XLA_FLAGS says otherwise, no launch merges (`launch_order.py`). An option that is
given to the compiler of one program is not seen here: with `xla_gpu_command_buffer_scheduling_mode`
of CONCURRENT, JAX 0.12 would run kernels that do not depend on each other at once, and they would miscount.
`tests/kernels/arrivals_model.py` explores every order of the CTAs' operations.

Sources: LeanAttention, section 4.3, where a host CTA waits for the others; PTX ISA, "Memory Consistency Model".
"""

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from tree_attn.kernels import mlir as ops

COUNT_BITS = 10  # of a count: how many arrived, above them how many left, above these how many of them had given up
MAX_READS = 64  # of a count by a CTA that waits for the others: 50 us or so

_SCALAR = plgpu.Layout.WG_SPLAT


def arrive(counts_ref, indices, are_counted, places_smem):
    """Counts a warpgroup in, and returns how many warpgroups of other CTAs were counted before it, int32 each.

    What the warpgroup wrote to memory is seen by all that are counted in later.

    Args:
      counts_ref: int32 `[n]`; indices: which of them.
      are_counted: whether it is counted there; where it is not, the result is undefined.
      places_smem: 4 bytes for each index, shared memory of the warpgroup, of any dtype and without transforms.
    """
    scalars = [jnp.asarray(x, jnp.int32) for pair in zip(indices, are_counted, strict=True) for x in pair]
    before = plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), *[_SCALAR] * len(scalars)), return_type=(before,) * len(indices)
    )
    def emit(_, counts, places, *scalars):
        first = _shared_address(places)
        places = [arith.addi(first, arith.constant(ops.i32(), 4 * i)) for i in range(len(indices))]
        pairs = [x.registers.item() for x in scalars]
        utils.warpgroup_barrier()  # all threads have written
        with mgpu.when(utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)):
            ops.asm("fence.acq_rel.gpu;", None)
            for place, index, is_counted in zip(places, pairs[::2], pairs[1::2]):
                text = (
                    "{ .reg .pred counted; .reg .b32 before; setp.ne.u32 counted, $2, 0; mov.b32 before, 0; "
                    "@counted atom.relaxed.gpu.global.add.u32 before, [$0], 1; st.shared.u32 [$1], before; }"
                )
                ops.asm(text, None, _address(counts, index), place, is_counted)
            ops.asm("fence.acq_rel.gpu;", None)
        utils.warpgroup_barrier()
        found = [ops.asm("ld.shared.u32 $0, [$1];", ops.i32(), place) for place in places]
        return tuple(mgpu.FragmentedArray.splat(x, (), is_signed=True) for x in found)

    return emit(counts_ref, places_smem, *scalars)


def await_others(counts_ref, index, count, place_smem):
    """Waits until all have arrived, for a while. Returns whether they have, int32; if so, sees what they wrote.

    Args:
      counts_ref, index: as in `arrive`; count: how many they are.
      place_smem: 4 bytes of shared memory, as there.
    """
    text = (
        "{ .reg .pred all, again; .reg .b32 found, left; "
        f"mov.b32 left, {MAX_READS}; "
        "AGAIN: ld.acquire.gpu.global.u32 found, [$0]; "
        f"and.b32 found, found, {2**COUNT_BITS - 1}; "
        "setp.eq.u32 all, found, $1; @all bra DONE; "
        "sub.u32 left, left, 1; setp.ne.u32 again, left, 0; @again bra AGAIN; "
        "DONE: selp.u32 found, 1, 0, all; st.shared.u32 [$2], found; }"
    )
    return _by_one_thread(text, counts_ref, index, (count,), place_smem)


def depart(counts_ref, index, count, has_given_up, place_smem):
    """Counts a warpgroup out. Returns whether it is the last and one had given up, int32: nobody may have its part.

    The last sets the count to zero, for the next kernel.

    Args:
      counts_ref, index, count, place_smem: as in `await_others`.
      has_given_up: whether it did, an int32.
    """
    text = (
        "{ .reg .pred last; .reg .b32 old, left; "
        "atom.acq_rel.gpu.global.add.u32 old, [$0], $2; add.u32 old, old, $2; "
        f"bfe.u32 left, old, {COUNT_BITS}, {COUNT_BITS}; "
        "setp.eq.u32 last, left, $1; @last st.relaxed.gpu.global.u32 [$0], 0; "
        f"shr.u32 old, old, {2 * COUNT_BITS}; "
        "setp.ne.and.u32 last, old, 0, last; selp.u32 old, 1, 0, last; st.shared.u32 [$3], old; }"
    )
    added = 2**COUNT_BITS + has_given_up * 2 ** (2 * COUNT_BITS)
    return _by_one_thread(text, counts_ref, index, (count, added), place_smem)


def _by_one_thread(text: str, counts_ref, index, scalars, place_smem):
    """Returns what one thread of the warpgroup writes to `place_smem`, whose address is the last operand of `text`."""
    result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR)
    scalars = [jnp.asarray(x, jnp.int32) for x in (index, *scalars)]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), *[_SCALAR] * len(scalars)), return_type=result)
    def emit(_, counts, place, *scalars):
        index, *operands = [x.registers.item() for x in scalars]
        place = _shared_address(place)
        utils.warpgroup_barrier()  # all threads have read what was there
        with mgpu.when(utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)):
            ops.asm(text, None, _address(counts, index), *operands, place)
        utils.warpgroup_barrier()
        return mgpu.FragmentedArray.splat(ops.asm("ld.shared.u32 $0, [$1];", ops.i32(), place), (), is_signed=True)

    return emit(counts_ref, place_smem, *scalars)


def reset(counts_ref, index) -> None:
    """Sets a count to zero, for the next kernel."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR))
    def emit(_, counts, index):
        address = _address(counts, index.registers.item())
        with mgpu.when(utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)):
            ops.asm("st.relaxed.gpu.global.u32 [$0], 0;", None, address)

    emit(counts_ref, jnp.asarray(index, jnp.int32))


def _address(counts, index):
    offset = arith.muli(arith.extui(ops.i64(), index), ops.constant(4))
    return ops.plus(llvm.ptrtoint(ops.i64(), utils.memref_ptr(counts)), offset)


def _shared_address(ref):
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(ref))
