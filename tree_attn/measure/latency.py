"""Timers of compiled programs.

The cost of calling a program must not count as attention. `latency_us` therefore compiles a chain of dependent calls
into one program, and a longer chain into another. The difference of their times is due to the further calls alone.
Kernels are still enqueued one by one within a program: work shorter than its own enqueueing (a few microseconds) is
bounded by that.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Latency of one call in microseconds.

    One sample times a program of `chain` calls, or a pair of programs of `chain` and `long_chain` calls. A pair
    separates the fixed cost of a program from the latency.

    Attributes:
      median_us, p10_us, p90_us: median, 10th and 90th percentile over the samples. Noise may make `p10_us` negative.
      program_us: fixed cost of a program, median; noise may make it negative. None without a pair, and then 1/`chain`
        of that cost is part of the latency.
      n_iters: number of samples.
      chain, long_chain: calls in the programs; `long_chain` is None without a pair.
      compile_s: seconds to compile the programs, part of no sample.
      method: the division in words.
    """

    median_us: float
    p10_us: float
    p90_us: float
    program_us: float | None
    n_iters: int
    chain: int
    long_chain: int | None
    compile_s: float
    method: str


def chain_calls(fn: Callable, length: int) -> Callable:
    """Returns `chained(query, *rest)`: `fn` called `length` times, each on the output of the one before.

        query_0 = query,    query_{i+1} = fn(query_i, *rest),    chained = query_length

    A call cannot start before the last has ended, like the layers of a decoder. `fn` must return an array, or a pytree
    of arrays, with the shapes of its first argument. The other arguments pass a barrier with the query in every turn:
    without it XLA finds that a ring's transfers do not depend on the query, and runs them once for the whole chain.
    The turns are a loop, because JAX 0.10's CPU compiler drops the barriers of unrolled turns.

    Raises:
      ValueError: `length` is not a positive integer.
    """
    if not isinstance(length, int) or length < 1:
        raise ValueError(f"length must be an integer of at least 1, got {length!r}")

    def chained(query, *rest):
        def body(_, carried):
            barred_query, barred_rest = jax.lax.optimization_barrier((carried, rest))
            return jax.tree.map(lambda new, old: new.astype(old.dtype), fn(barred_query, *barred_rest), carried)

        return jax.lax.fori_loop(0, length, body, query)

    return chained


def latency_us(
    fn: Callable,
    *args: Any,
    n_iters: int = 32,
    warmup: int = 3,
    chain: int = 1,
    long_chain: int | None = None,
    on_sample: Callable[[], None] | None = None,
    on_compiled: Callable[[jax.stages.Compiled, int], None] | None = None,
) -> Timing:
    """Times `fn(*args)` after compiling it and warming up; see `Timing`.

        without `long_chain`:    us(chain) / chain
        with it:                 (us(long_chain) - us(chain)) / (long_chain - chain)

    The first counts 1/`chain` of a program's launch, and of waking up after it, as latency. The second does not; its
    two programs run in turn. It means nothing where noise exceeds the time of the further calls, which happens on
    emulated devices. Neither number of calls follows from a clock: processes that run a program together must agree.

    Args:
      fn: a traceable function, jitted or not. For chains of more than 1 see `chain_calls`.
      args: its arguments, on their devices already.
      n_iters: samples; the median of fewer than ten says little.
      warmup: samples run first and thrown away.
      chain: calls in one compiled program; 1 without `long_chain` times single calls, host launch included.
      long_chain: calls in the other program; 4 times `chain`, say.
      on_sample: called after every sample, for a progress bar.
      on_compiled: called with each program and its number of calls before anything is timed, for checks.

    Raises:
      ValueError: `n_iters`, `warmup`, `chain` or `long_chain` out of range.
      RuntimeError: the longer chain did not take longer, by the median.

    Example:
      >>> step = lambda q, k, v: tree_decode(q, k, v, axis_name="seq", mesh=mesh)
      >>> latency_us(step, q, k, v, chain=32, long_chain=128).median_us
    """
    if n_iters < 1 or warmup < 0:
        raise ValueError(f"n_iters must be at least 1 and warmup at least 0, got n_iters={n_iters}, warmup={warmup}")
    if long_chain is not None and long_chain <= chain:
        raise ValueError(f"long_chain must be at least {chain + 1}, for chain={chain}, got {long_chain}")
    lengths = (chain,) if long_chain is None else (chain, long_chain)
    programs, compile_s = [], 0.0
    for length in lengths:
        lowered = jax.jit(fn if length == 1 else chain_calls(fn, length)).lower(*args)
        start = time.perf_counter()
        programs.append(lowered.compile())
        compile_s += time.perf_counter() - start
        if on_compiled is not None:
            on_compiled(programs[-1], length)
    runs = [functools.partial(lambda program: jax.block_until_ready(program(*args)), program) for program in programs]
    host_us = []
    for _ in range(warmup + n_iters):
        host_us.append([_host_us(run) for run in runs])
        if on_sample is not None:
            on_sample()
    return _timing(np.array(host_us[warmup:]), lengths, compile_s)


def time_in_turn(
    short: Callable[[], Any],
    long: Callable[[], Any],
    *,
    chain: int,
    long_chain: int,
    in_flight: int = 1,
    n_iters: int = 32,
    warmup: int = 3,
) -> Timing:
    """Times two programs of `chain` and `long_chain` dependent calls in turn; see `Timing`.

        (us(long) - us(short)) / (long_chain - chain)

    What a program costs beside its calls is in neither quantile. Gaps between the launches of a call, and between two
    calls, are in both. With `in_flight` of 1 the host's time to enqueue a call is in both as well, where it exceeds
    the device's. With more the host enqueues a program while the device runs the one before, as a decode loop does.

    Args:
      short, long: dispatch a program `in_flight` times, and return when the device has finished all.
      in_flight: programs that are dispatched before the host waits.
      n_iters: samples: waits for each program.

    Raises:
      RuntimeError: the longer chain did not take longer, by the median.
    """
    host_us = np.array([[_host_us(short), _host_us(long)] for _ in range(warmup + n_iters)])[warmup:] / in_flight
    timing = _timing(host_us, (chain, long_chain), 0.0)
    words = f"; {in_flight} of each dispatched before the host waits" if in_flight > 1 else ""
    return dataclasses.replace(timing, method=timing.method + words)


def _timing(host_us: np.ndarray, lengths: tuple[int, ...], compile_s: float) -> Timing:
    """Returns the timing of host times `[samples, programs]`."""
    chain, long_chain = lengths[0], lengths[1] if len(lengths) > 1 else None
    call_us, program_us = _split(host_us, lengths)
    p10, median, p90 = np.percentile(call_us, [10, 50, 90])
    if median <= 0:
        raise RuntimeError(f"{long_chain} calls took no longer than {chain}: noise hides what a call takes")
    return Timing(
        median_us=float(median),
        p10_us=float(p10),
        p90_us=float(p90),
        program_us=program_us,
        n_iters=len(host_us),
        chain=chain,
        long_chain=long_chain,
        compile_s=compile_s,
        method=_method(chain, long_chain),
    )


def _host_us(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6


def _split(host_us: np.ndarray, lengths: tuple[int, ...]) -> tuple[np.ndarray, float | None]:
    """Splits host times `[samples, programs]` into the time of a call, per sample, and the rest of a program (median).

    Each pair is split by itself: clocks drift, and hardly do so between the two programs of a pair.
    """
    short_us = host_us[:, 0]
    if len(lengths) == 1:
        return short_us / lengths[0], None
    call_us = (host_us[:, 1] - short_us) / (lengths[1] - lengths[0])
    return call_us, float(np.median(short_us - lengths[0] * call_us))


def _method(chain: int, long_chain: int | None) -> str:
    if long_chain is not None:
        return (
            f"in-graph chains of {chain} and of {long_chain} dependent calls, one program each, timed on the host in "
            f"turn; their difference divided by {long_chain - chain}"
        )
    if chain == 1:
        return "single calls timed on the host, launch included"
    return f"in-graph chain of {chain} dependent calls in one program, timed on the host and divided by {chain}"
