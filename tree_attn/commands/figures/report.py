"""Tables of `tree-attn figures`: the points of each panel, and the errors of the predictions."""

import statistics
from collections.abc import Sequence

from rich.console import Console

from tree_attn.commands import terminal
from tree_attn.commands.figures.paper import Figure

KINDS = ("tree", "ring")
# By the name of the y axis: a ring beside the tree.
WORDS = {
    "us": "takes {} times as long as",
    "bytes": "holds {} times as much as",
    "bytes per GPU": "has {} times as much as",
}


def print_figure(figure: Figure, note: str) -> None:
    """Prints the points of each panel, measured ones marked, and the errors of the predictions."""
    console = terminal.output()
    for panel, (x, y) in figure.axes.items():
        points = [point for point in figure.points if point.panel == panel]
        names = sorted({point.x for point in points})
        rows = []
        for series in dict.fromkeys(point.series for point in points):
            cells = {point.x: f"{point.y:.4g}" for point in points if point.series == series and not point.is_measured}
            cells |= {point.x: f"{point.y:.4g}*" for point in points if point.series == series and point.is_measured}
            rows.append((series, [cells.get(name, "") for name in names]))
        title = f"{panel}: {y} over {x} (*: measured; all others PREDICTED)"
        terminal.print_wide(console, title, "", [f"{name:,}" for name in names], rows)
    terminal.say(console, note)
    _print_comparisons(figure.comparisons, console)


def conclusions(figure: Figure) -> list[str]:
    """Returns a sentence for each panel of times or bytes: the best ring beside the best tree, at its largest x.

    A panel over keys relative to others' times has none. Measured points go before predicted ones.
    """
    sentences = []
    for panel, (x, y) in figure.axes.items():
        for is_measured in (True, False):
            here = [point for point in figure.points if (point.panel, point.is_measured) == (panel, is_measured)]
            both = [{p.x: p for p in sorted(here, key=lambda p: -p.y) if p.series.startswith(name)} for name in KINDS]
            shared = both[0].keys() & both[1].keys()
            if not shared or y not in WORDS:
                continue
            tree, ring = (of_kind[max(shared)] for of_kind in both)
            ratio = ring.y / tree.y if tree.y else float("inf")
            words = WORDS[y].format(f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}")
            where = f"{panel}, {max(shared):,} {x}" if x != "hidden size" else f"{panel}, hidden size {max(shared):,}"
            kind = "measured" if is_measured else "PREDICTED"
            sentences.append(f"{where}, {kind}: {ring.series} {words} {tree.series}.")
            break
    return sentences


def _print_comparisons(comparisons: Sequence[dict], console: Console) -> None:
    errors: dict[str, list[float]] = {}
    for quantity, by in dict.fromkeys((one["quantity"], one["by"]) for one in comparisons):
        title = f"{quantity} of each GPU and step, predicted by {by.replace('_', ' ')}"
        headings = ("strategy", "kernel", "keys", "GPUs", "predicted", "measured", "error")
        table = terminal.table(*headings, title=title, left=headings[:2])
        for one in comparisons:
            if (one["quantity"], one["by"]) != (quantity, by):
                continue
            numbers = (f"{one['predicted']:,.0f}", f"{one['measured']:,.0f}", f"{one['error']:+.1%}")
            where = (one["strategy"], one["implementation"], f"{one['num_keys']:,}", str(one["n_devices"]))
            table.add_row(*where, *numbers)
            strategy = "tree" if one["strategy"].startswith("tree") else "ring"
            for name in dict.fromkeys((by, f"{by}, {strategy}")):
                errors.setdefault(name, []).append(abs(one["error"]))
        console.print(table)
    for name in sorted(errors):
        count = len(errors[name])
        terminal.say(console, f"median error by {name}: {statistics.median(errors[name]):.1%} of {count} rows")
