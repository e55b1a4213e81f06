"""Attention to a cache: placement, lengths, scales, layer and mesh come from the cache and cannot contradict it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_attention

from tree_attn import KVCache, PrefixLevel, hydragen_decode, make_mesh, sparq_decode, tree_decode
from tree_attn.ring_baseline import ring_decode

B, K, N, H = 2, 2, 4, 8
LENGTHS = np.array([7, 4], np.int32)
EXACT = dict(num_components=H, num_keys=64)  # SparQ that leaves nothing out


def draw(num_tokens, heads=K, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(B, num_tokens, heads, H)), jnp.float32)


def create(num_devices=3, **options):
    sizes = dict(batch=B, capacity=12, num_kv_heads=K, head_dim=H, dtype=jnp.float32)
    return KVCache.create(mesh=make_mesh({"seq": num_devices}), axis_name="seq", **sizes | options)


def joined(old, new):
    """Returns each sequence's first tokens, as many as `LENGTHS` says, and after them the new ones; then zeros."""
    whole = np.zeros((B, LENGTHS.max() + new.shape[1], K, H), np.float32)
    for b, length in enumerate(LENGTHS):
        whole[b, : length + new.shape[1]] = np.concatenate([old[b, :length], new[b]])
    return whole


@pytest.mark.parametrize(
    "attention, options",
    [(tree_decode, {}), (tree_decode, {"reduction": "allreduce"}), (ring_decode, {}), (sparq_decode, EXACT)],
    ids=["tree", "allreduce", "ring", "sparq"],
)
@pytest.mark.parametrize("block_size", [1, 2])
def test_appended_tokens_are_attended_to_where_they_lie(attention, options, block_size):
    key, value, query = draw(7), draw(7, seed=1), draw(1, heads=N, seed=2)
    cache = create(block_size=block_size, keeps_value_sum=True, keeps_key_by_component=True)

    @jax.jit
    def run(cache):
        cache = cache.append(key, value).with_lengths(LENGTHS)
        return cache.attend(query, attention=attention, return_lse=True, **options)

    assert_attention(run(cache), query, key, value, key_value_seq_lengths=LENGTHS)


def test_sparq_gets_the_mean_and_the_components_that_a_cache_keeps():
    """The mean is of T = 1 or of queries that all see the same; of causal queries each has its own."""
    seen = {}

    def spy(query, key, value, *, value_mean=None, key_by_component=None, **options):
        seen.update(value_mean=value_mean, key_by_component=key_by_component, **options)
        return query

    value = draw(3)
    cache = create(keeps_value_sum=True, keeps_key_by_component=True).append(draw(3), value)
    cache.attend(draw(1, heads=N), attention=spy)
    np.testing.assert_allclose(seen["value_mean"], value.mean(axis=1), rtol=1e-6)
    np.testing.assert_array_equal(seen["key_by_component"], cache.key_by_component)
    assert seen["block_size"] == 1 and seen["mesh"] is cache.mesh and seen["axis_name"] == "seq"
    assert "key_scale" not in seen and "value_scale" not in seen
    cache.attend(draw(2, heads=N), attention=spy, is_causal=True)
    assert seen["value_mean"] is None
    cache.attend(draw(2, heads=N), attention=spy)
    assert seen["value_mean"] is not None
    cache.attend(draw(2, heads=N), attention=partial(spy, is_causal=True))
    assert seen["value_mean"] is None
    create().attend(draw(1, heads=N), attention=spy)
    assert seen["value_mean"] is seen["key_by_component"] is None


@pytest.mark.parametrize("stacks_layers", [True, False])
@pytest.mark.parametrize("num_new", [1, 3])
def test_a_step_of_layers_attends_between_write_and_advance(stacks_layers, num_new):
    """One step of a model: each layer writes its tokens and attends to them too, then all are counted."""
    old = [(draw(7, seed=layer), draw(7, seed=10 + layer)) for layer in range(2)]
    new = [(draw(num_new, seed=20 + layer), draw(num_new, seed=30 + layer)) for layer in range(2)]
    query = draw(num_new, heads=N, seed=40)
    cache = create(num_layers=2, stacks_layers=stacks_layers)

    def layer_step(cache, inputs):
        layer, key, value = inputs
        cache = cache.write(key, value, layer=layer)
        return cache, cache.attend(query, layer=layer, num_new=num_new, is_causal=num_new > 1, return_lse=True)

    @jax.jit
    def step(cache):
        for layer, (key, value) in enumerate(old):
            cache = cache.write(key, value, layer=layer)
        cache = cache.with_lengths(LENGTHS)
        if stacks_layers:
            stacked = [jnp.stack(arrays) for arrays in zip(*new, strict=True)]
            cache, outs = jax.lax.scan(layer_step, cache, (jnp.arange(2, dtype=jnp.int32), *stacked))
            outs = [jax.tree.map(lambda x, layer=layer: x[layer], outs) for layer in range(2)]
        else:
            outs = []
            for layer, (key, value) in enumerate(new):
                cache, out = layer_step(cache, (layer, key, value))
                outs.append(out)
        return cache.advance(num_new), outs

    cache, outs = step(cache)
    np.testing.assert_array_equal(cache.lengths, LENGTHS + num_new)
    options = dict(key_value_seq_lengths=LENGTHS + num_new, is_causal=num_new > 1)
    for out, before, after in zip(outs, old, new, strict=True):
        assert_attention(out, query, *map(joined, before, after), **options)


def test_a_refused_write_is_not_attended_to():
    """A sequence without room keeps its tokens: those that were not written are not counted."""
    key, value, query = draw(11), draw(11, seed=1), draw(2, heads=N, seed=2)
    cache = create().append(key, value).with_lengths([11, 4])

    @jax.jit
    def run(cache):
        return cache.write(draw(2) + jnp.nan, draw(2) + jnp.nan).attend(query[:, :1], num_new=2, return_lse=True)

    out, lse = run(cache)
    assert np.isnan(out[1]).all()
    assert_attention((out[:1], lse[:1]), query[:1, :1], key[:1], value[:1])


def test_scales_come_from_the_cache():
    scales = dict(key_scale=jnp.asarray([0.02, 0.1]), value_scale=jnp.asarray([0.05, 0.01]))
    key, value, query = draw(7), draw(7, seed=1), draw(1, heads=N, seed=2)
    cache = create(dtype=jnp.int8, **scales).append(key, value)
    named = {name: np.asarray(scale) for name, scale in scales.items()}
    whole = [np.asarray(x) / scale[:, None] for x, scale in zip((key, value), named.values(), strict=True)]
    stored = [np.clip(np.round(x), -127, 127) for x in whole]
    got = jax.jit(lambda cache: cache.attend(query, return_lse=True))(cache)
    assert_attention(got, query, *stored, **named)


def test_operands_serve_functions_that_attend_does_not_call():
    """A shared prefix before a cache: without a tree it is the cache's own attention."""
    key, value, query = draw(5), draw(5, seed=1), draw(1, heads=N, seed=2)
    cache = create(num_layers=2).write(key, value, layer=1).advance(5)
    prefix = [draw(3, seed=seed)[:1] for seed in (3, 4)]
    level = PrefixLevel(key=prefix[0], value=prefix[1], sequences=((0, 1),))
    got = jax.jit(lambda cache: hydragen_decode(query, [level], **cache.operands(1), return_lse=True))(cache)
    whole = [jnp.concatenate([jnp.repeat(x, B, axis=0), suffix], axis=1) for x, suffix in zip(prefix, (key, value))]
    assert_attention(got, query, *whole)


def test_an_attention_may_be_bound_to_options():
    key, value, query = draw(5), draw(5, seed=1), draw(1, heads=N, seed=2)
    cache = create().append(key, value)
    bound = partial(tree_decode, reduction="gather", local_window_size=(1, 0), return_lse=True)
    got = jax.jit(lambda cache: cache.attend(query, attention=bound))(cache)
    assert_attention(got, query, key, value, local_window_size=(1, 0))
