"""The ring itself: keys and values go round the devices, one neighbour per hop."""

import jax
from jaxtyping import Array, Float

KeyValue = tuple[Float[Array, "B S K H"], Float[Array, "B S K H"]]


def to_next(key_value: KeyValue, axes: tuple[str, ...], num_shards: int) -> KeyValue:
    """Sends K and V, each in its own dtype, to the next device of the ring and returns what the previous one sent."""
    permutation = [(i, (i + 1) % num_shards) for i in range(num_shards)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axes, permutation), key_value)


def source(index: Array, hop: int, num_shards: int) -> Array:
    """Returns whose shard a device holds after `hop` hops: that of the device `hop` places before it."""
    return (index - hop) % num_shards
