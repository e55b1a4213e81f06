"""The tolerance policy, in one place, for tests, `tree-attn compare` and the GPU check alike.

Errors are against the float64 oracle (`tree_attn.reference`).
- `lse` is float32 at every boundary and always tight: `rtol = atol = 2e-5`, whatever the input's dtype. A kernel that
  keeps its statistics in float32 meets that; one that rounds them to bf16 misses it a hundredfold.
- `out` in float32: `rtol = atol = 2e-5`, and more where logits are huge. A float32 logit (or lse) of size L has an
  error of `eps L`, and `exp` turns it into that relative error of a weight: 1e-3 for logits of 1e4.
- `out` in bf16 or fp16: the largest error is at most `RATIO` times that of `plain_attention` in the same dtype, plus
  one rounding of the largest output. An absolute bound would pass wrong kernels on small values, or fail right ones on
  large values.
- with too many keys for a plain implementation (`tree-attn compare`, `doctor`): a number of roundings of the largest
  output, `relative_out_tolerance`.
"""

import jax
import jax.numpy as jnp
import numpy as np

FLOAT32_TOLERANCE = 2e-5
LSE_TOLERANCE = 2e-5
RATIO = 2.0
ROUNDINGS = 4  # of a logit on its way to a weight: product, scale, difference to the maximum, merge


def plain_attention(query, key, value, visible=None, scale: float | None = None):
    """Computes attention plainly, in the inputs' own dtype: the yardstick of the policy.

    Products are accumulated in float32; weights and result are rounded once.

    query `[B, T, N, H]`, key, value `[B, S, K, H]`; visible: bool broadcastable to `[B, N, T, S]`.
    """
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    logits = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=jnp.float32) * scale
    logits = logits if visible is None else jnp.where(visible, logits, -jnp.inf)
    weights = jnp.nan_to_num(jax.nn.softmax(logits, axis=-1)).astype(value.dtype)
    out = jnp.einsum("bnts,bsnh->btnh", weights, value, preferred_element_type=jnp.float32)
    return out.astype(query.dtype)


def max_abs_error(actual, expected) -> float:
    """Returns the largest absolute difference; equal infinities count as 0, a NaN or a lone infinity as infinity."""
    actual, expected = np.asarray(actual).astype(np.float64), np.asarray(expected, np.float64)
    if actual.shape != expected.shape:
        raise ValueError(f"actual must have the shape of expected, {expected.shape}, got {actual.shape}")
    same = actual == expected
    difference = np.abs(np.where(same, 0, actual) - np.where(same, 0, expected))
    return float(np.max(np.nan_to_num(difference, nan=np.inf), initial=0.0))


def out_tolerance(dtype, expected, plain_out=None, expected_lse=0.0) -> float:
    """Returns the largest error allowed in `out` of `dtype` whose exact value is `expected`.

    Args:
      plain_out: the result of `plain_attention` on the same inputs; needed for narrow dtypes.
      expected_lse: the exact lse; needed where logits are huge, because it bounds their size.
    Raises:
      ValueError: a narrow dtype without `plain_out`.
    """
    dtype = jnp.dtype(dtype)
    largest = float(np.max(np.abs(expected), initial=0.0))
    if dtype == jnp.float32:
        logit_rounding = float(jnp.finfo(dtype).eps) * _largest_finite(expected_lse)
        return FLOAT32_TOLERANCE * (1.0 + largest) + ROUNDINGS * logit_rounding * largest
    if plain_out is None:
        raise ValueError(f"plain_out must be given for dtype {dtype}: its tolerance is relative to that error")
    return RATIO * max_abs_error(plain_out, expected) + float(jnp.finfo(dtype).eps) * largest


def lse_tolerance(expected) -> float:
    """Returns the largest error allowed in `lse` whose exact value is `expected`."""
    return LSE_TOLERANCE * (1.0 + _largest_finite(expected))


def _largest_finite(x) -> float:
    x = np.asarray(x, np.float64)
    return float(np.max(np.abs(x[np.isfinite(x)]), initial=0.0))


def relative_out_tolerance(dtype, expected) -> float:
    """Returns the largest error allowed in `out`, as roundings of the largest entry of its exact value `expected`.

    16-bit kernels round the output once and the weights once more: 2 eps. float32 kernels also lose digits in the
    logits, whose errors grow with the square root of the head dim: 64 eps.
    """
    eps = float(jnp.finfo(dtype).eps)
    return (64 if eps < 1e-4 else 2) * eps * float(np.max(np.abs(expected), initial=0.0))
