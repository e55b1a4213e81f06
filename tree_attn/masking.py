"""Visibility of keys, in one place: lengths, causal offsets, windows, and the extra logits called sinks."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tree_attn.arguments import INT32, AnyArray, AttentionOptions, Window, WindowSide, clip_to_int32
from tree_attn.placement import Shard
from tree_attn.state import SoftmaxState, merge_state


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["lengths", "query_positions", "shard", "is_strict"],
    meta_fields=["num_slots", "is_causal", "window", "is_diagonal", "num_new"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Visibility:
    """The keys of a shard that each query sees.

    The query at position q of sequence b sees the key at position k if all rules that are set hold:
      k < lengths[b];    causal: k <= q;    window: q - left <= k <= q + right

    lengths:          int32 `[B]`, valid keys counted over all shards; None if every slot of every shard is valid
    query_positions:  int32 `[B, T]`; None if no rule depends on them (plain decoding)
    shard:            the shard that the keys are; it gives their positions
    num_slots:        the number of its slots
    is_causal, window: the rules; a window is `(left, right)`, inclusive, None for unlimited
    is_diagonal:      query t sees the slots up to t, as in a kernel's own causal mask; with `is_strict` up to t - 1
    is_strict:        bool; None if it is known to be False when compiling
    num_new:          of each sequence's last keys, those that may have been written just before; None: any may be
    """

    lengths: Int[Array, " B"] | None
    query_positions: Int[Array, "B T"] | None
    shard: Shard
    num_slots: int
    is_causal: bool
    window: Window | None
    is_diagonal: bool = False
    is_strict: Bool[Array, ""] | None = None
    num_new: int | None = None

    @property
    def by_length_only(self) -> bool:
        """True when each sequence's visible slots are a prefix, the same for all its queries (static)."""
        return not self.is_causal and self.window is None

    @property
    def is_total(self) -> bool:
        """True when every query sees every key (static)."""
        return self.by_length_only and self.lengths is None

    def at_positions(self, query_positions: Int[Array, "B T"]) -> "Visibility":
        """Returns what queries at other positions see."""
        return dataclasses.replace(self, query_positions=query_positions, is_diagonal=False, is_strict=None)

    def local_lengths(self) -> Int[Array, " B"] | None:
        """Returns how many slots of this shard are valid, int32 `[B]`; None when all are."""
        return None if self.lengths is None else self.shard.local_lengths(self.lengths, self.num_slots)

    def position_ranges(self) -> tuple[Int[Array, "#B #T"] | None, Int[Array, "#B #T"] | None]:
        """Returns the range of positions that each query sees, int32 `[B or 1, T or 1]` each; none if `first >= end`.

        A bound that no rule sets is None. Sums with the sides of a window stay in int32, because positions are
        clipped to where they make a difference first.
        """
        first, end = None, None if self.lengths is None else self.lengths[:, None]
        if self.query_positions is None:
            return first, end
        num_keys = self.num_slots * self.shard.num_shards
        left, right = self.window or (None, None)
        reach = 0 if self.is_causal else right
        if reach is not None:
            in_reach = jnp.clip(self.query_positions, -1 - reach, num_keys - 1 - reach) + reach + 1
            end = in_reach if end is None else jnp.minimum(end, in_reach)
        if left is not None:
            first = jnp.clip(self.query_positions, left, min(left + num_keys, INT32.max)) - left
        return first, end

    def is_valid(self, start: Int[Array, ""] | int = 0, size: int | None = None) -> Bool[Array, "B size"] | None:
        """Returns which of the slots `start .. start + size` hold a key, bool `[B, size]`; None when all do.

        What lies in the others is garbage. A slot that a query does not see for another reason is valid.
        """
        lengths = self.local_lengths()
        if lengths is None:
            return None
        slots = start + jnp.arange(self.num_slots if size is None else size, dtype=jnp.int32)
        return slots[None, :] < lengths[:, None]

    def slot_ranges(self) -> tuple[Int[Array, "#B #T"], Int[Array, "#B #T"]]:
        """Returns each query's visible slots as `(first, end)`, int32 `[B or 1, T or 1]`; none where `first >= end`.

        Positions ascend with slots in every placement, so a range of positions is a range of slots.
        """
        slots_before = lambda positions: self.shard.local_lengths(positions, self.num_slots)
        first, end = self.position_ranges()
        first = jnp.zeros((1, 1), jnp.int32) if first is None else slots_before(first)
        end = jnp.full((1, 1), self.num_slots, jnp.int32) if end is None else slots_before(end)
        return first, end

    def mask(self, start: Int[Array, ""] | int = 0, size: int | None = None) -> Bool[Array, "#B #T size"]:
        """Returns the visible slots among `start .. start + size`, bool `[B or 1, T or 1, size]`."""
        keys = self.shard.positions(self.num_slots, start, size)[None, None, :]
        first, end = self.position_ranges()
        visible = jnp.ones_like(keys, dtype=bool) if end is None else keys < end[:, :, None]
        return visible if first is None else visible & (keys >= first[:, :, None])


def visibility(
    options: AttentionOptions,
    *,
    batch: int,
    num_queries: int,
    num_slots: int,
    shard: Shard,
    query_shard: Shard | None = None,
) -> Visibility:
    """Normalises the masking options into one `Visibility`; they are checked already.

    Without `query_positions` the T queries are the last T positions of each sequence. A single query then sees every
    valid key whether causal or not, so the causal rule is dropped and the plainest kernel can run.

    Args:
      shard: the shard that the keys are, of `num_slots` slots.
      query_shard: the shard of the same prompt that the queries are, in the same placement (ring prefill); their
        positions come from it. The same object as `shard` where the keys are the queries' own. None: the queries are
        those of `options`.
    """
    if query_shard is not None:
        options = dataclasses.replace(options, query_positions=query_shard.positions(num_queries))
    num_keys = num_slots * shard.num_shards
    lengths = options.key_value_seq_lengths
    if lengths is not None:
        lengths = clip_to_int32(lengths, 0, num_keys)
    is_causal, window = _rules(options, num_queries)
    positions = None
    if is_causal or window is not None:
        positions = _positions(batch, num_queries, num_keys, lengths, options.query_positions)
    # In a striped placement, position t of one shard comes before position t of the next. Positions ascend in all.
    is_own = shard.num_shards == 1 or shard is query_shard
    are_alike = query_shard is not None and num_queries == num_slots and (is_own or shard.block_size == 1)
    is_diagonal = is_causal and window is None and are_alike
    return Visibility(
        lengths=lengths,
        query_positions=positions,
        shard=shard,
        num_slots=num_slots,
        is_causal=is_causal,
        window=window,
        is_diagonal=is_diagonal,
        is_strict=jnp.asarray(query_shard.index < shard.index) if is_diagonal and not is_own else None,
        num_new=num_queries if options.reads_keys_early else None,
    )


def depends_on_positions(options: AttentionOptions, num_queries: int) -> bool:
    """Returns whether keys are seen by their positions (static): else every query sees every key."""
    is_causal, window = _rules(options, num_queries)
    return is_causal or window is not None or options.key_value_seq_lengths is not None


def normalise_window(local_window_size: WindowSide | Window | None) -> Window | None:
    """Returns `(left, right)`, inclusive, or None if nothing is limited. An integer limits both sides.

    A side of 2**31 or more is None, unlimited, as no sequence is as long.
    """
    pair = local_window_size if isinstance(local_window_size, tuple) else (local_window_size, local_window_size)
    left, right = (None if side is None or side > INT32.max else int(side) for side in pair)
    return None if left is None and right is None else (left, right)


def sink_state(sinks: Float[AnyArray, " N"], like: SoftmaxState) -> SoftmaxState:
    """Returns the sinks as a state to merge: each head's extra logit weighs in the denominator and adds no value.

    lse[b, t, n] = sinks[n],    out = 0
    """
    lse = jnp.broadcast_to(jnp.asarray(sinks, like.lse.dtype)[None, None, :], like.lse.shape)
    return SoftmaxState(jnp.zeros_like(like.out), lse)


def add_sinks(state: SoftmaxState, sinks: Float[AnyArray, " N"] | None) -> SoftmaxState:
    """Merges the sinks into a state over all keys, once; None leaves it as it is.

    An infinite sink leaves no weight to keys: `out = 0, lse = inf`. The merge knows finite sinks only.
    """
    if sinks is None:
        return state
    sinks = jnp.asarray(sinks, state.lse.dtype)
    merged = merge_state(state, sink_state(jnp.minimum(sinks, jnp.finfo(sinks.dtype).max), state))
    is_infinite = (sinks == jnp.inf)[None, None, :]
    return SoftmaxState(merged.out, jnp.where(is_infinite, jnp.inf, merged.lse))


def _rules(options: AttentionOptions, num_queries: int) -> tuple[bool, Window | None]:
    """Returns `is_causal` and the window, without what limits nothing: no valid key is after a single last query."""
    window = normalise_window(options.local_window_size)
    if options.query_positions is not None or num_queries > 1:
        return bool(options.is_causal), window
    return False, None if window is None or window[0] is None else (window[0], None)


def _positions(batch, num_queries, num_keys, lengths, query_positions) -> Int[Array, "B T"]:
    if query_positions is not None:
        positions = clip_to_int32(query_positions)
        positions = positions[None, :] if positions.ndim == 1 else positions
        return jnp.broadcast_to(positions, (batch, num_queries))
    ends = jnp.full((batch,), num_keys, jnp.int32) if lengths is None else lengths
    return ends[:, None] - num_queries + jnp.arange(num_queries, dtype=jnp.int32)[None, :]
