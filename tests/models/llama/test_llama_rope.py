"""Rotary embedding: what it must preserve, and the bands of `llama3` scaling."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from tree_attn.models.llama import Llama3RopeScaling
from tree_attn.models.llama.rope import apply_rotation, frequency_divisors, inverse_frequencies, rotation


def rotate(config, heads, first_position):
    positions = first_position + jnp.arange(heads.shape[1], dtype=jnp.int32)[None, :]
    return apply_rotation(heads, rotation(config, positions))


def test_position_zero_is_left_alone_and_lengths_never_change(tiny_config):
    heads = jax.random.normal(jax.random.key(0), (1, 5, 2, tiny_config.head_dim))
    turned = rotate(tiny_config, heads, 0)
    np.testing.assert_array_equal(turned[:, 0], heads[:, 0])
    np.testing.assert_allclose(jnp.linalg.norm(turned, axis=-1), jnp.linalg.norm(heads, axis=-1), rtol=1e-6)


def test_products_depend_on_the_distance_alone(tiny_config):
    query, key = jax.random.normal(jax.random.key(1), (2, 1, 1, 1, tiny_config.head_dim))

    def product(query_position, key_position):
        return jnp.sum(rotate(tiny_config, query, query_position) * rotate(tiny_config, key, key_position))

    np.testing.assert_allclose(product(9, 4), product(105, 100), rtol=1e-4)
    assert abs(product(9, 4) - product(9, 5)) > 1e-3


def test_bfloat16_heads_turn_by_float32_angles(tiny_config):
    heads = jnp.ones((1, 1, 1, tiny_config.head_dim), jnp.bfloat16)
    at_256, at_257 = rotate(tiny_config, heads, 256), rotate(tiny_config, heads, 257)
    assert at_256.dtype == jnp.bfloat16
    assert jnp.any(at_256 != at_257)


def test_frequencies_are_powers_of_theta(tiny_config):
    config = dataclasses.replace(tiny_config, head_dim=4, rope_theta=100.0)
    np.testing.assert_allclose(inverse_frequencies(config), [1.0, 0.1], rtol=1e-7)


def test_layers_with_a_window_may_have_a_theta_of_their_own_which_nothing_scales(tiny_config):
    config = dataclasses.replace(tiny_config, head_dim=4, rope_theta=100.0, rope_linear_factor=8.0)
    np.testing.assert_allclose(inverse_frequencies(config), [0.125, 0.0125], rtol=1e-7)
    np.testing.assert_allclose(inverse_frequencies(config, is_local=True), [0.125, 0.0125], rtol=1e-7)
    config = dataclasses.replace(config, local_rope_theta=25.0)
    np.testing.assert_allclose(inverse_frequencies(config, is_local=True), [1.0, 0.2], rtol=1e-7)


def test_llama3_scaling_keeps_short_wavelengths_stretches_long_ones_and_joins_them():
    scaling = Llama3RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
    turns_in_context = np.array([100.0, 4.0, 2.5, 1.0, 0.01])
    divisors = frequency_divisors(turns_in_context * 2 * np.pi / 8192, scaling)
    # Halfway between the cut-offs the frequency is the mean of the kept and the stretched one.
    np.testing.assert_allclose(divisors, [1, 1, 1 / (0.5 / 8 + 0.5), 8, 8], rtol=1e-6)
