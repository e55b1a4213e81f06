"""Slots without a key: NaN and infinities there reach no result and no gradient."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients, assert_same_bits
from attention_cases import OPTIONS, Case
from dense import dense_attention

from tree_attn import attend, attention_moments, sparq_decode
from tree_attn.local import garbage, xla

LENGTHS = np.array([19, 0], np.int32)
EVERYTHING = OPTIONS["everything"]
GARBAGE = {"nan": np.nan, "inf": np.inf, "minus_inf": -np.inf}


def spoiled(arrays, garbage, lengths=LENGTHS):
    """Returns query, key and value, with garbage beyond the lengths."""
    query, *stored = arrays
    is_garbage = (np.arange(stored[0].shape[1]) >= lengths[:, None])[:, :, None, None]
    return query, *(jnp.where(is_garbage, jnp.asarray(garbage, x.dtype), x) for x in stored)


@pytest.fixture(params=["whole", "tiled", "looked_at"])
def way(request, monkeypatch):
    """The whole at once, in tiles and chunks that divide nothing, and as GPUs do it."""
    if request.param == "tiled":
        monkeypatch.setattr(xla, "MAX_TILE_QUERIES", 2)
        monkeypatch.setattr(xla, "MIN_CHUNK_KEYS", 8)
        monkeypatch.setattr(xla, "MAX_LOGITS_PER_CHUNK", 1)
    if request.param == "looked_at":
        monkeypatch.setattr(garbage, "default_platform", lambda: "gpu")
    return request.param


def loss(attention, options, query, key, value, per_head):
    out, lse = attention(query, key, value, key_value_seq_lengths=LENGTHS, **(options | per_head))
    weight = lambda x: jnp.sin(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)
    return jnp.sum(out * weight(out)) + jnp.sum(jnp.where(jnp.isneginf(lse), 0.0, lse) * weight(lse)), (out, lse)


@pytest.mark.parametrize("name", ["plain", "everything"])
def test_garbage_reaches_neither_result_nor_gradient(name, way):
    """The gradients are with respect to everything; those of garbage are zeros."""
    options = OPTIONS[name]
    per_head = {n: jnp.asarray(options[n]) for n in ("sinks", "key_scale", "value_scale") if n in options}
    run = jax.jit(
        lambda *arrays: jax.value_and_grad(
            partial(loss, partial(attend, implementation="xla"), options), argnums=(0, 1, 2, 3), has_aux=True
        )(*arrays, per_head)
    )
    arrays = Case().arrays()
    (_, expected), gradients = run(*spoiled(arrays, 0.0))
    assert_gradients(
        gradients, jax.grad(partial(loss, dense_attention, options), (0, 1, 2, 3), has_aux=True)(*arrays, per_head)[0]
    )
    for content in GARBAGE.values():
        (_, got), got_gradients = run(*spoiled(arrays, content))
        assert_same_bits(got, expected)
        assert_gradients(got_gradients, gradients)


@pytest.mark.parametrize("case", [Case(queries=1, dtype="bfloat16"), Case(stored_dtype="float8_e4m3fn")], ids=str)
def test_garbage_in_narrow_dtypes(case, way):
    call = jax.jit(partial(attend, implementation="xla", key_value_seq_lengths=LENGTHS))
    arrays = case.arrays()
    assert_same_bits(call(*spoiled(arrays, np.nan)), call(*spoiled(arrays, 0.0)))


@pytest.mark.parametrize("way", ["looked_at"], indirect=True)
def test_derivatives_of_any_order_and_under_vmap(way):
    call = partial(attention_moments, order=2, key_value_seq_lengths=LENGTHS)
    clean, dirty = (spoiled(Case(queries=2, heads=2, value_dim=3).arrays(), x) for x in (0.0, np.nan))
    mapped = jax.jit(jax.vmap(call))
    got = mapped(*(jnp.stack(pair) for pair in zip(dirty, clean)))
    for mean, expected in zip(got, jax.jit(call)(*clean)):
        assert_gradients([mean[0], mean[1]], [expected, expected])


@pytest.mark.parametrize("reallocate, is_causal", [(True, True), (False, False)])
@pytest.mark.parametrize("by_component", [False, True])
def test_sparq_is_not_reached_either(by_component, reallocate, is_causal):
    def loss(query, key, value):
        copies = {"key_by_component": jnp.moveaxis(key, 1, 3)} if by_component else {}
        out, lse = sparq_decode(
            query, key, value, num_components=4, num_keys=30, local_window=2, key_value_seq_lengths=LENGTHS,
            is_causal=is_causal, reallocate=reallocate, return_lse=True, **copies,
        )  # fmt: skip
        return jnp.sum(out**2) + jnp.sum(jnp.where(jnp.isneginf(lse), 0.0, lse)), (out, lse)

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
    arrays = Case(heads=4, kv_heads=4).arrays()
    for got, expected in zip(*(jax.tree.leaves(run(*spoiled(arrays, x))) for x in (np.nan, 0.0))):
        assert_same_bits(got, expected)


@pytest.mark.parametrize("way", ["tiled"], indirect=True)
@pytest.mark.parametrize("place", ["query", "key", "key_scale"])
def test_logits_that_are_not_numbers_do_not_count_as_no_keys(place, way):
    query, key, value = Case(queries=2).arrays()
    scale = np.ones(2, np.float32)
    options = {"key_scale": scale * np.array([np.nan, 1], np.float32)} if place == "key_scale" else {}
    query = query.at[0, 0].set(jnp.nan) if place == "query" else query
    key = key.at[0, 5].set(jnp.nan) if place == "key" else key
    out, lse = attend(query, key, value, implementation="xla", key_value_seq_lengths=np.array([19, 19]), **options)
    assert np.isnan(lse[0, 0, :2]).all() and np.isnan(out[0, 0, :2]).all()
    assert np.isfinite(lse[1, 0, 2:]).all()


def test_a_query_that_is_no_number_has_an_undefined_lse_whatever_the_shape():
    """XLA's maximum on CPUs loses a NaN in some of these shapes."""
    draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
    key, value, lengths = draw(0, 2, 235, 3, 64), draw(1, 2, 235, 3, 64), np.array([234, 223])
    call = jax.jit(partial(attend, implementation="xla", key_value_seq_lengths=lengths))
    for place in range(6):
        query = draw(2, 2, 3, 3, 64).at[place % 2, place // 2].set(jnp.nan)
        out, lse = call(query, key, value)
        is_undefined = np.isnan(query).all(-1)
        assert (np.isnan(lse) == is_undefined).all() and (np.isnan(out).any(-1) == is_undefined).all()
