"""The node that each process runs on: recorded when processes have joined, read by meshes and reductions.

A node is a machine, whether one process runs on it or many. `tree_attn.initialize` records it; the way in
which processes find each other is the business of `tree_attn.cluster`.
"""

from collections.abc import Sequence

import jax

_nodes: tuple[str, ...] = ()  # of every process, by its index; () until it is recorded


def record(nodes: Sequence[str]) -> None:
    """Records the node of every process, by the process's index."""
    global _nodes
    _nodes = tuple(nodes)


def nodes() -> tuple[str, ...]:
    """Returns the node of every process, by the process's index; () where nothing is recorded."""
    return _nodes


def num_nodes() -> int | None:
    """Returns the number of nodes; None where several processes have not been recorded."""
    return len(set(_nodes)) or (1 if jax.process_count() == 1 else None)


def node_of(device: jax.Device) -> str | None:
    """Returns the node of a device; None where its process is not recorded."""
    return _nodes[device.process_index] if device.process_index < len(_nodes) else None


def by_node(devices: Sequence[jax.Device]) -> dict[str, list[jax.Device]]:
    """Returns the devices of each node, in order; in one process that is not recorded, all of them under "here".

    Raises:
      ValueError: the devices are of several processes, and `tree_attn.initialize` has not joined them.
    """
    found: dict[str, list[jax.Device]] = {}
    for device in devices:
        node = node_of(device)
        if node is None and (_nodes or jax.process_count() > 1):
            raise ValueError("which node a device is on is not known: call tree_attn.initialize() first")
        found.setdefault(node or "here", []).append(device)
    return found


def node_by_node(devices: Sequence[jax.Device]) -> list[jax.Device]:
    """Returns the devices grouped by node, for schedulers may number processes in any order; unchanged if unknown."""
    if num_nodes() is None:
        return list(devices)
    return [device for part in by_node(devices).values() for device in part]


def is_first_process() -> bool:
    """Returns True in process 0, the one that prints and writes files; starts no backend where there is one process."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0
