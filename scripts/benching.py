"""Shared parts of benchmarks on one GPU: rows that a rerun skips, chains of dependent steps, and their device time."""

import dataclasses
import functools
import itertools
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable, Sequence

import numpy as np

from tree_attn.cost import datasheets
from tree_attn.measure import provenance, rows

# Limits are those of the datasheet, which nothing exceeds: 4,800 GB/s and 989.5 TFLOP/s on an H200.
_PEAKS = datasheets.rates("NVIDIA H200")
READ_GB_PER_S = _PEAKS["read_bytes_per_s"] / 1e9
PRODUCTS_TFLOPS = _PEAKS["product_flops_per_s"] / 1e12
ROTATE_BYTES = 200e6  # three times the L2 cache
TIMING = "profiler: union of kernel, copy and memset times in an unrolled chain of steps, over its calls"


class MissingRows:
    """Rows of a file that are not in it yet: each is measured, written with its provenance, and printed.

    Attributes:
      keys: names of the fields that tell rows apart.
    """

    def __init__(self, path: pathlib.Path, keys: Sequence[str]):
        """Opens the file of rows, and notes which are there."""
        self.keys = keys
        self._writer = rows.RowWriter(path)
        self._origin = origin()

    def has(self, labels: dict) -> bool:
        """Returns whether a row with these labels is in the file."""
        return any(self._key(row) == self._key(labels) for row in self._writer.rows)

    def add(self, labels: dict, measure: Callable[[], dict], title: str | None = None) -> None:
        """Measures the row of `labels` unless the file has it, writes it and prints a line."""
        if self.has(labels):
            return
        row = labels | measure() | self._origin
        self._writer.append(row)
        us = row.get("device_us_median")
        result = f"{us:8.1f} us, {us / row['limit_us']:5.2f} x limit" if us else row["error"][:200]
        print(title or " ".join(f"{labels[key]!s:>8s}" for key in self.keys), result, flush=True)

    def _key(self, row: dict) -> tuple:
        return tuple(row.get(key) for key in self.keys)


def time_steps(step: Callable, query, caches: list, n_iters: int) -> dict:
    """Measures the device time of `query = step(query, *cache)`, which runs on one cache after another."""
    import jax

    calls = len(caches) * max(1, 8 // len(caches))
    step = jax.jit(step)  # traced once for all steps

    def chain(query, caches):
        for i in range(calls):
            query = step(query, *caches[i % len(caches)])
        return query

    return profile(jax.jit(chain), query, caches, calls=calls, n_iters=n_iters) | {"caches": len(caches)}


def profile(program: Callable, *args, calls: int, n_iters: int) -> dict:
    """Returns a row's fields of the device time of a program of `calls` calls, and of the clocks while it runs."""
    import jax

    from tree_attn.measure.device_time import device_time

    timed = device_time(program, *args, calls=calls, n_iters=n_iters)
    fields = {
        "device_us_median": timed.median_us,
        "device_us_p10": timed.p10_us,
        "device_us_p90": timed.p90_us,
        "n_iters": n_iters,
        "calls": calls,
        "timing": TIMING,
        "kernels": timed.kernels,
    }
    return fields | provenance.clocks_during(lambda: jax.block_until_ready(program(*args)))


def origin() -> dict:
    """Returns what every row of a benchmark on one GPU says of its run: date, host, driver, commit, command."""
    import jax

    return provenance.of_script(jax.local_devices()[:1]) | {"n_devices": 1}


def torch_device_us(call, calls: int, n_iters: int = 15) -> float:
    """Returns microseconds of kernels, copies and memsets for each of the `calls` in `call()`; a median of three."""
    import torch

    for _ in range(5):
        call()
    torch.cuda.synchronize()
    samples = []
    for _ in range(3):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(n_iters):
                call()
            torch.cuda.synchronize()
        events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        samples.append(sum(event.time_range.elapsed_us() for event in events) / n_iters / calls)
    return float(np.median(samples))


def flashinfer_rows(script: str, request: str = "") -> list[dict]:
    """Returns FlashInfer's row of each case, from `script flashinfer` as a process; none where it is not installed."""
    worker = subprocess.run([sys.executable, script, "flashinfer"], input=request, capture_output=True, text=True)
    if worker.returncode:
        print(f"flashinfer did not run: {(worker.stderr.strip().splitlines() or ['no message'])[-1]}")
        return []
    return json.loads(worker.stdout.strip().splitlines()[-1])


def max_errors(found, expected, sequences: slice) -> list[float]:
    """Returns the largest errors of out and lse, `found[sequences]` beside `expected`; raises if one is too large."""
    import jax.numpy as jnp

    wide = lambda x: x.astype(jnp.float32)
    errors = [float(jnp.abs(wide(a[sequences]) - wide(b)).max()) for a, b in zip(found, expected)]
    assert errors[0] < 0.02 and errors[1] < 0.01, f"out and lse are off by {errors}"
    return errors


def normals(dtype="bfloat16"):
    """Returns `draw(*shape)`: normal numbers, made on the device."""
    import jax

    normal = jax.jit(functools.partial(jax.random.normal, dtype=dtype), static_argnums=1)
    number = itertools.count()
    return lambda *shape: normal(jax.random.fold_in(jax.random.key(0), next(number)), shape)


def chosen(cases: Sequence, indices: str | None) -> list:
    """Returns the cases that `--cases` names ("0,3"), all of them for None."""
    return list(cases) if indices is None else [cases[int(i)] for i in indices.split(",")]


def markdown(path: pathlib.Path, label: Callable[[dict], str], ways: Sequence[str], step_type: type) -> int:
    """Prints device times, one line per case, in microseconds, with the commits that its rows were measured at.

    The limit is made from the row's shape, `step_type(...).limit_us`: rows of all days refer to the same rates.
    """
    all_rows = rows.read(path)
    print(f"| step | {' | '.join(ways)} | limit | commit |")
    print("|---|" + "---|" * (len(ways) + 2))
    for case in dict.fromkeys(map(label, all_rows)):
        of_case = [row for row in all_rows if label(row) == case]
        times = {row["way"]: row.get("device_us_median") for row in of_case}
        cells = " | ".join(f"{times[way]:,.1f}" if times.get(way) else "" for way in ways)
        commits = ", ".join(dict.fromkeys(row["git_commit"] for row in of_case))
        shape = {field.name for field in dataclasses.fields(step_type)} & of_case[0].keys()
        limit_us = step_type(**{name: of_case[0][name] for name in shape}).limit_us
        print(f"| {case} | {cells} | {limit_us:,.1f} | {commits} |")
    return 0
