"""The arrays of one layer of a KV cache, or of several stacked layers, and writes into them in place."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Num

from tree_attn.mesh import AxisName, axis_tuple
from tree_attn.placement import locate, storage_order


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["key", "value", "value_sum", "key_by_component", "key_scale", "value_scale"],
    meta_fields=["mesh", "axis_name", "block_size"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCache:
    """Keys and values of one layer, sharded along the sequence; with a leading axis `L`, of L layers.

    It counts no tokens: callers pass the lengths (see `tree_attn.cache.KVCache`). `layer` names one of stacked
    layers, a traced integer too, and is None for a single one.

    key, value: `[*L, B, S, K, H]`, S slots in storage order (`tree_attn.placement`)
    value_sum:  float32 `[*L, B, K, H]`, the sum of the values held, on every device; or None
    key_by_component: the keys again, `[*L, B, K, H, S]`, for readers of single components; or None
    key_scale, value_scale: float32 `[*L, K]`, factors of the stored numbers; or None, which is 1
    mesh, axis_name, block_size: the placement of the slots
    """

    key: Num[Array, "*L B S K H"]
    value: Num[Array, "*L B S K H"]
    value_sum: Float[Array, "*L B K H"] | None = None
    key_by_component: Num[Array, "*L B K H S"] | None = None
    key_scale: Float[Array, "*L K"] | None = None
    value_scale: Float[Array, "*L K"] | None = None
    mesh: Mesh
    axis_name: AxisName
    block_size: int

    @classmethod
    def create(
        cls,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        *,
        mesh: Mesh,
        axis_name: AxisName,
        block_size: int,
        keeps_value_sum: bool = False,
        keeps_key_by_component: bool = False,
        key_scale: Float[Array, "*L K"] | None = None,
        value_scale: Float[Array, "*L K"] | None = None,
    ) -> "LayerCache":
        """Returns zeros of `shape`, `[*L, B, S, K, H]`, each shard allocated on its own device."""
        *batch, num_slots, num_kv_heads, head_dim = shape
        axes, heads = axis_tuple(axis_name), (*batch, num_kv_heads, head_dim)
        zeros = lambda shape, dtype, *spec: jnp.zeros(shape, dtype, device=NamedSharding(mesh, P(*spec)))
        along_slots = [None] * len(batch)
        # Copies: a cache is donated, and its scales are other caches' too. (JAX 0.10's device_put aliases in any case.)
        copied = lambda scale: jnp.copy(scale) if isinstance(scale, jax.Array) else scale
        put = lambda scale: None if scale is None else jax.device_put(copied(scale), NamedSharding(mesh, P()))
        return cls(
            key=zeros(shape, dtype, *along_slots, axes),
            value=zeros(shape, dtype, *along_slots, axes),
            value_sum=zeros(heads, jnp.float32) if keeps_value_sum else None,
            key_by_component=(
                zeros((*heads, num_slots), dtype, *along_slots, None, None, axes) if keeps_key_by_component else None
            ),
            key_scale=put(key_scale),
            value_scale=put(value_scale),
            mesh=mesh,
            axis_name=axis_name,
            block_size=block_size,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all keys, `[*L, B, S, K, H]`."""
        return self.key.shape

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of keys and values as they are stored."""
        return self.key.dtype

    @property
    def capacity(self) -> int:
        """Tokens that each sequence has room for."""
        return self.shape[-3]

    @property
    def num_shards(self) -> int:
        """Shards that the sequence is cut into."""
        return int(np.prod([self.mesh.shape[axis] for axis in axis_tuple(self.axis_name)]))

    def scales(self, layer: int | Int[Array, ""] | None = None) -> dict[str, Float[Array, "*L K"] | None]:
        """Returns `key_scale` and `value_scale` of one layer, or of all."""
        return {name: _of(getattr(self, name), layer) for name in ("key_scale", "value_scale")}

    def write(self, key, value, lengths: Int[Array, " B"], layer: int | Int[Array, ""] | None = None) -> "LayerCache":
        """Writes T tokens `[B, T, K, H]` at positions `lengths .. lengths + T`; all or none of each sequence's.

        A sequence without room for all T stays as it is.
        """
        has_room = lengths + key.shape[1] <= self.capacity
        positions = lengths[:, None] + jnp.arange(key.shape[1], dtype=jnp.int32)[None, :]  # [B, T]
        positions = jnp.where(has_room[:, None], positions, self.capacity)

        def put(stored, new, positions, layer, is_by_component):
            num_slots = stored.shape[-1 if is_by_component else -3]
            shard, slot = locate(positions, self.num_shards, self.block_size)
            is_mine = (shard == jax.lax.axis_index(axis_tuple(self.axis_name))) & (positions < self.capacity)
            num_new = slot.shape[1]
            # Out of range, hence dropped; each elsewhere, since XLA writes up to five times as fast what it knows to
            # be apart and in order.
            slot = jnp.where(is_mine, slot, num_slots + jnp.arange(num_new, dtype=jnp.int32))
            sequence = jnp.arange(new.shape[0], dtype=jnp.int32)[:, None]
            if slot.size == 1:
                # One alone XLA would read, choose and put back, by two kernels: a second, which is dropped, avoids it.
                slot, sequence = jnp.concatenate([slot, slot + num_slots + 1]), jnp.zeros((2, 1), jnp.int32)
                new = jnp.broadcast_to(new, (2, *new.shape[1:]))
            where = (sequence, slice(None), slice(None), slot) if is_by_component else (sequence, slot)
            at = stored.at[where if layer is None else (layer, *where)]
            return at.set(new, mode="drop", unique_indices=True, indices_are_sorted=num_new == 1)

        return self._update(put, key, value, positions, layer, new_spec=P())._with_added(value, has_room, layer)

    def write_prefix(
        self, key, value, start: int | Int[Array, ""], layer: int | Int[Array, ""] | None = None
    ) -> "LayerCache":
        """Writes S0 tokens `[B, S0, K, H]`, in storage order and sharded on S0, from position `start` on.

        Both are multiples of shards x block_size. No data moves between devices; `value_sum` stays as it is.
        """
        slot = jnp.asarray(start, jnp.int32) // self.num_shards

        def put(stored, new, slot, layer, is_by_component):
            new = new.transpose(0, 2, 3, 1) if is_by_component else new
            where = (0, 0, 0, slot) if is_by_component else (0, slot, 0, 0)
            where, new = (where, new) if layer is None else ((layer, *where), new[None])
            return jax.lax.dynamic_update_slice(stored, new, where)

        return self._update(put, key, value, slot, layer, new_spec=P(None, axis_tuple(self.axis_name)))

    def with_sequence(self, sequence: Int[Array, ""], other: "LayerCache") -> "LayerCache":
        """Returns the arrays with one sequence of the batch replaced by the only one of `other`, a shorter one too."""
        stored, specs = self._sharded()
        if self.value_sum is not None:
            stored["value_sum"], specs["value_sum"] = self.value_sum, P()
        batch_axis = self.key.ndim - 4

        def put(stored, new, sequence):
            # A shard's slots ascend with position: its part of a shorter cache is the beginning of a longer one's.
            begin = lambda x: [sequence if i == batch_axis else 0 for i in range(x.ndim)]
            return {name: jax.lax.dynamic_update_slice(x, new[name], begin(x)) for name, x in stored.items()}

        new = {name: getattr(other, name) for name in stored}
        return dataclasses.replace(self, **self._mapped(put, (specs, specs, P()), specs)(stored, new, sequence))

    def with_summed_values(self, lengths: Int[Array, " B"]) -> "LayerCache":
        """Returns the arrays with `value_sum`, where it is kept, taken anew over the first `lengths` values."""
        if self.value_sum is None:
            return self
        positions = storage_order(self.capacity, self.num_shards, self.block_size)
        is_held = (positions[None, :] < lengths[:, None])[:, :, None, None]  # [B, S, 1, 1]
        is_held = is_held if self.value.ndim == 4 else is_held[None]
        total = jnp.where(is_held, _widened(self.value, self.value_scale), 0.0).sum(axis=-3)
        return dataclasses.replace(self, value_sum=total)

    def _with_added(self, value, has_room: Bool[Array, " B"], layer) -> "LayerCache":
        if self.value_sum is None:
            return self
        scale = self.scales(layer)["value_scale"]
        added = _widened(_as_stored(value, self.dtype, scale), scale).sum(axis=1)
        added = jnp.where(has_room[:, None, None], added, 0.0)
        where = slice(None) if layer is None else layer
        return dataclasses.replace(self, value_sum=self.value_sum.at[where].add(added))

    def _sharded(self) -> tuple[dict[str, Array], dict[str, P]]:
        """Returns the arrays that are sharded along the sequence, by name, and their specs."""
        by_slot, by_component = (P(*([None] * (self.key.ndim - k)), axis_tuple(self.axis_name)) for k in (3, 1))
        stored, specs = {"key": self.key, "value": self.value}, {"key": by_slot, "value": by_slot}
        if self.key_by_component is not None:
            stored["key_by_component"], specs["key_by_component"] = self.key_by_component, by_component
        return stored, specs

    def _update(self, put, key, value, positions, layer, *, new_spec: P) -> "LayerCache":
        (stored, specs), scales = self._sharded(), self.scales(layer)
        new = {
            "key": _as_stored(key, self.dtype, scales["key_scale"]),
            "value": _as_stored(value, self.dtype, scales["value_scale"]),
        }
        if self.key_by_component is not None:
            new["key_by_component"] = new["key"]
        put_each = lambda stored, new, positions, layer: {
            name: put(stored[name], new[name], positions, layer, name == "key_by_component") for name in stored
        }
        mapped = self._mapped(put_each, (specs, new_spec, P(), None if layer is None else P()), specs)
        layer = None if layer is None else jnp.asarray(layer, jnp.int32)
        return dataclasses.replace(self, **mapped(stored, new, positions, layer))

    def _mapped(self, body, in_specs, out_specs):
        axes = set(axis_tuple(self.axis_name))
        return jax.shard_map(
            body, mesh=self.mesh, axis_names=axes, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )


def _arrays(name: str) -> Any:
    """Returns a property of `LayerTuple`: a tuple of that array of every layer, or None where no layer has it."""

    def of_all(layers: "LayerTuple"):
        arrays = tuple(getattr(layer, name) for layer in layers.layers)
        return None if arrays[0] is None else arrays

    return property(of_all)


def _alike(name: str) -> Any:
    return property(lambda layers: getattr(layers.layers[0], name))


@partial(jax.tree_util.register_dataclass, data_fields=["layers"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class LayerTuple:
    """Layers that lie apart, named by Python integers; read and written as a `LayerCache` of several layers is.

    A kernel reads a layer where it lies. XLA would copy a layer out of a stacked array first.
    """

    layers: tuple[LayerCache, ...]

    key, value, value_sum = _arrays("key"), _arrays("value"), _arrays("value_sum")
    key_by_component, key_scale, value_scale = map(_arrays, ("key_by_component", "key_scale", "value_scale"))
    mesh, axis_name, block_size = map(_alike, ("mesh", "axis_name", "block_size"))
    dtype, capacity, num_shards = map(_alike, ("dtype", "capacity", "num_shards"))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that all keys would have in one array, `[L, B, S, K, H]`."""
        return len(self.layers), *self.layers[0].shape

    def scales(self, layer: int | None = None) -> dict[str, Float[Array, "*L K"] | None]:
        """Returns `key_scale` and `value_scale` of one layer, or stacked of all."""
        if layer is not None:
            return self.layers[layer].scales()
        scales = {"key_scale": self.key_scale, "value_scale": self.value_scale}
        return {name: None if scale is None else jnp.stack(scale) for name, scale in scales.items()}

    def write(self, key, value, lengths: Int[Array, " B"], layer: int) -> "LayerTuple":
        """Writes into one layer, see `LayerCache.write`."""
        return self._with(layer, self.layers[layer].write(key, value, lengths))

    def write_prefix(self, key, value, start: int | Int[Array, ""], layer: int) -> "LayerTuple":
        """Writes into one layer, see `LayerCache.write_prefix`."""
        return self._with(layer, self.layers[layer].write_prefix(key, value, start))

    def with_sequence(self, sequence: Int[Array, ""], other: "LayerTuple") -> "LayerTuple":
        """Replaces a sequence in every layer, see `LayerCache.with_sequence`."""
        pairs = zip(self.layers, other.layers, strict=True)
        return LayerTuple(tuple(layer.with_sequence(sequence, new) for layer, new in pairs))

    def with_summed_values(self, lengths: Int[Array, " B"]) -> "LayerTuple":
        """Sums the values of every layer, see `LayerCache.with_summed_values`."""
        return LayerTuple(tuple(layer.with_summed_values(lengths) for layer in self.layers))

    def _with(self, layer: int, new: LayerCache) -> "LayerTuple":
        return LayerTuple((*self.layers[:layer], new, *self.layers[layer + 1 :]))


def _of(scale, layer):
    return scale if scale is None or layer is None else scale[layer]


def _as_stored(x, dtype: DTypeLike, scale):
    """Returns `[B, T, K, H]` in the cache's dtype; an array of that dtype is taken as it is.

    float8 has no infinity: numbers beyond its largest would become NaN. int8's -128 is left out, so that a number and
    its negative are stored alike.
    """
    if x.dtype == dtype:
        return x
    x = x if scale is None else x.astype(jnp.float32) / scale[None, None, :, None]
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    largest = float((jnp.iinfo if is_integer else jnp.finfo)(dtype).max)
    x = jnp.clip(x, -largest, largest)
    return (jnp.round(x) if is_integer else x).astype(dtype)


def _widened(x, scale):
    """Returns the values that stored `[*L, B, S, K, H]` stand for, in float32."""
    x = x.astype(jnp.float32)
    return x if scale is None else x * scale[..., None, None, :, None]
