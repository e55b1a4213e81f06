"""Tables of `tree-attn figures`: the points of each panel, and the errors of the predictions."""

import statistics
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tree_attn.commands import terminal
from tree_attn.commands.figures.paper import Figure


def print_figure(figure: Figure, note: str) -> None:
    """Prints the points of each panel, measured ones marked, and the errors of the predictions."""
    console = terminal.output()
    for panel, (x, y) in figure.axes.items():
        points = [point for point in figure.points if point.panel == panel]
        names = sorted({point.x for point in points})
        table = Table(title=f"{panel}: {y} over {x} (*: measured; all others PREDICTED)")
        table.add_column("")
        for name in names:
            table.add_column(f"{name:,}", justify="right")
        for series in dict.fromkeys(point.series for point in points):
            cells = {point.x: f"{point.y:.4g}" for point in points if point.series == series and not point.is_measured}
            cells |= {point.x: f"{point.y:.4g}*" for point in points if point.series == series and point.is_measured}
            table.add_row(series, *(cells.get(name, "") for name in names))
        console.print(table)
    console.print(note)
    _print_comparisons(figure.comparisons, console)


def _print_comparisons(comparisons: Sequence[dict], console: Console) -> None:
    table = Table(title="predicted against measured, per GPU and step")
    words = ("", "strategy", "kernel", "by")
    for column in (*words[:3], "keys", "GPUs", "by", "predicted", "measured", "error"):
        table.add_column(column, justify="left" if column in words else "right")
    errors: dict[str, list[float]] = {}
    for one in comparisons:
        numbers = (f"{one['predicted']:,.0f}", f"{one['measured']:,.0f}", f"{one['error']:+.1%}")
        where = (one["strategy"], one["implementation"], f"{one['num_keys']:,}", str(one["n_devices"]))
        table.add_row(one["quantity"], *where, one["by"], *numbers)
        strategy = "tree" if one["strategy"].startswith("tree") else "ring"
        for name in dict.fromkeys((one["by"], f"{one['by']}, {strategy}")):
            errors.setdefault(name, []).append(abs(one["error"]))
    console.print(table)
    for name in sorted(errors):
        console.print(f"median error by {name}: {statistics.median(errors[name]):.1%} of {len(errors[name])} rows")
