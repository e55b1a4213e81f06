"""The attentions of a Llama, by name: one form for whole prompts, one for each new token."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from tree_attn.arguments import AttentionOptions
from tree_attn.cache import KVCache
from tree_attn.cache_layer import LayerTuple
from tree_attn.decode import tree_decode
from tree_attn.local import attend, attend_shard, check_implementation, slot_multiple
from tree_attn.models.llama.attention_choice import (
    CANNOT_SHARE,
    CHUNKING,
    NO_SCALES,
    NO_WINDOWED_PREFIXES,
    SHARING,
    check_choice,
    check_prefill,
)
from tree_attn.models.llama.sharding import LlamaSharding, as_tuple
from tree_attn.models.llama.storage import BLOCK_SIZE, prompt_layout
from tree_attn.placement import PromptLayout, Shard
from tree_attn.ring_baseline import ring_attention, ring_decode, ulysses_attention
from tree_attn.shared_prefix import hydragen_decode
from tree_attn.sparq import SparqOptions, sparq_decode
from tree_attn.sparq import slot_multiple as sparq_slot_multiple
from tree_attn.state import SoftmaxState, merge_state


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """An attention for a Llama.

    Attributes:
      name: one of `ATTENTIONS`.
      reduction: reduction across devices, for the names in `REDUCING`: the chosen one; None for the others.
      num_shards: shards of the sequence.
      shares_prefixes: whether `prefixes` may be non-empty, as for the names in `SHARING`.
      prefill: `(query, key, value, lengths, prefixes, **options) -> out`, causal, all in storage order; `[B, S, N, H]`
        and `[B, S, K, H]`. The levels of `prefixes` precede the sequences, and every query sees them whole.
      decode: `(query, cache, layer, prefixes, **options) -> out`; query `[B, T, N, H]` of the newest T tokens,
        which the layer of the cache holds already and does not count yet. The options of both are
        `config.attention_options`. `decode` takes `is_later` too: whether an earlier layer of the program attends
        alike. Then it may read old keys early (`tree_attn.attend`).
      sparq: the choice of keys for `sparq`; None: decoding attends to all keys.
      is_replaceable: whether a launch that also multiplies may decode in its place: to all keys of the cache, by the
        kernel `mosaic_gpu`, and over several devices with the reduction `fused`.
    """

    name: str
    reduction: str | None
    num_shards: int
    shares_prefixes: bool
    prefill: Callable[..., jax.Array]
    decode: Callable[..., jax.Array]
    sparq: SparqOptions | None = None
    is_replaceable: bool = False

    @property
    def prefills_in_chunks(self) -> bool:
        """True for the names in `CHUNKING`: prefill takes earlier chunks of a prompt as a prefix."""
        return self.name in CHUNKING

    @property
    def cache_options(self) -> dict[str, bool]:
        """Options of `KVCache.create` for the arrays that decoding needs beside keys and values."""
        return {} if self.sparq is None else {"keeps_value_sum": True, "keeps_key_by_component": True}

    def slot_multiple(self, num_tokens: int) -> int:
        """Returns the number whose multiple a shard's slots must be, for so many tokens.

        It is what kernels take, where that pads little; else 1.
        """
        per_shard = num_tokens // self.num_shards
        multiple = slot_multiple(per_shard)
        return multiple if self.sparq is None else max(multiple, sparq_slot_multiple(per_shard))

    def prompt_layout(self, num_tokens: int) -> PromptLayout:
        """Returns the order in which prefill takes `num_tokens` tokens, and their padding."""
        return prompt_layout(num_tokens, self.num_shards)


def by_name(
    name: str,
    sharding: LlamaSharding,
    *,
    reduction: str | None = None,
    prefill: str | None = None,
    implementation: str | None = None,
    sparq: SparqOptions | None = None,
) -> Attention:
    """Returns the attention called `name`, over the devices of `sharding.sequence`.

    Args:
      name: `tree` (Tree Attention), `ring` (Ring Attention), `single` (all keys on one device) or `sparq` (SparQ
        Attention: prefill is exact, and new tokens attend to a choice of keys).
      sharding: gives the mesh and the axis.
      reduction: across devices, for `tree` and `sparq` only; None is `tree_decode`'s own choice.
      prefill: the way to read prompts, for all but `single`: `ring` (`ring_attention`; None is it), `ring_joint` (K
        and V are one transfer), `ring_two_way` (half of the heads each way round) or `ulysses` (`ulysses_attention`,
        which over two axes has a ring outside). A cache is striped, so none is zigzag.
      implementation: local kernel.
      sparq: the choice of keys, for `sparq` only.

    Raises:
      ValueError: an unknown name, reduction or prefill, a reduction or prefill for an attention that has none,
        `single` on more than one device, `sparq` without its options, or these for another.

    Example:
      >>> attention = by_name("tree", sharding, reduction="allreduce")
      >>> attention = by_name("tree", sharding, prefill="ulysses")
      >>> attention = by_name("sparq", sharding, sparq=SparqOptions(num_components=32, num_keys=128))
    """
    if not isinstance(sharding, LlamaSharding):
        raise TypeError(f"sharding must be a LlamaSharding, got {sharding!r}")
    num_shards = sharding.num_shards("sequence")
    reduction = check_choice(name, reduction, as_tuple(sharding.sequence), num_shards, sparq)
    check_implementation(implementation)
    check_prefill(prefill, name)
    if name == "single":
        read, decode = _single(implementation)
    else:
        read, decode = _sharded(name, sharding, reduction, _PREFILLS[prefill or "ring"], implementation, sparq)
    return Attention(
        name=name,
        reduction=reduction,
        num_shards=num_shards,
        shares_prefixes=name in SHARING,
        prefill=read,
        decode=decode,
        sparq=sparq,
        is_replaceable=name in SHARING and implementation in (None, "mosaic_gpu") and reduction in (None, "fused"),
    )


_PREFILLS = {
    "ring": ring_attention,
    "ring_joint": functools.partial(ring_attention, rotation="joint"),
    "ring_two_way": functools.partial(ring_attention, rotation="two_way"),
    "ulysses": ulysses_attention,
}


def _sharded(
    name: str,
    sharding: LlamaSharding,
    reduction: str | None,
    prompt_attention: Callable,
    implementation: str | None,
    sparq: SparqOptions | None,
) -> tuple[Callable, Callable]:
    options = dict(axis_name=sharding.sequence, mesh=sharding.mesh, implementation=implementation)
    prefix_decode = _ring_without_prefixes if name == "ring" else hydragen_decode
    # A prefill has as many states as tokens: a gather would hold all of them once for each device.
    merge = functools.partial(_merge_prefixes, prefix_decode, reduction="allreduce", **options)

    def prefill(query, key, value, lengths, prefixes=(), **model_options):
        out, lse = prompt_attention(
            query,
            key,
            value,
            key_value_seq_lengths=lengths,
            block_size=BLOCK_SIZE,
            return_lse=True,
            **options,
            **model_options,
        )
        return merge(SoftmaxState(out, lse), query, key, prefixes, **model_options)

    decode_options = {"implementation": implementation} | ({} if name == "ring" else {"reduction": reduction})
    if sparq is not None:
        return prefill, functools.partial(_sparq_decode, **dataclasses.asdict(sparq), **decode_options)
    decode = ring_decode if name == "ring" else tree_decode
    return prefill, functools.partial(_decode, decode, prefix_decode, **decode_options)


def _single(implementation: str | None) -> tuple[Callable, Callable]:
    merge = functools.partial(_merge_prefixes, hydragen_decode, implementation=implementation)

    def prefill(query, key, value, lengths, prefixes=(), **model_options):
        options = AttentionOptions(
            key_value_seq_lengths=lengths, is_causal=True, implementation=implementation, **model_options
        )
        # Padding lies to the right, so position t is index t whatever the length.
        state = attend_shard(query, key, value, options, Shard(), query_shard=Shard())
        return merge(state, query, key, prefixes, **model_options)

    # All keys are on one device, where storage order is the natural one.
    def attend_to_all(query, key, value, *, axis_name, mesh, block_size, batch_axis_name=None, **options):
        return attend(query, key, value, **options).out

    def attend_after_prefixes(query, prefixes, key, value, *, axis_name, mesh, block_size, **options):
        return hydragen_decode(query, prefixes, key, value, **options)

    return prefill, functools.partial(_decode, attend_to_all, attend_after_prefixes, implementation=implementation)


def _sparq_decode(query, cache: KVCache, layer, prefixes=(), *, is_later: bool = False, **options) -> jax.Array:
    if prefixes:
        raise NotImplementedError(f"attention='sparq' {CANNOT_SHARE}")
    if any(scale is not None for scale in cache.scales().values()):
        raise NotImplementedError(f"cache: keeps {cache.dtype.name} with scales; {NO_SCALES}")
    options |= dict(layer=layer, num_new=query.shape[1], is_causal=query.shape[1] > 1)
    return cache.attend(query, attention=sparq_decode, **options)


def _decode(
    decode: Callable, prefix_decode: Callable, query, cache: KVCache, layer, prefixes=(), *, is_later: bool = False,
    **options,
) -> jax.Array:  # fmt: skip
    """Attends to one layer of a cache by `decode`, or, after prefixes, by `prefix_decode`."""
    num_new = query.shape[1]
    options |= dict(is_causal=num_new > 1)
    if prefixes:
        _check_no_window(options)
        return prefix_decode(query, prefixes, **cache.operands(layer, num_new=num_new), **options)
    # Layers that do not lie apart are copied before. Of a window any slot may hold the newest token.
    if is_later and decode is not ring_decode and isinstance(cache.arrays, LayerTuple) and not cache.rolls:
        options |= dict(reads_keys_early=True)
    return cache.attend(query, layer=layer, num_new=num_new, attention=decode, **options)


def _merge_prefixes(prefix_decode: Callable, state: SoftmaxState, query, key, prefixes, **options) -> jax.Array:
    """Merges the state over each sequence's own keys with that over the prefixes, which queries see whole.

    The prefixes stay in place, and every device gets all queries: those are the fewer where prefixes pay.
    """
    if not prefixes:
        return state.out
    _check_no_window(options)
    no_keys = jnp.zeros((key.shape[0], 0, *key.shape[2:]), key.dtype)
    before = SoftmaxState(*prefix_decode(query, prefixes, no_keys, no_keys, return_lse=True, **options))
    return merge_state(state, before).out


def _check_no_window(options) -> None:
    if "local_window_size" in options:
        raise NotImplementedError(f"prefixes: {NO_WINDOWED_PREFIXES}")


def _ring_without_prefixes(*_, **__):
    raise NotImplementedError(f"attention='ring' {CANNOT_SHARE}")
