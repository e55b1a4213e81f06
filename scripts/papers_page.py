"""Prints docs/papers.md: every figure and table that `tree-attn reproduce` makes, from the rows that were committed.

python3 scripts/papers_page.py > docs/papers.md
python3 scripts/papers_page.py --draw            # the page's pictures, which need the extra 'plot'
"""

import argparse
import pathlib
import sys

from tree_attn.commands.reproduce import plots, report
from tree_attn.commands.reproduce.experiment import Experiment
from tree_attn.commands.reproduce.experiments import ALL
from tree_attn.measure.rows import read

RESULTS = pathlib.Path(__file__).resolve().parent.parent / "docs" / "results"
# Name -> the files of its rows, and what these rows lack of the command's.
ROWS = {
    "tree-table-1": (
        ["reproduced_h100/tree-table-1.jsonl", "reproduced_h200/tree-table-1.jsonl"],
        "One process ran all GPUs. A cell has ten trials, but on two H100s three for 128k tokens, and two without a "
        "warm-up for 256k. No machine of eight GPUs was available for ten trials. Eight H200s with weights spread, and "
        "one trial, take 0.27 seconds for 32k tokens by the tree and 1.20 by the ring: "
        "results/llama_h200/eight_gpus_8processes.jsonl.",
    ),
    "tree-table-2": (
        ["reproduced_h100/tree-table-2.jsonl", "reproduced_h200/tree-table-2.jsonl"],
        "One process ran both GPUs.",
    ),
    "tree-figure-3": (["compare_8xh200_8processes/results.jsonl"], "They predate the spreading of transfers."),
    "tree-figure-4": (
        ["reproduced_h100/tree-figure-4.jsonl", "reproduced_h200/tree-figure-4.jsonl"],
        "They have all points of the command.",
    ),
    "lean-figure-8": (
        ["reproduced_h100/lean-figure-8.jsonl", "reproduced_h200/lean-figure-8.jsonl"],
        "On an H100 those of 1k to 8k keys are of 8ea3d04, which leaves output tiles whole; 16k to 256k of a01d9e9. "
        "With 512k it has no memory for a second copy. On an H200 they have all points of the command.",
    ),
    "lean-figure-7": (
        ["reproduced_h100/lean-figure-7.jsonl", "reproduced_h200/lean-figure-7.jsonl"],
        "On an H100 they have all points of the command, and the picture shows (a) of them. CTAs of the fixed split "
        "began early there and could meet on few SMs. On an H200 that took up to 1.2 times as long "
        "(docs/log/lean.md). It may be why splits of 160, 192 and 224 output tiles are slow on an H100. On an H200 "
        "they are of newer code, and lack six of the seven points of (b): the machine's time ended.",
    ),
    "lean-figure-13": (
        ["reproduced_h200/lean-figure-13.jsonl"],
        "They have all points of the command. With 8k keys a GPU waited between calls for a fifth to a half of the "
        "time, and what it takes meanwhile is counted: cuDNN's number there is partly that. The split with 128k keys "
        "ran on another GPU than its peers.",
    ),
    "bifurcated-table-6": (
        ["reproduced_h100/bifurcated-table-6.jsonl", "reproduced_h200/bifurcated-table-6.jsonl"],
        "Together they have all batches of the command with sharing, and all that fit an H200 without: the caches of "
        "32 sequences of 8k tokens take 137 GB. A number is the mean of two dispatches of eight tokens. What the host "
        "needs to launch the second counts for the first.",
    ),
    "bifurcated-table-7": (
        ["reproduced_h100/bifurcated-table-7.jsonl", "reproduced_h200/bifurcated-table-7.jsonl"],
        "On an H200 they have all points of the command. The largest batch without sharing takes 134 GB after each "
        "prompt, and JAX was given 95 % of the memory for it. Numbers are means of two dispatches, as in Table 6.",
    ),
    "bifurcated-table-8": (
        ["reproduced_h100/bifurcated-table-8.jsonl", "reproduced_h200/bifurcated-table-8.jsonl"],
        "Without sharing 16 sequences of 32,640 tokens do not fit the memory that JAX takes of two H100s. On two H200s "
        "32 take 131 GB of each: more than the 113 GB that JAX takes by default. That row, and that of 128 with "
        "sharing, are medians of 32 dispatches, the others means of two. By two, these took the same within 1 %.",
    ),
    "hydragen-figure-3": (
        ["reproduced_h200/hydragen-figure-3.jsonl"],
        "They have all points of the command on one GPU. On four they lack a prompt of 16,256 tokens: the machine's "
        "time ended.",
    ),
    "hydragen-figure-4": (["reproduced_h100/hydragen-figure-4.jsonl"], "They have all points of the command."),
    "hydragen-figure-5": (
        ["reproduced_h100/hydragen-figure-5.jsonl", "reproduced_h200/hydragen-figure-5.jsonl"],
        "On an H200 they have all points of the command; 80 GB are too few for 256 questions without sharing. The "
        "model, of 135M parameters, answers one in six of 64 questions, with sharing and without, and one in seven of "
        "256. A time is the median of three trials. On an H200 256 with sharing take 29 to 36 ms, and 64 without 35 to "
        "36: they are as fast.",
    ),
    "hydragen-figure-6": (
        ["reproduced_h100/hydragen-figure-6.jsonl", "reproduced_h200/hydragen-figure-6.jsonl"],
        "On an H200 they have all points of the command. On an H100 256 do not fit with one level, and 1,024 with two "
        "were not tried.",
    ),
    "sparq-table-2": (["eval_methods_smollm2/results.jsonl"], "They are of a King James Bible."),
    "sparq-figure-8": (["reproduced_h100/sparq-figure-8.jsonl"], "They have all points of the command."),
    "sparq-table-3": (
        ["reproduced_h200/sparq-table-3.jsonl"],
        "They have 20 samples a depth, in bfloat16. With 8,000 tokens the model finds a needle in the last half of "
        "them only, with all keys too.",
    ),
    "sparq-figure-7c": (["eval_kept_smollm2/results.jsonl"], "They are of a King James Bible."),
}
DRAWN = ("lean-figure-8", "lean-figure-7", "hydragen-figure-4", "sparq-figure-8")  # by their first file
# What the overview shows, where that is not the first setting with numbers of both: of one sequence nothing is shared.
SHOWN = dict.fromkeys(("bifurcated-table-6", "bifurcated-table-7"), "8k tokens, batch 16, shared")
NOT_YET = "not measured yet"
HEAD = """\
# The papers, reproduced

One command makes each headline figure or table of the five papers that this library implements. It runs at the
paper's shapes on the GPUs that are there, and prints our numbers beside the paper's:

```
tree-attn reproduce --list
tree-attn reproduce lean-figure-8
```

This page is made from the rows in [docs/results](results/README.md) by `python3 scripts/papers_page.py`, and a test
compares the two. "Not measured yet" means that the command exists and that no rows of it do. A cell of "ours" is empty
where the rows lack that setting. Steps are compared by what one costs in a chain of steps, gaps included. "±" is the
standard error of the mean. Bounds (">") are the paper's words. Where rows are of several kinds of hardware, each has a
column. Hardware is rarely the paper's, so a ratio of our time to the paper's is no merit of either.
"""


def page() -> str:
    """Returns the text of the page."""
    parts = [HEAD, "## All of them\n", _overview()]
    for paper in dict.fromkeys(one.paper for one in ALL):
        parts.append(f"## {paper}\n")
        parts += [_section(one) for one in ALL if one.paper == paper]
    return "\n".join(parts)


def _overview() -> str:
    titles = ["paper", "figure or table", "command", "rows", "ours beside the paper's", "our hardware", "the paper's"]
    titles.append("what differs")
    table = [_line(titles), "|" + "---|" * len(titles)]
    for one in ALL:
        rows = _rows(one)
        section = f"[{one.place}](#{one.name})"
        cells = [one.paper, section, f"`{one.name}`", _links(one), _headline(one) or NOT_YET]
        cells += [", ".join(_kinds(one, rows)) or "-", one.paper_hardware]
        table.append(_line([*cells, one.differs.strip()]))
    return "\n".join(table) + "\n"


def _headline(one: Experiment) -> str:
    """Returns a number of ours and one of the paper, "" without ours.

    They are of the same setting where some setting has both, and the paper's is no bound where it has another.
    """
    places = {point.setting: place for place, point in enumerate(one.points)}
    found = [(line, title) for title, rows in _columns(one) for line in report.lines(one, rows)]
    found = [(line, title) for line, title in found if line.ours[:1].isdigit()]
    if not found:
        return ""
    shown = SHOWN.get(one.name)
    line, title = min(
        found,
        key=lambda item: (
            not item[0].paper,
            item[0].setting != shown,
            item[0].paper[:1] == ">",
            places[item[0].setting],
        ),
    )
    others = [f"{other.paper} ({other.setting})" for other in report.lines(one, []) if other.paper] or ["drawn only"]
    ours = f"{line.ours}{title.removeprefix('ours')}"
    return f"{one.quantity}; {line.setting}: {ours}; paper: {line.paper or others[0]}"


def _section(one: Experiment) -> str:
    rows, columns = _rows(one), _columns(one)
    used = [row for _, of_kind in columns for point in one.points for row in one.rows_of(point, of_kind)]
    commits = dict.fromkeys(str(row["git_commit"])[:7] for row in used)
    ours = f"{', '.join(_kinds(one, rows))}, commit {', '.join(commits)}" if rows else NOT_YET
    text = "" if one.needs_text is False else " --text kjv.txt"
    facts = [
        f"### {one.name}\n",
        f"{one.place}: {one.what}.\n",
        f"- **Command:** `tree-attn reproduce {one.name}{text}`",
        f"- **Rows:** {_links(one)}.{' ' + ROWS[one.name][1] if one.name in ROWS else ''}",
        f"- **Hardware:** ours: {ours}; the paper's: {one.paper_hardware}",
        f"- **What differs:** {one.differs.strip()}\n",
    ]
    for drawing in _drawings(one):
        facts.append(f"![{one.quantity} over {one.x_axis}](results/{drawing})\n")
    lines = report.lines(one, rows)
    if lines:
        facts += [_line([one.quantity, *(title for title, _ in columns), "paper"]), "|---" * (2 + len(columns)) + "|"]
        cells = [{line.setting: line.ours for line in report.lines(one, of_kind)} for _, of_kind in columns]
        facts += [_line([line.setting, *(of.get(line.setting, "") for of in cells), line.paper]) for line in lines]
        facts.append("")
    else:
        facts.append("The paper prints no numbers of it.\n")
    return "\n".join(facts)


def _columns(one: Experiment) -> list[tuple[str, list[dict]]]:
    """Returns the titles of the columns of our numbers, and their rows: a column for each hardware, if that matters."""
    rows = _rows(one)
    kinds = _kinds(one, rows)
    if one.cpu_is_true or len(kinds) < 2:
        return [("ours", rows)]
    return [(f"ours, {report.short_name(kind)}", [row for row in rows if row["hardware"] == kind]) for kind in kinds]


def _kinds(one: Experiment, rows: list[dict]) -> list[str]:
    """Returns the hardware of which there is a number."""
    name_and_count = lambda kind: kind.split(" x ")[::-1]
    kinds = sorted({row["hardware"] for row in rows}, key=name_and_count)
    return [kind for kind in kinds if report.hardware(one, [row for row in rows if row["hardware"] == kind])]


def _rows(one: Experiment) -> list[dict]:
    files, _ = ROWS.get(one.name, ((), ""))
    return [row for file in files for row in read(RESULTS / file)]


def _links(one: Experiment) -> str:
    files, _ = ROWS.get(one.name, ((), ""))
    return ", ".join(f"[{file}](results/{file})" for file in files) or NOT_YET


def _line(cells) -> str:
    return f"| {' | '.join(cells)} |"


def _drawings(one: Experiment) -> dict[str, list[dict]]:
    """Returns the picture of an experiment, if it has one, and the rows that it shows: of one kind of hardware."""
    files, _ = ROWS[one.name] if one.name in DRAWN else ((), "")
    return {file.replace(".jsonl", ".png"): read(RESULTS / file) for file in files[:1]}


def draw() -> None:
    """Draws the pictures of the page."""
    for one in ALL:
        for path, rows in _drawings(one).items():
            print(plots.draw(one, rows, RESULTS / path))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="draw the pictures instead")
    if parser.parse_args().draw:
        draw()
    else:
        sys.stdout.write(page())
