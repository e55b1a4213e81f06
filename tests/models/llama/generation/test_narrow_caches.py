"""Caches narrower than the model: float8, and int8 with scales."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tree_attn.cache import KVCache
from tree_attn.models.llama import Generator, by_name
from tree_attn.models.llama.generation.int8_scales import cache_scales
from tree_attn.models.llama.storage import empty_cache

PROMPTS = [list(range(3, 20)), [5], [9, 8, 7, 60, 2, 33]]


@pytest.mark.slow
def test_a_float8_cache_takes_a_quarter_of_float32_and_changes_logits_a_little(tiny_model, cache_bytes):
    model = tiny_model(8)
    steps, num_bytes = {}, {}
    for dtype in (None, jnp.float8_e4m3fn):
        generator = Generator(model, by_name("tree", model.sharding), cache_dtype=dtype)
        steps[dtype] = [np.asarray(step.logits) for step in generator.stream(PROMPTS, 2)]
        num_bytes[dtype] = cache_bytes(generator, PROMPTS, 2)
    assert num_bytes[None] == 4 * num_bytes[jnp.float8_e4m3fn]
    whole, narrow = steps.values()
    np.testing.assert_array_equal(whole[0], narrow[0])  # prompts are read in full precision
    with pytest.raises(ValueError, match=r"cache_dtype must be one of 'float32', .*'int8', got 'bfloat16'"):
        Generator(model, by_name("tree", model.sharding), cache_dtype=jnp.bfloat16)
    assert 1e-4 < np.abs(whole[1] - narrow[1]).max() < 0.2 * np.abs(whole[1]).max()


@pytest.mark.slow
def test_an_int8_cache_gives_what_attention_to_the_multiples_of_its_scales_gives(tiny_model, monkeypatch):
    """A float32 cache that is given those multiples gives the same logits to within rounding, wherever keys are."""
    model = tiny_model(1)
    scales = cache_scales(model, by_name("single", model.sharding))
    prompts = [[*range(3, 25), *rest] for rest in ([5], [9, 8, 7, 60, 2, 33])]

    def logits(name, num_devices, share_prefixes=False, **options) -> list[np.ndarray]:
        model = tiny_model(num_devices)
        generator = Generator(model, by_name(name, model.sharding), **options)
        return [np.asarray(step.logits) for step in generator.stream(prompts, 4, share_prefixes=share_prefixes)]

    def rounded(write):
        def to_multiples(cache, key, value, layer=None, **where):
            key, value = (
                jnp.clip(jnp.round(x / scale), -127, 127) * scale
                for x, scale in (
                    (key, scales["key_scale"][layer, :, None]),
                    (value, scales["value_scale"][layer, :, None]),
                )
            )
            return write(cache, key, value, layer=layer, **where)

        return to_multiples

    with monkeypatch.context() as patch, jax.numpy_rank_promotion("allow"):
        for write in ("write", "write_prefix"):
            patch.setattr(KVCache, write, rounded(getattr(KVCache, write)))
        expected = logits("single", 1)
    int8 = dict(cache_dtype="int8", cache_scales=scales)
    np.testing.assert_allclose(logits("tree", 3, **int8), expected, atol=1e-5)
    shared = logits("single", 1, share_prefixes=True, **int8)  # the remainders are read over int8 too
    assert 1e-5 < np.abs(np.array(shared) - expected).max() < 0.05 * np.abs(expected).max()


def test_scales_are_of_the_largest_keys_and_values_and_for_int8_alone(tiny_model):
    model = tiny_model(1)
    attention = by_name("single", model.sharding)
    tokens = np.arange(12, dtype=np.int32)
    scales = cache_scales(model, attention, tokens=tokens, margin=1.5)
    cache = empty_cache(model.config, model.sharding, batch=1, capacity=12, dtype=jnp.float32)
    _, cache = model.prefill(tokens[None], jnp.array([12], jnp.int32), cache, attention)
    for name, array in (("key_scale", cache.key), ("value_scale", cache.value)):
        np.testing.assert_allclose(scales[name], 1.5 / 127 * np.abs(array).max(axis=(1, 2, 4)), rtol=1e-5)
    with pytest.raises(ValueError, match="cache_scales must be None for cache_dtype='float32': only int8 has them"):
        Generator(model, attention, cache_scales=scales)
    with pytest.raises(ValueError, match="tokens must be one or more, and margin positive, got 12 tokens and margin=0"):
        cache_scales(model, attention, tokens=tokens, margin=0)
