"""Tables of `tree-attn eval`: scores by method and compression."""

import statistics
from collections.abc import Sequence

from rich.table import Table

from tree_attn.commands import terminal
from tree_attn.commands.eval.plots import method_label


def print_scores(rows: Sequence[dict]) -> None:
    """Prints a table per task and context: a line per method, a column per requested compression.

    Scores are means over all depths, where there are several. Source: SparQ Attention, Tables 2 and 3.
    """
    console = terminal.output()
    for task, context in dict.fromkeys((row["task"], row["context"]) for row in rows):
        of_task = [row for row in rows if (row["task"], row["context"]) == (task, context)]
        ratios = sorted({row["asked_ratio"] for row in of_task})
        scores: dict[str, dict[int, list[float]]] = {}
        for row in of_task:
            scores.setdefault(method_label(row), {}).setdefault(row["asked_ratio"], []).extend(row["scores"])
        count = len(next(iter(next(iter(scores.values())).values())))
        terminal.say(console, f"{task}: {of_task[0]['unit']}, mean and standard error of {count}, context {context:,}")
        table = Table()
        table.add_column("method")
        for ratio in ratios:
            table.add_column("dense" if ratio == 1 else f"1/{ratio}", justify="right")
        for label, by_ratio in scores.items():
            table.add_row(label, *(_cell(by_ratio[ratio]) if ratio in by_ratio else "" for ratio in ratios))
        console.print(table)


def _cell(scores: Sequence[float]) -> str:
    error = standard_error(scores)
    return f"{statistics.fmean(scores):.3g}" + ("" if error is None else f" ± {error:.2g}")


def standard_error(scores: Sequence[float]) -> float | None:
    """Returns the standard error of the mean; None for one score."""
    return statistics.stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else None
