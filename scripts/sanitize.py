"""The Hopper kernels on shapes of a few tiles, for NVIDIA's compute-sanitizer.

    compute-sanitizer --tool racecheck --kernel-name kernel_substring=lean python3 scripts/sanitize.py whole
    compute-sanitizer --tool memcheck python3 scripts/sanitize.py tall

One of: whole (rows that no run cuts), short (those of a tile or two, by length), cut, exchanged (cut, whose kernel ends
in an exchange, here with itself), tall, shared (tall, of several heads, whose merge takes the suffixes' state along),
few (as shared, of columns), sparq, grouped (SparQ for groups, by one kernel and through memory), mutant: SparQ without
the barriers of its reductions, in which racecheck must find hazards. Without the kernel's name (lean, tall, sparq)
every kernel of the program is watched, and racecheck may take longer than anybody waits.
"""

import sys

import jax.numpy as jnp
import numpy as np


def main(what: str) -> None:
    """Runs one of the calls and prints the sum of its lse."""
    if what == "mutant":
        from jax.experimental.mosaic.gpu import utils

        utils.warpgroup_barrier = lambda: None
    from tree_attn import attend, bifurcated_decode, make_mesh, sparq_decode, tree_decode

    rng = np.random.default_rng(0)
    # Made on the host: what JAX draws on the GPU would be watched too.
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape).astype(np.float32)).astype(jnp.bfloat16)
    shapes = {
        "whole": ((1, 1, 8, 128), (1, 128, 2, 128)),
        "short": ((5, 1, 4, 128), (5, 72, 2, 128)),
        "cut": ((1, 1, 4, 128), (1, 512, 1, 128)),
        "tall": ((1, 40, 4, 128), (1, 256, 1, 128)),
    }
    if what in shapes:
        query, key, value = normal(*shapes[what][0]), normal(*shapes[what][1]), normal(*shapes[what][1])
        lengths = {"cut": jnp.array([500]), "short": jnp.array([3, 40, 0, 72, 20])}.get(what)
        lse = attend(query, key, value, key_value_seq_lengths=lengths, implementation="mosaic_gpu").lse
    elif what == "exchanged":
        query, key, value = normal(1, 1, 4, 128), normal(1, 512, 1, 128), normal(1, 512, 1, 128)
        how = dict(mesh=make_mesh({"seq": 1}), axis_name="seq", reduction="fused", implementation="mosaic_gpu")
        lse = tree_decode(query, key, value, **how, return_lse=True)[1]
    elif what in ("shared", "few"):
        batch, heads = {"shared": (40, 4), "few": (12, 2)}[what]
        query, prefix_key, prefix_value = normal(batch, 1, heads, 128), normal(512, 2, 128), normal(512, 2, 128)
        key, value = normal(batch, 8, 2, 128), normal(batch, 8, 2, 128)
        how = dict(implementation="mosaic_gpu", return_lse=True)
        lse = bifurcated_decode(query, prefix_key, prefix_value, key, value, **how)[1]
    elif what == "grouped":
        query, key, value = normal(1, 1, 8, 128), normal(1, 512, 2, 128), normal(1, 512, 2, 128)
        by_component = jnp.asarray(np.asarray(key).transpose(0, 2, 3, 1))
        how = dict(num_components=8, num_keys=70, local_window=3, implementation="mosaic_gpu", return_lse=True)
        how["key_by_component"] = by_component
        lse = sum(sparq_decode(query, key, value, reallocate=mean, **how)[1] for mean in (False, True))
    else:
        query, key, value = normal(1, 1, 2, 128), normal(1, 512, 2, 128), normal(1, 512, 2, 128)
        by_component = jnp.asarray(np.asarray(key).transpose(0, 2, 3, 1))
        how = dict(num_components=8, num_keys=70, local_window=3, implementation="mosaic_gpu", return_lse=True)
        lse = sparq_decode(query, key, value, key_by_component=by_component, **how)[1]
    print(float(lse.sum()))


if __name__ == "__main__":
    names = ("whole", "short", "cut", "exchanged", "tall", "shared", "few", "sparq", "grouped", "mutant")
    if len(sys.argv) != 2 or sys.argv[1] not in names:
        sys.exit(f"one of {', '.join(names)} must be given, got {sys.argv[1:]}")
    main(sys.argv[1])
