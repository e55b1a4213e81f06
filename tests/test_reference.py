"""The oracle itself, against numbers worked by hand and against `jax.nn`, which shares nothing with it."""

import ast
import inspect

import jax
import numpy as np
import pytest
from assertions import assert_state
from attention_cases import OPTIONS, Case, multiplied_out
from dense import dense_attention

from tree_attn.reference import attention
from tree_attn.tolerances import out_tolerance

# Four keys of one dimension: with query 1 and scale 1 the logits are log 1, log 2, log 3, log 4.
WEIGHTS = np.array([1.0, 2.0, 3.0, 4.0])
VALUES = np.array([10.0, 20.0, 30.0, 40.0])
KEY, VALUE = np.log(WEIGHTS).reshape(1, 4, 1, 1), VALUES.reshape(1, 4, 1, 1)


def mean_of(*seen):
    seen = list(seen)
    return (WEIGHTS[seen] * VALUES[seen]).sum() / WEIGHTS[seen].sum(), np.log(WEIGHTS[seen].sum())


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, mean_of(0, 1, 2, 3)),
        ({"key_value_seq_lengths": [2]}, mean_of(0, 1)),
        ({"key_value_seq_lengths": [0]}, (0, -np.inf)),
        ({"is_causal": True}, mean_of(0, 1, 2, 3)),  # one query is the last position
        ({"is_causal": True, "query_positions": [1]}, mean_of(0, 1)),
        ({"is_causal": True, "query_positions": [-1]}, (0, -np.inf)),
        ({"local_window_size": 1, "query_positions": [1]}, mean_of(0, 1, 2)),
        ({"local_window_size": (0, 1), "query_positions": [1]}, mean_of(1, 2)),
        ({"local_window_size": (None, 0), "query_positions": [2]}, mean_of(0, 1, 2)),
        ({"local_window_size": (1, None)}, mean_of(2, 3)),
        ({"local_window_size": (1, None), "key_value_seq_lengths": [3]}, mean_of(1, 2)),
        ({"scale": 0.0}, (25.0, np.log(4))),
        ({"sinks": [np.log(10.0)]}, (15.0, np.log(20))),
        ({"sinks": [0.0], "key_value_seq_lengths": [0]}, (0, 0)),
        ({"logits_soft_cap": 1e-9}, (25.0, np.log(4))),  # flattens every logit
    ],
)
def test_by_hand(options, expected):
    out, lse = attention(np.ones((1, 1, 1, 1)), KEY, VALUE, **({"scale": 1.0} | options))
    assert out.dtype == lse.dtype == np.float64
    np.testing.assert_allclose([out.item(), lse.item()], expected, rtol=1e-12, atol=1e-8)


def test_soft_cap_is_tanh_of_the_scaled_logits():
    _, lse = attention(np.ones((1, 1, 1, 1)), KEY, VALUE, scale=3.0, logits_soft_cap=2.0)
    np.testing.assert_allclose(lse.item(), np.log(np.exp(2 * np.tanh(3 * np.log(WEIGHTS) / 2)).sum()), rtol=1e-12)


def test_default_scale_is_the_inverse_root_of_the_head_dim():
    arrays = Case().arrays()
    np.testing.assert_array_equal(attention(*arrays)[0], attention(*arrays, scale=8**-0.5)[0])
    assert not np.array_equal(attention(*arrays)[0], attention(*arrays, scale=1.0)[0])


def test_agrees_with_jax_nn():
    query, key, value = Case(queries=37, heads=6, kv_heads=2).arrays()
    lengths = np.array([37, 20], np.int32)
    options = dict(key_value_seq_lengths=lengths, is_causal=True, local_window_size=(7, 0))
    positions = np.arange(37, dtype=np.int32)  # jax.nn counts queries from the first key
    with jax.numpy_rank_promotion("allow"):
        expected = jax.nn.dot_product_attention(query, key, value, **options)
    out, _ = attention(query, key, value, query_positions=positions, **options)
    np.testing.assert_allclose(expected[0], out[0], rtol=0, atol=out_tolerance(np.float32, out))
    np.testing.assert_allclose(expected[1, :20], out[1, :20], rtol=0, atol=out_tolerance(np.float32, out))


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_query_head_n_reads_key_head_n_over_g(num_kv_heads):
    query, key, value = Case(kv_heads=num_kv_heads).arrays()
    out, lse = attention(query, key, value)
    for n in range(4):
        k = n // (4 // num_kv_heads)
        alone = attention(query[:, :, n : n + 1], key[:, :, k : k + 1], value[:, :, k : k + 1])
        np.testing.assert_array_equal(out[:, :, n : n + 1], alone[0])
        np.testing.assert_array_equal(lse[:, :, n : n + 1], alone[1])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_agrees_with_dense_attention_on_every_option(options):
    options = options | {"key_value_seq_lengths": np.array([37, 6], np.int32)}
    query, key, value = Case().arrays()
    key_64, value_64, others = multiplied_out(key, value, **options)
    assert_state(dense_attention(query, key, value, **options), attention(query, key_64, value_64, **others))


def test_imports_nothing_of_what_it_checks():
    imported = [node for node in ast.walk(ast.parse(inspect.getsource(inspect.getmodule(attention))))
                if isinstance(node, ast.Import | ast.ImportFrom)]  # fmt: skip
    assert [alias.name for node in imported for alias in node.names] == ["numpy"]
