"""Plots of `tree-attn eval`: scores over bytes moved, and a heatmap of needles by context and depth."""

import math
import pathlib
from collections.abc import Sequence

from tree_attn.commands.drawing import new_figure


def draw(rows: Sequence[dict], folder: pathlib.Path) -> dict[str, str]:
    """Draws evaluation.png, and needle.png from the rows with a depth; returns their paths by name."""
    files = {}
    by_depth = [row for row in rows if "depth_percent" in row]
    others = [row for row in rows if "depth_percent" not in row]
    if others:
        files["plot"] = str(_draw_scores(others, folder / "evaluation.png"))
    if by_depth:
        files["needle"] = str(_draw_needle(by_depth, folder / "needle.png"))
    return files


def method_label(row: dict) -> str:
    """Returns the name of a method in tables and plots: "h2o", "sparq, k 64", "sparq, k 64, temperature head_dim"."""
    words = [row["method"]]
    words += [f"k {row['num_keys']}"] if row["num_components"] is not None else []
    words += [f"{word} {row[name]}" for name, word in (("local_window", "window"), ("score_temperature", "temperature"))
              if name in row]  # fmt: skip
    return ", ".join(words)


def _draw_scores(rows: Sequence[dict], path: pathlib.Path) -> pathlib.Path:
    """Draws a panel for each task and context: score over bytes moved per token, with standard errors.

    Dense attention is the dotted line. Source: SparQ Attention, Figures 1 and A1.
    """
    panels = list(dict.fromkeys((row["task"], row["context"]) for row in rows))
    names_context = len({context for _, context in panels}) > 1
    figure = new_figure(4.6 * len(panels), 4)
    for axes, (task, context) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        of_task = [row for row in rows if (row["task"], row["context"]) == (task, context)]
        for dense in (row for row in of_task if row["method"] == "dense"):
            axes.axhline(dense["mean"], color="black", linestyle=":", label="dense")
        series: dict[str, list[dict]] = {}
        for row in of_task:
            if row["method"] != "dense":
                series.setdefault(method_label(row), []).append(row)
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
    """Draws a heatmap for each method and compression: score by context and depth.

    Source: SparQ Attention, Figure A4.
    """
    methods = list(dict.fromkeys(row["method"] for row in rows))
    ratios = sorted({row["asked_ratio"] for row in rows if row["method"] != "dense"})
    contexts, depths = (sorted({row[name] for row in rows}) for name in ("context", "depth_percent"))
    figure = new_figure(2.2 * len(methods) + 0.8, 2.2 * len(ratios) + 0.8)
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
