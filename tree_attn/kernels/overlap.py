"""Programmatic dependent launch, by which a kernel begins while the one before it ends.

A kernel that begins so waits before it writes any memory of the GPU: that was free to XLA only when the kernels before
it had ended. It waits before it reads too, but for what was there before: weights, and keys of which the caller says so
(`reads_keys_early` of `tree_attn.attend`), with the schedule that an earlier attention has read. What it has done by
then, and the launch itself, cost nothing.

A kernel lets the next begin before it has waited itself, so several might be under way. Attention reads early only
where its CTAs take the memory of more than half of the SMs (`lean.reads_early`). The second kernel after it begins when
all CTAs of the first have begun. Those of a large one have no room until some of attention's have ended, which have
waited. Between attentions of a Llama are such kernels, or XLA's, which let none begin early.

Attention, and kernels that read weights early, let the next kernel begin as soon as all their CTAs have begun. It finds
room where their first CTAs have ended, and waits for them, as they wait for the kernel before. CTAs that begin early
take the first SMs with room. A kernel of fewer CTAs than fit must take the memory of the SM
(`lean_layout.padding_bytes`). Otherwise two CTAs meet on one SM while another is idle. Where SMs cannot have equally
many CTAs, attention does not begin early, and lets no kernel do so (`lean.begins_early`).
Kernels that do not take part, such as XLA's and SparQ's, begin when the kernel before them has ended. What follows them
begins when they have.

JAX 0.12 records these kernels in CUDA graphs so. With an older JAX, or before compute capability 9.0, nothing
overlaps.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.kernels.interpreter import is_interpreted
from tree_attn.kernels.launch_order import KERNELS_ARE_RECORDED
from tree_attn.kernels.targets import HOPPER, Target


def overlaps(target: Target = HOPPER) -> bool:
    """Returns whether this JAX lets a kernel begin before the previous one has ended, on such a GPU."""
    return target.overlaps_launches and jax.__version_info__ >= KERNELS_ARE_RECORDED


def await_previous_kernel(target: Target = HOPPER) -> None:
    """Waits until the previous kernel has ended, and what it wrote is there. Each CTA has threads that call this."""
    if overlaps(target) and not is_interpreted():
        plgpu.griddepcontrol_wait()


def begin_next_kernel(target: Target = HOPPER) -> None:
    """Lets the next kernel begin as soon as all CTAs have called this or ended, and there is room for it."""
    if overlaps(target) and not is_interpreted():
        plgpu.griddepcontrol_launch_dependents()
