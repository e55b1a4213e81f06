"""The facts that must be alike on all ranks, when they join (`misfit`) and before they begin (`Agreement`)."""

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

from tree_attn.cluster.channel import Channel
from tree_attn.cluster.launch import Launch

_log = logging.getLogger("tree_attn")
_PATIENCE_S = 60.0  # before rank 0 says whom it waits for
_NAMED = 4  # ranks of a group that an error names


def misfit(hellos: Mapping[int, dict], hello: dict) -> str | None:
    """Returns the reason why a rank cannot join those that are there, by rank; None where it can."""
    first, rank = hellos[0], hello["rank"]
    if hello["problem"]:
        return f"{name_of(hello)} cannot take part: {hello['problem']}"
    if hello["num_processes"] != first["num_processes"]:
        return _unlike("num_processes", hello, first, "start all with the same number")
    if rank in hellos:
        return (
            f"rank {rank} is there twice: {name_of(hellos[rank])} and {name_of(hello)}. Every process needs a "
            "process_id (SLURM_PROCID, RANK) of its own"
        )
    for package, version in first["versions"].items():
        if hello["versions"].get(package) != version:
            return (
                f"the ranks run different versions of {package}: {version} in {name_of(first)}, "
                f"{hello['versions'].get(package)} in {name_of(hello)}. Use one environment on all nodes"
            )
    settings = {rank: one.get("settings", {}) for rank, one in ((0, first), (rank, hello))}
    if reason := disagreement(settings, lambda rank: name_of(hellos[0] if rank == 0 else hello)):
        return reason
    if hello["platform"] != first["platform"]:
        return _unlike("platform", hello, first, "look for the driver and the JAX plugin where it is cpu")
    if hello["n_local_devices"] != first["n_local_devices"]:
        return _unlike("n_local_devices", hello, first, "every process must have as many devices as the others")
    for other in hellos.values():
        shared = sorted(set(other["gpus"]) & set(hello["gpus"])) if other["node"] == hello["node"] else []
        if shared:
            return (
                f"{name_of(other)} and {name_of(hello)} both take GPU {shared[0]}: every process needs GPUs of its own "
                "(local_device_ids, or let every task see all GPUs of its node)"
            )
    return None


def disagreement(facts: Mapping[int, Mapping[str, str]], name_of: Callable[[int], str]) -> str | None:
    """Returns the facts in which ranks differ, with the value of each, or None.

    Example:
      >>> disagreement({0: {"--seed": "0"}, 1: {"--seed": "1"}}, lambda rank: f"rank {rank}")
      'the ranks do not agree on --seed: 0 on rank 0, 1 on rank 1'
    """
    reasons = []
    for name in dict.fromkeys(name for one in facts.values() for name in one):
        groups: dict[str, list[int]] = {}
        for rank, one in facts.items():
            groups.setdefault(one.get(name, "absent"), []).append(rank)
        if len(groups) > 1:
            reasons.append(
                f"{name}: {', '.join(f'{value} on {_some(ranks, name_of)}' for value, ranks in groups.items())}"
            )
    return f"the ranks do not agree on {'; '.join(reasons)}" if reasons else None


class Agreement:
    """Rounds in which every rank gives its facts, and gets the error that all get where they differ."""

    def __init__(self, launch: Launch):
        """Begins with no round."""
        self._launch = launch
        self._condition = threading.Condition()
        self._number, self._is_over = 0, False
        self._proposals: list[tuple[int, Mapping[str, str]]] = []  # of this rank, to be sent
        self._facts: dict[int, dict[int, Mapping[str, str]]] = {}  # on rank 0, by round and rank
        self._results: dict[int, str | None] = {}

    def propose(self, facts: Mapping[str, str]) -> int:
        """Begins the next round with the facts of this rank; returns its number."""
        with self._condition:
            self._number += 1
            self._proposals.append((self._number, dict(facts)))
            return self._number

    def wait(self, number: int) -> str | None:
        """Returns the result of a round: an error, or None."""
        with self._condition:
            while not self._condition.wait_for(lambda: self._is_over or number in self._results, _PATIENCE_S):
                self._say_who_is_waited_for(number)
            return self._results.get(number, "all other ranks ended before all had agreed on what to run")

    def _say_who_is_waited_for(self, number: int) -> None:
        """Names the ranks without their facts; a rank may take long to fetch a model, so this is no error."""
        if self._launch.process_id == 0:
            there = self._facts.get(number, {})
            missing = [rank for rank in range(self._launch.num_processes) if rank not in there]
            _log.warning("rank 0 waits for %s to say what to run", _some(missing, self._launch.name_of))

    def close(self) -> None:
        """Ends all waits: no other rank is left."""
        with self._condition:
            self._is_over = True
            self._condition.notify_all()

    def take(self, rank: int, number: int, facts: Mapping[str, str]) -> None:
        """Takes the facts of a rank, on rank 0."""
        self._facts.setdefault(number, {})[rank] = facts

    def conclude(self, number: int, error: str | None) -> None:
        """Ends the wait for a round."""
        with self._condition:
            self._results[number] = error
            self._condition.notify_all()

    def pass_on(self, channels: Mapping[int, Channel], staying: Collection[int]) -> None:
        """Sends rank 0 the facts of this rank; on rank 0, sends all others the result of a round that is complete.

        Args:
          channels: to rank 0; on rank 0, to all others.
          staying: the other ranks that have not reported their end.
        """
        with self._condition:
            proposals, self._proposals = self._proposals, []
        for number, facts in proposals:
            if self._launch.process_id == 0:
                self.take(0, number, facts)
            elif 0 in channels:
                channels[0].send("facts", number=number, facts=facts)
        for number, facts in list(self._facts.items()):
            if set(staying) <= facts.keys() and 0 in facts:
                gone = set(range(self._launch.num_processes)) - facts.keys()
                del self._facts[number]
                self._announce(number, facts, gone, channels)

    def _announce(self, number: int, facts: Mapping, gone: Collection[int], channels: Mapping[int, Channel]) -> None:
        name_of = self._launch.name_of
        error = disagreement(dict(sorted(facts.items())), name_of)
        if gone:
            error = f"{_some(gone, name_of)} ended before all ranks had agreed on what to run"
        for channel in channels.values():
            channel.send("agreed", number=number, error=error)
        self.conclude(number, error)


def name_of(hello: Mapping[str, Any]) -> str:
    """Returns a rank, its node and its process, for messages: "rank 2 on n2 (pid 77)"."""
    return f"rank {hello['rank']} on {hello['node']} (pid {hello['pid']})"


def _unlike(name: str, hello: Mapping, first: Mapping, remedy: str) -> str:
    differ = f"{first[name]} in {name_of(first)}, {hello[name]} in {name_of(hello)}"
    return f"the ranks do not agree on {name}: {differ}; {remedy}"


def _some(ranks: Collection[int], name_of: Callable[[int], str]) -> str:
    """Returns the names of a few ranks, and the number of the others."""
    named = [name_of(rank) for rank in sorted(ranks)[:_NAMED]]
    more = len(ranks) - len(named)
    return " and ".join(named) + (f" and {more} more" if more else "")
