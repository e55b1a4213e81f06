"""Measures a machine's parameters for the cost model: exchanges at two sizes, bare transfers, local attention."""

import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tree_attn import attend
from tree_attn.cost import predict
from tree_attn.cost.machine import ASSUMED_NETWORK, EXCHANGES, AlphaBeta, ExchangeCost, LinkClass, Machine
from tree_attn.measure.latency import latency_us
from tree_attn.measure.links import neighbour_gb_per_s
from tree_attn.mesh import make_mesh
from tree_attn.reduce import reduce_state
from tree_attn.state import SoftmaxState

HEAD_DIM = 128
NUM_ROWS = (8, 2032)  # queries times heads: states of 4 kB and of 1 MB
COLLECTIVES = tuple(kind for kind in predict.AXIS_REDUCTIONS if EXCHANGES[kind].is_collective)
LEAST_US = 0.1  # of what noise says takes no time
MOST_BYTES_PER_S = 1e15  # where noise says that more bytes take no more time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One measurement: an exchange of `payload_bytes` on each of `size` devices took `us` microseconds.

    That is by how much one makes a step longer, or, of bare transfers ("neighbour"), the median of a chain of them.
    """

    kind: str
    size: int
    payload_bytes: int
    us: float


def measure_machine(devices: Sequence[jax.Device]) -> Machine:
    """Measures the machine that `devices` are all of; every process calls it. Takes a minute or two.

    Exchanges are timed as the library does them (`reduce_state`), among all devices of a node (and all nodes) and among
    pairs, so that launch and latency can be told apart, by what they add to a step of local attention: in a chain of
    their own they would wait for the host, which they do not where a GPU has other work meanwhile
    (docs/log/measurement.md: "Collectives must be timed within steps, for in a chain they wait for the host"). Bare
    transfers are timed in chains of dependent ones (`latency.latency_us`).

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
    collective_us, of_collectives = fit_collectives(points)
    levels = {
        axis: LinkClass(
            source=f"measured: {hardware}",
            costs=_costs(points.get(axis, ()), of_collectives.get(axis), is_across=axis == "node"),
        )
        for axis in mesh.axis_names
    }
    read_bytes_per_s, local_us = _local_attention(mesh)
    return Machine(
        device_kind=devices[0].device_kind,
        gpus_per_node=mesh.shape["device"],
        memory_bytes=_memory_bytes(),
        read_bytes_per_s=read_bytes_per_s,
        local_us=local_us,
        collective_us=collective_us,
        node=levels["device"],
        network=levels["node"] if mesh.shape["node"] > 1 else ASSUMED_NETWORK,
        provenance={axis: [dataclasses.asdict(point) for point in found] for axis, found in points.items()},
    )


def fit_collectives(points: Mapping[str, Sequence[Point]]) -> tuple[float, dict[str, ExchangeCost]]:
    """What NCCL's collectives cost: the first of a step beside itself, and each, by axis ("device", "node").

    All kinds share an axis's launch, latency and rate, or else what the first costs could not be told from a launch.

    Args:
        points: by axis; those of `COLLECTIVES` count.
    """
    chosen = [(axis, point) for axis, found in points.items() for point in found if point.kind in COLLECTIVES]
    axes = list(dict.fromkeys(axis for axis, _ in chosen))
    if not axes:
        return 0.0, {}
    rows = np.zeros((len(chosen), 1 + 3 * len(axes)))
    rows[:, 0] = 1
    for row, (axis, point) in zip(rows, chosen):
        first = 1 + 3 * axes.index(axis)
        of_axis = [other for other_axis, other in chosen if other_axis == axis]
        row[first : first + 3] = _counts(point, of_axis, is_across=axis == "node")
    collective_us, *costs = _least_squares(rows, [point.us for _, point in chosen])
    of = {axis: _cost(*costs[3 * i : 3 * i + 3]) for i, axis in enumerate(axes)}
    return collective_us, of


def fit(points: Sequence[Point], *, is_across: bool) -> ExchangeCost:
    """The launch, latency and rate that explain an exchange's times best, none negative, by their relative errors.

    With one size of groups launch and latency cannot be told apart: the launch then has both.
    """
    rows = np.array([_counts(point, points, is_across=is_across) for point in points])
    return _cost(*_least_squares(rows, [point.us for point in points]))


def _counts(point: Point, beside: Sequence[Point], *, is_across: bool) -> list[float]:
    """Launches, messages that wait for one another, and megabytes of an exchange."""
    how = EXCHANGES[point.kind]
    rounds = how.rounds(1, point.size)[1] if is_across else how.rounds(point.size, 1)[0]
    rounds *= len({other.size for other in beside}) > 1
    return [how.num_exchanges, how.num_exchanges * rounds, how.payloads_sent(point.size) * point.payload_bytes / 1e6]


def _least_squares(rows: np.ndarray, us: Sequence[float]) -> list[float]:
    """What the columns cost, none less than nothing, with the least relative errors; of small times they count less.

    A difference of two medians may be all noise, and would otherwise outweigh the rest.
    """
    from scipy.optimize import nnls  # comes with JAX

    us = np.array(us)
    scale = np.maximum(us, np.median(us) / 4)
    found, _ = nnls(rows / scale[:, None], us / scale)
    return [float(x) for x in found]


def _cost(alpha_us: float, round_us: float, us_per_mb: float) -> ExchangeCost:
    return ExchangeCost(round_us=round_us, lines=(AlphaBeta(alpha_us=alpha_us, bytes_per_s=_rate(us_per_mb)),))


def lines(points: Sequence[Point]) -> tuple[AlphaBeta, ...]:
    """The lines of the least concave function that no point is above: how transfers of all sizes do, at their slowest.

    Larger transfers are given more channels, so the time per byte falls with the size.
    """
    hull: list[Point] = []
    for point in sorted(points, key=lambda point: point.payload_bytes):
        while len(hull) > 1 and _us_per_mb(hull[-1], point) >= _us_per_mb(hull[-2], hull[-1]):
            hull.pop()
        hull.append(point)
    return tuple(
        AlphaBeta(
            alpha_us=max(0.0, left.us - max(0.0, _us_per_mb(left, right)) * left.payload_bytes / 1e6),
            bytes_per_s=_rate(_us_per_mb(left, right)),
        )
        for left, right in itertools.pairwise(hull)
    )


def _costs(points: Sequence[Point], of_collectives: ExchangeCost | None, *, is_across: bool) -> dict[str, ExchangeCost]:
    found = {}
    for kind in dict.fromkeys(point.kind for point in points):
        of_kind = [point for point in points if point.kind == kind]
        if kind in COLLECTIVES:
            found[kind] = of_collectives
        elif kind == "neighbour":
            found[kind] = ExchangeCost(round_us=0.0, lines=lines(of_kind))
        else:
            found[kind] = fit(of_kind, is_across=is_across)
    return found


def _us_per_mb(left: Point, right: Point) -> float:
    return (right.us - left.us) / (right.payload_bytes - left.payload_bytes) * 1e6


def _rate(us_per_mb: float) -> float:
    return 1e12 / max(us_per_mb, 1e12 / MOST_BYTES_PER_S)


def _points(mesh: Mesh, axis: str) -> list[Point]:
    whole = mesh.shape[axis]
    sizes = [whole] if whole == 2 or whole % 2 else [2, whole]
    found = []
    add = lambda kind, size, num_rows, us: found.append(
        Point(kind=kind, size=size, payload_bytes=num_rows * (HEAD_DIM + 1) * 4, us=us)
    )
    for num_rows in NUM_ROWS:
        alone_us = _step_us(mesh, axis, None, num_rows)
        for kind, size in itertools.product((*COLLECTIVES, "fused"), sizes):
            try:
                us = _step_us(_in_groups(mesh, axis, size), axis, kind, num_rows) - alone_us
            except NotImplementedError:  # "fused" without NVLink; or one process has all GPUs, which then all meet
                continue
            add(kind, size, num_rows, max(us, LEAST_US))
    for num_bytes in (
        (4_096, 1_000_000) if _is_emulated(mesh) else (4_096, 1_000_000, 64_000_000, 256_000_000, 640_000_000)
    ):
        us = num_bytes / neighbour_gb_per_s(mesh, num_bytes, axis_name=axis) / 1e3
        found.append(Point(kind="neighbour", size=whole, payload_bytes=num_bytes, us=us))
    return found


def _in_groups(mesh: Mesh, axis: str, size: int) -> Mesh:
    """The same devices in the same order; along `axis` they meet in groups of `size`."""
    i, shape = mesh.axis_names.index(axis), mesh.devices.shape
    grid = mesh.devices.reshape(*shape[:i], shape[i] // size, size, *shape[i + 1 :])
    names = (*mesh.axis_names[:i], "group", *mesh.axis_names[i:])
    return Mesh(grid, names, axis_types=(jax.sharding.AxisType.Auto,) * grid.ndim)


def _step_us(mesh: Mesh, axis: str, kind: str | None, num_rows: int) -> float:
    """A step of attention to each device's own keys, its result part of a state of `num_rows` that is then reduced."""
    everyone, heads = P(tuple(mesh.axis_names)), min(NUM_ROWS)
    keys = 8 if _is_emulated(mesh) else 81_920  # some 80 us on an H200

    def step(out, key, value):
        attended = attend(out[:, :, :heads].astype(key.dtype), key, value).out
        out = jnp.concatenate([attended.astype(out.dtype), out[:, :, heads:]], axis=2)
        return out if kind is None else reduce_state(SoftmaxState(out, out[..., 0]), (axis,), kind, mesh).out

    mapped = jax.shard_map(step, mesh=mesh, in_specs=everyone, out_specs=everyone, check_vma=False)
    out = _random((mesh.size, 1, num_rows, HEAD_DIM), "float32", mesh, everyone)
    return _median_us(mesh, mapped, out, *_key_value(mesh, keys, heads))


def _local_attention(mesh: Mesh) -> tuple[float, float]:
    """Bytes per second that local attention reads, and what it takes beside reading, in microseconds."""
    # The shorter of the two is still too long for a GPU's cache to keep it from one step to the next.
    heads, lengths = (2, (64, 1024)) if _is_emulated(mesh) else (16, (16_384, 131_072))
    everyone = P(tuple(mesh.axis_names))
    local = lambda query, key, value: attend(query, key, value).out
    step = jax.shard_map(local, mesh=mesh, in_specs=everyone, out_specs=everyone, check_vma=False)
    us = []
    for keys in lengths:
        query = _random((mesh.size, 1, heads, HEAD_DIM), "bfloat16", mesh, everyone)
        us.append(_median_us(mesh, step, query, *_key_value(mesh, keys, heads)))
    num_bytes = [2 * 2 * keys * heads * HEAD_DIM for keys in lengths]
    rate = _rate((us[1] - us[0]) / (num_bytes[1] - num_bytes[0]) * 1e6)
    return rate, max(0.0, float(np.mean(us) - np.mean(num_bytes) / rate * 1e6))


def _key_value(mesh: Mesh, keys: int, heads: int) -> list[jax.Array]:
    """Each device's own. Two arrays: one in both places would be read from memory once, and once from the cache."""
    shape = (mesh.size, keys, heads, HEAD_DIM)
    return [_random(shape, "bfloat16", mesh, P(tuple(mesh.axis_names))) for _ in range(2)]


def _median_us(mesh: Mesh, fn, *args: jax.Array) -> float:
    if _is_emulated(mesh):  # which measures nothing, and may be done with soon
        return latency_us(fn, *args, chain=4, n_iters=3).median_us
    return latency_us(fn, *args, chain=32, long_chain=128).median_us


def _is_emulated(mesh: Mesh) -> bool:
    return mesh.devices.flat[0].platform == "cpu"


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
