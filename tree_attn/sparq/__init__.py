"""SparQ Attention: of a long cache, read a few components of every key, then a few keys and values whole.

In the algebra it is two states. One is the exact attention over the kept keys. The other stands for all other keys: its
value is the mean of the values, and the approximate scores give its weight.

    kept = attend(q, K[i2], V[i2]),    rest = (out: mean(V), lse: kept.lse + log((1 - alpha) / alpha)),
    out  = merge(kept, rest) = alpha kept.out + (1 - alpha) mean(V).

So it composes with sequence shards as every other method does. `xla.py` and `hopper.py` have two implementations of the
choice of keys and of attention to them; `transfers.py` counts the elements that are read.

Source: SparQ Attention, Algorithm 1, section 4 and appendix B.
"""

import dataclasses
import logging
from typing import Literal, Unpack, overload

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from tree_attn.arguments import (
    AnyArray,
    AttentionOptions,
    OptionArguments,
    as_leaf,
    check_array,
    check_arrays,
    default_scale,
    shape_and_dtype,
    takes_options,
)
from tree_attn.array_axes import BATCH, HEADS, option_specs
from tree_attn.masking import Visibility, visibility
from tree_attn.mesh import AxisName, axis_tuple
from tree_attn.placement import UNNAMED, Placement, Shard
from tree_attn.reduce import Reduction, check_reduction, reduce_state
from tree_attn.sharded import (
    check_call,
    check_one_device,
    is_local,
    local_shard,
    num_mesh_shards,
    over_shards,
    pad_keys,
)
from tree_attn.sparq import hopper, xla
from tree_attn.sparq.options import SCORE_TEMPERATURES, SELECTIONS, SparqCall, SparqOptions
from tree_attn.state import SoftmaxState, empty_like, merge_state

__all__ = ["SCORE_TEMPERATURES", "SELECTIONS", "SparqOptions", "slot_multiple", "sparq_decode"]

_log = logging.getLogger("tree_attn")


@overload
def sparq_decode(
    query: Float[AnyArray, "B T N H"], key: Float[AnyArray, "B S K H"], value: Float[AnyArray, "B S K Hv"], *,
    num_components: int, num_keys: int, local_window: int = ..., value_mean: Float[AnyArray, "B K Hv"] | None = ...,
    reallocate: bool | None = ..., key_by_component: Float[AnyArray, "B K H S"] | None = ...,
    axis_name: AxisName | None = ..., mesh: Mesh | None = ..., batch_axis_name: AxisName | None = ...,
    block_size: Placement = ..., selection: str = ..., score_temperature: str = ...,
    reduction: str | tuple[str, ...] | None = ..., return_lse: Literal[False] = ..., **options: Unpack[OptionArguments],
) -> Float[Array, "B T N Hv"]: ...  # fmt: skip
@overload
def sparq_decode(
    query: Float[AnyArray, "B T N H"], key: Float[AnyArray, "B S K H"], value: Float[AnyArray, "B S K Hv"], *,
    num_components: int, num_keys: int, local_window: int = ..., value_mean: Float[AnyArray, "B K Hv"] | None = ...,
    reallocate: bool | None = ..., key_by_component: Float[AnyArray, "B K H S"] | None = ...,
    axis_name: AxisName | None = ..., mesh: Mesh | None = ..., batch_axis_name: AxisName | None = ...,
    block_size: Placement = ..., selection: str = ..., score_temperature: str = ...,
    reduction: str | tuple[str, ...] | None = ..., return_lse: Literal[True], **options: Unpack[OptionArguments],
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]: ...  # fmt: skip
@overload
def sparq_decode(
    query: Float[AnyArray, "B T N H"], key: Float[AnyArray, "B S K H"], value: Float[AnyArray, "B S K Hv"], *,
    num_components: int, num_keys: int, local_window: int = ..., value_mean: Float[AnyArray, "B K Hv"] | None = ...,
    reallocate: bool | None = ..., key_by_component: Float[AnyArray, "B K H S"] | None = ...,
    axis_name: AxisName | None = ..., mesh: Mesh | None = ..., batch_axis_name: AxisName | None = ...,
    block_size: Placement = ..., selection: str = ..., score_temperature: str = ...,
    reduction: str | tuple[str, ...] | None = ..., return_lse: bool, **options: Unpack[OptionArguments],
) -> Float[Array, "B T N Hv"] | tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]: ...  # fmt: skip
@takes_options(only=("key_value_seq_lengths", "is_causal", "scale", "implementation"))
def sparq_decode(
    query: Float[AnyArray, "B T N H"],
    key: Float[AnyArray, "B S K H"],
    value: Float[AnyArray, "B S K Hv"],
    *,
    num_components: int,
    num_keys: int,
    local_window: int = 0,
    value_mean: Float[AnyArray, "B K Hv"] | None = None,
    reallocate: bool | None = None,
    key_by_component: Float[AnyArray, "B K H S"] | None = None,
    axis_name: AxisName | None = None,
    mesh: Mesh | None = None,
    batch_axis_name: AxisName | None = None,
    block_size: Placement = UNNAMED,
    selection: str = "global",
    score_temperature: str = "coverage",
    reduction: str | tuple[str, ...] | None = None,
    return_lse: bool = False,
    **options: Unpack[OptionArguments],
) -> Float[Array, "B T N Hv"] | tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Computes approximate attention, reading `S r + 2 k H` elements of K and V per KV head instead of `2 S H`.

    For each query, with r = num_components, k = num_keys, l = local_window, sums over the G heads of a group::

        i1    = argtopk(sum_g |q|, r)
        s_hat = softmax(q[i1] K[:, i1]^T / tau),    tau = sqrt(H ||q[i1]||_1 / ||q||_1)
        i2    = argtopk(sum_g s_hat + m, k),        m = infinity at the last l positions, else 0
        alpha = sum s_hat[i2]
        out   = alpha attend(q, K[i2], V[i2]) + (1 - alpha) mean(V)

    With r = H and k >= S it is exact.

    Sharded over p devices, `selection` chooses the kept keys:
        "global"     the k best of all, as on one device. Beside the reduction of the result, three small all-gathers
                     run one after another: `B T N` (the denominators of s_hat), `2 B T K min(k, S / p)` (each shard's
                     best scores and their positions), `B T N` (alpha), in elements of 4 bytes that each device sends.
        "per_shard"  the ceil(k / p) best of each shard, with an alpha per shard: no collective but the reduction.
                     Where few shards hold the keys that matter, the others read keys that do not.

    Args:
      query: `[B, T, N, H]`; key: `[B, S, K, H]`; value: `[B, S, K, Hv]`, one dtype. T queries choose keys separately.
      num_components: r, at most H. num_keys: k; more than there are means all.
      local_window: l, positions before and at the query's own that are always kept; at most num_keys.
      value_mean: float32 `[B, K, Hv]`, the mean over each sequence's valid values, as `KVCache.value_mean` keeps it;
        None: computed here from all of V, for each of T causal queries over the values it sees.
      reallocate: whether keys that are not kept get their weight; False leaves out the mean. Default: only where G is
        1, for the paper found grouped models to be better without (section 4).
      key_by_component: `[B, K, H, S]`, the keys once more, so that a component is contiguous; sharded on S. None:
        components are read from `key`, which touches all memory of K.
      key_value_seq_lengths, is_causal, scale: as in `tree_attn.local.attend`.
      implementation: as there. With None and "mosaic_gpu" both gathers are kernels on a Hopper GPU, where all are
        bfloat16 or float16, G up to 8, `key_by_component` is given, S (of a shard) is a multiple of 512 and r of 4.
        They have no gradient. The logger `tree_attn` has at DEBUG why they are not used, and at INFO where exact
        attention was the better choice.
      axis_name, mesh, batch_axis_name, block_size, reduction, return_lse: as in `tree_attn.tree_decode`. Without
        `axis_name` all is on one device. A local window too makes the result depend on `block_size`.
      selection: "global" or "per_shard".
      score_temperature: tau: "coverage", as above, or for ablations (Figure 7b) "head_dim", sqrt(H), or
        "num_components", sqrt(r). Without groups and reallocation nothing depends on it.
    Returns:
      `out`, or `(out, lse)`, as `tree_attn.tree_decode`; `lse` is over kept and other keys together.
    Raises:
      ValueError, TypeError: an argument does not fit; the message names it.
      NotImplementedError: as in `tree_attn.tree_decode`.

    Example:
      >>> out = sparq_decode(query, key, value, num_components=32, num_keys=128, local_window=32)

    Source: SparQ Attention, Algorithm 1 (T = G = 1), section 4 (groups), equation 11.
    """
    sparq = SparqOptions(
        num_components=num_components, num_keys=num_keys, local_window=local_window, reallocate=reallocate,
        selection=selection, score_temperature=score_temperature,
    )  # fmt: skip
    axes = () if axis_name is None else axis_tuple(axis_name)
    check_arrays(query, key, value)
    sparq.check_head_dim(key.shape[-1])
    if not axes:
        check_one_device(mesh=mesh, batch_axis_name=batch_axis_name, block_size=block_size, reduction=reduction)
    _check_value_mean(value_mean, value)
    _check_key_by_component(key_by_component, key, axes, mesh)
    if sparq.reallocate is None:
        sparq = dataclasses.replace(sparq, reallocate=query.shape[2] == key.shape[2])
    reduction = check_reduction(reduction, axes) if axes else None
    attention = AttentionOptions(**options)
    block_size = check_call(
        query, key, value, attention, axes=axes, block_size=block_size, needs_positions=local_window > 0
    )
    key, value, attention = pad_keys(key, value, attention, axes=axes, mesh=mesh, block_size=block_size)
    body = _SparqDecode(options=sparq, axes=axes, mesh=mesh, block_size=block_size, reduction=reduction)
    of_query, of_keys = P(BATCH, None, HEADS), P(BATCH, axes, HEADS)
    operands = query, key, value, attention, key_by_component, as_leaf(value_mean)
    specs = of_query, of_keys, of_keys, option_specs(attention), P(BATCH, HEADS, None, axes), P(BATCH, HEADS)
    state = over_shards(
        body, operands, specs, axes=axes, mesh=mesh, batch_axis_name=batch_axis_name, out_specs=of_query
    )
    return (state.out, state.lse) if return_lse else state.out


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SparqDecode:
    """The part of each device. The fields are the arguments of `sparq_decode`."""

    options: SparqOptions
    axes: tuple[str, ...]
    mesh: Mesh | None
    block_size: int | None
    reduction: Reduction | None

    def __call__(self, query, key, value, attention: AttentionOptions, key_by_component, value_mean) -> SoftmaxState:
        shard = local_shard(self.axes, self.block_size)
        call = SparqCall(
            options=self.options, axes=self.axes, mesh=self.mesh, reduction=self.reduction,
            num_shards=shard.num_shards, scale=default_scale(attention.scale, query.shape[-1]),
            implementation=attention.implementation,
        )  # fmt: skip
        return _decode_shard(query, key, value, key_by_component, value_mean, attention, shard, call)


def slot_multiple(num_slots: int) -> int:
    """Returns the multiple to which a cache should round `num_slots` up for the kernels; 1 if that would pad much."""
    from tree_attn.kernels.sparq_shape import SLOT_MULTIPLE

    return SLOT_MULTIPLE if num_slots >= 8 * SLOT_MULTIPLE else 1


def _decode_shard(
    query, key, value, key_by_component, value_mean, attention: AttentionOptions, shard: Shard, call: SparqCall
) -> SoftmaxState:
    """Returns the state over all shards."""
    batch, num_queries, num_heads, head_dim = query.shape
    if key.shape[1] == 0:
        shape = (batch, num_queries, num_heads)
        return empty_like(SoftmaxState(jnp.zeros((*shape, value.shape[-1]), query.dtype), jnp.zeros(shape)))
    visible = visibility(attention, batch=batch, num_queries=num_queries, num_slots=key.shape[1], shard=shard)
    first_recent = _query_ends(attention, num_queries, batch, visible) - call.options.local_window
    grouped = query.reshape(batch, num_queries, key.shape[2], -1, head_dim)
    why_not = hopper.why_not(query, key, value, key_by_component, call)
    _log.debug("kernels of SparQ's gathers: %s", why_not or "used")
    if advice := hopper.advice(grouped.shape[3], why_not):
        _log.info("sparq_decode: %s", advice)
    if why_not is None:
        choice = hopper.choose(grouped, key_by_component, visible, first_recent, call)
        state = hopper.attend_kept(grouped, key, value, choice, call)
    else:
        choice = xla.choose(grouped, key, key_by_component, visible, first_recent, call)
        state = xla.attend_kept(grouped, key, value, choice, call)
    if call.is_global:
        state = reduce_state(state, call.axes, call.reduction, call.mesh)
    if call.options.reallocate:
        mean = xla.mean_of_values(value, visible, call.axes) if value_mean is None else value_mean[:, None]
        state = merge_state(state, xla.rest_state(state, choice, mean))
    if call.axes and not call.is_global:
        state = reduce_state(state, call.axes, call.reduction, call.mesh)
    return state


def _query_ends(options: AttentionOptions, num_queries: int, batch: int, visible: Visibility) -> Int[Array, "B T"]:
    """Returns one past each query's position; of queries that see one another, one past the last query's."""
    ends = visible.lengths
    if ends is None:
        ends = jnp.full(batch, visible.num_slots * visible.shard.num_shards, jnp.int32)
    later = num_queries - 1 - jnp.arange(num_queries, dtype=jnp.int32)
    return ends[:, None] - (later if options.is_causal else jnp.zeros_like(later))[None, :]


def _check_value_mean(value_mean, value) -> None:
    shape = (value.shape[0], *value.shape[2:])
    if value_mean is not None:
        check_array("value_mean", value_mean, "floats", jnp.floating, f"[B, K, Hv] = {shape}", shape)


def _check_key_by_component(key_by_component, key, axes: tuple[str, ...], mesh: Mesh | None) -> None:
    if key_by_component is None:
        return
    batch, num_keys, num_kv_heads, head_dim = key.shape
    expected = (batch, num_kv_heads, head_dim, num_keys)
    shape, dtype = shape_and_dtype(key_by_component)
    if not hasattr(key_by_component, "dtype") or shape != expected or dtype != key.dtype:
        raise ValueError(
            f"key_by_component must hold key as [B, K, H, S] = {expected} in {key.dtype}, got {shape} in {dtype}"
        )
    shards = 1 if is_local(axes) else num_mesh_shards(axes, mesh)
    if num_keys % shards:
        raise ValueError(f"key_by_component must hold keys that {shards} devices divide, got {num_keys}")
