"""Measures a machine's parameters for the cost model: every exchange at two sizes, bare transfers, and whole steps."""

import dataclasses
import functools
import itertools
import os
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tree_attn import attend, cost_model, tree_decode
from tree_attn.links import neighbour_gb_per_s
from tree_attn.machine import ASSUMED_NETWORK, KINDS, Cost, Line, LinkLevel, Machine
from tree_attn.measure import latency_us
from tree_attn.mesh import make_mesh
from tree_attn.reduce import reduce_state
from tree_attn.state import SoftmaxState

HEAD_DIM = 128
NUM_ROWS = (8, 2032)  # queries times heads: states of 4 kB and of 1 MB
MOST_BYTES_PER_S = 1e15  # where noise says that more bytes take no more time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One measurement: an exchange of `payload_bytes` on each of `size` devices took `us` microseconds, the median."""

    kind: str
    size: int
    payload_bytes: int
    us: float


def measure_machine(devices: Sequence[jax.Device]) -> Machine:
    """Measures the machine that `devices` are all of; every process calls it. Takes a minute or two.

    Exchanges are timed as the library does them (`reduce_state`), in chains of dependent ones (`measure.latency_us`),
    among all devices of a node (and all nodes) and among pairs, so that launch and latency can be told apart.

    Raises:
        ValueError: there is one device, and nothing to exchange.

    Example:
        >>> machine.write(measure_machine(jax.devices()), "machine.json")
    """
    if len(devices) < 2:
        raise ValueError(f"a machine's links need at least 2 devices to be measured, got {len(devices)}")
    mesh = make_mesh(("device", "node"), devices)
    points = {axis: _points(mesh, axis) for axis in mesh.axis_names if mesh.shape[axis] > 1}
    hardware = f"{mesh.shape['node']} x {mesh.shape['device']} x {devices[0].device_kind}"
    levels = {
        axis: LinkLevel(source=f"measured: {hardware}", costs=_costs(points.get(axis, ()), is_across=axis == "node"))
        for axis in mesh.axis_names
    }
    known = Machine(
        device_kind=devices[0].device_kind,
        gpus_per_node=mesh.shape["device"],
        memory_bytes=_memory_bytes(),
        read_bytes_per_s=1.0,  # this and the two after it are still to come
        local_us=0.0,
        collective_us=0.0,
        node=levels["device"],
        network=levels["node"] if mesh.shape["node"] > 1 else ASSUMED_NETWORK,
        provenance={axis: [dataclasses.asdict(point) for point in found] for axis, found in points.items()},
    )
    return _with_steps(known, mesh)


def fit(kind: str, points: Sequence[Point], *, is_across: bool) -> Cost:
    """The launch, latency and rate that explain an exchange's times best, none negative, by their relative errors.

    With one size of groups launch and latency cannot be told apart: the launch then has both.
    """
    from scipy.optimize import nnls  # comes with JAX

    how = KINDS[kind]
    rounds = lambda size: how.rounds(1, size)[1] if is_across else how.rounds(size, 1)[0]
    num_rounds = [rounds(point.size) * (len({point.size for point in points}) > 1) for point in points]
    columns = [
        [how.exchanges, how.exchanges * waits, how.sent(point.size) * point.payload_bytes]
        for point, waits in zip(points, num_rounds)
    ]
    us = np.array([point.us for point in points])
    scale = np.array([1, 1, 1e-6])  # bytes count in MB, for a problem that is well conditioned
    (alpha_us, round_us, us_per_mb), _ = nnls(np.array(columns) * scale / us[:, None], np.ones(len(us)))
    return Cost(
        round_us=float(round_us),
        lines=(Line(alpha_us=float(alpha_us), bytes_per_s=_rate(us_per_mb)),),
    )


def lines(points: Sequence[Point]) -> tuple[Line, ...]:
    """The lines of the least concave function that no point is above: how transfers of all sizes do, at their slowest.

    Larger transfers are given more channels, so the time per byte falls with the size.
    """
    hull: list[Point] = []
    for point in sorted(points, key=lambda point: point.payload_bytes):
        while len(hull) > 1 and _us_per_mb(hull[-1], point) >= _us_per_mb(hull[-2], hull[-1]):
            hull.pop()
        hull.append(point)
    return tuple(
        Line(
            alpha_us=max(0.0, left.us - max(0.0, _us_per_mb(left, right)) * left.payload_bytes / 1e6),
            bytes_per_s=_rate(_us_per_mb(left, right)),
        )
        for left, right in itertools.pairwise(hull)
    )


def _costs(points: Sequence[Point], *, is_across: bool) -> dict[str, Cost]:
    found = {}
    for kind in dict.fromkeys(point.kind for point in points):
        of_kind = [point for point in points if point.kind == kind]
        is_bare = kind == "neighbour"
        found[kind] = Cost(round_us=0.0, lines=lines(of_kind)) if is_bare else fit(kind, of_kind, is_across=is_across)
    return found


def _us_per_mb(left: Point, right: Point) -> float:
    return (right.us - left.us) / (right.payload_bytes - left.payload_bytes) * 1e6


def _rate(us_per_mb: float) -> float:
    return 1e12 / max(us_per_mb, 1e12 / MOST_BYTES_PER_S)


def _points(mesh: Mesh, axis: str) -> list[Point]:
    whole = mesh.shape[axis]
    sizes = [whole] if whole == 2 or whole % 2 else [2, whole]
    found = []
    for kind, size, num_rows in itertools.product(cost_model.LEVELS, sizes, NUM_ROWS):
        try:
            us = _exchange_us(_in_groups(mesh, axis, size), axis, kind, num_rows)
        except NotImplementedError:  # "fused", where there is no NVLink
            continue
        found.append(Point(kind=kind, size=size, payload_bytes=num_rows * (HEAD_DIM + 1) * 4, us=us))
    is_emulated = mesh.devices.flat[0].platform == "cpu"
    for num_bytes in (4_096, 1_000_000) if is_emulated else (4_096, 1_000_000, 64_000_000, 256_000_000, 640_000_000):
        us = num_bytes / neighbour_gb_per_s(mesh, num_bytes, axis_name=axis) / 1e3
        found.append(Point(kind="neighbour", size=whole, payload_bytes=num_bytes, us=us))
    return found


def _in_groups(mesh: Mesh, axis: str, size: int) -> Mesh:
    """The same devices in the same order; along `axis` they meet in groups of `size`."""
    i, shape = mesh.axis_names.index(axis), mesh.devices.shape
    grid = mesh.devices.reshape(*shape[:i], shape[i] // size, size, *shape[i + 1 :])
    names = (*mesh.axis_names[:i], "group", *mesh.axis_names[i:])
    return Mesh(grid, names, axis_types=(jax.sharding.AxisType.Auto,) * grid.ndim)


def _exchange_us(mesh: Mesh, axis: str, kind: str, num_rows: int) -> float:
    """The median time of one reduction along `axis`, all groups at once."""
    everyone = P(tuple(mesh.axis_names))

    def exchange(out):
        return reduce_state(SoftmaxState(out, out[..., 0]), (axis,), kind, mesh).out

    chained = jax.shard_map(exchange, mesh=mesh, in_specs=everyone, out_specs=everyone, check_vma=False)
    states = _random((mesh.size, 1, num_rows, HEAD_DIM), "float32", mesh, everyone)
    return _median_us(mesh, chained, states)


def _with_steps(machine: Machine, mesh: Mesh) -> Machine:
    """Adds what local attention takes, alone, and what a whole step takes beside it and its exchanges."""
    is_emulated = mesh.devices.flat[0].platform == "cpu"
    # The shorter of the two is still too long for a GPU's cache to keep it from one step to the next.
    heads, lengths = (2, (64, 1024)) if is_emulated else (16, (16_384, 131_072))
    axes = tuple(reversed(mesh.axis_names))  # fastest first
    steps = functools.partial(_step_us, mesh, axes, heads)
    alone = [steps(keys, is_alone=True) for keys in lengths]
    whole = [steps(keys, is_alone=False) for keys in lengths]
    num_bytes = [2 * 2 * keys * heads * HEAD_DIM for keys in lengths]
    us_per_mb = (alone[1] - alone[0]) / (num_bytes[1] - num_bytes[0]) * 1e6
    rate = _rate(us_per_mb)
    sizes = tuple(mesh.shape[axis] for axis in axes)
    exchanges = sum(
        cost_model.reduction_us("hierarchical", elements=heads * (HEAD_DIM + 1), axis_sizes=sizes, machine=machine)
    )
    return dataclasses.replace(
        machine,
        read_bytes_per_s=rate,
        local_us=max(0.0, float(np.mean(alone) - np.mean(num_bytes) / rate * 1e6)),
        collective_us=max(0.0, float(np.mean(whole) - np.mean(alone) - exchanges)),
    )


def _step_us(mesh: Mesh, axes: tuple[str, ...], heads: int, keys: int, *, is_alone: bool) -> float:
    """A step with `keys` on each device in bfloat16: attention alone, or tree attention with gathers."""
    everyone = P(tuple(mesh.axis_names))
    if is_alone:
        query = _random((mesh.size, 1, heads, HEAD_DIM), "bfloat16", mesh, everyone)
        key = _random((mesh.size, keys, heads, HEAD_DIM), "bfloat16", mesh, everyone)
        local = lambda query, key, value: attend(query, key, value).out
        step = jax.shard_map(local, mesh=mesh, in_specs=everyone, out_specs=everyone, check_vma=False)
    else:
        query = _random((1, 1, heads, HEAD_DIM), "bfloat16", mesh, P())
        key = _random((1, mesh.size * keys, heads, HEAD_DIM), "bfloat16", mesh, P(None, axes))
        step = functools.partial(tree_decode, axis_name=axes, mesh=mesh, reduction="hierarchical")
    return _median_us(mesh, step, query, key, key)


def _median_us(mesh: Mesh, fn, *args: jax.Array) -> float:
    if mesh.devices.flat[0].platform == "cpu":  # which measures nothing, and may be done with soon
        return latency_us(fn, *args, chain=4, n_iters=3).median_us
    return latency_us(fn, *args, chain=32, long_chain=128).median_us


def _random(shape: tuple[int, ...], dtype: str, mesh: Mesh, spec: P) -> jax.Array:
    """Made where it is needed: no process holds all of it."""
    draw = lambda: jax.random.normal(jax.random.key(0), shape, dtype)
    return jax.jit(draw, out_shardings=NamedSharding(mesh, spec))()


def _memory_bytes() -> int:
    """What JAX may use of this process's first device; of emulated ones each has its part of the machine's."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()
