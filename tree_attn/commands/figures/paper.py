"""The numbers of the paper's figures: from rows that were measured, and from the cost model beyond them."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from tree_attn.commands import units
from tree_attn.commands.figures import rows
from tree_attn.commands.plan.prediction import strategies_of
from tree_attn.cost.limits import read_limit_us, sent_limit_bytes
from tree_attn.cost.machine import Machine
from tree_attn.cost.predict import STRATEGIES, bytes_sent_per_device, peak_memory_bytes, program_memory_bytes
from tree_attn.cost.step import DecodeStep
from tree_attn.measure.rows import strategy_label

GPUS = (1, 2, 4, 8, 16, 32, 64, 128)
CLUSTERS = (8, 64, 128)  # of the paper's Figure 3a
LENGTHS = tuple(80_000 * 2**i for i in range(7))  # to 5.12M, as in the paper
HIDDEN_SIZES = (1024, 2048, 4096, 8192)
# The one ratio that the paper prints, of its ring's time to its tree's, and where.
PAPER_RATIO, PAPER_GPUS, PAPER_KEYS = 8, 128, 5_120_000
RATIOS = "ring public over tree allreduce"

Values = dict[tuple[str, DecodeStep], float]  # (series, step) -> a time or a size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One marker of a series in a panel: measured, or predicted."""

    panel: str
    series: str
    x: int
    y: float
    is_measured: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """The numbers of a figure.

    Attributes:
      axes: panel -> the names of its x and y axes; both are logarithmic.
      points: of all panels.
      comparisons: for every measured row and prediction: `quantity`, `strategy`, `implementation`, `num_keys`,
        `n_devices`, `by` (the formula or model that predicts), `predicted`, `measured` and the relative `error`.
      limits: panel -> the name of the least y that is possible, and its points (x, y).
    """

    axes: dict[str, tuple[str, str]]
    points: list[Point]
    comparisons: list[dict[str, Any]]
    limits: dict[str, tuple[str, list[tuple[int, float]]]] = dataclasses.field(default_factory=dict)


def figure_3(measured: Sequence[dict], machine: Machine) -> Figure:
    """Returns the time of a step over keys, relative to the ring's with the fewest keys on as many GPUs; and over GPUs.

    The panels over GPUs are of two lengths: the one that was measured on the most numbers of GPUs (among equals the
    longest), and the paper's. The last panel has the ratio of the paper's two algorithms, and the one that it prints.

    Source: Tree Attention, section 6.1 and Figure 3.
    """
    shape, found = rows.step(measured[0]), _fastest(_measured_times(measured))
    counts = sorted({*CLUSTERS, *(step.n_devices for _, step in found)})
    # Predictions are for the measured lengths too, since both are relative to the point of the same first length.
    lengths = {step.num_keys for _, step in found}
    lengths |= {keys for keys in LENGTHS if keys > max(lengths)}
    longer = [dataclasses.replace(shape, num_keys=keys, n_devices=count) for count in counts for keys in lengths]
    axes = {"over keys": ("keys", "time, relative to the ring with the fewest keys")}
    points, limits = [], {}
    for values, is_measured in ((found, True), (_fastest(_predicted_times(longer, machine)), False)):
        for count in counts:
            points += _relative("over keys", values, count, is_measured, min(lengths))
    for keys in sorted({_length_of_most_gpus(found), LENGTHS[-1]}):
        more = [dataclasses.replace(shape, num_keys=keys, n_devices=count) for count in GPUS]
        axes[panel := f"{units.length(keys)} keys"] = ("GPUs", "us")
        least_us = [(step.n_devices, read_limit_us(step, rows.device_kind(measured[0]))) for step in more]
        if None not in dict(least_us).values():
            limits[panel] = ("limit: reading", least_us)
        points += _points(panel, found, "n_devices", True, num_keys=keys)
        predicted = _fastest(_predicted_times(more, machine))
        points += _points(panel, predicted, "n_devices", False)
        points += _ratios(found, keys, True) + _ratios(predicted, keys, False)
    axes[RATIOS] = ("GPUs", "ratio of times")
    theirs = f"the paper, {units.length(PAPER_KEYS)} keys"
    points.append(Point(panel=RATIOS, series=theirs, x=PAPER_GPUS, y=PAPER_RATIO, is_measured=True))
    return Figure(axes=axes, points=points, comparisons=_compared_times(measured, machine), limits=limits)


def figure_4(measured: Sequence[dict]) -> Figure:
    """Returns the peak memory of a GPU over keys, for each number of GPUs with rows; over hidden sizes, for the fewest.

    Source: Tree Attention, section 6.2 and Figure 4 (two GPUs).
    """
    shape, found = rows.step(measured[0]), _measured_memory(measured)
    counts = sorted({step.n_devices for _, step in found})
    axes, points, limits = {}, [], {}
    for count in counts:
        steps = [dataclasses.replace(shape, num_keys=keys, n_devices=count) for keys in LENGTHS]
        axes[panel := f"{units.count(count, 'GPU')}, hidden size {shape.hidden_size:,}"] = ("keys", "bytes")
        points += _points(panel, found, "num_keys", True, n_devices=count)
        points += _points(panel, _predicted_memory(steps), "num_keys", False)
        limits[panel] = _held(steps, "num_keys")
    longest = dataclasses.replace(shape, num_keys=max(step.num_keys for _, step in found), n_devices=counts[0])
    group = shape.num_heads // shape.num_kv_heads
    kv_heads = sorted({-(-hidden // (shape.head_dim * group)) for hidden in HIDDEN_SIZES})
    wider = [dataclasses.replace(longest, num_heads=group * heads, num_kv_heads=heads) for heads in kv_heads]
    panel = f"{units.count(longest.n_devices, 'GPU')}, {units.length(longest.num_keys)} keys"
    axes[panel] = ("hidden size", "bytes")
    points += _points(panel, found, "hidden_size", True, n_devices=longest.n_devices, num_keys=longest.num_keys)
    points += _points(panel, _predicted_memory(wider), "hidden_size", False)
    limits[panel] = _held(wider, "hidden_size")
    return Figure(axes=axes, points=points, comparisons=_compared_memory(measured), limits=limits)


def _held(steps: Iterable[DecodeStep], x: str) -> tuple[str, list[tuple[int, float]]]:
    """Returns the limit of memory: a GPU holds its keys and values."""
    return "limit: K and V", [(getattr(step, x), step.key_value_bytes_per_device) for step in steps]


def equations(measured: Sequence[dict]) -> Figure:
    """Returns the bytes that a GPU holds (equations 8, 9) and sends (10 to 14), over GPUs.

    They are for the length that was measured on the most numbers of GPUs, the longest among equals.

    Source: Tree Attention, sections 6.2 and 6.3.
    """
    shape, measured_memory = rows.step(measured[0]), _measured_memory(measured)
    keys = _length_of_most_gpus(measured_memory)
    steps = [dataclasses.replace(shape, num_keys=keys, n_devices=count) for count in GPUS]
    compared = {"ring public": ("ring_public", None), "tree allreduce": ("tree", "allreduce")}
    sent = {
        (name, rows.step(row)): row["bytes_sent_per_device_compiled"]
        for row in measured
        for name, chosen in compared.items()
        if (row["strategy"], row["reduction"]) == chosen
    }
    by_equations = {
        (name, step): bytes_sent_per_device(step, *chosen) for name, chosen in compared.items() for step in steps
    }
    axes, points = {}, []
    for panel, found, predicted in (
        ("held (equations 8, 9)", measured_memory, _predicted_memory(steps)),
        ("sent (equations 10 to 14)", sent, by_equations),
    ):
        axes[panel] = ("GPUs", "bytes per GPU")
        points += _points(panel, found, "n_devices", True, num_keys=keys)
        points += _points(panel, predicted, "n_devices", False)
    sent_once = [(step.n_devices, sent_limit_bytes(step)) for step in steps if step.n_devices > 1]
    limits = dict(zip(axes, (_held(steps, "n_devices"), ("limit: one state", sent_once)), strict=True))
    comparisons = _compared_memory(measured) + _compared_traffic(measured)
    return Figure(axes=axes, points=points, comparisons=comparisons, limits=limits)


def _length_of_most_gpus(found: Values) -> int:
    """Returns the number of keys that was measured on the most numbers of GPUs, the longest among equals."""
    on_gpus = lambda keys: len({step.n_devices for _, step in found if step.num_keys == keys})
    return max({step.num_keys for _, step in found}, key=lambda keys: (on_gpus(keys), keys))


def _points(panel: str, values: Values, x: str, is_measured: bool, **where: int) -> list[Point]:
    """Returns the points of the `values` whose step has the fields `where`, over the step's field `x`."""
    return [
        Point(panel=panel, series=series, x=getattr(step, x), y=y, is_measured=is_measured)
        for (series, step), y in values.items()
        if all(getattr(step, name) == value for name, value in where.items())
    ]


def _ratios(values: Values, num_keys: int, is_measured: bool) -> list[Point]:
    """Returns the time of the paper's ring over that of its tree, for each number of GPUs that has both."""
    ring, tree = (
        {step.n_devices: us for (name, step), us in values.items() if (name, step.num_keys) == (series, num_keys)}
        for series in ("ring public", "tree allreduce")
    )
    ratios = {count: ring[count] / tree[count] for count in ring.keys() & tree.keys() if count > 1}
    named = {"panel": RATIOS, "series": f"{units.length(num_keys)} keys", "is_measured": is_measured}
    return [Point(x=count, y=ratio, **named) for count, ratio in sorted(ratios.items())]


def _relative(panel: str, values: Values, n_devices: int, is_measured: bool, fewest: int) -> list[Point]:
    """Returns tree and ring on `n_devices` relative to the ring with the `fewest` keys; nothing without that ring."""
    points = _points(panel, values, "num_keys", is_measured, n_devices=n_devices)
    one = next((point for point in points if (point.series, point.x) == ("ring overlapped", fewest)), None)
    return [
        dataclasses.replace(point, series=f"{point.series}, {units.count(n_devices, 'GPU')}", y=point.y / one.y)
        for point in points
        if one is not None and point.series in ("tree", "ring overlapped")
    ]


def _measured_times(measured: Iterable[dict]) -> Iterable[tuple]:
    for row in measured:
        yield row["strategy"], rows.reduction(row), rows.step(row), row["latency_us_median"]


def _predicted_times(steps: Iterable[DecodeStep], machine: Machine) -> Iterable[tuple]:
    for step in steps:
        inside = min(step.n_devices, machine.gpus_per_node)
        if step.n_devices % inside == 0:
            sizes = (inside, step.n_devices // inside) if step.n_devices > inside else (inside,)
            for one in strategies_of(step, sizes, machine)[0]:
                yield one["strategy"], one["reduction"], step, one["latency_us"]


def _fastest(times: Iterable[tuple]) -> Values:
    """Returns the least time of each series: "tree" by its best reduction and by the paper's, and both rings."""
    found: Values = {}
    for strategy, reduction, step, us in times:
        names = ["tree"] if strategy == "tree" else [strategy_label(strategy, None)]
        for name in [*names, "tree allreduce"] if reduction == "allreduce" else names:
            found[name, step] = min(us, found.get((name, step), us))
    return found


def _measured_memory(measured: Iterable[dict]) -> Values:
    return {
        (strategy_label(row["strategy"], None), rows.step(row)): row["peak_memory_bytes_compiled"] for row in measured
    }


def _predicted_memory(steps: Iterable[DecodeStep]) -> Values:
    """Returns the memory of our programs, for the tree equation 9, and that of equation 8 (docs/peak_memory.md)."""
    values: Values = {}
    for step in steps:
        values |= {(strategy_label(name, None), step): program_memory_bytes(step, name) for name in STRATEGIES}
        values["ring by equation 8", step] = peak_memory_bytes(step, "ring_public")
    return values


def _compared_times(measured: Iterable[dict], machine: Machine) -> list[dict[str, Any]]:
    return [
        _compared(row, "us", "the cost model", rows.predicted_us(row, machine), row["latency_us_median"])
        for row in measured
    ]


def _compared_memory(measured: Iterable[dict]) -> list[dict[str, Any]]:
    compared = []
    for row in measured:
        step, strategy, num_bytes = rows.step(row), row["strategy"], row["peak_memory_bytes_compiled"]
        equation = "equation 9" if strategy == "tree" else "equation 8"
        compared.append(_compared(row, "bytes held", equation, peak_memory_bytes(step, strategy), num_bytes))
        if strategy != "tree":
            by = "program_memory_bytes"
            compared.append(_compared(row, "bytes held", by, program_memory_bytes(step, strategy), num_bytes))
    return compared


def _compared_traffic(measured: Iterable[dict]) -> list[dict[str, Any]]:
    by = {"ring_public": "equation 10", "ring_overlapped": "equation 10, less one hop", "allreduce": "equation 14"}
    compared = []
    for row in measured:
        name = by.get(row["strategy"] if row["reduction"] is None else row["reduction"])
        if name is not None and row["bytes_sent_per_device_compiled"]:
            sent = bytes_sent_per_device(rows.step(row), row["strategy"], row["reduction"])
            compared.append(_compared(row, "bytes sent", name, sent, row["bytes_sent_per_device_compiled"]))
    return compared


def _compared(row: dict, quantity: str, by: str, predicted: float, measured: float) -> dict[str, Any]:
    where = {name: row[name] for name in ("implementation", "num_keys", "n_devices")}
    names = {"quantity": quantity, "strategy": strategy_label(row["strategy"], rows.reduction(row)), **where, "by": by}
    return names | {"predicted": predicted, "measured": measured, "error": predicted / measured - 1}
