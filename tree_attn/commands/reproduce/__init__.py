"""`tree-attn reproduce`: one headline figure or table of the five papers, with the paper's numbers beside ours."""

import argparse
import pathlib

from tree_attn.commands.reproduce.experiments import EXPERIMENTS


def _names() -> str:
    """Returns the names, a line for each paper."""
    papers: dict[str, list[str]] = {}
    for name in EXPERIMENTS:
        papers.setdefault(name.split("-")[0], []).append(name)
    return "\n".join(f"  {paper:12s}{', '.join(names)}" for paper, names in papers.items())


HELP = f"""\
Makes one figure or table of the papers that this library implements, at the paper's own shapes, on the GPUs that are
here, and prints our numbers beside the paper's, with what differs. The names are those of the papers' figures and
tables.

names, and what each shows and needs with --list:
{_names()}

Without a GPU a small form runs on the CPU: it shows that the command works, and the output says what is not run.
Scores of models are the same on a CPU. These names need --text.

Rows go to DIR as they come; the same command run again continues after them. docs/papers.md has what was measured.

examples:
  tree-attn reproduce --list
  tree-attn reproduce lean-figure-8 --out results/lean-figure-8
  tree-attn reproduce tree-table-1
  tree-attn reproduce sparq-table-2 --text kjv.txt --samples 100
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tree-attn reproduce`."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="a figure or table")
    parser.add_argument("--list", action="store_true", help="print all names, with what they show and need")
    parser.add_argument(
        "--out", type=pathlib.Path, metavar="DIR", help="folder of its rows; default: reproduced/NAME in this folder"
    )
    parser.add_argument("--text", type=pathlib.Path, metavar="FILE", help="text that tasks for a model are made of")
    parser.add_argument("--model", default="smollm2", help="that model, as in `tree-attn generate`; default smollm2")
    parser.add_argument("--samples", type=int, default=100, metavar="N", help="samples of each score; default 100")
    parser.add_argument("--iters", type=int, default=32, help="timed samples of a decode step (default 32)")
    parser.add_argument("--no-plots", action="store_true", help="do not draw (drawing needs the extra 'plot')")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")


def run(args: argparse.Namespace) -> int:
    """Runs, prints, writes; returns 0, or 1 if a result was wrong."""
    from tree_attn.commands.reproduce import report

    if args.list:
        report.print_list(as_json=args.json)
        return 0
    from tree_attn.commands.reproduce.reproduction import reproduce  # loads JAX, which --help does without

    return reproduce(args)
