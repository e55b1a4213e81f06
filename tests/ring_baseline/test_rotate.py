"""The ring's neighbours, and the shard that a device holds after each hop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tree_attn import make_mesh
from tree_attn.ring_baseline.rotate import source, to_next

AXES = ("device", "node")
MESHES = {
    "slow_axis_first": lambda: make_mesh({"device": 4, "node": 2}),
    "fast_axis_first": lambda: Mesh(np.array(jax.devices()[:8]).reshape(4, 2), AXES),
}


def on_each_device(function, mesh):
    mapped = jax.shard_map(lambda: function()[None], mesh=mesh, in_specs=(), out_specs=P(AXES), check_vma=False)
    return np.asarray(jax.jit(mapped)())


@pytest.mark.parametrize("make", MESHES.values(), ids=MESHES)
def test_source_says_whose_shard_arrives(make):
    def one_and_two_hops():
        mine = jax.lax.axis_index(AXES)
        once = to_next((mine, mine), AXES)
        twice = to_next(once, AXES)
        return jnp.stack([mine == source(AXES, 0), once[0] == source(AXES, 1), twice[1] == source(AXES, 2)])

    assert on_each_device(one_and_two_hops, make()).all()


@pytest.mark.parametrize("make", MESHES.values(), ids=MESHES)
def test_every_shard_visits_every_device(make):
    visits = on_each_device(lambda: jnp.stack([source(AXES, hop) for hop in range(8)]), make())
    np.testing.assert_array_equal(np.sort(visits, axis=1), np.broadcast_to(np.arange(8), (8, 8)))


def test_only_one_device_of_a_node_sends_over_the_slow_link():
    def comes_from_another_node():
        node = jax.lax.axis_index("node")
        return to_next((node, node), AXES)[0] != node

    assert on_each_device(comes_from_another_node, make_mesh({"device": 4, "node": 2})).sum() == 2
