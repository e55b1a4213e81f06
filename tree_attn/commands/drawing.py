"""matplotlib, which only plots need: whether it is installed, and figures without a display."""

import importlib.util

from tree_attn.extras import how_to_install


def require_matplotlib() -> None:
    """Raises ImportError, with the command that installs it, if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(f"plots need matplotlib: {how_to_install('plot')} (or pass --no-plots)")


def new_figure(width: float, height: float):
    """Returns an empty `matplotlib.figure.Figure` of this size in inches, whose parts do not overlap."""
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    return Figure(figsize=(width, height), layout="constrained")
