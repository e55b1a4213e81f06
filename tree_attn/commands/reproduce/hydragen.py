"""Hydragen's Figures 3, 4, 5 and 6."""

from typing import Any

from tree_attn.commands.reproduce.experiment import (
    Command,
    Experiment,
    Place,
    Point,
    Row,
    Steps,
    field,
    paper,
    peaks_of,
    step_us,
    thousands,
)

PAPER = "Hydragen"
CONFIG = "llama-2-13b"  # CodeLlama's 13B has its shape

# Batch -> thousands of tokens a second after 2,048 shared tokens: Hydragen, FlashAttention, no attention (table 3).
FIGURE_3A = {
    32: (2.0, 1.4, 2.3),
    64: (3.6, 2.3, 4.2),
    128: (5.7, 2.9, 6.8),
    256: (9.3, "X", 11.4),
    512: (13.3, "X", 16.1),
    1024: (15.5, "X", 18.5),
}
# Prefix -> the same of Hydragen, for a batch of 1,024 and of 512.
FIGURE_3B = {
    1024: {1024: 15.6, 2048: 15.5, 4096: 15.3, 8192: 14.8, 16256: 14.0},
    512: {1024: 13.4, 2048: 13.3, 4096: 13.2, 8192: 12.9, 16256: 12.3},
}
PREFIX = 2048
NEW_TOKENS = 129  # the first is the prefill's


def _throughput(context: int, batch: int, way: str, number) -> Point:
    where: dict[str, Any] = {"config": CONFIG, "context": context, "batch": batch, "problem_tokens": 0}
    kinds = {
        "shared": {"attention": ("single", "tree"), "share_prefix": None},
        "not shared": {"attention": ("single", "tree"), "share_prefix": False},
        "no attention": {"attention": "none"},
    }
    title = f"{thousands(context)} tokens shared, batch {batch:,}, {way}"
    drawn = {"x": batch, "series": way} if context == PREFIX else {}
    return Point(setting=title, where=where | kinds[way], paper=paper(number), **drawn)


def _figure_3() -> list[Point]:
    ways = ("shared", "not shared", "no attention")
    found = [
        _throughput(PREFIX, batch, way, number)
        for batch, numbers in FIGURE_3A.items()
        for way, number in zip(ways, numbers, strict=True)
    ]
    for batch, numbers in FIGURE_3B.items():
        found += [
            _throughput(context, batch, "shared", number) for context, number in numbers.items() if context != PREFIX
        ]
    return found


def _plan_3(place: Place) -> list[Command]:
    devices = min(2 ** (max(place.gpus, 1).bit_length() - 1), 8)  # they divide the 40 heads of this model
    bench = ["bench", "llama", "--devices", str(devices), "--prefill-trials", "1"]
    if not place.gpus:
        common = [*bench, "--config", "smollm2-135m", "--context", "256", "--samples", "8", "--new-tokens", "9"]
        return [
            Command(folder="small", arguments=[*common, "--attention", "single,none"]),
            Command(folder="small_not_shared", arguments=[*common, "--attention", "single", "--no-share-prefix"]),
        ]
    common = [*bench, "--config", CONFIG, "--new-tokens", str(NEW_TOKENS)]
    attention, largest, not_shared = ("single", "512", "32") if devices == 1 else ("tree", "512,1024", "32,64,128")
    batches = ["--context", str(PREFIX), "--samples", f"32,64,128,256,{largest}"]
    prefixes = ["--context", "1024,4096,8192,16256", "--samples", largest]
    whole = ["--context", str(PREFIX), "--samples", not_shared, "--no-share-prefix"]
    return [
        Command(folder="batches", arguments=[*common, *batches, "--attention", f"{attention},none"]),
        Command(folder="prefixes", arguments=[*common, *prefixes, "--attention", attention]),
        Command(folder="not_shared", arguments=[*common, *whole, "--attention", attention]),
    ]


FIGURE_3 = Experiment(
    name="hydragen-figure-3",
    paper=PAPER,
    place="Figure 3 (table 3)",
    what="a 13B model's tokens a second over batch and shared prefix, beside no sharing and no attention",
    quantity="thousands of tokens a second",
    measure=field("tokens_per_s", 1e-3),
    paper_hardware="8 x A100 40 GB",
    differs=(
        "The paper spreads the model over eight GPUs, by heads. Here one holds it, or weights are spread over those "
        "that there are by heads, and keys and values by sequence. An H200 has less than half the memory of the "
        "paper's eight. Its largest batch is 512, and 32 without sharing. One and four GPUs ran on other machines, "
        "commits and versions of JAX (0.12 and 0.11). Four take 1.03 and 1.06 of one's time with 64 and 128 "
        "sequences, and 0.83 with 512 (0.76 without attention). Random weights; times do not depend on them."
    ),
    points=_figure_3(),
    plan=_plan_3,
    cpu="SmolLM2's shape, 256 tokens and 8 sequences. Not run: 13B, and the paper's batches.",
    x_axis="batch",
)

_HEADS = {"num_heads": 8, "num_kv_heads": 1, "head_dim": 128}
# Batch, prefix, suffix.
_STEPS = [
    (1024, 2048, 128),
    (64, 2048, 128),
    (1024, 16384, 128),
    (256, 16384, 128),
    (256, 2048, 128),
    (256, 2048, 512),
    (256, 2048, 2048),
    (2048, 2048, 128),
    (1024, 1024, 128),
    (1024, 4096, 128),
]
_NOT_SHARED = "mosaic_gpu, not shared"


def _figure_4() -> list[Point]:
    found = []
    for batch, prefix, suffix in _STEPS:
        where = {"batch": batch, "prefix": prefix, "suffix": suffix, "num_kv_heads": 1, "num_heads": 8}
        title = f"batch {batch:,}, {prefix:,} tokens shared, {suffix:,} of each"
        drawn = {"x": batch, "series": f"{thousands(prefix)} shared"} if suffix == 128 else {}
        found.append(
            Point(setting=title, where=where | {"way": "mosaic_gpu"}, over=where | {"way": _NOT_SHARED}, **drawn)
        )
    return found


def _limit_us(row: Row) -> float | None:
    """Returns the least time of a row's step by the datasheet of its GPU; None if there is none."""
    from tree_attn.measure.steps.prefix import SharedPrefixStep

    if (peaks := peaks_of(row)) is None:
        return None
    names = "batch", "prefix", "suffix", "num_heads", "num_kv_heads", "head_dim"
    return SharedPrefixStep(**{name: row[name] for name in names}).limit_us_at(peaks)


def _plan_4(place: Place) -> list[Steps]:
    named = lambda batch, prefix, suffix: {"batch": batch, "prefix": prefix, "suffix": suffix} | _HEADS
    if not place.gpus:
        return [Steps(kind="prefix", cases=[named(8, 256, 16)], ways=("None", "None, not shared"))]
    return [Steps(kind="prefix", cases=[named(*step) for step in _STEPS], ways=("mosaic_gpu", _NOT_SHARED))]


FIGURE_4 = Experiment(
    name="hydragen-figure-4",
    paper=PAPER,
    place="Figure 4 (7 on an H100)",
    what="a step of 8 query heads and 1 KV head of 128, over batch, shared prefix and suffix",
    quantity="speed-up over no sharing",
    measure=step_us,
    paper_hardware="1 x A100 40 GB; 1 x H100",
    differs=(
        "The paper draws its speed-ups and prints none. Its suffixes and unshared steps run FlashAttention, ours the "
        "lean kernel, which leaves less to gain."
    ),
    points=_figure_4(),
    plan=_plan_4,
    cpu="one short step in XLA on the CPU, which shows that the command runs. Not run: all kernels, and all shapes.",
    x_axis="batch",
    limit=_limit_us,
)

DOCUMENT_TOKENS = 7168
_QUESTIONS = (64, 256)


def _answers(questions: int, is_shared: bool) -> dict[str, Any]:
    return {"questions": questions, "is_shared": is_shared}


def _figure_5() -> list[Point]:
    fewer, more = _QUESTIONS
    return [
        Point(
            setting=f"{fewer} questions without sharing over {more} with it",
            where=_answers(more, True),
            over=_answers(fewer, False),
            paper=paper(1),
            bound=">",
        ),
        *(
            Point(
                setting=f"{count} questions: without sharing over with it",
                where=_answers(count, True),
                over=_answers(count, False),
            )
            for count in _QUESTIONS
        ),
    ]


def _plan_5(place: Place) -> list[Steps]:
    counts, tokens, trials = (_QUESTIONS, DOCUMENT_TOKENS, 3) if place.gpus else ((8,), 512, 1)
    common = {"model": place.model, "text": str(place.text), "document_tokens": tokens, "trials": trials}
    cases = [common | _answers(count, is_shared) for count in counts for is_shared in (True, False)]
    return [Steps(kind="needles", cases=cases)]


FIGURE_5 = Experiment(
    name="hydragen-figure-5",
    paper=PAPER,
    place="Figure 5",
    what="questions about facts hidden in one long document: time to answer, with and without sharing it",
    quantity="time of new tokens, without sharing over with it",
    measure=field("decode_s"),
    paper_hardware="4 x A100 40 GB, Yi 6B",
    differs=(
        "SmolLM2 135M reads 7,168 tokens, the paper's model 19,947. Reading the document is in neither time. The time "
        "without sharing leaves reading the questions out as well. Rows say how many answers are right in both ways."
    ),
    points=_figure_5(),
    plan=_plan_5,
    cpu="a document of 512 tokens, 8 questions. Not run: 7,168 tokens, 64 and 256 questions.",
    needs_text=True,
)

_PROMPT, _PROBLEM, _SAMPLES = 2400, 500, 128
_MANY = 8, 16  # problems, by two levels
_FEWER = 64  # samples, of which two problems fit 80 GB with one level; of 128 they take 101 GB of an H200


def _levels(problems: int, levels: int, samples: int = _SAMPLES) -> dict[str, Any]:
    where = {"config": "llama-2-7b", "context": _PROMPT, "problem_tokens": _PROBLEM, "batch": problems * samples}
    return where | {"levels": levels}


def _plan_6(place: Place) -> list[Command]:
    bench = ["bench", "llama", "--devices", "1", "--attention", "single", "--prefill-trials", "1"]
    if not place.gpus:
        common = ["--config", "smollm2-135m", "--context", "128", "--problem-tokens", "64", "--problems", "2"]
        small = [*bench, *common, "--samples", "4", "--levels", "2,1", "--new-tokens", "9"]
        return [Command(folder="small", arguments=small)]
    common = ["--config", "llama-2-7b", "--context", str(_PROMPT), "--problem-tokens", str(_PROBLEM)]
    common += ["--new-tokens", "65", "--problems"]
    both = f"{_FEWER},{_SAMPLES}"
    return [
        Command(folder="problems_2", arguments=[*bench, *common, "2", "--samples", both, "--levels", "2,1"]),
        *(
            Command(
                folder=f"problems_{problems}",
                arguments=[*bench, *common, str(problems), "--samples", str(_SAMPLES), "--levels", "2"],
            )
            for problems in _MANY
        ),
    ]


FIGURE_6 = Experiment(
    name="hydragen-figure-6",
    paper=PAPER,
    place="Figure 6",
    what="a prompt, problems after it and samples of each: two prefix levels beside one, and a larger batch",
    quantity="time of a token, over that of one level",
    measure=field("tokens_per_s"),
    paper_hardware="8 x A100 40 GB, CodeLlama 7B, 120 problems",
    differs=(
        "Ours is one GPU, random weights, problems of 500 tokens, and 64 new tokens where the paper has 512. The "
        "paper's times are of all 120 problems; here a token's time stands for them. With one level two problems fit: "
        "of 128 samples on an H200, of 64 on an H100. With two levels the command has 8 and 16 of 128 samples, which "
        "take 60 and 105 GB."
    ),
    points=[
        Point(
            setting="two levels, the batch of one level (128 sequences)",
            where=_levels(2, 2, _FEWER),
            over=_levels(2, 1, _FEWER),
            paper=paper(0.82),
        ),
        Point(
            setting="two levels, the batch of one level (256 sequences)",
            where=_levels(2, 2),
            over=_levels(2, 1),
            paper=paper(0.82),
        ),
        *(
            Point(
                setting=f"two levels, {problems * _SAMPLES:,} sequences, beside {2 * samples} of one level",
                where=_levels(problems, 2),
                over=_levels(2, 1, samples),
                paper=paper(0.45),
            )
            for problems in _MANY
            for samples in (_FEWER, _SAMPLES)
        ),
    ],
    plan=_plan_6,
    cpu="SmolLM2's shape, 2 problems of 64 tokens, 4 samples. Not run: 7B, and the paper's batches.",
)

EXPERIMENTS = (FIGURE_3, FIGURE_4, FIGURE_5, FIGURE_6)
