"""The verdict of rank 0, sent to all others before it ends: JAX's service dies with it."""

import time
from collections.abc import Mapping, Sequence

from tree_attn.cluster.channel import Channel, readable
from tree_attn.cluster.faults import Fault

PART_S = 2.0  # rank 0 stays so long until all have the verdict


def deliver(faults: Sequence[Fault], channels: Mapping[int, Channel]) -> None:
    """Sends the verdict to every rank, and returns once those that are not lost have left, or after `PART_S`."""
    for channel in channels.values():
        channel.send("verdict", faults=[(fault.rank, fault.text) for fault in faults])
    deadline = time.monotonic() + PART_S
    lost = {fault.rank for fault in faults if fault.order == 0}
    waited_for = [channel for rank, channel in channels.items() if rank not in lost]
    while waited_for and (remaining := deadline - time.monotonic()) > 0:
        for channel in readable(waited_for, remaining):
            channel.receive()
        waited_for = [channel for channel in waited_for if channel.lost is None]
