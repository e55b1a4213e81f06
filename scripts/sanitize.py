"""Runs a kernel on a shape of a few KV tiles, for NVIDIA's compute-sanitizer, and compares attention with the oracle.

    compute-sanitizer --tool racecheck --kernel-name kernel_substring=lean python3 scripts/sanitize.py whole
    compute-sanitizer --tool memcheck python3 scripts/sanitize.py tall
    compute-sanitizer --tool racecheck --kernel-name kernel_substring=lean python3 scripts/sanitize.py cut --as 8.9

Attention by the lean kernel, with NaN beyond the lengths:
- whole: output tiles that no run cuts; short: sequences of a KV tile or two, by length
- cut: output tiles in several runs; queries: several queries, causal; float8: keys and values in float8
- odd: a number of keys that 8 does not divide; pages: of 16 keys; small_pages: of 5
- one_stage: many output tiles of head dim 256, for which two CTAs of an SM have one stage each
- exchanged: like cut, and the kernel ends in an exchange, here with itself; exchanged_float8: the same of float8

With `--as` these run as on a GPU of another compute capability: by `mma.sync` and `cp.async`, in its shared memory.

Kernels for Hopper only:
- tall: many query rows; shared: many query rows of several heads, with whose partial states the suffixes' kernel begins
- groups: like shared, of seven heads, where rows of a sequence lie in two blocks; few: like shared, for query columns
- merged: like shared, of so many suffixes that a merge takes their state along
- products: a product of few rows with norm, gate and residual, whose tensor core also reads neighbours and drops them
- appended: a product of few rows that ends in rotation, and writes keys and values to a cache
- chained: three products of few rows in one launch, whose CTAs meet
- sparq; grouped: SparQ for groups of query heads, by one kernel and through memory
- mutant: SparQ without the barriers of its reductions, in which racecheck must find hazards

Prints a row of errors and tolerances, or the sum of a result. Exits with 1 if an error is above its tolerance.

Without the kernel's name (lean, tall, sparq, few_rows) every kernel of the program is watched. racecheck may then take
hours. The sanitizer's own process sometimes ends with a segmentation fault before the first kernel, exit status 139.
Then run it again. JAX needs its CPU backend too, so that JAX_PLATFORMS, if set, is "cuda,cpu".
"""

import argparse
import contextlib
import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from garbage_checks import paged
from oracle_case import OracleCase
from process_per_device import writable

# batch, queries, heads, KV heads, keys; the head dim is 128, or that of HEAD_DIMS.
ATTENTION = {
    "whole": (1, 1, 8, 2, 128),
    "short": (5, 1, 4, 2, 72),
    "cut": (1, 1, 4, 1, 512),
    "queries": (2, 3, 4, 1, 512),
    "float8": (2, 1, 4, 1, 1024),
    "odd": (2, 1, 4, 2, 131),
    "pages": (2, 1, 4, 2, 512),
    "small_pages": (2, 1, 4, 2, 145),
    "one_stage": (70, 1, 8, 4, 500),
    "exchanged": (1, 1, 4, 1, 512),
    "exchanged_float8": (1, 1, 4, 1, 1024),
    "tall": (1, 40, 4, 1, 256),
}
LENGTHS = {
    "cut": [500], "short": [3, 40, 0, 72, 20], "queries": [500, 70], "float8": [1000, 131], "pages": [500, 70],
    "small_pages": [143, 71], "one_stage": [500, 7, 0, 64, 65] * 14,
}  # fmt: skip
HEAD_DIMS = {"one_stage": 256}
PAGE_SIZES = {"pages": 16, "small_pages": 5}
SHAPES = {  # query, key
    "shared": ((40, 1, 4, 128), (40, 8, 2, 128)),
    "groups": ((40, 1, 14, 128), (40, 8, 2, 128)),
    "few": ((12, 1, 2, 128), (12, 8, 2, 128)),
    "merged": ((1280, 1, 4, 128), (1280, 8, 2, 128)),
    "products": ((3, 256), (2, 168, 256)),  # x, weights
    "appended": ((3, 1, 256), (1, 4, 32, 256)),
    "chained": ((3, 256), (128, 256)),
    "sparq": ((1, 1, 2, 128), (1, 512, 2, 128)),
    "grouped": ((1, 1, 8, 128), (1, 512, 2, 128)),
    "mutant": ((1, 1, 2, 128), (1, 512, 2, 128)),
}
IMPLEMENTATION = "mosaic_gpu"


def main(arguments: list[str] | None = None) -> int:
    """Runs one of the calls; returns the exit status."""
    from tree_attn.kernels import targets

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", choices=(*ATTENTION, *SHAPES))
    parser.add_argument(
        "--as", dest="capability", choices=tuple(targets.TARGETS), help="run attention as on this compute capability"
    )
    args = parser.parse_args(arguments)
    if args.capability is not None and args.call not in ATTENTION:
        parser.error(f"--as: {args.call} has kernels for Hopper only")
    if args.call in ATTENTION:
        with contextlib.nullcontext() if args.capability is None else targets.assumed(args.capability):
            row = attended(args.call) | ({"as": args.capability} if args.capability else {})
        print(json.dumps(writable(row)))
        return int(not row["passed"])
    if args.call == "mutant":
        from jax.experimental.mosaic.gpu import utils

        utils.warpgroup_barrier = lambda: None
    rng = np.random.default_rng(0)
    # Made on the host: the sanitizer would also watch JAX's random numbers on the GPU.
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape).astype(np.float32)).astype(jnp.bfloat16)
    run = dict.fromkeys(("shared", "groups", "few", "merged"), _shared)
    run |= {"products": _multiplied, "appended": _appended, "chained": _chained}
    print(float(run.get(args.call, _sparq)(args.call, normal).sum()))
    return 0


def attended(call: str) -> dict:
    """Returns the row of a call of attention beside the oracle; a call that is refused has not passed."""
    names = ("batch", "num_queries", "num_heads", "num_kv_heads", "num_keys")
    shape = dict(zip(names, ATTENTION[call])) | {"head_dim": HEAD_DIMS.get(call, 128)}
    options = {"key_value_seq_lengths": np.array(LENGTHS[call], np.int32)} if call in LENGTHS else {}
    options |= {"is_causal": True} if call == "queries" else {}
    stored_dtype = "float8_e4m3fn" if "float8" in call else None
    case = OracleCase(dtype="bfloat16", options=options, stored_dtype=stored_dtype, **shape)
    # What the tolerance needs is computed on the host: the sanitizer would meet libraries' kernels on the GPU.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        case.expected(prefill=False)
    if call.startswith("exchanged"):
        return _exchanged(case)
    run = functools.partial(_of_pages, page_size=PAGE_SIZES[call]) if call in PAGE_SIZES else _padded
    return case.check(run, what="sanitized", implementation=IMPLEMENTATION, how=call)


def _padded(query, key, value, *, block_size, return_lse, **options):
    from tree_attn import attend

    return attend(query, key, value, implementation=IMPLEMENTATION, **options)


def _of_pages(*arrays, block_size, **options):
    return paged(*arrays, implementation=IMPLEMENTATION, **options)


def _exchanged(case: OracleCase) -> dict:
    """Returns the row of a call whose kernel must end in the exchange."""
    from tree_attn import make_mesh, tree_decode

    across = dict(mesh=make_mesh({"seq": 1}), axis_name="seq", reduction="fused", implementation=IMPLEMENTATION)
    step = functools.partial(tree_decode, **across)
    row = case.check(step, what="sanitized", implementation=IMPLEMENTATION, how="exchanged")
    arrays = case.query, *(x.astype(case.stored_dtype) for x in (case.key, case.value))
    program = jax.jit(functools.partial(step, block_size=None, return_lse=True, **case.options)).lower(*arrays)
    row["ends_in_exchange"] = "lean_exchange" in program.as_text()
    return row | {"passed": bool(row["passed"] and row["ends_in_exchange"])}


def _multiplied(call: str, normal):
    from tree_attn.kernels.few_rows_call import few_rows_product

    (rows, in_features), weights_shape = SHAPES[call]
    options = {"scale": normal(in_features), "eps": 1e-5, "residual": normal(rows, weights_shape[1])}
    return few_rows_product(normal(rows, in_features), normal(*weights_shape), activation="silu", **options)


def _chained(call: str, normal):
    from tree_attn.kernels.few_rows_chain_call import AfterAttention, Norm

    (rows, features), (hidden, intermediate) = SHAPES[call]
    arrays = {"attended": normal(rows, 1, 1, features), "output": normal(hidden, 1, features)}
    arrays |= {"x": normal(rows, 1, hidden)}
    arrays |= {"gate_up": normal(2, intermediate, hidden), "down": normal(hidden, intermediate)}
    return AfterAttention(**arrays, norm=Norm(scale=normal(hidden), eps=1e-5), activation="silu").run()


def _appended(call: str, normal):
    from tree_attn.kernels.few_rows_call import few_rows_into_cache

    x_shape, weights_shape = SHAPES[call]
    batch, in_features, (kv_heads, _, head_dim, _) = x_shape[0], x_shape[-1], weights_shape
    key, value = (normal(batch, 8, kv_heads, head_dim) for _ in range(2))
    slots = jnp.array([[5], [0], [8]], jnp.int32)  # the last one has no place in the cache
    angles = normal(batch, 1, 1, head_dim // 2).astype(jnp.float32)
    rotation = jnp.cos(angles), jnp.sin(angles)
    options = {"scale": normal(in_features), "eps": 1e-5}
    results = few_rows_into_cache(normal(*x_shape), normal(*weights_shape), key, value, slots, rotation, **options)
    return sum(x.astype(jnp.float32).sum() for x in results)


def _shared(call: str, normal):
    from tree_attn import bifurcated_decode

    query_shape, key_shape = SHAPES[call]
    query, prefix_key, prefix_value = normal(*query_shape), normal(512, 2, 128), normal(512, 2, 128)
    suffix = normal(*key_shape), normal(*key_shape)
    return bifurcated_decode(
        query, prefix_key, prefix_value, *suffix, implementation=IMPLEMENTATION, return_lse=True
    )[1]  # fmt: skip


def _sparq(call: str, normal):
    from tree_attn import sparq_decode

    query_shape, key_shape = SHAPES[call]
    query, key, value = normal(*query_shape), normal(*key_shape), normal(*key_shape)
    by_component = jnp.asarray(np.asarray(key).transpose(0, 2, 3, 1))
    options = dict(num_components=8, num_keys=70, local_window=3)
    options |= dict(key_by_component=by_component, implementation=IMPLEMENTATION, return_lse=True)
    # A group of query heads runs with and without the mean of the values.
    choices = ({"reallocate": False}, {"reallocate": True}) if call == "grouped" else ({},)
    return sum(sparq_decode(query, key, value, **choice, **options)[1] for choice in choices)


if __name__ == "__main__":
    sys.exit(main())
