"""Meshes: axis types, the order of devices, axes of nodes, and bound axes."""

import dataclasses
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tree_attn import make_mesh, topology
from tree_attn.mesh import axis_tuple, bound_axis_sizes, node_axes


@dataclasses.dataclass(frozen=True)
class Device:
    process_index: int
    platform: str = "cpu"


def test_axes_are_of_type_auto_whatever_jax_defaults_to():
    mesh = make_mesh({"device": 4, "node": 2})
    assert dict(mesh.shape) == {"device": 4, "node": 2}
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_neighbours_in_the_device_order_share_the_first_axis():
    mesh = make_mesh({"device": 4, "node": 2})
    grid = np.moveaxis(mesh.devices, mesh.axis_names.index("device"), 0)
    by_node = [[device.id for device in grid[:, node]] for node in range(2)]
    assert by_node == [[device.id for device in jax.devices()[i : i + 4]] for i in (0, 4)]


def test_the_mesh_lists_devices_in_order():
    """XLA's GPU compiler requires this order of a program's devices."""
    assert list(make_mesh({"device": 3, "node": 2}).devices.flat) == jax.devices()[:6]


def test_devices_may_be_given():
    devices = jax.devices()[4:6]
    assert list(make_mesh({"seq": 2}, devices=devices).devices) == devices


@dataclasses.dataclass(frozen=True)
class Tpu:
    id: int
    coords: tuple[int, int, int]
    core_on_chip: int = 0
    slice_index: int = 0
    process_index: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v6 lite"


def slice_of(columns: int, rows: int, **changes) -> list[Tpu]:
    """Returns the TPUs of a slice in the order in which JAX numbers them."""
    return [Tpu(x + columns * y, (x, y, 0), **changes) for y in range(rows) for x in range(columns)]


def test_on_one_axis_tpus_are_linked_to_the_next():
    ring = make_mesh({"seq": 4}, slice_of(2, 2)).devices.tolist()
    assert [tpu.id for tpu in ring] == [0, 1, 3, 2]
    ring = make_mesh({"seq": 16}, slice_of(4, 4)).devices.tolist()
    links = [sum(abs(a - b) for a, b in zip(one.coords, other.coords)) for one, other in zip(ring, ring[1:] + ring[:1])]
    assert links == [1] * 16


@pytest.mark.parametrize(
    "axes, tpus",
    [
        ({"device": 2, "node": 2}, slice_of(2, 2)),
        ({"seq": 4}, [*slice_of(2, 1), *slice_of(2, 1, slice_index=1)]),
        ({"seq": 3}, slice_of(2, 2, device_kind="TPU v5")),  # a box with a hole
        ({"seq": 4}, [Tpu(i, (0, 0, i // 2), i % 2, device_kind="TPU v4") for i in range(4)]),  # two devices a chip
    ],
    ids=["two axes", "two slices", "a hole", "two cores"],
)
def test_tpus_that_jax_does_not_arrange_stay_in_order(axes, tpus):
    count = math.prod(axes.values())
    assert make_mesh(axes, tpus).devices.ravel().tolist() == tpus[:count]


def test_names_alone_take_the_real_nodes_whatever_the_order_of_ranks(monkeypatch):
    devices = jax.devices()
    monkeypatch.setattr("tree_attn.topology.by_node", lambda _: {"n1": devices[0::2], "n2": devices[1::2]})
    mesh = make_mesh(("device", "node"))
    assert dict(mesh.shape) == {"device": 4, "node": 2}
    assert mesh.axis_names == ("node", "device")  # slowest first, as where sizes are given
    assert mesh.devices.tolist() == [devices[0::2], devices[1::2]]
    assert make_mesh(("seq",)).devices.tolist() == [*devices[0::2], *devices[1::2]]


def test_one_process_is_one_node():
    assert dict(make_mesh(("device", "node")).shape) == {"device": 8, "node": 1}


def test_unequal_nodes_have_no_second_axis(monkeypatch):
    devices = jax.devices()
    monkeypatch.setattr("tree_attn.topology.by_node", lambda _: {"n1": devices[:5], "n2": devices[5:]})
    with pytest.raises(ValueError, match=r"as many devices on every node, got {'n1': 5, 'n2': 3}: use one axis"):
        make_mesh(("device", "node"))
    assert make_mesh(("seq",)).devices.shape == (8,)
    with pytest.raises(ValueError, match="must be one name, or two for devices and nodes; give sizes for more"):
        make_mesh(("device", "node", "rack"))


@pytest.mark.parametrize(
    "n_devices, sizes", [(8, (4, 2)), (16, (4, 4)), (6, (3, 2)), (12, (4, 3)), (7, None), (1, None)]
)
def test_without_nodes_the_axes_are_the_closest_factors(n_devices, sizes):
    expected = sizes and dict(zip(("device", "node"), sizes))
    assert node_axes(n_devices) == expected
    assert node_axes([Device(0)] * n_devices) == expected


def test_the_axes_of_known_nodes_are_the_nodes(monkeypatch):
    """Four nodes of four devices, a process per device, numbered across nodes as a scheduler may; then other parts."""
    devices = [Device(index) for index in range(16)]
    monkeypatch.setattr(topology, "_nodes", ("a", "b", "c", "d") * 4)
    assert node_axes(devices) == node_axes(16) == {"device": 4, "node": 4}
    mesh = make_mesh(node_axes(devices), topology.node_by_node(devices))
    assert [[device.process_index % 4 for device in node] for node in mesh.devices] == [[n] * 4 for n in range(4)]

    monkeypatch.setattr(topology, "_nodes", ("a", "b") * 8)
    assert node_axes(devices) == node_axes(16) == {"device": 8, "node": 2}
    monkeypatch.setattr(topology, "_nodes", ("a",) * 12 + ("b",) * 4)  # unequal parts: as without nodes
    assert node_axes(devices) == node_axes(16) == {"device": 4, "node": 4}


@pytest.mark.parametrize("axis_name, expected", [("seq", ("seq",)), (("a", "b"), ("a", "b"))])
def test_axis_tuple(axis_name, expected):
    assert axis_tuple(axis_name) == expected


def test_bound_axis_sizes():
    assert bound_axis_sizes(("device", "node")) is None
    seen = []

    def inside(x):
        seen.append(bound_axis_sizes(("node", "device")))
        with pytest.raises(ValueError, match=r"axis_name .* bound only in part: not bound here are \['seq'\]"):
            bound_axis_sizes(("node", "seq"))
        return x

    mesh = make_mesh({"device": 4, "node": 2})
    jax.eval_shape(jax.shard_map(inside, mesh=mesh, in_specs=P(), out_specs=P()), jnp.zeros(1))
    assert seen == [(2, 4)]


def test_importing_the_package_touches_no_device():
    """A fresh interpreter in which every platform is refused can still import everything."""
    imports = "import tree_attn, tree_attn.cache, ring_baseline"
    environment = {"JAX_PLATFORMS": "no_such_platform", "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", imports], env=environment, check=True)
