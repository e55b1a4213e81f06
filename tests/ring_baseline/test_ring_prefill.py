"""ring_prefill: prompts of any length in natural order, into a cache that new tokens follow."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_attention
from dense import dense_attention
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tree_attn import KVCache, make_mesh
from tree_attn.ring_baseline import ring_prefill

B, K, N, H = 2, 2, 4, 8


def draw(num_tokens, seed=0):
    """Returns query, key and value in natural order."""
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=(B, num_tokens, heads, H)), jnp.float32) for heads in (N, K, K)]


def create(num_devices=3, **options):
    sizes = dict(batch=B, capacity=24, num_kv_heads=K, head_dim=H, dtype=jnp.float32)
    return KVCache.create(**sizes | {"mesh": make_mesh({"seq": num_devices}), "axis_name": "seq"} | options)


@pytest.mark.parametrize("num_tokens, block_size, lengths", [(13, 1, [13, 5]), (7, 2, None), (24, 1, [0, 24])])
def test_prompts_and_the_tokens_after_them_are_attended_to_as_dense_attention_does(num_tokens, block_size, lengths):
    prompt, new = draw(num_tokens), draw(2, seed=1)
    counts = np.array([num_tokens] * B if lengths is None else lengths, np.int32)
    # Whatever the padding of prompts holds: it is never read.
    prompt = [
        jnp.where(np.arange(num_tokens)[None, :, None, None] < counts[:, None, None, None], x, jnp.nan) for x in prompt
    ]
    cache = create(block_size=block_size, capacity=num_tokens + 2, keeps_value_sum=True)

    @jax.jit
    def run(cache, prompt, lengths, new):
        cache, out = ring_prefill(cache, *prompt, lengths=lengths)
        filled = cache
        query, key, value = new
        cache = cache.append(key, value)
        return filled, out, cache.attend(query, is_causal=True, return_lse=True), cache.value_mean(cache.lengths)

    cache, out, got, mean = run(cache, prompt, None if lengths is None else counts, new)
    np.testing.assert_array_equal(cache.lengths, counts)
    assert out.shape == (B, num_tokens, N, H)
    for b, length in enumerate(counts):
        query, key, value = (x[b : b + 1, :length] for x in prompt)
        if length:
            expected, _ = dense_attention(query, key, value, is_causal=True)
            np.testing.assert_allclose(out[b : b + 1, :length], expected, atol=2e-6)
        query, key, value = (jnp.concatenate([old, x[b : b + 1]], axis=1) for old, x in zip((query, key, value), new))
        assert_attention([x[b : b + 1] for x in got], query[:, -2:], key, value, is_causal=True)
        np.testing.assert_allclose(mean[b], value[0].mean(axis=0), atol=1e-6)


@pytest.mark.parametrize("stacks_layers", [True, False])
def test_each_layer_takes_its_prompt_and_options_reach_the_ring(stacks_layers):
    prompts = [draw(5, seed=layer) for layer in range(2)]
    cache = create(num_layers=2, stacks_layers=stacks_layers, keeps_value_sum=True)
    outs = []
    for layer, prompt in enumerate(prompts):
        cache, out = jax.jit(partial(ring_prefill, layer=layer, local_window_size=(2, 0)))(cache, *prompt)
        outs.append(out)
    for layer, (query, key, value) in enumerate(prompts):
        expected, _ = dense_attention(query, key, value, is_causal=True, local_window_size=(2, 0))
        np.testing.assert_allclose(outs[layer], expected, atol=2e-6)
        np.testing.assert_allclose(cache.value_mean(cache.lengths, layer), value.mean(axis=1), atol=1e-6)
    np.testing.assert_array_equal(cache.lengths, [5, 5])


def test_a_prompt_takes_the_place_of_what_was_refused():
    cache = jax.jit(KVCache.append)(create(capacity=6), *draw(7)[1:])
    assert np.asarray(cache.overflowed).all()
    cache, _ = ring_prefill(cache, *draw(4))
    cache.check_room(2)


def test_a_query_for_each_key_is_asked_for_by_name():
    with pytest.raises(ValueError, match="query must have one position per key, S = 4, got T = 3"):
        ring_prefill(create(), draw(3)[0], *draw(4)[1:])


def test_inside_a_shard_map_whole_arrays_are_refused():
    cache = create()
    call = lambda cache, *prompt: ring_prefill(cache, *prompt)[1]
    specs = dict(in_specs=(cache.specs(), P(), P(), P()), out_specs=P())
    with pytest.raises(ValueError, match="ring_prefill takes whole arrays, and a shard_map binds axis_name"):
        jax.eval_shape(jax.shard_map(call, mesh=cache.mesh, **specs), cache, *draw(3))


def test_explicit_axes_of_sequence_and_batch_take_prompts_of_any_length():
    mesh = jax.make_mesh((2, 3), ("data", "seq"), (AxisType.Explicit,) * 2, devices=jax.devices()[:6])
    cache = create(mesh=mesh, batch_axis_name="data", block_size=2)
    prompt = draw(7)
    cache, out = jax.jit(ring_prefill)(cache, *prompt)
    assert jax.typeof(out).sharding.spec[:2] == ("data", None)
    expected, _ = dense_attention(*prompt, is_causal=True)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    np.testing.assert_array_equal(cache.lengths, [7] * B)
