"""The text, the table and the picture of `tree-attn demo`."""

import pathlib
import sys
from collections.abc import Sequence

from rich.panel import Panel
from rich.text import Text

from tree_attn.commands import drawing, phases, terminal
from tree_attn.commands.demo import measured, picture
from tree_attn.commands.demo.answers import Outcome
from tree_attn.commands.units import count, size, time

NEXT = "tree-attn compare --devices 8 --keys 8192 --out tree-attn-compare"


def print_outcomes(prompt: str, tokenizer, outcomes: Sequence[Outcome], *, is_emulated: bool) -> None:
    """Prints the answer, and a table of what a token costs under each attention."""
    console = terminal.output()
    # Text, not markup: a model may well write square brackets.
    answer = Text(tokenizer.decode(outcomes[0].new_ids).strip())
    console.print(Panel(answer, title=Text(prompt), title_align="left"))
    headings = ("attention", "devices", "time", "memory", "collectives", "sent", "sent by attention")
    table = terminal.table(*headings, title="One new token, per device", left=("attention",))
    for outcome in outcomes:
        table.add_row(
            outcome.attention,
            str(outcome.n_devices),
            time(None if outcome.per_token_s is None else outcome.per_token_s * 1e6),
            size(outcome.peak_memory_bytes),
            str(outcome.collectives),
            size(outcome.bytes_sent),
            size(outcome.bytes_sent_attention),
        )
    console.print(table)
    remark = (
        '"sent by attention" is the part of "sent" that attention needs; the rest is what the layers exchange whose '
        "weights are split over the devices."
    )
    if is_emulated:
        remark += " Emulated devices share this machine's cores: their times say nothing about GPUs."
    terminal.say(console, remark)


def compare(outcomes: Sequence[Outcome]) -> int:
    """Prints that all have the same tokens, or where they differ; returns the exit status."""
    expected = outcomes[0].new_ids
    wrong = [outcome for outcome in outcomes if outcome.new_ids != expected]
    if not wrong:
        names = ", ".join(outcome.attention for outcome in outcomes)
        terminal.say(terminal.output(), f"{names}: the same {count(len(expected), 'token')}.")
        return 0
    for outcome in wrong:
        step = _first_difference(expected, outcome.new_ids)
        print(f"{outcome.attention} differs from {outcomes[0].attention} from new token {step} on", file=sys.stderr)
    return 1


def conclude(outcomes: Sequence[Outcome], path: pathlib.Path) -> None:
    """Prints what the step takes on GPUs, draws the picture, and names the next command."""
    console, largest = terminal.output(), measured.ROWS[-1]
    ratio = largest.ring_us / largest.tree_us
    terminal.say(
        console,
        f"On GPUs: one step of attention over {largest.num_keys:,} keys took {time(largest.tree_us)} by tree "
        f"(with gather {time(measured.GATHER_US)}, in another run) and "
        f"{time(largest.ring_us)} by the best ring on {measured.MACHINE} ({measured.STEP}; measured at commit "
        f"{measured.COMMIT}, {measured.FOLDER}). Tree was {ratio:.0f} times as fast.",
    )
    terminal.say(console, _drawn(outcomes, path))
    terminal.say(console, f"Next: {NEXT}")  # a line of its own, to be copied whole


def _drawn(outcomes: Sequence[Outcome], path: pathlib.Path) -> str:
    if not drawing.has_matplotlib():
        return f"No picture: {drawing.advice()}."
    try:
        with phases.phase("drawing"):
            picture.draw(outcomes, path)
    except OSError as error:  # the answer stands without its picture
        return f"No picture: {error.strerror or error}: {path}."
    return f"Picture: {path}."


def _first_difference(expected: list[int], actual: list[int]) -> int:
    pairs = zip(expected, actual, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(actual)))
