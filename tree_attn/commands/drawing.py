"""matplotlib, which only plots need: whether it is installed, and figures without a display."""

import importlib
import importlib.util
import logging
from collections.abc import Sequence

from tree_attn.commands import phases
from tree_attn.extras import how_to_install


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


def label_ends(axes, ends: Sequence[tuple]) -> None:
    """Writes the names of curves beside the axes, each with a stroke to the end of its curve, none over another.

    Args:
      axes: with their limits set, in a figure of `new_figure`.
      ends: of each curve x and y of its last point, its name and its colour.
    """
    points = 10  # of the text
    axes.figure.draw_without_rendering()  # settles how high the axes are
    gap = 1.3 * points / 72 * axes.figure.dpi / axes.get_window_extent().height
    in_axes = axes.transData + axes.transAxes.inverted()
    placed = sorted((in_axes.transform((x, y))[1], x, y, name, colour) for x, y, name, colour in ends)
    for height, (_, x, y, name, colour) in zip(spread([end[0] for end in placed], gap), placed):
        stroke = {"arrowstyle": "-", "color": colour, "lw": 0.8, "relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 4}
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
