"""A call of the kernel for few rows, checked and planned from its shapes: the entry for models."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from tree_attn.kernels.few_rows import multiply_few_rows
from tree_attn.kernels.few_rows_layout import FewRowsShape, few_rows_config, overlaps, unsupported
from tree_attn.kernels.tuning import num_sms


def few_rows_product(
    x, weights, *, scale=None, eps: float | None = None, adds_one: bool = False, activation: str | None = None,
    residual=None, out_dtype=None, is_early: bool = False, layout: Mapping[str, int] | None = None,
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
      layout: fields of `FewRowsConfig` that are to differ from those chosen, for measurements.

    Returns:
      y, `[rows, O]`.

    Raises:
      ValueError: the kernel cannot multiply these, or this JAX cannot begin early.
    """
    rows, (out_features, in_features) = x.shape[0], weights.shape[-2:]
    reason = unsupported(rows, out_features, in_features, x.dtype, activation)
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
    config = dataclasses.replace(few_rows_config(shape, num_sms(), is_early), **(layout or {}))
    weights = weights.reshape(shape.parts, out_features, in_features)
    return multiply_few_rows(x, weights, scale, residual, shape=shape, config=config)
