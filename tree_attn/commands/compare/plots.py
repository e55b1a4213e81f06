"""Plots of `tree-attn compare`: latency, memory and communication over the number of keys."""

import dataclasses
import pathlib
import textwrap
from collections.abc import Callable, Sequence

from tree_attn.commands import drawing, units
from tree_attn.commands.compare import report
from tree_attn.commands.figures.rows import device_kind, setting, step
from tree_attn.cost import limits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plot:
    """One of the plots.

    Attributes:
      title: what it shows.
      measured, predicted: fields of the rows; None where nothing is predicted.
      limit: returns the least value of a row's step, or None where it is unknown; `limit_name` says what it is.
      unit: of the vertical axis, and `write` writes its values.
    """

    title: str
    measured: str
    predicted: str | None
    limit: Callable[[dict], float | None]
    limit_name: str
    unit: str
    write: Callable[[float], str]


def least_us(row: dict) -> float | None:
    """Returns the time to read K and V once by the datasheet; None for a device without one."""
    return limits.read_limit_us(step(row), device_kind(row))


def least_bytes(row: dict) -> float:
    """Returns the bytes of a device's keys and values."""
    return step(row).key_value_bytes_per_device


def least_sent(row: dict) -> float:
    """Returns the bytes that each device sends, on average, where all states but one are sent once."""
    return limits.sent_limit_bytes(step(row))


PLOTS = {
    "latency": Plot(
        title="Latency of one decoding step",
        measured="latency_us_median",
        predicted=None,
        limit=least_us,
        limit_name="limit: reading",
        unit="microseconds (bars: p10 to p90)",
        write=lambda us: f"{us:,g}",
    ),
    "peak_memory": Plot(
        title="Peak memory per device, compiled",
        measured="peak_memory_bytes_compiled",
        predicted="peak_memory_bytes_predicted",
        limit=least_bytes,
        limit_name="limit: K and V",
        unit="bytes (crosses, dashed: predicted)",
        write=units.size,
    ),
    "communication": Plot(
        title="Bytes sent per device and step",
        measured="bytes_sent_per_device_compiled",
        predicted="bytes_sent_per_device_predicted",
        limit=least_sent,
        limit_name="limit: one state",
        unit="bytes (crosses, dashed: predicted)",
        write=units.size,
    ),
}


def draw(rows: Sequence[dict], folder: pathlib.Path) -> dict[str, str]:
    """Draws latency.png, peak_memory.png and communication.png from rows; returns their paths by name.

    Predictions are crosses on a dashed line in the colour of their measurements. Rows with an error are left out.
    """
    files = {name: str(folder / f"{name}.png") for name in PLOTS}
    for name, plot in PLOTS.items():
        figure = drawing.new_figure(6.2, 4.4)
        _draw(figure.subplots(), rows, plot)
        figure.savefig(files[name], dpi=150)
    return files


def _draw(axes, rows: Sequence[dict], plot: Plot) -> None:
    title = (textwrap.fill(line, 60) for line in (plot.title, *setting(rows)))
    axes.set_title("\n".join(title), fontsize="medium", loc="left")
    axes.set(xlabel="keys", ylabel=plot.unit)
    drawing.logarithmic(axes)
    ends = _curves(axes, rows, plot)
    limit = sorted({(row["num_keys"], plot.limit(row)) for row in rows if plot.limit(row)})
    if limit:
        axes.plot(*zip(*limit), color="black", linestyle=":", marker="_", markersize=12, zorder=3)
        ends.append((*limit[-1], plot.limit_name, "black"))
    lengths = sorted({row["num_keys"] for row in rows})
    space = 1.1 if len(lengths) > 1 else 2
    axes.set_xlim(lengths[0] / space, lengths[-1] * space)
    axes.set_xticks(lengths, [units.length(num_keys) for num_keys in lengths], rotation=30 if len(lengths) > 5 else 0)
    if ends:
        ticks = drawing.ticks(*axes.dataLim.intervaly)
        axes.set_yticks(ticks, [plot.write(y) for y in ticks])
        axes.set_ylim(ticks[0] / 1.1, ticks[-1] * 1.1)
    drawing.label_ends(axes, ends)


def _curves(axes, rows: Sequence[dict], plot: Plot) -> list[tuple]:
    """Draws each strategy's points, and returns what `drawing.label_ends` takes."""
    import matplotlib

    solid, dashed = _series(rows, plot.measured), _series(rows, plot.predicted)
    low, high = (_series(rows, f"latency_us_{end}") for end in ("p10", "p90"))
    names = dict.fromkeys(_name(row, rows) for row in rows)  # of all rows: a colour is a strategy's in every plot
    colours = matplotlib.colormaps["tab10" if len(names) <= 10 else "tab20"].colors
    ends = []
    for i, name in enumerate(names):
        if name not in solid and name not in dashed:
            continue
        colour, place = colours[i % len(colours)], i % 5
        # Of lines and hollow marks on one another the later ones are smaller, so that all are seen.
        look = {"color": colour, "markersize": 11 - 2 * place, "linewidth": 3 - 0.5 * place, "zorder": 2 + place / 10}
        if name in solid:
            axes.plot(*zip(*solid[name]), marker="o", fillstyle="none", **look)
        if name in dashed:  # crosses are seen over a line that agrees, and where there is one length
            axes.plot(*zip(*dashed[name]), linestyle="--", marker="x", **look)
        if plot.measured == "latency_us_median":
            bars = [[y for _, y in curve[name]] for curve in (low, high)]
            axes.vlines([x for x, _ in solid[name]], *bars, color=colour, alpha=0.5, linewidth=3)
        ends.append((*(solid.get(name) or dashed[name])[-1], name, colour))
    return ends


def _series(rows: Sequence[dict], field: str | None) -> dict[str, list[tuple]]:
    """Returns the points of each series, ordered by number of keys; a log axis has no place for zeros and gaps."""
    series: dict[str, list[tuple]] = {}
    for row in rows:
        if field and row["error"] is None and row[field]:
            series.setdefault(_name(row, rows), []).append((row["num_keys"], row[field]))
    return {name: sorted(points) for name, points in series.items()}


def _name(row: dict, rows: Sequence[dict]) -> str:
    """Returns the name of a row's strategy, and of its local kernel where the rows have several for it."""
    label = report.label(row)
    kernels = {other["implementation"] for other in rows if report.label(other) == label}
    return label + (f" ({row['implementation']})" if len(kernels) > 1 else "")
