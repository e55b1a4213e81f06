"""Times decode attention on one GPU: mosaic_gpu, cuDNN, flash-attn-jax, FlashInfer, and a single read of K and V.

    python3 scripts/bench_lean.py table --out docs/results/lean_h200/table.jsonl
    python3 scripts/bench_lean.py figures --out docs/results/lean_h200/figures.jsonl    # LeanAttention's 7, 8 and 12
    python3 scripts/bench_lean.py energy --out docs/results/lean_h200/energy.jsonl      # its Figure 13, by NVML
    python3 scripts/bench_lean.py plot --out docs/results/lean_h200/figures.jsonl       # plots beside the rows
    python3 scripts/bench_lean.py markdown --out docs/results/lean_h200/table.jsonl     # docs/results.md's table

A step is timed as by `bench_sweep.py`: in a chain of dependent steps, and by the profiler, without launches and gaps.
FlashInfer (optional) runs in a process of its own, the fastest of its ways counts, and its time to plan does not. The
file gets one JSON row per case and implementation. Set XLA_PYTHON_CLIENT_PREALLOCATE=false, so that both fit.
"""

import argparse
import ctypes
import dataclasses
import functools
import pathlib
import sys
import time

import numpy as np
import sweep_flashinfer
import sweep_ways
from benching import READ_GB_PER_S, MissingRows, chained
from lean_tables import KEYS, markdown, plot
from sweep_cases import Step


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeanStep:
    """One decoding step: lengths of the sequences (no lengths are passed if all are equal), heads, head dim."""

    lengths: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    figure: str = "table"

    @property
    def is_ragged(self) -> bool:
        """True if the sequences differ in length."""
        return len(set(self.lengths)) > 1

    @property
    def key_value_bytes(self) -> int:
        """Bytes of all keys and values, in bfloat16."""
        return 2 * 2 * sum(self.lengths) * self.num_kv_heads * self.head_dim

    @property
    def limit_us(self) -> float:
        """The time to read all keys and values once."""
        return self.key_value_bytes / READ_GB_PER_S / 1e3

    def step(self) -> Step:
        """Returns the step as the sweep times it."""
        return Step(
            family="ragged" if self.is_ragged else "dense",
            case=self.figure,
            lengths=self.lengths,
            gives_lengths=self.is_ragged,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
        )

    def row(self) -> dict:
        """Returns the fields of a row that name this step."""
        shape = {"batch": len(self.lengths), "max_keys": max(self.lengths), "sum_keys": sum(self.lengths)}
        heads = {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim}
        bounds = {"key_value_bytes": self.key_value_bytes, "limit_us": self.limit_us}
        return {"figure": self.figure, "is_ragged": self.is_ragged, "dtype": "bfloat16"} | shape | heads | bounds


def table_cases() -> list[LeanStep]:
    """Returns dense steps of several models, and two ragged batches."""
    dense = [(1, 10240, 16, 16), (1, 81920, 16, 16), (1, 16384, 32, 8), (1, 131072, 32, 8), (8, 32768, 32, 8)]
    dense += [(64, 4096, 32, 8)]
    cases = [LeanStep(lengths=(s,) * b, num_heads=n, num_kv_heads=k) for b, s, n, k in dense]
    ragged = [(65536, *[1024] * 31), tuple(2048 * (i + 1) for i in range(16))]
    return cases + [LeanStep(lengths=lengths, num_heads=32, num_kv_heads=8) for lengths in ragged]


def figure_cases() -> list[LeanStep]:
    """Returns LeanAttention's sweeps: context (Figure 7), batch and heads (Figure 8), heterogeneity (Figure 12)."""
    cases = []
    for heads in (8, 32, 64):
        for keys in (4096, 16384, 65536, 262144, 524288):
            cases.append(LeanStep(lengths=(keys,), num_heads=heads, num_kv_heads=heads, head_dim=64, figure="7"))
    for batch in (2, 8, 32):
        for heads in (8, 32):
            cases.append(
                LeanStep(lengths=(16384,) * batch, num_heads=heads, num_kv_heads=heads, head_dim=64, figure="8")
            )
    for percent in (25, 50, 75, 100):  # average length over longest
        longest, batch = 65536, 8
        mean = longest * percent / 100
        low = max(64, round(2 * mean - longest)) if percent < 100 else longest
        lengths = np.linspace(low, longest, batch) if percent >= 50 else [longest] + [(mean * batch - longest) / 7] * 7
        lengths = tuple(int(n) // 64 * 64 for n in lengths)
        cases.append(LeanStep(lengths=lengths, num_heads=32, num_kv_heads=32, head_dim=64, figure="12"))
    return cases


def main() -> int:
    """Runs one of the parts; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("table", "figures", "energy", "plot", "markdown"))
    parser.add_argument("--out", type=pathlib.Path, help="JSONL file, appended to; cases in it are not run again")
    parser.add_argument("--iters", type=int, default=32, help="dispatches of each chain")
    parser.add_argument("--flashinfer", metavar="FOLDER", help="where FlashInfer lies, if it is not installed")
    parser.add_argument("--budget-s", type=float, default=1e9, help="start no further case after so many seconds")
    args = parser.parse_args()
    if args.part in ("plot", "markdown"):
        return {"plot": plot, "markdown": markdown}[args.part](args.out)
    cases = {"table": table_cases, "figures": figure_cases, "energy": lambda: table_cases()[-2:] + table_cases()[1:2]}
    return run(cases[args.part](), args, with_energy=args.part == "energy")


def run(cases: list[LeanStep], args: argparse.Namespace, with_energy: bool) -> int:
    """Times every implementation on every case; prints a line and writes a row for each."""
    missing, start = MissingRows(args.out, KEYS), time.monotonic()
    flashinfer = None if with_energy else sweep_flashinfer.find(args.flashinfer)
    for case in cases:
        ways = {name: functools.partial(_time, case, name, args.iters, with_energy) for name in _implementations()}
        if flashinfer is not None:
            ways["flashinfer"] = functools.partial(flashinfer.fastest, case.step(), args.iters)
        for name, measured in ways.items():
            if time.monotonic() - start <= args.budget_s:
                labels = case.row() | {"implementation": name}
                missing.add(labels, measured, title=f"{_title(labels)}  {name:12s}")
    if flashinfer is not None:
        flashinfer.stop()
    return 0


def _implementations() -> list[str]:
    from tree_attn.local import flash_attn

    return ["mosaic_gpu", "cudnn", *(["flash_attn"] if flash_attn.unavailable() is None else [])]


def _time(case: LeanStep, implementation: str, n_iters: int, with_energy: bool) -> dict:
    step = case.step()
    way = sweep_ways.named(step, implementation)
    ((_, row),) = sweep_ways.time_ways(step, [way], n_iters=n_iters)
    return row | (_energy(step, way) if with_energy and "error" not in row else {})


def _energy(step: Step, way: sweep_ways.Way, seconds: float = 3.0) -> dict:
    """Measures joules per call and mean watts, by NVML's energy counter, over seconds of back-to-back calls."""
    import jax

    (query, copies, shared), calls = sweep_ways.inputs(step), sweep_ways.chains(step)[0]
    args = query, [way.cache(arrays) for arrays in copies], shared
    program = jax.jit(chained(jax.jit(way.run), calls))
    jax.block_until_ready(program(*args))
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    device, before, after = ctypes.c_void_p(), ctypes.c_ulonglong(), ctypes.c_ulonglong()
    nvml.nvmlInit_v2()
    nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device))
    read = lambda to: nvml.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(to))
    if read(before):
        return {"energy_error": "NVML gives no total energy on this device"}
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        jax.block_until_ready([program(*args) for _ in range(20)])
        count += 20 * calls
    elapsed = time.perf_counter() - start
    read(after)
    joules = (after.value - before.value) / 1e3
    return {"energy_mj_per_call": joules / count * 1e3, "power_w_mean": joules / elapsed, "energy_calls": count}


def _title(row: dict) -> str:
    keys = (
        f"{row['batch']} x {row['max_keys']}" if not row["is_ragged"] else f"{row['batch']} ragged, {row['sum_keys']}"
    )
    return f"{keys:>20s} {row['num_heads']}/{row['num_kv_heads']} of {row['head_dim']}, limit {row['limit_us']:7.1f} us"


if __name__ == "__main__":
    sys.exit(main())
