"""Runs every command at 80 columns, in a pipe and with --json, and interrupts it at random times.

python3 -m tests.terminal --interrupts 20 --seed 0
"""

import argparse
import collections
import dataclasses
import json
import pathlib
import random
import sys
import tempfile
import time
from collections.abc import Callable, Collection

from . import screens
from .test_interrupts import check_end

PROMPT = ["--prompt", "Name three rivers.", "--max-new-tokens", "64"]
TEXT = "a river and a hill and a river. " * 400
KINDS = ("json", "terminal", "pipe")  # the document has the text that the model writes in the others too
WITHOUT_JSON = ("demo",)
LONGEST_SILENCE_S = 3.5  # lines come every 2.5 s; the rest is for a machine that does other things too


def commands(folder: pathlib.Path) -> dict[str, list[str]]:
    """Returns a call of each command that lasts for some seconds; what it saves goes into a folder that is new."""
    folder.mkdir()
    (folder / "text.txt").write_text(TEXT)
    rows = pathlib.Path(__file__).parent.parent.parent / "docs" / "results" / "compare_4xh200_4processes"
    return {
        "compare": ["--devices", "4", "--keys", "16384", "--no-plots", "--out", str(folder / "compare")],
        "bench": ["llama", "--config", "smollm2-135m", "--devices", "2", "--context", "512", "--new-tokens", "8"],
        "doctor": ["--devices", "4"],
        "plan": ["--keys", "81920"],
        "figures": ["3", "--rows", str(rows), "--out", str(folder / "figures")],
        "reproduce": ["hydragen-figure-4", "--out", str(folder / "reproduce")],
        "demo": ["--picture", str(folder / "demo.png")],
        "generate": [*PROMPT, "--out", str(folder / "generate")],
        "sample": [*PROMPT, "--num-samples", "2"],
        "eval": ["--text", str(folder / "text.txt"), "--tasks", "repetition", "--ratios", "8", "--context", "256",
                 "--samples", "2", "--no-plots", "--out", str(folder / "eval")],
    }  # fmt: skip


@dataclasses.dataclass
class Longest:
    """The slowest end after an interrupt, and the longest time without a word, of all runs of a command."""

    ended_s: float = 0.0
    silence_s: float = 0.0
    num_interrupts: int = 0

    def add(self, run: screens.Run) -> None:
        """Counts a run."""
        self.silence_s = max(self.silence_s, run.longest_silence_s)
        if run.ended_s is not None:
            self.ended_s, self.num_interrupts = max(self.ended_s, run.ended_s), self.num_interrupts + 1

    def __str__(self) -> str:
        silence = f"longest silence {self.silence_s:.2f} s"
        if not self.num_interrupts:
            return silence
        return f"slowest of {self.num_interrupts} interrupts ended in {self.ended_s:.2f} s, {silence}"


def written_by_the_model(document: dict) -> set[str]:
    """Returns the lines of all texts in a document, which a terminal wraps where they are long."""
    parts = [document, *document.get("samples", ()), *document.get("generations", ())]
    return {line.strip() for part in parts for line in part.get("text", "").splitlines()}


def check_screen(run: screens.Run, kind: str, text: Collection[str] = ()) -> str:
    """Asserts what holds for every command that ends by itself; returns its last line.

    Args:
      kind: one of `KINDS`.
      text: lines that the model wrote; a terminal wraps those that are long. All others must fit it.
    """
    assert run.status == 0, run
    assert run.longest_silence_s < LONGEST_SILENCE_S, f"{run.longest_silence_s:.1f} s without a word: {run}"
    if kind == "json":
        assert isinstance(json.loads(run.out), dict)
        return "one document"
    lines = [line.rstrip() for line in run.lines if line.strip()]
    laid_out = [line for line in lines if line.strip() not in text]
    assert "\u2026" not in "".join(laid_out), "a cell is cut"
    if kind == "terminal":
        assert max(map(len, laid_out)) <= screens.COLUMNS, laid_out
    else:
        tables = [line for line in laid_out if line.startswith((" ", "│", "┃"))]
        assert max(map(len, tables), default=0) <= screens.COLUMNS, tables
        assert "\r" not in run.out + run.err and "\x1b" not in run.out + run.err
    return lines[-1]


def show(name: str, check: Callable[..., str], *arguments) -> int:
    """Prints what a check says of a run; returns the number of faults."""
    try:
        words, faults = check(*arguments), 0
    except (AssertionError, ValueError) as error:
        words, faults = f"FAULT: {error}", 1
    print(f"{name}: {words}", flush=True)
    return faults


def main() -> int:
    """Runs and interrupts each command; returns 1 if one did not show or end as it must."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interrupts", type=int, default=20, help="of each command; default 20")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commands", help="names, separated by commas; default: all")
    parser.add_argument("--no-screens", action="store_true", help="in a pipe only, and interrupted")
    args = parser.parse_args()
    moments, faults, longest = random.Random(args.seed), 0, collections.defaultdict(Longest)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        # A folder each: a run of what another has saved would do nothing.
        calls = {kind: commands(folder / kind) for kind in KINDS}
        chosen = args.commands.split(",") if args.commands else list(calls["json"])
        for command in chosen:
            text: set[str] = set()
            for kind in KINDS[command in WITHOUT_JSON :] if not args.no_screens else KINDS[-1:]:
                call = [command, *calls[kind][command], *(["--json"] if kind == "json" else [])]
                began = time.monotonic()
                run = screens.run(call, is_terminal=kind == "terminal")
                took_s = time.monotonic() - began
                longest[command].add(run)
                is_fault = show(f"{command}, {kind}", check_screen, run, kind, text)
                faults += is_fault
                if kind == "json" and not is_fault:
                    text = written_by_the_model(json.loads(run.out))
            for attempt in range(3 * args.interrupts):
                if longest[command].num_interrupts == args.interrupts:
                    break
                # Python itself has not begun with the program before 0.3 s.
                moment = moments.uniform(0.3, max(took_s, 0.4))
                call = [command, *commands(folder / f"{command} {attempt}")[command]]
                run = screens.run(call, is_terminal=attempt % 3 == 0, interrupt_s=moment)
                if run.ended_s is not None and run.status != 0:  # else it was done before, or at that moment
                    longest[command].add(run)
                    words = f"{command} after {moment:.2f} s, ended in {run.ended_s:.2f} s"
                    faults += show(words, check_end, run, command)
    for command, found in longest.items():
        print(f"{command}: {found}")
    print(f"{faults} fault{'s' * (faults != 1)}")
    return min(faults, 1)


if __name__ == "__main__":
    sys.exit(main())
