"""SparQ Attention's Tables 2 and 3 and Figures 7 (c) and 8."""

import functools
import itertools
from typing import Any

from tree_attn.commands.reproduce.experiment import (
    Command,
    Experiment,
    Place,
    Point,
    Steps,
    paper,
    reading_limit_us,
    scores,
    step_us,
    thousands,
)

PAPER = "SparQ Attention"
METHODS = {
    "sparq_mean": "SparQ",
    "h2o": "H2O",
    "lm_infinite": "LM-Infinite",
    "sparq": "SparQ without the mean value",  # the paper has no number of it
}
SCORES = "One model of 135M parameters stands for those of 7 to 13B; its scores are lower, and fall at other ratios. "
WITHOUT_MEAN = "Where query heads share a KV head, this library leaves the mean value out by default: both are here. "

# Task -> ratio -> dense, SparQ, H2O, LM-Infinite: Llama 2 13B.
TABLE_2 = {
    "repetition": {1: (229,), 2: (227, 61, 76), 8: (190, 26, 29)},
    "language_modelling": {1: (0.61,), 2: (0.61, 0.61, 0.64), 8: (0.70, 0.64, 0.71)},
}
# Ratio -> SparQ, H2O, LM-Infinite in percent, for contexts of 8k to 16k.
TABLE_3 = {1: (100,), 4: (100, 5.9, 23.5), 8: (79.4, 2.9, 11.8)}
TABLE_3_CONTEXT = 8000  # with the tokens after it, near the 8,192 positions of SmolLM2
# (keys, way) -> speed-up over the fastest dense attention on an A100 40 GB (table 4); XLA stands beside PyTorch.
FIGURE_8 = {(4096, "sparq"): 3.02, (4096, "sparq, xla"): 1.33}
FIGURE_8_KEYS = (4096, 1024, 2048, 8192, 16384)
KEPT = (32, 64, 128, 256)
RATIOS_OF_KEPT = (2, 4, 8)


def _scores(task: str, table: dict[int, tuple], where: dict[str, Any]) -> list[Point]:
    found = []
    for ratio, numbers in table.items():
        methods = {"dense": "dense"} if ratio == 1 else METHODS
        for (method, label), number in itertools.zip_longest(methods.items(), numbers):
            title = f"{task.replace('_', ' ')}, {where['context']:,} tokens, {label}"
            title += "" if ratio == 1 else f", 1/{ratio}"
            row = {"task": task, "method": method, "asked_ratio": ratio} | where
            found.append(Point(setting=title, where=row, paper=paper(number)))
    return found


def _eval(folder: str, *options: str):
    def plan(place: Place) -> list[Command]:
        return [Command(folder=folder, arguments=["eval", *place.evaluation, *options])]

    return plan


TABLE_2_EXPERIMENT = Experiment(
    name="sparq-table-2",
    paper=PAPER,
    place="Table 2",
    what="repetition and language modelling under SparQ, H2O and LM-Infinite at 1/2 and 1/8 of the transfers",
    quantity="characters matched; bits per character",
    measure=scores,
    paper_hardware="Llama 2 13B (scores depend on no hardware)",
    differs=(
        SCORES
        + WITHOUT_MEAN
        + "The paper's texts are Tiny Shakespeare and WikiText, ours is that of --text. Passages to repeat end "
        "after 64 tokens. The tasks of question answering and summaries need data sets that are not here."
    ),
    points=[point for task, table in TABLE_2.items() for point in _scores(task, table, {"context": 1024})],
    plan=_eval("scores", "--tasks", "repetition,language_modelling", "--ratios", "2,8", "--context", "1024"),
    cpu="all of it, in float32.",
    needs_text=True,
    cpu_is_true=True,
)


TABLE_3_EXPERIMENT = Experiment(
    name="sparq-table-3",
    paper=PAPER,
    place="Table 3",
    what="a sentence hidden in a long text: found whole, at the longest context that the model has",
    quantity="percent found, over five depths",
    measure=functools.partial(scores, factor=100),
    paper_hardware="a model of 32k positions (scores depend on no hardware)",
    differs=(
        SCORES + WITHOUT_MEAN + "SmolLM2 has 8,192 positions, and the paper's ranges begin at 8k. The needle is the "
        "paper's."
    ),
    points=[
        *_scores("needle_at_depth", TABLE_3, {"context": TABLE_3_CONTEXT}),
        *_scores("needle_at_depth", {ratio: (None,) * len(row) for ratio, row in TABLE_3.items()}, {"context": 1024}),
    ],
    plan=_eval(
        "needle",
        "--tasks",
        "needle_at_depth",
        "--ratios",
        "4,8",
        "--batch",
        "2",
        "--context",
        f"1024,{TABLE_3_CONTEXT}",
    ),
    cpu="all of it, in float32, in hours.",
    needs_text=True,
    cpu_is_true=True,
)


def _figure_8() -> list[Point]:
    found = []
    for keys in FIGURE_8_KEYS:
        where = {"batch": 64, "keys": keys, "num_heads": 32, "num_kv_heads": (32, None)}  # None: rows before groups
        where |= {"num_components": 32, "num_keys": 128}
        for way, label in (("sparq", "SparQ"), ("sparq, xla", "SparQ in XLA")):
            found.append(
                Point(
                    setting=f"{thousands(keys)} keys, {label}",
                    where=where | {"way": way},
                    over=where | {"way": "dense, cudnn"},
                    paper=paper(FIGURE_8.get((keys, way))),
                    x=keys,
                    series=label,
                    paper_series="SparQ in PyTorch" if way == "sparq, xla" else "",
                )
            )
    return found


def _plan_8(place: Place) -> list[Steps]:
    shape = {"num_heads": 32, "num_kv_heads": 32, "num_components": 32, "num_keys": 128}
    if not place.gpus:
        small = {"batch": 2, "keys": 512, "num_heads": 4, "num_kv_heads": 4, "num_components": 32, "num_keys": 64}
        return [Steps(kind="sparq", cases=[small], ways=("sparq, xla", "dense, xla"))]
    cases = [{"batch": 64, "keys": keys} | shape for keys in FIGURE_8_KEYS]
    return [Steps(kind="sparq", cases=cases, ways=("sparq", "dense, cudnn", "dense, mosaic_gpu", "sparq, xla"))]


FIGURE_8_EXPERIMENT = Experiment(
    name="sparq-figure-8",
    paper=PAPER,
    place="Figure 8 and Table 4",
    what="a step of 64 sequences, 32 heads of 128, r 32 and k 128, over 1k to 16k keys",
    quantity="speed-up over dense attention (cuDNN)",
    measure=step_us,
    paper_hardware="1 x A100 40 GB, Triton and PyTorch",
    differs=(
        "Transfers are 6.4 times fewer at 4k keys. The limit is higher where cuDNN reads slower than memory can. The "
        "paper's dense attention is PyTorch's fastest, ours cuDNN's. Beside SparQ in XLA stands the paper's SparQ in "
        "PyTorch. Both libraries store keys twice."
    ),
    points=_figure_8(),
    plan=_plan_8,
    cpu="one short step in XLA on the CPU, which shows that the command runs. Not run: all kernels, and all lengths.",
    x_axis="keys of a sequence",
    limit=reading_limit_us,
)


def _kept() -> list[Point]:
    context = 1024
    common = {"task": "repetition", "context": context}
    return [
        Point(
            setting=f"1/{ratio}, k {count}, {METHODS[method]}",
            where=common | {"method": method, "asked_ratio": ratio, "num_keys": count},
            x=count,
            series=f"1/{ratio} of the transfers, {METHODS[method]}",
        )
        for method in ("sparq_mean", "sparq")
        for ratio in RATIOS_OF_KEPT
        for count in KEPT
        if count * ratio < context  # else the keys alone take what is to be transferred, and nothing is left for r
    ]


FIGURE_7C = Experiment(
    name="sparq-figure-7c",
    paper=PAPER,
    place="Figure 7 (c)",
    what="k against r: repetition under SparQ, with more keys kept or more components read for the same transfers",
    quantity="characters matched",
    measure=scores,
    paper_hardware="Llama 2 7B (scores depend on no hardware)",
    differs=(
        SCORES + WITHOUT_MEAN + "The paper draws its scores and prints none; it proposes k 128. Our r follows from k "
        "and ratio. Points whose keys alone take all transfers are left out."
    ),
    points=_kept(),
    plan=_eval(
        "kept", "--tasks", "repetition", "--ratios", ",".join(map(str, RATIOS_OF_KEPT)),
        "--kept", ",".join(map(str, KEPT)), "--context", "1024",
    ),
    cpu="all of it, in float32.",
    needs_text=True,
    cpu_is_true=True,
    x_axis="keys kept (k)",
)  # fmt: skip

EXPERIMENTS = (TABLE_2_EXPERIMENT, FIGURE_8_EXPERIMENT, TABLE_3_EXPERIMENT, FIGURE_7C)
