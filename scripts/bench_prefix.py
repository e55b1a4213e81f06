"""Times shared prefixes on one GPU: with and without sharing, beside cuDNN twice and a merge, and FlashInfer.

    python3 scripts/bench_prefix.py table --out docs/results/prefix_h200/table.jsonl
    python3 scripts/bench_prefix.py markdown --out docs/results/prefix_h200/llama.jsonl     # docs/results.md's table
    python3 scripts/bench_prefix.py switch --out docs/results/prefix_h200/switch.jsonl      # when sharing pays
    python3 scripts/bench_prefix.py llama --out docs/results/prefix_h200/llama.jsonl        # heads as Llamas have them

This is Hydragen's microbenchmark: a batch of sequences with one new token each, a prefix that all share, and a suffix
for each. Device time is measured as by `bench_sweep.py`. Set XLA_PYTHON_CLIENT_PREALLOCATE=false.
"""

import argparse
import dataclasses
import functools
import pathlib
import sys

import sweep_flashinfer
from benching import MissingRows, chosen, markdown

from tree_attn.measure.steps.prefix import WAYS, SharedPrefixStep, time_way

CASES = [SharedPrefixStep(batch=b, prefix=p) for b, p in ((64, 2048), (256, 16384), (1024, 2048), (1024, 16384))]
# Batch and prefix, with the heads of Llama 3's 8B: sharing saves prefix x (batch - 1) keys.
SMALL = [
    (2, 512),
    (2, 2048),
    (2, 8192),
    (4, 512),
    (4, 2048),
    (8, 256),
    (8, 1024),
    (16, 128),
    (16, 512),
    (64, 64),
    (64, 256),
]
LLAMA = [(16, 32), (64, 32), (256, 32), (1024, 32), (16, 8), (64, 8), (256, 8), (16, 2), (64, 2)]  # batch, KV heads
LLAMA_CASES = [
    SharedPrefixStep(batch=b, prefix=8192, suffix=64, num_heads=32, num_kv_heads=k, ragged=True) for b, k in LLAMA
]
SWITCH_CASES = [SharedPrefixStep(batch=b, prefix=p, suffix=64, num_heads=32, num_kv_heads=8) for b, p in SMALL]


def main() -> int:
    """Runs one of the parts; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("table", "switch", "llama", "markdown"))
    parser.add_argument("--out", type=pathlib.Path, help="JSONL file, appended to; rows in it are not made again")
    parser.add_argument("--ways", help="only those with this in their name")
    parser.add_argument("--cases", help="which of the part's cases, e.g. 0,3 (default: all)")
    parser.add_argument("--iters", type=int, default=32, help="dispatches of each chain")
    parser.add_argument("--flashinfer", metavar="FOLDER", help="where FlashInfer lies, if it is not installed")
    args = parser.parse_args()
    if args.part == "markdown":
        return markdown(args.out, _label, [*WAYS, "flashinfer"], SharedPrefixStep)
    missing = MissingRows(args.out, ("batch", "prefix", "num_kv_heads", "way"))
    cases = {"table": CASES, "switch": SWITCH_CASES, "llama": LLAMA_CASES}[args.part]
    names = {"table": tuple(WAYS), "switch": ("mosaic_gpu", "mosaic_gpu, not shared"), "llama": ("mosaic_gpu", "cudnn")}
    ways = {name: WAYS[name] for name in names[args.part]}
    flashinfer = None if args.ways or args.part != "table" else sweep_flashinfer.find(args.flashinfer)
    for case in chosen(cases, args.cases):
        labels = dataclasses.asdict(case) | {"dtype": "bfloat16", "limit_us": case.limit_us}
        for way, (is_shared, implementation) in ways.items():
            if (args.ways or "") in way:
                measure = functools.partial(time_way, case, is_shared, implementation, args.iters)
                missing.add(labels | {"way": way}, measure)
        if flashinfer is not None:
            measure = functools.partial(flashinfer.fastest, case.step(is_shared=True), args.iters)
            missing.add(labels | {"way": "flashinfer"}, measure)
    if flashinfer is not None:
        flashinfer.stop()
    return 0


def _label(row: dict) -> str:
    heads = row["num_heads"], row["num_kv_heads"]
    suffix = "" if heads == (8, 1) else f", {heads[0]}/{heads[1]} heads"
    return f"{row['batch']:,}, {row['prefix']:,}, {row['suffix']}{suffix}"


if __name__ == "__main__":
    sys.exit(main())
