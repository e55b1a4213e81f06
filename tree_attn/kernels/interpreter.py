"""Kernels as Mosaic GPU's interpreter can run them, for tests.

The interpreter has neither inline MLIR nor a product whose left operand is in registers. A kernel that uses one of them
has a second form for it, and chooses by `is_interpreted()` while it is traced.
"""

import contextlib
import contextvars

_is_interpreted = contextvars.ContextVar("is_interpreted", default=False)


def is_interpreted() -> bool:
    """Returns whether the kernel that is being traced is for the interpreter."""
    return _is_interpreted.get()


@contextlib.contextmanager
def interpreted_kernels():
    """Has kernels traced in its context take their forms for the interpreter.

    It goes with `jax.experimental.pallas.mosaic_gpu.force_gpu_interpret_mode`, which keeps JAX from reusing a kernel
    that was traced without it.

    Example:
      >>> with interpreted_kernels(), plgpu.force_gpu_interpret_mode():
      ...     jax.jit(sparq_decode)(query, key, value)
    """
    token = _is_interpreted.set(True)
    try:
        yield
    finally:
        _is_interpreted.reset(token)
