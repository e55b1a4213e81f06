"""Times from the profiler: what is read from a trace that a GPU could have left. (A CPU leaves none.)"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from tree_attn.measure.device_time import by_name, device_events, device_time


def traced(monkeypatch, events):
    """Has every trace hold `events`, (start, duration, name), beside some of no kernel."""
    line = lambda name, events: SimpleNamespace(
        name=name, events=[SimpleNamespace(start_ns=s, duration_ns=d, name=n) for s, d, n in events]
    )
    planes = [
        SimpleNamespace(name="/device:GPU:0", lines=[line("Stream #1", events), line("XLA Ops", [(0, 1, "op")])]),
        SimpleNamespace(name="/host:CPU", lines=[line("Stream #2", [(0, 1, "host")])]),
    ]
    monkeypatch.setattr(jax.profiler.ProfileData, "from_file", lambda path: SimpleNamespace(planes=planes))


def test_events_are_those_of_streams_of_gpus_in_order(monkeypatch):
    ran = []
    traced(monkeypatch, [(50, 10, "b"), (0, 20, "a")])
    assert device_events(lambda: ran.append(1)) == [(0, 20, "a"), (50, 60, "b")]
    assert ran == [1]


def test_kernels_by_name_are_means_of_a_launch_and_launches_a_call():
    events = [(0, 1000, "short"), (2000, 7000, "long"), (8000, 11000, "short")]
    assert list(by_name(events, 2).items()) == [("long", (5.0, 0.5)), ("short", (2.0, 1.0))]


def test_time_is_that_in_which_anything_ran(monkeypatch):
    """Two runs of two overlapping kernels each, of 15 us together; two calls in a run."""
    traced(monkeypatch, [(0, 10_000, "a"), (5_000, 10_000, "b"), (100_000, 10_000, "a"), (105_000, 10_000, "b")])
    timed = device_time(jax.jit(jnp.sin), jnp.ones(3), calls=2, n_iters=2, warmup=0)
    assert (timed.p10_us, timed.median_us, timed.p90_us) == (7.5, 7.5, 7.5)
    assert timed.kernels == {"a": (10.0, 0.5), "b": (10.0, 0.5)}


def test_without_a_gpu_it_says_so():
    assert device_events(lambda: jnp.ones(3).block_until_ready()) == []
    with pytest.raises(RuntimeError, match="0 device events in 2 runs: nothing ran on a GPU"):
        device_time(jax.jit(jnp.sin), jnp.ones(3), n_iters=2)
