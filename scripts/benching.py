"""Shared parts of benchmarks on one GPU: rows that a rerun skips, chains of dependent steps, and their device time."""

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Sequence

from tree_attn.cost import datasheets
from tree_attn.measure import provenance, rows

# Limits are those of the datasheet, which nothing exceeds: 4,800 GB/s and 989.5 TFLOP/s on an H200.
_PEAKS = datasheets.rates("NVIDIA H200")
READ_GB_PER_S = _PEAKS["read_bytes_per_s"] / 1e9
PRODUCTS_TFLOPS = _PEAKS["product_flops_per_s"] / 1e12
IN_FLIGHT = 4  # chains dispatched before the host waits: enqueueing is then hidden, as in a decode loop
ROTATE_BYTES = 200e6  # three times the L2 cache of an H200
TIMING = "profiler: union of kernel, copy and memset times in an unrolled chain of steps, over its calls"


class MissingRows:
    """Rows of a file that are not in it yet: each is measured, written with its provenance, and printed.

    Attributes:
      keys: names of the fields that tell rows apart.
    """

    def __init__(self, path: pathlib.Path, keys: Sequence[str]):
        """Opens the file of rows, and notes which are there."""
        self.keys = keys
        self._writer = rows.MeasuredRows(path)
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
        chain, us = row.get("chain_us_median"), row.get("device_us_median")
        times = f"{us:8.1f} us" + (f", chain {chain:8.1f} us, {chain / row['limit_us']:5.2f} x limit" if chain else "")
        result = times if us else row["error"][:200]
        print(title or " ".join(f"{labels[key]!s:>8s}" for key in self.keys), result, flush=True)

    def _key(self, row: dict) -> tuple:
        return tuple(row.get(key) for key in self.keys)


def time_steps(step: Callable, query, caches: list, n_iters: int) -> dict:
    """Measures `query = step(query, *cache)` in chains of dependent steps, which run on one cache after another."""
    import jax

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
      n_iters: samples of each; each sample is of IN_FLIGHT dispatches.
    """
    import jax

    from tree_attn.measure.latency import time_in_turn

    def runs(program):
        return lambda: jax.block_until_ready([program(*args) for _ in range(IN_FLIGHT)])

    short, long = map(runs, programs)
    timing = time_in_turn(short, long, chain=counts[0], long_chain=counts[1], in_flight=IN_FLIGHT, n_iters=n_iters)
    try:
        kernels = profile(programs[0], *args, calls=counts[0], n_iters=n_iters)
    except RuntimeError as error:  # the profiler lost events: the chain's time stands without it
        kernels = {"device_error": str(error)} | provenance.clocks()
    return kernels | chain_fields(timing)


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


def cell(row: dict) -> str:
    """Returns a row's time in a table: of the kernels, and after a slash in a chain, where that was measured."""
    times = [row[name] for name in ("device_us_median", "chain_us_median") if row.get(name)]
    return " / ".join(f"{us:,.1f}" for us in times)


def fastest(found: dict[str, dict]) -> dict:
    """Returns the fields of the fastest of several variants of a way, by the chain, with the times of all of them."""
    times = {name: fields.get("chain_us_median") for name, fields in found.items()}
    timed = {name: us for name, us in times.items() if us}
    if not timed:
        return next(iter(found.values()))
    best = min(timed, key=timed.__getitem__)
    return found[best] | {"variant": best, "variants_chain_us": times}


def markdown(
    path: pathlib.Path,
    label: Callable[[dict], str],
    ways: Sequence[str],
    step_type: type,
    verdict: tuple[str, Callable[[dict[str, float]], str]] | None = None,
) -> int:
    """Prints times, one line per case, in microseconds, with the commits that its rows were measured at.

    The limit is made from the row's shape, `step_type(...).limit_us`: rows of all days refer to the same rates. The
    share is what the first way reaches of it, in the chain where that was measured.

    Args:
      verdict: title and text of one more column, made from the chain time of each way; it is left out where rows have
        no such times.
    """
    all_rows = rows.read(path)
    if not any("chain_us_median" in row for row in all_rows):
        verdict = None
    titles = ["step", *ways, "limit", "share", *([verdict[0]] if verdict else []), "commit"]
    print(f"| {' | '.join(titles)} |")
    print("|" + "---|" * len(titles))
    for case in dict.fromkeys(map(label, all_rows)):
        of_case = [row for row in all_rows if label(row) == case]
        cells = [cell(next((row for row in of_case if row["way"] == way), {})) for way in ways]
        shape = {field.name for field in dataclasses.fields(step_type)} & of_case[0].keys()
        limit_us = step_type(**{name: of_case[0][name] for name in shape}).limit_us
        cells += [f"{limit_us:,.1f}", _share(limit_us, next((row for row in of_case if row["way"] == ways[0]), {}))]
        if verdict:
            cells.append(verdict[1]({row["way"]: us for row in of_case if (us := row.get("chain_us_median"))}))
        commits = ", ".join(dict.fromkeys(row["git_commit"] for row in of_case))
        print(f"| {' | '.join([case, *cells, commits])} |")
    return 0


def _share(limit_us: float, row: dict) -> str:
    us = row.get("chain_us_median") or row.get("device_us_median")
    return f"{limit_us / us:.0%}" if us else ""
