"""Attention on one device: one meaning, one file per backend.

`attend` is the public function. Methods over several devices use `shard_attention`, which picks a backend and leaves
the run to its caller: a kernel can merge its state with those of other devices as it is made. The contracts are types:
`ShardAttention` here; `Backend`, `Exchange` and `Epilogue` in contracts.py.
"""

import dataclasses
import logging
import math
from collections.abc import Mapping
from typing import Any, Unpack

from jaxtyping import Float, Num

from tree_attn.arguments import (
    AnyArray,
    AttentionOptions,
    OptionArguments,
    check_arrays,
    default_scale,
    one_of,
    takes_options,
)
from tree_attn.local import cudnn, flash_attn, mosaic_gpu, prediction, xla
from tree_attn.local.contracts import Backend, Epilogue, Exchange
from tree_attn.local.mosaic_gpu import slot_multiple
from tree_attn.masking import add_sinks, visibility
from tree_attn.mesh import vary_as
from tree_attn.placement import Shard, check_shard
from tree_attn.state import SoftmaxState, merge_state, of_batch

IMPLEMENTATIONS: Mapping[str, Backend] = {
    "mosaic_gpu": mosaic_gpu, "cudnn": cudnn, "xla": xla, "flash_attn": flash_attn,
}  # fmt: skip
# The order in which `implementation=None` tries them where nothing predicts their times. flash_attn reads K and V once
# per query head: it is never picked.
AUTOMATIC = ("mosaic_gpu", "cudnn", "xla")
# The lean kernel occupies every SM to its end, and a transfer's kernels wait for one: cuDNN makes a faster ring.
BESIDE_TRANSFERS = ("cudnn", "mosaic_gpu", "xla")
_log = logging.getLogger("tree_attn")


@takes_options()
def attend(
    query: Float[AnyArray, "B T N H"],
    key: Num[AnyArray, "B S K H"],
    value: Num[AnyArray, "B S K Hv"],
    *,
    shard: Shard | None = None,
    **options: Unpack[OptionArguments],
) -> SoftmaxState:
    """Exact attention of `query` over the keys on this device, as a state to merge with those of other keys.

    This function is for folding: it returns a `SoftmaxState`, and `tree_attn.merge_state` merges such states. Every
    other attention function returns `out`, and `(out, lse)` with `return_lse=True`::

      logits = cap(scale key_scale query . key),    lse = log sum exp(logits) over visible keys and sinks,
      out    = value_scale sum exp(logits - lse) value

    Args:
      query: `[B, T, N, H]`; key: `[B, S, K, H]`; value: `[B, S, K, Hv]` with `N = K * G`, one float dtype. S may be 0.
        key and value may both be float8_e4m3fn or int8 instead; they are widened in use, which is exact.
      key_value_seq_lengths: int32 `[B]`, valid keys per sequence, counted over all shards; default: all.
      is_causal: query t sees the keys at positions up to its own.
      query_positions: int32 `[B, T]` or `[T]`; default: the last T positions of each sequence.
      local_window_size: an integer or (left, right), inclusive, around the query's position; None is unlimited, and so
        is a side of 2**31 or more.
      logits_soft_cap: logits become `cap * tanh(logits / cap)`; from 1e30 on no logit is bent.
      sinks: float32 `[N]`, one extra logit per head in the denominator (hence in `lse`); infinity takes all weight.
      scale: multiplies the logits, default `H ** -0.5`.
      key_scale, value_scale: float32 `[K]`, factors of the stored keys and values of each head; default 1.
      reads_keys_early: True is a promise, with which `mosaic_gpu` may read old keys while the kernel before it ends.
        This query depends on the result of an earlier attention of the program, which differs by query, key and value
        only, and read the same schedule. All keys but each sequence's last T were written before that one, and are
        read where they lie: a slice of stacked layers, a cast, `jax.vmap` and other sharding are copies.
      shard: the shard of the sequence that `key` is; default: the whole sequence.
      implementation: "mosaic_gpu", "cudnn", "xla" or "flash_attn". None takes that of the first three that is predicted
        to be fastest (`tree_attn/local/prediction.py`), or the first that can run, and logs its name and why.
    Returns:
      `SoftmaxState(out [B, T, N, Hv] in query's dtype, lse float32 [B, T, N])`. A query that sees no key has 0 and
      -inf.
    Raises:
      ValueError, TypeError: an argument does not fit; the message names it.
      NotImplementedError: the named implementation cannot do an option, or cannot run here. It never falls back.

    Example:
      >>> state = attend(query, key, value, key_value_seq_lengths=jnp.array([5, 0]), implementation="xla")

    Source: Tree Attention, Algorithm 3, line 2.
    """
    shard = Shard() if shard is None else shard
    attention = AttentionOptions(**options)
    check_arrays(query, key, value)
    check_shard(shard, key.shape[1])
    attention.check(query, key, value, num_keys=key.shape[1] * shard.num_shards)
    check_implementation(attention.implementation)
    state = attend_shard(query, key, value, attention, shard)
    return add_sinks(state, attention.sinks)


def attend_shard(
    query,
    key,
    value,
    options: AttentionOptions,
    shard: Shard,
    *,
    query_shard: Shard | None = None,
    beside_transfers: bool = False,
    merge_with: SoftmaxState | None = None,
) -> SoftmaxState:
    """Computes attention over one shard's keys, without sinks (they join once, for all shards).

    Args:
      options: checked already.
      query_shard: the shard of a prompt that the queries are, stored as its keys are; it gives their positions.
      beside_transfers: the device sends and receives meanwhile, as in a ring; only the automatic choice heeds it.
      merge_with: a state over other keys, with which the result is merged, or None.
    """
    attention = shard_attention(
        query, key, value, options, shard, query_shard=query_shard, beside_transfers=beside_transfers
    )
    return attention.run(merge_with=merge_with)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardAttention:
    """Attention over one shard's keys, checked and with its backend picked, yet to be run.

    A reduction that can merge states as a kernel makes them calls `run` with its `Exchange`; the others call `run()`.
    """

    query: AnyArray
    key: AnyArray
    value: AnyArray
    implementation: str
    scale: float
    arguments: dict[str, Any]  # the keyword arguments of the backend's `attend`, but for `scale`

    @property
    def num_elements(self) -> int:
        """Number of elements of the state, `out` and lse together."""
        return math.prod(self.query.shape[:3]) * (self.value.shape[-1] + 1)

    def run(self, *, merge_with: SoftmaxState | None = None, exchange: Exchange | None = None) -> SoftmaxState:
        """Returns the state over the shard's keys, merged with `merge_with`; with `exchange`, over all devices."""
        arrays, arguments = (self.query, self.key, self.value), self.arguments | {"scale": self.scale}
        if self.implementation == "mosaic_gpu":  # its kernels merge anyway
            return mosaic_gpu.attend(*arrays, merge_with=merge_with, exchange=exchange, **arguments)
        state = IMPLEMENTATIONS[self.implementation].attend(*arrays, **arguments)
        state = state if merge_with is None else merge_state(state, merge_with)
        return state if exchange is None else exchange.merge(state)


def attend_after(prefix: ShardAttention, suffix: ShardAttention) -> SoftmaxState:
    """Returns the state of each sequence over keys that it shares with others, and over its own.

    Args:
      prefix: of nodes, each with the queries of as many sequences of `suffix`, one after another.
    """
    if prefix.implementation == suffix.implementation == "mosaic_gpu":
        of = lambda x: ((x.query, x.key, x.value), x.arguments | {"scale": x.scale})
        return mosaic_gpu.attend_after(of(prefix), of(suffix))
    state = prefix.run(merge_with=of_batch(suffix.run(), prefix.query.shape[0]))
    return of_batch(state, suffix.query.shape[0])


def shard_attention(
    query,
    key,
    value,
    options: AttentionOptions,
    shard: Shard,
    *,
    query_shard: Shard | None = None,
    beside_transfers: bool = False,
) -> ShardAttention:
    """Returns what `attend_shard` of these arguments runs; raises NotImplementedError for what cannot run."""
    visible = visibility(
        options,
        batch=query.shape[0],
        num_queries=query.shape[1],
        num_slots=key.shape[1],
        shard=shard,
        query_shard=query_shard,
    )
    # Backends have loops and kernels, in which types must not differ by the axes that arrays vary over.
    query, key, value, visible, scales = vary_as((query, key, value, visible, options.head_scales(key.shape[2])))
    arguments = {"logits_soft_cap": options.soft_cap, "visible": visible, "scales": scales}
    name = choose(
        query, key, value, implementation=options.implementation, beside_transfers=beside_transfers, **arguments
    )
    scale = default_scale(options.scale, query.shape[-1])
    return ShardAttention(query=query, key=key, value=value, implementation=name, scale=scale, arguments=arguments)


def choose(
    query,
    key,
    value,
    *,
    implementation: str | None,
    beside_transfers: bool = False,
    candidates: tuple[str, ...] | None = None,
    obstacles: Mapping[str, str] | None = None,
    **arguments,
) -> str:
    """Returns the backend that will run: the named one, or the fastest by prediction, or the first that can.

    Args:
      beside_transfers: as in `attend_shard`.
      candidates: the backends to try where none is named, in order; default: the automatic order.
      obstacles: by backend, why it cannot run although the backend itself knows no reason.
      arguments: the keyword arguments of a backend's `unsupported`.
    Raises:
      NotImplementedError: the named backend cannot run here, or cannot do what is asked; with the reason.
    """
    reason_against = lambda name: why_not(name, query, key, value, **arguments) or (obstacles or {}).get(name)
    if implementation is not None:
        reason = reason_against(implementation)
        if reason is not None:
            raise NotImplementedError(f"implementation={implementation!r} cannot run: {reason}")
        return implementation
    able = []
    for name in candidates or (BESIDE_TRANSFERS if beside_transfers else AUTOMATIC):
        reason = reason_against(name)
        if reason is None:
            able.append(name)
        else:
            _log.debug("implementation=None passed over %r: %s", name, reason)
    # Beside transfers, and for packed or paged keys, steps were not measured: their order is what is known.
    is_measured = candidates is None and not beside_transfers
    times = prediction.predicted_us(query, key, arguments["visible"]) if is_measured and len(able) > 1 else {}
    name, why = _pick(able, times)
    _log.info("implementation=None picked %r: %s", name, why)
    return name


def _pick(able: list[str], predicted_us: prediction.Times) -> tuple[str, str]:
    """Returns the backend to run of those that are able, in their order, and why."""
    if len(able) == 1:
        return able[0], "no other can run this call"
    if able[0] not in predicted_us:
        return able[0], f"the first of {', '.join(able)}; such calls were not measured on this device"
    times = {name: predicted_us[name] for name in able if name in predicted_us}
    shown = (f"{name} {' or '.join(f'{us:.4g}' for us in of_name)} us" for name, of_name in times.items())
    share = " or ".join(f"{x:g}" for x in prediction.SHARES)
    where = f", if {share} of the slots hold keys" if len(times[able[0]]) > 1 else ""
    return prediction.pick(times), f"predicted {', '.join(shown)}{where}"


def check_implementation(implementation: str | None, candidates: tuple[str, ...] | None = None) -> None:
    """Raises ValueError unless `implementation` is None or one of the `candidates`, by default all backends."""
    if implementation is not None:
        one_of("implementation", implementation, candidates or sorted(IMPLEMENTATIONS))


def why_not(name: str, query, key, value, **arguments) -> str | None:
    """Returns why backend `name` cannot compute this attention here, or None if it can.

    Args:
      arguments: the keyword arguments of a backend's `unsupported`.
    """
    backend = IMPLEMENTATIONS[name]
    return backend.unavailable() or backend.unsupported(query, key, value, **arguments)


__all__ = [
    "IMPLEMENTATIONS",
    "Backend",
    "Epilogue",
    "Exchange",
    "ShardAttention",
    "attend",
    "attend_after",
    "attend_shard",
    "check_implementation",
    "choose",
    "shard_attention",
    "slot_multiple",
    "why_not",
]
