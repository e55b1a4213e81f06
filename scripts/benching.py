"""What benchmarks of one GPU share: where rows come from, steps that depend on one another, and their device time."""

import functools
import itertools
import json
import pathlib
import sys
from collections.abc import Callable, Sequence

import numpy as np

# A plain copy's rate on an H200; long runs reach 4640 (docs/results/reduce_4xh200), and its datasheet says 4800.
READ_GB_PER_S = 4300
ROTATE_BYTES = 200e6  # three times the L2 cache
TIMING = "profiler: union of kernel, copy and memset times in an unrolled chain of steps, over its calls"


class Rows:
    """A JSONL file that is appended to; rows that are in it are not made again."""

    def __init__(self, path: pathlib.Path, keys: Sequence[str]):
        import jax

        from tree_attn.measure import provenance

        self._path, self._keys = path, keys
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        self._done = {self._key(row) for row in rows}
        path.parent.mkdir(parents=True, exist_ok=True)
        hardware = provenance.hardware(jax.local_devices()[:1])
        self._origin = {"hardware": hardware, "git_commit": provenance.git_commit(), "n_devices": 1}
        self._origin |= {"versions": provenance.versions(), "command": " ".join(["python3", *sys.argv])}

    def add(self, labels: dict, measured: Callable[[], dict]) -> None:
        """Makes the row of `labels`, unless it is there, writes it and prints a line."""
        if self._key(labels) in self._done:
            return
        row = labels | measured() | self._origin
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        us = row.get("device_us_median")
        result = f"{us:8.1f} us, {us / row['limit_us']:5.2f} x limit" if us else row["error"][:200]
        print(*(f"{labels[key]!s:>8s}" for key in self._keys), result, flush=True)

    def _key(self, row: dict) -> tuple:
        return tuple(row[key] for key in self._keys)


def time_steps(step: Callable, query, caches: list, n_iters: int) -> dict:
    """The device time of `query = step(query, *cache)`, which runs on one cache after another."""
    import jax

    from tree_attn.measure.device_time import device_time

    calls = len(caches) * max(1, 8 // len(caches))
    step = jax.jit(step)  # traced once for all steps

    def chain(query, caches):
        for i in range(calls):
            query = step(query, *caches[i % len(caches)])
        return query

    timed = device_time(jax.jit(chain), query, caches, calls=calls, n_iters=n_iters)
    return {
        "device_us_median": timed.median_us,
        "device_us_p10": timed.p10_us,
        "device_us_p90": timed.p90_us,
        "n_iters": n_iters,
        "calls": calls,
        "caches": len(caches),
        "timing": TIMING,
        "kernels": timed.kernels,
    }


def torch_device_us(call, calls: int, n_iters: int = 15) -> float:
    """Microseconds of kernels, copies and memsets for each of `calls` calls that `call()` makes; a median of three."""
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


def normals(dtype="bfloat16"):
    """Returns `draw(*shape)`: normal numbers, made on the device."""
    import jax

    normal = jax.jit(functools.partial(jax.random.normal, dtype=dtype), static_argnums=1)
    number = itertools.count()
    return lambda *shape: normal(jax.random.fold_in(jax.random.key(0), next(number)), shape)


def markdown(path: pathlib.Path, label: Callable[[dict], str], ways: Sequence[str]) -> int:
    """Prints device times, one line per case, in microseconds, with the commits that its rows were measured at."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    print(f"| step | {' | '.join(ways)} | limit | commit |")
    print("|---|" + "---|" * (len(ways) + 2))
    for case in dict.fromkeys(map(label, rows)):
        own = [row for row in rows if label(row) == case]
        times = {row["way"]: row.get("device_us_median") for row in own}
        cells = " | ".join(f"{times[way]:,.1f}" if times.get(way) else "" for way in ways)
        commits = ", ".join(dict.fromkeys(row["git_commit"] for row in own))
        print(f"| {case} | {cells} | {own[0]['limit_us']:,.1f} | {commits} |")
    return 0
