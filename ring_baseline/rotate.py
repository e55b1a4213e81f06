"""The ring itself: keys and values go round the devices, one neighbour per hop.

The ring runs in the mesh's own order of devices, where neighbours share the fastest link. Over several axes only the
last device along the fastest axis sends over a slower one. A device's place in the ring is therefore not the index of
its shard, which counts the axes in the order of `axis_name`.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from tree_attn.mesh import bound_axis_sizes, checks_replication
from tree_attn.reduce.collectives import psum

KeyValue = tuple[Array, Array]


def to_next(load: KeyValue | Array, axes: tuple[str, ...], step: int = 1) -> KeyValue | Array:
    """Sends K and V, each in its own dtype, to the next device of the ring and returns what the previous one sent.

    Args:
      load: two arrays, or one with both.
      step: 1; or -1 for the other way round.
    """
    num_shards = math.prod(bound_axis_sizes(axes))
    permutation = [(i, (i + step) % num_shards) for i in range(num_shards)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, _in_mesh_order(axes), permutation), load)


def place(axes: tuple[str, ...]) -> Int[Array, ""]:
    """Returns this device's place in the ring."""
    return jax.lax.axis_index(_in_mesh_order(axes))


def source(axes: tuple[str, ...], hop: int | Int[Array, ""]) -> Int[Array, ""]:
    """Returns the index of the shard that is here after `hop` hops: that of the device `hop` places back.

    Negative hops are those the other way round.
    """
    sizes = dict(zip(axes, bound_axis_sizes(axes), strict=True))
    rest, coordinates, index = (place(axes) - hop) % math.prod(sizes.values()), {}, 0
    for axis in reversed(_in_mesh_order(axes)):
        rest, coordinates[axis] = rest // sizes[axis], rest % sizes[axis]
    for axis in axes:
        index = index * sizes[axis] + coordinates[axis]
    return index


def typed_as_replicated(tree, axes: tuple[str, ...]):
    """Returns `tree`, whose bits are the same on every device, with types that say so inside a checked `shard_map`.

    Only a collective can change such a type, so there the first device's values are summed with the others' zeros.
    """
    if not checks_replication(axes):
        return tree
    is_first = jax.lax.axis_index(axes) == 0
    return jax.tree.map(lambda x: psum(jnp.where(is_first, x, jnp.zeros_like(x)), axes), tree)


def _in_mesh_order(axes: tuple[str, ...]) -> tuple[str, ...]:
    # Also the only order in which `ppermute` may be given several axes.
    return tuple(sorted(axes, key=jax.sharding.get_abstract_mesh().axis_names.index))
