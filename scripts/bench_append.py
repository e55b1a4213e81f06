"""Times how one new token of each sequence is written into a cache on one GPU, by the hints that XLA gets.

    python3 scripts/bench_append.py --out docs/results/llama_h200/append_trials.jsonl

One program makes eight writes, each one slot further in every sequence. The profiler gives `kernels`: name ->
microseconds of one launch, and launches a write; the first copy of the cache is among them. `us_per_write` is an eighth
of the whole. The file gets one JSON row per case; each way must give the same cache.
"""

import argparse
import pathlib

from benching import origin

from tree_attn.measure.steps.chains import profile

WRITES = 8
SLOTS, KV_HEADS, HEAD_DIM = 72, 32, 128


def main() -> None:
    """Times each way and number of sequences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", default="16,64,256,1024", help="sequences")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="JSONL file, appended to")
    args = parser.parse_args()
    import jax
    import jax.numpy as jnp
    import numpy as np

    from tree_attn.measure.rows import MeasuredRows

    writer, of_run = MeasuredRows(args.out), origin()
    rng = np.random.default_rng(0)
    for batch in map(int, args.batch.split(",")):
        cache = jnp.zeros((batch, SLOTS, KV_HEADS, HEAD_DIM), jnp.bfloat16)
        new = jnp.asarray(rng.normal(size=(WRITES, batch, KV_HEADS, HEAD_DIM)), jnp.bfloat16)
        slots = jnp.asarray(rng.integers(0, SLOTS - WRITES, batch), jnp.int32)
        expected = None
        for name, write in WAYS.items():

            def program(cache, new, slots, write=write):
                for i in range(WRITES):
                    cache = write(cache, new[i], slots + i)
                return cache

            run = jax.jit(program)
            result = np.asarray(run(cache, new, slots))
            expected = result if expected is None else expected
            if not np.array_equal(result, expected):
                raise AssertionError(f"{name}: another cache than by {next(iter(WAYS))!r}")
            timed = profile(run, cache, new, slots, calls=WRITES, n_iters=32)
            row = dict(batch=batch, slots=SLOTS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype="bfloat16", way=name)
            row["us_per_write"] = timed["device_us_median"]
            writer.append(row | timed | of_run)
            print(f"{batch:,} sequences, {name}: {row['us_per_write']:.1f} us a write", flush=True)


def _scatter(cache, new, slots, **hints):
    import jax.numpy as jnp

    return cache.at[jnp.arange(cache.shape[0]), slots].set(new, mode="drop", **hints)


def _mapped(cache, new, slots):
    import jax

    return jax.vmap(lambda cache, new, slot: jax.lax.dynamic_update_slice(cache, new[None], (slot, 0, 0)))(
        cache, new, slots
    )


WAYS = {
    "as before": _scatter,
    "unique_indices, indices_are_sorted": lambda *arrays: _scatter(
        *arrays, unique_indices=True, indices_are_sorted=True
    ),
    "vmap of dynamic_update_slice": _mapped,
}


if __name__ == "__main__":
    main()
