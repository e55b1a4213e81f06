"""The drawing of `tree-attn figures`: one panel beside the other."""

import pathlib

from tree_attn.commands.drawing import new_figure
from tree_attn.commands.figures.paper import Figure


def draw(figure: Figure, path: pathlib.Path, note: str) -> None:
    """Draws the panels side by side: measured points full and solid, predicted ones hollow and dashed."""
    import matplotlib

    drawing = new_figure(5.5 * len(figure.axes), 6)
    drawing.suptitle(note, fontsize="medium")
    for plot, (panel, (x, y)) in zip(drawing.subplots(1, len(figure.axes), squeeze=False)[0], figure.axes.items()):
        # The axes are logarithmic.
        in_panel = [point for point in figure.points if point.panel == panel and point.y > 0]
        names = list(dict.fromkeys(point.series for point in in_panel))
        colors = "tab10" if len(names) <= 10 else "tab20"
        for i, series in enumerate(names):
            color = matplotlib.colormaps[colors](i)
            for is_measured in (True, False):
                points = [(p.x, p.y) for p in in_panel if p.series == series and p.is_measured == is_measured]
                if points:
                    style = dict(linestyle="-") if is_measured else dict(linestyle="--", fillstyle="none")
                    name = f"{series}, {'measured' if is_measured else 'predicted'}"
                    plot.plot(*zip(*sorted(points)), marker="o", color=color, label=name, **style)
        plot.set(title=panel, xlabel=x, ylabel=y, xscale="log", yscale="log")
        ticks = sorted({point.x for point in in_panel if not point.is_measured})
        plot.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=45)
        plot.minorticks_off()
        plot.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=2)
        plot.grid(alpha=0.3)
    drawing.savefig(path, dpi=150, bbox_inches="tight")  # with the legends
