"""The ways in which a ring's keys and values travel, and what each of them adds to the attention of a pass.

    one_way   K and V go to the next device, as two arrays
    joint     K and V go to the next device as one array
    two_way   half of the KV heads go to the next device, half to the previous one

XLA for GPUs has one transfer at a time beside other work, and waits for the others. It joins arrays that go the same
way into one transfer, without a copy, up to 32 MiB; `tree_attn.measure.links.join_transfers` lifts the limit.
"""

import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping

from tree_attn.cost.machine import Machine

ROTATIONS = ("one_way", "joint", "two_way")
JOIN_FLAG, JOINED_BYTES = "--xla_gpu_collective_permute_combine_threshold_bytes", 32 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass:
    """The facts of a pass that all rotations share: every shard of K and V visits every device.

    num_shards:      devices of the ring
    key_value_bytes: of one shard, K and V together
    attention_us:    of one device to one shard
    stride:          of the ring's devices, counted node by node
    joined_bytes:    up to how many bytes XLA joins arrays into one transfer; default: any number
    """

    num_shards: int
    key_value_bytes: float
    attention_us: float
    stride: int = 1
    joined_bytes: float = math.inf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hop:
    """The microseconds of one hop's transfers: those beside the attention, and those before it."""

    beside_us: float
    waited_us: float = 0.0


def added_us(rotation: str, ring: Pass, hop: Hop, *, read_bytes_per_s: float) -> float:
    """Predicts the microseconds that a pass adds to the attention of p = `ring.num_shards` shards.

        one_way   (p - 1) (waited + max(beside - attention, 0))
        two_way   the same + copy:  the first transfers take halves of the heads
        joint     2 copy + waited + max(beside - attention, 0) + (p - 2) (waited + max(beside - attention, copy)):
                  the first copy joins K and V, and each later one parts an arrival

    A copy reads and writes a shard.

    Args:
      read_bytes_per_s: rate of a device's memory.
    """
    hops, seen_us = ring.num_shards - 1, hop.beside_us - ring.attention_us
    if hops < 1:
        return 0.0
    copy_us = 2 * ring.key_value_bytes / read_bytes_per_s * 1e6
    if rotation == "joint":
        return 2 * copy_us + hops * hop.waited_us + max(seen_us, 0.0) + (hops - 1) * max(seen_us, copy_us)
    return (copy_us if rotation == "two_way" else 0.0) + hops * (hop.waited_us + max(seen_us, 0.0))


def predict_hop(rotation: str, ring: Pass, machine: Machine) -> Hop:
    """Predicts the transfers of one hop.

    On a torus both directions are free at once, and its compiler runs all transfers beside the attention.

    Raises:
      ValueError: `rotation` is not one of `ROTATIONS`.
      NotImplementedError: the cost of a transfer between these devices is unknown.
    """
    if rotation not in ROTATIONS:
        raise ValueError(f"rotation must be one of {', '.join(map(repr, ROTATIONS))}, got {rotation!r}")
    one = lambda exchange, num_bytes: machine.exchange_us(exchange, num_bytes, ring.num_shards, ring.stride)
    num_bytes, is_torus = ring.key_value_bytes, machine.device_kind.startswith("TPU")
    if rotation == "joint":
        return Hop(beside_us=one("neighbour", num_bytes))
    if rotation == "one_way" and not is_torus:
        return _in_turn(one, "neighbour", num_bytes, 1 if num_bytes <= ring.joined_bytes else 2)
    if rotation == "one_way":
        return Hop(beside_us=2 * one("neighbour", num_bytes / 2))
    # Both directions: K and then V where they are free at once, else one direction and then the other.
    knows_both = machine.knows("both_ways", ring.num_shards, ring.stride)
    if is_torus:
        half = one("both_ways", num_bytes / 2) if knows_both else one("neighbour", num_bytes / 4)
        return Hop(beside_us=2 * half)
    if knows_both:
        return _in_turn(one, "both_ways", num_bytes, 2)
    return _in_turn(one, "neighbour", num_bytes, 2 if num_bytes / 2 <= ring.joined_bytes else 4)


def _in_turn(one: Callable[[str, float], float], exchange: str, num_bytes: float, num_transfers: int) -> Hop:
    """Returns a hop of equal transfers one after another, of which the last runs beside the attention."""
    transfer_us = one(exchange, num_bytes / num_transfers)
    return Hop(beside_us=transfer_us, waited_us=(num_transfers - 1) * transfer_us)


def joined_bytes() -> int:
    """Returns up to how many bytes XLA for GPUs joins arrays into one transfer, by `XLA_FLAGS`."""
    found = re.findall(rf"{JOIN_FLAG}=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(found[-1]) if found else JOINED_BYTES


def predict_rotations(ring: Pass, machine: Machine, candidates: Iterable[str] = ROTATIONS) -> dict[str, float]:
    """Returns the microseconds that each candidate is predicted to add to the attention of a pass (`added_us`).

    Raises:
      NotImplementedError: the cost of a transfer between these devices is unknown.

    Example:
      >>> ring = Pass(num_shards=2, key_value_bytes=2e8, attention_us=5000.0, joined_bytes=32e6)
      >>> fastest(predict_rotations(ring, machine.load("NVIDIA H200")))
      'joint'
    """
    rates = {"read_bytes_per_s": machine.read_bytes_per_s}
    return {name: added_us(name, ring, predict_hop(name, ring, machine), **rates) for name in candidates}


def fastest(times_us: Mapping[str, float]) -> str:
    """Returns the rotation with the least time; of equals the first."""
    return min(times_us, key=times_us.__getitem__)
