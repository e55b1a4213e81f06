"""The faults of ranks, and which of them the verdict names: a cause before its consequences."""

import dataclasses
import math

from tree_attn.cluster.clock import AwakeClock

# Rank 0 waits for further faults before its verdict. A cause is sent at once: a launcher may end all ranks when one has
# ended. An error that may be a consequence waits for its cause.
_CAUSE_SETTLES_S, CONSEQUENCE_SETTLES_S = 0.05, 0.5


@dataclasses.dataclass(frozen=True)
class Fault:
    """A rank that cannot go on.

    order: 0: the rank is lost; 1: it failed by itself; 2: it failed, likely because another one is lost
    """

    rank: int
    text: str
    order: int


class Faults:
    """The faults found so far, at most one per rank, and the time at which the verdict on them is due."""

    def __init__(self, silence_s: float, clock: AwakeClock):
        self._silence_s, self._clock = silence_s, clock
        self._by_rank: dict[int, Fault] = {}
        self._settled_s = math.inf

    def __len__(self) -> int:
        return len(self._by_rank)

    def add(self, fault: Fault) -> None:
        """Adds a fault; of one rank its failure outweighs its end, which says less, and a cause a consequence."""
        known = self._by_rank.get(fault.rank)
        if known is None or known.order == 2 > fault.order:
            self._by_rank[fault.rank] = fault
            settles_s = CONSEQUENCE_SETTLES_S if fault.order == 2 else _CAUSE_SETTLES_S
            self._settled_s = min(self._settled_s, self._clock.now() + settles_s)

    def due_s(self, num_peers: int) -> float:
        """Returns when the verdict is due; consequences alone wait for their causes to fall silent."""
        has_cause = any(fault.order < 2 for fault in self._by_rank.values())
        all_failed = len(self._by_rank) > num_peers  # no rank is left to be the cause
        return self._settled_s + (0 if has_cause or all_failed else self._silence_s)

    def all(self) -> list[Fault]:
        """Returns all faults, in the order in which their ranks were found."""
        return list(self._by_rank.values())

    def gravest(self) -> list[Fault]:
        """Returns the faults of the lowest order: the causes, as far as they are known."""
        lowest = min(fault.order for fault in self._by_rank.values())
        return [fault for fault in self._by_rank.values() if fault.order == lowest]
