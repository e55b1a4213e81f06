"""Counts by which the CTAs of a launch know how many others are done.

The last CTA to leave a partial state of an output tile merges them, in the launch that made them. No CTA waits for
another. Each counts itself in when its partial state is in memory, and learns how many came before.
The last finds all partial states of the output tile, folds them in the order of their keys, and sets the count to zero.
Whichever CTA is last, results are the same to the bit.

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
