"""Plots of `tree-attn eval`: scores over bytes moved, and a heatmap of needles by context and depth."""

import math
import pathlib
from collections.abc import Sequence

from tree_attn.commands import drawing, units


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
    places = list(dict.fromkeys((row["task"], row["context"]) for row in rows))
    figure, panels = drawing.new_panels(
        len(places), [*_caption(rows), "bars: standard errors; dotted: dense attention"]
    )
    for axes, (task, context) in zip(panels, places, strict=True):
        of_task = [row for row in rows if (row["task"], row["context"]) == (task, context)]
        drawing.plain(axes)
        axes.set_title(f"{task}, context {units.length(context)}", fontsize="medium", loc="left")
        axes.set(xlabel="MB of K and V moved per token", ylabel=of_task[0]["unit"], xscale="log")
        ends = _score_curves(axes, of_task)
        axes.minorticks_off()  # a scale brings its own
        every = sorted({_megabytes(row) for row in of_task})
        ticks = [x for before, x in zip([0, *every], every) if x > 1.2 * before]
        axes.set_xticks(ticks, [units.number(x) for x in ticks])
        drawing.label_ends(axes, ends)
    figure.savefig(path, dpi=150)
    return path


def _score_curves(axes, rows: Sequence[dict]) -> list[tuple]:
    """Draws the methods, and returns what `drawing.label_ends` takes."""
    series: dict[str, list[dict]] = {}
    for row in rows:
        if row["method"] != "dense":
            series.setdefault(method_label(row), []).append(row)
    ends = []
    for i, (name, points) in enumerate(series.items()):
        points = sorted(points, key=_megabytes)
        errors = [row["standard_error"] or 0.0 for row in points]
        where = [_megabytes(row) for row in points], [row["mean"] for row in points]
        axes.errorbar(*where, yerr=errors, marker="o", capsize=3, color=f"C{i}")
        ends.append((where[0][-1], where[1][-1], name, f"C{i}"))
    for dense in (row for row in rows if row["method"] == "dense"):
        axes.axhline(dense["mean"], color="black", linestyle=":")
        ends.append((_megabytes(dense), dense["mean"], "dense", "black"))
        axes.plot(_megabytes(dense), dense["mean"], marker="_", color="black")  # so that its bytes are in sight
    return ends


def _megabytes(row: dict) -> float:
    return row["transfer_bytes_per_token"] / 1e6


def _caption(rows: Sequence[dict]) -> list[str]:
    """Returns lines of what the rows have in common: model and samples; hardware and commit."""
    commits = ", ".join(dict.fromkeys((row["git_commit"] or "unknown")[:7] for row in rows))
    samples = ", ".join(dict.fromkeys(str(row["samples"]) for row in rows))
    model = pathlib.Path(rows[0]["model"]).name.removesuffix(".gguf")
    return [
        f"{model}, {rows[0]['dtype']}, {samples} samples a point",
        f"{rows[0]['hardware']}; commit {commits}",
    ]


def _draw_needle(rows: Sequence[dict], path: pathlib.Path) -> pathlib.Path:
    """Draws a heatmap for each method and compression: score by context and depth.

    Source: SparQ Attention, Figure A4.
    """
    methods = list(dict.fromkeys(row["method"] for row in rows))
    ratios = sorted({row["asked_ratio"] for row in rows if row["method"] != "dense"})
    contexts, depths = (sorted({row[name] for row in rows}) for name in ("context", "depth_percent"))
    figure = drawing.new_figure(2.2 * len(methods) + 0.8, 2.2 * len(ratios) + 0.8)
    grid = figure.subplots(len(ratios), len(methods), squeeze=False, sharex=True, sharey=True)
    for line, ratio in zip(grid, ratios, strict=True):
        for axes, method in zip(line, methods, strict=True):
            found = {
                (row["depth_percent"], row["context"]): row["mean"]
                for row in rows
                if (row["method"], row["asked_ratio"]) == (method, ratio) or row["method"] == method == "dense"
            }
            if method == "dense" and ratio != ratios[0]:  # once
                found = {}
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
            axes.set_xticks(range(len(contexts)), map(units.length, contexts))
            is_first = not any(drawn.axison for drawn in line[: list(line).index(axes)])
            axes.tick_params(labelbottom=method == "dense" or ratio == ratios[-1], labelleft=is_first)
            axes.set_yticks(range(len(depths)), depths)
    figure.supxlabel("context, tokens")
    figure.supylabel("depth of the needle, percent of the text before it")
    figure.suptitle("\n".join([rows[0]["unit"], *_caption(rows)]), fontsize="medium")
    figure.savefig(path, dpi=150)
    return path
