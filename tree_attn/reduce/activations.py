"""What tensor parallelism adds up and gathers in a decoding step, by the exchange kernel where the numbers are few.

A layer has three such moments beside attention's own reduction: its new query, key and value, cut over heads, are
gathered, and what the output projection and the MLP make is added up. A token's are some thousand numbers. XLA's
collectives take longer for them, and are no part of a CUDA graph, so that the host launches one between any two: an 8B
model on two H200s took 5.0 ms a token with them and takes 4.1 without (docs/log/llama.md:
"Sums and gathers by the exchange kernel take 0.9 ms off a token on two GPUs").
"""

from collections.abc import Callable

import jax
from jax.sharding import Mesh

from tree_attn.reduce.fused import fused_gather, fused_sum, why_not

# Numbers that a device sends to all others together, 8 bytes each: on two H200s XLA is faster from somewhere between
# 65,536 and 131,072 of them on.
MOST_SENT = 1 << 16


def sum_activations(x: jax.Array, axes: tuple[str, ...], mesh: Mesh) -> jax.Array:
    """`jax.lax.psum(x, axes)`, the sum over devices of `x`, on all of them to the bit the same.

    Args:
      x: of each device, any shape, floating; float32 if what is added is not to be rounded first.
      axes, mesh: bound axes of a `shard_map` over devices of `mesh`.

    Example:
      >>> total = sum_activations(jnp.einsum("btf,df->btd", own_hidden, own_kernel), ("seq",), mesh)
    """
    return _cheapest(fused_sum, jax.lax.psum, x, axes, mesh)


def gather_activations(x: jax.Array, axes: tuple[str, ...], mesh: Mesh) -> jax.Array:
    """`jax.lax.all_gather(x, axes)`: what all have, `[devices, *x.shape]`; arguments as of `sum_activations`."""
    return _cheapest(fused_gather, jax.lax.all_gather, x, axes, mesh)


def _cheapest(fused: Callable, collective: Callable, x: jax.Array, axes: tuple[str, ...], mesh: Mesh) -> jax.Array:
    # A kernel can run where all axes are mapped only: XLA knows no way to cut it over the rest.
    is_mapped = set(axes) == set(mesh.axis_names)
    is_small = 0 < x.size * (mesh.size - 1) <= MOST_SENT
    can_run = is_mapped and is_small and why_not(x.size, axes, mesh) is None
    return fused(x, axes, mesh) if can_run else collective(x, axes)
