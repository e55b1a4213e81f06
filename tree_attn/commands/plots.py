"""The three plots of `tree-attn compare`: latency, peak memory and communication over the number of keys."""

import importlib.util
import pathlib
from collections.abc import Callable, Sequence

from tree_attn.commands.report import label


def require_matplotlib() -> None:
    """Raises ImportError, saying how to install it, if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("plots need matplotlib: pip install 'tree-attn[plot]' (or pass --no-plots)")


def draw(rows: Sequence[dict], folder: pathlib.Path) -> dict[str, str]:
    """Draws latency.png, peak_memory.png and communication.png from rows; returns their paths by name.

    Predictions are dashed, in the colour of what they predict. Rows that failed are left out.
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
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    figure = Figure(figsize=(7, 4.5), layout="constrained")
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
    """Points by the name of what was measured, by number of keys; zeros and gaps cannot stand on a log axis."""
    implementations = {row["implementation"] for row in rows}
    series: dict[str, list[tuple]] = {}
    for row in rows:
        if row["error"] is None and point(row)[1]:
            name = label(row) + (f" ({row['implementation']})" if len(implementations) > 1 else "")
            series.setdefault(name, []).append(point(row))
    return {name: sorted(points) for name, points in series.items()}


def draw_evaluation(rows: Sequence[dict], path: pathlib.Path) -> pathlib.Path:
    """Draws rows of `tree-attn eval`, a panel for each task: score over bytes moved per token, with standard errors.

    Dense attention is the dotted line. Source: SparQ Attention, Figures 1 and A1.
    """
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure = Figure(figsize=(4.6 * len(tasks), 4), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        of_task = [row for row in rows if row["task"] == task]
        for dense in (row for row in of_task if row["method"] == "dense"):
            axes.axhline(dense["mean"], color="black", linestyle=":", label="dense")
        series: dict[str, list[dict]] = {}
        for row in of_task:
            if row["method"] != "dense":
                kept = f", k {row['num_keys']}" if row["num_components"] is not None else ""
                series.setdefault(row["method"] + kept, []).append(row)
        for name, points in series.items():
            points = sorted(points, key=lambda row: row["transfer_bytes_per_token"])
            x = [row["transfer_bytes_per_token"] / 1e6 for row in points]
            errors = [row["standard_error"] or 0.0 for row in points]
            axes.errorbar(x, [row["mean"] for row in points], yerr=errors, marker="o", capsize=3, label=name)
        axes.set(title=task, xlabel="MB of K and V moved per token", ylabel=of_task[0]["unit"])
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    return path
