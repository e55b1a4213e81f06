"""Times shared prefixes on one GPU: with and without sharing, beside cuDNN twice and a merge, and FlashInfer.

    python3 scripts/bench_prefix.py table --out docs/results/prefix_h200/table.jsonl
    python3 scripts/bench_prefix.py markdown --out docs/results/prefix_h200/table.jsonl     # docs/results.md's table
    python3 scripts/bench_prefix.py switch --out docs/results/prefix_h200/switch.jsonl      # when sharing pays
    python3 scripts/bench_prefix.py llama --out docs/results/prefix_h200/llama.jsonl        # heads as Llamas have them

This is Hydragen's microbenchmark: a batch of sequences with one new token each, a prefix that all share, and a suffix
for each. Device time is measured as by `bench_lean.py`. Set XLA_PYTHON_CLIENT_PREALLOCATE=false.
"""

import argparse
import dataclasses
import functools
import pathlib
import sys

import numpy as np
import sweep_flashinfer
import sweep_ways
from benching import PRODUCTS_TFLOPS, READ_GB_PER_S, MissingRows, chosen, fastest, markdown
from sweep_cases import Step

# Way -> (whether it shares the prefix, implementation).
WAYS = {
    "mosaic_gpu": (True, "mosaic_gpu"),
    "cudnn": (True, "cudnn"),
    "mosaic_gpu, not shared": (False, "mosaic_gpu"),
    "cudnn, not shared": (False, "cudnn"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedPrefixStep:
    """One step of `batch` sequences after a prefix that they share. If `ragged`, suffixes have 1 to `suffix` keys."""

    batch: int
    prefix: int
    suffix: int = 128
    num_heads: int = 8
    num_kv_heads: int = 1
    head_dim: int = 128
    ragged: bool = False

    @property
    def lengths(self) -> np.ndarray:
        """Keys of each suffix."""
        return np.linspace(1 if self.ragged else self.suffix, self.suffix, self.batch).astype(np.int32)

    def key_value_bytes(self, keys: int) -> int:
        """Returns the bytes of so many keys and values, in bfloat16."""
        return 2 * 2 * keys * self.num_kv_heads * self.head_dim

    def step(self, is_shared: bool) -> Step:
        """Returns the step as the sweep times it; without sharing, each sequence has the prefix before its suffix."""
        before = 0 if is_shared else self.prefix
        return Step(
            family="prefix",
            case="",
            lengths=tuple(int(n) + before for n in self.lengths),
            gives_lengths=self.ragged,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            prefix=self.prefix if is_shared else 0,
        )

    @property
    def limit_us(self) -> float:
        """The time of the prefix's products, or to read the suffixes and the prefix once: whichever is longer."""
        products = 4 * self.batch * self.num_heads * self.prefix * self.head_dim / PRODUCTS_TFLOPS / 1e6
        return max(products, self.key_value_bytes(self.prefix + int(self.lengths.sum())) / READ_GB_PER_S / 1e3)


CASES = [SharedPrefixStep(batch=b, prefix=p) for b, p in ((64, 2048), (256, 16384), (1024, 2048), (1024, 16384))]
# Batch and prefix, with the heads of Llama 3's 8B: sharing saves prefix x (batch - 1) keys.
SMALL = [
    (2, 512),
    (2, 2048),
    (2, 8192),
    (4, 512),
    (4, 2048),
    (8, 256),
    (8, 1024),
    (16, 128),
    (16, 512),
    (64, 64),
    (64, 256),
]
LLAMA = [(16, 32), (64, 32), (256, 32), (1024, 32), (16, 8), (64, 8), (256, 8), (16, 2), (64, 2)]  # batch, KV heads
LLAMA_CASES = [
    SharedPrefixStep(batch=b, prefix=8192, suffix=64, num_heads=32, num_kv_heads=k, ragged=True) for b, k in LLAMA
]
SWITCH_CASES = [SharedPrefixStep(batch=b, prefix=p, suffix=64, num_heads=32, num_kv_heads=8) for b, p in SMALL]


def main() -> int:
    """Runs one of the parts; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("table", "switch", "llama", "markdown"))
    parser.add_argument("--out", type=pathlib.Path, help="JSONL file, appended to; rows in it are not made again")
    parser.add_argument("--ways", help="only those with this in their name")
    parser.add_argument("--cases", help="which of the part's cases, e.g. 0,3 (default: all)")
    parser.add_argument("--iters", type=int, default=32, help="dispatches of each chain")
    parser.add_argument("--flashinfer", metavar="FOLDER", help="where FlashInfer lies, if it is not installed")
    args = parser.parse_args()
    if args.part == "markdown":
        return markdown(args.out, _label, [*WAYS, "flashinfer"], SharedPrefixStep)
    missing = MissingRows(args.out, ("batch", "prefix", "num_kv_heads", "way"))
    cases = {"table": CASES, "switch": SWITCH_CASES, "llama": LLAMA_CASES}[args.part]
    names = {"table": tuple(WAYS), "switch": ("mosaic_gpu", "mosaic_gpu, not shared"), "llama": ("mosaic_gpu", "cudnn")}
    ways = {name: WAYS[name] for name in names[args.part]}
    flashinfer = None if args.ways or args.part != "table" else sweep_flashinfer.find(args.flashinfer)
    for case in chosen(cases, args.cases):
        labels = dataclasses.asdict(case) | {"dtype": "bfloat16", "limit_us": case.limit_us}
        for way, (is_shared, implementation) in ways.items():
            if (args.ways or "") in way:
                measure = functools.partial(_time, case, is_shared, implementation, args.iters)
                missing.add(labels | {"way": way}, measure)
        if flashinfer is not None:
            measure = functools.partial(flashinfer.fastest, case.step(is_shared=True), args.iters)
            missing.add(labels | {"way": "flashinfer"}, measure)
    if flashinfer is not None:
        flashinfer.stop()
    return 0


def _label(row: dict) -> str:
    heads = row["num_heads"], row["num_kv_heads"]
    suffix = "" if heads == (8, 1) else f", {heads[0]}/{heads[1]} heads"
    return f"{row['batch']:,}, {row['prefix']:,}, {row['suffix']}{suffix}"


def _time(case: SharedPrefixStep, is_shared: bool, implementation: str, n_iters: int) -> dict:
    """Times one way; of cuDNN's cuts of the prefix into chunks the fastest counts."""
    step = case.step(is_shared)
    if not is_shared:
        ways = [sweep_ways.named(step, implementation)]
    else:
        ways = [way for way in sweep_ways.ways(step) if way.name.split(",")[0] == implementation]
    if case.ragged and implementation == sweep_ways.OURS:
        ways = [_with_prefix_length(way, case.prefix) for way in ways]
    return fastest(dict(sweep_ways.time_ways(step, ways, n_iters=n_iters)))


def _with_prefix_length(way: sweep_ways.Way, prefix: int) -> sweep_ways.Way:
    """Returns the way with the prefix's length as a value on the device, as in a Llama."""
    import jax.numpy as jnp

    def run(query, prefix_key, prefix_value, prefix_length, key, value, lengths):
        return way.run(query, prefix_key, prefix_value, key, value, lengths, prefix_length=prefix_length)

    def cache(arrays: dict) -> tuple:
        return arrays["prefix_key"], arrays["prefix_value"], jnp.int32(prefix), arrays["key"], arrays["value"]

    return dataclasses.replace(way, run=run, cache=cache)


if __name__ == "__main__":
    sys.exit(main())
