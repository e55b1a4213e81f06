"""Tables of `tree-attn eval`: scores by method and compression."""

import statistics
from collections.abc import Sequence

from tree_attn.commands import terminal
from tree_attn.commands.eval.plots import method_label
from tree_attn.commands.units import number


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
        num_scores = len(next(iter(next(iter(scores.values())).values())))
        words = f"mean and standard error of {num_scores}" if num_scores > 1 else "one sample"
        terminal.say(console, f"{task}: {of_task[0]['unit']}, {words}, context {context:,}")
        ratios = [ratio for ratio in ratios if ratio != 1]
        dense = scores.pop("dense", None)
        if dense is not None:
            terminal.say(console, f"dense attention, which reads all keys and values: {_cell(dense[1])}")
        if not scores:
            continue
        cells = lambda by_ratio, ratios=ratios: [_cell(by_ratio[one]) if one in by_ratio else "" for one in ratios]
        lines = [(label, cells(by_ratio)) for label, by_ratio in scores.items()]
        title = "sparse attention, by the part of those bytes that it reads"
        terminal.print_wide(console, title, "method", [f"1/{ratio}" for ratio in ratios], lines)


def conclusions(rows: Sequence[dict]) -> list[str]:
    """Returns a sentence for each task and context: the best method under the highest compression, beside dense."""
    sentences = []
    for task, context in dict.fromkeys((row["task"], row["context"]) for row in rows):
        here = [row for row in rows if (row["task"], row["context"]) == (task, context)]
        unit, sign = here[0]["unit"], -1 if here[0]["higher_is_better"] else 1
        ratio = max(row["asked_ratio"] for row in here)
        scores: dict[tuple[int, str], list[float]] = {}
        for row in here:  # over all depths, where there are several
            scores.setdefault((row["asked_ratio"], method_label(row)), []).extend(row["scores"])
        means = {key: statistics.fmean(values) for key, values in scores.items()}
        dense = next((mean for (_, label), mean in means.items() if label == "dense"), None)
        sparse = [(mean, label) for (of_ratio, label), mean in means.items() if of_ratio == ratio and label != "dense"]
        if dense is None or not sparse:
            continue
        best, *others = sorted(sparse, key=lambda one: sign * one[0])
        words = f"{task}, {context:,} tokens: at 1/{ratio} of the bytes of dense attention {best[1]} is the best: "
        words += f"{number(best[0])} {unit}, dense attention {number(dense)}"
        words += f", next {others[0][1]} with {number(others[0][0])}" if others else ""
        sentences.append(f"{words}.")
    return sentences


def _cell(scores: Sequence[float]) -> str:
    error = standard_error(scores)
    return number(statistics.fmean(scores)) + ("" if error is None else f" ± {number(error, 2)}")


def standard_error(scores: Sequence[float]) -> float | None:
    """Returns the standard error of the mean; None for one score."""
    return statistics.stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else None
