"""Everyone to everyone within one kernel: no collective, no host."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tree_attn.peer_memory import peer_memory
from tree_attn.reduce.exchange_kernel import Buffers, exchange
from tree_attn.state import SoftmaxState

MAX_ELEMENTS = 1 << 18  # of one state; beyond, 8 bytes for 4 on every link cost more than what is saved
OLDEST_JAX = (0, 11)


def fused(state: SoftmaxState, axes: tuple[str, ...], mesh: Mesh | None) -> SoftmaxState:
    """Merges over `axes`, which must be all of the mesh, by `exchange_kernel`.

    Each device writes its `B T N (H + 1)` elements, 8 bytes each, to all p devices at once; one latency, no launch but
    the kernel's own.
    """
    *batch, heads, head_dim = state.out.shape
    elements = state.out.size + state.lse.size
    if elements > MAX_ELEMENTS:
        raise NotImplementedError(f"fused exchanges up to {MAX_ELEMENTS} elements, not {elements} of {state.out.shape}")
    devices = _devices(axes, mesh)
    buffers = _buffers(devices)
    rank = jax.lax.axis_index(axes).astype(jnp.int32)[None]
    out, lse = exchange(state.out.reshape(-1, head_dim), state.lse.reshape(-1), rank, buffers)
    return SoftmaxState(out.reshape(state.out.shape), lse.reshape(state.lse.shape))


def _buffers(devices: tuple) -> Buffers:
    layout = functools.partial(Buffers, num_ranks=len(devices), capacity=MAX_ELEMENTS)
    return layout(table=peer_memory(devices, layout(table=0).num_bytes))


def _devices(axes: tuple[str, ...], mesh: Mesh | None) -> tuple:
    """The devices in the order of their index along `axes`."""
    order = [mesh.axis_names.index(axis) for axis in axes]
    if mesh.devices.size != len(order) and len(order) < len(mesh.axis_names):
        pass
    return tuple(mesh.devices.transpose(order).ravel())
