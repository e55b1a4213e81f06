"""The caches of layers of two kinds: those that see all tokens keep all, those with a window keep their window."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from tree_attn.cache import KVCache
from tree_attn.cache_layer import LayerCache, LayerTuple
from tree_attn.cache_writes import slots_of_new
from tree_attn.mesh import bound_axis_sizes
from tree_attn.models.llama.config import LlamaConfig
from tree_attn.models.llama.layer_kinds import global_mask
from tree_attn.sharded import local_shard


@partial(jax.tree_util.register_dataclass, data_fields=["whole", "windowed"], meta_fields=["is_global"])
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCaches:
    """The cache of a model with layers of two kinds, written and counted as a `KVCache` of all of them is.

    Attributes:
      whole: of the layers without a window, in their order.
      windowed: of the others, in theirs.
      is_global: for each layer of the model, whether it is one of `whole` (static).
    """

    whole: KVCache
    windowed: KVCache
    is_global: tuple[bool, ...]

    @classmethod
    def create(
        cls,
        config: LlamaConfig,
        window: int,
        *,
        key_scale: jax.Array | None = None,
        value_scale: jax.Array | None = None,
        **options: Any,
    ) -> Self:
        """Returns empty caches; scales are those of all layers, and options others of `KVCache.create`."""
        scales = {"key_scale": key_scale, "value_scale": value_scale}
        is_global = tuple(global_mask(config).tolist())
        whole, windowed = (
            KVCache.create(
                num_layers=len(layers),
                window=size,
                **{name: None if scale is None else scale[layers] for name, scale in scales.items()},
                **options,
            )
            for layers, size in zip(_layers_of(is_global), (None, window), strict=True)
        )
        return cls(whole=whole, windowed=windowed, is_global=is_global)

    @property
    def capacity(self) -> int:
        """Tokens that each sequence has room for."""
        return self.whole.capacity

    @property
    def lengths(self) -> jax.Array:
        """Tokens of each sequence, int32 `[B]`."""
        return self.whole.lengths

    def specs(self) -> Self:
        """Returns the `PartitionSpec` of each array, as caches of them."""
        return self._all(lambda cache: cache.specs())

    def of_kind(self, layer: jax.Array | int, is_global: bool) -> tuple[KVCache, jax.Array | int]:
        """Returns the cache of layers of a kind, and the index of `layer`, which is of that kind, in it."""
        return self.whole if is_global else self.windowed, self._index(layer)

    def write(self, key: jax.Array, value: jax.Array, layer: jax.Array | int) -> Self:
        """Writes a layer's new tokens, see `KVCache.write`."""
        return self._changed(layer, lambda cache, index: cache.write(key, value, layer=index))

    def write_prefix(
        self, key: jax.Array, value: jax.Array, layer: jax.Array | int, lengths: jax.Array | Sequence[int]
    ) -> Self:
        """Writes a layer's keys and values of prompts, see `KVCache.write_prefix`."""
        return self._changed(layer, lambda cache, index: cache.write_prefix(key, value, index, lengths=lengths))

    def advance(self, num_tokens: int) -> Self:
        """Counts new tokens, see `KVCache.advance`."""
        return self._all(lambda cache: cache.advance(num_tokens))

    def with_lengths(self, lengths: jax.Array | Sequence[int]) -> Self:
        """Returns the caches holding `lengths` tokens, see `KVCache.with_lengths`."""
        return self._all(lambda cache: cache.with_lengths(lengths))

    def with_sequence(self, sequence: jax.Array | int, other: Self) -> Self:
        """Returns the caches with one sequence replaced by that of `other`, see `KVCache.with_sequence`."""
        return dataclasses.replace(
            self,
            whole=self.whole.with_sequence(sequence, other.whole),
            windowed=self.windowed.with_sequence(sequence, other.windowed),
        )

    def scales(self) -> dict[str, jax.Array | None]:
        """Returns the `key_scale` and `value_scale` of all layers."""
        of_kinds = zip(self.whole.scales().items(), self.windowed.scales().values(), strict=True)
        order = np.argsort(np.concatenate(_layers_of(self.is_global)))
        return {name: None if x is None else jnp.concatenate([x, y])[order] for (name, x), y in of_kinds}

    def _index(self, layer: jax.Array | int) -> jax.Array | int:
        """Returns the index of a layer among those of its kind."""
        index = np.zeros(len(self.is_global), np.int32)
        for layers in _layers_of(self.is_global):
            index[layers] = np.arange(len(layers))
        return int(index[layer]) if isinstance(layer, int) else jnp.asarray(index)[layer]

    def _changed(self, layer: jax.Array | int, change: Callable[[KVCache, jax.Array | int], KVCache]) -> Self:
        """Changes the cache of one layer; in a scan over layers the layer is traced, and so is the choice."""
        index = self._index(layer)
        change_whole = lambda: dataclasses.replace(self, whole=change(self.whole, index))
        change_windowed = lambda: dataclasses.replace(self, windowed=change(self.windowed, index))
        if isinstance(layer, int):
            return change_whole() if self.is_global[layer] else change_windowed()
        return jax.lax.cond(jnp.asarray(self.is_global)[layer], change_whole, change_windowed)

    def _all(self, change: Callable[[KVCache], KVCache]) -> Self:
        return dataclasses.replace(self, whole=change(self.whole), windowed=change(self.windowed))


AnyCache = KVCache | LayerCaches


def unwritable(cache: AnyCache) -> str | None:
    """Returns why `written_by` cannot write to a cache, or None."""
    if not isinstance(cache, KVCache) or not isinstance(cache.arrays, LayerTuple):
        return "a kernel writes to caches of layers that lie apart and are of one kind"
    one = cache.arrays.layers[0]
    if cache.rolls or any(x is not None for x in (one.key_scale, one.value_sum, one.key_by_component)):
        return "a kernel writes keys and values alone, of all tokens and without scales"
    return None


def written_by(write: Callable, cache: KVCache, layer: int, num_new: int) -> tuple[Any, KVCache]:
    """Has T new tokens of a layer written by a kernel that makes them, as `KVCache.write` would, on one device.

    Args:
      write: `(key, value, slots) -> (result, key, value)`, the layer's arrays `[B, S, K, H]` before and after; slots
        are int32 `[B, T]`, S where a token has none.
      cache: none that is `unwritable`.
      layer: its number.
      num_new: T.

    Returns:
      The result, and the cache.
    """
    arrays = cache.arrays.layers[layer]
    result, key, value = write(arrays.key, arrays.value, slots_or_beyond(arrays, cache.lengths, num_new))
    return result, with_layer(cache, layer, key, value)


def slots_or_beyond(arrays: LayerCache, lengths: jax.Array, num_new: int) -> jax.Array:
    """Returns the slots of T new tokens in this device's part of a layer, int32 `[B, T]`; S where a token has none."""
    axes = arrays.axes if bound_axis_sizes(arrays.axes) is not None else ()
    slots, is_there = slots_of_new(arrays, lengths, num_new, local_shard(axes, arrays.block_size))
    return jnp.where(is_there, slots, arrays.key.shape[-3])


def with_layer(cache: KVCache, layer: int, key: jax.Array, value: jax.Array) -> KVCache:
    """Returns a cache, of layers that lie apart, with other keys and values of a layer."""
    layers = list(cache.arrays.layers)
    layers[layer] = dataclasses.replace(layers[layer], key=key, value=value)
    return dataclasses.replace(cache, arrays=LayerTuple(tuple(layers)))


def of_kind(cache: AnyCache, layer: jax.Array | int, is_global: bool) -> tuple[KVCache, jax.Array | int]:
    """Returns the cache that has a layer of this kind, and the layer's index in it."""
    return (cache, layer) if isinstance(cache, KVCache) else cache.of_kind(layer, is_global)


def _layers_of(is_global: tuple[bool, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the layers without a window, and those with one."""
    return np.flatnonzero(is_global), np.flatnonzero(np.logical_not(is_global))
