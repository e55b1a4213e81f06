"""The drawing of an experiment: our numbers over its axis, and the paper's as crosses."""

import pathlib
import textwrap
from collections.abc import Sequence

from tree_attn.commands import drawing
from tree_attn.commands.reproduce.experiment import Experiment, Number, Point, Row, thousands


def draw(experiment: Experiment, rows: Sequence[Row], path: pathlib.Path) -> pathlib.Path:
    """Draws each series of the points that have a place, labelled at its end; returns the file."""
    figure = drawing.new_figure(8, 5)
    axes = figure.subplots()
    drawn = [point for point in experiment.points if point.x is not None]
    ends: list[tuple] = []
    limits: dict[tuple, tuple[str, str]] = {}  # their points -> of which series, in which colour; equal ones once
    for number, series in enumerate(dict.fromkeys(point.series for point in drawn)):
        points = sorted((point for point in drawn if point.series == series), key=lambda point: point.x)
        size = max(8 - 3 * number, 4)  # a point that lies on another hides less than all of it
        ends += _draw_series(axes, experiment, rows, series, points, f"C{number}", size)
        at_limit = [(point.x, experiment.limit_of(point, rows)) for point in points]
        limits.setdefault(tuple(place for place in at_limit if place[1] is not None), (series, f"C{number}"))
    limits.pop((), None)
    for places, (series, colour) in limits.items():
        axes.plot(*zip(*places), linestyle="--", marker="_" if len(places) == 1 else "", linewidth=1, color=colour)
        ends.append((*places[-1], f"limit: {series}", colour))
    at = sorted({point.x for point in drawn})
    axes.set(xscale="log", xlabel=experiment.x_axis, ylabel=experiment.quantity)
    axes.set_ylim(bottom=0)
    if "speed-up" in experiment.quantity:
        axes.axhline(1, color="gray", linewidth=1)
        ends.append((max(point.x for point in drawn), 1, "as fast", "gray"))
    drawing.plain(axes)
    axes.set_xticks(at, [thousands(int(tick)) for tick in at])
    axes.set_xlim(at[0] / 1.1, at[-1] * 1.1)
    drawing.label_ends(axes, ends)
    hardware = sorted({row["hardware"] for row in rows if row.get("hardware")})
    commits = sorted({str(row.get("git_commit"))[:7] for row in rows})
    title = f"{experiment.paper}, {experiment.place}: {experiment.what}"
    figure.suptitle(textwrap.fill(title, 90), fontsize=10, x=0.01, ha="left")
    caption = f"Lines are ours: {', '.join(hardware)}, commit {', '.join(commits)}."
    if limits:
        caption += " Dashed: a step that takes what its bytes and products take by the datasheet."
    if any(isinstance(point.paper, Number) for point in drawn):
        caption += f" Crosses are the paper's: {experiment.paper_hardware}."
    figure.supxlabel(textwrap.fill(caption, 95), fontsize=10, x=0.01, ha="left")
    figure.savefig(path, bbox_inches="tight", dpi=110)
    return path


def _draw_series(
    axes, experiment: Experiment, rows, series: str, points: Sequence[Point], colour: str, size: float
) -> list[tuple]:
    """Draws our numbers of a series, as points of a size, and the paper's; returns what `drawing.label_ends` takes."""
    found = [(point.x, experiment.ours(point, rows)) for point in points]
    ours = [(x, value.value) for x, value in found if value is not None]
    theirs = [(point.x, point.paper.value, point.bound) for point in points if isinstance(point.paper, Number)]
    ends = []
    if ours:
        axes.plot(*zip(*ours), marker="o", markersize=size, color=colour)
        ends.append((*ours[-1], series, colour))
    if theirs:
        axes.plot(*zip(*[place[:2] for place in theirs]), "x", color=colour)
        for x, y, bound in theirs:
            axes.annotate(f" {bound}{y:g}" if bound else "", (x, y), color=colour, va="center")
        ends.append((*theirs[-1][:2], f"paper: {points[0].paper_series or series}", colour))
    return ends
