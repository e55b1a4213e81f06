"""The energy view: attention is the gradient of a scalar function, its variance the second derivative.

F(zeta) = log sum_a exp(scale q . k_a + zeta . v_a)

is the cumulant generating function of the values under the attention distribution `P_a = softmax(scale q . k)_a`:
its gradient at zeta = 0 is attention's output, its Hessian there the covariance of the values, and so on.

Source: Tree Attention, section 4 (equations 5 to 7), section 5 (Algorithms 1 and 2), appendix C (moments, causal
sources) and appendix F (safe softmax: the maximum that is subtracted does not change any derivative).
"""

import dataclasses
from collections.abc import Callable
from typing import Unpack

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Num

from tree_attn.arguments import (
    AnyArray,
    AttentionOptions,
    OptionArguments,
    default_scale,
    is_integer,
    shape_and_dtype,
    takes_options,
)
from tree_attn.array_axes import BATCH, HEADS, option_specs
from tree_attn.local import attend_shard
from tree_attn.masking import add_sinks
from tree_attn.mesh import AxisName, axis_tuple
from tree_attn.placement import UNNAMED, Placement
from tree_attn.reduce.collectives import pmax, psum
from tree_attn.sharded import check_call, check_one_device, local_shard, over_shards, pad_keys
from tree_attn.state import SoftmaxState, finite_max, from_sums, numerator_and_denominator

MAX_ORDER = 4


@takes_options(without=("logits_soft_cap", "key_scale", "value_scale", "implementation", "reads_keys_early"))
def energy(
    query: Float[AnyArray, "B T N H"],
    key: Num[AnyArray, "B S K H"],
    value: Num[AnyArray, "B S K Hv"],
    source: Float[AnyArray, "B T N Hv"],
    *,
    axis_name: AxisName | None = None,
    mesh: Mesh | None = None,
    batch_axis_name: AxisName | None = None,
    block_size: Placement = UNNAMED,
    **options: Unpack[OptionArguments],
) -> Float[Array, "B T N"]:
    """The energy of each query under its own source: `F(zeta) = log sum_a exp(scale q . k_a + zeta . v_a)`.

    Its gradient at zeta = 0 is attention's output. Query t of head n depends on its own source only, so the sum over
    queries is the F_tot of equation 27. The energy is stable for logits of any size (appendix F). Over shards one
    maximum and one sum cross the devices (Algorithm 1); reverse mode adds one more sum (Algorithm 2).

    The energy is a log-sum-exp, float32 `[B, T, N]`: the scalar itself is returned, and there is no `return_lse`.

    Args:
      query, key, value: as in `tree_attn.attend`.
      source: zeta, `[B, T, N, Hv]`, in query's dtype: one vector per query and head.
      axis_name, mesh, batch_axis_name, block_size: None for one device; else as in `tree_attn.tree_decode`.
      options: as in `tree_attn.attend`. There is no soft cap, which would bend zeta . v as well.
    Returns:
      float32 `[B, T, N]`, natural log; -inf where a query sees no key.
    Raises:
      ValueError, TypeError: an argument does not fit (`scale` may not be 0 here); the message names it.

    Example:
      >>> out = jax.grad(lambda zeta: energy(query, key, value, zeta).sum())(jnp.zeros_like(query))

    Source: Tree Attention, equations 6, 7, 25 to 28; Algorithm 1.
    """
    # XLA's attention can be differentiated any number of times, the fused kernels cannot.
    attention = AttentionOptions(**options, implementation="xla")
    axes = () if axis_name is None else axis_tuple(axis_name)
    if not axes:
        check_one_device(mesh=mesh, batch_axis_name=batch_axis_name, block_size=block_size)
    block_size = check_call(query, key, value, attention, axes=axes, block_size=block_size)
    if attention.scale == 0:
        raise ValueError("scale must not be 0 in energy, got 0")
    _check_source(query, value, source)
    key, value, attention = pad_keys(key, value, attention, axes=axes, mesh=mesh, block_size=block_size)
    of_query, of_keys = P(BATCH, None, HEADS), P(BATCH, axes, HEADS)
    state = over_shards(
        _Energy(axes=axes, block_size=block_size), (query, key, value, source, attention),
        (of_query, of_keys, of_keys, of_query, option_specs(attention)), axes=axes, mesh=mesh,
        batch_axis_name=batch_axis_name, out_specs=of_query,
    )  # fmt: skip
    return state.lse


@takes_options(without=("logits_soft_cap", "key_scale", "value_scale", "implementation", "reads_keys_early"))
def attention_moments(
    query: Float[AnyArray, "B T N H"],
    key: Num[AnyArray, "B S K H"],
    value: Num[AnyArray, "B S K Hv"],
    order: int,
    *,
    axis_name: AxisName | None = None,
    mesh: Mesh | None = None,
    batch_axis_name: AxisName | None = None,
    block_size: Placement = UNNAMED,
    **options: Unpack[OptionArguments],
) -> tuple[Array, ...]:
    """Computes cumulants of the values under the attention distribution: derivatives of `energy` at zeta = 0.

    order 1: mean `<v>`, which is attention's output         `[B, T, N, Hv]`
    order 2: covariance `<v v> - <v><v>`                     `[B, T, N, Hv, Hv]`; its diagonal is the variance
    order 3: third cumulant                                  `[B, T, N, Hv, Hv, Hv]`, and so on

    Args:
      query, key, value: as in `tree_attn.attend`.
      order: the highest order, 1 to 4; an array of order r has `Hv ** r` numbers per query.
      axis_name, mesh, batch_axis_name, block_size, options: as in `energy`.
    Returns:
      `(order 1, ..., order `order`)`, float32.
    Raises:
      ValueError: `order` is out of range, or as `energy`.

    Example:
      >>> mean, covariance = attention_moments(query, key, value, order=2)
      >>> variance = jnp.diagonal(covariance, axis1=-2, axis2=-1)

    Source: Tree Attention, appendix C.1, equations 20 to 24 (F = log Z generates the cumulants).
    """
    if not is_integer(order) or not 1 <= order <= MAX_ORDER:
        raise ValueError(f"order must be an integer from 1 to {MAX_ORDER}, got {order!r}")
    axes = () if axis_name is None else axis_tuple(axis_name)
    attention = AttentionOptions(**options, implementation="xla")
    check_call(query, key, value, attention, axes=axes, block_size=block_size)
    sharding = {
        "axis_name": axis_name, "mesh": mesh, "batch_axis_name": batch_axis_name, "block_size": block_size,
    }  # fmt: skip

    # Queries do not interact, so one shared source vector differentiates all of them at once.
    def shared_source(zeta: Float[Array, " Hv"]) -> Float[Array, "B T N"]:
        # Sharded as the query is, where types say how.
        source = zeta[None, None, None, :] + jnp.zeros_like(query[..., :1])
        return energy(query, key, value, source, **sharding, **options)

    derivatives: list[Callable] = [shared_source]
    for _ in range(order):
        derivatives.append(jax.jacfwd(derivatives[-1]))
    zero = jnp.zeros((value.shape[-1],), query.dtype)
    return tuple(derivative(zero) for derivative in derivatives[1:])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Energy:
    """The part of each device. The fields are the arguments of `energy`."""

    axes: tuple[str, ...]
    block_size: int | None

    def __call__(self, query, key, value, source, options: AttentionOptions) -> SoftmaxState:
        # [scale q, zeta] . [k, v] = scale q . k + zeta . v: F is the lse of attention with longer keys and no scale, so
        # the kernel's tiling and masks serve unchanged. The queries are float32, for scale q need not fit a narrower
        # dtype. Only the lse is used, so one column of the values is enough.
        scaled = query.astype(jnp.float32) * default_scale(options.scale, query.shape[-1])
        query = jnp.concatenate([scaled, source.astype(jnp.float32)], axis=-1)
        key, value = jnp.concatenate([key, value], axis=-1), value[..., :1]
        options = dataclasses.replace(options, scale=1.0)
        state = attend_shard(query, key, value, options, local_shard(self.axes, self.block_size))
        return add_sinks(_reduce_energy(state, self.axes) if self.axes else state, options.sinks)


def _reduce_energy(state: SoftmaxState, axes: tuple[str, ...]) -> SoftmaxState:
    """Reduces lse by one all-reduce of the maximum and one of the sum (Algorithm 1, lines 4 to 6); `out` becomes 0."""
    max_lse = finite_max(pmax(jax.lax.stop_gradient(state.lse), axes))
    _, denominator = numerator_and_denominator(state, max_lse)
    denominator = psum(denominator, axes)
    return from_sums(jnp.zeros_like(state.out), denominator, max_lse, state.out.dtype)


def _check_source(query, value, source) -> None:
    expected = (*query.shape[:3], value.shape[-1])
    shape, _ = shape_and_dtype(source)
    if not hasattr(source, "dtype") or shape != expected:
        raise ValueError(f"source must have shape [B, T, N, Hv] = {expected}, got {shape}")
    if source.dtype != query.dtype:
        raise ValueError(f"source must have query's dtype {query.dtype}, got {source.dtype}")
