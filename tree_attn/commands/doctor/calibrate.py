"""Measures a machine's parameters for the cost model: exchanges at two sizes, bare transfers, local attention."""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tree_attn import attend
from tree_attn.commands.doctor.fitting import (
    COLLECTIVES,
    NCCL_ROUND_US,
    Point,
    fit_collectives,
    fit_exchange,
    fit_transfers,
    rate,
)
from tree_attn.cost.machine import ASSUMED_NETWORK, ExchangeCost, LinkClass, Machine
from tree_attn.measure.latency import latency_us
from tree_attn.measure.links import is_emulated, neighbour_gb_per_s
from tree_attn.measure.memory import device_memory_bytes
from tree_attn.mesh import NODE_AXES, make_mesh
from tree_attn.reduce import reduce_state
from tree_attn.state import SoftmaxState

HEAD_DIM = 128
NUM_ROWS = (8, 2032)  # queries times heads: states of 4 kB and of 1 MB
TRANSFER_BYTES = (4_096, 1_000_000, 64_000_000, 256_000_000, 640_000_000)
MIN_US = 0.1  # where noise says that an exchange takes no time


def measure_machine(devices: Sequence[jax.Device]) -> Machine:
    """Measures the machine whose devices are `devices`; every process calls it. Takes a minute or two.

    Exchanges are timed as the library does them (`reduce_state`): among all devices of a node, among all nodes, and
    among pairs, so that launch and latency can be separated. Two GPUs cannot tell them apart; the latency is then that
    of NCCL's source. The time of one is the difference that it makes to a step of local attention. In a chain of their
    own exchanges would wait for the host; beside other work of the GPU they do not (docs/log/measurement.md:
    "Collectives must be timed within steps, for in a chain they wait for the host"). Bare transfers are timed in chains
    of dependent ones (`latency.latency_us`).

    Raises:
      ValueError: there is one device, and nothing to exchange.

    Example:
      >>> machine.write(measure_machine(jax.devices()), "machine.json")
    """
    if len(devices) < 2:
        raise ValueError(f"a machine's links need at least 2 devices to be measured, got {len(devices)}")
    mesh = make_mesh(NODE_AXES, devices)
    points = {axis: _points(mesh, axis) for axis in mesh.axis_names if mesh.shape[axis] > 1}
    hardware = f"{mesh.shape['node']} x {mesh.shape['device']} x {devices[0].device_kind}"
    is_one_node = mesh.shape["node"] == 1
    collective_us, collective_costs = fit_collectives(points, round_us=NCCL_ROUND_US if is_one_node else 0.0)
    link_classes = {
        axis: LinkClass(
            source=f"measured: {hardware}",
            costs=_costs(points.get(axis, ()), collective_costs.get(axis), is_across=axis == "node"),
        )
        for axis in mesh.axis_names
    }
    read_bytes_per_s, local_us = _local_attention(mesh)
    return Machine(
        device_kind=devices[0].device_kind,
        gpus_per_node=mesh.shape["device"],
        memory_bytes=device_memory_bytes(),
        read_bytes_per_s=read_bytes_per_s,
        local_us=local_us,
        collective_us=collective_us,
        node=link_classes["device"],
        network=link_classes["node"] if mesh.shape["node"] > 1 else ASSUMED_NETWORK,
        fitted_devices=len(devices),
        provenance={axis: [point.saved() for point in found] for axis, found in points.items()},
    )


def _costs(points: Sequence[Point], collective: ExchangeCost | None, *, is_across: bool) -> dict[str, ExchangeCost]:
    """Returns the cost of each exchange on one axis; `collective` is that of NCCL's collectives."""
    costs = {}
    for name in dict.fromkeys(point.exchange for point in points):
        measured = [point for point in points if point.exchange == name]
        if name in COLLECTIVES:
            costs[name] = collective
        elif name in ("neighbour", "both_ways"):
            costs[name] = ExchangeCost(round_us=0.0, lines=fit_transfers(measured))
        else:
            costs[name] = fit_exchange(measured, is_across=is_across)
    return costs


def _points(mesh: Mesh, axis: str) -> list[Point]:
    """Times all exchanges along an axis: states at two sizes, and bare transfers."""
    whole = mesh.shape[axis]
    sizes = [whole] if whole == 2 or whole % 2 else [2, whole]
    found = []
    for num_rows in NUM_ROWS:
        alone_us = _step_us(mesh, axis, None, num_rows)
        for exchange, size in itertools.product((*COLLECTIVES, "fused"), sizes):
            try:
                us = _step_us(_in_groups(mesh, axis, size), axis, exchange, num_rows) - alone_us
            except NotImplementedError:  # "fused" without NVLink; or one process has all GPUs, which then all meet
                continue
            payload_bytes = num_rows * (HEAD_DIM + 1) * 4
            found.append(Point(exchange=exchange, size=size, payload_bytes=payload_bytes, us=max(us, MIN_US)))
    all_bytes = (4_096, 1_000_000) if is_emulated(mesh) else TRANSFER_BYTES
    for exchange, num_bytes in itertools.product(("neighbour", "both_ways"), all_bytes):
        gb_per_s = neighbour_gb_per_s(mesh, num_bytes, axis_name=axis, both_ways=exchange == "both_ways")
        found.append(Point(exchange=exchange, size=whole, payload_bytes=num_bytes, us=num_bytes / gb_per_s / 1e3))
    return found


def _in_groups(mesh: Mesh, axis: str, size: int) -> Mesh:
    """Returns a mesh of the same devices in the same order; along `axis` they form groups of `size`."""
    i, shape = mesh.axis_names.index(axis), mesh.devices.shape
    grid = mesh.devices.reshape(*shape[:i], shape[i] // size, size, *shape[i + 1 :])
    names = (*mesh.axis_names[:i], "group", *mesh.axis_names[i:])
    return Mesh(grid, names, axis_types=(jax.sharding.AxisType.Auto,) * grid.ndim)


def _step_us(mesh: Mesh, axis: str, exchange: str | None, num_rows: int) -> float:
    """Times a step: attention to each device's own keys, then a reduction of `num_rows` rows with its result."""
    everyone, heads = P(tuple(mesh.axis_names)), min(NUM_ROWS)
    keys = 8 if is_emulated(mesh) else 81_920  # some 80 us on an H200

    def step(out, key, value):
        attended = attend(out[:, :, :heads].astype(key.dtype), key, value).out
        out = jnp.concatenate([attended.astype(out.dtype), out[:, :, heads:]], axis=2)
        return out if exchange is None else reduce_state(SoftmaxState(out, out[..., 0]), (axis,), exchange, mesh).out

    mapped = jax.shard_map(step, mesh=mesh, in_specs=everyone, out_specs=everyone, check_vma=False)
    out = _random((mesh.size, 1, num_rows, HEAD_DIM), "float32", mesh, everyone)
    return _median_us(mesh, mapped, out, *_key_value(mesh, keys, heads))


def _local_attention(mesh: Mesh) -> tuple[float, float]:
    """Returns the bytes per second that local attention reads, and the microseconds that it takes beside reading."""
    # The shorter of the two is still too long for a GPU's cache to keep it from one step to the next.
    heads, lengths = (2, (64, 1024)) if is_emulated(mesh) else (16, (16_384, 131_072))
    everyone = P(tuple(mesh.axis_names))
    local = lambda query, key, value: attend(query, key, value).out
    step = jax.shard_map(local, mesh=mesh, in_specs=everyone, out_specs=everyone, check_vma=False)
    us = []
    for keys in lengths:
        query = _random((mesh.size, 1, heads, HEAD_DIM), "bfloat16", mesh, everyone)
        us.append(_median_us(mesh, step, query, *_key_value(mesh, keys, heads)))
    num_bytes = [2 * 2 * keys * heads * HEAD_DIM for keys in lengths]
    bytes_per_s = rate((us[1] - us[0]) / (num_bytes[1] - num_bytes[0]) * 1e6)
    return bytes_per_s, max(0.0, float(np.mean(us) - np.mean(num_bytes) / bytes_per_s * 1e6))


def _key_value(mesh: Mesh, keys: int, heads: int) -> list[jax.Array]:
    """Returns each device's own key and value: two arrays, for of one in both places a GPU caches the second read."""
    shape = (mesh.size, keys, heads, HEAD_DIM)
    return [_random(shape, "bfloat16", mesh, P(tuple(mesh.axis_names))) for _ in range(2)]


def _median_us(mesh: Mesh, fn, *args: jax.Array) -> float:
    if is_emulated(mesh):  # a short chain: its time measures nothing
        return latency_us(fn, *args, chain=4, n_iters=3).median_us
    return latency_us(fn, *args, chain=32, long_chain=128).median_us


def _random(shape: tuple[int, ...], dtype: str, mesh: Mesh, spec: P) -> jax.Array:
    """Returns a random array, made on its devices: no process holds all of it."""
    draw = lambda: jax.random.normal(jax.random.key(0), shape, dtype)
    return jax.jit(draw, out_shardings=NamedSharding(mesh, spec))()
