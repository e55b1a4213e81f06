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
import json
import pathlib
import sys

import numpy as np
from benching import (
    PRODUCTS_TFLOPS,
    READ_GB_PER_S,
    ROTATE_BYTES,
    MissingRows,
    chosen,
    flashinfer_rows,
    markdown,
    max_errors,
    normals,
    time_steps,
    torch_device_us,
)

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
    parser.add_argument("part", choices=("table", "switch", "llama", "markdown", "flashinfer"))
    parser.add_argument("--out", type=pathlib.Path, help="JSONL file, appended to; rows in it are not made again")
    parser.add_argument("--ways", help="only those with this in their name")
    parser.add_argument("--cases", help="which of the part's cases, e.g. 0,3 (default: all)")
    parser.add_argument("--iters", type=int, default=10, help="profiled runs per row")
    args = parser.parse_args()
    if args.part == "flashinfer":
        print(json.dumps([_time_flashinfer(case) for case in CASES]))
        return 0
    if args.part == "markdown":
        return markdown(args.out, _label, [*WAYS, "flashinfer"], SharedPrefixStep)
    missing = MissingRows(args.out, ("batch", "prefix", "num_kv_heads", "way"))
    cases = {"table": CASES, "switch": SWITCH_CASES, "llama": LLAMA_CASES}[args.part]
    names = {"table": tuple(WAYS), "switch": ("mosaic_gpu", "mosaic_gpu, not shared"), "llama": ("mosaic_gpu", "cudnn")}
    ways = {name: WAYS[name] for name in names[args.part]}
    peers = [] if args.ways or args.part != "table" else flashinfer_rows(__file__)
    for i, case in chosen(list(enumerate(cases)), args.cases):
        labels = dataclasses.asdict(case) | {"dtype": "bfloat16", "limit_us": case.limit_us}
        for way, (is_shared, implementation) in ways.items():
            if (args.ways or "") in way:
                measure = functools.partial(_time, case, is_shared, implementation, args.iters)
                missing.add(labels | {"way": way}, measure)
        if peers:
            missing.add(labels | {"way": "flashinfer"}, functools.partial(peers.__getitem__, i))
    return 0


def _label(row: dict) -> str:
    heads = row["num_heads"], row["num_kv_heads"]
    suffix = "" if heads == (8, 1) else f", {heads[0]}/{heads[1]} heads"
    return f"{row['batch']:,}, {row['prefix']:,}, {row['suffix']}{suffix}"


def _time(case: SharedPrefixStep, is_shared: bool, implementation: str, n_iters: int) -> dict:
    import jax
    import jax.numpy as jnp

    from tree_attn import attend, bifurcated_decode

    heads = (case.num_kv_heads, case.head_dim)
    own_keys = case.suffix if is_shared else case.prefix + case.suffix
    shared_keys = case.prefix if is_shared else 0
    sets = int(np.ceil(ROTATE_BYTES / case.key_value_bytes(shared_keys + case.batch * own_keys)))
    draw = normals()
    query = draw(case.batch, 1, case.num_heads, case.head_dim)

    lengths = {"key_value_seq_lengths": jnp.asarray(case.lengths)} if case.ragged else {}
    prefix_length = jnp.int32(case.prefix) if case.ragged else None  # a value on the device, as in a Llama

    def step(query, prefix, suffix, prefix_length, lengths, implementation=implementation):
        if is_shared:
            return bifurcated_decode(
                query,
                *prefix,
                *suffix,
                implementation=implementation,
                return_lse=True,
                prefix_length=prefix_length,
                **lengths,
            )
        return attend(query, *suffix, implementation=implementation)

    caches = []
    for _ in range(sets):
        prefix = tuple(draw(case.prefix, *heads) for _ in range(2 * is_shared))
        caches.append((prefix, tuple(draw(case.batch, own_keys, *heads) for _ in range(2)), prefix_length, lengths))
    try:
        few = slice(0, 16)  # a comparison of all queries would take the reference too long
        prefix, suffix, *_ = caches[0]
        expected = jax.jit(functools.partial(step, implementation="xla"))(
            query[few],
            prefix,
            tuple(x[few] for x in suffix),
            prefix_length,
            {name: x[few] for name, x in lengths.items()},
        )
        errors = max_errors(jax.jit(step)(query, *caches[0]), expected, few)
        timed = time_steps(lambda *args: step(*args)[0], query, caches, n_iters)
    except (NotImplementedError, RuntimeError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return timed | {"max_errors": errors}


def _time_flashinfer(case: SharedPrefixStep) -> dict:
    import flashinfer
    import torch

    page = 64
    sets = max(1, int(np.ceil(ROTATE_BYTES / case.key_value_bytes(case.batch * case.suffix))))
    on_gpu = functools.partial(torch.tensor, dtype=torch.int32, device="cuda")
    prefix_pages, own_pages = case.prefix // page, case.suffix // page
    draw = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    query = draw(case.batch, case.num_heads, case.head_dim)
    pages = prefix_pages + case.batch * own_pages
    caches = [draw(pages, 2, page, case.num_kv_heads, case.head_dim) for _ in range(sets)]
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    cascade = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace, "NHD")
    try:
        cascade.plan(
            [on_gpu([0, case.batch]), on_gpu(range(case.batch + 1))],
            [on_gpu([0, prefix_pages]), on_gpu(range(0, case.batch * own_pages + 1, own_pages))],
            [on_gpu(range(prefix_pages)), on_gpu(range(prefix_pages, pages))],
            [on_gpu([page]), on_gpu([page] * case.batch)],
            case.num_heads, case.num_kv_heads, case.head_dim, page, q_data_type=torch.bfloat16,
        )  # fmt: skip

        def run():
            for cache in caches:
                cascade.run(query, cache)

        median = torch_device_us(run, sets)
    except (RuntimeError, ValueError, TypeError) as error:
        return {"error": f"flashinfer: {error}"}
    return {
        "device_us_median": median,
        "caches": sets,
        "flashinfer": flashinfer.__version__,
        "timing": "torch.profiler: kernel, copy and memset times summed over calls; planning excluded",
    }


if __name__ == "__main__":
    sys.exit(main())
