"""The attentions a Llama can be given, by name: what runs over whole prompts, and what runs for each new token."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

import ring_baseline
import tree_attn
from models.llama.config import LlamaConfig
from models.llama.sharding import LlamaSharding, as_tuple
from tree_attn.arguments import one_of
from tree_attn.cache import KVCache
from tree_attn.local import attend, check_implementation
from tree_attn.placement import storage_order
from tree_attn.reduce import check_reduction
from tree_attn.shared_prefix import PrefixLevel, hydragen_decode
from tree_attn.state import SoftmaxState, merge_state

# One prompt token to each shard in turn: every shard then has the same share of a causal prefill, and of later growth.
BLOCK_SIZE = 1

ATTENTIONS = ("tree", "ring", "single")
SHARING = ("tree", "single")
_CANNOT_SHARE = "has no form for shared prefixes; 'tree' and 'single' have"


def empty_cache(
    config: LlamaConfig, sharding: LlamaSharding, *, batch: int, capacity: int, dtype: DTypeLike, **scales
) -> KVCache:
    """A cache for all layers of a model; `scales` are `key_scale` and `value_scale`, as in `KVCache.create`."""
    return KVCache.create(
        batch=batch,
        capacity=capacity,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        mesh=sharding.mesh,
        axis_name=sharding.sequence,
        block_size=BLOCK_SIZE,
        num_layers=config.num_layers,
        **scales,
    )


@functools.partial(jax.tree_util.register_dataclass, data_fields=["cache"], meta_fields=["sequences"])
@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefix:
    """One level of a prefix tree, whose nodes come before other nodes or rows.

    Attributes:
      cache: keys and values of all layers, one sequence for each node.
      sequences: for each node which sequences it comes before (static).
    """

    cache: KVCache
    sequences: tuple[tuple[int, ...], ...]

    def level(self, layer: jax.Array) -> PrefixLevel:
        """What attention reads of it in one layer."""
        return PrefixLevel(
            key=self.cache.key[layer],
            value=self.cache.value[layer],
            lengths=self.cache.lengths,
            sequences=self.sequences,
            block_size=self.cache.block_size,
            **self.cache.scales(layer),
        )


def num_tokens_before(prefixes: Sequence[Prefix], batch: int) -> jax.Array:
    """Tokens of all nodes that come before each sequence, int32 `[B]`: where its own positions begin."""
    total = jnp.zeros(batch, jnp.int32)
    for prefix in prefixes:
        node_of = {row: node for node, sequences in enumerate(prefix.sequences) for row in sequences}
        rows, nodes = (np.array(list(ids), np.int32) for ids in (node_of.keys(), node_of.values()))
        total = total.at[rows].add(prefix.cache.lengths[nodes])
    return total


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
      shares_prefixes: whether it takes `prefixes` that are not empty: those of `SHARING`.
      prefill: `(query, key, value, lengths, prefixes) -> out`, causal, all in storage order; `[B, S, N, H]` and
        `[B, S, K, H]`. The levels of `prefixes` come before the sequences and are seen whole.
      decode: `(query, key, value, lengths, prefixes, **scales) -> out`; query `[B, T, N, H]` at the last `T` positions,
        keys as stored, and their `KVCache.scales`; `lengths` without those of the prefixes.
    """

    name: str
    reduction: str | None
    num_shards: int
    shares_prefixes: bool
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
        methods = {
            "tree": (tree_attn.tree_decode, hydragen_decode, {"reduction": reduction}),
            "ring": (ring_baseline.ring_decode, _ring_without_prefixes, {}),
        }
        prefill, decode = _sharded(*methods[name], options)
    return Attention(
        name=name,
        reduction=reduction,
        num_shards=num_shards,
        shares_prefixes=name in SHARING,
        prefill=prefill,
        decode=decode,
    )


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


def check_sharing(name: str, share_prefixes: bool | None) -> None:
    """Raises NotImplementedError where attention `name` is to share prefixes and cannot, without a model.

    Raises:
      ValueError: `share_prefixes` is not None, True or False.
    """
    one_of("share_prefixes", share_prefixes, (None, True, False))
    if share_prefixes and name not in SHARING:
        raise NotImplementedError(f"{share_prefixes=}: attention={name!r} {_CANNOT_SHARE}")


def check_prefill_chunk(name: str, prefill_chunk: int | None, num_shards: int) -> None:
    """Raises where attention `name` cannot read prompts by `prefill_chunk` tokens on `num_shards`, without a model.

    Raises:
      ValueError: it is no positive multiple of the shards.
      NotImplementedError: `ring`, whose chunks would need what came before.
    """
    if prefill_chunk is None:
        return
    if prefill_chunk < 1 or prefill_chunk % (num_shards * BLOCK_SIZE):
        raise ValueError(f"{prefill_chunk=}: must be a multiple of {num_shards * BLOCK_SIZE} shards")
    if name not in SHARING:
        raise NotImplementedError(f"{prefill_chunk=}: attention={name!r} reads prompts whole")


def _sharded(
    method: Callable, with_prefixes: Callable, reduction: dict[str, str | None], options: dict[str, Any]
) -> tuple[Callable, Callable]:
    def prefill(query, key, value, lengths, prefixes=()):
        out, lse = ring_baseline.ring_attention(
            query, key, value, key_value_seq_lengths=lengths, block_size=BLOCK_SIZE, return_lse=True, **options
        )
        # As many states as tokens: a gather would hold all of them once for each device.
        merged = functools.partial(_after_prefixes, with_prefixes=with_prefixes, reduction="allreduce", **options)
        return merged(SoftmaxState(out, lse), query, key, prefixes)

    def decode(query, key, value, lengths, prefixes=(), **scales):
        how = dict(key_value_seq_lengths=lengths, block_size=BLOCK_SIZE, is_causal=query.shape[1] > 1)
        how |= scales | reduction | options
        return with_prefixes(query, prefixes, key, value, **how) if prefixes else method(query, key, value, **how)

    return prefill, decode


def _single(implementation: str | None) -> tuple[Callable, Callable]:
    def prefill(query, key, value, lengths, prefixes=()):
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
        return _after_prefixes(
            state, query, key, prefixes, with_prefixes=hydragen_decode, implementation=implementation
        )

    def decode(query, key, value, lengths, prefixes=(), **scales):
        how = dict(key_value_seq_lengths=lengths, is_causal=query.shape[1] > 1, implementation=implementation) | scales
        if prefixes:
            return hydragen_decode(query, prefixes, key, value, **how)
        return attend(query, key, value, **how).out

    return prefill, decode


def _after_prefixes(own: SoftmaxState, query, key, prefixes, *, with_prefixes: Callable, **how) -> jax.Array:
    """What queries get from their own sequences, `own`, and from the prefixes before those, which they see whole.

    The prefixes stay where they are, and every device is given all queries: those are the fewer where prefixes pay.
    """
    if not prefixes:
        return own.out
    nothing = jnp.zeros((key.shape[0], 0, *key.shape[2:]), key.dtype)
    before = SoftmaxState(*with_prefixes(query, prefixes, nothing, nothing, return_lse=True, **how))
    return merge_state(own, before).out


def _ring_without_prefixes(*_, **__):
    raise NotImplementedError(f"attention='ring' {_CANNOT_SHARE}")
