"""A call of the kernel for few rows, checked and planned from its shapes: the entry for models."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from tree_attn.kernels.few_rows import multiply_and_sum, multiply_few_rows, multiply_into_cache
from tree_attn.kernels.few_rows_layout import (
    FewRowsShape,
    Heads,
    few_rows_config,
    unsupported,
    unsupported_cache,
)
from tree_attn.kernels.few_rows_sum import SumEnd
from tree_attn.kernels.overlap import overlaps
from tree_attn.kernels.tuning import num_sms


def few_rows_product(
    x, weights, *, scale=None, eps: float | None = None, adds_one: bool = False, activation: str | None = None,
    residual=None, out_dtype=None, is_early: bool = False, shares_sm: bool | None = None,
    layout: Mapping[str, int] | None = None,
):  # fmt: skip
    """Computes `y = f(norm(x) W^T) + residual` of few rows, in one launch.

    Args:
      x: `[rows, I]`, of 1 to 16 rows.
      weights: `[O, I]`; `[2, O, I]` with an activation, for `y = activation(norm(x) W_0^T) * (norm(x) W_1^T)`.
      scale, eps, adds_one: of an RMSNorm of x, as `layers.RMSNorm` has them; scale is `[I]`. None: no norm.
      activation: "silu" or None.
      residual: `[rows, O]` in the dtype of x, or None.
      out_dtype: of y; None: of x.
      is_early: whether weights are read before the previous kernel has ended. No kernel of the program may write them.
      shares_sm: whether an SM has room for a CTA of the next kernel, so that it can begin early too; None: `is_early`.
      layout: fields of `FewRowsConfig` that are to differ from those chosen, for measurements.

    Returns:
      y, `[rows, O]`.

    Raises:
      ValueError: the kernel cannot multiply these, or this JAX cannot begin early.
    """
    rows, (out_features, in_features) = x.shape[0], weights.shape[-2:]
    reason = unsupported(rows, out_features, in_features, x.dtype, activation, has_norm=scale is not None)
    if reason is None and is_early and not overlaps():
        reason = f"is_early must be False with JAX {jax.__version__}, got {is_early}"
    if reason is None and x.dtype != weights.dtype:
        reason = f"x and weights must have one dtype, got {x.dtype} and {weights.dtype}"
    if reason is not None:
        raise ValueError(reason)
    shape = FewRowsShape(
        rows=rows, in_features=in_features, out_features=out_features, parts=1 if activation is None else 2,
        dtype=x.dtype, out_dtype=jnp.dtype(out_dtype or x.dtype), activation=activation,
        eps=None if scale is None else eps, adds_one=adds_one, has_residual=residual is not None,
    )  # fmt: skip
    config = dataclasses.replace(few_rows_config(shape, num_sms(), is_early, shares_sm), **(layout or {}))
    weights = weights.reshape(shape.parts, out_features, in_features)
    return multiply_few_rows(x, weights, scale, residual, shape=shape, config=config)


def few_rows_total(x, weights, residual, rank, buffers) -> jax.Array | None:
    """Returns the sum over devices of their products and, once, of the residual, in one launch.

    Args:
      x: `[rows, I]`, this device's in-features; weights: `[O, I]`; what `few_rows_product` takes.
      residual: `[rows, O]`, the same on all devices; or None. Its dtype is the result's, and else that is float32.
      rank, buffers: where the devices meet (`tree_attn.reduce.fused.meeting`).

    Returns:
      `[rows, O]`; or None: the kernel cannot end so.
    """
    rows, (out_features, in_features) = x.shape[0], weights.shape
    out_dtype = jnp.dtype(jnp.float32 if residual is None else residual.dtype)
    shape = FewRowsShape(
        rows=rows, in_features=in_features, out_features=out_features, parts=1, dtype=x.dtype, out_dtype=out_dtype,
        has_residual=residual is not None,
    )  # fmt: skip
    config = few_rows_config(shape, num_sms())
    if not SumEnd(buffers, config).fits:
        return None
    return multiply_and_sum(x, weights[None], residual, rank, shape=shape, config=config, buffers=buffers)


def few_rows_into_cache(
    x, weights, key, value, slots, cosine_sine, *, scale, eps: float, adds_one: bool = False, is_early: bool = False
):  # fmt: skip
    """Makes queries, keys and values of few tokens, rotates them, and writes keys and values to a cache, in one launch.

    Args:
      x: `[B, T, D]`, of 1 to 16 tokens.
      weights: `[K, G + 2, H, D]`: of each KV head its queries, key and value.
      key, value: the cache, `[B, S, K, H]`, written in place where no later operation reads the old one.
      slots: int32 `[B, T]`, the slot of each token; nothing is written where there is no such slot.
      cosine_sine: float32 `[B, T, 1, H/2]` each, of each token's position. Pairs are `(d, d + H/2)`.
      scale, eps, adds_one, is_early: as in `few_rows_product`.

    Returns:
      Queries `[B, T, K G, H]`, and the cache's keys and values.

    Raises:
      ValueError: the kernel cannot make these.
    """
    (num_kv_heads, members, head_dim, in_features), (batch, tokens, _) = weights.shape, x.shape
    rows, out_features = batch * tokens, num_kv_heads * members * head_dim
    reason = unsupported(rows, out_features, in_features, x.dtype, has_norm=True)
    reason = reason or unsupported_cache(head_dim, x.dtype, key.dtype)
    if reason is None and is_early and not overlaps():
        reason = f"is_early must be False with JAX {jax.__version__}, got {is_early}"
    if reason is not None:
        raise ValueError(reason)
    shape = FewRowsShape(
        rows=rows, in_features=in_features, out_features=out_features, parts=1, dtype=x.dtype, out_dtype=x.dtype,
        eps=eps, adds_one=adds_one, heads=Heads(head_dim=head_dim, group=members - 2, tokens=tokens),
    )  # fmt: skip
    query, key, value = multiply_into_cache(
        x.reshape(rows, in_features), weights.reshape(1, out_features, in_features), scale,
        *places_of_rows(cosine_sine, slots, shape), key, value,
        shape=shape, config=few_rows_config(shape, num_sms(), is_early),
    )  # fmt: skip
    return query.reshape(batch, tokens, -1, head_dim), key, value


def places_of_rows(cosine_sine, slots, shape: FewRowsShape) -> tuple[jax.Array, jax.Array]:
    """Returns angles and slots as `multiply_into_cache` takes them; arguments as in `few_rows_into_cache`."""
    angles = jnp.stack([angle.reshape(shape.rows, -1) for angle in cosine_sine])
    # Rows that pad those of x have no slot.
    return angles, jnp.pad(slots.reshape(shape.rows), (0, shape.columns - shape.rows), constant_values=-1)
