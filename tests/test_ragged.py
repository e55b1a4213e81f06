"""`lean_decode` and `paged_decode` in plain XLA; their kernels are tested under tests/local and tests/kernels."""

import numpy as np
import pytest
from assertions import assert_attention

from tree_attn import lean_decode, paged_decode


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def packed(lengths, num_slots, key):
    """Returns the sequences of a packed array, each padded with zeros to `num_slots`."""
    parts = np.split(key[: sum(lengths)], np.cumsum(lengths)[:-1])
    return np.stack([np.pad(part, [(0, num_slots - len(part)), (0, 0), (0, 0)]) for part in parts])


@pytest.mark.parametrize("window", [(None, 1), np.int64(2), (4, 1), (None, 2**31 - 1), 2**40], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_more_queries_than_keys_see_what_the_window_leaves_them(window, is_causal):
    lengths = np.array([2, 0, 5])
    query, key = drawn(3, 5, 2, 4), drawn(8, 1, 4, seed=1)
    options = {"local_window_size": window, "is_causal": is_causal}
    padded = packed(lengths, 6, key)
    expected = {"query": query, "key": padded, "value": -padded, "key_value_seq_lengths": lengths, **options}
    state = lean_decode(query, key, -key, np.array([0, 2, 2, 7]), return_lse=True, **options)
    assert_attention(state, **expected)
    pages, table = padded.reshape(6, 3, 1, 4), np.arange(6).reshape(3, 2)
    assert_attention(paged_decode(query, pages, -pages, table, lengths, return_lse=True, **options), **expected)
