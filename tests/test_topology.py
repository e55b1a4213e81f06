"""The node of each process: what is recorded, and what follows where nothing is."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from tree_attn import topology


def devices_of(*processes: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(process_index=index) for index in processes]


def test_devices_by_node(monkeypatch):
    """One process per node, or one per device."""
    devices = devices_of(0, 0, 1, 2, 3)
    monkeypatch.setattr(topology, "_nodes", ("a", "b", "a", "b"))
    assert topology.by_node(devices) == {"a": [*devices[:2], devices[3]], "b": [devices[2], devices[4]]}
    assert topology.node_by_node(devices) == [*devices[:2], devices[3], devices[2], devices[4]]
    assert (topology.num_nodes(), topology.node_of(devices[2])) == (2, "b")


def test_one_process_is_one_node():
    devices = devices_of(0, 0)
    assert topology.by_node(devices) == {"here": devices}
    assert (topology.num_nodes(), topology.node_of(devices[0])) == (1, None)


def test_nodes_of_processes_that_were_not_joined_are_unknown(monkeypatch):
    devices = devices_of(0, 1, 2)
    monkeypatch.setattr("jax.process_count", lambda: 3)
    assert topology.num_nodes() is None
    assert topology.node_by_node(devices) == devices
    with pytest.raises(ValueError, match=r"call tree_attn\.initialize"):
        topology.by_node(devices)
    monkeypatch.setattr(topology, "_nodes", ("a", "b"))
    with pytest.raises(ValueError, match=r"call tree_attn\.initialize"):
        topology.by_node(devices)


def test_a_single_process_is_the_first_one(monkeypatch):
    assert topology.is_first_process()
    monkeypatch.setattr("jax.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("jax.process_index", lambda: 1)
    assert not topology.is_first_process()


def test_attention_loads_nothing_of_the_cluster():
    """Sockets and threads of the cluster are for programs of several processes."""
    code = (
        "import sys, tree_attn.decode, tree_attn.cache, tree_attn.mesh\n"
        "print([name for name in sys.modules if name.startswith('tree_attn.cluster')])"
    )
    environment = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
