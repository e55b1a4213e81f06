"""The changes of a KV cache: each as a function of one device's part of the arrays, run inside a `shard_map`.

A function takes a `LayerCache` of this device's shards and returns one. `LayerCache` runs it, and has the shapes.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int

from tree_attn.mesh import bound_axis_sizes
from tree_attn.placement import Shard, locate
from tree_attn.reduce.collectives import psum
from tree_attn.sharded import local_shard

NAMES = ("key", "value", "key_by_component")  # the arrays that have slots


def slots_of_new(cache, lengths: Int[Array, " B"], num_new: int, shard: Shard):
    """Returns the slots of positions `lengths .. lengths + T`, int32 `[B, T]`, and whether they are the shard's.

    No slot is, of a sequence that has no room for all T.
    """
    has_room = lengths + num_new <= cache.capacity
    positions = lengths[:, None] + jnp.arange(num_new, dtype=jnp.int32)[None, :]  # [B, T]
    positions = jnp.where(has_room[:, None], positions, cache.capacity)
    holder, slot = locate(positions, shard.num_shards, cache.block_size)
    slot = slot % cache.key.shape[-3] if cache.rolls else slot
    return slot, (holder == shard.index) & (positions < cache.capacity)


def write(cache, key, value, lengths: Int[Array, " B"], layer):
    """Writes T tokens at positions `lengths .. lengths + T`; a sequence without room for all stays as it is."""
    num_new = key.shape[1]
    slot, is_mine = slots_of_new(cache, lengths, num_new, local_shard(cache.axes, cache.block_size))

    def put(stored, new, is_by_component):
        num_slots = stored.shape[-1 if is_by_component else -3]
        # Out of range, hence dropped; each elsewhere, since XLA writes up to five times as fast what it knows to be
        # apart and in order.
        slots = jnp.where(is_mine, slot, num_slots + jnp.arange(num_new, dtype=jnp.int32))
        sequence = jnp.arange(new.shape[0], dtype=jnp.int32)[:, None]
        if slots.size == 1:
            # One alone XLA would read, choose and put back, by two kernels: a second, which is dropped, avoids it.
            slots, sequence = jnp.concatenate([slots, slots + num_slots + 1]), jnp.zeros((2, 1), jnp.int32)
            new = jnp.broadcast_to(new, (2, *new.shape[1:]))
        where = (sequence, slice(None), slice(None), slots) if is_by_component else (sequence, slots)
        at = stored.at[where if layer is None else (layer, *where)]
        return at.set(new, mode="drop", unique_indices=True, indices_are_sorted=num_new == 1)

    new = _as_stored_by_name(cache, key, value, layer)
    changed = {name: put(getattr(cache, name), x, name == "key_by_component") for name, x in new.items()}
    if cache.value_sum is not None:
        added = widened(new["value"], cache.scales(layer)["value_scale"]).sum(axis=1)
        has_room = lengths + num_new <= cache.capacity
        added = jnp.where(has_room[:, None, None], added, 0.0)
        changed["value_sum"] = cache.value_sum.at[slice(None) if layer is None else layer].add(added)
    return dataclasses.replace(cache, **changed)


def write_prefix(cache, key, value, start: Int[Array, ""], fits: Bool[Array, ""] | None, layer, lengths):
    """Writes this shard's part of S0 tokens from position `start` on; nothing where `fits` is False.

    A cache that rolls gets the newest of each sequence's first `lengths` tokens.
    """
    slot = start // local_shard(cache.axes, cache.block_size).num_shards
    if cache.rolls and key.shape[1] > cache.key.shape[-3]:
        key, value = (_newest(cache, x, lengths) for x in (key, value))

    def put(stored, new, is_by_component):
        new = new.transpose(0, 2, 3, 1) if is_by_component else new
        where = (0, 0, 0, slot) if is_by_component else (0, slot, 0, 0)
        where, new = (where, new) if layer is None else ((layer, *where), new[None])
        if fits is not None:
            new = jnp.where(fits, new, jax.lax.dynamic_slice(stored, where, new.shape))
        return jax.lax.dynamic_update_slice(stored, new, where)

    new = _as_stored_by_name(cache, key, value, layer)
    changed = {name: put(getattr(cache, name), x, name == "key_by_component") for name, x in new.items()}
    return dataclasses.replace(cache, **changed)


def _newest(cache, x, lengths: Int[Array, " B"]):
    """Returns for each slot of this shard the newest of its tokens, of its part `[B, S0, K, H]` of prompts.

    The slots of all shards are whole rounds of blocks, so that a shard's own tokens roll through its own slots. A slot
    that has none yet gets padding.
    """
    num_slots = cache.key.shape[-3]
    num_held = local_shard(cache.axes, cache.block_size).local_lengths(lengths, x.shape[1])[:, None]
    slots = jnp.arange(num_slots, dtype=jnp.int32)[None, :]
    index = slots + num_slots * jnp.maximum((num_held - 1 - slots) // num_slots, 0)
    return jnp.take_along_axis(x, index[:, :, None, None], axis=1, mode="promise_in_bounds")


def replace_sequence(cache, other, sequence: Int[Array, ""]):
    """Puts the only sequence of `other`, a shorter one too, in the place of the `sequence`-th of the whole batch."""
    batch_axis = cache.key.ndim - 4
    num_rows = cache.key.shape[batch_axis]
    row = sequence - first_row(cache.batch_axes, num_rows)

    def put(stored, new):
        # A shard's slots ascend with position: its part of a shorter cache is the beginning of a longer one's.
        begin = [row if i == batch_axis else 0 for i in range(stored.ndim)]
        if cache.batch_axes:
            is_here = (row >= 0) & (row < num_rows)
            new = jnp.where(is_here, new, jax.lax.dynamic_slice(stored, begin, new.shape))
        return jax.lax.dynamic_update_slice(stored, new, begin)

    names = [name for name in (*NAMES, "value_sum") if getattr(cache, name) is not None]
    return dataclasses.replace(cache, **{name: put(getattr(cache, name), getattr(other, name)) for name in names})


def sum_values(cache, lengths: Int[Array, " B"], layer):
    """Takes `value_sum` anew over the first `lengths` values, of one layer or of all."""
    value = cache.value if layer is None else cache.value[layer]
    shard, scale = local_shard(cache.axes, cache.block_size), cache.scales(layer)["value_scale"]
    is_held = shard.positions(value.shape[-3])[None, :] < lengths[:, None]
    is_held = is_held[:, :, None, None] if value.ndim == 4 else is_held[None, :, :, None, None]
    total = psum(jnp.where(is_held, widened(value, scale), 0.0).sum(axis=-3), cache.axes)
    if layer is not None:
        total = cache.value_sum.at[layer].set(total)
    return dataclasses.replace(cache, value_sum=total)


def first_row(batch_axes: tuple[str, ...], num_rows: int) -> Int[Array, ""] | int:
    """Returns the index in the whole batch of the first sequence that is here; 0 where the axes are not bound."""
    is_part = batch_axes and bound_axis_sizes(batch_axes) is not None
    return jax.lax.axis_index(batch_axes) * num_rows if is_part else 0


def as_stored(x, dtype: DTypeLike, scale):
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


def widened(x, scale):
    """Returns the values that stored `[*L, B, S, K, H]` stand for, in float32."""
    x = x.astype(jnp.float32)
    return x if scale is None else x * scale[..., None, None, :, None]


def _as_stored_by_name(cache, key, value, layer) -> dict[str, Array]:
    """Returns new keys and values as the cache stores them, by the names of its arrays with slots."""
    scales = cache.scales(layer)
    new = {
        "key": as_stored(key, cache.dtype, scales["key_scale"]),
        "value": as_stored(value, cache.dtype, scales["value_scale"]),
    }
    return new if cache.key_by_component is None else new | {"key_by_component": new["key"]}
