"""Fits what `implementation=None` picks by: the time of a decode step by each backend, from measured steps.

    python3 scripts/bench_sweep.py --seed 101 --cases 84 --only dense,ragged,queries,window \
        --ways mosaic_gpu,cudnn,xla --out drawn.jsonl                                           # on the GPU
    python3 scripts/fit_choice.py docs/results/sweep_h200/drawn.jsonl docs/results/sweep_h200/table.jsonl

Writes `tree_attn/local/choice.json`: four constants, none negative, for each backend and kind of call
(`tree_attn/local/prediction.py`). Errors are relative, and so is what is minimised. It prints how far each step's
prediction is off when that step is left out of the fit. It also prints what picking by them costs over the fastest.
"""

import argparse
import collections
import json
import pathlib
import sys

import numpy as np

from tree_attn.cost import limits
from tree_attn.local import prediction
from tree_attn.measure import rows

BACKENDS = ("mosaic_gpu", "cudnn", "xla")
MIN_STEPS = 4  # of a backend and kind, below which there is no fit
LAUNCH, SEEN = 0, 1  # places of the constants of a launch, and of MB seen


def main() -> int:
    """Fits, prints the errors, and writes the constants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=pathlib.Path, help="JSONL files of bench_sweep.py")
    args = parser.parse_args()
    steps = measured([row for file in args.files for row in rows.read(file)])
    for (device, name, kind), found in steps.items():
        error = left_out_error(found, lower_bounds(device, name, kind, steps))
        print(f"{device}  {name:11s} {kind:28s} {len(found):3d} steps, off by {error:.1%} on average")
    lost = losses(steps)
    print(f"picking by the predictions costs {np.mean(lost) - 1:.1%} on average, {max(lost) - 1:.1%} at worst")
    prediction.FILE.write_text(json.dumps(fitted(steps), indent=2) + "\n")
    return 0


def measured(found: list[dict]) -> dict[tuple, dict]:
    """Returns `{(device, backend, kind): {case: (counts, us)}}` of a sweep's rows of steps without pages or prefix."""
    steps = collections.defaultdict(dict)
    for row in found:
        if row["way"] not in BACKENDS or row["prefix"] or row["page"] is not None or not row.get("chain_us_median"):
            continue
        shapes = (
            (row["batch"], row["num_queries"], row["num_heads"], row["head_dim"]),
            (row["batch"], row["slots"], row["num_kv_heads"], row["head_dim"]),
        )
        itemsize = 1 if row["dtype"].startswith("float8") else 2
        keys_seen = row["bytes"] // (2 * row["num_kv_heads"] * row["head_dim"] * itemsize)
        kind = prediction.kind(
            row["num_queries"], has_window=row["window"] is not None, has_lengths=row["gives_lengths"]
        )
        counts = prediction.counts(*shapes, itemsize, keys_seen=keys_seen)
        steps[row["hardware"].partition(" x ")[2], row["way"], kind][row["case"]] = counts, row["chain_us_median"]
    return dict(steps)


def fitted(steps: dict[tuple, dict]) -> dict:
    """Returns the constants by device, backend and kind."""
    result: dict = {}
    for (device, name, kind), found in sorted(steps.items()):
        if len(found) >= MIN_STEPS:
            lower = lower_bounds(device, name, kind, steps)
            result.setdefault(device, {}).setdefault(name, {})[kind] = fit(found.values(), lower)
    return result


def fit(found, lower=(0.0, 0.0, 0.0, 0.0)) -> list[float]:
    """Returns the constants with the least squares of relative errors, none of them below its bound in `lower`."""
    from scipy.optimize import nnls

    counts, us = (np.array(x, float) for x in zip(*found))
    constants, _ = nnls(counts / us[:, None], 1 - counts @ lower / us)
    return [float(f"{x:.4g}") for x in constants + lower]


def lower_bounds(device: str, name: str, kind: str, steps: dict[tuple, dict]) -> np.ndarray:
    """Returns the least that the four constants can be.

    No step is faster than reading what is seen at the datasheet's rate, and no step launches faster than one of the
    next simpler kind. Few small steps are measured: without that bound a fit may have them launched in no time.
    """
    lower = np.zeros(4)
    lower[SEEN] = limits.limit_us(device, num_bytes=1e6, num_flops=0)
    if (simpler := _simpler(kind)) is not None:
        of_simpler = lower_bounds(device, name, simpler, steps)
        found = steps.get((device, name, simpler), {})
        lower[LAUNCH] = fit(found.values(), of_simpler)[LAUNCH] if len(found) >= MIN_STEPS else of_simpler[LAUNCH]
    return lower


def _simpler(kind: str) -> str | None:
    """Returns the kind with one query instead of several, or then of all keys, or None."""
    queries, _, keys = kind.partition(", ")
    if queries != "one query":
        return f"one query, {keys}"
    return "one query, all keys" if keys != "all keys" else None


def left_out_error(found: dict, lower=(0.0, 0.0, 0.0, 0.0)) -> float:
    """Returns the mean relative error of steps, each predicted from the others."""
    errors = []
    for case, (counts, us) in found.items():
        others = [step for name, step in found.items() if name != case]
        if len(others) >= MIN_STEPS:
            errors.append(abs(np.dot(fit(others, lower), counts) / us - 1))
    return float(np.mean(errors)) if errors else float("nan")


def losses(steps: dict[tuple, dict]) -> list[float]:
    """Returns for each step the time of the backend that the predictions pick over that of the fastest."""
    constants, by_case = fitted(steps), collections.defaultdict(dict)
    for (device, name, kind), found in steps.items():
        for case, (counts, us) in found.items():
            if kind in constants.get(device, {}).get(name, {}):
                known = _as_known(counts, kind)
                by_case[device, case][name] = prediction.times(constants[device][name][kind], known, kind), us
    result = []
    for ways in by_case.values():
        picked = prediction.pick({name: times for name, (times, _) in ways.items()})
        result.append(ways[picked][1] / min(us for _, us in ways.values()))
    return result


def _as_known(counts: tuple, kind: str) -> tuple:
    """Returns the counts that picking has: with lengths, those of slots that all hold keys."""
    one, seen, slots, flops = counts
    return (one, slots, slots, flops * slots / seen) if kind.endswith("lengths") else counts


if __name__ == "__main__":
    sys.exit(main())
