"""Parts that the kernels for Hopper share: numbers of the hardware, launching, layouts of memory and registers."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

LOG2_E = math.log2(math.e)
# A finite stand-in for -inf: exp2(LOWEST - LOWEST) is 1, where -inf - -inf would be NaN.
LOWEST = float(np.finfo(np.float32).min)
# The largest soft cap whose logits err by less than the tolerance of lse, 1e-7 of the cap; and the largest `x` of which
# three terms of `tanh(x)` do.
MAX_PLAIN_CAP, SERIES_BELOW = 64.0, 0.125
RESERVED_SMEM_BYTES = 1024  # per CTA, by the hardware
WRITES_IN_PLACE = (0, 11)  # JAX, in whose kernels results can be arguments


def launch(body, *, scratch_bytes: int = 0, name: str, **options):
    """Returns `plgpu.kernel` of `body` with the settings of all kernels here; `scratch_bytes` are for reductions.

    Only Pallas' own reductions that cross warps take them.
    """
    params = plgpu.CompilerParams(
        approx_math=True,  # ex2.approx and lg2.approx: 2 ulp, far below the rounding of bf16 products
        reduction_scratch_bytes=scratch_bytes,
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
    )
    body.__name__ = name
    return plgpu.kernel(body, compiler_params=params, kernel_name=name, **options)


def tiling(dtype, elements: int):
    """Returns the transforms of the widest swizzle whose tiles divide a row of `elements`; none fits 80 bytes."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = next((s for s in (128, 64, 32) if elements * itemsize % s == 0), None)
    if swizzle is None:
        return ()
    return plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)


def load(ref, layout):
    """Loads `ref` to registers in `layout`."""
    index = () if jax.__version_info__ >= (0, 11) else ((),)  # JAX 0.10 insists on one, JAX 0.12 has none
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def transposable_layout():
    """Returns the layout of what is stored transposed: of WGMMA's results, but JAX 0.10 has one for this alone."""
    return plgpu.Layout.WGMMA if jax.__version_info__ >= (0, 11) else plgpu.Layout.WGMMA_TRANSPOSED


def store_transposed(ref, x):
    """Stores `x^T` to `ref`, in shared memory."""
    if jax.__version_info__ < (0, 11):
        x = plgpu.layout_cast(x, transposable_layout())
    ref.transpose((1, 0))[...] = x


def full(fill: float, shape, layout):
    """Returns float32 registers, all of them `fill`."""
    return plgpu.layout_cast(jnp.full(shape, fill, jnp.float32), layout)


def spread(x, shape, axis: int = 1):
    """Broadcasts `[n]` to `shape`, with the n along `axis`."""
    return lax.broadcast_in_dim(x, shape, [axis])


def scaled_logits(logits, scale: float, logits_soft_cap: float | None, key_scale):
    """Returns base-2 logits, `log2(e) cap(scale key_scale x)`."""
    scale = scale if key_scale is None else scale * key_scale
    if logits_soft_cap is None:
        return logits * (scale * LOG2_E)
    # tanh(x) = 1 - 2 / (exp(2 x) + 1); the hardware's own tanh has 11 bits.
    grown = jnp.exp2(logits * (scale * (2 * LOG2_E / logits_soft_cap)))
    capped = (1.0 - 2.0 / (grown + 1.0)) * (logits_soft_cap * LOG2_E)
    if logits_soft_cap <= MAX_PLAIN_CAP:
        return capped
    # The subtraction loses the digits of a logit that is small beside the cap; there the series is exact enough.
    logits = logits * scale
    square = logits * (1.0 / logits_soft_cap)
    square = square * square
    series = logits * LOG2_E * (1.0 + square * (square * (2 / 15) - 1 / 3))
    return jnp.where(square < SERIES_BELOW**2, series, capped)
