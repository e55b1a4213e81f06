"""LeanAttention's Figures 7, 8 and 13."""

from collections.abc import Mapping, Sequence
from typing import Any

from tree_attn.commands.reproduce.experiment import (
    Experiment,
    Place,
    Point,
    Steps,
    field,
    paper,
    reading_limit_us,
    step_us,
    thousands,
)

PAPER = "LeanAttention"
HEAD_DIM = 64
OURS, SPLIT = "mosaic_gpu", "fixed split"

# Keys -> speed-up over FlashDecoding on an H100, where section 6.1 prints it.
FIGURE_8 = {4096: paper(2.0), 65536: paper(2.53)}
FIGURE_8_KEYS = tuple(1024 * 2**i for i in range(10))  # 1k to 512k
FIGURE_8_BATCH, FIGURE_8_HEADS = 6, 48
FIGURE_13_HEADS = 56

_PEERS = ((SPLIT, "fixed split"), ("cudnn", "cuDNN"))
_DIFFERS = (
    "The fixed split is FlashDecoding's partition, by its own heuristic, in this library's kernel: schedules are "
    "compared, and not the quality of two kernels. cuDNN stands for the library that one would use in its place. "
    "By both schedules most steps read at 80 to 90 % of memory's rate on an H100, and at 84 to 93 % on an H200. So the "
    "paper's factors are not seen here. Short steps read at less, and equal runs take up to 16 % longer there. "
)
_CPU = "two short steps in XLA on the CPU, which show that the command runs. Not run: all kernels, and all lengths."


def _case(batch: int, keys: int, heads: int) -> dict[str, Any]:
    return {"lengths": (keys,) * batch, "num_heads": heads, "num_kv_heads": heads, "head_dim": HEAD_DIM}


def _row(batch: int, keys: int, heads: int, way: str) -> dict[str, Any]:
    shape = {"batch": batch, "max_keys": keys, "sum_keys": batch * keys, "num_heads": heads, "head_dim": HEAD_DIM}
    return shape | {"implementation": way}


def _speed_up(title: str, shape: tuple[int, int, int], peer: str, **fields) -> Point:
    """Returns a point: the peer's time over ours, for a shape of batch, keys and heads."""
    return Point(setting=title, where=_row(*shape, OURS), over=_row(*shape, peer), **fields)


def _plan(cases: Sequence[Mapping[str, Any]], has_energy: bool = False):
    def plan(place: Place) -> list[Steps]:
        if not place.gpus:
            small = [_case(2, keys, 4) for keys in (256, 512)]
            return [Steps(kind="lean", cases=small, ways=("xla",))]
        return [Steps(kind="lean", cases=cases, ways=(), has_energy=has_energy)]

    return plan


FIGURE_8_EXPERIMENT = Experiment(
    name="lean-figure-8",
    paper=PAPER,
    place="Figure 8",
    what="48 heads of 64, batch 6, 1k to 512k keys on Hopper: equal runs beside a fixed split",
    quantity="speed-up over the peer",
    measure=step_us,
    paper_hardware="1 x H100, FlashDecoding 2.5.6",
    differs=_DIFFERS + "The paper prints 2.52 for 64k in section 6.1 and 2.53 below it.",
    points=[
        _speed_up(
            f"{thousands(keys)} keys, over {name}",
            (FIGURE_8_BATCH, keys, FIGURE_8_HEADS),
            peer,
            paper=FIGURE_8.get(keys) if peer == SPLIT else None,
            bound=">" if keys == 4096 and peer == SPLIT else "",
            x=keys,
            series=f"over {name}",
        )
        for peer, name in _PEERS
        for keys in FIGURE_8_KEYS
    ],
    # The length with the largest printed number comes first.
    plan=_plan(
        [_case(FIGURE_8_BATCH, keys, FIGURE_8_HEADS) for keys in sorted(FIGURE_8_KEYS, key=lambda keys: keys != 65536)]
    ),
    cpu=_CPU,
    x_axis="keys of a sequence",
    limit=reading_limit_us,
)

_CONTEXTS = tuple(1024 * 4**i for i in range(5))  # (a): 32 heads, batch 4
_HEADS = (8, 16, 24, 32, 40, 48, 56)  # (b): 256k keys, batch 4
_BATCHES = (1, 2, 4, 8, 16, 32)  # (c): 32 heads, 16k keys
_C_KEYS = 16384


def _figure_7() -> list[Point]:
    found = []
    for peer, name in _PEERS:
        is_split = peer == SPLIT
        for keys in _CONTEXTS:
            number = paper(2.18) if is_split and keys == 262144 else None
            title = f"(a) {thousands(keys)} keys, 32 heads, batch 4, over {name}"
            found.append(_speed_up(title, (4, keys, 32), peer, paper=number, x=keys, series=f"(a) keys, over {name}"))
        for heads in _HEADS:
            number = paper(2) if is_split and heads > 24 else None
            title = f"(b) {heads} heads, 256k keys, batch 4, over {name}"
            found.append(_speed_up(title, (4, 262144, heads), peer, paper=number, bound=">" if number else ""))
        for batch in _BATCHES:
            number = paper(1.5) if is_split and batch > 4 else None
            title = f"(c) batch {batch}, 32 heads, {thousands(_C_KEYS)} keys, over {name}"
            found.append(_speed_up(title, (batch, _C_KEYS, 32), peer, paper=number, bound=">" if number else ""))
        title = f"the largest of all: 56 heads, batch 2, 256k keys, over {name}"
        found.append(_speed_up(title, (2, 262144, 56), peer, paper=paper(2.18) if is_split else None))
    return found


FIGURE_7_EXPERIMENT = Experiment(
    name="lean-figure-7",
    paper=PAPER,
    place="Figure 7",
    what="heads of 64 over context, heads and batch: equal runs beside a fixed split",
    quantity="speed-up over the peer",
    measure=step_us,
    paper_hardware="1 x A100 80 GB, FlashDecoding 2.5.6",
    differs=_DIFFERS
    + (
        "An A100 has 108 multiprocessors, an H100 and an H200 132, so a split fills other numbers of them. The paper "
        "does not print the heads and the context of (c): 32 heads and 16k keys are ours."
    ),
    points=_figure_7(),
    plan=_plan(
        [_case(4, 262144, 32), _case(2, 262144, 56)]
        + [_case(4, keys, 32) for keys in _CONTEXTS[:-1]]
        + [_case(batch, _C_KEYS, 32) for batch in _BATCHES if batch != 4]
        + [_case(4, 262144, heads) for heads in _HEADS if heads != 32]
    ),
    cpu=_CPU,
    x_axis="keys of a sequence",
    limit=reading_limit_us,
)

_ENERGY_KEYS = (8192, 32768, 131072, 262144, 524288)


FIGURE_13_EXPERIMENT = Experiment(
    name="lean-figure-13",
    paper=PAPER,
    place="Figure 13",
    what="energy of a step of 56 heads of 64, batch 1, over contexts",
    quantity="energy over that of the fixed split",
    measure=field("energy_mj_per_call"),
    paper_hardware="1 x A100 80 GB, NVML",
    differs=_DIFFERS + "The paper draws the ratios and prints none of them.",
    points=[
        Point(
            setting=f"{thousands(keys)} keys, {name}",
            where=_row(1, keys, FIGURE_13_HEADS, SPLIT),
            over=_row(1, keys, FIGURE_13_HEADS, way),
            x=keys,
            series=name,
        )
        for way, name in ((OURS, "equal runs"), ("cudnn", "cuDNN"))
        for keys in _ENERGY_KEYS
    ],
    plan=_plan([_case(1, keys, FIGURE_13_HEADS) for keys in _ENERGY_KEYS], has_energy=True),
    cpu=_CPU + " A CPU's energy is not measured.",
    x_axis="keys of a sequence",
)

EXPERIMENTS = (FIGURE_8_EXPERIMENT, FIGURE_7_EXPERIMENT, FIGURE_13_EXPERIMENT)
