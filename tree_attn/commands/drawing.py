"""matplotlib, which only plots need: whether it is installed, and figures without a display."""

import importlib.util
import logging

from tree_attn.extras import how_to_install


def has_matplotlib() -> bool:
    """Returns whether matplotlib is installed; it is not imported."""
    return importlib.util.find_spec("matplotlib") is not None


def advice() -> str:
    """Returns how to get matplotlib: "plots need matplotlib: python3 -m pip install ..."."""
    return f"plots need matplotlib: {how_to_install('plot')}"


def new_figure(width: float, height: float):
    """Returns an empty `matplotlib.figure.Figure` of this size in inches, whose parts do not overlap."""
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # names dozens of fonts that nothing here uses

    return Figure(figsize=(width, height), layout="constrained")
