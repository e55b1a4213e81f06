"""A hop of a prompt whose shards are runs of tokens, contiguous or zigzag: attention, and its derivative.

Within a causal prompt a query sees all tokens of an earlier run, and none of a later one. So a hop between two shards
has no masked logits, and a kernel needs no mask for it:

    placement    the keys come from an earlier shard       from a later one
    contiguous   all queries, all keys                     nothing
    zigzag       all queries, the first run of keys        the second run of queries, all keys

Of a zigzag placement both are half of the pairs, on every device. A device's own shard has the causal diagonal.
"""

import dataclasses

import jax
import jax.numpy as jnp

from tree_attn.arguments import AttentionOptions
from tree_attn.local import attend_shard
from tree_attn.local.gradient import Gradient, shard_gradient, zero_gradient
from tree_attn.masking import normalise_window
from tree_attn.mesh import vary_as
from tree_attn.placement import ZIGZAG, Shard
from tree_attn.state import SoftmaxState, empty_like


def hop_state(
    query, key, value, options: AttentionOptions, shard: Shard, visiting: Shard, *, is_other: bool
) -> SoftmaxState:
    """Returns the state of the queries of `shard` over the keys of `visiting`.

    Args:
      query, key, value, options: as of `attend_shard`.
      visiting: the same object as `shard` where the keys are known to be its own.
      is_other: the keys are known to be another's.
    """
    if not (is_other and _is_unmasked(options, shard)):
        return attend_shard(query, key, value, options, visiting, query_shard=shard, beside_transfers=True)
    plain, size = dataclasses.replace(options, is_causal=False), query.shape[1] // 2
    attended = lambda query, key, value, shard: attend_shard(query, key, value, plain, shard, beside_transfers=True)
    empty = vary_as(_empty(query, value), (query, key, value))

    def earlier():
        if shard.block_size != ZIGZAG:
            return attended(query, key, value, visiting)
        return attended(query, key[:, :size], value[:, :size], _first_run(visiting))

    def later():
        if shard.block_size != ZIGZAG:
            return empty
        state = attended(query[:, size:], key, value, visiting)
        return jax.tree.map(lambda none, some: jnp.concatenate([none[:, :size], some], axis=1), empty, state)

    return jax.lax.cond(visiting.index < shard.index, earlier, later)


def hop_gradient(
    query, key, value, options: AttentionOptions, shard: Shard, visiting: Shard, *, is_other: bool, **rows
) -> Gradient:
    """Returns the derivative over the keys of `visiting`; arguments as of `hop_state` and `shard_gradient`."""
    if not (is_other and _is_unmasked(options, shard)):
        return shard_gradient(query, key, value, options, visiting, query_shard=shard, **rows)
    plain, size = dataclasses.replace(options, is_causal=False), query.shape[1] // 2
    zeros = vary_as(zero_gradient(query, key, value, options), (query, key, value))

    def earlier():
        if shard.block_size != ZIGZAG:
            return shard_gradient(query, key, value, plain, visiting, **rows)
        found = shard_gradient(query, key[:, :size], value[:, :size], plain, _first_run(visiting), **rows)
        whole = lambda some, none: jnp.concatenate([some, none[:, size:]], axis=1)
        return found._replace(key=whole(found.key, zeros.key), value=whole(found.value, zeros.value))

    def later():
        if shard.block_size != ZIGZAG:
            return zeros
        found = shard_gradient(
            query[:, size:], key, value, plain, visiting, **{name: x[:, size:] for name, x in rows.items()}
        )
        return found._replace(query=jnp.concatenate([zeros.query[:, :size], found.query], axis=1))

    return jax.lax.cond(visiting.index < shard.index, earlier, later)


def _is_unmasked(options: AttentionOptions, shard: Shard) -> bool:
    """Returns whether a query sees all of another shard's run or nothing (static)."""
    has_window = normalise_window(options.local_window_size) is not None
    return bool(options.is_causal) and not has_window and shard.block_size in (None, ZIGZAG)


def _first_run(shard: Shard) -> Shard:
    """Returns the first of a zigzag shard's runs, as a shard of twice as many."""
    return Shard(index=shard.runs[0], num_shards=2 * shard.num_shards)


def _empty(query, value) -> SoftmaxState:
    rows = query.shape[:3]
    return empty_like(SoftmaxState(jnp.zeros((*rows, value.shape[-1]), query.dtype), jnp.zeros(rows, jnp.float32)))
