"""Finds the fastest layout of the lean kernel for each sort of call on this GPU, and writes it to the tuning table.

    python3 scripts/tune_lean.py --out docs/results/lean_h200/tuning.jsonl        # also tree_attn/kernels/tuning.json

The profiler times every candidate on one call (K and V larger than the L2 cache). Candidates that do not fit in shared
memory are left out. The file gets one JSON row per candidate; the table keeps the fastest.
"""

import argparse
import functools
import itertools
import pathlib
import sys

from benching import chosen, origin

from tree_attn.measure.steps.chains import profile

CANDIDATES = tuple(itertools.product((1, 2, 3), (64, 128), (2, 3, 4)))  # CTAs per SM, keys per KV tile, stages
# batch, queries of each sequence, keys, query heads, KV heads, head dim, dtype of K and V, ragged
CALLS = (
    (1, 1, 65536, 16, 16, 128, "bfloat16", False),
    (64, 1, 4096, 32, 8, 128, "bfloat16", False),
    (16, 1, 32768, 32, 8, 128, "bfloat16", True),
    (4, 1, 32768, 32, 8, 128, "bfloat16", True),
    (64, 1, 8192, 32, 8, 128, "bfloat16", True),
    (1, 1, 131072, 16, 16, 64, "bfloat16", False),
    (32, 1, 16384, 32, 8, 64, "bfloat16", False),
    (32, 1, 16384, 32, 8, 64, "bfloat16", True),
    (1, 1, 65536, 16, 8, 256, "bfloat16", False),
    (32, 1, 4096, 16, 8, 256, "bfloat16", True),
    (1, 1, 131072, 32, 8, 128, "float8_e4m3fn", False),
    (64, 1, 8192, 32, 8, 128, "float8_e4m3fn", False),
    (64, 1, 8192, 32, 8, 128, "float8_e4m3fn", True),
    # Several queries, which see one key more than the one before: 16, 24 and 32 query columns.
    (64, 4, 4096, 32, 8, 128, "bfloat16", True),
    (64, 3, 4096, 64, 8, 128, "bfloat16", True),
    (64, 4, 4096, 64, 8, 128, "bfloat16", True),
    (64, 4, 8192, 64, 8, 64, "bfloat16", True),
)


def main() -> int:
    """Times every candidate, writes its row, and writes the fastest into the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="JSONL file, appended to")
    parser.add_argument("--calls", help="which of CALLS, e.g. 0,3 (default: all)")
    parser.add_argument(
        "--candidates", help="layouts to try, CTAs per SM x keys x stages: 2x64x2,1x128x2 (default: all)"
    )
    args = parser.parse_args()
    from tree_attn.kernels import tuning
    from tree_attn.measure.rows import MeasuredRows

    writer, of_run = MeasuredRows(args.out), origin()
    candidates = CANDIDATES
    if args.candidates:
        candidates = [tuple(map(int, words.split("x"))) for words in args.candidates.split(",")]
    best = {}
    for call in chosen(CALLS, args.calls):
        rows = list(_sweep(call, candidates))
        for row in rows:
            writer.append(row | of_run)
        fastest = min((row for row in rows if row["device_us_median"]), key=lambda row: row["device_us_median"])
        best[fastest["kind"]] = fastest["config"]
        print(fastest["kind"], fastest["config"], f"{fastest['device_us_median']:.1f} us", flush=True)
    tuning.write_table(tuning.device_kind(), best)
    return 0


def _sweep(call, candidates):
    """Yields one row per candidate that fits."""
    import jax
    import jax.numpy as jnp

    from tree_attn.kernels import lean_call, tuning
    from tree_attn.kernels.lean_layout import LeanConfig, max_smem_bytes
    from tree_attn.kernels.registers import RESERVED_SMEM_BYTES
    from tree_attn.kernels.targets import SMEM_BYTES_PER_SM
    from tree_attn.local import mosaic_gpu

    batch, num_queries, keys, num_heads, num_kv_heads, head_dim, dtype, is_ragged = call
    query = jax.random.normal(jax.random.key(0), (batch, num_queries, num_heads, head_dim), jnp.bfloat16)
    shape = (batch, keys, num_kv_heads, head_dim)
    draw = jax.jit(lambda seed: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16).astype(dtype))
    key, value = draw(1), draw(2)
    ends = jnp.arange(1, batch + 1, dtype=jnp.int32)[:, None] * (keys // batch)
    ends = ends + jnp.arange(1 - num_queries, 1, dtype=jnp.int32)
    spans = (jnp.zeros_like(ends), ends) if is_ragged else None
    lean = functools.partial(mosaic_gpu.lean_state, num_slots=keys, scale=head_dim**-0.5, logits_soft_cap=None)
    lean_shape = lean_call.lean_shape(query, key, num_slots=keys, scale=head_dim**-0.5, logits_soft_cap=None)
    sms = tuning.num_sms()
    for ctas_per_sm, block_kv, stages in candidates:
        num_ctas = tuning.even_ctas(lean_shape, ctas_per_sm * sms, not is_ragged, block_kv)
        config = LeanConfig(block_kv=block_kv, num_stages=stages, num_ctas=num_ctas)
        if ctas_per_sm * (max_smem_bytes(lean_shape, config) + RESERVED_SMEM_BYTES) > SMEM_BYTES_PER_SM:
            continue
        row = {
            "kind": tuning.table_key(lean_shape, sms, is_static=not is_ragged),
            "call": call,
            "config": {"block_kv": block_kv, "num_stages": stages, "ctas_per_sm": ctas_per_sm},
            "num_ctas": num_ctas,
        }
        step = lambda q, k, v, config=config: lean(q, k, v, spans, config=config).out
        chain = lambda q, k, v, step=step: jax.lax.scan(lambda q, _: (step(q, k, v), None), q, None, length=8)[0]
        try:
            row |= profile(jax.jit(chain), query, key, value, calls=8, n_iters=32)
        except RuntimeError as error:
            row |= {"device_us_median": None, "error": str(error)[:500]}
        yield row


if __name__ == "__main__":
    sys.exit(main())
