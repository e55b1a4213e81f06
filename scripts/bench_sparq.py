"""Times SparQ on one GPU: beside dense attention, its XLA backend, and the time to read what equation 11 counts.

    python3 scripts/bench_sparq.py table --out docs/results/sparq_h200/table.jsonl
    python3 scripts/bench_sparq.py markdown --out docs/results/sparq_h200/table.jsonl     # docs/results.md's table

Each sequence has one new token; the cache holds keys twice, and the mean of the values, as `KVCache` does on request.
Device time is measured as by `bench_sweep.py`. The way "sparq, no mean" leaves the mean value out, which is the default
for groups of query heads. Set XLA_PYTHON_CLIENT_PREALLOCATE=false.
"""

import argparse
import dataclasses
import functools
import pathlib
import sys

from benching import MissingRows, chosen, markdown

from tree_attn.measure.steps.sparq import WAYS, SparqStep, time_way

MIN_GAIN = 1.5  # SparQ is an approximation: below this it is not worth its error
CASES = [
    SparqStep(batch=64, keys=4096),
    SparqStep(batch=1, keys=131072),
    SparqStep(batch=16, keys=16384),
    SparqStep(batch=64, keys=4096, num_components=16, num_keys=256),
    SparqStep(batch=64, keys=4096, num_kv_heads=8),
    SparqStep(batch=1, keys=131072, num_kv_heads=8),
    SparqStep(batch=64, keys=4096, num_kv_heads=4),
]


def main() -> int:
    """Times every way on every case; prints a line and writes a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("table", "markdown"))
    parser.add_argument("--out", type=pathlib.Path, required=True, help="JSONL file, appended to")
    parser.add_argument("--cases", help="which of CASES, e.g. 0,3 (default: all)")
    parser.add_argument("--iters", type=int, default=32, help="dispatches of each chain")
    args = parser.parse_args()
    if args.part == "markdown":
        return markdown(args.out, _label, WAYS, SparqStep, ("dense over SparQ", _gain))
    missing = MissingRows(args.out, ("batch", "keys", "num_components", "num_keys", "num_kv_heads", "way"))
    for case in chosen(CASES, args.cases):
        labels = dataclasses.asdict(case) | {"dtype": "bfloat16", "limit_us": case.limit_us}
        for way in WAYS:
            missing.add(labels | {"way": way}, functools.partial(time_way, case, way, args.iters))
    return 0


def _label(row: dict) -> str:
    kv_heads = row.get("num_kv_heads", row["num_heads"])
    heads = "" if kv_heads == row["num_heads"] else f", {row['num_heads']}/{kv_heads} heads"
    return f"{row['batch']} x {row['keys']:,}, r {row['num_components']}, k {row['num_keys']}{heads}"


def _gain(chain_us: dict[str, float]) -> str:
    """Returns the time of the faster dense way over SparQ's, in a chain, and whether SparQ pays."""
    sparq, dense = ([us for way, us in chain_us.items() if way.startswith(name)] for name in ("sparq", "dense"))
    if not sparq or not dense:
        return ""
    gain = min(dense) / min(sparq)
    return f"{gain:.2f}" + (": does not pay" if gain < MIN_GAIN else "")


if __name__ == "__main__":
    sys.exit(main())
