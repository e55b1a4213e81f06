"""Which CTA is the last to leave a partial state of an output tile: it merges them, in the launch that made them.

No CTA waits for another. Each counts itself in when its partial state is in memory, and learns how many came before.
The last finds all partial states of the output tile, folds them in the order of their keys, whoever it is, and counts
down to zero. So results are the same to the bit in every run.

The counts are an operand that XLA fills with zeros once in a program. Every kernel leaves them as it found them, which
is why one array serves all layers, and why to XLA no kernel writes it. Kernels of a program run one after another.
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

_SCALAR = plgpu.Layout.WG_SPLAT


def arrive(counts_ref, index, place_smem):
    """Counts a warpgroup in, and returns how many warpgroups of other CTAs were counted before it, int32.

    What the warpgroup wrote to memory is seen by all that are counted in later.

    Args:
      counts_ref: int32 `[n]`; index: which of them.
      place_smem: int32 `[1]`, shared memory of the warpgroup.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), _SCALAR),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR),
    )
    def emit(_, counts, place, index):
        address, place = _address(counts, index), _shared_address(place)
        utils.warpgroup_barrier()  # all threads have written
        with mgpu.when(utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)):
            text = (
                "{ .reg .b32 before; fence.acq_rel.gpu; atom.relaxed.gpu.global.add.u32 before, [$0], 1; "
                "st.shared.u32 [$1], before; }"
            )
            ops.asm(text, None, address, place)
        utils.warpgroup_barrier()
        before = ops.asm("ld.shared.u32 $0, [$1]; fence.acq_rel.gpu;", ops.i32(), place)
        return mgpu.FragmentedArray.splat(before, (), is_signed=True)

    return emit(counts_ref, place_smem, jnp.asarray(index, jnp.int32))


def reset(counts_ref, index) -> None:
    """Sets a count to zero, for the next kernel."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR))
    def emit(_, counts, index):
        address = _address(counts, index)
        with mgpu.when(utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)):
            ops.asm("st.relaxed.gpu.global.u32 [$0], 0;", None, address)

    emit(counts_ref, jnp.asarray(index, jnp.int32))


def _address(counts, index):
    offset = arith.muli(arith.extui(ops.i64(), index.registers.item()), ops.constant(4))
    return ops.plus(llvm.ptrtoint(ops.i64(), utils.memref_ptr(counts)), offset)


def _shared_address(ref):
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(ref))
