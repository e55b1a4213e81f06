"""SparQ by the kernels of `tree_attn/kernels/sparq_*`: steps 1 and 2 on Hopper GPUs.

A choice is one group of query heads of one query. The slots of a shard are cut into chunks whose logits registers hold.
Three ways lead to a choice:
- in one kernel, where one chunk holds all slots (`_choose_in_one_kernel`);
- without groups, each chunk lists its best keys, and the lists compete (`_choose_from_chunks`);
- with groups, all logits must be known before any key is chosen, so they pass through memory (`_choose_by_shares`).

Shapes: as in `tree_attn/sparq/xla.py`.
"""

import jax
import jax.numpy as jnp

from tree_attn.devices import default_platform
from tree_attn.local import mosaic_gpu
from tree_attn.masking import Visibility
from tree_attn.mesh import varying_axes
from tree_attn.sparq.options import SparqCall
from tree_attn.sparq.xla import Choice, choose_candidates, lse_over_shards
from tree_attn.state import SoftmaxState

UNPAID_GROUP = 8  # query heads of a KV head from which on what SparQ saves is little: they share one read of its keys


def why_not(query, key, value, key_by_component, call: SparqCall) -> str | None:
    """Returns what the kernels need and this call lacks, or None where they run."""
    if call.implementation not in (None, "mosaic_gpu"):
        return f"implementation 'mosaic_gpu', not {call.implementation!r}"
    if call.options.local_window > call.max_keys_per_shard:
        return (
            f"a local_window of at most the {call.max_keys_per_shard} keys that a shard keeps, not "
            f"{call.options.local_window}"
        )
    if varying_axes((query, key, value)):
        return mosaic_gpu.CHECKED
    reason = mosaic_gpu.unavailable()
    if reason is not None:
        return reason
    from tree_attn.kernels import sparq_shape, targets

    if not targets.current().is_hopper:
        return "SparQ's kernels are for Hopper GPUs"
    return sparq_shape.unsupported(query, key, value, key_by_component, call.options)


def advice(group: int, obstacle: str | None) -> str | None:
    """Returns where exact attention is the better choice on a GPU, as measured (docs/results.md); None elsewhere.

    Args:
      group: query heads of a KV head.
      obstacle: from `why_not`.
    """
    if default_platform() != "gpu":
        return None
    if obstacle is not None:
        return "without SparQ's kernels exact attention was faster on an H200"
    if group >= UNPAID_GROUP:
        return f"with {group} query heads a KV head SparQ is not 1.5 times as fast as exact attention on an H200"
    return None


def kernel_shape(grouped, num_slots: int, call: SparqCall):
    """Returns the static part of the kernels' call, a `tree_attn.kernels.sparq_shape.SparqShape`."""
    from tree_attn.kernels import tuning
    from tree_attn.kernels.sparq_shape import SparqShape

    batch, num_queries, num_kv_heads, group, head_dim = grouped.shape
    return SparqShape(
        batch=batch,
        num_queries=num_queries,
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        num_slots=num_slots,
        num_components=call.options.num_components,
        num_keys=min(call.max_keys_per_shard, num_slots),
        scale=call.scale,
        dtype=grouped.dtype,
        num_sms=tuning.num_sms(),
        is_shard=call.is_global,
        reallocate=call.options.reallocate,
    )


def choose(grouped, key_by_component, visible: Visibility, first_recent, call: SparqCall) -> Choice:
    """Chooses the keys of this shard that each query keeps; arguments as in `tree_attn.sparq.xla.choose`."""
    from tree_attn.kernels.sparq_components import choose_components

    shape = kernel_shape(grouped, visible.num_slots, call)
    heads, shard = grouped.shape[:3], visible.shard
    components, weights = choose_components(
        grouped.reshape(shape.choices, shape.group, -1), coverage=call.options.coverage(shape.head_dim), shape=shape
    )
    recent = jnp.clip(first_recent, 0, visible.num_slots * shard.num_shards)
    recent = jnp.broadcast_to(shard.local_lengths(recent, visible.num_slots)[:, :, None], heads)
    end = jnp.broadcast_to(visible.slot_ranges()[1][:, :, None], heads)
    streamed = key_by_component, components, weights, _chunk_ends(end, recent, shape.num_chunks, shape.chunk)
    if shape.is_final:
        return _choose_in_one_kernel(streamed, end, shape)
    way = _choose_from_chunks if shape.group == 1 else _choose_by_shares
    return way(streamed, end, recent, visible, shape, call)


def attend_kept(grouped, key, value, choice: Choice, call: SparqCall) -> SoftmaxState:
    """Computes exact attention over the chosen keys, in one kernel."""
    from tree_attn.kernels import sparq_attend

    shape = kernel_shape(grouped, key.shape[1], call)
    out, lse = sparq_attend.attend_kept(
        grouped.reshape(shape.choices, shape.group, -1),
        key,
        value,
        choice.slots.reshape(shape.choices, -1),
        choice.counts.reshape(-1),
        shape=shape,
    )
    batch, num_queries = grouped.shape[:2]
    return SoftmaxState(out.reshape(batch, num_queries, -1, shape.head_dim), lse.reshape(batch, num_queries, -1))


def _choose_in_one_kernel(streamed, end, shape) -> Choice:
    """Chooses where one chunk holds all slots, all of them here, and no weight needs a group's logits."""
    from tree_attn.kernels import sparq_select

    slots, _, lse = sparq_select.select_keys(*streamed, shape=shape)
    lse = lse.reshape(*end.shape, -1)
    return Choice(
        slots=slots.reshape(*end.shape, -1),
        counts=jnp.minimum(end, shape.num_keys),
        total_lse=lse[..., : shape.group],
        kept_lse=lse[..., 1:] if shape.group == 1 else None,  # groups reallocate nothing here
    )


def _choose_from_chunks(streamed, end, recent, visible: Visibility, shape, call: SparqCall) -> Choice:
    """Chooses without groups: the order of logits is the order of scores, so each chunk can list its best."""
    from tree_attn.kernels import sparq_select

    slots, scores, lse = sparq_select.select_keys(*streamed, shape=shape)
    lse = lse.reshape(*end.shape, shape.num_chunks, -1)
    total_lse = lse_over_shards(jax.nn.logsumexp(lse[..., :1], axis=3), call)
    slots, scores = _candidates(slots, scores, end, shape)
    if _compete_in_kernel(slots, shape):
        slots, kept_lse = _best_of(slots, scores, recent, shape)
        counts = jnp.minimum(end, shape.num_keys)
        return Choice(slots=slots, counts=counts, total_lse=total_lse, kept_lse=kept_lse.reshape(*end.shape, 1))
    slots, scores = _in_order_of_slots(slots, scores)
    logits = scores[:, :, :, None]
    return choose_candidates(_kept_if_recent(scores, slots, recent), slots, logits, total_lse, visible, call)


def _choose_by_shares(streamed, end, recent, visible: Visibility, shape, call: SparqCall) -> Choice:
    """Chooses for groups: a key's score is the sum of its shares of the queries' softmaxes."""
    from tree_attn.kernels import sparq_lists, sparq_select
    from tree_attn.kernels.registers import LOG2_E
    from tree_attn.kernels.sparq_shape import CHUNK

    logits, lse = sparq_select.approximate_logits(*streamed, shape=shape)
    lse = lse.reshape(*end.shape, shape.num_chunks, shape.group)
    total_lse = lse_over_shards(jax.nn.logsumexp(lse, axis=3), call)
    finite_lse = jnp.where(jnp.isneginf(total_lse), 0.0, total_lse).reshape(shape.choices, -1)
    list_ends = _chunk_ends(end, recent, shape.num_lists, CHUNK)
    slots, scores = sparq_lists.select_by_share(logits, finite_lse, list_ends, shape=shape)

    def logits_at(slots):
        """Returns the natural logits at `slots [B, T, K, n]`, `[B, T, K, G, n]`."""
        by_choice = logits.reshape(*end.shape, shape.group, -1)
        return jnp.take_along_axis(by_choice, slots[:, :, :, None], axis=-1) / LOG2_E

    def weighed(slots) -> Choice:
        counts, kept_lse = jnp.minimum(end, shape.num_keys), None
        if call.options.reallocate:
            is_kept = jnp.arange(shape.num_keys)[None, None, None, None, :] < counts[..., None, None]
            kept_lse = jax.nn.logsumexp(jnp.where(is_kept, logits_at(slots), -jnp.inf), axis=-1)
        return Choice(slots=slots, counts=counts, total_lse=total_lse, kept_lse=kept_lse)

    if shape.num_lists == 1 and not shape.is_shard:
        return weighed(slots.reshape(*end.shape, -1))
    slots, scores = _candidates(slots, scores, end, shape)
    if _compete_in_kernel(slots, shape):
        slots, _ = _best_of(slots, scores, recent, shape)
        return weighed(slots)
    slots, scores = _in_order_of_slots(slots, scores)
    candidate_logits = logits_at(slots) if call.options.reallocate else None
    return choose_candidates(_kept_if_recent(scores, slots, recent), slots, candidate_logits, total_lse, visible, call)


def _candidates(slots, scores, end, shape):
    """Returns the entries of all lists of a choice, `[B, T, K, n]`; where a list is shorter, slot 0 and score -inf."""
    from tree_attn.kernels.sparq_shape import CHUNK

    lists = (*end.shape, shape.num_lists, shape.num_keys)
    is_there = jnp.arange(shape.num_keys)[None, None, None, None, :]
    is_there = is_there < _within(end, shape.num_lists, CHUNK)[..., None]
    flat = lambda x, missing: jnp.where(is_there, x.reshape(lists), missing).reshape(*end.shape, -1)
    return flat(slots, 0), flat(scores, -jnp.inf)


def _compete_in_kernel(slots, shape) -> bool:
    from tree_attn.kernels.sparq_shape import CHUNK

    return not shape.is_shard and slots.shape[-1] <= CHUNK


def _best_of(slots, scores, recent, shape):
    """Returns the slots of the best candidates, `[B, T, K, k]`, and without groups the lse of their logits."""
    from tree_attn.kernels import sparq_lists

    by_choice = lambda x: x.reshape(shape.choices, -1)
    best, kept_lse = sparq_lists.best_of(by_choice(slots), by_choice(scores), recent.reshape(-1), shape=shape)
    return best.reshape(*recent.shape, -1), kept_lse


def _in_order_of_slots(slots, scores):
    """Returns candidates by ascending slots: of equal scores the earliest are wanted, and lists are in no order."""
    order = jnp.argsort(slots, axis=-1)
    return jnp.take_along_axis(slots, order, axis=-1), jnp.take_along_axis(scores, order, axis=-1)


def _kept_if_recent(scores, slots, recent):
    """Returns infinity for candidates that are always kept."""
    return jnp.where((slots >= recent[..., None]) & (scores > -jnp.inf), jnp.inf, scores)


def _within(slot, num_chunks: int, width: int):
    """Returns `slot [B, T, K]` within each of `num_chunks` chunks of `width` slots, `[B, T, K, chunks]`."""
    starts = width * jnp.arange(num_chunks, dtype=jnp.int32)[None, None, None, :]
    return jnp.clip(slot[..., None] - starts, 0, width)


def _chunk_ends(end, recent, num_chunks: int, width: int):
    """Returns the kernels' table of chunks, int32 `[choices x chunks, 4]`: see `sparq_select.select_keys`."""
    ends = [_within(end, num_chunks, width), _within(recent, num_chunks, width)]
    return jnp.stack([*ends, *[jnp.zeros_like(ends[0])] * 2], axis=-1).reshape(-1, 4)
