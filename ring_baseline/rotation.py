"""The ways in which K and V go round a ring: what travels, of which heads, and the choice among them."""

import dataclasses
import logging
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tree_attn.arguments import AttentionOptions
from tree_attn.cost import datasheets
from tree_attn.cost.machine import Machine
from tree_attn.cost.rotation import ROTATIONS, Pass, fastest, joined_bytes, predict_rotations
from tree_attn.devices import default_platform
from tree_attn.mesh import bound_axis_sizes
from tree_attn.reduce import machine_here
from tree_attn.ring_baseline.rotate import KeyValue

_log = logging.getLogger("tree_attn")


class Way(NamedTuple):
    """The arrays and options of the heads whose K and V go round one way: `step` is 1, or -1 for the other way.

    With `is_joint` K and V travel as one array, side by side in the last dimension.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    options: AttentionOptions
    step: int
    is_joint: bool = False

    @property
    def heads(self) -> int:
        """The number of query heads."""
        return self.query.shape[2]

    @property
    def load(self) -> KeyValue | jax.Array:
        """The arrays that this device sends first: its own K and V."""
        pair = self.key, self.value
        return jnp.concatenate(pair, axis=-1) if self.is_joint else pair

    def key_value(self, load: KeyValue | jax.Array, hop) -> KeyValue:
        """Returns the K and V of what has arrived after `hop` hops."""
        if isinstance(hop, int) and hop == 0:
            return self.key, self.value
        if not self.is_joint:
            return load
        return load[..., : self.key.shape[-1]], load[..., self.key.shape[-1] :]


def split_ways(rotation: str, query, key, value, options: AttentionOptions) -> tuple[Way, ...]:
    """Returns all heads as one way, or two halves of the KV heads, with their queries, as two.

    Raises:
      NotImplementedError: "two_way" with a single KV head.
    """
    if rotation != "two_way":
        return (Way(query, key, value, options, 1, rotation == "joint"),)
    num_kv_heads = key.shape[2]
    if num_kv_heads == 1:
        raise NotImplementedError("rotation='two_way' sends half of the KV heads each way round, and key has only 1")
    half, group = -(-num_kv_heads // 2), query.shape[2] // num_kv_heads

    def way(heads: slice, step: int) -> Way:
        of_query = slice(*(None if end is None else end * group for end in (heads.start, heads.stop)))
        parts = query[:, :, of_query], key[:, :, heads], value[:, :, heads]
        return Way(*parts, options_of_heads(options, of_query, heads), step)

    return way(slice(None, half), 1), way(slice(half, None), -1)


def options_of_heads(options: AttentionOptions, query_heads, kv_heads) -> AttentionOptions:
    """Returns the options of some heads; slices, or arrays of indices."""
    indices = {"sinks": query_heads, "key_scale": kv_heads, "value_scale": kv_heads}
    found = {name: getattr(options, name) for name in indices}
    return dataclasses.replace(
        options, **{name: None if x is None else jnp.asarray(x)[indices[name]] for name, x in found.items()}
    )


def joined(parts, axis: int):
    """Returns the arrays of all ways as one, along the axis of heads."""
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=axis)


def choose_rotation(rotation: str | None, query, key, value, axes: tuple[str, ...], *, is_causal: bool = False) -> str:
    """Returns the rotation that is named, or the one predicted to be the fastest here; the choice is logged.

    Without costs of the machine, and on emulated devices, that is "one_way".

    Args:
      query, key, value: of this device.
      axes: bound mesh axes of the ring.
      is_causal: queries see half of the keys, as within a prompt.
    """
    num_shards = math.prod(bound_axis_sizes(axes) or ()) if axes else 1
    if rotation is not None or num_shards == 1:
        return rotation or "one_way"
    machine, times = _machine(), {}
    if machine is not None:
        candidates = [name for name in ROTATIONS if name != "two_way" or key.shape[2] > 1]
        ring = Pass(
            num_shards=num_shards, key_value_bytes=key.nbytes + value.nbytes, stride=_stride(axes),
            attention_us=_attention_us(query, key, value, machine, is_causal), joined_bytes=joined_bytes(),
        )  # fmt: skip
        try:
            times = predict_rotations(ring, machine, candidates)
        except NotImplementedError as error:
            _log.debug("rotation=None: %s", error)
    chosen = fastest(times) if times else "one_way"
    because = ", ".join(f"{name} {us:.1f}" for name, us in times.items())
    _log.info("rotation=None picked %r%s", chosen, f"; us added to the attention, predicted: {because}" * bool(times))
    return chosen


def _machine() -> Machine | None:
    """Returns the costs of the machine that programs run on: measured, by its datasheet, or None."""
    if default_platform() not in ("gpu", "tpu"):
        return None
    return machine_here() or datasheets.load(jax.local_devices()[0].device_kind)


def _attention_us(query, key, value, machine: Machine, is_causal: bool) -> float:
    """Predicts the least microseconds of a hop's attention: products at the datasheet's rate, and reading."""
    read_us = (key.nbytes + value.nbytes) / machine.read_bytes_per_s * 1e6
    num_pairs = math.prod(query.shape[:3]) * key.shape[1] / (2 if is_causal else 1)
    flops = 2 * num_pairs * (key.shape[-1] + value.shape[-1])
    try:
        return max(read_us, flops / datasheets.rates(machine.device_kind)["product_flops_per_s"] * 1e6)
    except KeyError:
        return read_us


def _stride(axes: tuple[str, ...]) -> int:
    """Returns how far apart neighbours of the ring are, counted along the mesh's faster axes."""
    shape = jax.sharding.get_abstract_mesh().shape
    names = list(shape)
    return math.prod(shape[name] for name in names[1 + max(map(names.index, axes)) :])
