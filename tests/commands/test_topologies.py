"""Every command that builds a mesh, on fake machines of several nodes: the first axis stays inside a node."""

import dataclasses
import types

import pytest

from tree_attn import topology
from tree_attn.cluster.launch import Launch
from tree_attn.commands import session
from tree_attn.commands.compare import cases
from tree_attn.commands.doctor import calibrate, checks
from tree_attn.commands.plan import prediction
from tree_attn.cost.step import DecodeStep
from tree_attn.models.llama.presets import preset
from tree_attn.topology import node_by_node

# (nodes, devices of each, devices of a process): the last is 1 where a rank has one GPU, else one process has a node.
MACHINES = [(2, 2, 1), (4, 4, 1), (2, 8, 1), (4, 4, 4), (2, 8, 8)]
ORDERS = ("block", "cyclic")  # as `srun --distribution` numbers the ranks


@dataclasses.dataclass(frozen=True)
class Device:
    id: int
    process_index: int
    platform: str = "gpu"
    device_kind: str = "fake"

    @property
    def client(self):
        return types.SimpleNamespace(platform_version="cuda")


@dataclasses.dataclass(frozen=True)
class FakeCluster:
    nodes: int
    per_node: int
    devices: list[Device]

    def check(self, mesh, *, is_hierarchical: bool) -> None:
        """Asserts that the mesh has all devices, node by node, and two axes only where they are asked for."""
        by_node = [topology.node_of(device) for device in mesh.devices.flat]
        assert sorted(device.id for device in mesh.devices.flat) == list(range(self.nodes * self.per_node))
        assert by_node == sorted(by_node)
        shape = {"device": self.per_node, "node": self.nodes} if is_hierarchical else {"seq": len(by_node)}
        assert dict(mesh.shape) == shape
        if is_hierarchical:
            assert all(len({topology.node_of(device) for device in node}) == 1 for node in mesh.devices)


@pytest.fixture(params=[(*machine, order) for machine in MACHINES for order in ORDERS], ids=str)
def cluster(request, monkeypatch) -> FakeCluster:
    nodes, per_node, per_process, order = request.param
    num_processes = nodes * per_node // per_process
    on_node = num_processes // nodes
    node_of = (lambda rank: rank // on_node) if order == "block" else (lambda rank: rank % nodes)
    devices = [Device(i, i // per_process) for i in range(nodes * per_node)]
    monkeypatch.setattr(topology, "_nodes", tuple(f"n{node_of(rank)}" for rank in range(num_processes)))
    monkeypatch.setattr("jax.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("jax.process_count", lambda: num_processes)
    monkeypatch.setattr("jax.device_count", lambda: len(devices))
    monkeypatch.setattr("jax.devices", lambda: devices)
    return FakeCluster(nodes, per_node, devices)


@pytest.mark.parametrize("is_hierarchical", [True, False])
def test_a_model_of_generate_sample_bench_and_demo(cluster, is_hierarchical):
    place = session.Place(devices=session.choose_devices(None), has_two_axes=is_hierarchical)
    cluster.check(place.sharding(preset("smollm2-135m")).mesh, is_hierarchical=is_hierarchical)


def test_every_case_of_compare(cluster):
    sizes = dict(batch=1, num_keys=160, num_heads=16, num_kv_heads=2, head_dim=64, dtype="bfloat16")
    step = DecodeStep(**sizes, n_devices=len(cluster.devices))
    listed = cases.plan([step], (), ["xla"], "gpu")
    names = {"allreduce", "gather", "fused", "hierarchical", cases.SHARD_HEADS}
    assert {case.reduction for case in listed} == names | {None}
    for case in listed:
        assert case.obstacle is None
        is_hierarchical = case.reduction == "hierarchical"
        mesh = case.mesh(node_by_node(cluster.devices))
        expected = {"device": cluster.per_node, "node": cluster.nodes}
        assert dict(mesh.shape) == (expected if is_hierarchical else {mesh.axis_names[0]: len(cluster.devices)})
        by_node = [topology.node_of(device) for device in mesh.devices.flat]
        assert by_node == sorted(by_node)


def test_the_reductions_that_doctor_tries(cluster, monkeypatch):
    meshes = {}
    monkeypatch.setattr(checks, "_try_reduction", lambda name, mesh, axes: meshes.setdefault(name, mesh) and None)
    assert set(checks._reductions(checks._devices(None)).values()) == {None}
    assert set(meshes) == {"allreduce", "gather", "fused", "hierarchical"}
    for name, mesh in meshes.items():
        cluster.check(mesh, is_hierarchical=name == "hierarchical")


def test_the_links_that_doctor_times(cluster, monkeypatch):
    meshes = []
    monkeypatch.setattr("tree_attn.measure.links.measure_axes", lambda mesh: meshes.append(mesh) or [])
    monkeypatch.setattr("tree_attn.measure.provenance.hardware", lambda devices: "fake")
    launch = Launch(source="slurm", num_processes=2, num_nodes=2, node="n0", coordinator_host="n0")
    checks.examine_distributed(launch)
    cluster.check(*meshes, is_hierarchical=True)


def test_the_machine_that_doctor_measures(cluster, monkeypatch):
    measured = []

    def stop(mesh, axis):
        measured.append(mesh)
        raise InterruptedError

    monkeypatch.setattr(calibrate, "_points", stop)
    with pytest.raises(InterruptedError):
        calibrate.measure_machine(checks._devices(None))
    cluster.check(*measured, is_hierarchical=True)


def test_the_axes_that_plan_predicts_for_are_those_of_the_mesh(cluster):
    args = types.SimpleNamespace(
        nodes=cluster.nodes, gpus_per_node=cluster.per_node, machine=None, device_kind="NVIDIA H200", batch=1,
        keys=160_000, heads=16, kv_heads=None, head_dim=128, dtype="bfloat16", prefill=False, gradient=False,
    )  # fmt: skip
    predicted = prediction.predict_all(args)
    place = session.Place(devices=session.choose_devices(None), has_two_axes=True)
    assert tuple(place.axis_sizes.values()) == predicted["axis_sizes"] == (cluster.per_node, cluster.nodes)


def test_a_prime_number_of_devices_has_no_two_axes(cluster):
    with pytest.raises(ValueError, match=r"--devices must be a product of two numbers for a .*, got 3"):
        session.Place(devices=session.choose_devices(None)[:3], has_two_axes=True)
