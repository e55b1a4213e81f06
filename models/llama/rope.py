"""Rotary position embedding: plain, and with the scalings of Llama 3.1 and Gemma 3."""

import jax
import jax.numpy as jnp
import numpy as np

from tree_attn.models.llama.config import Llama3RopeScaling, LlamaConfig


def inverse_frequencies(config: LlamaConfig, *, is_local: bool = False) -> np.ndarray:
    """Returns the radians per position of each rotated pair, float32 `[H/2]`.

    Formula: `theta ** (-2 i / H)`, then scaled as the configuration says. Computed in float64 on the host and rounded
    once, for an error here is multiplied by the position.

    Args:
      config: gives theta and scalings.
      is_local: whether it is for layers with a window, which may have a theta of their own.
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    if is_local and config.local_rope_theta is not None:
        return (float(config.local_rope_theta) ** -exponents).astype(np.float32)
    frequencies = float(config.rope_theta) ** -exponents
    if config.rope_linear_factor is not None:
        frequencies = frequencies / config.rope_linear_factor
    if config.rope_scaling is not None:
        frequencies = frequencies / frequency_divisors(frequencies, config.rope_scaling)
    return frequencies.astype(np.float32)


def frequency_divisors(frequencies: np.ndarray, scaling: Llama3RopeScaling) -> np.ndarray:
    """Returns the divisor of each frequency in `llama3` scaling: 1 for short wavelengths, `factor` for long ones.

    Between the two cut-offs the scaled frequency is `(1 - s) f / factor + s f`, with `s` rising linearly from 0 to 1 in
    `original_max_position / wavelength`.
    """
    turns = scaling.original_max_position * frequencies / (2 * np.pi)
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / scaling.factor + smooth)


def rotation(config: LlamaConfig, positions: jax.Array, *, is_local: bool = False) -> tuple[jax.Array, jax.Array]:
    """Returns cosine and sine for each position, float32 `[B, T, 1, H/2]`.

    Args:
      config: gives the frequencies.
      positions: int32 `[B, T]`.
      is_local: as in `inverse_frequencies`.

    The angles are float32 even in a bfloat16 model: bfloat16 cannot tell position 257 from 256.
    """
    angles = positions.astype(jnp.float32)[:, :, None] * inverse_frequencies(config, is_local=is_local)[None, None, :]
    return jnp.cos(angles)[:, :, None, :], jnp.sin(angles)[:, :, None, :]


def apply_rotation(heads: jax.Array, cosine_sine: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns every pair `(x[i], x[i + H/2])` of each head by its position's angle.

    This pairing is Hugging Face's. The original checkpoints, and GGUF files, pair neighbours instead; their query and
    key rows are put in this order when they are read (`gguf.py`).

    Args:
      heads: `[B, T, N, H]`, any float dtype.
      cosine_sine: from `rotation`, float32 `[B, T, 1, H/2]`.

    Returns:
      `[B, T, N, H]` in the dtype of `heads`, computed in float32.

    Source: Su et al., RoFormer (arXiv 2104.09864), section 3.2.
    """
    cosine, sine = cosine_sine
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return turned.astype(heads.dtype)
