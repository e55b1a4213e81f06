"""The KV cache: sharded along the sequence, block-cyclic so that growth stays balanced, updated in place."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from tree_attn.arguments import (
    ATTENTION_DTYPES,
    NARROW_DTYPES,
    STORED_DTYPES,
    check_lengths,
    concrete,
    one_of,
)
from tree_attn.mesh import AxisName, axis_tuple, check_axes
from tree_attn.placement import check_block_size, storage_order

_PER_LAYER = ("key", "value", "value_sum", "key_by_component", "key_scale", "value_scale")


class CacheFullError(ValueError):
    """More tokens than the cache has room for; nothing was overwritten."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["key", "value", "lengths", "overflowed", "value_sum", "key_by_component", "key_scale", "value_scale"],
    meta_fields=["mesh", "axis_name", "block_size"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVCache:
    """Keys and values of every sequence of a batch, sharded along the sequence over `axis_name`.

    Token p of a sequence lives on shard `(p // block_size) % n`, so that n shards differ by at most one block whatever
    the length. Functional: every method returns a new cache; donate the old one to the jitted step, and the update
    happens in place:

      >>> step = jax.jit(KVCache.append, donate_argnums=0)
      >>> cache.check_room(1)          # raises CacheFullError on the host, before anything runs
      >>> cache = step(cache, key, value)

    key, value: `[B, S, K, H]`, or `[L, B, S, K, H]` for L layers; S slots in storage order (`tree_attn.placement`).
                With `create(stacks_layers=False)` they, and what else has an `L` below, are tuples of one array per
                layer: a kernel then reads a layer where it lies, and of one array XLA would copy it out first
    lengths:    int32 `[B]`, tokens held by each sequence
    overflowed: bool `[B]`, whether a write inside jit, where no error can be raised, was refused for want of room. It
                left the sequence as it was; `check_room` raises from then on.
    key_scale, value_scale: float32 `[K]` or `[L, K]`, what the numbers stored are multiplied by: attention has to be
                given what `scales` returns; or None, which is 1
    value_sum:  float32 `[B, K, H]` or `[L, B, K, H]`, the sum of the values held, on every device; or None
    key_by_component: key once more, as `[B, K, H, S]` or `[L, B, K, H, S]`, for what reads single components; or None
    """

    key: Float[Array, "*L B S K H"] | tuple[Float[Array, "B S K H"], ...]
    value: Float[Array, "*L B S K H"] | tuple[Float[Array, "B S K H"], ...]
    lengths: Int[Array, " B"]
    overflowed: Bool[Array, " B"]
    mesh: Mesh
    axis_name: AxisName
    block_size: int
    value_sum: Float[Array, "*L B K H"] | None = None
    key_by_component: Float[Array, "*L B K H S"] | None = None
    key_scale: Float[Array, "*L K"] | None = None
    value_scale: Float[Array, "*L K"] | None = None

    @classmethod
    def create(
        cls,
        *,
        batch: int,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: jnp.dtype,
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
          dtype: of keys and values as they are kept. The narrow ones take what is written in any dtype of attention,
            divided by its scale: float8_e4m3fn rounded to 4 bits of significance and clipped to +-448, int8 rounded to
            the nearest integer (ties to even) and clipped to +-127. Attention reads them as they are.
          num_layers: None for one layer (`[B, S, K, H]`), else a leading layer axis.
          stacks_layers: False for tuples of layers instead, which are then named by Python integers.
          keeps_value_sum, keeps_key_by_component: what `tree_attn.sparq_decode` profits from; the second takes half as
            much memory again.
          key_scale, value_scale: float32 `[K]`, or `[L, K]` of a layered cache, positive: for narrow dtypes; int8 needs
            both. Half a scale is then the largest error of what was not clipped.
        Raises:
          ValueError: a size is not a positive integer, `dtype` is none that attention takes, `axis_name` is not of the
            mesh, or the scales do not fit.
        """
        sizes = dict(batch=batch, capacity=capacity, num_kv_heads=num_kv_heads, head_dim=head_dim)
        sizes |= {} if num_layers is None else {"num_layers": num_layers}
        for name, size in sizes.items():
            if not isinstance(size, int | np.integer) or size < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {size!r}")
        if block_size is None:
            raise ValueError(
                "block_size must be an integer of at least 1, got None: contiguous caches do not grow evenly"
            )
        check_block_size(block_size)
        axes = axis_tuple(axis_name)
        check_axes(axes, mesh)
        one_of("dtype", jnp.dtype(dtype).name, STORED_DTYPES)
        unit = block_size * int(np.prod([mesh.shape[axis] for axis in axes]))
        num_slots = -(-capacity // unit) * unit
        layers = () if num_layers is None else (num_layers,)
        scales = {"key_scale": key_scale, "value_scale": value_scale}
        for name, scale in scales.items():
            _check_scale(name, scale, jnp.dtype(dtype).name, (*layers, num_kv_heads))
        whole = NamedSharding(mesh, P())
        # Copies: a cache is donated, and its scales are other caches' too. (JAX 0.10's device_put aliases in any case.)
        own = lambda scale: jax.device_put(jnp.copy(scale) if isinstance(scale, jax.Array) else scale, whole)

        def arrays(layers: tuple[int, ...], scales) -> dict[str, Array | None]:
            sharding = NamedSharding(mesh, P(*([None] * (len(layers) + 1)), axes))
            by_component = NamedSharding(mesh, P(*([None] * (len(layers) + 3)), axes))
            zeros = partial(jnp.zeros, (*layers, batch, num_slots, num_kv_heads, head_dim), dtype, device=sharding)
            heads = (*layers, batch, num_kv_heads, head_dim)
            return {
                "key": zeros(),
                "value": zeros(),
                "value_sum": jnp.zeros(heads, jnp.float32, device=whole) if keeps_value_sum else None,
                "key_by_component": (
                    jnp.zeros((*heads, num_slots), dtype, device=by_component) if keeps_key_by_component else None
                ),
            } | {name: None if scale is None else own(scale) for name, scale in scales.items()}

        if stacks_layers or num_layers is None:
            held = arrays(layers, scales)
        else:
            of_layer = lambda i: {name: None if scale is None else scale[i] for name, scale in scales.items()}
            held = _by_name([arrays((), of_layer(i)) for i in range(num_layers)])
        return cls(
            lengths=jnp.zeros((batch,), jnp.int32, device=whole),
            overflowed=jnp.zeros((batch,), bool, device=whole),
            mesh=mesh,
            axis_name=axis_name,
            block_size=block_size,
            **held,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """That of all keys, `[*L, B, S, K, H]`."""
        return self.key.shape if self._is_stacked else (len(self.key), *self.key[0].shape)

    @property
    def dtype(self) -> jnp.dtype:
        """Of keys and values as they are kept."""
        return (self.key if self._is_stacked else self.key[0]).dtype

    @property
    def capacity(self) -> int:
        """Tokens that each sequence has room for."""
        return self.shape[-3]

    @property
    def num_shards(self) -> int:
        """How many shards the sequence is cut into."""
        return int(np.prod([self.mesh.shape[axis] for axis in axis_tuple(self.axis_name)]))

    def scales(self, layer: int | Array | None = None) -> dict[str, Float[Array, " K"] | None]:
        """Returns the `key_scale` and `value_scale` that attention is to be given with these keys and values.

        Example:
          >>> out = tree_decode(query, cache.key, cache.value, block_size=1, **where, **cache.scales())
        """
        given = {"key_scale": self.key_scale, "value_scale": self.value_scale}
        if layer is None:
            return {name: jnp.stack(scale) if isinstance(scale, tuple) else scale for name, scale in given.items()}
        return {name: None if scale is None else scale[layer] for name, scale in given.items()}

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
        if not self._is_stacked:
            return self._with_layer(layer, self._of_layer(layer).write(key, value))
        scales = self.scales(layer)
        positions = self.lengths[:, None] + jnp.arange(key.shape[1], dtype=jnp.int32)[None, :]  # [B, T]
        has_room = self.lengths + key.shape[1] <= self.capacity
        positions = jnp.where(has_room[:, None], positions, self.capacity)

        def put(stored, new, positions, layer, is_by_component):
            num_slots = stored.shape[-1 if is_by_component else -3]
            shard, slot = _locate(positions, self.num_shards, self.block_size)
            is_mine = (shard == jax.lax.axis_index(axis_tuple(self.axis_name))) & (positions < self.capacity)
            num_new = slot.shape[1]
            # Out of range, hence dropped; each elsewhere, since XLA writes up to five times as fast what it knows to
            # be apart and in order.
            slot = jnp.where(is_mine, slot, num_slots + jnp.arange(num_new, dtype=jnp.int32))
            row = jnp.arange(new.shape[0], dtype=jnp.int32)[:, None]
            if slot.size == 1:
                # One alone XLA would read, choose and put back, by two kernels: a second, which is dropped, avoids it.
                slot, row = jnp.concatenate([slot, slot + num_slots + 1]), jnp.zeros((2, 1), jnp.int32)
                new = jnp.broadcast_to(new, (2, *new.shape[1:]))
            where = (row, slice(None), slice(None), slot) if is_by_component else (row, slot)
            at = stored.at[where if layer is None else (layer, *where)]
            return at.set(new, mode="drop", unique_indices=True, indices_are_sorted=num_new == 1)

        cache = self._update(put, key, value, positions, layer, new_spec=P())
        if self.value_sum is None:
            return cache
        added = _widened(_as_stored(value, self.key.dtype, scales["value_scale"]), scales["value_scale"]).sum(axis=1)
        added = jnp.where(has_room[:, None, None], added, 0.0)
        where = slice(None) if layer is None else layer
        return dataclasses.replace(cache, value_sum=self.value_sum.at[where].add(added))

    def write_prefix(self, key, value, layer: int | Array | None = None, start: int | Int[Array, ""] = 0) -> "KVCache":
        """Writes S0 tokens `[B, S0, K, H]` from position `start` on, the same for all sequences.

        They are given in storage order and sharded on S0, as prefill makes them, whole or piece by piece; `start` is a
        multiple of shards x block_size, and `start + S0` at most the capacity.

        No data moves between devices. Follow it by `with_lengths`, which also sums the values where that is kept.

        Raises:
          CacheFullError: S0, or `start + S0` where `start` is a Python integer, is more than the capacity.
          ValueError: S0 or `start` does not divide into shards of whole blocks; shapes or dtypes that do not fit.
        """
        _check_new(key, value, self, layer)
        num_new, unit = key.shape[1], self.num_shards * self.block_size
        end = num_new + (start if isinstance(start, int | np.integer) else 0)
        if end > self.capacity:
            raise CacheFullError(f"cache is full: a prefix of {end} tokens does not fit a capacity of {self.capacity}")
        if num_new % unit:
            raise ValueError(f"key must hold a multiple of shards * block_size = {unit} tokens, got {num_new}")
        if end % unit:
            raise ValueError(f"start must be a multiple of shards * block_size = {unit}, got {start}")
        if not self._is_stacked:
            return self._with_layer(layer, self._of_layer(layer).write_prefix(key, value, start=start))
        slot = jnp.asarray(start, jnp.int32) // self.num_shards

        def put(stored, new, slot, layer, is_by_component):
            new = new.transpose(0, 2, 3, 1) if is_by_component else new
            where = (0, 0, 0, slot) if is_by_component else (0, slot, 0, 0)
            where, new = (where, new) if layer is None else ((layer, *where), new[None])
            return jax.lax.dynamic_update_slice(stored, new, where)

        return self._update(put, key, value, slot, layer, new_spec=P(None, axis_tuple(self.axis_name)))

    def with_sequence(self, row: int | Int[Array, ""], other: "KVCache") -> "KVCache":
        """Returns the cache with sequence `row` replaced by the only one of `other`; the others stay as they are.

        So a slot of a batch takes a new prompt while the rest goes on. No data moves between devices.

        Args:
          row: of the batch; clipped to it inside jit.
          other: a cache of one sequence, of at most this one's capacity and otherwise like it, scales included.

        Raises:
          ValueError: `other` is not like that, or `row` is none of the batch.

        Example:
          >>> cache = cache.with_sequence(2, cache_of_the_prompt)
        """
        like = lambda cache: (jax.tree.structure(cache), cache.dtype, cache.shape[:-4], cache.shape[-2:])
        if like(other) != like(self) or other.lengths.shape != (1,) or other.capacity > self.capacity:
            raise ValueError(
                f"other must be like this cache, of one sequence and at most {self.capacity} tokens; got key "
                f"{other.dtype}{other.shape} beside {self.dtype}{self.shape}"
            )
        batch = len(self.lengths)
        if isinstance(row, int | np.integer) and not 0 <= row < batch:
            raise ValueError(f"row must lie in [0, {batch}), got {row}")
        if not self._is_stacked:
            return self._by_layer(lambda own, i: own.with_sequence(row, other._of_layer(i)))
        rank = self.key.ndim
        _, specs = self._stored()
        # The axis of the batch; what has no slots is on every device.
        axes = {name: rank - 4 for name in specs} | {"lengths": 0, "overflowed": 0}
        axes |= {} if self.value_sum is None else {"value_sum": rank - 4}
        specs = {name: specs.get(name, P()) for name in axes}

        def put(stored, new, row):
            # A shard's slots ascend with position: its part of a shorter cache is the beginning of a longer one's.
            where = {name: [row if i == axis else 0 for i in range(stored[name].ndim)] for name, axis in axes.items()}
            return {name: jax.lax.dynamic_update_slice(stored[name], new[name], where[name]) for name in axes}

        mapped = jax.shard_map(
            put,
            mesh=self.mesh,
            axis_names=set(axis_tuple(self.axis_name)),
            in_specs=(specs, specs, P()),
            out_specs=specs,
            check_vma=False,
        )
        arrays = ({name: getattr(cache, name) for name in axes} for cache in (self, other))
        return dataclasses.replace(self, **mapped(*arrays, jnp.asarray(row, jnp.int32)))

    def advance(self, num_tokens: int) -> "KVCache":
        """Counts `num_tokens` more tokens for each sequence with room for them; marks the others `overflowed`."""
        has_room = self.lengths + num_tokens <= self.capacity
        return dataclasses.replace(
            self,
            lengths=jnp.where(has_room, self.lengths + num_tokens, self.lengths),
            overflowed=self.overflowed | ~has_room,
        )

    def with_lengths(self, lengths: Int[Array, " B"]) -> "KVCache":
        """Returns the cache holding `lengths` tokens, int32 `[B]`: after `write_prefix`, or to drop the newest.

        Where the sum of the values is kept it is taken anew, from all of them.
        """
        check_lengths("lengths", lengths, *self.lengths.shape, self.capacity)
        lengths = jnp.asarray(lengths, jnp.int32)
        if not self._is_stacked:
            return self._by_layer(lambda own, _: own.with_lengths(lengths))
        value_sum = self.value_sum
        if value_sum is not None:
            positions = storage_order(self.capacity, self.num_shards, self.block_size)
            is_held = (positions[None, :] < lengths[:, None])[:, :, None, None]  # [B, S, 1, 1]
            is_held = is_held if self.value.ndim == 4 else is_held[None]
            value_sum = jnp.where(is_held, _widened(self.value, self.value_scale), 0.0).sum(axis=-3)
        return dataclasses.replace(self, lengths=lengths, value_sum=value_sum)

    @property
    def _is_stacked(self) -> bool:
        return not isinstance(self.key, tuple)

    def _of_layer(self, layer: int) -> "KVCache":
        """One layer of a tuple of them, as a cache of one layer."""
        arrays = {name: getattr(self, name) for name in _PER_LAYER}
        return dataclasses.replace(self, **{name: x if x is None else x[layer] for name, x in arrays.items()})

    def _with_layer(self, layer: int, cache: "KVCache") -> "KVCache":
        """The inverse: a tuple of layers with one replaced."""
        return self._by_layer(lambda own, i: cache if i == layer else own)

    def _by_layer(self, method: Callable[["KVCache", int], "KVCache"]) -> "KVCache":
        """What comes of `method(cache of one layer, its number)`, joined again."""
        layers = [method(self._of_layer(i), i) for i in range(len(self.key))]
        arrays = _by_name([{name: getattr(layer, name) for name in _PER_LAYER} for layer in layers])
        return dataclasses.replace(self, lengths=layers[0].lengths, overflowed=layers[0].overflowed, **arrays)

    def _stored(self) -> tuple[dict[str, Array], dict[str, P]]:
        """What is sharded along the sequence, by name, and how."""
        by_slot, by_component = (P(*([None] * (self.key.ndim - k)), axis_tuple(self.axis_name)) for k in (3, 1))
        stored, specs = {"key": self.key, "value": self.value}, {"key": by_slot, "value": by_slot}
        if self.key_by_component is not None:
            stored["key_by_component"], specs["key_by_component"] = self.key_by_component, by_component
        return stored, specs

    def _update(self, put, key, value, positions, layer, *, new_spec: P) -> "KVCache":
        stored, specs = self._stored()
        scales = self.scales(layer)
        new = {
            name: _as_stored(x, self.key.dtype, scales[f"{name}_scale"]) for name, x in (("key", key), ("value", value))
        }
        if self.key_by_component is not None:
            new["key_by_component"] = new["key"]
        mapped = jax.shard_map(
            lambda stored, new, positions, layer: {
                name: put(stored[name], new[name], positions, layer, name == "key_by_component") for name in stored
            },
            mesh=self.mesh,
            axis_names=set(axis_tuple(self.axis_name)),
            in_specs=(specs, new_spec, P(), None if layer is None else P()),
            out_specs=specs,
            check_vma=False,
        )
        layer = None if layer is None else jnp.asarray(layer, jnp.int32)
        return dataclasses.replace(self, **mapped(stored, new, positions, layer))


def _by_name(layers: Sequence[Mapping[str, Array | None]]) -> dict[str, tuple[Array, ...] | None]:
    """Per name the arrays of all layers; None of what no layer has."""
    return {name: None if layers[0][name] is None else tuple(x[name] for x in layers) for name in layers[0]}


def _as_stored(x, dtype: jnp.dtype, scale):
    """`[B, T, K, H]` in the cache's dtype; what has it already is taken as it is.

    float8 has no infinity, and would make NaN of what lies beyond its largest number. int8's -128 is left out, so that
    a number and its negative are stored alike.
    """
    if x.dtype == dtype:
        return x
    x = x if scale is None else x.astype(jnp.float32) / scale[None, None, :, None]
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    most = float((jnp.iinfo if is_integer else jnp.finfo)(dtype).max)
    x = jnp.clip(x, -most, most)
    return (jnp.round(x) if is_integer else x).astype(dtype)


def _widened(x, scale):
    """What `[*L, B, S, K, H]` stands for, in float32."""
    x = x.astype(jnp.float32)
    return x if scale is None else x * scale[..., None, None, :, None]


def _locate(positions, num_shards: int, block_size: int):
    """Returns which shard and which of its slots hold each position; the inverse of `Shard.positions`."""
    block, offset = positions // block_size, positions % block_size
    return block % num_shards, (block // num_shards) * block_size + offset


def _check_new(key, value, cache: KVCache, layer) -> None:
    *layers, batch, _, num_kv_heads, head_dim = cache.shape
    if bool(layers) != (layer is not None):
        raise ValueError(f"layer must be given for a layered cache, and only then: cache {cache.shape}, {layer=}")
    if not cache._is_stacked and not isinstance(layer, int | np.integer):
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
