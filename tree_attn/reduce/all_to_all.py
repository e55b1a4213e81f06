"""One packed collective that leaves each device its part of the heads, for a next product sharded over them."""

import functools

import jax
import jax.numpy as jnp

from tree_attn.mesh import is_sharded_by_xla
from tree_attn.reduce.gather import gather
from tree_attn.state import SoftmaxState, merge_states


def all_to_all(state: SoftmaxState, axes: tuple[str, ...]) -> SoftmaxState:
    """Merges over `axes` of p devices; device i keeps heads `i N / p` to `(i + 1) N / p`, of a number p divides.

    Each device sends every other the `[out, lse]` of that one's heads, packed in float32: `(p - 1) / p B T N (H + 1)`
    elements, a p-th of "gather".

    Source: vLLM, decode context parallelism, which ends a step so.
    """
    devices = jax.lax.axis_size(axes)
    if is_sharded_by_xla():  # which knows no all-to-all: see `all_gather`
        share, merged = state.lse.shape[-1] // devices, gather(state, axes)
        start = jax.lax.axis_index(axes) * share
        part = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=share, axis=2)
        return jax.tree.map(part, merged)
    packed = jnp.concatenate([state.out.astype(state.lse.dtype), state.lse[..., None]], axis=-1)
    *batch, heads, width = packed.shape
    parts = packed.reshape(*batch, devices, heads // devices, width)
    # One axis is split and joined: JAX's transposition of two different ones mixes up their sizes.
    parts = jnp.moveaxis(parts, len(batch), 0)
    received = jax.lax.all_to_all(parts, axes, split_axis=0, concat_axis=0)  # [p, B, T, N / p, H + 1]
    merged = merge_states(SoftmaxState(received[..., :-1], received[..., -1]), axis=0)
    return SoftmaxState(merged.out.astype(state.out.dtype), merged.lse)
