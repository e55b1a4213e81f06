"""Measured machines: the rates of a device, and the cost of exchanges over each class of links.

The alpha-beta model of one exchange among p devices:

    us = alpha_us + rounds * round_us + bytes_sent / bytes_per_s * 1e6

`EXCHANGES` gives `rounds`, the messages that wait for one another, and `bytes_sent` by each device. The other numbers
belong to a machine and are data: JSON files in `tree_attn/cost/machines/`.
"""

import dataclasses
import functools
import json
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from tree_attn.cost.equations import allreduce_volume_elements

FOLDER = pathlib.Path(__file__).with_name("machines")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExchangePattern:
    """The messages by which devices exchange states along a mesh axis.

    Attributes:
      num_exchanges: dependent exchanges that make one reduction.
      rounds: messages of one exchange that wait for one another, (inside a node, across nodes), of m devices on each of
        n nodes. For NCCL's collectives these are the counts of NCCL's own model (src/graph/tuning.cc).
      payloads_sent: bytes that each of p devices sends in all exchanges, in multiples of its payload.
      is_collective: True for NCCL's collectives, False for a kernel of ours.
      max_elements: elements of the largest state that it exchanges; None for any.
    """

    num_exchanges: int
    rounds: Callable[[int, int], tuple[int, int]]
    payloads_sent: Callable[[int], float]
    is_collective: bool = True
    max_elements: int | None = None


_one_round = lambda m, n: (int(n == 1), int(n > 1))
EXCHANGES = {
    # Chains inside a node and a tree across, up and down. Maximum, numerator and denominator, one after the other.
    "allreduce": ExchangePattern(
        num_exchanges=3,
        rounds=lambda m, n: (2 * (m - 1), 2 * math.ceil(math.log2(n))),
        payloads_sent=lambda p: allreduce_volume_elements(1, p=p),
    ),
    # A ring through all devices, node by node.
    "gather": ExchangePattern(num_exchanges=1, rounds=lambda m, n: (m * n - n, n - 1), payloads_sent=lambda p: p - 1),
    # Every device to every other at once; 4 bytes travel as 8, with the number of the step. Beyond the limit they cost
    # more than is saved.
    "fused": ExchangePattern(
        num_exchanges=1,
        rounds=_one_round,
        payloads_sent=lambda p: 2 * (p - 1),
        is_collective=False,
        max_elements=1 << 19,
    ),
    # Every device to the next: one hop of a ring.
    "neighbour": ExchangePattern(num_exchanges=1, rounds=_one_round, payloads_sent=lambda p: 1),
    # The same, half of the payload to the next device and half to the previous one.
    "both_ways": ExchangePattern(num_exchanges=1, rounds=_one_round, payloads_sent=lambda p: 1),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlphaBeta:
    """One line of the alpha-beta model: microseconds of a launch, and bytes per second that a device sends."""

    alpha_us: float
    bytes_per_s: float

    def __post_init__(self):
        _check(self.alpha_us >= 0 and self.bytes_per_s > 0, f"alpha_us and bytes_per_s must be positive, got {self}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExchangeCost:
    """Cost of one exchange over one class of links.

    Attributes:
      round_us: the latency of each message that waits for another.
      lines: the cheapest holds for each size, because NCCL chooses protocol and channels by the size.
    """

    round_us: float
    lines: tuple[AlphaBeta, ...]

    def __post_init__(self):
        _check(self.round_us >= 0 and len(self.lines) > 0, f"round_us and lines must be there, got {self}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkClass:
    """The links inside a node, or across nodes.

    Attributes:
      source: origin of the numbers, in a few words; begins with "measured" or "assumed".
      costs: name of an exchange (`EXCHANGES`) -> its cost. An exchange without an entry cannot run over these links.
    """

    source: str
    costs: Mapping[str, ExchangeCost]

    def __post_init__(self):
        unknown = sorted(set(self.costs) - set(EXCHANGES))
        _check(not unknown, f"costs must be of the exchanges {tuple(EXCHANGES)}, got {unknown}")

    @property
    def is_measured(self) -> bool:
        """True where the costs of these links are measurements."""
        return self.source.startswith("measured")


# A datasheet and another's model, not measurements. 400 Gbit/s for each GPU, as in the paper's cluster (section 6). The
# latencies are NCCL 2.28's for a network (src/graph/tuning.cc), with its protocol for small messages: 6.6 us for a
# launch, 2.7 us per message of a ring, 5 us of a tree.
ASSUMED_NETWORK = LinkClass(
    source="assumed: InfiniBand NDR, 400 Gbit/s per GPU, latencies as NCCL's source code has them; not measured",
    costs={
        "allreduce": ExchangeCost(round_us=5.0, lines=(AlphaBeta(alpha_us=6.6, bytes_per_s=50e9),)),
        "gather": ExchangeCost(round_us=2.7, lines=(AlphaBeta(alpha_us=6.6, bytes_per_s=50e9),)),
        "neighbour": ExchangeCost(round_us=2.7, lines=(AlphaBeta(alpha_us=6.6, bytes_per_s=50e9),)),
    },
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Parameters of a machine: `tree_attn.cost.predict` predicts times from them, `tree_attn.cost.limits` has limits.

    Attributes:
      device_kind: `jax.Device.device_kind`, e.g. "NVIDIA H200".
      gpus_per_node: devices that the links of `node` join.
      memory_bytes: of one device.
      read_bytes_per_s: rate at which local attention reads keys and values; predictions use it.
      local_us: time of a step beside reading and exchanging: launches, merges, waiting for the slowest device.
      collective_us: time that a reduction over one mesh axis by NCCL's collectives adds to theirs: packing the state
        before, merging after, and waiting for its peers. Each axis pays it; an exchange by a kernel of ours does not.
      node, network: the links inside a node, and across nodes.
      fitted_devices: the most devices of any row that the numbers were fitted to; 0 for a machine by its datasheet.
        None: `gpus_per_node`. Predictions for more are extrapolated (`tree_attn.cost.ranges`).
      provenance: method, place and time of the measurement; free form. "fitted_rows", where it is there, has the lines
        of the results files that the numbers were fitted to.
    """

    device_kind: str
    gpus_per_node: int
    memory_bytes: int
    read_bytes_per_s: float
    local_us: float
    collective_us: float
    node: LinkClass
    network: LinkClass = ASSUMED_NETWORK
    fitted_devices: int | None = None
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        is_count = isinstance(self.gpus_per_node, int) and self.gpus_per_node >= 1
        _check(is_count, f"gpus_per_node must be at least 1, got {self.gpus_per_node!r}")
        _check(
            self.memory_bytes > 0 and self.read_bytes_per_s > 0, "memory_bytes and read_bytes_per_s must be positive"
        )
        _check(self.local_us >= 0 and self.collective_us >= 0, "local_us and collective_us must not be negative")

    def links(self, size: int, stride: int = 1) -> LinkClass:
        """Returns the slowest links between `size` devices, `stride` apart when they are counted node by node."""
        return self.node if self._split(size, stride)[1] == 1 else self.network

    def exchange_us(self, exchange: str, payload_bytes: float, size: int, stride: int = 1) -> float:
        """Returns the time of one reduction by `exchange` among `size` devices, each with `payload_bytes`.

        One device takes no time.

        Raises:
          ValueError: `exchange` is not one of `EXCHANGES`.
          NotImplementedError: its cost over these links is unknown, or it cannot run there.

        Example:
          >>> round(load("NVIDIA H200").exchange_us("gather", 8256, size=4), 1)
          8.7
        """
        _check(exchange in EXCHANGES, f"exchange must be one of {tuple(EXCHANGES)}, got {exchange!r}")
        if size == 1:
            return 0.0
        pattern, split = EXCHANGES[exchange], self._split(size, stride)
        latency_us = 0.0
        # Waits add up over both classes of links; the launch is one, and the slower links bound the rate.
        for links, devices, rounds in zip((self.node, self.network), split, pattern.rounds(*split)):
            if devices > 1:
                if exchange not in links.costs:
                    raise NotImplementedError(f"no cost of {exchange!r} is known over links {links.source}")
                latency_us += pattern.num_exchanges * rounds * links.costs[exchange].round_us
        sent = pattern.payloads_sent(size) * payload_bytes
        lines = self.links(size, stride).costs[exchange].lines
        return latency_us + min(pattern.num_exchanges * line.alpha_us + sent / line.bytes_per_s * 1e6 for line in lines)

    def knows(self, exchange: str, size: int, stride: int = 1) -> bool:
        """Returns whether `exchange_us` knows the cost of an exchange among `size` devices, `stride` apart."""
        links = zip((self.node, self.network), self._split(size, stride))
        return all(exchange in link.costs for link, devices in links if devices > 1)

    def _split(self, size: int, stride: int) -> tuple[int, int]:
        """Returns how many of `size` devices, `stride` apart, one node holds, and the number of nodes."""
        inside = min(size, max(1, self.gpus_per_node // stride))
        return inside, -(-size // inside)


def load(device_kind: str) -> Machine | None:
    """Returns the package's machine with this `device_kind`; None if it has none.

    Example:
      >>> load("NVIDIA H200").gpus_per_node
      8
    """
    return _shipped().get(device_kind)


def device_kinds() -> tuple[str, ...]:
    """Returns the device kinds that the package has parameters of."""
    return tuple(_shipped())


def read(path: str | os.PathLike) -> Machine:
    """Reads a machine from a JSON file that `write` made. Without "network", the file means `ASSUMED_NETWORK`.

    Raises:
      ValueError: the file does not describe a machine; names the file and what is wrong.
    """
    try:
        return _from_json(json.loads(pathlib.Path(path).read_text()))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} does not describe a machine: {type(error).__name__}: {error}") from error


def write(machine: Machine, path: str | os.PathLike) -> None:
    """Writes a machine as JSON; an assumed network and unknown rates are left out."""
    fields = {name: value for name, value in dataclasses.asdict(machine).items() if value is not None}
    if not machine.network.is_measured:
        del fields["network"]
    pathlib.Path(path).write_text(json.dumps(fields, indent=1, allow_nan=False) + "\n")


@functools.cache
def _shipped() -> dict[str, Machine]:
    machines = [read(path) for path in sorted(FOLDER.glob("*.json"))]
    return {machine.device_kind: machine for machine in machines}


def _from_json(fields: dict[str, Any]) -> Machine:
    links = {name: _links_from_json(**fields[name]) for name in ("node", "network") if name in fields}
    return Machine(**(fields | links))


def _links_from_json(source: str, costs: dict[str, dict[str, Any]]) -> LinkClass:
    lines = {name: tuple(AlphaBeta(**line) for line in cost["lines"]) for name, cost in costs.items()}
    return LinkClass(
        source=source, costs={name: ExchangeCost(**(costs[name] | {"lines": lines[name]})) for name in costs}
    )
