"""Times SparQ on one GPU: beside dense attention, its XLA backend, and the time to read what equation 11 counts.

    python3 scripts/bench_sparq.py table --out docs/results/sparq_h200/table.jsonl
    python3 scripts/bench_sparq.py markdown --out docs/results/sparq_h200/table.jsonl     # docs/results.md's table

Each sequence has one new token; the cache holds keys twice, and the mean of the values, as `KVCache` does on request.
Device time is measured as by `bench_lean.py`. The way "sparq, no mean" leaves the mean value out, which is the default
for groups of query heads. Set XLA_PYTHON_CLIENT_PREALLOCATE=false.
"""

import argparse
import dataclasses
import functools
import pathlib
import sys

from benching import READ_GB_PER_S, MissingRows, chosen, markdown, max_errors, normals, time_steps

MIN_GAIN = 1.5  # SparQ is an approximation: below this it is not worth its error
WAYS = ("sparq", "sparq, no mean", "sparq, xla", "dense, mosaic_gpu", "dense, cudnn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparqStep:
    """One step of `batch` sequences of `keys` tokens."""

    batch: int
    keys: int
    num_components: int = 32
    num_keys: int = 128
    local_window: int = 32
    num_heads: int = 32
    num_kv_heads: int = 32
    head_dim: int = 128

    @property
    def limit_us(self) -> float:
        """The time to read r components of all keys, and k keys and values, once for each KV head."""
        elements = self.keys * self.num_components + 2 * self.num_keys * self.head_dim
        return 2 * self.batch * self.num_kv_heads * elements / READ_GB_PER_S / 1e3


CASES = [
    SparqStep(batch=64, keys=4096),
    SparqStep(batch=1, keys=131072),
    SparqStep(batch=16, keys=16384),
    SparqStep(batch=64, keys=4096, num_components=16, num_keys=256),
    SparqStep(batch=64, keys=4096, num_kv_heads=8),
    SparqStep(batch=1, keys=131072, num_kv_heads=8),
    SparqStep(batch=64, keys=4096, num_kv_heads=4),
]


def main() -> int:
    """Times every way on every case; prints a line and writes a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("table", "markdown"))
    parser.add_argument("--out", type=pathlib.Path, required=True, help="JSONL file, appended to")
    parser.add_argument("--cases", help="which of CASES, e.g. 0,3 (default: all)")
    parser.add_argument("--iters", type=int, default=32, help="dispatches of each chain")
    args = parser.parse_args()
    if args.part == "markdown":
        return markdown(args.out, _label, WAYS, SparqStep, ("dense over SparQ", _gain))
    missing = MissingRows(args.out, ("batch", "keys", "num_components", "num_keys", "num_kv_heads", "way"))
    for case in chosen(CASES, args.cases):
        labels = dataclasses.asdict(case) | {"dtype": "bfloat16", "limit_us": case.limit_us}
        for way in WAYS:
            missing.add(labels | {"way": way}, functools.partial(_time, case, way, args.iters))
    return 0


def _label(row: dict) -> str:
    kv_heads = row.get("num_kv_heads", row["num_heads"])
    heads = "" if kv_heads == row["num_heads"] else f", {row['num_heads']}/{kv_heads} heads"
    return f"{row['batch']} x {row['keys']:,}, r {row['num_components']}, k {row['num_keys']}{heads}"


def _gain(chain_us: dict[str, float]) -> str:
    """Returns the time of the faster dense way over SparQ's, in a chain, and whether SparQ pays."""
    sparq, dense = ([us for way, us in chain_us.items() if way.startswith(name)] for name in ("sparq", "dense"))
    if not sparq or not dense:
        return ""
    gain = min(dense) / min(sparq)
    return f"{gain:.2f}" + (": does not pay" if gain < MIN_GAIN else "")


def _time(case: SparqStep, way: str, n_iters: int) -> dict:
    import jax
    import jax.numpy as jnp

    from tree_attn import attend, sparq_decode

    draw = normals()
    query = draw(case.batch, 1, case.num_heads, case.head_dim)
    key, value = (draw(case.batch, case.keys, case.num_kv_heads, case.head_dim) for _ in range(2))
    if way.startswith("dense"):
        dense = functools.partial(attend, implementation=way.split(", ")[1])
        return time_steps(lambda *args: dense(*args).out, query, [(key, value)], n_iters)
    by_component = jax.jit(lambda key: key.transpose(0, 2, 3, 1))(key)
    mean = jax.jit(lambda value: value.astype(jnp.float32).mean(axis=1))(value)
    sizes = {name: getattr(case, name) for name in ("num_components", "num_keys", "local_window")}

    def step(query, key, value, by_component, mean, implementation=None):
        return sparq_decode(
            query, key, value, key_by_component=by_component, value_mean=mean, implementation=implementation,
            reallocate=way != "sparq, no mean", return_lse=True, **sizes,
        )  # fmt: skip

    timed = functools.partial(step, implementation="xla" if way == "sparq, xla" else None)
    cache = (key, value, by_component, mean)
    try:
        few = slice(0, 2)
        part = tuple(x[few] for x in cache)
        expected = jax.jit(functools.partial(step, implementation="xla"))(query[few], *part)
        errors = max_errors(jax.jit(timed)(query, *cache), expected, few)
        return time_steps(lambda *args: timed(*args)[0], query, [cache], n_iters) | {"max_errors": errors}
    except RuntimeError as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    sys.exit(main())
