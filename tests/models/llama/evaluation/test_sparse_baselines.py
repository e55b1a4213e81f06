"""The baselines of SparQ, each against a few lines of numpy that keep the keys it should."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tree_attn import reference
from tree_attn.models.llama.evaluation.baselines import flexgen_decode, h2o_decode, key_scores, lm_infinite_decode

B, S, K, G, H = 2, 20, 2, 2, 8
LENGTHS = np.array([20, 11], np.int32)


def arrays(queries):
    rng = np.random.default_rng(0)
    shapes = ((B, queries, K * G, H), (B, S, K, H), (B, S, K, H))
    return tuple(jnp.asarray(2 * rng.normal(size=shape), jnp.float32) for shape in shapes)


def weights(query, key, b, t, head, seen_keys):
    """Attention weights of one group of queries over the keys `seen_keys`, `[G, seen_keys]`, float64."""
    q = np.asarray(query, np.float64)[b, t, head * G : head * G + G]
    logits = q @ np.asarray(key, np.float64)[b, seen_keys, head].T * H**-0.5
    unnormalised = np.exp(logits - logits.max(axis=1, keepdims=True))
    return unnormalised / unnormalised.sum(axis=1, keepdims=True)


def attended(query, key, value, keep):
    """Attention in which the group (b, t, head) sees the keys `keep(b, t, head)`."""
    out = np.zeros((*query.shape[:3], H))
    for b, t, head in np.ndindex(B, query.shape[1], K):
        seen_keys = np.asarray(keep(b, t, head))
        values = np.asarray(value, np.float64)[b, seen_keys, head]
        out[b, t, head * G : head * G + G] = weights(query, key, b, t, head, seen_keys) @ values
    return out


def end(b, t, queries):
    return LENGTHS[b] - queries + t + 1


def jitted(function, query, key, value, *rest, **options):
    call = functools.partial(function, **options)
    return jax.jit(lambda *x: call(*x[:-1], key_value_seq_lengths=x[-1]))(query, key, value, *rest, LENGTHS)


@pytest.mark.parametrize("num_keys", [6, 15])
def test_lm_infinite_sees_the_first_and_the_last(num_keys):
    operands = arrays(3)
    out = jitted(lm_infinite_decode, *operands, num_keys=num_keys, num_first=4, is_causal=True)
    every = lambda b, t: range(end(b, t, 3))
    keep = lambda b, t, _: [s for s in every(b, t) if s < 4 or s >= end(b, t, 3) - (num_keys - 4)]
    np.testing.assert_allclose(out, attended(*operands, keep), atol=1e-5)


def test_flexgen_sees_the_highest_exact_scores():
    operands = arrays(1)
    out = jitted(flexgen_decode, *operands, num_keys=5)

    def keep(b, t, head):
        scores = weights(*operands[:2], b, t, head, np.arange(LENGTHS[b])).sum(axis=0)
        return np.argsort(-scores)[:5]

    np.testing.assert_allclose(out, attended(*operands, keep), atol=1e-5)


def test_h2o_keeps_what_was_attended_to_most_and_forgets_the_rest_for_good():
    queries, prompt, budget, window = 4, 6, 5, 2
    query, key, value = arrays(queries + prompt)
    new_queries, prompt_queries = query[:, prompt:], query[:, :prompt]
    scores = jax.jit(lambda *x: key_scores(*x[:2], key_value_seq_lengths=x[2]))(prompt_queries, key, LENGTHS - queries)
    out, left = jitted(h2o_decode, new_queries, key, value, scores, num_keys=budget, local_window=window)

    expected, live = np.zeros((B, K, S)), {(b, head): set(range(S)) for b in range(B) for head in range(K)}
    for b, t, head in np.ndindex(B, prompt, K):
        seen = np.arange(LENGTHS[b] - queries - prompt + t + 1)
        expected[b, head, seen] += weights(prompt_queries, key, b, t, head, seen).sum(axis=0)
    np.testing.assert_allclose(scores, expected, atol=1e-5)

    def keep(b, t, head):
        seen = [s for s in live[b, head] if s < end(b, t, queries)]
        recent = [s for s in seen if s >= end(b, t, queries) - window]
        others = sorted(set(seen) - set(recent), key=lambda s: -expected[b, head, s])
        seen_keys = np.array(recent + others[: budget - len(recent)])
        live[b, head] -= set(seen) - set(seen_keys)
        expected[b, head, seen_keys] += weights(new_queries, key, b, t, head, seen_keys).sum(axis=0)
        return seen_keys

    np.testing.assert_allclose(out, attended(new_queries, key, value, keep), atol=1e-5)
    for b, head in live:
        forgotten = sorted(set(range(LENGTHS[b])) - live[b, head])
        assert forgotten and np.isneginf(np.asarray(left)[b, head, forgotten]).all()


def test_with_room_for_all_keys_each_is_dense():
    operands = arrays(2)
    dense, _ = reference.attention(*operands, key_value_seq_lengths=LENGTHS, is_causal=True)
    options = dict(num_keys=S)
    np.testing.assert_allclose(jitted(lm_infinite_decode, *operands, is_causal=True, **options), dense, atol=1e-5)
    np.testing.assert_allclose(jitted(flexgen_decode, *operands, is_causal=True, **options), dense, atol=1e-5)
    out, _ = jitted(h2o_decode, *operands, jnp.zeros((B, K, S)), **options)
    np.testing.assert_allclose(out, dense, atol=1e-5)


def test_budgets_that_do_not_fit():
    with pytest.raises(ValueError, match="num_keys must be more than num_first=16, got 16"):
        lm_infinite_decode(*arrays(1), num_keys=16)
    with pytest.raises(ValueError, match=r"local_window must lie in \[0, num_keys=4\], got 5"):
        h2o_decode(*arrays(1), jnp.zeros((B, K, S)), num_keys=4, local_window=5)
