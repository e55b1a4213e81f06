"""What tensor parallelism adds up and gathers in a decoding step, by the exchange kernel where the numbers are few.

A layer has three such moments beside attention's own reduction: its new query, key and value, cut over heads, are
gathered, and what the output projection and the MLP make is added up. A token's are some thousand numbers, for which a
collective of XLA costs two to three times what the exchange costs, and is no part of a CUDA graph.
"""

from collections.abc import Callable

import jax
from jax.sharding import Mesh

from tree_attn.reduce.fused import fused_gather, fused_sum

# Numbers that a device sends to all others together: 8 bytes each, so that they take about as long as the latency of
# one exchange on NVLink.
MOST_SENT = 1 << 16


def sum_activations(x: jax.Array, axes: tuple[str, ...], mesh: Mesh) -> jax.Array:
    """`jax.lax.psum(x, axes)` within a `shard_map` over `axes` of `mesh`; equal on all devices to the bit.

    Args:
      x: of each device, float32 where sums are to be added as such.
    """
    return _cheapest(fused_sum, jax.lax.psum, x, axes, mesh)


def gather_activations(x: jax.Array, axes: tuple[str, ...], mesh: Mesh) -> jax.Array:
    """`jax.lax.all_gather(x, axes)`, `[devices, *x.shape]`, within a `shard_map` over `axes` of `mesh`."""
    return _cheapest(fused_gather, jax.lax.all_gather, x, axes, mesh)


def _cheapest(fused: Callable, collective: Callable, x: jax.Array, axes: tuple[str, ...], mesh: Mesh) -> jax.Array:
    # A kernel can run where all axes are mapped only: XLA knows no way to cut it over the rest.
    is_mapped = set(axes) == set(mesh.axis_names)
    if is_mapped and 0 < x.size * (mesh.size - 1) <= MOST_SENT:
        try:
            return fused(x, axes, mesh)
        except NotImplementedError:
            pass  # no GPUs, or of several hosts, or an old JAX
    return collective(x, axes)
