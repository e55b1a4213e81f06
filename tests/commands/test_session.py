"""The devices that commands run on, and the mesh they make of them."""

import dataclasses

import pytest

from tree_attn import topology
from tree_attn.commands import session
from tree_attn.models.llama.presets import preset

NODES, DEVICES = 4, 4


@dataclasses.dataclass(frozen=True)
class Device:
    id: int
    process_index: int
    platform: str = "gpu"


@pytest.fixture
def four_nodes(monkeypatch):
    """16 processes of one device each on four nodes, numbered across nodes, as `srun --distribution=cyclic` does."""
    devices = [Device(i, i) for i in range(NODES * DEVICES)]
    monkeypatch.setattr(topology, "_nodes", tuple(f"n{i % NODES}" for i in range(NODES * DEVICES)))
    monkeypatch.setattr("jax.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("jax.device_count", lambda: len(devices))
    monkeypatch.setattr("jax.devices", lambda: devices)


def test_a_hierarchical_reduction_keeps_each_node_in_the_device_axis(four_nodes):
    """Otherwise the reduction along the first axis, which belongs on the links of a node, would cross the network."""
    place = session.Place(devices=session.choose_devices(None), has_two_axes=True)
    sharding = place.sharding(preset("smollm2-135m"))
    assert dict(sharding.mesh.shape) == {"device": DEVICES, "node": NODES}
    assert sharding.sequence == ("device", "node")
    for node in sharding.mesh.devices:
        assert len({device.process_index % NODES for device in node}) == 1


def test_one_axis_goes_node_by_node(four_nodes):
    place = session.Place(devices=session.choose_devices(16))
    assert place.axis_sizes == {"seq": 16}
    assert [device.process_index % NODES for device in place.devices] == sorted(4 * [0, 1, 2, 3])


def test_a_prime_number_of_devices_has_no_two_axes(four_nodes):
    with pytest.raises(ValueError, match=r"--devices must be a product of two numbers for a .*, got 7"):
        session.Place(devices=session.choose_devices(None)[:7], has_two_axes=True)
