"""The arrays of one layer of a KV cache, or of several stacked layers, and writes into them in place."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Num

from tree_attn import cache_writes
from tree_attn.mesh import AxisName, axis_tuple, bound_axis_sizes
from tree_attn.sharded import is_local, num_held_shards, run_on_mesh


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["key", "value", "value_sum", "key_by_component", "key_scale", "value_scale"],
    meta_fields=["mesh", "axis_name", "batch_axis_name", "block_size", "rolling_capacity"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCache:
    """Keys and values of one layer, sharded along the sequence; with a leading axis `L`, of L layers.

    It counts no tokens: callers pass the lengths (see `tree_attn.cache.KVCache`). `layer` names one of stacked
    layers, a traced integer too, and is None for a single one. Inside a `shard_map` that binds the axes the arrays are
    this device's shards.

    key, value: `[*L, B, S, K, H]`, S slots in storage order (`tree_attn.placement`)
    value_sum:  float32 `[*L, B, K, H]`, the sum of the values held, on every device of the sequence; or None
    key_by_component: the keys again, `[*L, B, K, H, S]`, for readers of single components; or None
    key_scale, value_scale: float32 `[*L, K]`, factors of the stored numbers; or None, which is 1
    mesh, axis_name, block_size: the placement of the slots
    batch_axis_name: mesh axes that shard the batch; None: every device has all of it
    rolling_capacity: tokens that a sequence may have, where its slots are fewer: token p is then in the slot of token
                `p % num_slots`. None: a slot for each
    """

    key: Num[Array, "*L B S K H"]
    value: Num[Array, "*L B S K H"]
    value_sum: Float[Array, "*L B K H"] | None = None
    key_by_component: Num[Array, "*L B K H S"] | None = None
    key_scale: Float[Array, "*L K"] | None = None
    value_scale: Float[Array, "*L K"] | None = None
    mesh: Mesh
    axis_name: AxisName
    batch_axis_name: AxisName | None = None
    block_size: int
    rolling_capacity: int | None = None

    @classmethod
    def create(
        cls,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        *,
        mesh: Mesh,
        axis_name: AxisName,
        batch_axis_name: AxisName | None = None,
        block_size: int,
        rolling_capacity: int | None = None,
        keeps_value_sum: bool = False,
        keeps_key_by_component: bool = False,
        key_scale: Float[Array, "*L K"] | None = None,
        value_scale: Float[Array, "*L K"] | None = None,
    ) -> "LayerCache":
        """Returns zeros of `shape`, `[*L, B, S, K, H]`, each shard allocated on its own device."""
        *batch, num_slots, num_kv_heads, head_dim = shape
        heads = (*batch, num_kv_heads, head_dim)
        shapes = {"key": (shape, dtype), "value": (shape, dtype)}
        if keeps_value_sum:
            shapes["value_sum"] = heads, jnp.float32
        if keeps_key_by_component:
            shapes["key_by_component"] = (*heads, num_slots), dtype
        empty: Any = cls(
            **{name: jax.ShapeDtypeStruct(*of_array) for name, of_array in shapes.items()},
            mesh=mesh, axis_name=axis_name, batch_axis_name=batch_axis_name, block_size=block_size,
            rolling_capacity=rolling_capacity,
        )  # fmt: skip
        zeros = lambda x, spec: jnp.zeros(x.shape, x.dtype, device=NamedSharding(mesh, spec))
        # Copies: a cache is donated, and its scales are other caches' too. (JAX 0.10's device_put aliases in any case.)
        copied = lambda scale: jnp.copy(scale) if isinstance(scale, jax.Array) else scale
        put = lambda scale: None if scale is None else jax.device_put(copied(scale), NamedSharding(mesh, P()))
        arrays = jax.tree.map(zeros, empty, empty.specs())
        return dataclasses.replace(arrays, key_scale=put(key_scale), value_scale=put(value_scale))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all keys, `[*L, B, S, K, H]`; inside a `shard_map` of this device's."""
        return self.key.shape

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of keys and values as they are stored."""
        return self.key.dtype

    @property
    def capacity(self) -> int:
        """Tokens that each sequence has room for, over all shards."""
        return self.num_slots if self.rolling_capacity is None else self.rolling_capacity

    @property
    def num_slots(self) -> int:
        """Slots of each sequence, over all shards."""
        return self.shape[-3] * num_held_shards(self.axes)

    @property
    def rolls(self) -> bool:
        """True where the slots are fewer than the capacity, so that new tokens take the place of the oldest."""
        return self.rolling_capacity is not None

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes of the sequence."""
        return axis_tuple(self.axis_name)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes of the batch."""
        return () if self.batch_axis_name is None else axis_tuple(self.batch_axis_name)

    @property
    def num_shards(self) -> int:
        """Shards that the sequence is cut into."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    def specs(self) -> "LayerCache":
        """Returns the `PartitionSpec` of each array, in a tree of this form."""
        return self._specs(self.batch_axes)

    def scales(self, layer: int | Int[Array, ""] | None = None) -> dict[str, Float[Array, "*L K"] | None]:
        """Returns `key_scale` and `value_scale` of one layer, or of all."""
        return {name: _of(getattr(self, name), layer) for name in ("key_scale", "value_scale")}

    def write(self, key, value, lengths: Int[Array, " B"], layer: int | Int[Array, ""] | None = None) -> "LayerCache":
        """Writes T tokens `[B, T, K, H]` at positions `lengths .. lengths + T`; all or none of each sequence's.

        A sequence without room for all T stays as it is.
        """
        batch = P(self._unbound_batch_axes)
        operands, specs = (key, value, lengths, _index(layer)), (batch, batch, batch, P())
        return self._on_shards(cache_writes.write, operands, specs)

    def write_prefix(
        self,
        key,
        value,
        start: int | Int[Array, ""],
        layer: int | Int[Array, ""] | None = None,
        fits: Bool[Array, ""] | None = None,
        lengths: Int[Array, " B"] | None = None,
    ) -> "LayerCache":
        """Writes S0 tokens `[B, S0, K, H]`, in storage order and sharded on S0, from position `start` on.

        Both are multiples of shards x block_size. No data moves between devices; `value_sum` stays as it is. Where
        `fits` is given and False nothing is written. A cache that rolls keeps the newest of each sequence's first
        `lengths` tokens; `start` is 0.
        """
        batch = self._unbound_batch_axes
        new = P(batch, self.axes)
        operands = key, value, _index(start), fits, _index(layer), lengths if self.rolls else None
        return self._on_shards(cache_writes.write_prefix, operands, (new, new, P(), P(), P(), P(batch)))

    def with_sequence(self, sequence: Int[Array, ""], other: "LayerCache") -> "LayerCache":
        """Returns the arrays with one sequence of the batch replaced by the only one of `other`, a shorter one too."""
        specs = other._specs(other._unbound_batch_axes), P()
        return self._on_shards(cache_writes.replace_sequence, (other, sequence), specs)

    def with_summed_values(self, lengths: Int[Array, " B"], layer: int | Int[Array, ""] | None = None) -> "LayerCache":
        """Returns the arrays with `value_sum`, where it is kept, taken anew over the first `lengths` values."""
        if self.value_sum is None:
            return self
        specs = P(self._unbound_batch_axes), P()
        return self._on_shards(cache_writes.sum_values, (lengths, _index(layer)), specs)

    @property
    def _unbound_batch_axes(self) -> tuple[str, ...]:
        """The mesh axes of the batch, but none where a surrounding `shard_map` binds them: arrays are parts already."""
        return self.batch_axes if self.batch_axes and bound_axis_sizes(self.batch_axes) is None else ()

    def _specs(self, batch_axes: tuple[str, ...]) -> "LayerCache":
        before, batch = [None] * (self.key.ndim - 4), batch_axes or None
        by_slot = P(*before, batch, self.axes)
        specs: dict[str, Any] = {
            "key": by_slot,
            "value": by_slot,
            "value_sum": P(*before, batch),
            "key_by_component": P(*before, batch, None, None, self.axes),
            "key_scale": P(),
            "value_scale": P(),
        }
        by_name = {name: spec for name, spec in specs.items() if getattr(self, name) is not None}
        return dataclasses.replace(self, **by_name)

    def _on_shards(self, body: Callable[..., "LayerCache"], operands: tuple, specs: tuple) -> "LayerCache":
        """Runs `body(self, *operands)` on each device's part of the arrays, and returns the arrays."""
        if is_local(self.axes):
            return body(self, *operands)
        batch_axes = self._unbound_batch_axes
        of_arrays = self._specs(batch_axes)
        context = jax.sharding.get_abstract_mesh()
        return run_on_mesh(
            body, (self, *operands), (of_arrays, *specs), axes=(*self.axes, *batch_axes),
            mesh=context if context.manual_axes else self.mesh, out_specs=of_arrays,
        )  # fmt: skip


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
    num_slots, rolls = map(_alike, ("num_slots", "rolls"))
    axes, batch_axes, batch_axis_name = map(_alike, ("axes", "batch_axes", "batch_axis_name"))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that all keys would have in one array, `[L, B, S, K, H]`."""
        return len(self.layers), *self.layers[0].shape

    def specs(self) -> "LayerTuple":
        """Returns the `PartitionSpec` of each array, in a tree of this form."""
        return LayerTuple(tuple(layer.specs() for layer in self.layers))

    def scales(self, layer: int | None = None) -> dict[str, Float[Array, "*L K"] | None]:
        """Returns `key_scale` and `value_scale` of one layer, or stacked of all."""
        if layer is not None:
            return self.layers[layer].scales()
        scales = {"key_scale": self.key_scale, "value_scale": self.value_scale}
        return {name: None if scale is None else jnp.stack(scale) for name, scale in scales.items()}

    def write(self, key, value, lengths: Int[Array, " B"], layer: int) -> "LayerTuple":
        """Writes into one layer, see `LayerCache.write`."""
        return self._with(layer, self.layers[layer].write(key, value, lengths))

    def write_prefix(
        self,
        key,
        value,
        start: int | Int[Array, ""],
        layer: int,
        fits: Bool[Array, ""] | None = None,
        lengths: Int[Array, " B"] | None = None,
    ) -> "LayerTuple":
        """Writes into one layer, see `LayerCache.write_prefix`."""
        return self._with(layer, self.layers[layer].write_prefix(key, value, start, fits=fits, lengths=lengths))

    def with_sequence(self, sequence: Int[Array, ""], other: "LayerTuple") -> "LayerTuple":
        """Replaces a sequence in every layer, see `LayerCache.with_sequence`."""
        pairs = zip(self.layers, other.layers, strict=True)
        return LayerTuple(tuple(layer.with_sequence(sequence, new) for layer, new in pairs))

    def with_summed_values(self, lengths: Int[Array, " B"], layer: int | None = None) -> "LayerTuple":
        """Sums the values of one layer or of every layer, see `LayerCache.with_summed_values`."""
        if layer is not None:
            return self._with(layer, self.layers[layer].with_summed_values(lengths))
        return LayerTuple(tuple(layer.with_summed_values(lengths) for layer in self.layers))

    def _with(self, layer: int, new: LayerCache) -> "LayerTuple":
        return LayerTuple((*self.layers[:layer], new, *self.layers[layer + 1 :]))


def _of(scale, layer):
    return scale if scale is None or layer is None else scale[layer]


def _index(number: int | Int[Array, ""] | None) -> Int[Array, ""] | None:
    return None if number is None else jnp.asarray(number, jnp.int32)
