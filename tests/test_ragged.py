"""`lean_decode` and `paged_decode` in plain XLA; their kernels are tested under tests/local and tests/kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_attention, assert_gradients

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


def with_garbage(kind):
    """Returns `(function, query, keys)` of a packed or a paged batch with NaN where no sequence has a key."""
    lengths, query, key = np.array([2, 0, 5]), drawn(3, 2, 2, 4), drawn(7, 1, 4, seed=1)
    padded, rest = packed(lengths, 6, key), np.full((3, 1, 4), np.nan, np.float32)
    options = {"return_lse": True, "is_causal": True}
    if kind == "packed":
        keys, offsets = np.concatenate([key, rest]), np.array([0, 2, 2, 7])
        return lambda query, keys: lean_decode(query, keys, 2 * keys, offsets, **options), query, keys, padded, lengths
    keys = np.where(np.arange(6)[None, :, None, None] < lengths[:, None, None, None], padded, np.float32(np.nan))
    keys, table = np.concatenate([keys.reshape(6, 3, 1, 4), rest[None]]), np.array([[0, 99], [-1, 6], [4, 5]])
    call = lambda query, keys: paged_decode(query, keys, 2 * keys, table, lengths, **options)
    return call, query, keys, padded, lengths


@pytest.mark.parametrize("kind", ["packed", "paged"])
def test_what_lies_beyond_the_lengths_is_in_no_result_and_no_gradient(kind):
    """NaN in the rest of a packed array, in pages that no sequence has, and in the rest of a sequence's last page."""
    function, query, keys, padded, lengths = with_garbage(kind)

    def loss(query, keys):
        out, lse = function(query, keys)
        return jnp.sum(out**2) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0)), (out, lse)

    differentiate = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    gradients, state = differentiate(query, keys)
    assert_attention(state, query, padded, 2 * padded, key_value_seq_lengths=lengths, is_causal=True)
    clean, _ = differentiate(query, np.where(np.isnan(keys), np.float32(0), keys))
    assert_gradients(gradients, clean)


@pytest.mark.parametrize("offsets", [[0, 3, 50], [0, 3, 2**32 - 1], [-5, 3, 6]])
def test_traced_offsets_are_clipped_to_the_packed_keys(offsets):
    query, key = drawn(2, 1, 2, 4), drawn(6, 1, 4, seed=1)
    dtype = np.uint32 if max(offsets) > 50 else np.int32
    out = jax.jit(lean_decode)(query, key, key, np.array(offsets, dtype))
    np.testing.assert_array_equal(out, jax.jit(lean_decode)(query, key, key, np.array([0, 3, 6])))


def test_traced_page_numbers_are_clipped_to_the_pages():
    query, pages = drawn(2, 1, 2, 4), drawn(4, 3, 1, 4, seed=1)
    decode = jax.jit(lambda table: paged_decode(query, pages, pages, table, np.array([6, 5])))
    np.testing.assert_array_equal(decode(np.array([[0, 7], [-1, 2]])), decode(np.array([[0, 3], [0, 2]])))


@pytest.mark.parametrize("sinks", [None, np.array([0.5, -1.0], np.float32)], ids=["plain", "sinks"])
def test_a_batch_without_keys_is_empty(sinks):
    query, none = drawn(2, 3, 2, 4), np.zeros((0, 1, 4), np.float32)
    options = {"return_lse": True, "sinks": sinks}
    states = [lean_decode(query, none, none, np.zeros(3, np.int32), **options)]
    for num_pages, page_size, width in ((0, 4, 2), (3, 4, 0), (3, 0, 2)):
        pages = np.zeros((num_pages, page_size, 1, 4), np.float32)
        table = np.zeros((2, width), np.int32)
        states.append(paged_decode(query, pages, pages, table, np.zeros(2, np.int32), **options))
    for out, lse in states:
        assert out.shape == query.shape and not np.any(out)
        np.testing.assert_array_equal(lse, np.broadcast_to(-np.inf if sinks is None else sinks, (2, 3, 2)))


EMPTY = {"B": (0, 1, 2, 4), "T": (2, 0, 2, 4), "N": (2, 1, 0, 4), "H": (2, 1, 2, 0)}


@pytest.mark.parametrize("query_shape", EMPTY.values(), ids=EMPTY)
def test_empty_axes_of_the_query_are_refused(query_shape):
    query, key = np.zeros(query_shape, np.float32), np.zeros((8, 1, 4), np.float32)
    batch = query_shape[0]
    with pytest.raises(ValueError, match="query must not have empty axes, got"):
        lean_decode(query, key, key, np.zeros(batch + 1, np.int32))
    with pytest.raises(ValueError, match="query must not have empty axes, got"):
        paged_decode(query, key[None], key[None], np.zeros((batch, 1), np.int32), np.zeros(batch, np.int32))


@pytest.mark.parametrize("sizes", [(0, 4), (1, 0)], ids=["K", "H"])
def test_empty_axes_of_the_keys_are_refused(sizes):
    query, key = np.zeros((1, 1, 2, 4), np.float32), np.zeros((8, *sizes), np.float32)
    with pytest.raises(ValueError, match="key must not have empty axes, got"):
        lean_decode(query, key, key, np.array([0, 8]))
    with pytest.raises(ValueError, match="key_pages must not have empty axes, got"):
        paged_decode(query, key[None], key[None], np.zeros((1, 1), np.int32), np.array([8]))


QUERY, KEY = np.zeros((2, 1, 2, 4), np.float32), np.zeros((8, 1, 4), np.float32)
WRONG = {
    "float_offsets": (lambda: lean_decode(QUERY, KEY, KEY, np.array([0.0, 2, 4])), "cu_seqlens must be integers"),
    "no_array": (lambda: lean_decode(QUERY, KEY, KEY, "offsets"), "cu_seqlens must be an array of integers"),
    "too_few_offsets": (
        lambda: lean_decode(QUERY, KEY, KEY, [0, 8]),
        r"cu_seqlens must have shape \[B \+ 1\] = \(3,\)",
    ),
    "descending": (lambda: lean_decode(QUERY, KEY, KEY, [0, 5, 4]), "cu_seqlens must ascend .* total = 8, got"),
    "unsigned_and_descending": (
        lambda: lean_decode(QUERY, KEY, KEY, np.array([0, 5, 4], np.uint32)),
        "cu_seqlens must ascend .* total = 8, got",
    ),
    "wide_offsets": (lambda: lean_decode(QUERY, KEY, KEY, np.array([0, 5, 2**32 + 6])), "cu_seqlens must ascend"),
    "another_value": (lambda: lean_decode(QUERY, KEY, KEY[:4], [0, 1, 2]), "value must have the shape of key"),
    "no_such_page": (lambda: paged([[0, 2], [1, 1]]), r"page_table must hold pages in \[0, 2\) .*, got \[2\]"),
    "a_negative_page": (lambda: paged([[0, -1], [1, 1]]), r"page_table must hold pages in \[0, 2\) .*, got \[-1\]"),
    "float_pages": (lambda: paged([[0.0, 1.0], [1.0, 1.0]]), "page_table must be integers, got dtype float"),
    "bool_pages": (lambda: paged([[True, True], [True, False]]), "page_table must be integers, got dtype bool"),
    "a_flat_table": (lambda: paged([0, 1]), r"page_table must have shape \[B, pages\] with B = 2, got \(2,\)"),
    "no_lengths": (
        lambda: paged([[0, 1], [1, 1]], None),
        "key_value_seq_lengths must be an array .*, got None",
    ),
}


def paged(table, lengths=(6, 4)):
    return paged_decode(QUERY, KEY.reshape(2, 4, 1, 4), KEY.reshape(2, 4, 1, 4), np.array(table), lengths)


@pytest.mark.parametrize("call, message", WRONG.values(), ids=WRONG)
def test_a_wrong_call_names_its_argument(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()
