"""matplotlib, which only plots need: whether it is installed, and figures without a display."""

import importlib
import importlib.util
import logging

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
