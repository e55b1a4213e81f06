"""Gemma's parts of a Llama, where float32 parity would not show them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from tree_attn.models.llama.layer_kinds import rotations
from tree_attn.models.llama.layers import RMSNorm
from tree_attn.models.llama.model import scaled_embedding
from tree_attn.models.llama.parameters import Parameter
from tree_attn.models.llama.rope import rotation


def test_the_factor_of_embeddings_is_rounded_as_they_are(tiny_config):
    """sqrt(32) is 5.6569, and 5.65625 in bfloat16."""
    x = np.random.default_rng(0).standard_normal((1, 4, 32)).astype(jnp.bfloat16)
    scaled = scaled_embedding(jnp.asarray(x), dataclasses.replace(tiny_config, scales_embedding=True))
    wide = x.astype(np.float32)
    np.testing.assert_array_equal(np.asarray(scaled), (wide * np.float32(5.65625)).astype(jnp.bfloat16))
    assert np.any(np.asarray(scaled) != (wide * np.float32(32**0.5)).astype(jnp.bfloat16))


def test_a_norm_that_adds_one_does_so_in_float32_and_rounds_last():
    rng = np.random.default_rng(0)
    x, scale = rng.standard_normal((1, 16)).astype(jnp.bfloat16), (0.01 * rng.standard_normal(16)).astype(jnp.bfloat16)
    wide, parameter = x.astype(np.float32), Parameter(name="norm.scale", shape=(16,), axes=("embed",))
    normalised, factor = wide / np.sqrt(np.mean(wide**2) + 1e-6), 1 + scale.astype(np.float32)
    expected = (normalised * factor).astype(jnp.bfloat16)
    actual = RMSNorm(parameter, 1e-6, lambda _: jnp.asarray(scale), adds_one=True)(jnp.asarray(x))
    np.testing.assert_array_equal(np.asarray(actual), expected)
    for rounded_early in (normalised * (1 + scale).astype(np.float32), normalised.astype(jnp.bfloat16) * factor):
        assert np.any(rounded_early.astype(jnp.bfloat16) != expected)


def test_layers_rotate_by_their_kind_whether_they_are_unrolled_or_not(tiny_config):
    """The middle one of three sees all. So does every layer, or none, where all are alike."""
    config = dataclasses.replace(tiny_config, num_layers=3, local_rope_theta=50.0, window=5, global_layers=(1,))
    positions = jnp.asarray([[3, 17]], jnp.int32)
    local, everywhere = (rotation(config, positions, is_local=is_local) for is_local in (True, False))
    assert np.any(local[0] != everywhere[0])
    for layer, expected in ((0, local), (1, everywhere), (2, local)):
        for index in (layer, jnp.int32(layer)):
            jax.tree.map(np.testing.assert_array_equal, rotations(config, positions)(index), expected)
    for changes, expected in ((dict(global_layers=()), local), (dict(window=None), everywhere)):
        alike = rotations(dataclasses.replace(config, **changes), positions)
        jax.tree.map(np.testing.assert_array_equal, alike(jnp.int32(1)), expected)
