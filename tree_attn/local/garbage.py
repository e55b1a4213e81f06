"""Slots without a key: what they hold reaches no result and no gradient.

A slot beyond a sequence's length may hold anything: what was never written, what another sequence left, a NaN. Its
weight is 0, but 0 times a NaN is a NaN, in the product with the values and in the derivative of the logits. So such
keys and values count as zeros. To put zeros where they lie is cheap for a CPU and for many queries. For a GPU's decode
step it is a copy of all keys and values. There the products are taken first, and their results looked at.
See docs/log/attention.md: "Zeros in place of garbage cost a GPU's decode step a copy of V".
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from tree_attn.devices import default_platform

MAX_LOOKED_AT = 8  # queries of a sequence with which reading keys and values takes a GPU most of the time

# Full float32 products for float32 inputs: a GPU's default would be tf32, wrong in the third digit.
_dot = partial(jnp.einsum, preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST)
_LOGITS, _SUMS = "btkgh,bskh->btkgs", "btkgs,bskv->btkgv"


def zeroed(x, is_valid):
    """Returns keys or values `[..., S, K, H]` with zeros where `is_valid [..., S]` is False; None: all are valid."""
    if is_valid is None or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return jnp.where(is_valid[..., None, None], x, jnp.zeros((), x.dtype))


def products(key, value, is_valid, num_queries: int):
    """Returns the two products of attention to keys and values some of which may be garbage.

    Args:
      key, value: `[B, S, K, H]` and `[B, S, K, Hv]`.
      is_valid: bool `[B, S]`, whether a slot holds a key; None: all do.
      num_queries: T.
    Returns:
      `logits_of(query [B, T, K, G, H])`, float32 `[B, T, K, G, S]`, 0 where a slot holds no key; and
      `sum_of(weights [B, T, K, G, S])`, float32 `[B, T, K, G, Hv]`, for weights that are 0 there.
    """
    if is_valid is not None and default_platform() != "cpu" and num_queries <= MAX_LOOKED_AT:
        return lambda query: _logits(query, key, is_valid), lambda weights: _weighted_sum(weights, value, is_valid)
    key, value = (zeroed(x, is_valid) for x in (key, value))
    if is_valid is not None and default_platform() == "cpu":
        # A CPU's dots transpose: a loop of its own for the zeros, in the order of memory, is faster than one for both.
        key, value = jax.lax.optimization_barrier((key, value))
    return lambda query: _dot(_LOGITS, query, key), lambda weights: _dot(_SUMS, weights, value)


@jax.custom_jvp
def _logits(query, key, is_valid):
    # The zeros join the mask that the caller applies, and keep what comes before it, such as a cap, differentiable.
    return jnp.where(is_valid[:, None, None, None, :], _dot(_LOGITS, query, key), 0.0)


@partial(_logits.defjvp, symbolic_zeros=True)
def _logits_tangent(primals, tangents):
    query, key, is_valid = primals
    return _logits(*primals), _product_tangent(_LOGITS, query, zeroed(key, is_valid), tangents, is_valid)


@jax.custom_jvp
def _weighted_sum(weights, value, is_valid):
    total = _dot(_SUMS, weights, value)
    # Garbage that is finite counts as 0. The rest makes a NaN, as NaN among the keys and values does.
    recomputed = lambda: _dot(_SUMS, weights, zeroed(value, is_valid))
    return jax.lax.cond(jnp.any(jnp.isnan(total)), recomputed, lambda: total)


@partial(_weighted_sum.defjvp, symbolic_zeros=True)
def _weighted_sum_tangent(primals, tangents):
    weights, value, is_valid = primals
    return _weighted_sum(*primals), _product_tangent(_SUMS, weights, zeroed(value, is_valid), tangents, is_valid)


def _product_tangent(subscripts, left, right, tangents, is_valid):
    """Returns the tangent of a product whose right operand, zeroed already, may hold garbage."""
    left_tangent, right_tangent, _ = tangents
    terms = []
    if not isinstance(left_tangent, SymbolicZero):
        terms.append(_dot(subscripts, left_tangent, right))
    if not isinstance(right_tangent, SymbolicZero):
        terms.append(_dot(subscripts, left, zeroed(right_tangent, is_valid)))
    return sum(terms[1:], start=terms[0])
