"""The numbers of the paper's figures: from rows that were measured, and from the cost model beyond them."""

import dataclasses
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from tree_attn.commands import rows
from tree_attn.commands.plan import strategies_of
from tree_attn.cost.machine import Machine
from tree_attn.cost.predict import STRATEGIES, bytes_sent_per_device, peak_memory_bytes, program_memory_bytes
from tree_attn.cost.step import DecodeStep

GPUS = (1, 2, 4, 8, 16, 32, 64, 128)
CLUSTERS = (8, 64, 128)  # of the paper's Figure 3a
LENGTHS = tuple(80_000 * 2**i for i in range(7))  # to 5.12M, as in the paper
HIDDEN_SIZES = (1024, 2048, 4096, 8192)

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
    """What a figure shows.

    Attributes:
        axes: panel -> what its x and y are; both are logarithmic.
        points: of all panels.
        comparisons: of every measured row and prediction: `quantity`, `strategy`, `implementation`, `num_keys`,
            `n_devices`, `by` (what predicts it), `predicted`, `measured` and the relative `error`.
    """

    axes: dict[str, tuple[str, str]]
    points: list[Point]
    comparisons: list[dict[str, Any]]


def figure_3(measured: Sequence[dict], machine: Machine) -> Figure:
    """Time of a step over keys, in parts of the ring's with the fewest keys on as many GPUs; and over GPUs.

    Over GPUs for the length that was measured on the most numbers of them (of equals the longest), and the paper's.

    Source: Tree Attention, section 6.1 and Figure 3.
    """
    shape, found = rows.step(measured[0]), _fastest(_measured_times(measured))
    counts = sorted({*CLUSTERS, *(step.n_devices for _, step in found)})
    # Predicted for the lengths that were measured too: parts of a first point of another length could not be compared.
    lengths = {step.num_keys for _, step in found}
    lengths |= {keys for keys in LENGTHS if keys > max(lengths)}
    longer = [dataclasses.replace(shape, num_keys=keys, n_devices=count) for count in counts for keys in lengths]
    axes = {"over keys": ("keys", "time, in parts of the ring's with the fewest keys")}
    points = []
    for values, is_measured in ((found, True), (_fastest(_predicted_times(longer, machine)), False)):
        for count in counts:
            points += _relative("over keys", values, count, is_measured, min(lengths))
    on_gpus = lambda keys: len({step.n_devices for _, step in found if step.num_keys == keys})
    most_measured = max({step.num_keys for _, step in found}, key=lambda keys: (on_gpus(keys), keys))
    for keys in sorted({most_measured, LENGTHS[-1]}):
        more = [dataclasses.replace(shape, num_keys=keys, n_devices=count) for count in GPUS]
        axes[panel := f"{keys:,} keys"] = ("GPUs", "us")
        points += _points(panel, found, "n_devices", True, num_keys=keys)
        points += _points(panel, _fastest(_predicted_times(more, machine)), "n_devices", False)
    return Figure(axes=axes, points=points, comparisons=_compared_times(measured, machine))


def figure_4(measured: Sequence[dict], machine: Machine) -> Figure:
    """Peak memory of a GPU over keys, for each number of GPUs that was measured; over hidden sizes, for the fewest.

    Source: Tree Attention, section 6.2 and Figure 4 (two GPUs).
    """
    del machine  # memory depends on no parameter
    shape, found = rows.step(measured[0]), _measured_memory(measured)
    counts = sorted({step.n_devices for _, step in found})
    axes, points = {}, []
    for count in counts:
        steps = [dataclasses.replace(shape, num_keys=keys, n_devices=count) for keys in LENGTHS]
        axes[panel := f"{count} GPUs, hidden size {shape.hidden_size:,}"] = ("keys", "bytes")
        points += _points(panel, found, "num_keys", True, n_devices=count)
        points += _points(panel, _predicted_memory(steps), "num_keys", False)
    longest = dataclasses.replace(shape, num_keys=max(step.num_keys for _, step in found), n_devices=counts[0])
    group = shape.num_heads // shape.num_kv_heads
    kv_heads = sorted({-(-hidden // (shape.head_dim * group)) for hidden in HIDDEN_SIZES})
    wider = [dataclasses.replace(longest, num_heads=group * heads, num_kv_heads=heads) for heads in kv_heads]
    axes[panel := f"{longest.n_devices} GPUs, {longest.num_keys:,} keys"] = ("hidden size", "bytes")
    points += _points(panel, found, "hidden_size", True, n_devices=longest.n_devices, num_keys=longest.num_keys)
    points += _points(panel, _predicted_memory(wider), "hidden_size", False)
    return Figure(axes=axes, points=points, comparisons=_compared_memory(measured))


def equations(measured: Sequence[dict], machine: Machine) -> Figure:
    """Bytes that a GPU holds (equations 8, 9) and sends (10 to 14), over GPUs, for the most keys that were measured.

    Source: Tree Attention, sections 6.2 and 6.3.
    """
    del machine  # nor do bytes
    shape, held = rows.step(measured[0]), _measured_memory(measured)
    keys = max(step.num_keys for _, step in held)
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
        ("held (equations 8, 9)", held, _predicted_memory(steps)),
        ("sent (equations 10 to 14)", sent, by_equations),
    ):
        axes[panel] = ("GPUs", "bytes per GPU")
        points += _points(panel, found, "n_devices", True, num_keys=keys)
        points += _points(panel, predicted, "n_devices", False)
    return Figure(axes=axes, points=points, comparisons=_compared_memory(measured) + _compared_traffic(measured))


def draw(figure: Figure, path: pathlib.Path, note: str) -> None:
    """Draws the panels side by side: what was measured full and solid, what is predicted hollow and dashed."""
    import matplotlib
    from matplotlib.figure import Figure as Drawing  # not pyplot: no display, no global state

    drawing = Drawing(figsize=(5.5 * len(figure.axes), 6), layout="constrained")
    drawing.suptitle(note, fontsize="medium")
    for plot, (panel, (x, y)) in zip(drawing.subplots(1, len(figure.axes), squeeze=False)[0], figure.axes.items()):
        in_panel = [
            point for point in figure.points if point.panel == panel and point.y > 0
        ]  # the axes are logarithmic
        names = list(dict.fromkeys(point.series for point in in_panel))
        colors = "tab10" if len(names) <= 10 else "tab20"
        for i, series in enumerate(names):
            color = matplotlib.colormaps[colors](i)
            for is_measured in (True, False):
                own = [(p.x, p.y) for p in in_panel if p.series == series and p.is_measured == is_measured]
                if own:
                    style = dict(linestyle="-") if is_measured else dict(linestyle="--", fillstyle="none")
                    name = f"{series}, {'measured' if is_measured else 'predicted'}"
                    plot.plot(*zip(*sorted(own)), marker="o", color=color, label=name, **style)
        plot.set(title=panel, xlabel=x, ylabel=y, xscale="log", yscale="log")
        ticks = sorted({point.x for point in in_panel if not point.is_measured})
        plot.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=45)
        plot.minorticks_off()
        plot.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=2)
        plot.grid(alpha=0.3)
    drawing.savefig(path, dpi=150, bbox_inches="tight")  # with the legends


def _points(panel: str, values: Values, x: str, is_measured: bool, **where: int) -> list[Point]:
    """Those of `values` whose step has the fields `where`, over the step's field `x`."""
    return [
        Point(panel=panel, series=series, x=getattr(step, x), y=y, is_measured=is_measured)
        for (series, step), y in values.items()
        if all(getattr(step, name) == value for name, value in where.items())
    ]


def _relative(panel: str, values: Values, n_devices: int, is_measured: bool, fewest: int) -> list[Point]:
    """Tree and ring on `n_devices`, in parts of the ring with the `fewest` keys; nothing where that is not known."""
    points = _points(panel, values, "num_keys", is_measured, n_devices=n_devices)
    one = next((point for point in points if (point.series, point.x) == ("ring overlapped", fewest)), None)
    return [
        dataclasses.replace(point, series=f"{point.series}, {n_devices} GPU{'s' * (n_devices > 1)}", y=point.y / one.y)
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
    """The least time of each series: "tree" by its best reduction and by the paper's, and both rings."""
    found: Values = {}
    for strategy, reduction, step, us in times:
        names = ["tree"] if strategy == "tree" else [rows.label(strategy, None)]
        for name in [*names, "tree allreduce"] if reduction == "allreduce" else names:
            found[name, step] = min(us, found.get((name, step), us))
    return found


def _measured_memory(measured: Iterable[dict]) -> Values:
    return {(rows.label(row["strategy"], None), rows.step(row)): row["peak_memory_bytes_compiled"] for row in measured}


def _predicted_memory(steps: Iterable[DecodeStep]) -> Values:
    """What our programs hold, which for the tree is equation 9; and equation 8, which for rings is less (see docs)."""
    values: Values = {}
    for step in steps:
        values |= {(rows.label(name, None), step): program_memory_bytes(step, name) for name in STRATEGIES}
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
        step, strategy, held = rows.step(row), row["strategy"], row["peak_memory_bytes_compiled"]
        equation = "equation 9" if strategy == "tree" else "equation 8"
        compared.append(_compared(row, "bytes held", equation, peak_memory_bytes(step, strategy), held))
        if strategy != "tree":
            by = "program_memory_bytes"
            compared.append(_compared(row, "bytes held", by, program_memory_bytes(step, strategy), held))
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
    names = {"quantity": quantity, "strategy": rows.label(row["strategy"], rows.reduction(row)), **where, "by": by}
    return names | {"predicted": predicted, "measured": measured, "error": predicted / measured - 1}
