"""The text and the table of `tree-attn demo`."""

import sys

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tree_attn.commands.demo.answers import Outcome


def print_outcomes(prompt: str, tokenizer, outcomes: list[Outcome], *, is_emulated: bool) -> None:
    """Prints the answer, and a table of what a token costs under each attention."""
    console = Console()
    # Text, not markup: a model may well write square brackets.
    answer = Text(tokenizer.decode(outcomes[0].new_ids).strip())
    console.print(Panel(answer, title=Text(prompt), title_align="left"))
    table = Table(title="one new token, per device")
    for heading in ("attention", "devices", "time", "peak memory", "collectives\n(attention)", "sent\n(attention)"):
        table.add_column(heading, justify="left" if heading == "attention" else "right")
    for outcome in outcomes:
        table.add_row(
            outcome.attention,
            str(outcome.n_devices),
            "-" if outcome.per_token_s is None else f"{outcome.per_token_s * 1e3:.0f} ms",
            "-" if outcome.peak_memory_bytes is None else f"{outcome.peak_memory_bytes / 2**20:.1f} MiB",
            f"{outcome.collectives} ({outcome.collectives_attention})",
            f"{outcome.bytes_sent / 1024:.0f} KiB ({outcome.bytes_sent_attention / 1024:.0f})",
        )
    console.print(table)
    console.print(
        "Weights: heads, MLP and vocabulary are spread over the devices too, where they divide; that is what the "
        "collectives outside attention do.",
        style="dim",
    )
    if is_emulated:
        console.print(
            "Emulated devices share this machine's cores: their times say nothing about real ones.", style="dim"
        )


def compare(outcomes: list[Outcome]) -> int:
    """Prints that all have the same tokens, or where they differ; returns the exit status."""
    expected = outcomes[0].new_ids
    wrong = [outcome for outcome in outcomes if outcome.new_ids != expected]
    if not wrong:
        names = ", ".join(outcome.attention for outcome in outcomes)
        print(f"{names}: the same {len(expected)} tokens")
        return 0
    for outcome in wrong:
        step = _first_difference(expected, outcome.new_ids)
        print(f"{outcome.attention} differs from {outcomes[0].attention} from new token {step} on", file=sys.stderr)
    return 1


def _first_difference(expected: list[int], actual: list[int]) -> int:
    pairs = zip(expected, actual, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(actual)))
