"""Meetings of the CTAs of a launch: each waits until all have come, by a count in global memory.

The highest bit of the count is its side. Each CTA adds one. The first CTA adds what changes the side when all have
come, and leaves the other bits zero. A CTA reads the side before it comes, and then waits until the other side shows.
So a count is never reset, and the next kernel that meets by it takes either side.

All CTAs must be running, or have run: the kernel has no more than fit the GPU at once. `tests/kernels/chain_model.py`
explores every order of their operations.

Sources: Mellor-Crummey and Scott, "Algorithms for Scalable Synchronization on Shared-Memory Multiprocessors", 1991,
section 3.1; PTX ISA, "Memory Consistency Model".
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith, llvm

from tree_attn.kernels import mlir as ops

SIDE = 2**31  # the highest bit of a count
_SCALAR = plgpu.Layout.WG_SPLAT


def read_count(counts_ref, index: int):
    """Returns a count, int32, whose side it is before the meeting. A CTA reads it before it comes.

    Args:
      counts_ref: uint32 `[n]`; index: which of them.
    """
    result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def emit(_, counts):
        found = ops.asm("ld.relaxed.gpu.global.u32 $0, [$1];", ops.i32(), _address(counts, index))
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    return emit(counts_ref)


def other_side(before, times):
    """Returns a count of `read_count` as it would be if all had met so many times since, int32."""
    return before ^ (times << 31)


def come(counts_ref, index: int, num_ctas: int) -> None:
    """Counts a CTA in by one of its warpgroups. What this wrote to memory is seen by all that have met.

    Args:
      counts_ref: uint32 `[n]`; index: which of them.
      num_ctas: that come.
    """
    of_first = np.uint32(SIDE - (num_ctas - 1)).astype(np.int32)
    added = jnp.where(lax.axis_index("cta") == 0, of_first, np.int32(1))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR))
    def emit(_, counts, added):
        utils.warpgroup_barrier()  # all threads have written, or read
        with mgpu.when(utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)):
            text = "red.release.gpu.global.add.u32 [$0], $1;"
            ops.asm(text, None, _address(counts, index), added.registers.item())

    emit(counts_ref, added)


def meet(counts_ref, index: int, before) -> None:
    """Waits until all CTAs have come, and sees what they wrote, by TMA too.

    Args:
      counts_ref: uint32 `[n]`; index: which of them.
      before: of `read_count`.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR))
    def emit(_, counts, before):
        with mgpu.when(utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)):
            text = (
                "{ .reg .pred is_same; .reg .b32 found; AGAIN: ld.acquire.gpu.global.u32 found, [$0]; "
                "xor.b32 found, found, $1; setp.ge.s32 is_same, found, 0; @is_same bra AGAIN; }"
            )
            ops.asm(text, None, _address(counts, index), before.registers.item())
        utils.warpgroup_barrier()
        ops.asm("fence.proxy.async.global;", None)  # the copies that follow are of the other proxy

    emit(counts_ref, before)


def _address(counts, index: int):
    offset = arith.constant(ops.i64(), 4 * index)
    return ops.plus(llvm.ptrtoint(ops.i64(), utils.memref_ptr(counts)), offset)
