"""Bare transfers between neighbours, as the hops of each rotation make them, and the rotation that they favour."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from tree_attn.commands.processes import broadcast
from tree_attn.cost import limits
from tree_attn.cost.rotation import ROTATIONS, Hop, Pass, added_us, fastest
from tree_attn.cost.step import DecodeStep
from tree_attn.measure import links

READ_SHARE = 0.9  # of the datasheet's rate, which copies reach


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfers:
    """Rates of bare transfers.

    Attributes:
      gb_per_s: by step and rotation, of transfers as large as those of its hops; a rotation that was not timed is not
        there, and None stands for one device.
      rotation: by step, the rotation of the ring that chooses.
    """

    gb_per_s: dict[DecodeStep, dict[str, float | None]]
    rotation: dict[DecodeStep, str]

    def one_way(self) -> dict[DecodeStep, float | None]:
        """Returns, by step, the rate of transfers of one shard's keys to the next device."""
        return {step: rates["one_way"] for step, rates in self.gb_per_s.items()}

    def of_row(self, step: DecodeStep, rotation: str | None) -> dict[str, object]:
        """Returns the fields of a row: the rate of transfers like its own, and those of all rotations."""
        rates = self.gb_per_s[step]
        return {"neighbour_gb_per_s": rates.get(rotation or "one_way"), "transfers_gb_per_s": rates}


def measure(
    mesh: Mesh, steps: Sequence[DecodeStep], rotations: Sequence[str] = (), *, device_kind: str | None = None
) -> Transfers:
    """Times bare transfers of the sizes of all steps; every process calls it.

    Args:
      mesh: the devices, along one axis.
      rotations: those to time beside "one_way".
      device_kind: of the devices. All rotations are timed then, and the rotation is chosen by their rates. None: it is
        "one_way", as on emulated devices, whose times mean nothing.
    """
    chooses = device_kind is not None and mesh.size > 1
    timed = ROTATIONS if chooses else ("one_way", *rotations)
    rates = {step: {name: _gb_per_s(mesh, step, name) for name in timed} for step in steps}
    chosen = dict.fromkeys(steps, "one_way")
    if chooses:
        # Each process has timed them, and all must run the same program.
        indices = [ROTATIONS.index(_chosen(step, rates[step], device_kind)) for step in steps]
        chosen = {step: ROTATIONS[i] for step, i in zip(steps, broadcast(np.asarray(indices, np.int32)))}
    return Transfers(gb_per_s=rates, rotation=chosen)


def _gb_per_s(mesh: Mesh, step: DecodeStep, rotation: str) -> float | None:
    num_bytes = step.key_value_bytes_per_device // (1 if rotation == "joint" else 2)
    return links.neighbour_gb_per_s(mesh, num_bytes, both_ways=rotation == "two_way")


def _chosen(step: DecodeStep, gb_per_s: dict[str, float], device_kind: str) -> str:
    """Returns the rotation by which a step's ring is the fastest, given the rates of its transfers."""
    limit_us = limits.read_limit_us(step, device_kind)
    num_bytes, read_us = step.key_value_bytes_per_device, (limit_us or 0.0) / READ_SHARE
    ring = Pass(num_shards=step.n_devices, key_value_bytes=num_bytes, attention_us=read_us)
    # Without a datasheet copies have no price, and so "joint" is passed over.
    left_out = ["two_way"] * (step.num_kv_heads == 1) + ["joint"] * (not read_us)
    read_bytes_per_s = num_bytes / read_us * 1e6 if read_us else float("inf")
    return fastest(
        {
            name: added_us(name, ring, Hop(beside_us=num_bytes / rate / 1e3), read_bytes_per_s=read_bytes_per_s)
            for name, rate in gb_per_s.items()
            if name not in left_out
        }
    )
