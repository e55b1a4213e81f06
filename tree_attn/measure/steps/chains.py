"""Chains of dependent steps, their times, and their device time: what benchmarks of one GPU share."""

import functools
import itertools
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from tree_attn.measure import provenance
from tree_attn.measure.device_time import device_time
from tree_attn.measure.latency import time_in_turn

IN_FLIGHT = 4  # chains dispatched before the host waits: enqueueing is then hidden, as in a decode loop
LONG_S = 0.002  # of a short chain, in which its own enqueueing is hidden
MAX_S, MIN_SAMPLES = 1.0, 4  # of all samples of a way; samples of one that would take longer
PROFILED = 8  # runs of the short chain under the profiler
TIMING = "profiler: union of kernel, copy and memset times in an unrolled chain of steps, over its calls"


def time_steps(step: Callable, query, caches: list, n_iters: int) -> dict:
    """Measures `query = step(query, *cache)` in chains of dependent steps, which run on one cache after another."""
    step = jax.jit(step)  # traced once for all steps
    counts = chain_lengths(len(caches))
    programs = [jax.jit(chained(step, calls)).lower(query, caches, ()).compile() for calls in counts]
    return time_chains(programs, (query, caches, ()), counts, n_iters) | {"caches": len(caches)}


def chain_lengths(copies: int, further: int = 32) -> tuple[int, int]:
    """Returns the calls of a short and a long chain: whole rounds of all copies, and about `further` more."""
    rounds = lambda calls: -(-calls // copies) * copies
    short = rounds(4)
    return short, short + rounds(further)


def chained(step: Callable, calls: int) -> Callable:
    """Returns `chain(query, caches, shared)`: `query = step(query, *cache, *shared)`, `calls` times, unrolled.

    It is unrolled as the layers of a model are: what depends on lengths alone is computed once for all of them. The
    last result and the first are returned: the first can be checked.
    """

    def chain(query, caches, shared):
        results = [query]
        for i in range(calls):
            results.append(step(results[-1], *caches[i % len(caches)], *shared))
        return results[-1], results[1]

    return chain


def time_chains(programs: Sequence[Callable], args: tuple, counts: tuple[int, int], n_iters: int) -> dict:
    """Returns a row's fields of a step's time in a chain, launch gaps included, and of its kernels' time.

    Args:
      programs: a short and a long chain of `counts` calls, compiled.
      n_iters: samples of each, or as many as take MAX_S; a sample is of several dispatches (`sampling`).
    """
    in_flight, n_iters = sampling(lambda: jax.block_until_ready(programs[0](*args)), counts, n_iters)

    def runs(program):
        return lambda: jax.block_until_ready([program(*args) for _ in range(in_flight)])

    short, long = map(runs, programs)
    timing = time_in_turn(short, long, chain=counts[0], long_chain=counts[1], in_flight=in_flight, n_iters=n_iters)
    try:
        kernels = profile(programs[0], *args, calls=counts[0], n_iters=min(n_iters, PROFILED))
        kernels["profiled_runs"] = kernels.pop("n_iters", None)
    except RuntimeError as error:  # the profiler lost events: the chain's time stands without it
        kernels = {"device_error": str(error)} | provenance.clocks()
    return kernels | chain_fields(timing)


def sampling(run: Callable[[], object], counts: tuple[int, int], n_iters: int) -> tuple[int, int]:
    """Returns how many chains to dispatch before the host waits, and how many samples to take.

    One chain as long as LONG_S is dispatched at a time. A way that is so slow that `n_iters` samples take longer than
    MAX_S gets fewer: how far behind it is shows all the same.

    Args:
      run: runs the short chain and waits for its end.
      counts: calls of the short and the long chain.
    """
    run()
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    in_flight = 1 if seconds > LONG_S else IN_FLIGHT
    affordable = int(MAX_S / (in_flight * seconds * (1 + counts[1] / counts[0])))
    return in_flight, max(min(n_iters, affordable), min(n_iters, MIN_SAMPLES))


def chain_fields(timing) -> dict:
    """Returns a row's fields of the timing of two chains."""
    return {
        "chain_us_median": timing.median_us,
        "chain_us_p10": timing.p10_us,
        "chain_us_p90": timing.p90_us,
        "program_us": timing.program_us,
        "n_iters": timing.n_iters,
        "calls": timing.chain,
        "long_calls": timing.long_chain,
        "chain_timing": timing.method,
    }


def profile(program: Callable, *args, calls: int, n_iters: int) -> dict:
    """Returns a row's fields of the device time of a program of `calls` calls, and of the clocks while it runs."""
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


def max_errors(found, expected, sequences: slice) -> list[float]:
    """Returns the largest errors of out and lse, `found[sequences]` beside `expected`; raises if one is too large."""
    wide = lambda x: x.astype(jnp.float32)
    errors = [float(jnp.abs(wide(a[sequences]) - wide(b)).max()) for a, b in zip(found, expected)]
    assert errors[0] < 0.02 and errors[1] < 0.01, f"out and lse are off by {errors}"
    return errors


def normals(dtype="bfloat16"):
    """Returns `draw(*shape)`: normal numbers, made on the device."""
    normal = jax.jit(functools.partial(jax.random.normal, dtype=dtype), static_argnums=1)
    number = itertools.count()
    return lambda *shape: normal(jax.random.fold_in(jax.random.key(0), next(number)), shape)


def fastest(found: dict[str, dict]) -> dict:
    """Returns the fields of the fastest of several variants of a way, by the chain, with the times of all of them."""
    times = {name: fields.get("chain_us_median") for name, fields in found.items()}
    timed = {name: us for name, us in times.items() if us}
    if not timed:
        return next(iter(found.values()))
    best = min(timed, key=timed.__getitem__)
    return found[best] | {"variant": best, "variants_chain_us": times}
