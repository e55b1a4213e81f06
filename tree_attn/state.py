"""The algebra: attention over a set of keys is an element of a commutative monoid, `(out, lse)`.

Every method of this library folds the same monoid over a different index set: sequence shards (Tree and Ring
Attention), chunks of keys (the local kernels), nodes of a prefix tree. The weight of a state in a merge,
`exp(lse - max)`, is written in `numerator_and_denominator` and nowhere else. (Kernels merge in registers, by code of
their own.)

Source: Tree Attention, section 5 and Algorithm 3; LeanAttention, section 4.1 (associativity of softmax rescaling).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from tree_attn.arguments import AnyArray, is_integer


class SoftmaxState(NamedTuple):
    """Attention over a set of keys: its output, and the log of its softmax denominator::

      out = sum_a softmax(logits)_a value_a        [..., H], any float dtype
      lse = log sum_a exp(logits_a)                [...], float32, natural log

    The empty set of keys is `out = 0, lse = -inf`: the identity of `merge_state`.
    """

    out: Float[Array, "*rows H"]
    lse: Float[Array, "*rows"]


def empty_like(state: SoftmaxState) -> SoftmaxState:
    """Returns the identity of the monoid, `out = 0, lse = -inf`, in the shapes and dtypes of `state`.

    Example:
      >>> running = empty_like(attend(query, key[:, :64], value[:, :64]))

    Source: Tree Attention, section 5 (the reduction's neutral element).
    """
    _check_state("state", state)
    return SoftmaxState(jnp.zeros_like(state.out), jnp.full_like(state.lse, -jnp.inf))


def merge_state(a: SoftmaxState, b: SoftmaxState) -> SoftmaxState:
    """Merges the states of two disjoint sets of keys into the state of their union.

    lse = log(exp(a.lse) + exp(b.lse)),    out = (exp(a.lse) a.out + exp(b.lse) b.out) / exp(lse)

    Commutative to the bit, associative up to rounding, with an exact two-sided identity (`empty_like`).
    Arithmetic is float32; `out` comes back in its own dtype.

    Raises:
      ValueError: the shapes or dtypes of the two states differ, or `lse` is narrower than float32.

    Example:
      >>> whole = merge_state(attend(query, key[:, :64], value[:, :64]), attend(query, key[:, 64:], value[:, 64:]))

    Source: LeanAttention, section 4.1; the operator of Tree Attention's reduction, section 5.
    """
    _check_state("a", a)
    _check_state("b", b)
    if a.out.shape != b.out.shape or a.out.dtype != b.out.dtype:
        raise ValueError(
            f"b.out must have the shape and dtype of a.out, {a.out.shape} {a.out.dtype}; "
            f"got {b.out.shape} {b.out.dtype}"
        )
    a, b = _larger_lse_first(a, b)
    max_lse = finite_max(a.lse)
    a_numerator, a_denominator = numerator_and_denominator(a, max_lse)
    b_numerator, b_denominator = numerator_and_denominator(b, max_lse)
    return from_sums(a_numerator + b_numerator, a_denominator + b_denominator, max_lse, a.out.dtype)


def merge_states(stacked: SoftmaxState, axis: int) -> SoftmaxState:
    """Merges all states stacked along `axis` (an axis of `lse`; `out` has one more at its end).

    lse = log sum_i exp(lse_i),    out = sum_i exp(lse_i - lse) out_i

    Args:
      stacked: `out [..., n, ..., H]`, `lse [..., n, ...]` float32. `n = 0` gives the empty state.
      axis: which axis of `lse` to fold, negative counts from the end of `lse`.
    Returns:
      The state without that axis, `out` in its own dtype.
    Raises:
      ValueError: `axis` is not an axis of `lse`, or the shapes do not belong together.

    Example:
      >>> parts = [attend(query, key[:, i : i + 64], value[:, i : i + 64]) for i in range(0, 256, 64)]
      >>> whole = merge_states(jax.tree.map(lambda *x: jnp.stack(x), *parts), axis=0)

    Source: Tree Attention, Algorithm 3 (here on one device; `tree_attn.reduce` does it across devices).
    """
    _check_state("stacked", stacked)
    if not is_integer(axis) or not -stacked.lse.ndim <= axis < stacked.lse.ndim:
        raise ValueError(f"axis must be an axis of lse {stacked.lse.shape}, got {axis}")
    axis %= stacked.lse.ndim
    max_lse = finite_max(jnp.max(stacked.lse, axis=axis, keepdims=True, initial=-jnp.inf))
    numerator, denominator = numerator_and_denominator(stacked, max_lse)
    return from_sums(
        jnp.sum(numerator, axis=axis), jnp.sum(denominator, axis=axis), jnp.squeeze(max_lse, axis), stacked.out.dtype
    )


def merge_segments(states: SoftmaxState, segment_ids: Integer[AnyArray, " n"], num_segments: int) -> SoftmaxState:
    """Merges states along their first axis by segment: `result[s] = merge of states[i] with segment_ids[i] == s`.

    Args:
      states: `out [n, ..., H]`, `lse [n, ...]` float32.
      segment_ids: int32 `[n]` in `[0, num_segments)`, in any order; ids outside that range are dropped.
      num_segments: how many segments; one that no state names is empty (`out = 0, lse = -inf`).
    Raises:
      ValueError: `segment_ids` is not one integer per state, or `num_segments` is negative.

    Example:
      >>> by_sequence = merge_segments(partial_states, jnp.array([0, 0, 1, 2, 2]), num_segments=3)

    Source: LeanAttention, Algorithm 1 (partials of one output tile come from several CTAs).
    """
    _check_state("states", states)
    if states.lse.ndim < 1 or np.shape(segment_ids) != states.lse.shape[:1]:
        raise ValueError(f"segment_ids must have shape [n] for lse {states.lse.shape}, got {np.shape(segment_ids)}")
    segment_ids = segment_ids if hasattr(segment_ids, "dtype") else np.asarray(segment_ids)
    if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(f"segment_ids must be integers, got {segment_ids.dtype}")
    if not is_integer(num_segments):
        raise TypeError(f"num_segments must be an integer, got {num_segments!r}")
    if num_segments < 0:
        raise ValueError(f"num_segments must be at least 0, got {num_segments}")
    if num_segments == 0:
        return jax.tree.map(lambda x: x[:0], states)
    max_lse = finite_max(jax.ops.segment_max(states.lse, segment_ids, num_segments))
    # A state whose id is dropped weighs exp(lse - inf) = 0. A finite value could make it infinite, its gradient NaN.
    max_by_state = jnp.take(max_lse, segment_ids, axis=0, mode="fill", fill_value=jnp.inf)
    numerator, denominator = numerator_and_denominator(states, max_by_state)
    return from_sums(
        jax.ops.segment_sum(numerator, segment_ids, num_segments),
        jax.ops.segment_sum(denominator, segment_ids, num_segments),
        max_lse,
        states.out.dtype,
    )


def finite_max(max_lse: Array) -> Array:
    """Makes a maximum of lse safe to subtract: 0 where every state is empty, so that `-inf - -inf` never occurs.

    The result does not depend on the maximum (appendix F of Tree Attention), so its gradient is stopped.
    """
    return jax.lax.stop_gradient(jnp.where(max_lse == -jnp.inf, jnp.zeros_like(max_lse), max_lse))


def numerator_and_denominator(state: SoftmaxState, max_lse: Array) -> tuple[Array, Array]:
    """Undoes a state's normalisation: `n = out exp(lse - max_lse)` and `d = exp(lse - max_lse)`, float32.

    These are the two summands of Algorithm 3, line 4 (Tree Attention). `max_lse` comes from `finite_max`.
    """
    denominator = jnp.exp(state.lse - max_lse)
    return state.out.astype(state.lse.dtype) * denominator[..., None], denominator


def from_sums(numerator: Array, denominator: Array, max_lse: Array, dtype: jnp.dtype) -> SoftmaxState:
    """Normalises summed numerators and denominators: `out = n / d`, `lse = max_lse + log d`; empty where `d = 0`.

    Algorithm 3, line 6 (Tree Attention). The division and the log never see 0, so that gradients stay finite.
    """
    is_empty = denominator == 0
    safe = jnp.where(is_empty, jnp.ones_like(denominator), denominator)
    lse = jnp.where(is_empty, jnp.full_like(safe, -jnp.inf), max_lse + jnp.log(safe))
    return SoftmaxState((numerator / safe[..., None]).astype(dtype), lse)


def of_batch(state: SoftmaxState, batch: int) -> SoftmaxState:
    """Returns `[B, T, N]` as the state of `batch` sequences, which have the same queries one after another."""
    return jax.tree.map(lambda x: x.reshape(batch, -1, *x.shape[2:]), state)


def _larger_lse_first(a: SoftmaxState, b: SoftmaxState) -> tuple[SoftmaxState, SoftmaxState]:
    """Orders two states by content, so that a compiler cannot tell `merge(a, b)` from `merge(b, a)`.

    A fused multiply-add rounds one of the two products of the numerator and not the other: unordered, the merge would
    not be commutative to the bit once compiled. At a tie both weights are 1 and both products exact.
    """
    is_b_larger = a.lse < b.lse
    pick = lambda x, y: SoftmaxState(
        jnp.where(is_b_larger[..., None], x.out, y.out), jnp.where(is_b_larger, x.lse, y.lse)
    )
    return pick(b, a), pick(a, b)


def _check_state(name: str, state: SoftmaxState) -> None:
    if not isinstance(state, SoftmaxState):
        raise TypeError(f"{name} must be a SoftmaxState, got {type(state).__name__}")
    for field, x in zip(state._fields, state):
        if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name}.{field} must be an array of floats, got {getattr(x, 'dtype', type(x).__name__)}")
    if state.out.shape[:-1] != state.lse.shape or state.out.ndim == 0:
        raise ValueError(
            f"{name}.lse must have the shape of {name}.out {state.out.shape} less its last axis, got {state.lse.shape}"
        )
    if state.lse.dtype not in (jnp.float32, jnp.float64):
        raise ValueError(f"{name}.lse must be float32 (a narrower lse bends the merged weights), got {state.lse.dtype}")
