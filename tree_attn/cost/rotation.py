"""The ways in which a ring's keys and values travel, and the time of a whole pass by each of them.

one_way   K and V go to the next device, each by a transfer of its own
joint     K and V go to the next device as one array, by one transfer
two_way   half of the KV heads go to the next device, half to the previous one
"""

import dataclasses
from collections.abc import Iterable, Mapping

from tree_attn.cost.machine import Machine

ROTATIONS = ("one_way", "joint", "two_way")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass:
    """What all rotations of a pass share: every shard of K and V visits every device.

    num_shards:      devices of the ring
    key_value_bytes: of one shard, K and V together
    attention_us:    of one device to one shard
    stride:          of the ring's devices, counted node by node
    """

    num_shards: int
    key_value_bytes: float
    attention_us: float
    stride: int = 1


def added_us(rotation: str, ring: Pass, *, transfer_us: float, read_bytes_per_s: float) -> float:
    """Predicts the microseconds that a pass adds to the attention of p = `ring.num_shards` shards.

    A hop ends when its transfers and its attention are done:

        one_way, two_way   (p - 1) max(transfer - attention, 0)
        joint              2 copy + max(transfer - attention, 0) + (p - 2) max(transfer - attention, copy)

    Of "joint" the first copy joins K and V. Each later one parts an arrival, because attention takes two arrays. A copy
    reads and writes a shard.

    Args:
      transfer_us: of one hop's transfers.
      read_bytes_per_s: rate of a device's memory.
    """
    hops, seen_us = ring.num_shards - 1, transfer_us - ring.attention_us
    if hops < 1:
        return 0.0
    if rotation != "joint":
        return hops * max(seen_us, 0.0)
    copy_us = 2 * ring.key_value_bytes / read_bytes_per_s * 1e6
    return 2 * copy_us + max(seen_us, 0.0) + (hops - 1) * max(seen_us, copy_us)


def transfer_us(rotation: str, ring: Pass, machine: Machine) -> float:
    """Predicts the microseconds of one hop's transfers. They follow each other, but for the two directions at once.

    Where nothing both ways was measured, a torus carries both directions at once. Behind a switch a device has one link
    for all that it sends, and the halves follow each other.

    Raises:
      ValueError: `rotation` is not one of `ROTATIONS`.
      NotImplementedError: the cost of a transfer between these devices is unknown.
    """
    if rotation not in ROTATIONS:
        raise ValueError(f"rotation must be one of {', '.join(map(repr, ROTATIONS))}, got {rotation!r}")
    one = lambda exchange, num_bytes: machine.exchange_us(exchange, num_bytes, ring.num_shards, ring.stride)
    num_bytes = ring.key_value_bytes
    if rotation == "joint":
        return one("neighbour", num_bytes)
    if rotation == "one_way":
        return 2 * one("neighbour", num_bytes / 2)
    if machine.knows("both_ways", ring.num_shards, ring.stride):
        return 2 * one("both_ways", num_bytes / 2)
    return (2 if machine.device_kind.startswith("TPU") else 4) * one("neighbour", num_bytes / 4)


def predict_rotations(ring: Pass, machine: Machine, candidates: Iterable[str] = ROTATIONS) -> dict[str, float]:
    """Returns the microseconds that each candidate is predicted to add to the attention of a pass (`added_us`).

    Raises:
      NotImplementedError: the cost of a transfer between these devices is unknown.

    Example:
      >>> ring = Pass(num_shards=2, key_value_bytes=2e6, attention_us=5.0)
      >>> fastest(predict_rotations(ring, machine.load("NVIDIA H200")))
      'joint'
    """
    rates = {"read_bytes_per_s": machine.read_bytes_per_s}
    return {name: added_us(name, ring, transfer_us=transfer_us(name, ring, machine), **rates) for name in candidates}


def fastest(times_us: Mapping[str, float]) -> str:
    """Returns the rotation with the least time; of equals the first."""
    return min(times_us, key=times_us.__getitem__)
