"""The plots of `tree-attn compare` over the number of keys, and those of `tree-attn eval`."""

import importlib.util
import math
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


def draw_evaluation(rows: Sequence[dict], folder: pathlib.Path) -> dict[str, str]:
    """Draws rows of `tree-attn eval`: evaluation.png, and needle.png of those with a depth; paths by name."""
    files = {}
    by_depth = [row for row in rows if "depth_percent" in row]
    others = [row for row in rows if "depth_percent" not in row]
    if others:
        files["plot"] = str(_draw_scores(others, folder / "evaluation.png"))
    if by_depth:
        files["needle"] = str(_draw_needle(by_depth, folder / "needle.png"))
    return files


def evaluation_label(row: dict) -> str:
    """How tables and plots call a method: "h2o", "sparq, k 64", "sparq, k 64, temperature head_dim"."""
    words = [row["method"]]
    words += [f"k {row['num_keys']}"] if row["num_components"] is not None else []
    words += [f"{word} {row[name]}" for name, word in (("local_window", "window"), ("score_temperature", "temperature"))
              if name in row]  # fmt: skip
    return ", ".join(words)


def _draw_scores(rows: Sequence[dict], path: pathlib.Path) -> pathlib.Path:
    """A panel for each task and context: score over bytes moved per token, with standard errors.

    Dense attention is the dotted line. Source: SparQ Attention, Figures 1 and A1.
    """
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((row["task"], row["context"]) for row in rows))
    names_context = len({context for _, context in panels}) > 1
    figure = Figure(figsize=(4.6 * len(panels), 4), layout="constrained")
    for axes, (task, context) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        of_task = [row for row in rows if (row["task"], row["context"]) == (task, context)]
        for dense in (row for row in of_task if row["method"] == "dense"):
            axes.axhline(dense["mean"], color="black", linestyle=":", label="dense")
        series: dict[str, list[dict]] = {}
        for row in of_task:
            if row["method"] != "dense":
                series.setdefault(evaluation_label(row), []).append(row)
        for name, points in series.items():
            points = sorted(points, key=lambda row: row["transfer_bytes_per_token"])
            x = [row["transfer_bytes_per_token"] / 1e6 for row in points]
            errors = [row["standard_error"] or 0.0 for row in points]
            axes.errorbar(x, [row["mean"] for row in points], yerr=errors, marker="o", capsize=3, label=name)
        title = f"{task}, context {context:,}" if names_context else task
        axes.set(title=title, xlabel="MB of K and V moved per token", ylabel=of_task[0]["unit"])
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    return path


def _draw_needle(rows: Sequence[dict], path: pathlib.Path) -> pathlib.Path:
    """A heatmap for each method and compression: score by context and depth. Source: SparQ Attention, Figure A4."""
    from matplotlib.figure import Figure

    methods = list(dict.fromkeys(row["method"] for row in rows))
    ratios = sorted({row["asked_ratio"] for row in rows if row["method"] != "dense"})
    contexts, depths = (sorted({row[name] for row in rows}) for name in ("context", "depth_percent"))
    figure = Figure(figsize=(2.2 * len(methods) + 0.8, 2.2 * len(ratios) + 0.8), layout="constrained")
    grid = figure.subplots(len(ratios), len(methods), squeeze=False, sharex=True, sharey=True)
    for line, ratio in zip(grid, ratios, strict=True):
        for axes, method in zip(line, methods, strict=True):
            found = {
                (row["depth_percent"], row["context"]): row["mean"]
                for row in rows
                if row["method"] == method and (method == "dense" or row["asked_ratio"] == ratio)
            }
            if not found:
                axes.set_axis_off()
                continue
            cells = [[found.get((depth, context), math.nan) for context in contexts] for depth in depths]
            axes.imshow(cells, cmap="RdYlBu", vmin=0, vmax=1, aspect="auto")
            for (depth, context), mean in found.items():
                color = "white" if abs(mean - 0.5) > 0.3 else "black"
                where = contexts.index(context), depths.index(depth)
                axes.text(*where, f"{mean:.2g}", ha="center", va="center", color=color)
            axes.set_title("dense" if method == "dense" else f"{method}, 1/{ratio}")
            axes.set_xticks(range(len(contexts)), contexts)
            axes.set_yticks(range(len(depths)), depths)
    figure.supxlabel("context, tokens")
    figure.supylabel("depth of the needle, percent of the text before it")
    figure.suptitle(f"needle in a haystack: {rows[0]['unit']}")
    figure.savefig(path, dpi=150)
    return path
