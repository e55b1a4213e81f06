"""The progress of every rank: the stages of starting up, then steps of work; and the ranks that are behind."""

import dataclasses
from collections.abc import Callable, Sequence

_LOW_MEMORY = 0.1  # what is left a second before the kernel kills
_TIMES_LONGEST = 3  # a later step may read a longer prompt, and wait for its compilation, as the first one did


@dataclasses.dataclass(frozen=True)
class Limits:
    """Seconds that ranks may take.

    stage_s: any rank for a stage of starting up, once all others have come through it
    silence_s: between two signs of life, before a rank counts as lost
    step_s: for a step of work, once one has ended; more where the longest so far, the first included, took long
    """

    stage_s: float
    silence_s: float
    step_s: float

    @property
    def beat_s(self) -> float:
        """Seconds between two signs of life."""
        return min(1.0, self.silence_s / 5)


@dataclasses.dataclass(frozen=True)
class Report:
    """The progress of one rank, and the partners that it does not hear.

    stage: the number of stages that it has come through
    steps: the steps of work that it has ended, or None where it is not in a loop of them
    silent, never_heard: see `Probes`
    free_share: the part of its memory that is left, see `memory.free_share`
    """

    stage: int = 0
    steps: int | None = None
    silent: Sequence[int] = ()
    never_heard: Sequence[int] = ()
    free_share: float | None = None


class Progress:
    """The latest report of every rank, as rank 0 has it."""

    def __init__(self, ranks: Sequence[int], stages: Sequence[str], limits: Limits, now_s: float):
        """Begins with ranks that have come through no stage; `stages` are their names."""
        self._stages, self._limits = stages, limits
        self._reports = dict.fromkeys(ranks, Report())
        self._stepped_s = dict.fromkeys(ranks, now_s)
        self._longest_step_s = 0.0
        self._all_reached, self._stage_began_s = 0, now_s
        self._cut_since_s: dict[tuple[int, int], float] = {}

    def note(self, rank: int, report: Report, now_s: float) -> None:
        """Takes the latest report of a rank."""
        if rank not in self._reports:
            return
        last = self._reports[rank].steps
        if report.steps != last:
            if report.steps and last is not None:
                self._longest_step_s = max(self._longest_step_s, now_s - self._stepped_s[rank])
            self._stepped_s[rank] = now_s
        self._reports[rank] = report

    def forget(self, rank: int) -> None:
        """Drops a rank that has ended, or comes to its end in good order: it may be busy taking itself down."""
        self._reports.pop(rank, None)

    def low_memory(self, rank: int) -> str:
        """Returns a remark on a rank that has ended without a word, "" where it had memory left."""
        free_share = self._reports.get(rank, Report()).free_share
        if free_share is None or free_share > _LOW_MEMORY:
            return ""
        return f" when {free_share:.0%} of its memory was left: the kernel has likely killed it for want of memory"

    def faults(self, now_s: float, name_of: Callable[[int], str]) -> list[tuple[int, str]]:
        """Returns a rank and a reason for each that cannot go on, [] where all is well."""
        return self._late(now_s, name_of) or self._stuck(now_s, name_of) or self._cuts(now_s, name_of)

    def _late(self, now_s: float, name_of: Callable[[int], str]) -> list[tuple[int, str]]:
        """Returns the ranks that are behind in starting up, where all have waited for them for too long."""
        last = min(report.stage for report in self._reports.values())
        if last != self._all_reached:
            self._all_reached, self._stage_began_s = last, now_s
        if last >= len(self._stages) or now_s - self._stage_began_s <= self._limits.stage_s:
            return []
        reason = f"did not come through {self._stages[last]} in {self._limits.stage_s:g} s"
        return [(rank, f"{name_of(rank)}: {reason}") for rank, one in self._reports.items() if one.stage == last]

    def _stuck(self, now_s: float, name_of: Callable[[int], str]) -> list[tuple[int, str]]:
        """Returns the ranks that are behind in a loop of steps; rank 0 where none is before the others."""
        steps = {rank: report.steps for rank, report in self._reports.items() if report.steps}
        limit_s = max(self._limits.step_s, _TIMES_LONGEST * self._longest_step_s)
        if not any(now_s - self._stepped_s[rank] > limit_s for rank in steps):
            return []
        fewest, furthest = min(steps.values()), max(steps.values())
        if fewest == furthest:
            return [(0, f"no rank has ended a step for {limit_s:g} s: all are at step {fewest}")]
        reason = f"no step ended for {limit_s:g} s: it is at step {fewest}, and others are at step {furthest}"
        return [(rank, f"{name_of(rank)}: {reason}") for rank, number in steps.items() if number == fewest]

    def _cuts(self, now_s: float, name_of: Callable[[int], str]) -> list[tuple[int, str]]:
        """Returns the ranks that do not hear each other, where rank 0 hears both."""
        pairs = {
            (min(rank, other), max(rank, other))
            for rank, report in self._reports.items()
            for other in (*report.silent, *report.never_heard)
            if rank and other and other in self._reports and self._is_cut(rank, other, now_s)
        }
        self._cut_since_s = {pair: self._cut_since_s.get(pair, now_s) for pair in pairs}
        # The word of the other rank of a pair, and of other pairs, is on its way.
        if not pairs or now_s - min(self._cut_since_s.values()) < 2 * self._limits.beat_s:
            return []
        by_first: dict[int, list[str]] = {}
        for one, other in sorted(pairs):
            by_first.setdefault(one, []).append(name_of(other))
        reason = f"do not hear each other for {self._limits.silence_s:g} s, and rank 0 hears both"
        return [(one, f"{name_of(one)} and {', '.join(others)} {reason}") for one, others in by_first.items()]

    def _is_cut(self, rank: int, other: int, now_s: float) -> bool:
        """Returns whether two ranks are cut off from each other.

        Where both go on ending steps, only their datagrams are lost, as by a firewall. Ranks that never heard each
        other are cut off only while they start: a site may let no datagrams pass, and later they have met in a
        collective. Both must have heard rank 0, which shows that datagrams do pass.
        """
        one, two = self._reports[rank], self._reports[other]
        if other in one.silent:
            stepped_s = min(self._stepped_s[rank], self._stepped_s[other])
            return not (one.steps and two.steps) or now_s - stepped_s > self._limits.silence_s / 2
        met = self._all_reached >= len(self._stages)
        both = other in one.never_heard and rank in two.never_heard
        return both and not met and 0 not in (*one.never_heard, *two.never_heard)
