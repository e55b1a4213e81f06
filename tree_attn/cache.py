"""The KV cache: sharded along the sequence, block-cyclic so that growth stays balanced, updated in place."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from tree_attn.arguments import AnyArray, check_lengths
from tree_attn.cache_checks import CacheFullError, check_create, check_new, check_prefix, check_sequence
from tree_attn.cache_layer import LayerCache, LayerTuple
from tree_attn.mesh import AxisName, axis_tuple

T = TypeVar("T")
Arrays = Array | tuple[Array, ...]  # in one array, or one array per layer


class _OfArrays(Generic[T]):
    """An attribute of `KVCache` that is its arrays' attribute of the same name."""

    def __set_name__(self, cache_type, name: str) -> None:
        self._name = name

    def __get__(self, cache, cache_type=None) -> T:
        return getattr(cache.arrays, self._name) if cache is not None else self


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

    key, value = _OfArrays[Arrays](), _OfArrays[Arrays]()
    value_sum, key_by_component = _OfArrays[Arrays | None](), _OfArrays[Arrays | None]()
    key_scale, value_scale = _OfArrays[Arrays | None](), _OfArrays[Arrays | None]()
    shape, dtype = _OfArrays[tuple[int, ...]](), _OfArrays[jnp.dtype]()
    capacity, num_shards, block_size = _OfArrays[int](), _OfArrays[int](), _OfArrays[int]()
    mesh, axis_name = _OfArrays[Mesh](), _OfArrays[AxisName]()

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
        check_create(sizes, dtype, mesh, axis_name, block_size, scales)
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
          >>> out = tree_decode(query, cache.key, cache.value, axis_name="seq", block_size=1, **cache.scales())
        """
        return self.arrays.scales(layer)

    def value_mean(self, lengths: Int[Array, " B"], layer: int | Array | None = None) -> Float[Array, "B K H"]:
        """Returns the mean of each sequence's values, float32 `[B, K, H]`; 0 where it has none. It reads the sums only.

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
        check_new(key, value, self.arrays, layer=None)
        if not isinstance(self.lengths, jax.core.Tracer):
            self.check_room(key.shape[1])
        return self.write(key, value).advance(key.shape[1])

    def write(self, key, value, layer: int | Array | None = None) -> "KVCache":
        """Writes T new tokens `[B, T, K, H]` at positions `lengths .. lengths + T`, without counting them.

        A sequence that lacks room for all T is left as it is. `layer` names the layer of a layered cache.
        """
        check_new(key, value, self.arrays, layer)
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
        check_new(key, value, self.arrays, layer)
        check_prefix(key.shape[1], start, self.arrays)
        return dataclasses.replace(self, arrays=self.arrays.write_prefix(key, value, start, layer))

    def with_sequence(self, sequence: int | Int[Array, ""], other: "KVCache") -> "KVCache":
        """Returns the cache with one sequence of the batch replaced by the only one of `other`.

        So a batch slot takes a new prompt while the others go on. No data moves between devices.

        Args:
          sequence: index in the batch; clipped to it inside jit.
          other: a cache of one sequence, of at most this one's capacity and otherwise like it, scales included.
        Raises:
          ValueError: `other` is not like that, or `sequence` is none of the batch.

        Example:
          >>> cache = cache.with_sequence(2, cache_of_the_prompt)
        """
        check_sequence(sequence, other.arrays, self.arrays)
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
