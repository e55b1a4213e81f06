"""Times decode attention on one GPU: mosaic_gpu, cuDNN, flash-attn-jax, FlashInfer, and a single read of K and V.

    python3 scripts/bench_lean.py table --out docs/results/lean_h200/table.jsonl
    python3 scripts/bench_lean.py markdown --out docs/results/lean_h200/table.jsonl     # docs/results.md's table

A step is timed as by `bench_sweep.py`: in a chain of dependent steps, and by the profiler, without launches and gaps.
FlashInfer (optional) runs in a process of its own, the fastest of its ways counts, and its time to plan does not. The
file gets one JSON row per case and implementation. Set XLA_PYTHON_CLIENT_PREALLOCATE=false, so that both fit.
"""

import argparse
import functools
import pathlib
import sys
import time

import sweep_flashinfer
from benching import MissingRows
from lean_tables import KEYS, markdown

from tree_attn.measure.steps.lean import LeanStep, implementations, time_way


def table_cases() -> list[LeanStep]:
    """Returns dense steps of several models, and two ragged batches."""
    dense = [(1, 10240, 16, 16), (1, 81920, 16, 16), (1, 16384, 32, 8), (1, 131072, 32, 8), (8, 32768, 32, 8)]
    dense += [(64, 4096, 32, 8)]
    cases = [LeanStep(lengths=(s,) * b, num_heads=n, num_kv_heads=k) for b, s, n, k in dense]
    ragged = [(65536, *[1024] * 31), tuple(2048 * (i + 1) for i in range(16))]
    return cases + [LeanStep(lengths=lengths, num_heads=32, num_kv_heads=8) for lengths in ragged]


def main() -> int:
    """Runs one of the parts; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("table", "markdown"))
    parser.add_argument("--out", type=pathlib.Path, help="JSONL file, appended to; cases in it are not run again")
    parser.add_argument("--iters", type=int, default=32, help="dispatches of each chain")
    parser.add_argument("--flashinfer", metavar="FOLDER", help="where FlashInfer lies, if it is not installed")
    parser.add_argument("--budget-s", type=float, default=1e9, help="start no further case after so many seconds")
    args = parser.parse_args()
    return markdown(args.out) if args.part == "markdown" else run(table_cases(), args)


def run(cases: list[LeanStep], args: argparse.Namespace) -> int:
    """Times every implementation on every case; prints a line and writes a row for each."""
    missing, start = MissingRows(args.out, KEYS), time.monotonic()
    flashinfer = sweep_flashinfer.find(args.flashinfer)
    for case in cases:
        ways = {name: functools.partial(time_way, case, name, args.iters) for name in implementations()}
        if flashinfer is not None:
            ways["flashinfer"] = functools.partial(flashinfer.fastest, case.step(), args.iters)
        for name, measured in ways.items():
            if time.monotonic() - start <= args.budget_s:
                labels = case.row() | {"implementation": name}
                missing.add(labels, measured, title=f"{_title(labels)}  {name:12s}")
    if flashinfer is not None:
        flashinfer.stop()
    return 0


def _title(row: dict) -> str:
    keys = (
        f"{row['batch']} x {row['max_keys']}" if not row["is_ragged"] else f"{row['batch']} ragged, {row['sum_keys']}"
    )
    return f"{keys:>20s} {row['num_heads']}/{row['num_kv_heads']} of {row['head_dim']}, limit {row['limit_us']:7.1f} us"


if __name__ == "__main__":
    sys.exit(main())
