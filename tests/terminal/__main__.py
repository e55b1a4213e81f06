"""Interrupts every command at random times: `python3 -m tests.terminal --interrupts 20 --seed 0`."""

import argparse
import pathlib
import random
import sys
import tempfile

from . import screens
from .test_interrupts import check_end

PROMPT = ["--prompt", "Name three rivers.", "--max-new-tokens", "64"]
TEXT = "a river and a hill and a river. " * 400


def commands(folder: pathlib.Path) -> dict[str, list[str]]:
    """Returns a call of each command that lasts for some seconds."""
    (folder / "text.txt").write_text(TEXT)
    rows = pathlib.Path(__file__).parent.parent.parent / "docs" / "results" / "compare_4xh200_4processes"
    return {
        "compare": ["--devices", "4", "--keys", "16384", "--no-plots", "--out", str(folder / "compare")],
        "bench": ["llama", "--config", "smollm2-135m", "--devices", "2", "--context", "512"],
        "doctor": ["--devices", "4"],
        "plan": ["--keys", "81920"],
        "figures": ["3", "--rows", str(rows), "--out", str(folder / "figures")],
        "demo": [],
        "generate": [*PROMPT, "--out", str(folder / "generate")],
        "sample": [*PROMPT, "--num-samples", "4"],
        "eval": ["--text", str(folder / "text.txt"), "--no-plots", "--out", str(folder / "eval")],
    }


def main() -> int:
    """Interrupts each command so many times; returns 1 if one did not end as it must."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--interrupts", type=int, default=20, help="of each command; default 20")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--within", type=float, default=20.0, metavar="S", help="seconds after the start; default 20")
    parser.add_argument("--commands", help="names, separated by commas; default: all")
    args = parser.parse_args()
    moments, faults = random.Random(args.seed), 0
    with tempfile.TemporaryDirectory() as name:
        calls = commands(pathlib.Path(name))
        for command in args.commands.split(",") if args.commands else calls:
            for number in range(args.interrupts):
                # Python itself has not begun with the program before 0.3 s.
                moment = moments.uniform(0.3, args.within if number % 2 else 3.0)
                run = screens.run([command, *calls[command]], is_terminal=number % 3 == 0, interrupt_s=moment)
                if run.ended_s is None or run.status == 0:  # it was done before, or at that moment
                    continue
                try:
                    words = check_end(run, command)
                except AssertionError as error:
                    words, faults = f"FAULT: {error}", faults + 1
                print(f"{command} after {moment:.2f} s, ended in {run.ended_s:.2f} s: {words}", flush=True)
    print(f"{faults} faults")
    return min(faults, 1)


if __name__ == "__main__":
    sys.exit(main())
