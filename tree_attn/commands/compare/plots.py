"""Plots of `tree-attn compare`: latency, memory and communication over the number of keys."""

import pathlib
from collections.abc import Callable, Sequence

from tree_attn.commands.drawing import new_figure, require_matplotlib
from tree_attn.measure.rows import strategy_label


def draw(rows: Sequence[dict], folder: pathlib.Path) -> dict[str, str]:
    """Draws latency.png, peak_memory.png and communication.png from rows; returns their paths by name.

    A prediction is a dashed line in the colour of its measurement. Rows with an error are left out.
    """
    require_matplotlib()
    files = {}
    for name, title, unit, measured, predicted in (
        ("latency", "Latency of one decoding step", "microseconds", "latency_us_median", None),
        ("peak_memory", "Peak memory per device, compiled", "bytes", "peak_memory_bytes_compiled",
         "peak_memory_bytes_predicted"),
        ("communication", "Bytes sent per device and step", "bytes", "bytes_sent_per_device_compiled",
         "bytes_sent_per_device_predicted"),
    ):  # fmt: skip
        files[name] = str(folder / f"{name}.png")
        _plot(rows, files[name], title, unit, measured, predicted)
    return files


def _plot(rows: Sequence[dict], path: str, title: str, unit: str, measured: str, predicted: str | None) -> None:
    figure = new_figure(7, 4.5)
    axes = figure.subplots()
    for name, points in _series(rows, lambda row: (row["num_keys"], row[measured])).items():
        (line,) = axes.plot(*zip(*points), marker="o", label=name)
        if predicted is not None:
            dashed = _series(rows, lambda row: (row["num_keys"], row[predicted])).get(name, [])
            axes.plot(*zip(*dashed), linestyle="--", color=line.get_color())
    axes.set(title=title, xlabel="keys", ylabel=unit + (" (dashed: predicted)" if predicted else ""))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log" if any(row[measured] for row in rows) else "linear")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def _series(rows: Sequence[dict], point: Callable[[dict], tuple]) -> dict[str, list[tuple]]:
    """Returns the points of each series, ordered by number of keys; a log axis has no place for zeros and gaps."""
    implementations = {row["implementation"] for row in rows}
    series: dict[str, list[tuple]] = {}
    for row in rows:
        if row["error"] is None and point(row)[1]:
            name = strategy_label(row["strategy"], row["reduction"])
            name += f" ({row['implementation']})" if len(implementations) > 1 else ""
            series.setdefault(name, []).append(point(row))
    return {name: sorted(points) for name, points in series.items()}
