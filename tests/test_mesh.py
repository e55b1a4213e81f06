"""Meshes: axis types, the order of devices, and which axes are bound where."""

import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tree_attn import make_mesh
from tree_attn.cluster.launch import Launch
from tree_attn.mesh import axis_tuple, bound_axis_sizes, by_node


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
    """XLA's GPU compiler wants that of a program's devices."""
    assert list(make_mesh({"device": 3, "node": 2}).devices.flat) == jax.devices()[:6]


def test_devices_may_be_given():
    devices = jax.devices()[4:6]
    assert list(make_mesh({"seq": 2}, devices=devices).devices) == devices


def test_names_alone_take_the_real_nodes_whatever_the_order_of_ranks(monkeypatch):
    devices = jax.devices()
    monkeypatch.setattr("tree_attn.mesh.by_node", lambda _: {"n1": devices[0::2], "n2": devices[1::2]})
    mesh = make_mesh(("device", "node"))
    assert dict(mesh.shape) == {"device": 4, "node": 2}
    assert mesh.axis_names == ("node", "device")  # slowest first, as where sizes are given
    assert mesh.devices.tolist() == [devices[0::2], devices[1::2]]
    assert make_mesh(("all",)).devices.tolist() == [*devices[0::2], *devices[1::2]]


def test_one_process_is_one_node():
    assert dict(make_mesh(("device", "node")).shape) == {"device": 8, "node": 1}


def test_unequal_nodes_have_no_second_axis(monkeypatch):
    devices = jax.devices()
    monkeypatch.setattr("tree_attn.mesh.by_node", lambda _: {"n1": devices[:5], "n2": devices[5:]})
    with pytest.raises(ValueError, match=r"as many devices on every node, got {'n1': 5, 'n2': 3}: use one axis"):
        make_mesh(("device", "node"))
    assert make_mesh(("all",)).devices.shape == (8,)
    with pytest.raises(ValueError, match="must be one name, or two for devices and nodes; give sizes for more"):
        make_mesh(("device", "node", "rack"))


def test_devices_by_node(monkeypatch):
    """One process per node, or one per device; processes that nobody has joined cannot be placed."""
    devices = [SimpleNamespace(process_index=index) for index in (0, 0, 1, 2, 3)]
    monkeypatch.setattr("tree_attn.cluster.join.current", lambda: Launch(source="slurm", hosts=("a", "b", "a", "b")))
    assert by_node(devices) == {"a": [*devices[:2], devices[3]], "b": [devices[2], devices[4]]}
    monkeypatch.setattr("tree_attn.cluster.join.current", lambda: None)
    monkeypatch.setattr("jax.process_count", lambda: 4)
    with pytest.raises(ValueError, match=r"call tree_attn\.initialize"):
        by_node(devices)


@pytest.mark.parametrize("given, expected", [("seq", ("seq",)), (("a", "b"), ("a", "b"))])
def test_axis_tuple(given, expected):
    assert axis_tuple(given) == expected


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
