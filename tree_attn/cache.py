"""The KV cache: sharded along the sequence, block-cyclic so that growth stays balanced, updated in place."""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from tree_attn.arguments import AnyArray, check_flag, check_integer, clip_to_int32
from tree_attn.cache_checks import (
    check_appended,
    check_counted,
    check_create,
    check_new,
    check_one_new,
    check_prefix,
    check_sequence,
    check_window,
    context_mesh,
    needs_lost_tokens,
)
from tree_attn.cache_layer import LayerCache, LayerTuple
from tree_attn.cache_reads import CacheReads
from tree_attn.cache_writes import first_row
from tree_attn.mesh import AxisName, axis_tuple
from tree_attn.sharded import num_held_shards

Lengths = Int[AnyArray, " B"] | Sequence[int]


@partial(jax.tree_util.register_dataclass, data_fields=["arrays", "lengths", "overflowed"], meta_fields=[])
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVCache(CacheReads):
    """Keys and values of every sequence of a batch, sharded along the sequence over `axis_name`.

    Token p of a sequence lives on shard `(p // block_size) % n`, so that n shards differ by at most one block whatever
    the length. Functional: every method returns a new cache; donate the old one to the jitted step, and the update
    happens in place:

      >>> step = jax.jit(KVCache.append, donate_argnums=0)
      >>> cache.check_room(1)          # raises CacheFullError on the host, before anything runs
      >>> cache = step(cache, key, value)
      >>> out = cache.attend(query)

    Inside a `shard_map` that binds the axes, a cache holds this device's shards; `specs` are its `in_specs`:

      >>> in_specs, out_specs = (cache.specs(), P(), P(), P()), (cache.specs(), P())
      >>> jax.shard_map(step_of_mine, mesh=mesh, in_specs=in_specs, out_specs=out_specs)(cache, query, key, value)

    Attributes:
      arrays: the arrays of one layer or of several stacked ones (`LayerCache`), or of layers that lie apart
        (`LayerTuple`). `key`, `value`, `value_sum`, `key_by_component`, `key_scale` and `value_scale` are theirs: with
        a leading `L`, or tuples of one array per layer.
      lengths: int32 `[B]`, tokens held by each sequence.
      overflowed: bool `[B]`, whether a write inside jit, where no error can be raised, was refused for want of room, or
        lengths there need a window that is gone. `check_room` raises from then on.
    """

    arrays: LayerCache | LayerTuple
    lengths: Int[Array, " B"]
    overflowed: Bool[Array, " B"]

    @classmethod
    def create(
        cls,
        *,
        batch: int,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: DTypeLike,
        axis_name: AxisName,
        mesh: Mesh | None = None,
        batch_axis_name: AxisName | None = None,
        block_size: int = 1,
        num_layers: int | None = None,
        stacks_layers: bool = True,
        window: int | None = None,
        keeps_value_sum: bool = False,
        keeps_key_by_component: bool = False,
        key_scale: Float[Array, "*L K"] | None = None,
        value_scale: Float[Array, "*L K"] | None = None,
    ) -> "KVCache":
        """Returns an empty cache, each shard allocated on its own device.

        Args:
          capacity: tokens per sequence; rounded up to a multiple of shards x block_size.
          mesh: None: the mesh of `jax.set_mesh`, outside jit.
          batch_axis_name: mesh axes that shard the batch; None: each of their devices has all sequences.
          block_size: consecutive tokens per shard; 1 is the order `ring_attention` prefills in.
          dtype: of keys and values as they are stored. The narrow ones take what is written in any dtype of attention,
            divided by its scale: float8_e4m3fn rounded to 4 bits of significance and clipped to +-448, int8 rounded to
            the nearest integer (ties to even) and clipped to +-127. Attention reads them as they are.
          num_layers: None for one layer (`[B, S, K, H]`), else a leading layer axis.
          stacks_layers: False for tuples of layers instead, which are then named by Python integers.
          window: number of newest tokens that are kept and seen, a multiple of shards x block_size; None: all.
          keeps_value_sum, keeps_key_by_component: arrays that `tree_attn.sparq_decode` profits from; the second takes
            half as much memory again.
          key_scale, value_scale: float32 `[K]`, or `[L, K]` of a layered cache, positive: for narrow dtypes; int8 needs
            both. Half a scale is then the largest error of numbers that were not clipped.
        Raises:
          ValueError: a size is not a positive integer, `dtype` is none that attention takes, an axis is not of the
            mesh or named twice, there is no mesh, its axes do not divide the batch, or the scales do not fit.
          NotImplementedError: arrays for `sparq_decode` with a window.
        """
        for_sparq = dict(keeps_value_sum=keeps_value_sum, keeps_key_by_component=keeps_key_by_component)
        for name, flag in ({"stacks_layers": stacks_layers} | for_sparq).items():
            check_flag(name, flag)
        mesh = context_mesh() if mesh is None else mesh
        layers = {} if num_layers is None else {"num_layers": num_layers}
        sizes = layers | dict(batch=batch, capacity=capacity, num_kv_heads=num_kv_heads, head_dim=head_dim)
        scales = {"key_scale": key_scale, "value_scale": value_scale}
        check_create(sizes, dtype, mesh, axis_name, batch_axis_name, block_size, scales)
        unit = block_size * math.prod(mesh.shape[axis] for axis in axis_tuple(axis_name))
        check_window(window, unit, for_sparq)
        capacity = -(-capacity // unit) * unit
        num_slots = capacity if window is None else min(capacity, window)
        shape = batch, num_slots, num_kv_heads, head_dim
        create = partial(
            LayerCache.create, dtype=dtype, mesh=mesh, axis_name=axis_name, batch_axis_name=batch_axis_name,
            block_size=block_size, rolling_capacity=capacity if num_slots < capacity else None, **for_sparq,
        )  # fmt: skip
        if stacks_layers or num_layers is None:
            arrays = create((*layers.values(), *shape), **scales)
        else:
            of_layer = lambda i: {name: None if scale is None else scale[i] for name, scale in scales.items()}
            arrays = LayerTuple(tuple(create(shape, **of_layer(i)) for i in range(num_layers)))
        zeros = partial(jnp.zeros, (batch,), device=NamedSharding(mesh, P(arrays.batch_axes)))
        return cls(arrays=arrays, lengths=zeros(jnp.int32), overflowed=zeros(bool))

    def append(self, key: Float[AnyArray, "B T K H"], value: Float[AnyArray, "B T K H"]) -> "KVCache":
        """Writes T new tokens after each sequence's last and counts them: `write`, then `advance`.

        Raises:
          ValueError: the shapes or dtypes do not fit the cache, or it has layers: `write` each, then `advance` once.
          CacheFullError: outside jit, when a sequence lacks room; nothing is written then.
        """
        check_appended(key, value, self.arrays)
        if not isinstance(self.lengths, jax.core.Tracer):
            self.check_room(key.shape[1])
        return self.write(key, value).advance(key.shape[1])

    def write(self, key, value, layer: int | Array | None = None) -> "KVCache":
        """Writes T new tokens `[B, T, K, H]` at positions `lengths .. lengths + T`, without counting them.

        A sequence that lacks room for all T is left as it is, and marked `overflowed`. `layer` is of a layered cache.
        `attend` with `num_new=T` sees the tokens before they are counted. To write others in their place, call
        `with_lengths` first where the sum of the values is kept: it counts whatever was written.
        """
        check_new(key, value, self.arrays, layer)
        check_one_new("key", key.shape[1], self.arrays)
        arrays, (_, has_room) = self.arrays.write(key, value, self.lengths, layer), self._with_new(key.shape[1])
        return dataclasses.replace(self, arrays=arrays, overflowed=self.overflowed | ~has_room)

    def write_prefix(
        self,
        key,
        value,
        layer: int | Array | None = None,
        start: int | Int[Array, ""] = 0,
        lengths: Lengths | None = None,
    ) -> "KVCache":
        """Writes S0 tokens `[B, S0, K, H]` from position `start` on, the same for all sequences.

        They come in storage order and sharded on S0, as prefill makes them, whole or piece by piece; `start` is a
        multiple of shards x block_size, and `start + S0` at most the capacity. Inside jit, where a traced `start` is
        not, nothing is written, and every sequence is marked `overflowed`.

        No data moves between devices. Follow it by `with_lengths`, which also sums the values where that is kept. With
        `lengths` of at most S0 it counts so many tokens; `start` is 0 then. A cache that keeps a window needs them.

        Raises:
          CacheFullError: S0, or `start + S0` where `start` is known, is more than the capacity.
          ValueError: S0 or `start` does not divide into shards of whole blocks; shapes, dtypes or lengths do not fit.
        """
        check_new(key, value, self.arrays, layer)
        fits, num_new = check_prefix(key.shape[1], start, self.arrays, lengths)
        lengths = self.lengths if lengths is None else clip_to_int32(lengths, 0, num_new)
        arrays = self.arrays.write_prefix(key, value, start, layer, fits=fits, lengths=lengths)
        overflowed = self.overflowed if fits is None else self.overflowed | ~fits
        return dataclasses.replace(self, arrays=arrays, overflowed=overflowed, lengths=lengths)

    def with_sequence(self, sequence: int | Int[Array, ""], other: "KVCache") -> "KVCache":
        """Returns the cache with one sequence of the batch replaced by the only one of `other`.

        So a batch slot takes a new prompt while the others go on. No data moves between devices.

        Args:
          sequence: index in the batch; clipped to it inside jit. Where mesh axes shard the batch: in all of it.
          other: a cache of one sequence, of at most this one's capacity and otherwise like it, scales included. No
            mesh axis shards its batch.
        Raises:
          ValueError: `other` is not like that, or `sequence` is none of the batch.

        Example:
          >>> cache = cache.with_sequence(2, cache_of_the_prompt)
        """
        if not isinstance(other, KVCache):
            raise TypeError(f"other must be a KVCache, got {type(other).__name__}")
        batch_axes, num_rows = self.arrays.batch_axes, self.lengths.shape[0]
        batch = num_rows * num_held_shards(batch_axes)
        check_sequence(sequence, other.arrays, self.arrays, batch)
        sequence = jnp.clip(jnp.asarray(sequence, jnp.int32), 0, batch - 1)
        is_it = first_row(batch_axes, num_rows) + jnp.arange(num_rows, dtype=jnp.int32) == sequence
        return KVCache(
            arrays=self.arrays.with_sequence(sequence, other.arrays),
            lengths=jnp.where(is_it, other.lengths, self.lengths),
            overflowed=jnp.where(is_it, other.overflowed, self.overflowed),
        )

    def advance(self, num_tokens: int) -> "KVCache":
        """Counts `num_tokens` more tokens for each sequence with room for them; marks the others `overflowed`."""
        check_integer("num_tokens", num_tokens, minimum=0)
        lengths, has_room = self._with_new(num_tokens)
        return dataclasses.replace(self, lengths=lengths, overflowed=self.overflowed | ~has_room)

    def with_lengths(self, lengths: Lengths, *, layer: int | Array | None = None) -> "KVCache":
        """Returns the cache holding `lengths` tokens, int32 `[B]`: after `write_prefix`, or to drop the newest.

        Where the sum of the values is kept it is taken anew, from all of them. Inside jit lengths are clipped to the
        capacity, and sequences whose window is gone are marked `overflowed`.

        Args:
          layer: the only layer whose values are summed anew; None: all.
        Raises:
          ValueError: lengths that are no integers `[B]` in `[0, capacity]`, or whose window is gone; no such layer.
        """
        check_counted(lengths, self.lengths, self.arrays, layer)
        lengths = clip_to_int32(lengths, 0, self.capacity)
        overflowed = self.overflowed | needs_lost_tokens(lengths, self.lengths, self.arrays)
        arrays = self.arrays.with_summed_values(lengths, layer)
        return dataclasses.replace(self, arrays=arrays, lengths=lengths, overflowed=overflowed)
