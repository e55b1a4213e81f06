"""Attention on one device: one meaning, one file per backend.

A backend is a module with
  unavailable() -> str | None                  why it cannot run on this machine
  unsupported(query, key, value, *, logits_soft_cap, visible, scales) -> str | None   which option it cannot do
  attend(query, key, value, *, scale, logits_soft_cap, visible, scales) -> SoftmaxState
where key and value may be float8_e4m3fn or int8, and `scales` is None or float32 [2, K], of each head's K and V.
That of mosaic_gpu takes `onto` besides, a state over other keys to merge with, and `exchange`, which merges with other
devices, for its kernels merge anyway.
"""

import logging
import math
from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Float, Int

from tree_attn.arguments import AttentionOptions, Window, check_arrays, default_scale, one_of
from tree_attn.local import cudnn, flash_attn, mosaic_gpu, xla
from tree_attn.masking import sink_state, visibility
from tree_attn.placement import Shard
from tree_attn.state import SoftmaxState, merge_state

# Also the order in which `implementation=None` tries them: flash_attn repeats K and V per query head, so it is named
# or not used at all.
IMPLEMENTATIONS = {"mosaic_gpu": mosaic_gpu, "cudnn": cudnn, "xla": xla, "flash_attn": flash_attn}
_AUTOMATIC = ("mosaic_gpu", "cudnn", "xla")
# The lean kernel keeps every SM to its end, and a transfer's own kernels wait for one: a ring is faster beside cuDNN.
_BESIDE_TRANSFERS = ("cudnn", "mosaic_gpu", "xla")
_log = logging.getLogger("tree_attn")


def attend(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    *,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    is_causal: bool = False,
    query_positions: Int[Array, "B T"] | Int[Array, " T"] | None = None,
    local_window_size: int | Window | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    scale: float | None = None,
    key_scale: Float[Array, " K"] | None = None,
    value_scale: Float[Array, " K"] | None = None,
    shard: Shard | None = None,
    implementation: str | None = None,
) -> SoftmaxState:
    """Exact attention of `query` over the keys on this device, with its log-sum-exp.

    logits = cap(scale key_scale query . key),    lse = log sum exp(logits) over visible keys and sinks,
    out    = value_scale sum exp(logits - lse) value

    Args:
      query: `[B, T, N, H]`; key: `[B, S, K, H]`; value: `[B, S, K, Hv]` with `N = K * G`, one float dtype. S may be 0.
        key and value may both be float8_e4m3fn or int8 instead; they are widened where they are used, which is exact.
      key_value_seq_lengths: int32 `[B]`, valid keys per sequence, counted over all shards; default: all.
      is_causal: query t sees the keys at positions up to its own.
      query_positions: int32 `[B, T]` or `[T]`; default: the last T positions of each sequence.
      local_window_size: an int or (left, right), inclusive, around the query's position; None is unlimited.
      logits_soft_cap: logits become `cap * tanh(logits / cap)`.
      sinks: float32 `[N]`, one extra logit per head in the denominator (hence in `lse`).
      scale: multiplies the logits, default `H ** -0.5`.
      key_scale, value_scale: float32 `[K]`, what the stored keys and values of each head are multiplied by; default 1.
      shard: which positions of the sequence `key` holds; default: all of it.
      implementation: "mosaic_gpu", "cudnn", "xla" or "flash_attn"; None takes the first of the first three that can run
        and logs which.
    Returns:
      `SoftmaxState(out [B, T, N, Hv] in query's dtype, lse float32 [B, T, N])`; where a query sees nothing, 0 and -inf.
    Raises:
      ValueError, TypeError: an argument does not fit; the message names it.
      NotImplementedError: the named implementation cannot do an option, or cannot run here. It never falls back.

    Example:
      >>> state = attend(query, key, value, key_value_seq_lengths=jnp.array([5, 0]), implementation="xla")

    Source: Tree Attention, Algorithm 3, line 2.
    """
    shard = Shard() if shard is None else shard
    options = AttentionOptions(
        key_value_seq_lengths=key_value_seq_lengths,
        query_positions=query_positions,
        sinks=sinks,
        key_scale=key_scale,
        value_scale=value_scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        scale=scale,
        implementation=implementation,
    )
    check_arrays(query, key, value)
    options.check(query, key, value, num_keys=key.shape[1] * shard.num_shards)
    check_implementation(implementation)
    state = attend_shard(query, key, value, options, shard)
    return state if sinks is None else merge_state(state, sink_state(sinks, state))


def attend_shard(
    query,
    key,
    value,
    options: AttentionOptions,
    shard: Shard,
    *,
    query_shard: Shard | None = None,
    beside_transfers: bool = False,
    onto: SoftmaxState | None = None,
) -> SoftmaxState:
    """Attention over one shard's keys, without sinks (they join once, for all shards); options are checked already.

    Args:
      query_shard: the queries are a prompt's own, stored as its keys are: of which shard; instead of `query_positions`.
      beside_transfers: the device sends and receives meanwhile, as in a ring; only the automatic choice heeds it.
      onto: a state over other keys, with which the result is merged, or None.
    """
    how = dict(query_shard=query_shard, beside_transfers=beside_transfers)
    return shard_attention(query, key, value, options, shard, **how).run(onto=onto)


class ShardAttention(NamedTuple):
    """`attend_shard` yet to be run: by who can merge its state with those of other devices as it is made.

    run:  `(onto=None, exchange=None) -> SoftmaxState`; with a `reduce.fused.Exchange`, the state over all shards
    num_elements:  of that state
    """

    run: Callable[..., SoftmaxState]
    num_elements: int


def shard_attention(
    query, key, value, options: AttentionOptions, shard: Shard, *, query_shard=None, beside_transfers=False
) -> ShardAttention:
    """What `attend_shard` of these arguments would run; what cannot run raises now."""
    sizes = dict(batch=query.shape[0], num_queries=query.shape[1], num_slots=key.shape[1])
    visible = visibility(options, shard=shard, query_shard=query_shard, **sizes)
    how = dict(logits_soft_cap=options.logits_soft_cap, visible=visible, scales=options.head_scales(key.shape[2]))
    name = choose(query, key, value, implementation=options.implementation, beside_transfers=beside_transfers, **how)
    how["scale"] = default_scale(options.scale, query.shape[-1])

    def run(onto=None, exchange=None) -> SoftmaxState:
        if name == "mosaic_gpu":
            return mosaic_gpu.attend(query, key, value, onto=onto, exchange=exchange, **how)
        state = IMPLEMENTATIONS[name].attend(query, key, value, **how)
        state = state if onto is None else merge_state(state, onto)
        return state if exchange is None else exchange.merge(state)

    return ShardAttention(run, math.prod(query.shape[:3]) * (value.shape[-1] + 1))


def choose(query, key, value, *, implementation: str | None, beside_transfers: bool = False, **how) -> str:
    """Returns the backend that will run: the named one, or the first of the automatic order that can.

    `beside_transfers` as in `attend_shard`; `how` are the keyword arguments of a backend's `unsupported`.

    Raises:
      NotImplementedError: the named backend cannot run here, or cannot do what is asked; with the reason.
    """
    if implementation is not None:
        reason = why_not(implementation, query, key, value, **how)
        if reason is not None:
            raise NotImplementedError(f"implementation={implementation!r} cannot run: {reason}")
        return implementation
    for name in _BESIDE_TRANSFERS if beside_transfers else _AUTOMATIC:
        reason = why_not(name, query, key, value, **how)
        if reason is None:
            _log.info("implementation=None picked %r", name)
            return name
        _log.debug("implementation=None passed over %r: %s", name, reason)
    raise AssertionError("xla does everything")


def check_implementation(implementation: str | None) -> None:
    """Raises ValueError unless `implementation` is None or the name of a backend."""
    if implementation is not None:
        one_of("implementation", implementation, sorted(IMPLEMENTATIONS))


def why_not(name: str, query, key, value, **how) -> str | None:
    """Returns why backend `name` cannot compute this attention here, or None if it can."""
    backend = IMPLEMENTATIONS[name]
    return backend.unavailable() or backend.unsupported(query, key, value, **how)


__all__ = [
    "IMPLEMENTATIONS",
    "ShardAttention",
    "attend",
    "attend_shard",
    "check_implementation",
    "choose",
    "shard_attention",
    "why_not",
]
