"""What exchanges cost on a machine: per kind and link level, a launch, a latency per message, and a rate.

The alpha-beta model of one exchange among p devices:

    us = alpha_us + rounds * round_us + bytes_sent / bytes_per_s * 1e6

`rounds` are the messages that wait for one another, and `bytes_sent` is what each device sends (`KINDS`). The other
numbers are a machine's, and data: JSON files in `tree_attn/cost/machines/`.
"""

import dataclasses
import functools
import json
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

FOLDER = pathlib.Path(__file__).with_name("machines")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """A way to exchange states along a mesh axis.

    Attributes:
        exchanges: how many, one waiting for the other, make one reduction.
        rounds: messages of one of them that wait for one another, (inside a node, across nodes), of m devices on each
            of n nodes. For NCCL's collectives as NCCL's own model counts them (src/graph/tuning.cc).
        sent: what each of p devices sends in all of them, in multiples of its payload.
        is_collective: NCCL does it, and not a kernel of ours.
        max_elements: elements of the largest state that it exchanges; None for any.
    """

    exchanges: int
    rounds: Callable[[int, int], tuple[int, int]]
    sent: Callable[[int], float]
    is_collective: bool = True
    max_elements: int | None = None


_once = lambda m, n: (int(n == 1), int(n > 1))
KINDS = {
    # Chains inside a node and a tree across, up and down. Maximum, numerator and denominator, one after the other.
    "allreduce": Kind(
        exchanges=3, rounds=lambda m, n: (2 * (m - 1), 2 * math.ceil(math.log2(n))), sent=lambda p: 2 * (p - 1) / p
    ),
    # A ring through all devices, node by node.
    "gather": Kind(exchanges=1, rounds=lambda m, n: (m * n - n, n - 1), sent=lambda p: p - 1),
    # Everyone to everyone at once; 4 bytes travel as 8, with the number of the step. Beyond the limit
    # they cost more than is saved.
    "fused": Kind(exchanges=1, rounds=_once, sent=lambda p: 2 * (p - 1), is_collective=False, max_elements=1 << 18),
    # Everyone to the next: one hop of a ring.
    "neighbour": Kind(exchanges=1, rounds=_once, sent=lambda p: 1),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """Alpha and beta: microseconds of a launch, and bytes per second that a device sends."""

    alpha_us: float
    bytes_per_s: float

    def __post_init__(self):
        _check(self.alpha_us >= 0 and self.bytes_per_s > 0, f"alpha_us and bytes_per_s must be positive, got {self}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """What exchanges of one kind cost over one level of links.

    Attributes:
        round_us: the latency of each message that waits for another.
        lines: the cheapest holds, since NCCL chooses protocol and channels by the size.
    """

    round_us: float
    lines: tuple[Line, ...]

    def __post_init__(self):
        _check(self.round_us >= 0 and len(self.lines) > 0, f"round_us and lines must be there, got {self}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkLevel:
    """The links inside a node, or across nodes.

    Attributes:
        source: where the numbers are from, in a few words; begins with "measured" or "assumed".
        costs: kind of exchange (`KINDS`) -> what it costs; one that is not there cannot run over these links.
    """

    source: str
    costs: Mapping[str, Cost]

    def __post_init__(self):
        unknown = sorted(set(self.costs) - set(KINDS))
        _check(not unknown, f"costs must be of the kinds {tuple(KINDS)}, got {unknown}")

    @property
    def is_measured(self) -> bool:
        """Whether anybody measured these links."""
        return self.source.startswith("measured")


# 400 Gbit/s for each GPU, as in the paper's cluster (section 6), and what NCCL 2.28 assumes of a network (its
# src/graph/tuning.cc): 6.6 us for a launch, 2.7 us per message of a ring and 5 us of a tree, with the protocol for
# small messages. A datasheet and another's model, not measurements.
ASSUMED_NETWORK = LinkLevel(
    source="assumed: InfiniBand NDR, 400 Gbit/s per GPU, latencies of NCCL's own model; not measured",
    costs={
        "allreduce": Cost(round_us=5.0, lines=(Line(alpha_us=6.6, bytes_per_s=50e9),)),
        "gather": Cost(round_us=2.7, lines=(Line(alpha_us=6.6, bytes_per_s=50e9),)),
        "neighbour": Cost(round_us=2.7, lines=(Line(alpha_us=6.6, bytes_per_s=50e9),)),
    },
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """The parameters that `tree_attn.cost.predict` predicts times from.

    Attributes:
        device_kind: `jax.Device.device_kind`, e.g. "NVIDIA H200".
        gpus_per_node: devices that the links of `node` join.
        memory_bytes: of one device.
        read_bytes_per_s: at which a local attention reads keys and values.
        local_us: what a step costs beside reading and exchanging: launches, merges, waiting for the slowest device.
        collective_us: what the first of NCCL's collectives in a step costs beside itself; an exchange by a kernel of
            ours does not pay it.
        node, network: the links inside a node, and across nodes.
        provenance: how, where and when this was measured; free form.
    """

    device_kind: str
    gpus_per_node: int
    memory_bytes: int
    read_bytes_per_s: float
    local_us: float
    collective_us: float
    node: LinkLevel
    network: LinkLevel = ASSUMED_NETWORK
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        is_count = isinstance(self.gpus_per_node, int) and self.gpus_per_node >= 1
        _check(is_count, f"gpus_per_node must be at least 1, got {self.gpus_per_node!r}")
        _check(
            self.memory_bytes > 0 and self.read_bytes_per_s > 0, "memory_bytes and read_bytes_per_s must be positive"
        )
        _check(self.local_us >= 0 and self.collective_us >= 0, "local_us and collective_us must not be negative")

    def level(self, size: int, stride: int = 1) -> LinkLevel:
        """The slowest links between `size` devices, `stride` apart when they are counted node by node."""
        return self.node if self._split(size, stride)[1] == 1 else self.network

    def exchange_us(self, kind: str, payload_bytes: float, size: int, stride: int = 1) -> float:
        """The time of one reduction of `kind` among `size` devices, each with `payload_bytes`; 0 for one device.

        Raises:
            ValueError: there is no such kind.
            NotImplementedError: nobody knows what it costs over these links, or it cannot run there.

        Example:
            >>> round(load("NVIDIA H200").exchange_us("gather", 8256, size=4), 1)
            6.9
        """
        _check(kind in KINDS, f"kind must be one of {tuple(KINDS)}, got {kind!r}")
        if size == 1:
            return 0.0
        how, split = KINDS[kind], self._split(size, stride)
        latency_us = 0.0
        # Waits add up over both levels; the launch is one, and the slower links bound the rate.
        for level, devices, rounds in zip((self.node, self.network), split, how.rounds(*split)):
            if devices > 1:
                if kind not in level.costs:
                    raise NotImplementedError(f"no cost of {kind!r} is known over links {level.source}")
                latency_us += how.exchanges * rounds * level.costs[kind].round_us
        sent = how.sent(size) * payload_bytes
        lines = self.level(size, stride).costs[kind].lines
        return latency_us + min(how.exchanges * line.alpha_us + sent / line.bytes_per_s * 1e6 for line in lines)

    def _split(self, size: int, stride: int) -> tuple[int, int]:
        """How many of `size` devices, `stride` apart, one node holds, and over how many nodes they are."""
        inside = min(size, max(1, self.gpus_per_node // stride))
        return inside, -(-size // inside)


def load(device_kind: str) -> Machine | None:
    """The machine of the package whose `device_kind` this is; None if nobody measured one.

    Example:
        >>> load("NVIDIA H200").gpus_per_node
        8
    """
    return _shipped().get(device_kind)


def kinds() -> tuple[str, ...]:
    """The kinds of device that the package has parameters of."""
    return tuple(_shipped())


def read(path: str | os.PathLike) -> Machine:
    """The machine in a JSON file, as `write` leaves it; without a "network", that is `ASSUMED_NETWORK`.

    Raises:
        ValueError: the file does not describe a machine; names the file and what is wrong.
    """
    try:
        return _from_json(json.loads(pathlib.Path(path).read_text()))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} does not describe a machine: {type(error).__name__}: {error}") from error


def write(machine: Machine, path: str | os.PathLike) -> None:
    """Writes a machine as JSON, a network only if it was measured."""
    fields = dataclasses.asdict(machine)
    if not machine.network.is_measured:
        del fields["network"]
    pathlib.Path(path).write_text(json.dumps(fields, indent=1, allow_nan=False) + "\n")


@functools.cache
def _shipped() -> dict[str, Machine]:
    machines = [read(path) for path in sorted(FOLDER.glob("*.json"))]
    return {machine.device_kind: machine for machine in machines}


def _from_json(fields: dict[str, Any]) -> Machine:
    levels = {name: _level(**fields[name]) for name in ("node", "network") if name in fields}
    return Machine(**(fields | levels))


def _level(source: str, costs: dict[str, dict[str, Any]]) -> LinkLevel:
    lines = {kind: tuple(Line(**line) for line in cost["lines"]) for kind, cost in costs.items()}
    return LinkLevel(source=source, costs={kind: Cost(**(costs[kind] | {"lines": lines[kind]})) for kind in costs})
