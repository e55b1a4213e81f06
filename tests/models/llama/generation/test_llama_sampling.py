"""Choosing tokens: greedy ties, and which tokens each option can draw."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tree_attn.models.llama import Sampling
from tree_attn.models.llama.generation.sampling import log_probability, next_tokens

KEY = jax.random.key(0)


def draws(sampling: Sampling, logits, count: int = 400) -> np.ndarray:
    """Tokens drawn from one row of logits under `count` keys."""
    return np.asarray(next_tokens(jnp.tile(jnp.asarray(logits), (count, 1)), sampling, jax.random.split(KEY, count))[0])


@pytest.mark.parametrize("num_shards", [1, 2, 8])
def test_greedy_in_pieces_is_argmax_and_ties_go_to_the_lowest_token(num_shards):
    logits = jnp.round(4 * jax.random.normal(jax.random.key(1), (64, 16)))
    expected = np.argmax(np.asarray(logits), axis=-1)
    assert (np.sum(np.asarray(logits) == np.max(np.asarray(logits), -1, keepdims=True), -1) > 1).any()
    tokens, _ = next_tokens(logits, Sampling(), jax.random.split(KEY, 64), num_shards)
    np.testing.assert_array_equal(tokens, expected)


def exact_log_probabilities(logits, tokens) -> np.ndarray:
    """The same in float64."""
    exact = np.asarray(logits, np.float64)
    shifted = exact - exact.max(-1, keepdims=True)
    return (shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))[np.arange(len(exact)), tokens]


@pytest.mark.parametrize("num_shards", [1, 2, 8])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_greedy_tokens_come_with_their_log_probability(num_shards, offset):
    logits = offset + jax.random.normal(jax.random.key(2), (16, 1024))
    logits = logits.at[0, :512].set(-jnp.inf).at[1, 3:].set(-jnp.inf)  # pieces with nothing to choose
    tokens, found = jax.jit(next_tokens, static_argnums=(1, 3))(logits, Sampling(), None, num_shards)
    np.testing.assert_allclose(found, exact_log_probabilities(logits, tokens), rtol=1e-6, atol=1e-6)


def test_drawn_tokens_come_with_their_log_probability_among_all():
    logits = 3 * jax.random.normal(jax.random.key(2), (16, 1024))
    tokens, found = next_tokens(logits, Sampling(temperature=0.7, top_k=4), jax.random.split(KEY, 16))
    np.testing.assert_allclose(found, exact_log_probabilities(logits, tokens), rtol=1e-6, atol=1e-5)
    np.testing.assert_array_equal(found, log_probability(logits, tokens))


@pytest.mark.parametrize("num_shards", [1, 3])
def test_logits_without_a_number_choose_a_token_that_is_there(num_shards):
    nan, inf = jnp.nan, jnp.inf
    logits = jnp.array([[nan, 1.0, 2.0], [1.0, nan, nan], [nan] * 3, [-inf] * 3, [0.0, inf, 1.0], [3.0, -inf, -inf]])
    tokens, found = next_tokens(logits, Sampling(), None, num_shards)
    np.testing.assert_array_equal(tokens, np.argmax(logits, axis=-1))
    np.testing.assert_array_equal(found, [nan] * 5 + [0.0])
    assert not np.signbit(found[-1])


def test_top_k_draws_only_the_k_most_likely():
    assert set(draws(Sampling(temperature=2.0, top_k=2), [0.0, 3.0, 1.0, 2.9])) == {1, 3}


def test_top_k_above_the_vocabulary_is_all_of_it():
    assert set(draws(Sampling(temperature=5.0, top_k=100), [0.0, 0.1, 0.2])) == {0, 1, 2}


def test_top_p_draws_the_fewest_tokens_that_reach_p():
    logits = np.log([0.5, 0.3, 0.15, 0.05]).astype(np.float32)
    assert set(draws(Sampling(temperature=1.0, top_p=0.7), logits)) == {0, 1}
    assert set(draws(Sampling(temperature=1.0, top_p=0.4), logits)) == {0}
    assert set(draws(Sampling(temperature=1.0, top_p=1.0), logits)) == {0, 1, 2, 3}


def test_temperature_draws_in_proportion():
    logits = np.log([0.8, 0.2]).astype(np.float32)
    assert np.mean(draws(Sampling(temperature=1.0), logits, 4000)) == pytest.approx(0.2, abs=0.03)
    # At half the temperature probabilities are squared: 0.04 / 0.68.
    assert np.mean(draws(Sampling(temperature=0.5), logits, 4000)) == pytest.approx(0.059, abs=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, r"temperature must be 0 .*, got -0.1"),
        ({"temperature": float("nan")}, r"temperature must be 0 .*, got nan"),
        ({"temperature": 1e-40}, "temperature must be 0 .* or from 1e-30 to 1e\\+30, got 1e-40"),
        ({"temperature": 1e39}, "temperature must be 0 .* or from 1e-30 to 1e\\+30, got 1e\\+39"),
        ({"temperature": "1"}, "temperature must be 0 .*, got '1'"),
        ({"temperature": True}, "temperature must be 0 .*, got True"),
        ({"top_k": 2.5}, "top_k must be 1 or more, got 2.5"),
        ({"top_p": "1"}, "top_p must be above 0 and at most 1, got '1'"),
        ({"seed": 1.0}, "seed must be in .*, got 1.0"),
        ({"top_k": 0}, "top_k must be 1 or more, got 0"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
        ({"seed": -1}, r"seed must be in .*, got -1"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)
