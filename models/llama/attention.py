"""The attentions a Llama can be given, by name: what runs over whole prompts, and what runs for each new token."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import ring_baseline
import tree_attn
from models.llama.sharding import LlamaSharding, as_tuple
from tree_attn.local import attend, check_implementation
from tree_attn.placement import storage_order
from tree_attn.reduce import check_reduction

# One prompt token to each shard in turn: every shard then has the same share of a causal prefill, and of later growth.
BLOCK_SIZE = 1

ATTENTIONS = ("tree", "ring", "single")


class StorageOrder(NamedTuple):
    """Where tokens are kept: index `i` holds position `positions[i]`, and position `p` is at index `indices[p]`."""

    positions: np.ndarray
    indices: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """An attention to give to a Llama.

    Attributes:
      name: one of `ATTENTIONS`.
      reduction: how `tree` reduces across devices: the name that was given, or the one chosen; None for the others.
      num_shards: shards of the sequence.
      prefill: `(query, key, value, lengths) -> out`, causal, all in storage order; `[B, S, N, H]` and `[B, S, K, H]`.
      decode: `(query, key, value, lengths) -> out`; query `[B, T, N, H]` at the last `T` positions, keys as stored.
    """

    name: str
    reduction: str | None
    num_shards: int
    prefill: Callable[..., jax.Array]
    decode: Callable[..., jax.Array]

    def storage_order(self, num_tokens: int) -> StorageOrder:
        """The order in which prefill takes `num_tokens` tokens, a multiple of `num_shards`."""
        positions = storage_order(num_tokens, self.num_shards, BLOCK_SIZE)
        return StorageOrder(positions=positions, indices=np.argsort(positions).astype(np.int32))


def by_name(
    name: str, sharding: LlamaSharding, *, reduction: str | None = None, implementation: str | None = None
) -> Attention:
    """The attention called `name`, over the devices of `sharding.sequence`.

    Args:
      name: `tree` (Tree Attention), `ring` (Ring Attention) or `single` (all keys on one device). The first two prefill
        with `ring_attention`.
      sharding: gives the mesh and the axis.
      reduction: across devices, for `tree` only; None is `tree_decode`'s own choice.
      implementation: local kernel.

    Raises:
      ValueError: an unknown name or reduction, a reduction for an attention that has none, or `single` on more than one
        device.

    Example:
      >>> attention = by_name("tree", sharding, reduction="allreduce")
    """
    num_shards = sharding.num_shards("sequence")
    reduction = check_choice(name, reduction, as_tuple(sharding.sequence), num_shards)
    check_implementation(implementation)
    if name == "single":
        prefill, decode = _single(implementation)
    else:
        options = dict(axis_name=sharding.sequence, mesh=sharding.mesh, implementation=implementation)
        tree = functools.partial(tree_attn.tree_decode, reduction=reduction)
        prefill, decode = _sharded(tree if name == "tree" else ring_baseline.ring_decode, options)
    return Attention(name=name, reduction=reduction, num_shards=num_shards, prefill=prefill, decode=decode)


def check_choice(name: str, reduction: str | None, axes: tuple[str, ...], num_shards: int) -> str | None:
    """The reduction that attention `name` will use over these mesh axes; raises ValueError as `by_name` does.

    It needs no model, so that a command can refuse a wrong choice before it reads one.
    """
    if name not in ATTENTIONS:
        raise ValueError(f"attention={name!r}: must be one of {', '.join(ATTENTIONS)}")
    if reduction is not None and name != "tree":
        raise ValueError(f"{reduction=}: attention={name!r} does not reduce across devices; only 'tree' takes one")
    if name == "single" and num_shards != 1:
        raise ValueError(f"attention='single': keeps all keys on one device, but the sequence has {num_shards}")
    if name != "tree":
        return None
    chosen = check_reduction(reduction, axes)
    return "hierarchical" if isinstance(chosen, tuple) else chosen


def _sharded(method: Callable, options: dict[str, Any]) -> tuple[Callable, Callable]:
    def prefill(query, key, value, lengths):
        return ring_baseline.ring_attention(
            query, key, value, key_value_seq_lengths=lengths, block_size=BLOCK_SIZE, **options
        )

    def decode(query, key, value, lengths):
        return method(
            query,
            key,
            value,
            key_value_seq_lengths=lengths,
            block_size=BLOCK_SIZE,
            is_causal=query.shape[1] > 1,
            **options,
        )

    return prefill, decode


def _single(implementation: str | None) -> tuple[Callable, Callable]:
    def prefill(query, key, value, lengths):
        # Padding lies to the right, so position t is index t whatever the length.
        positions = jnp.broadcast_to(jnp.arange(query.shape[1], dtype=jnp.int32)[None, :], query.shape[:2])
        state = attend(
            query,
            key,
            value,
            key_value_seq_lengths=lengths,
            is_causal=True,
            query_positions=positions,
            implementation=implementation,
        )
        return state.out

    def decode(query, key, value, lengths):
        is_causal = query.shape[1] > 1
        state = attend(
            query, key, value, key_value_seq_lengths=lengths, is_causal=is_causal, implementation=implementation
        )
        return state.out

    return prefill, decode
