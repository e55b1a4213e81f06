"""The attentions a Llama can be given, by name: what runs over whole prompts, and what runs for each new token."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

import tree_attn
from tree_attn import ring_baseline
from tree_attn.arguments import AttentionOptions, one_of
from tree_attn.cache import KVCache
from tree_attn.local import attend, attend_shard, check_implementation, slot_multiple
from tree_attn.models.llama.config import LlamaConfig
from tree_attn.models.llama.sharding import LlamaSharding, as_tuple
from tree_attn.placement import Shard, storage_order
from tree_attn.reduce import check_reduction
from tree_attn.shared_prefix import PrefixLevel, hydragen_decode
from tree_attn.sparq import SparqOptions, sparq_decode
from tree_attn.sparq import slot_multiple as sparq_slot_multiple
from tree_attn.state import SoftmaxState, merge_state

# One prompt token to each shard in turn: every shard then has the same share of a causal prefill, and of later growth.
BLOCK_SIZE = 1

ATTENTIONS = ("tree", "ring", "single", "sparq")
REDUCING = ("tree", "sparq")
SHARING = ("tree", "single")
CHUNKING = ("tree", "single", "sparq")
_CANNOT_SHARE = "has no form for shared prefixes; 'tree' and 'single' have"
_NO_SCALES = "attention='sparq' takes no scales; float8_e4m3fn needs none"


def empty_cache(
    config: LlamaConfig, sharding: LlamaSharding, *, batch: int, capacity: int, dtype: DTypeLike, **beside
) -> KVCache:
    """A cache for all layers of a model; `beside` are scales and `Attention.cache_keeps`, as in `KVCache.create`."""
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
        **beside,
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
      reduction: how those of `REDUCING` reduce across devices: the name that was given, or the one chosen; else None.
      num_shards: shards of the sequence.
      shares_prefixes: whether it takes `prefixes` that are not empty: those of `SHARING`.
      prefill: `(query, key, value, lengths, prefixes) -> out`, causal, all in storage order; `[B, S, N, H]` and
        `[B, S, K, H]`. The levels of `prefixes` come before the sequences and are seen whole.
      decode: `(query, cache, layer, lengths, prefixes) -> out`; query `[B, T, N, H]` at the last `T` positions, which
        the layer of the cache holds already; `lengths` count them, and nothing of the prefixes.
      sparq: which keys decoding attends to, of `sparq`; None: to all.
    """

    name: str
    reduction: str | None
    num_shards: int
    shares_prefixes: bool
    prefill: Callable[..., jax.Array]
    decode: Callable[..., jax.Array]
    sparq: SparqOptions | None = None

    @property
    def prefills_in_chunks(self) -> bool:
        """Whether prefill takes prefixes, as which a chunk is given the chunks before it: those of `CHUNKING`."""
        return self.name in CHUNKING

    @property
    def cache_keeps(self) -> dict[str, bool]:
        """What `KVCache.create` is told to keep beside keys and values."""
        return {} if self.sparq is None else {"keeps_value_sum": True, "keeps_key_by_component": True}

    def slot_multiple(self, num_tokens: int) -> int:
        """Slots of a shard come in multiples of this, for so many tokens: what kernels take, where it pads little."""
        per_shard = num_tokens // self.num_shards
        multiple = slot_multiple(per_shard)
        return multiple if self.sparq is None else max(multiple, sparq_slot_multiple(per_shard))

    def storage_order(self, num_tokens: int) -> StorageOrder:
        """The order in which prefill takes `num_tokens` tokens, a multiple of `num_shards`."""
        positions = storage_order(num_tokens, self.num_shards, BLOCK_SIZE)
        return StorageOrder(positions=positions, indices=np.argsort(positions).astype(np.int32))


def by_name(
    name: str,
    sharding: LlamaSharding,
    *,
    reduction: str | None = None,
    implementation: str | None = None,
    sparq: SparqOptions | None = None,
) -> Attention:
    """The attention called `name`, over the devices of `sharding.sequence`.

    Args:
      name: `tree` (Tree Attention), `ring` (Ring Attention), `single` (all keys on one device) or `sparq` (SparQ
        Attention: prompts are read exactly, and new tokens attend to a choice of keys). All but `single` prefill with
        `ring_attention`.
      sharding: gives the mesh and the axis.
      reduction: across devices, for `tree` and `sparq` only; None is `tree_decode`'s own choice.
      implementation: local kernel.
      sparq: of `sparq`, and of no other: which keys.

    Raises:
      ValueError: an unknown name or reduction, a reduction for an attention that has none, `single` on more than one
        device, `sparq` without its options, or these for another.

    Example:
      >>> attention = by_name("tree", sharding, reduction="allreduce")
      >>> attention = by_name("sparq", sharding, sparq=SparqOptions(num_components=32, num_keys=128))
    """
    num_shards = sharding.num_shards("sequence")
    reduction = check_choice(name, reduction, as_tuple(sharding.sequence), num_shards, sparq)
    check_implementation(implementation)
    if name == "single":
        prefill, decode = _single(implementation)
    else:
        options = dict(axis_name=sharding.sequence, mesh=sharding.mesh, implementation=implementation)
        methods = {
            "tree": (tree_attn.tree_decode, hydragen_decode, {"reduction": reduction}),
            "ring": (ring_baseline.ring_decode, _ring_without_prefixes, {}),
        }
        prefill, decode = _sharded(*methods["ring" if name == "ring" else "tree"], options)
        if sparq is not None:
            decode = _sparq(sparq, reduction, options)
    return Attention(
        name=name,
        reduction=reduction,
        num_shards=num_shards,
        shares_prefixes=name in SHARING,
        prefill=prefill,
        decode=decode,
        sparq=sparq,
    )


def check_choice(
    name: str, reduction: str | None, axes: tuple[str, ...], num_shards: int, sparq: SparqOptions | None = None
) -> str | None:
    """The reduction that attention `name` will use over these mesh axes; raises ValueError as `by_name` does.

    It needs no model, so that a command can refuse a wrong choice before it reads one.
    """
    if name not in ATTENTIONS:
        raise ValueError(f"attention={name!r}: must be one of {', '.join(ATTENTIONS)}")
    if name == "sparq" and sparq is None:
        raise ValueError("sparq=None: attention='sparq' needs num_components and num_keys, as in SparqOptions")
    if name != "sparq" and sparq is not None:
        raise ValueError(f"{sparq=}: attention={name!r} attends to all keys; only 'sparq' takes these options")
    if reduction is not None and name not in REDUCING:
        raise ValueError(
            f"{reduction=}: attention={name!r} does not reduce across devices; only {_quoted(REDUCING)} take one"
        )
    if name == "single" and num_shards != 1:
        raise ValueError(f"attention='single': keeps all keys on one device, but the sequence has {num_shards}")
    if name not in REDUCING:
        return None
    chosen = check_reduction(reduction, axes)
    return "hierarchical" if isinstance(chosen, tuple) else chosen


def _quoted(names: Sequence[str]) -> str:
    return " and ".join(map(repr, names))


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
    if name not in CHUNKING:
        raise NotImplementedError(f"{prefill_chunk=}: attention={name!r} reads prompts whole")


def check_cache_dtype(name: str, cache_dtype: str | None) -> None:
    """Raises where attention `name` cannot decode over a cache of `cache_dtype` (None: the model's), without a model.

    Raises:
      NotImplementedError: `sparq` over int8.
    """
    if name == "sparq" and cache_dtype == "int8":
        raise NotImplementedError(f"{cache_dtype=}: {_NO_SCALES}")


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

    def decode(query, cache, layer, lengths, prefixes=()):
        key, value = cache.key[layer], cache.value[layer]
        how = dict(key_value_seq_lengths=lengths, block_size=BLOCK_SIZE, is_causal=query.shape[1] > 1)
        how |= cache.scales(layer) | reduction | options
        return with_prefixes(query, prefixes, key, value, **how) if prefixes else method(query, key, value, **how)

    return prefill, decode


def _single(implementation: str | None) -> tuple[Callable, Callable]:
    def prefill(query, key, value, lengths, prefixes=()):
        options = AttentionOptions(key_value_seq_lengths=lengths, is_causal=True, implementation=implementation)
        # Padding lies to the right, so position t is index t whatever the length.
        state = attend_shard(query, key, value, options, Shard(), query_shard=Shard())
        return _after_prefixes(
            state, query, key, prefixes, with_prefixes=hydragen_decode, implementation=implementation
        )

    def decode(query, cache, layer, lengths, prefixes=()):
        key, value = cache.key[layer], cache.value[layer]
        how = dict(key_value_seq_lengths=lengths, is_causal=query.shape[1] > 1, implementation=implementation)
        how |= cache.scales(layer)
        if prefixes:
            return hydragen_decode(query, prefixes, key, value, **how)
        return attend(query, key, value, **how).out

    return prefill, decode


def _sparq(sparq: SparqOptions, reduction: str | None, options: dict[str, Any]) -> Callable:
    def decode(query, cache, layer, lengths, prefixes=()):
        if prefixes:
            raise NotImplementedError(f"attention='sparq' {_CANNOT_SHARE}")
        if any(scale is not None for scale in cache.scales().values()):
            raise NotImplementedError(f"cache: keeps {cache.dtype.name} with scales; {_NO_SCALES}")
        is_causal = query.shape[1] > 1
        # Of causal queries each sees fewer values than the next: the cache's mean is that of the last alone.
        has_mean = cache.value_sum is not None and not is_causal
        return sparq_decode(
            query,
            cache.key[layer],
            cache.value[layer],
            value_mean=cache.value_mean(lengths, layer) if has_mean else None,
            key_by_component=None if cache.key_by_component is None else cache.key_by_component[layer],
            key_value_seq_lengths=lengths,
            is_causal=is_causal,
            block_size=cache.block_size,
            reduction=reduction,
            **dataclasses.asdict(sparq),
            **options,
        )

    return decode


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
