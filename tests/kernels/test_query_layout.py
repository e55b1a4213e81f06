"""Queries in the lean kernel's layout: padded where threads cannot copy what 8 does not divide, and found again."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tree_attn.kernels import tall, targets
from tree_attn.kernels.lean_call import lean_shape
from tree_attn.kernels.lean_layout import LeanConfig
from tree_attn.kernels.query_layout import from_kernel_layout, num_halves, to_kernel_layout


@pytest.mark.parametrize(
    "num_queries, group, blocks, columns",
    [
        (1, 5, 1, 5),
        (2, 3, 1, 6),
        (4, 4, 1, 16),
        (7, 2, 1, 14),
        (7, 6, 1, 42),
        (7, 7, 1, 56),
        (8, 16, 2, 64),
        (5, 14, 2, 40),
    ],
)
def test_up_to_48_columns_of_one_block_are_not_padded(num_queries, group, blocks, columns):
    query = jnp.arange(3 * num_queries * 2 * group * 64, dtype=jnp.float32).reshape(3, num_queries, 2 * group, 64)
    key = jnp.zeros((3, 128, 2, 64), jnp.bfloat16)
    shape = lean_shape(query.astype(jnp.bfloat16), key, num_slots=128, scale=1.0, logits_soft_cap=None)
    folded = to_kernel_layout(query, shape)
    assert folded.shape == (3 * 2 * blocks, columns, 64)
    np.testing.assert_array_equal(from_kernel_layout(folded, query.shape, shape), query)


@pytest.mark.parametrize(
    "num_queries, group, num_slots, changes, are_rows",
    [
        (8, 16, 128, {}, True),
        (5, 10, 128, {}, True),
        (5, 10, 128, {"head_dim": 256}, False),
        (5, 10, 128, {"head_dim": 80}, False),
        (5, 10, 128, {"stored": "float8_e4m3fn"}, False),
        (5, 10, 128, {"target": "8.0"}, False),
        (8, 6, 128, {}, False),  # up to 48 columns have the registers for a merge in the launch
        (8, 6, 90_000, {}, True),  # where reading takes longer than a launch
        (8, 4, 90_000, {}, False),
    ],
)
def test_few_queries_are_rows_where_they_are_many_columns(num_queries, group, num_slots, changes, are_rows):
    options = {"head_dim": 128, "stored": "bfloat16", "target": "9.0"} | changes
    query = jax.ShapeDtypeStruct((3, num_queries, 2 * group, options["head_dim"]), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((3, num_slots, 2, options["head_dim"]), jnp.dtype(options["stored"]))
    with targets.assumed(options["target"]):
        call = dict(num_slots=num_slots, scale=1.0, logits_soft_cap=None)
        shape = lean_shape(query, key, **call, allows_rows=True)
        assert not lean_shape(query, key, **call).is_many_query, "an exchange is to end the kernel"
    assert shape.is_many_query == are_rows
    if are_rows:
        # One block: of 64 rows, of which a CTA has two at once, where they fit and sequences are short; or of 128.
        rows = 64 if num_queries * group <= 64 and num_slots <= 512 else 128
        assert (shape.tokens, shape.cols, shape.col_blocks, shape.streams) == (rows, rows, 1, 128 // rows)


@pytest.mark.parametrize(
    "num_queries, num_heads, num_kv_heads, num_slots, halves",
    [
        (40, 8, 8, 4096, 1),  # of one head in a block
        (64, 1, 1, 4096, 1),
        (65, 1, 1, 4096, 2),
        (40, 8, 4, 4096, 2),  # each half holds a head
        (8, 16, 2, 4096, 1),  # few queries: half of a block of 128 rows
        (8, 32, 2, 4096, 2),
        (8, 16, 2, 512, 1),  # all of a block of 64 rows
    ],
)
def test_halves_of_a_block_without_rows_leave_no_partial_states(
    num_queries, num_heads, num_kv_heads, num_slots, halves
):
    query = jax.ShapeDtypeStruct((2, num_queries, num_heads, 128), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((2, num_slots, num_kv_heads, 128), jnp.bfloat16)
    with targets.assumed("9.0"):
        shape = lean_shape(query, key, num_slots=num_slots, scale=1.0, logits_soft_cap=None, allows_rows=True)
    in_kernel = jax.eval_shape(lambda x: to_kernel_layout(x, shape), query)
    assert shape.is_many_query
    assert num_halves(shape, in_kernel) == halves


@pytest.mark.parametrize("num_runs", [5, 264])
def test_the_first_runs_of_streams_have_a_cta_each(num_runs):
    """Runs without KV tiles come last. Beside one another they would leave SMs without work."""
    query, key = (jax.ShapeDtypeStruct((2, n, heads, 64), jnp.bfloat16) for n, heads in ((8, 16), (512, 2)))
    with targets.assumed("9.0"):
        shape = lean_shape(query, key, num_slots=512, scale=1.0, logits_soft_cap=None, allows_rows=True)
    ctas, config = -(-num_runs // shape.streams), LeanConfig(num_ctas=num_runs)
    runs = [[tall.run_number(cta, stream, shape, config) for cta in range(ctas)] for stream in range(shape.streams)]
    assert runs[0] == list(range(ctas))
    assert sorted(itertools.chain(*runs))[:num_runs] == list(range(num_runs))
