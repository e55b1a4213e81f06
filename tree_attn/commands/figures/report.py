"""Tables of `tree-attn figures`: the points of each panel, and the errors of the predictions."""

import statistics
from collections.abc import Sequence

from rich.console import Console

from tree_attn.commands import terminal
from tree_attn.commands.figures.paper import Figure
from tree_attn.commands.units import length, number, size, time, times_as

KINDS = ("tree", "ring")
# By the name of the y axis: a ring beside the tree.
WORDS = {
    "us": "takes {} times as long as",
    "bytes": "holds {} times as much as",
    "bytes per GPU": "has {} times as much as",
}


# By the name of the y axis, and by the quantity that is compared: its name in titles, and how its values are written.
WRITTEN = {
    "us": ("time of a step", time),
    "bytes": ("memory of a GPU", size),
    "bytes per GPU": ("bytes of a GPU", size),
    "bytes held": ("memory of a GPU", size),
    "bytes sent": ("bytes that a GPU sends in a step", size),
}
PREDICTORS = {"program_memory_bytes": "what our programs keep (docs/peak_memory.md)"}


def print_figure(figure: Figure, remark: str) -> None:
    """Prints the points of each panel, measured ones marked, and the errors of the predictions.

    Args:
      remark: a sentence about links that predictions assume, or about the rows; empty for none.
    """
    console = terminal.output()
    for panel, (x, y) in figure.axes.items():
        title, write = WRITTEN.get(y, (y, number))
        points = [point for point in figure.points if point.panel == panel]
        names = sorted({point.x for point in points})
        rows = []
        for series in dict.fromkeys(point.series for point in points):
            cells = {point.x: write(point.y) for point in points if point.series == series and not point.is_measured}
            cells |= {point.x: f"{write(point.y)}*" for point in points if point.series == series and point.is_measured}
            rows.append((series, [cells.get(name, "") for name in names]))
        title = f"{panel}: {title}, by {x} (*: measured; others PREDICTED)"
        terminal.print_wide(console, title, "", [f"{name:,}" for name in names], rows)
    if remark:
        terminal.say(console, remark)
    _print_comparisons(figure.comparisons, console)


def conclusions(figure: Figure) -> list[str]:
    """Returns a sentence for each panel of times or bytes: the best ring beside the best tree, at its largest x.

    A panel over keys relative to others' times has none. Measured points go before predicted ones.
    """
    sentences, compared = [], set()
    for panel, (x, y) in figure.axes.items():
        for is_measured in (True, False):
            here = [point for point in figure.points if (point.panel, point.is_measured) == (panel, is_measured)]
            both = [{p.x: p for p in sorted(here, key=lambda p: -p.y) if p.series.startswith(name)} for name in KINDS]
            shared = both[0].keys() & both[1].keys()
            if not shared or y not in WORDS:
                continue
            tree, ring = (of_kind[max(shared)] for of_kind in both)
            if (tree.y, ring.y) in compared:  # the same rows, over another axis
                break
            compared.add((tree.y, ring.y))
            ratio = ring.y / tree.y if tree.y else float("inf")
            words = WORDS[y].format(times_as(ratio))
            place = max(shared)
            where = f"{panel}, " + (f"hidden size {place:,}" if x == "hidden size" else f"{length(place)} {x}")
            kind = "measured" if is_measured else "PREDICTED"
            sentences.append(f"{where}, {kind}: {ring.series} {words} {tree.series}.")
            break
    return sentences


def _print_comparisons(comparisons: Sequence[dict], console: Console) -> None:
    errors: dict[str, dict[str, list[float]]] = {}
    for quantity, by in dict.fromkeys((one["quantity"], one["by"]) for one in comparisons):
        (name, write), predictor = WRITTEN[quantity], PREDICTORS.get(by, by)
        title = f"{name}, predicted by {predictor}"
        headings = ("strategy", "kernel", "keys", "GPUs", "predicted", "measured", "error")
        table = terminal.table(*headings, title=title, left=headings[:2])
        for one in comparisons:
            if (one["quantity"], one["by"]) != (quantity, by):
                continue
            numbers = (write(one["predicted"]), write(one["measured"]), _percent(one["error"]))
            where = (one["strategy"], one["implementation"], f"{one['num_keys']:,}", str(one["n_devices"]))
            table.add_row(*where, *numbers)
            kind = KINDS[0] if one["strategy"].startswith(KINDS[0]) else KINDS[1]
            errors.setdefault(predictor, {}).setdefault(kind, []).append(abs(one["error"]))
        console.print(table)
    for predictor, by_kind in sorted(errors.items()):
        of_all = [error for of_kind in by_kind.values() for error in of_kind]
        words = f"{_median(of_all)} row{'s' * (len(of_all) != 1)}"
        if len(by_kind) > 1:
            words += f" ({', '.join(f'{kind} {_median(by_kind[kind])}' for kind in KINDS)})"
        terminal.say(console, f"median error by {predictor}: {words}")


def _median(errors: Sequence[float]) -> str:
    return f"{statistics.median(errors):.1%} of {len(errors)}"


def _percent(error: float) -> str:
    """Returns an error with its sign, but for one that is written as zero."""
    return f"{error:+.1%}" if round(abs(error), 3) else "0.0%"
