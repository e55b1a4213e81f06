"""matplotlib, which only plots need: whether it is installed, and figures without a display."""

import importlib
import importlib.util
import itertools
import logging
import math
import textwrap
from collections.abc import Sequence

from tree_attn.commands import phases
from tree_attn.extras import how_to_install

EARLY = 0.9  # of the width of axes: where a curve ends before the others


def has_matplotlib() -> bool:
    """Returns whether matplotlib is installed, and can be imported: a broken one must cost no results."""
    return _why_not() is None


def advice() -> str:
    """Returns how to get matplotlib: "plots need matplotlib: python3 -m pip install ..."."""
    return f"plots need matplotlib{_why_not() or ''}: {how_to_install('plot')}"


def _why_not() -> str | None:
    if importlib.util.find_spec("matplotlib") is None:
        return ""
    try:
        with phases.phase("loading matplotlib"):  # seconds, where its files are not in memory
            importlib.import_module("matplotlib.figure")
    except Exception as error:  # a broken package, or one that it needs, may fail in any way
        return f", which is here and cannot be imported ({type(error).__name__}: {error})"
    return None


def new_figure(width: float, height: float):
    """Returns an empty `matplotlib.figure.Figure` of this size in inches, whose parts do not overlap."""
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # names dozens of fonts that nothing here uses

    return Figure(figsize=(width, height), layout="constrained")


def new_panels(count: int, caption: Sequence[str]):
    """Returns a figure under a caption, and the axes of its panels, two side by side, with room for `label_ends`."""
    columns = min(count, 2)
    num_lines = -(-count // columns)
    figure = new_figure(6.6 * columns, 4.4 * num_lines + 0.2 * len(caption))
    text = "\n".join(textwrap.fill(line, 55 * columns) for line in caption)
    figure.suptitle(text, fontsize="medium", x=0.01, ha="left")
    panels = list(figure.subplots(num_lines, columns, squeeze=False).flat)
    for axes in panels[count:]:
        axes.set_axis_off()
    return figure, panels[:count]


def logarithmic(axes) -> None:
    """Makes both axes logarithmic, and plain."""
    axes.set(xscale="log", yscale="log")
    plain(axes)


def plain(axes) -> None:
    """Leaves the axes a faint grid, no frame at the top and right, and no ticks but those of numbers."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def ticks(low: float, high: float) -> list[float]:
    """Returns 1, 2 or 5 times powers of ten that enclose two values; only powers where these are many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    every = [factor * 10.0**power for power, factor in itertools.product(range(first, last + 1), factors)]
    start = max(i for i, tick in enumerate(every) if tick <= low)
    end = min(i for i, tick in enumerate(every) if tick >= high)
    return every[start : max(end, start + 1) + 1]


def label_ends(axes, ends: Sequence[tuple]) -> None:
    """Writes the names of curves beside the axes, each with a stroke to the end of its curve, none over another.

    The stroke to a curve that ends early is dotted, so that it does not look like the curve going on.

    Args:
      axes: with their limits set, in a figure of `new_figure`.
      ends: of each curve x and y of its last point, its name and its colour.
    """
    points = 10  # of the text
    axes.figure.draw_without_rendering()  # settles how high the axes are
    gap = 1.3 * points / 72 * axes.figure.dpi / axes.get_window_extent().height
    in_axes = axes.transData + axes.transAxes.inverted()
    placed = sorted((*in_axes.transform((x, y))[::-1], x, y, name, colour) for x, y, name, colour in ends)
    for height, (_, across, x, y, name, colour) in zip(spread([end[0] for end in placed], gap), placed):
        stroke = {"arrowstyle": "-", "color": colour, "lw": 0.8, "relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 4}
        stroke["linestyle"] = "-" if across > EARLY else (0, (1, 4))
        place = {"xytext": (1.08, height), "textcoords": "axes fraction", "va": "center", "annotation_clip": False}
        axes.annotate(name, (x, y), color=colour, fontsize=points, arrowprops=stroke, **place)


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Returns heights in rising order, each moved as little as `gap` between them and a place in 0 to 1 ask for.

    Example:
      >>> spread([0.0, 0.5, 0.5], 0.25)
      [0.0, 0.375, 0.625]
    """
    up, down = list(heights), list(heights)
    for i in range(1, len(heights)):
        up[i] = max(up[i], up[i - 1] + gap)
        down[-1 - i] = min(down[-1 - i], down[-i] - gap)
    last = len(heights) - 1
    return [min(max((a + b) / 2, i * gap), 1 - (last - i) * gap) for i, (a, b) in enumerate(zip(up, down))]
