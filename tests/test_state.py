"""The laws of the monoid: what every fold of `SoftmaxState` in this library relies on."""

from functools import reduce
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients, assert_rounded_once, assert_same_bits, assert_state
from attention_cases import Case
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tree_attn import SoftmaxState, empty_like, merge_segments, merge_state, merge_states, reference

ROWS, H, N = 6, 3, 4
LAWS = settings(max_examples=30, deadline=None, derandomize=True)
DTYPES = ["float32", "bfloat16", "float16"]
merge_state_jit = jax.jit(merge_state)
merge_segments_jit = jax.jit(merge_segments, static_argnums=2)


@st.composite
def states(draw, lead=(), dtypes=("float32",)):
    """States with ordinary logits, logits of +-1e4, and empty ones."""
    floats = lambda size: st.floats(-size, size, width=32, allow_subnormal=False)
    of_lse = st.one_of(st.just(-np.inf), st.sampled_from([1e4, -1e4]), floats(60))
    lse = draw(arrays(np.float32, (*lead, ROWS), elements=of_lse))
    out = draw(arrays(np.float32, (*lead, ROWS, H), elements=floats(8)))
    out[np.isneginf(lse)] = 0
    return SoftmaxState(jnp.asarray(out, draw(st.sampled_from(dtypes))), jnp.asarray(lse))


def unstack(stacked):
    return [SoftmaxState(stacked.out[i], stacked.lse[i]) for i in range(stacked.lse.shape[0])]


def exact_merge(stacked):
    """The merge along axis 0 in float64."""
    out, lse = (np.asarray(x).astype(np.float64) for x in stacked)
    top = lse.max(axis=0, initial=-np.inf)
    top = np.where(np.isneginf(top), 0, top)
    weights = np.exp(lse - top)
    total = weights.sum(axis=0)
    safe = np.where(total == 0, 1, total)
    merged = np.where(total == 0, -np.inf, top + np.log(safe))
    return SoftmaxState((weights[..., None] * out).sum(axis=0) / safe[..., None], merged)


# The same fold written three ways; each takes states stacked along axis 0.
FOLDS = {
    "merge_state": lambda s: reduce(merge_state, unstack(s)),
    "merge_states": lambda s: merge_states(s, axis=0),
    "merge_segments": lambda s: jax.tree.map(
        lambda x: x[0], merge_segments(s, jnp.zeros(s.lse.shape[0], jnp.int32), 1)
    ),
}
FOLDS_JIT = {name: jax.jit(fold) for name, fold in FOLDS.items()}


@pytest.mark.parametrize("merge", [merge_state, merge_state_jit], ids=["eager", "jit"])
@LAWS
@given(a=states(dtypes=DTYPES))
def test_empty_is_an_exact_identity_on_both_sides(merge, a):
    assert_same_bits(merge(a, empty_like(a)), a)
    assert_same_bits(merge(empty_like(a), a), a)


def test_empty_with_empty_is_empty():
    a = empty_like(SoftmaxState(jnp.ones((2, 3), jnp.bfloat16), jnp.ones(2)))
    assert a.out.dtype == jnp.bfloat16 and not a.out.any() and np.isneginf(a.lse).all()
    assert_same_bits(merge_state(a, a), a)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x, x]), a)
    assert_same_bits(merge_states(stacked, axis=0), a)
    assert_same_bits(merge_states(jax.tree.map(lambda x: x[:0], stacked), axis=0), a)


@pytest.mark.parametrize("merge", [merge_state, merge_state_jit], ids=["eager", "jit"])
@LAWS
@given(a=states(), b=states())
def test_merge_is_commutative_to_the_bit(merge, a, b):
    assert_same_bits(merge(a, b), merge(b, a))


def test_merge_is_commutative_to_the_bit_however_it_is_vectorised():
    """Compilers fuse multiply and add, which rounds one of two products: seen most on wide arrays."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(3 * rng.normal(size=shape), jnp.float32)
    a, b = (SoftmaxState(draw(512, 8), draw(512)) for _ in range(2))
    assert_same_bits(merge_state_jit(a, b), merge_state_jit(b, a))


@LAWS
@given(a=states(), b=states(), c=states())
def test_merge_is_associative(a, b, c):
    assert_state(merge_state_jit(merge_state_jit(a, b), c), merge_state_jit(a, merge_state_jit(b, c)))


@pytest.mark.parametrize("fold", FOLDS_JIT.values(), ids=FOLDS_JIT)
@LAWS
@given(stacked=states(lead=(N,)))
def test_every_fold_is_the_merge_of_all(fold, stacked):
    assert_state(fold(stacked), exact_merge(stacked))


@pytest.mark.parametrize("fold", FOLDS_JIT.values(), ids=FOLDS_JIT)
@LAWS
@given(stacked=states(lead=(2,), dtypes=DTYPES[1:]))
def test_narrow_out_is_rounded_once_and_its_lse_stays_float32(fold, stacked):
    merged, expected = fold(stacked), exact_merge(stacked)
    assert merged.out.dtype == stacked.out.dtype and merged.lse.dtype == jnp.float32
    assert_rounded_once(merged.out, expected.out)
    assert_state(SoftmaxState(jnp.asarray(expected.out), merged.lse), expected)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_merge_states_folds_the_named_axis_of_lse(axis):
    rng = np.random.default_rng(0)
    stacked = SoftmaxState(*(jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, 3, H), (2, 3))))
    axis_first = SoftmaxState(jnp.moveaxis(stacked.out, axis % 2, 0), jnp.moveaxis(stacked.lse, axis, 0))
    assert_state(merge_states(stacked, axis=axis), exact_merge(axis_first))


@LAWS
@given(stacked=states(lead=(N,)), ids=st.lists(st.integers(-2, 4), min_size=N, max_size=N))
def test_merge_segments_merges_each_segment_and_drops_other_ids(stacked, ids):
    merged = merge_segments_jit(stacked, jnp.asarray(ids, jnp.int32), 3)
    for segment in range(3):
        members = np.flatnonzero(np.asarray(ids) == segment)  # often none: the segment is empty
        assert_state(unstack(merged)[segment], exact_merge(jax.tree.map(lambda x, m=members: x[m], stacked)))


def test_a_dropped_state_has_no_gradient():
    """However large its lse is beside those of the segments."""
    stacked = SoftmaxState(jnp.ones((3, H)), jnp.array([0.0, 1e4, -1e4]))
    ids = jnp.array([0, 7, -1], jnp.int32)
    gradient = jax.jit(jax.grad(lambda s: sum(x.sum() for x in merge_segments(s, ids, 1))))(stacked)
    assert_gradients(gradient.lse, jnp.array([1.0, 0.0, 0.0]))
    assert_gradients(gradient.out, jnp.array([1.0, 0.0, 0.0])[:, None] * jnp.ones(H)[None])


@pytest.mark.parametrize("logit_size", [1.0, 1e4])
@pytest.mark.parametrize("fold", FOLDS_JIT.values(), ids=FOLDS_JIT)
@settings(LAWS, max_examples=15)
@given(cuts=st.lists(st.integers(0, 37), min_size=N - 1, max_size=N - 1))
def test_splitting_the_keys_anywhere_equals_the_whole(fold, logit_size, cuts):
    query, key, value = Case(logit_size=logit_size).arrays()
    edges = [0, *sorted(cuts), key.shape[1]]
    parts = [reference.attention(query, key[:, i:j], value[:, i:j]) for i, j in pairwise(edges)]
    stacked = SoftmaxState(*(jnp.asarray(np.stack(x), jnp.float32) for x in zip(*parts)))
    assert_state(fold(stacked), reference.attention(query, key, value))


@pytest.mark.parametrize("fold", FOLDS.values(), ids=FOLDS)
def test_gradients_are_the_softmax_of_lse_and_zero_for_the_empty(fold):
    """d out / d out_i = d lse / d lse_i = w_i, d out / d lse_i = w_i (out_i - out), with w_i = exp(lse_i - lse)."""
    inf = np.inf
    lse = np.array(
        [[0, 1, -inf, -inf, 1e4, -1e4], [2, -inf, 3, -inf, 1e4, -1e4], [1, 0, 1, -inf, -1e4, 1e4]], np.float32
    )
    out = np.random.default_rng(0).normal(size=(*lse.shape, H)).astype(np.float32)
    out[np.isneginf(lse)] = 0
    stacked = SoftmaxState(jnp.asarray(out), jnp.asarray(lse))

    def sums(s):
        merged = fold(s)
        return merged.out.sum(), jnp.where(jnp.isneginf(merged.lse), 0, merged.lse).sum()

    of_out, of_lse = jax.jit(jax.jacrev(sums))(stacked)
    whole = exact_merge(stacked)
    weights = np.where(np.isneginf(lse), 0, np.exp(lse - np.where(np.isneginf(whole.lse), 0, whole.lse)))
    pull = weights * (out - whole.out).sum(axis=-1)
    assert_gradients(of_out, SoftmaxState(np.broadcast_to(weights[..., None], out.shape), pull))
    assert_gradients(of_lse, SoftmaxState(np.zeros_like(out), weights))


def test_no_segments_are_an_empty_state():
    states = SoftmaxState(jnp.ones((3, 2, 4)), jnp.zeros((3, 2)))
    merged = merge_segments(states, jnp.zeros(3, jnp.int32), num_segments=0)
    assert merged.out.shape == (0, 2, 4) and merged.lse.shape == (0, 2)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x: merge_state(tuple(x), x), "a must be a SoftmaxState, got tuple"),
        (lambda x: merge_state(x, None), "b must be a SoftmaxState, got NoneType"),
        (lambda x: merge_states([x], axis=0), "stacked must be a SoftmaxState, got list"),
        (lambda x: merge_states(x, axis=0.5), r"axis must be an axis of lse \(2,\), got 0.5"),
        (lambda x: merge_segments({}, np.zeros(2, np.int32), 2), "states must be a SoftmaxState, got dict"),
        (lambda x: merge_segments(x, np.zeros(2, np.int32), 2.5), "num_segments must be an integer, got 2.5"),
        (lambda x: merge_segments(x, [0.0, 1.0], 2), "segment_ids must be integers, got float64"),
        (lambda x: merge_state(x._replace(out=[1.0]), x), "a.out must be an array of floats, got list"),
        (lambda x: merge_state(x._replace(lse=np.zeros(2, int)), x), "a.lse must be an array of floats, got int64"),
        (lambda x: empty_like(tuple(x)), "state must be a SoftmaxState, got tuple"),
    ],
)
def test_a_wrong_call_names_its_argument(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call(SoftmaxState(np.zeros((2, 4), np.float32), np.zeros(2, np.float32)))
