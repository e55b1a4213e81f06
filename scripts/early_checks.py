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


def early_checks(implementation: str = "mosaic_gpu") -> Iterator[dict]:
    """Checks steps that read old keys early beside the oracle, and that chains of them have the bits of plain ones.

    One chain has the same keys throughout. In the other each step writes the last T keys first.
    """
    for shape, name in itertools.product(SHAPES, ("plain", "lengths", "causal", "window")):
        if shape.get("batch", 3) > 3 and name != "plain":
            continue
        case = OracleCase(dtype="bfloat16", options=OPTIONS[name], **shape)
        step = functools.partial(_after_another, implementation)
        row = case.check(step, what="local", how="old keys early", implementation=implementation, options_name=name)
        if row is not None and "max_abs_error" in row:
            for chain, writes in (("chain", False), ("chain_that_writes", True)):
                plain, early = (_chain(implementation, case, is_early, writes) for is_early in (False, True))
                row[f"same_bits_in_{chain}"] = bool(np.array_equal(plain, early, equal_nan=True))
                row["passed"] &= row[f"same_bits_in_{chain}"]
        yield row


def _after_another(implementation: str, query, key, value, **options):
    """Attends early, after a plain attention on whose result the query depends."""
    from tree_attn.local import attend

    before = attend(query, key, value, implementation=implementation, **options)
    query = query + 0 * before.out
    return attend(query, key, value, implementation=implementation, reads_keys_early=True, **options)


def _chain(implementation: str, case: OracleCase, is_early: bool, writes: bool) -> np.ndarray:
    """Returns the output of the last of `STEPS` steps, of which all but the first read old keys early."""
    import jax
    import jax.numpy as jnp

    from tree_attn.local import attend

    batch, num_queries, num_heads, _ = case.query.shape
    lengths = case.options.get("key_value_seq_lengths", np.full(batch, case.key.shape[1]))
    slots = np.maximum(lengths, num_queries)[:, None] - num_queries + np.arange(num_queries)  # [B, T]
    rows, group = np.arange(batch)[:, None], num_heads // case.key.shape[2]

    @jax.jit
    def run(query, key, value):
        for i in range(STEPS):
            if writes and i > 0:
                new = query[:, :, ::group]
                key, value = (x.at[rows, slots].set(new.astype(x.dtype)) for x in (key, value))
            early = {"reads_keys_early": is_early and i > 0}
            query = attend(query, key, value, implementation=implementation, **early, **case.options).out
        return query

    key, value = (jnp.asarray(x.astype(case.stored_dtype)) for x in case.spoiled())
    return np.asarray(run(case.query, key, value).astype("float32"))
