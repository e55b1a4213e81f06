"""JAX's collectives where its own fail: beside mesh axes that XLA shards, which a `shard_map` over some axes leaves.

Each is JAX's own elsewhere.
"""

import jax
import jax.numpy as jnp

from tree_attn.mesh import checks_replication, is_sharded_by_xla


def psum(tree, axes: tuple[str, ...]):
    """Returns `jax.lax.psum(tree, axes)`."""
    return _reduced(jax.lax.psum, tree, axes)


def pmax(tree, axes: tuple[str, ...]):
    """Returns `jax.lax.pmax(tree, axes)`."""
    return _reduced(jax.lax.pmax, tree, axes)


def all_gather(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns `x` of all devices along `axes`, `[devices, *x.shape]`, typed as the same on all where types say so.

    It is one all-gather. Where XLA shards the program over further axes it is one all-reduce, of `x` among zeros: XLA
    would gather `x` over those axes too, and JAX mistakes its Explicit sharding.
    """
    if is_sharded_by_xla() and jax.lax.axis_size(axes) > 1:
        is_own = jnp.arange(jax.lax.axis_size(axes)) == jax.lax.axis_index(axes)
        is_own = jax.lax.expand_dims(is_own, range(1, x.ndim + 1))
        return psum(jnp.where(is_own, x[None], jnp.zeros_like(x)[None]), axes)
    return _gathered(x, axes)


def all_to_all(parts: jax.Array, axis: str) -> jax.Array:
    """Returns `[p, ...]`, the part for this device from each of the p devices along `axis`; `parts[i]` goes to i.

    It is one all-to-all. Where XLA shards the program over further axes it is p - 1 permutes, which XLA takes there.
    """
    devices = jax.lax.axis_size(axis)
    if devices == 1:
        return parts
    if not is_sharded_by_xla():
        # One axis is split and joined: JAX's transposition of two different ones mixes up their sizes.
        return jax.lax.all_to_all(parts, axis, split_axis=0, concat_axis=0)
    place = jax.lax.axis_index(axis)
    received = []
    for step in range(devices):  # to the device that many places on, from the one as many back
        part = jax.lax.dynamic_index_in_dim(parts, (place + step) % devices, keepdims=False)
        received.append(jax.lax.ppermute(part, axis, [(i, (i + step) % devices) for i in range(devices)]))
    return jnp.stack(received)[(place - jnp.arange(devices)) % devices]


def _reduced(collective, tree, axes: tuple[str, ...]):
    # XLA's partitioner takes a program that is manual over one device for one that is not manual, and ends in an error
    # ("Cross-partition allreduce must be in (partial) manual partitioning mode").
    if is_sharded_by_xla() and jax.lax.axis_size(axes) == 1:
        return jax.tree.map(lambda x: _gathered(x, axes)[0], tree)
    return collective(tree, axes)


def _gathered(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.all_gather(x, axes, to="invarying" if checks_replication(axes) else "varying")
