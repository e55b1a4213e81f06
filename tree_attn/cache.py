"""The KV cache: sharded along the sequence, block-cyclic so that growth stays balanced, updated in place."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from tree_attn.arguments import (
    ATTENTION_DTYPES,
    NARROW_DTYPES,
    STORED_DTYPES,
    AnyArray,
    check_lengths,
    concrete,
    one_of,
)
from tree_attn.cache_layer import LayerCache, LayerTuple
from tree_attn.mesh import AxisName, axis_tuple, check_axes
from tree_attn.placement import check_block_size


class CacheFullError(ValueError):
    """More tokens than the cache has room for; nothing was overwritten."""


def _of_arrays(name: str) -> Any:
    return property(lambda cache: getattr(cache.arrays, name), doc=f"See `tree_attn.cache_layer.LayerCache.{name}`.")


@partial(jax.tree_util.register_dataclass, data_fields=["arrays", "lengths", "overflowed"], meta_fields=[])
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVCache:
    """Keys and values of every sequence of a batch, sharded along the sequence over `axis_name`.

    Token p of a sequence lives on shard `(p // block_size) % n`, so that n shards differ by at most one block whatever
    the length. Functional: every method returns a new cache; donate the old one to the jitted step, and the update
    happens in place:

      >>> step = jax.jit(KVCache.append, donate_argnums=0)
      >>> cache.check_room(1)          # raises CacheFullError on the host, before anything runs
      >>> cache = step(cache, key, value)

    arrays:     the arrays of one layer or of several stacked ones (`LayerCache`), or of layers that lie apart
                (`LayerTuple`). `key`, `value`, `value_sum`, `key_by_component`, `key_scale` and `value_scale` are
                theirs: with a leading `L`, or tuples of one array per layer.
    lengths:    int32 `[B]`, tokens held by each sequence
    overflowed: bool `[B]`, whether a write inside jit, where no error can be raised, was refused for want of room. It
                left the sequence as it was; `check_room` raises from then on.
    """

    arrays: LayerCache | LayerTuple
    lengths: Int[Array, " B"]
    overflowed: Bool[Array, " B"]

    key, value, shape, dtype, capacity = map(_of_arrays, ("key", "value", "shape", "dtype", "capacity"))
    value_sum, key_by_component = map(_of_arrays, ("value_sum", "key_by_component"))
    key_scale, value_scale = map(_of_arrays, ("key_scale", "value_scale"))
    mesh, axis_name, block_size, num_shards = map(_of_arrays, ("mesh", "axis_name", "block_size", "num_shards"))

    @classmethod
    def create(
        cls,
        *,
        batch: int,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: DTypeLike,
        mesh: Mesh,
        axis_name: AxisName,
        block_size: int = 1,
        num_layers: int | None = None,
        stacks_layers: bool = True,
        keeps_value_sum: bool = False,
        keeps_key_by_component: bool = False,
        key_scale: Float[Array, "*L K"] | None = None,
        value_scale: Float[Array, "*L K"] | None = None,
    ) -> "KVCache":
        """Returns an empty cache, each shard allocated on its own device.

        Args:
          capacity: tokens per sequence; rounded up to a multiple of shards x block_size.
          block_size: consecutive tokens per shard; 1 is the order `ring_attention` prefills in.
          dtype: of keys and values as they are stored. The narrow ones take what is written in any dtype of attention,
            divided by its scale: float8_e4m3fn rounded to 4 bits of significance and clipped to +-448, int8 rounded to
            the nearest integer (ties to even) and clipped to +-127. Attention reads them as they are.
          num_layers: None for one layer (`[B, S, K, H]`), else a leading layer axis.
          stacks_layers: False for tuples of layers instead, which are then named by Python integers.
          keeps_value_sum, keeps_key_by_component: arrays that `tree_attn.sparq_decode` profits from; the second takes
            half as much memory again.
          key_scale, value_scale: float32 `[K]`, or `[L, K]` of a layered cache, positive: for narrow dtypes; int8 needs
            both. Half a scale is then the largest error of numbers that were not clipped.
        Raises:
          ValueError: a size is not a positive integer, `dtype` is none that attention takes, `axis_name` is not of the
            mesh, or the scales do not fit.
        """
        layers = {} if num_layers is None else {"num_layers": num_layers}
        sizes = layers | dict(batch=batch, capacity=capacity, num_kv_heads=num_kv_heads, head_dim=head_dim)
        scales = {"key_scale": key_scale, "value_scale": value_scale}
        _check_create(sizes, dtype, mesh, axis_name, block_size, scales)
        unit = block_size * int(np.prod([mesh.shape[axis] for axis in axis_tuple(axis_name)]))
        shape = batch, -(-capacity // unit) * unit, num_kv_heads, head_dim
        create = partial(
            LayerCache.create, dtype=dtype, mesh=mesh, axis_name=axis_name, block_size=block_size,
            keeps_value_sum=keeps_value_sum, keeps_key_by_component=keeps_key_by_component,
        )  # fmt: skip
        if stacks_layers or num_layers is None:
            arrays = create((*layers.values(), *shape), **scales)
        else:
            of_layer = lambda i: {name: None if scale is None else scale[i] for name, scale in scales.items()}
            arrays = LayerTuple(tuple(create(shape, **of_layer(i)) for i in range(num_layers)))
        zeros = partial(jnp.zeros, (batch,), device=NamedSharding(mesh, P()))
        return cls(arrays=arrays, lengths=zeros(jnp.int32), overflowed=zeros(bool))

    def scales(self, layer: int | Array | None = None) -> dict[str, Float[Array, "*L K"] | None]:
        """Returns the `key_scale` and `value_scale` that attention needs with these keys and values.

        Example:
          >>> out = tree_decode(query, cache.key, cache.value, block_size=1, **where, **cache.scales())
        """
        return self.arrays.scales(layer)

    def value_mean(self, lengths: Int[Array, " B"], layer: int | Array | None = None) -> Float[Array, "B K H"]:
        """Returns the mean of each sequence's values, float32 `[B, K, H]`; 0 of none. It reads no values.

        Args:
          lengths: int32 `[B]`, how many there are: between `write` and `advance` more than `self.lengths`.
          layer: of a layered cache.
        Raises:
          ValueError: the cache was created without `keeps_value_sum`.
        """
        if self.value_sum is None:
            raise ValueError("value_sum is not kept: create the cache with keeps_value_sum=True")
        total = self.value_sum if layer is None else self.value_sum[layer]
        return total / jnp.maximum(lengths, 1).astype(jnp.float32)[:, None, None]

    def check_room(self, num_tokens: int) -> None:
        """Raises CacheFullError unless every sequence has room for `num_tokens` more (waits for pending steps).

        It names the first sequence without room, its length and the capacity. Call it outside jit.
        """
        lengths, overflowed = np.asarray(self.lengths), np.asarray(self.overflowed)
        for b in np.flatnonzero(overflowed | (lengths + num_tokens > self.capacity)):
            was = " (an earlier write was refused already)" if overflowed[b] else ""
            raise CacheFullError(
                f"cache is full: sequence {b} holds {lengths[b]} of {self.capacity} tokens, no room for {num_tokens} "
                f"more{was}; create it with a larger capacity"
            )

    def append(self, key: Float[Array, "B T K H"], value: Float[Array, "B T K H"]) -> "KVCache":
        """Writes T new tokens after each sequence's last and counts them: `write`, then `advance`.

        Raises:
          ValueError: the shapes or dtypes do not fit the cache.
          CacheFullError: outside jit, when a sequence lacks room; nothing is written then.
        """
        _check_new(key, value, self, layer=None)
        if not isinstance(self.lengths, jax.core.Tracer):
            self.check_room(key.shape[1])
        return self.write(key, value).advance(key.shape[1])

    def write(self, key, value, layer: int | Array | None = None) -> "KVCache":
        """Writes T new tokens `[B, T, K, H]` at positions `lengths .. lengths + T`, without counting them.

        A sequence that lacks room for all T is left as it is. `layer` names the layer of a layered cache.
        """
        _check_new(key, value, self, layer)
        return dataclasses.replace(self, arrays=self.arrays.write(key, value, self.lengths, layer))

    def write_prefix(self, key, value, layer: int | Array | None = None, start: int | Int[Array, ""] = 0) -> "KVCache":
        """Writes S0 tokens `[B, S0, K, H]` from position `start` on, the same for all sequences.

        They come in storage order and sharded on S0, as prefill makes them, whole or piece by piece; `start` is a
        multiple of shards x block_size, and `start + S0` at most the capacity.

        No data moves between devices. Follow it by `with_lengths`, which also sums the values where that is kept.

        Raises:
          CacheFullError: S0, or `start + S0` where `start` is a Python integer, is more than the capacity.
          ValueError: S0 or `start` does not divide into shards of whole blocks; shapes or dtypes that do not fit.
        """
        _check_new(key, value, self, layer)
        _check_prefix(key.shape[1], start, self)
        return dataclasses.replace(self, arrays=self.arrays.write_prefix(key, value, start, layer))

    def with_sequence(self, sequence: int | Int[Array, ""], other: "KVCache") -> "KVCache":
        """Returns the cache with one sequence of the batch replaced by the only one of `other`.

        So a place in the batch takes a new prompt while the rest goes on. No data moves between devices.

        Args:
          sequence: index in the batch; clipped to it inside jit.
          other: a cache of one sequence, of at most this one's capacity and otherwise like it, scales included.
        Raises:
          ValueError: `other` is not like that, or `sequence` is none of the batch.

        Example:
          >>> cache = cache.with_sequence(2, cache_of_the_prompt)
        """
        _check_sequence(sequence, other, self)
        sequence = jnp.asarray(sequence, jnp.int32)
        replaced = lambda x, new: jax.lax.dynamic_update_slice(x, new, (sequence,))
        return KVCache(
            arrays=self.arrays.with_sequence(sequence, other.arrays),
            lengths=replaced(self.lengths, other.lengths),
            overflowed=replaced(self.overflowed, other.overflowed),
        )

    def advance(self, num_tokens: int) -> "KVCache":
        """Counts `num_tokens` more tokens for each sequence with room for them; marks the others `overflowed`."""
        has_room = self.lengths + num_tokens <= self.capacity
        lengths = jnp.where(has_room, self.lengths + num_tokens, self.lengths)
        return dataclasses.replace(self, lengths=lengths, overflowed=self.overflowed | ~has_room)

    def with_lengths(self, lengths: Int[AnyArray, " B"] | Sequence[int]) -> "KVCache":
        """Returns the cache holding `lengths` tokens, int32 `[B]`: after `write_prefix`, or to drop the newest.

        Where the sum of the values is kept it is taken anew, from all of them.
        """
        check_lengths("lengths", lengths, *self.lengths.shape, self.capacity)
        lengths = jnp.asarray(lengths, jnp.int32)
        return dataclasses.replace(self, arrays=self.arrays.with_summed_values(lengths), lengths=lengths)


def _check_create(sizes: dict[str, int], dtype, mesh, axis_name, block_size: int, scales: dict) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int | np.integer) or size < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {size!r}")
    if block_size is None:
        raise ValueError("block_size must be an integer of at least 1, got None: contiguous caches do not grow evenly")
    check_block_size(block_size)
    check_axes(axis_tuple(axis_name), mesh)
    one_of("dtype", jnp.dtype(dtype).name, STORED_DTYPES)
    layers = (sizes["num_layers"],) if "num_layers" in sizes else ()
    for name, scale in scales.items():
        _check_scale(name, scale, jnp.dtype(dtype).name, (*layers, sizes["num_kv_heads"]))


def _check_prefix(num_new: int, start, cache: KVCache) -> None:
    unit = cache.num_shards * cache.block_size
    end = num_new + (start if isinstance(start, int | np.integer) else 0)
    if end > cache.capacity:
        raise CacheFullError(f"cache is full: a prefix of {end} tokens does not fit a capacity of {cache.capacity}")
    if num_new % unit:
        raise ValueError(f"key must hold a multiple of shards * block_size = {unit} tokens, got {num_new}")
    if end % unit:
        raise ValueError(f"start must be a multiple of shards * block_size = {unit}, got {start}")


def _check_sequence(sequence, other: KVCache, cache: KVCache) -> None:
    like = lambda cache: (jax.tree.structure(cache), cache.dtype, cache.shape[:-4], cache.shape[-2:])
    if like(other) != like(cache) or other.lengths.shape != (1,) or other.capacity > cache.capacity:
        raise ValueError(
            f"other must be like this cache, of one sequence and at most {cache.capacity} tokens; got key "
            f"{other.dtype}{other.shape} beside {cache.dtype}{cache.shape}"
        )
    if isinstance(sequence, int | np.integer) and not 0 <= sequence < len(cache.lengths):
        raise ValueError(f"sequence must lie in [0, {len(cache.lengths)}), got {sequence}")


def _check_new(key, value, cache: KVCache, layer) -> None:
    *layers, batch, _, num_kv_heads, head_dim = cache.shape
    if bool(layers) != (layer is not None):
        raise ValueError(f"layer must be given for a layered cache, and only then: cache {cache.shape}, {layer=}")
    if isinstance(cache.arrays, LayerTuple) and not isinstance(layer, int | np.integer):
        raise ValueError(f"layer must be a Python integer for a cache that does not stack layers, got {layer!r}")
    if isinstance(layer, int | np.integer) and not 0 <= layer < layers[0]:
        raise ValueError(f"layer must lie in [0, {layers[0]}), got {layer}")
    for name, new in (("key", key), ("value", value)):
        shape = jnp.shape(new)
        if len(shape) != 4 or (shape[0], *shape[2:]) != (batch, num_kv_heads, head_dim):
            raise ValueError(f"{name} must have shape [B={batch}, T, K={num_kv_heads}, H={head_dim}], got {shape}")
        narrows = cache.dtype.name in NARROW_DTYPES and new.dtype.name in ATTENTION_DTYPES
        if new.dtype != cache.dtype and not narrows:
            raise ValueError(f"{name} must have the cache's dtype {cache.dtype}, got {new.dtype}")
    if value.shape != key.shape:
        raise ValueError(f"value must hold as many tokens as key, T = {key.shape[1]}, got {value.shape[1]}")


def _check_scale(name: str, scale, dtype: str, shape: tuple[int, ...]) -> None:
    if scale is None:
        if dtype == "int8":
            raise ValueError(f"{name} must be given for dtype='int8', float32 of shape {shape}, got None")
        return
    if dtype not in NARROW_DTYPES:
        raise ValueError(f"{name} must be None for dtype={dtype!r}: only {', '.join(NARROW_DTYPES)} have scales")
    if jnp.shape(scale) != shape or scale.dtype != jnp.float32:
        raise ValueError(f"{name} must be float32 of shape {shape}, got {scale.dtype} of shape {jnp.shape(scale)}")
    values = concrete(scale)
    if values is not None and not (np.isfinite(values) & (values > 0)).all():
        raise ValueError(f"{name} must be positive and finite, got {values.tolist()}")
