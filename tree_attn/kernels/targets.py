"""GPUs by what their instructions and their shared memory allow, for which the lean kernel is written.

On Hopper, 9.0, its products are `wgmma`'s and copies TMA's. On GPUs of all other compute capabilities here, from 8.0 to
12.1, they are those of the oldest: `mma.sync` and `cp.async`. Float8 K and V are multiplied by `mma.sync` everywhere.

Source: CUDA C++ Programming Guide, "Compute Capabilities"; PTX ISA, "Target ISA" of each instruction.
"""

import contextlib
import contextvars
import dataclasses

import jax

SMEM_BYTES_PER_SM = 227 * 1024  # of Hopper


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """Instructions and memory of a GPU.

    is_hopper:          products by `wgmma`, and copies by TMA
    has_float8:         an instruction that widens float8
    overlaps_launches:  a kernel may begin before the previous one has ended (`overlap.py`)
    smem_bytes_per_sm:  shared memory of a streaming multiprocessor; a CTA has 1 KiB less
    """

    is_hopper: bool = False
    has_float8: bool = True
    overlaps_launches: bool = True
    smem_bytes_per_sm: int = 100 * 1024


HOPPER = Target(is_hopper=True, smem_bytes_per_sm=SMEM_BYTES_PER_SM)
AMPERE = Target(has_float8=False, overlaps_launches=False, smem_bytes_per_sm=164 * 1024)
TARGETS = {
    "8.0": AMPERE,
    "8.6": Target(has_float8=False, overlaps_launches=False),
    "8.7": AMPERE,
    "8.9": Target(overlaps_launches=False),
    "9.0": HOPPER,
    "10.0": Target(smem_bytes_per_sm=SMEM_BYTES_PER_SM),
    "10.3": Target(smem_bytes_per_sm=SMEM_BYTES_PER_SM),
    "12.0": Target(),
    "12.1": Target(),
}

_assumed = contextvars.ContextVar("assumed_target", default=None)


def current() -> Target:
    """Returns the target of the first local GPU; Hopper's where there is none, for programs compiled elsewhere."""
    if _assumed.get() is not None:
        return _assumed.get()
    return TARGETS.get(getattr(jax.local_devices()[0], "compute_capability", "9.0"), HOPPER)


@contextlib.contextmanager
def assumed(capability: str):
    """Has kernels that are planned in its context use no more than a GPU of this compute capability offers.

    Example:
      >>> with assumed("8.0"):
      ...     current().has_float8
      False
    """
    token = _assumed.set(TARGETS[capability])
    try:
        yield
    finally:
        _assumed.reset(token)
