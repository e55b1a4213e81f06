"""Sums and gathers of tensor parallelism in a decoding step, by the exchange kernel where the numbers are few.

A layer has three of them beside attention's own reduction. Its new query, key and value, sharded over heads, are
gathered; the results of the output projection and of the MLP are summed. Each has some thousand numbers per token.
Where the products' kernel runs, the sums are its end (`kernels/few_rows_sum.py`), and no launch of their own; in a
chain of products the gather is too (`kernels/few_rows_heads.py`).
XLA's collectives take longer for so few, and are no part of a CUDA graph: the host launches a graph between any two.
An 8B model on two H200s took 5.0 ms a token with them and takes 4.1 ms without (docs/log/llama.md: "Sums and gathers by
the exchange kernel take 0.9 ms off a token on two GPUs").
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tree_attn.reduce.collectives import psum
from tree_attn.reduce.fused import fused_gather, fused_sum, why_not

# Numbers that a device sends to all others together, 8 bytes each. On two H200s XLA is faster from a count between
# 65,536 and 131,072 on.
MAX_SENT = 1 << 16


def sum_activations(x: jax.Array, axes: tuple[str, ...], mesh: Mesh, residual: jax.Array | None = None) -> jax.Array:
    """Returns `jax.lax.psum(x, axes)`, the sum over devices of `x`, with the same bits on all of them.

    With a residual it is `residual + psum(x)`, rounded once.

    Args:
      x: this device's part, any shape, floating; float32 to add without rounding first.
      axes, mesh: bound axes of a `shard_map` over devices of `mesh`.
      residual: of the shape of x, the same on all devices; its dtype is the result's.

    Example:
      >>> total = sum_activations(jnp.einsum("btf,df->btd", local_hidden, local_kernel), ("seq",), mesh)
    """
    fused = functools.partial(fused_sum, residual=residual)
    return _cheapest(fused, functools.partial(_psum, residual=residual), x, axes, mesh)


def _psum(x: jax.Array, axes: tuple[str, ...], residual: jax.Array | None) -> jax.Array:
    if residual is None:
        return psum(x, axes)
    return (residual.astype(jnp.float32) + psum(x.astype(jnp.float32), axes)).astype(residual.dtype)


def gather_activations(x: jax.Array, axes: tuple[str, ...], mesh: Mesh) -> jax.Array:
    """Returns `jax.lax.all_gather(x, axes)`, `[devices, *x.shape]`; arguments as of `sum_activations`."""
    return _cheapest(fused_gather, jax.lax.all_gather, x, axes, mesh)


def _cheapest(fused: Callable, collective: Callable, x: jax.Array, axes: tuple[str, ...], mesh: Mesh) -> jax.Array:
    return fused(x, axes, mesh) if exchanges(x.size, axes, mesh) else collective(x, axes)


def exchanges(elements: int, axes: tuple[str, ...], mesh: Mesh) -> bool:
    """Returns whether so many numbers of each device go by the exchange kernel, and not by a collective."""
    # The kernel runs only where all axes are mapped: XLA cannot shard it over the rest.
    is_mapped = set(axes) == set(mesh.axis_names)
    is_small = 0 < elements * (mesh.size - 1) <= MAX_SENT
    return is_mapped and is_small and why_not(elements, axes, mesh) is None
