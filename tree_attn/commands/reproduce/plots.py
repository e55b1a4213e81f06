"""The drawing of an experiment: our numbers over its axis, and the paper's as crosses."""

import pathlib
from collections.abc import Sequence

from tree_attn.commands import drawing
from tree_attn.commands.reproduce.experiment import Experiment, Number, Row, thousands


def draw(experiment: Experiment, rows: Sequence[Row], path: pathlib.Path) -> pathlib.Path:
    """Draws each series of the points that have a place, labelled at its end; returns the file."""
    figure = drawing.new_figure(8, 5)
    axes = figure.subplots()
    drawn = [point for point in experiment.points if point.x is not None]
    for series in dict.fromkeys(point.series for point in drawn):
        points = sorted((point for point in drawn if point.series == series), key=lambda point: point.x)
        found = [(point.x, experiment.ours(point, rows)) for point in points]
        ours = [(x, value.value) for x, value in found if value is not None]
        if ours:
            (line,) = axes.plot(*zip(*ours), marker="o")
            axes.annotate(f" {series}", ours[-1], color=line.get_color(), va="center")
        theirs = [(point.x, point.paper.value) for point in points if isinstance(point.paper, Number)]
        if theirs:
            axes.plot(*zip(*theirs), "x", color="black")
            axes.annotate(" paper", theirs[-1], va="center")
    ticks = sorted({point.x for point in drawn})
    axes.set(xscale="log", xlabel=experiment.x_axis, ylabel=experiment.quantity)
    axes.set_xticks(ticks, [thousands(int(tick)) for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.margins(x=0.25)
    axes.set_ylim(bottom=0)
    if "speed-up" in experiment.quantity:
        axes.axhline(1, color="gray", linewidth=1)
    hardware = sorted({row["hardware"] for row in rows if row.get("hardware")})
    commits = sorted({str(row.get("git_commit"))[:7] for row in rows})
    figure.suptitle(f"{experiment.paper}, {experiment.place}: {experiment.what}", fontsize=10)
    caption = f"ours: {', '.join(hardware)}, commit {', '.join(commits)}; paper: {experiment.paper_hardware}"
    figure.supxlabel(caption, fontsize=8)
    figure.savefig(path, bbox_inches="tight", dpi=110)
    return path
