"""Models with a window: what they cannot do yet is refused, before anything is compiled."""

import dataclasses

import jax.numpy as jnp
import pytest

from tree_attn.models.llama import Generator, Llama, by_name, parameters
from tree_attn.models.llama.attention_choice import check_model_options
from tree_attn.models.llama.evaluation.scorer import Scorer
from tree_attn.models.llama.storage import empty_cache
from tree_attn.sparq import SparqOptions

PREFIXED = "tokens would see a prefix whole, where the model's layers have a window"


@pytest.fixture(scope="module")
def windowed(tiny_config, sharding_over) -> Llama:
    """A random model with a window of 5 positions in its first layer."""
    config = dataclasses.replace(tiny_config, window=5, global_layers=(1,))
    sharding = sharding_over(config, 1)
    return Llama(config, sharding, parameters.random(sharding, jnp.float32))


def test_prefixes_are_not_shared_and_prompts_are_read_whole(windowed):
    attention = by_name("tree", windowed.sharding)
    generator = Generator(windowed, attention)
    prompts = [[1] * 40, [1] * 40]
    assert len(generator.prefix_tree(prompts).descendants) == 1
    with pytest.raises(NotImplementedError, match=f"share_prefixes=True: {PREFIXED}"):
        generator.prefix_tree(prompts, share_prefixes=True)
    with pytest.raises(NotImplementedError, match=f"prefill_chunk=8: {PREFIXED}"):
        Generator(windowed, attention, prefill_chunk=8)


def test_a_prompt_in_chunks_is_refused_by_the_model_itself(windowed):
    tokens, lengths = jnp.zeros((1, 8), jnp.int32), jnp.full(1, 8, jnp.int32)
    cache = empty_cache(windowed.config, windowed.sharding, batch=1, capacity=8, dtype=jnp.float32)
    with pytest.raises(NotImplementedError, match=f"chunk=4: {PREFIXED}"):
        windowed.prefill(tokens, lengths, cache, by_name("tree", windowed.sharding), chunk=4)


def test_sparse_attentions_are_refused(windowed):
    sparq = by_name("sparq", windowed.sharding, sparq=SparqOptions(num_components=4, num_keys=8))
    with pytest.raises(NotImplementedError, match="attention='sparq' has no form for the model's window=5"):
        Generator(windowed, sparq)
    with pytest.raises(NotImplementedError, match="methods are compared on models whose layers see all keys"):
        Scorer(windowed)

    capped = dataclasses.replace(windowed.config, window=None, global_layers=(), attention_soft_cap=50.0)
    with pytest.raises(NotImplementedError, match="'sparq' has no form for the model's attention_soft_cap=50"):
        check_model_options("sparq", capped)
    with pytest.raises(NotImplementedError, match=f"prefill_chunk=8: {PREFIXED}"):
        check_model_options("tree", windowed.config, 8)


def test_a_window_that_no_layer_has_limits_nothing(tiny_config):
    config = dataclasses.replace(tiny_config, window=5, global_layers=(0, 1))
    assert config.attention_options(0) == {} and not config.has_layer_kinds
