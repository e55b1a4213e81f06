"""Assertions on attention results. How near is near is decided in `tree_attn.tolerances`, nowhere else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from attention_cases import multiplied_out

from tree_attn import Shard, reference
from tree_attn.arguments import AttentionOptions
from tree_attn.masking import visibility
from tree_attn.tolerances import lse_tolerance, max_abs_error, out_tolerance, plain_attention


def assert_attention(got, query, key, value, **options):
    """Asserts that `got = (out, lse)` is the attention of these arrays (in natural order) under these options."""
    key, value, options = multiplied_out(key, value, **options)
    out, lse = got
    expected_out, expected_lse = reference.attention(query, key, value, **options)
    assert out.dtype == query.dtype
    assert_lse(lse, expected_lse)
    plain_out = None if query.dtype == jnp.float32 else _plain(query, key, value, options)
    tolerance = out_tolerance(query.dtype, expected_out, plain_out, expected_lse)
    assert max_abs_error(out, expected_out) <= tolerance < np.inf, _farthest(out, expected_out)
    assert not np.asarray(out)[np.isneginf(expected_lse)].any(), "a query that sees nothing must have out = 0"


def assert_state(got, expected):
    """Asserts that two states are equal to within float32: `expected` from the oracle, or merged another way."""
    assert_lse(got[1], expected[1])
    assert max_abs_error(got[0], expected[0]) <= out_tolerance(
        jnp.float32, np.asarray(expected[0]), expected_lse=expected[1]
    )
    assert not np.asarray(got[0])[np.isneginf(np.asarray(expected[1]))].any(), "an empty state must have out = 0"


def assert_lse(lse, expected):
    """Asserts that `lse` is float32, right, and -inf exactly where the expected one is."""
    assert lse.dtype == jnp.float32
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(expected), "which queries see nothing")
    assert max_abs_error(lse, expected) <= lse_tolerance(expected), _farthest(lse, expected)


def _farthest(got, expected) -> str:
    """Returns where results differ most: of large arrays an assertion prints the corners only."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    errors = [max_abs_error(*pair) for pair in zip(got.flat, expected.flat)]
    place = tuple(int(i) for i in np.unravel_index(np.argmax(errors), got.shape))
    return f"at {place} it is {got[place]}, not {expected[place]}"


def assert_rounded_once(out, expected):
    """Asserts that a bfloat16 or float16 `out` is `expected` rounded at the end only: it adds no other error."""
    no_other_error = np.asarray(expected, np.float64)
    assert max_abs_error(out, expected) <= out_tolerance(out.dtype, expected, plain_out=no_other_error)


def assert_gradients(got, expected):
    """Asserts that two trees of float32 gradients are equal and finite."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert max_abs_error(a, b) <= out_tolerance(jnp.float32, np.asarray(b))
        assert np.isfinite(np.asarray(a)).all()


def assert_same_bits(a, b):
    """Asserts that two trees hold the same numbers in the same dtypes."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def _plain(query, key, value, options):
    """The yardstick of narrow dtypes, K and V rounded to them. It knows no cap and no sinks: it errs enough without."""
    arrays = {name: options[name] for name in ("key_value_seq_lengths", "query_positions") if name in options}
    static = tuple((name, options[name]) for name in ("is_causal", "local_window_size", "scale") if name in options)
    return _plain_compiled(query, key, value, arrays, static)


@functools.partial(jax.jit, static_argnums=4)  # op by op XLA would compile each for its shape
def _plain_compiled(query, key, value, arrays, static):
    options = dict(static)
    scale = options.pop("scale", None)
    view = visibility(
        AttentionOptions(**arrays, **options),
        batch=query.shape[0],
        num_queries=query.shape[1],
        num_slots=key.shape[1],
        shard=Shard(),
    )
    key, value = (jnp.asarray(x, query.dtype) for x in (key, value))
    return plain_attention(query, key, value, view.mask()[:, None], scale)
