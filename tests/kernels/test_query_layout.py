"""Queries in the lean kernel's layout: padded where threads cannot copy what 8 does not divide, and found again."""

import jax.numpy as jnp
import numpy as np
import pytest

from tree_attn.kernels.lean_call import lean_shape
from tree_attn.kernels.query_layout import from_kernel_layout, to_kernel_layout


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
