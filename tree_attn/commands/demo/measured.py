"""Times of a step on GPUs: rows of docs/results, which an installed package does not carry."""

import dataclasses

from tree_attn.cost import limits
from tree_attn.cost.step import DecodeStep

FOLDER = "docs/results/compare_4xh200_4processes_spread"
MACHINE = "four H200s"
DEVICE_KIND = "NVIDIA H200"
STEP = "batch 1, 16 heads of 128, bfloat16"
COMMIT = "d649ccb"
GATHER_FOLDER = "docs/results/compare_4xh200_4processes_pairs"
GATHER_US = 323.7  # by a gather, over as many keys as the last of `ROWS`


@dataclasses.dataclass(frozen=True)
class Row:
    """Microseconds of one step of attention over a number of keys, medians."""

    num_keys: int
    tree_us: float  # by the fused reduction
    ring_us: float  # by the faster of the two rings, the overlapped one


ROWS = (Row(40_960, 31.7, 901.2), Row(81_920, 48.7, 1_683.1), Row(640_000, 311.8, 12_098.2))


def limit_us(num_keys: int) -> float:
    """Returns the least microseconds of such a step: every GPU reads its keys and values once."""
    step = DecodeStep(
        batch=1, num_keys=num_keys, num_heads=16, num_kv_heads=16, head_dim=128, dtype="bfloat16", n_devices=4
    )
    return limits.read_limit_us(step, DEVICE_KIND)
