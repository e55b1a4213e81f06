"""Device time of a program: its kernels' time, from the profiler, without launches and gaps.

For kernels of a few microseconds `latency.latency_us` times their enqueueing, and this module the kernels.
"""

import collections
import dataclasses
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceTime:
    """Time per call in which at least one kernel, copy or memset ran, in microseconds.

    Attributes:
      median_us, p10_us, p90_us: median, 10th and 90th percentile over `n_iters` runs.
      kernels: name -> (microseconds of one launch, launches per call), means. Overlapping kernels each count in full.
    """

    median_us: float
    p10_us: float
    p90_us: float
    n_iters: int
    kernels: dict[str, tuple[float, float]]


def device_time(fn: Callable, *args: Any, calls: int = 1, n_iters: int = 32, warmup: int = 3) -> DeviceTime:
    """Profiles `fn(*args)`, a jitted program that makes `calls` timed calls one after another.

    Raises:
      RuntimeError: the profiler saw no device event (on a CPU there is none), or runs that differ.

    Example:
      >>> device_time(jax.jit(lambda q, k, v: attend(q, k, v).out), query, key, value).median_us
    """
    for _ in range(warmup):
        jax.block_until_ready(fn(*args))
    events = device_events(lambda: [jax.block_until_ready(fn(*args)) for _ in range(n_iters)])
    if not events or len(events) % n_iters:
        raise RuntimeError(f"{len(events)} device events in {n_iters} runs: nothing ran on a GPU, or runs differ")
    runs = np.array_split(np.array([event[:2] for event in events]), n_iters)
    busy_us = [_busy_ns(run) / 1e3 / calls for run in runs]
    p10, median, p90 = np.percentile(busy_us, [10, 50, 90])
    return DeviceTime(
        median_us=float(median),
        p10_us=float(p10),
        p90_us=float(p90),
        n_iters=n_iters,
        kernels=by_name(events, n_iters * calls),
    )


def device_events(run: Callable[[], Any]) -> list[tuple[float, float, str]]:
    """Returns kernels, copies and memsets of `run()` as (start, end, name) in ns, by their start; none on a CPU."""
    return sorted(event for events in events_of_devices(run).values() for event in events)


def events_of_devices(run: Callable[[], Any]) -> dict[str, list[tuple[float, float, str]]]:
    """Returns the events of `device_events` by the name of their device; this process's devices only."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (trace,) = pathlib.Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(trace))
    of_plane = lambda plane: (event for line in plane.lines if "Stream" in line.name for event in line.events)
    return {
        plane.name: sorted((e.start_ns, e.start_ns + e.duration_ns, e.name) for e in of_plane(plane))
        for plane in data.planes
        if "GPU" in plane.name
    }


def _busy_ns(intervals: np.ndarray) -> float:
    """Returns the length of the union of intervals `[n, 2]`, sorted by start."""
    busy, reached = 0.0, -np.inf
    for start, end in intervals:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy


def by_name(events, calls: int) -> dict[str, tuple[float, float]]:
    """Returns `DeviceTime.kernels` for the events of `calls` calls, the longest first."""
    spent: dict[str, list[float]] = collections.defaultdict(list)
    for start, end, name in events:
        spent[name].append((end - start) / 1e3)
    return {name: (float(np.mean(us)), len(us) / calls) for name, us in sorted(spent.items(), key=lambda x: -sum(x[1]))}
