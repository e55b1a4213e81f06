"""Checks of `gpu_check.py` of kernels that read old keys before the previous kernel has ended, on one device."""

import functools
import itertools
from collections.abc import Iterator

import numpy as np
from oracle_case import OPTIONS, OracleCase

SHAPES = (
    dict(num_queries=1, num_heads=8, num_kv_heads=2, head_dim=128, num_keys=1920),
    dict(num_queries=1, num_heads=16, num_kv_heads=4, head_dim=128, num_keys=65_536),  # a Llama's, over two devices
    dict(num_queries=5, num_heads=8, num_kv_heads=1, head_dim=64, num_keys=1861),  # the last KV tile comes in parts
    dict(num_queries=1, num_heads=4, num_kv_heads=2, head_dim=256, num_keys=1001),
    dict(num_queries=1, num_heads=6, num_kv_heads=2, head_dim=80, num_keys=1920, stored_dtype="float8_e4m3fn"),
    dict(num_queries=1, num_heads=16, num_kv_heads=8, head_dim=128, num_keys=701, batch=36),  # no run cuts them
)
STEPS = 12  # each attends with the output of the one before, and so begins while that ends


def early_checks() -> Iterator[dict]:
    """Checks steps that read old keys early beside the oracle, and that a chain of them has the bits of one without."""
    from tree_attn.local import attend

    for shape, name in itertools.product(SHAPES, ("plain", "lengths", "causal", "window")):
        if shape.get("batch", 3) > 3 and name != "plain":
            continue
        case = OracleCase(dtype="bfloat16", options=OPTIONS[name], **shape)
        steps = [
            functools.partial(attend, implementation="mosaic_gpu", reads_keys_early=is_early)
            for is_early in (False, True)
        ]
        row = case.check(steps[1], what="local", how="old keys early", implementation="mosaic_gpu", options_name=name)
        if row is not None and "passed" in row:
            plain, early = (_after_steps(step, case) for step in steps)
            row["same_bits_in_chain"] = bool(np.array_equal(plain, early, equal_nan=True))
            row["passed"] &= row["same_bits_in_chain"]
        yield row


def _after_steps(step, case: OracleCase) -> np.ndarray:
    """Returns the output of the last step of a chain."""
    import jax

    @jax.jit
    def run(query, key, value):
        for _ in range(STEPS):
            query = step(query, key, value, **case.options).out
        return query

    key, value = (x.astype(case.stored_dtype) for x in case.spoiled())
    return np.asarray(run(case.query, key, value).astype("float32"))
