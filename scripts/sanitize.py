"""Runs a Hopper kernel on a shape of a few KV tiles, for NVIDIA's compute-sanitizer.

    compute-sanitizer --tool racecheck --kernel-name kernel_substring=lean python3 scripts/sanitize.py whole
    compute-sanitizer --tool memcheck python3 scripts/sanitize.py tall

- whole: output tiles that no run cuts; short: sequences of a KV tile or two, by length
- cut: output tiles in several runs
- odd: a number of keys that 8 does not divide; pages: of 16 keys
- exchanged: like cut, and the kernel ends in an exchange, here with itself
- tall: many query rows; shared: many query rows of several heads, whose merge takes the suffixes' state along
- few: like shared, for query columns
- products: a product of few rows with norm, gate and residual, whose tensor core also reads neighbours and drops them
- sparq; grouped: SparQ for groups of query heads, by one kernel and through memory
- mutant: SparQ without the barriers of its reductions, in which racecheck must find hazards

Without the kernel's name (lean, tall, sparq, few_rows) every kernel of the program is watched. racecheck may then take
hours.
"""

import argparse

import jax.numpy as jnp
import numpy as np

SHAPES = {  # query, key
    "whole": ((1, 1, 8, 128), (1, 128, 2, 128)),
    "short": ((5, 1, 4, 128), (5, 72, 2, 128)),
    "cut": ((1, 1, 4, 128), (1, 512, 1, 128)),
    "odd": ((2, 1, 4, 128), (2, 131, 2, 128)),
    "pages": ((2, 1, 4, 128), (19, 16, 2, 128)),
    "tall": ((1, 40, 4, 128), (1, 256, 1, 128)),
    "exchanged": ((1, 1, 4, 128), (1, 512, 1, 128)),
    "shared": ((40, 1, 4, 128), (40, 8, 2, 128)),
    "few": ((12, 1, 2, 128), (12, 8, 2, 128)),
    "products": ((3, 256), (2, 168, 256)),  # x, weights
    "sparq": ((1, 1, 2, 128), (1, 512, 2, 128)),
    "grouped": ((1, 1, 8, 128), (1, 512, 2, 128)),
    "mutant": ((1, 1, 2, 128), (1, 512, 2, 128)),
}
LENGTHS = {"cut": [500], "short": [3, 40, 0, 72, 20], "pages": [144, 70]}


def main() -> None:
    """Runs one of the calls and prints the sum of its lse or result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", choices=tuple(SHAPES))
    call = parser.parse_args().call
    if call == "mutant":
        from jax.experimental.mosaic.gpu import utils

        utils.warpgroup_barrier = lambda: None
    rng = np.random.default_rng(0)
    # Made on the host: the sanitizer would also watch JAX's random numbers on the GPU.
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape).astype(np.float32)).astype(jnp.bfloat16)
    run = {"exchanged": _exchanged, "pages": _paged, "shared": _shared, "few": _shared, "products": _multiplied}
    run |= dict.fromkeys(("sparq", "grouped", "mutant"), _sparq)
    print(float(run.get(call, _attended)(call, normal).sum()))


def _attended(call: str, normal):
    from tree_attn import attend

    query_shape, key_shape = SHAPES[call]
    query, key, value = normal(*query_shape), normal(*key_shape), normal(*key_shape)
    lengths = jnp.array(LENGTHS[call]) if call in LENGTHS else None
    return attend(query, key, value, key_value_seq_lengths=lengths, implementation="mosaic_gpu").lse


def _multiplied(call: str, normal):
    from tree_attn.kernels.few_rows_call import few_rows_product

    (rows, in_features), weights_shape = SHAPES[call]
    options = {"scale": normal(in_features), "eps": 1e-5, "residual": normal(rows, weights_shape[1])}
    return few_rows_product(normal(rows, in_features), normal(*weights_shape), activation="silu", **options)


def _paged(call: str, normal):
    from tree_attn import paged_decode

    query_shape, pages_shape = SHAPES[call]
    table = jnp.asarray(np.random.default_rng(1).permutation(pages_shape[0])[:18].reshape(2, 9), jnp.int32)
    return paged_decode(
        normal(*query_shape), normal(*pages_shape), normal(*pages_shape), table, jnp.array(LENGTHS[call]),
        implementation="mosaic_gpu", return_lse=True,
    )[1]  # fmt: skip


def _exchanged(call: str, normal):
    from tree_attn import make_mesh, tree_decode

    query_shape, key_shape = SHAPES[call]
    query, key, value = normal(*query_shape), normal(*key_shape), normal(*key_shape)
    across = dict(mesh=make_mesh({"seq": 1}), axis_name="seq", reduction="fused")
    return tree_decode(query, key, value, **across, implementation="mosaic_gpu", return_lse=True)[1]


def _shared(call: str, normal):
    from tree_attn import bifurcated_decode

    query_shape, key_shape = SHAPES[call]
    query, prefix_key, prefix_value = normal(*query_shape), normal(512, 2, 128), normal(512, 2, 128)
    suffix = normal(*key_shape), normal(*key_shape)
    return bifurcated_decode(query, prefix_key, prefix_value, *suffix, implementation="mosaic_gpu", return_lse=True)[1]


def _sparq(call: str, normal):
    from tree_attn import sparq_decode

    query_shape, key_shape = SHAPES[call]
    query, key, value = normal(*query_shape), normal(*key_shape), normal(*key_shape)
    by_component = jnp.asarray(np.asarray(key).transpose(0, 2, 3, 1))
    options = dict(num_components=8, num_keys=70, local_window=3)
    options |= dict(key_by_component=by_component, implementation="mosaic_gpu", return_lse=True)
    # A group of query heads runs with and without the mean of the values.
    choices = ({"reallocate": False}, {"reallocate": True}) if call == "grouped" else ({},)
    return sum(sparq_decode(query, key, value, **choice, **options)[1] for choice in choices)


if __name__ == "__main__":
    main()
