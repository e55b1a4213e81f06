"""SparQ in XLA: the choice of keys (step 1), attention to them (step 2), and the state of all others (step 3).

Shapes: B sequences, T queries, K KV heads, G query heads of each, S slots of this shard, r components, k kept keys.

Source: SparQ Attention, Algorithm 1.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tree_attn.local import attend
from tree_attn.local.garbage import zeroed
from tree_attn.masking import Visibility
from tree_attn.reduce.collectives import all_gather, psum
from tree_attn.sparq.options import SparqCall, SparqOptions
from tree_attn.state import SoftmaxState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """The keys of this shard that each query keeps: the first `counts [B, T, K]` of `slots [B, T, K, k]`.

    total_lse, kept_lse:  log-sum-exp of the approximate logits of all keys, and of the kept ones, `[B, T, K, G]`; over
                          all shards where they choose together. `kept_lse` may be None where nothing is reallocated.
    """

    slots: Int[Array, "B T K k"]
    counts: Int[Array, "B T K"]
    total_lse: Float[Array, "B T K G"]
    kept_lse: Float[Array, "B T K G"] | None


def choose(
    grouped: Float[Array, "B T K G H"], key, key_by_component, visible: Visibility, first_recent, call: SparqCall
) -> Choice:
    """Chooses the keys of this shard that each query keeps (step 1).

    Args:
      key, key_by_component: as in `sparq_decode`; components are read from `key_by_component` if it is not None.
      first_recent: int32 `[B, T]`, the first of the positions that are always kept.
    """
    mask = visible.mask()[:, :, None, :]  # [B or 1, T or 1, 1, S]
    components, weights = _components(grouped, call.options, call.scale)
    logits = _approximate_logits(components, weights, key, key_by_component, visible.is_valid())  # [B, T, K, G, S]
    logits = jnp.where(mask[:, :, :, None], logits, -jnp.inf)
    total_lse = lse_over_shards(jax.nn.logsumexp(logits, axis=-1), call)
    finite_lse = jnp.where(jnp.isneginf(total_lse), 0.0, total_lse)
    scores = jax.nn.logsumexp(logits - finite_lse[..., None], axis=3)  # [B, T, K, S]
    positions = visible.shard.positions(visible.num_slots)[None, None, None, :]
    is_recent = positions >= first_recent[:, :, None, None]
    scores = jnp.where(is_recent & mask, jnp.inf, scores)
    return choose_candidates(scores, None, logits, total_lse, visible, call)


def choose_candidates(scores, slots, logits, total_lse, visible: Visibility, call: SparqCall) -> Choice:
    """Chooses the candidates with the highest scores, of equal ones the earliest.

    Args:
      scores: float32 `[B, T, K, n]`, -inf where there is no candidate, infinity where it is always kept.
      slots: int32 `[B, T, K, n]`, ascending; None: 0, 1, ...
      logits: float32 `[B, T, K, G, n]`; unused, so that it may be None, where nothing is reallocated.
    """
    scores, places = jax.lax.top_k(scores, min(call.max_keys_per_shard, scores.shape[-1]))  # [B, T, K, k]
    slots = places if slots is None else jnp.take_along_axis(slots, places, axis=-1)
    is_kept = scores > -jnp.inf
    if call.is_global:
        positions = visible.shard.positions(visible.num_slots)[slots]
        is_kept &= _is_among_best(scores, positions, call.options.num_keys, call.axes)
    kept_lse = None
    if call.options.reallocate:
        kept_logits = jnp.take_along_axis(logits, places[:, :, :, None, :], axis=-1)
        kept_logits = jnp.where(is_kept[:, :, :, None, :], kept_logits, -jnp.inf)
        kept_lse = lse_over_shards(jax.nn.logsumexp(kept_logits, axis=-1), call)
    # The kept ones are the first of the k: these are in the order in which all devices rank them.
    counts = is_kept.sum(axis=-1, dtype=jnp.int32)
    return Choice(slots=slots, counts=counts, total_lse=total_lse, kept_lse=kept_lse)


def attend_kept(grouped: Float[Array, "B T K G H"], key, value, choice: Choice, call: SparqCall) -> SoftmaxState:
    """Computes exact attention over the chosen keys (step 2)."""
    batch, num_queries, num_kv_heads, group, head_dim = grouped.shape
    sequence = jnp.arange(batch)[:, None, None, None]
    head = jnp.arange(num_kv_heads)[None, None, :, None]
    # Each choice of keys becomes a sequence with one KV head. Kernels take multiples of 8 slots; `counts` leaves out
    # the padding.
    padding = [(0, 0), (0, -choice.slots.shape[3] % 8), (0, 0), (0, 0)]
    as_batch = lambda x: jnp.pad(x.reshape(-1, x.shape[3], 1, x.shape[4]), padding)
    state = attend(
        grouped.reshape(-1, 1, group, head_dim),
        as_batch(key[sequence, choice.slots, head]),
        as_batch(value[sequence, choice.slots, head]),
        key_value_seq_lengths=choice.counts.reshape(-1),
        scale=call.scale,
        implementation=call.implementation,
    )
    shape = (batch, num_queries, num_kv_heads * group)
    return SoftmaxState(state.out.reshape(*shape, value.shape[-1]), state.lse.reshape(shape))


def rest_state(state: SoftmaxState, choice: Choice, value_mean: Float[Array, "#B #T K Hv"]) -> SoftmaxState:
    """Returns the state of all keys that are not kept (step 3): `(mean(V), lse + log((1 - alpha) / alpha))`.

    `alpha = exp(kept_lse - total_lse)`. Where all keys are kept it is 1 within rounding, and the rest weighs nothing.
    """
    excess = jnp.maximum(choice.total_lse - choice.kept_lse, 0.0)
    has_rest = excess != 0  # true of a NaN, which stays one
    excess = jnp.where(has_rest, excess, 1.0)  # the derivative of log never sees 0
    odds = excess + jnp.log(-jnp.expm1(-excess))  # log(exp(excess) - 1) without overflow
    odds = jnp.where(has_rest, odds, -jnp.inf).reshape(state.lse.shape)
    sees_any = state.lse != -jnp.inf
    lse = jnp.where(sees_any, state.lse + jnp.where(sees_any, odds, 0.0), -jnp.inf)
    group = state.lse.shape[2] // value_mean.shape[2]
    mean = jnp.repeat(value_mean, group, axis=2).astype(state.out.dtype)  # [B, T or 1, N, Hv]
    # The mean of an empty sequence is no number of it.
    return SoftmaxState(jnp.where(sees_any[..., None], mean, jnp.zeros((), mean.dtype)), lse)


def mean_of_values(value, visible: Visibility, axes: tuple[str, ...]) -> Float[Array, "#B #T K Hv"]:
    """Returns the mean of the values that each query sees over all shards, in float32; 0 where it sees none."""
    mask = visible.mask()
    mask = jnp.broadcast_to(mask, (value.shape[0], *mask.shape[1:])).astype(jnp.float32)
    value = zeroed(value, visible.is_valid()).astype(jnp.float32)
    total = jnp.einsum("bts,bskv->btkv", mask, value, precision=jax.lax.Precision.HIGHEST)
    count = mask.sum(axis=-1)[:, :, None, None]
    if axes:
        total, count = psum((total, count), axes)
    return total / jnp.maximum(count, 1.0)


def lse_over_shards(lse, call: SparqCall):
    """Returns the log-sum-exp over all shards where they choose together; else `lse`."""
    return jax.nn.logsumexp(all_gather(lse, call.axes), axis=0) if call.is_global else lse


def _components(grouped, options: SparqOptions, scale: float):
    """Returns the r components in which the queries of a group are largest, `[B, T, K, r]`, and their weights.

    A weight, `[B, T, K, G, r]`, is the query's component times the scale, over the temperature.
    """
    size = jnp.abs(grouped.astype(jnp.float32))
    components = jax.lax.top_k(size.sum(axis=3), options.num_components)[1]
    kept_query = jnp.take_along_axis(grouped, components[:, :, :, None, :], axis=-1).astype(jnp.float32)
    whole, part = size.sum(axis=-1), jnp.abs(kept_query).sum(axis=-1)
    coverage = options.coverage(grouped.shape[-1])
    if coverage is None:
        # A query may be 0 in all components that its group chose; its logits are then 0, whatever the temperature.
        coverage = jnp.where(part > 0, part / jnp.where(part > 0, whole, 1.0), 1.0)
    else:
        coverage = jnp.full_like(whole, coverage)
    return components, kept_query * (scale * jax.lax.rsqrt(coverage))[..., None]


def _approximate_logits(components, weights, key, key_by_component, is_valid):
    """Returns `[B, T, K, G, S]` from components of the keys, 0 where `is_valid [B, S]` is not None and False."""
    batch, _, num_kv_heads = components.shape[:3]
    sequence = jnp.arange(batch)[:, None, None, None]
    head = jnp.arange(num_kv_heads)[None, None, :, None]
    if key_by_component is None:
        found = key[sequence, :, head, components]
    else:
        found = key_by_component[sequence, head, components]  # [B, T, K, r, S]
    if is_valid is not None:
        found = jnp.where(is_valid[:, None, None, None, :], found, 0)
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST)
    return dot("btkgr,btkrs->btkgs", weights, found.astype(jnp.float32))


def _is_among_best(scores, positions, num_keys: int, axes: tuple[str, ...]):
    """Returns whether each of this shard's candidates `[B, T, K, k]` is one of the `num_keys` best of all shards."""
    packed = jnp.stack([jax.lax.bitcast_convert_type(scores, jnp.int32), positions])
    gathered = jnp.moveaxis(all_gather(packed, axes), 0, -2)  # [2, B, T, K, p, k]
    gathered = gathered.reshape(*gathered.shape[:-2], -1)
    if gathered.shape[-1] <= num_keys:
        return jnp.ones_like(scores, dtype=bool)
    ranked = -jax.lax.bitcast_convert_type(gathered[0], jnp.float32), gathered[1]
    last_score, last_position = (x[..., num_keys - 1, None] for x in jax.lax.sort(ranked, num_keys=2))
    return (-scores < last_score) | ((-scores == last_score) & (positions <= last_position))
