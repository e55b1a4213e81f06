"""The drawing of `tree-attn figures`: a panel for each question."""

import itertools
import pathlib
from collections.abc import Sequence

from tree_attn.commands import drawing, units
from tree_attn.commands.figures.paper import Figure, Point

WRITTEN = {"bytes": units.size, "bytes per GPU": units.size}  # by the name of the y axis; others are numbers
CLOSE = 1.2  # ratio of two lengths of which one has a tick
MAX_LENGTHS = 5  # whose ticks do not touch; of more every second one has a tick


def draw(figure: Figure, path: pathlib.Path, caption: Sequence[str]) -> None:
    """Draws the panels: measured points full and solid, predicted ones hollow and dashed, limits dotted."""
    whole, panels = drawing.new_panels(len(figure.axes), caption)
    for axes, panel in zip(panels, figure.axes, strict=True):
        _draw_panel(axes, figure, panel)
    whole.savefig(path, dpi=150)


def _draw_panel(axes, figure: Figure, panel: str) -> None:
    x_name, y_name = figure.axes[panel]
    points = [point for point in figure.points if point.panel == panel and point.y > 0]  # both axes are logarithmic
    axes.set_title(panel, fontsize="medium", loc="left")
    axes.set(xlabel=x_name, ylabel=y_name)
    drawing.logarithmic(axes)
    ends = _curves(axes, points)
    name, limit = figure.limits.get(panel, ("", []))
    if limit:
        axes.plot(*zip(*limit), color="black", linestyle=":", zorder=3)
        ends.append((*limit[-1], name, "black"))
    every = sorted({point.x for point in points})
    xs = [x for before, x in zip([0, *every], every) if x > CLOSE * before]
    if x_name == "keys" and len(xs) > MAX_LENGTHS:
        xs = xs[::-2][::-1]
    axes.set_xticks(xs, [units.length(x) if x_name == "keys" else f"{x:,}" for x in xs])
    if not ends:
        return
    ys = drawing.ticks(*axes.dataLim.intervaly)
    axes.set_yticks(ys, [WRITTEN.get(y_name, _number)(y) for y in ys])
    axes.set_ylim(ys[0] / 1.1, ys[-1] * 1.1)
    drawing.label_ends(axes, ends)


def _number(y: float) -> str:
    return f"{y:,.0f}" if y >= 1 else f"{y:g}"


def _curves(axes, points: Sequence[Point]) -> list[tuple]:
    """Draws the series, and returns what `drawing.label_ends` takes."""
    import matplotlib

    names = list(dict.fromkeys(point.series for point in points))
    colours = matplotlib.colormaps["tab10" if len(names) <= 10 else "tab20"].colors
    ends = []
    for name, colour in zip(names, itertools.cycle(colours)):
        last = {}
        for is_measured in (False, True):
            curve = sorted(
                (point.x, point.y) for point in points if (point.series, point.is_measured) == (name, is_measured)
            )
            if curve:
                style = {"linestyle": "-"} if is_measured else {"linestyle": "--", "fillstyle": "none"}
                label = f"{name}, {'measured' if is_measured else 'predicted'}"
                axes.plot(*zip(*curve), marker="o", color=colour, label=label, **style)
                last[curve[-1][0]] = curve[-1]
        ends.append((*last[max(last)], name, colour))
    return ends
