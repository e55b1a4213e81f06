"""Rank 0's view of all ranks, with a clock of the test's own: who is late, who is stuck, who is cut off from whom."""

import pytest

from tree_attn.cluster.progress import Limits, Progress, Report

LIMITS = Limits(stage_s=60.0, silence_s=30.0, step_s=300.0)
STAGES = ("connecting", "starting", "meeting")
BEAT_S = LIMITS.beat_s


def name_of(rank: int) -> str:
    return f"rank {rank} on n{rank}"


def after(now_s: float, *reports: Report) -> list[tuple[int, str]]:
    """Returns the faults at `now_s`, and three beats later, of ranks that reported once, at 0."""
    progress = Progress(range(len(reports)), STAGES, LIMITS, now_s=0.0)
    for rank, report in enumerate(reports):
        progress.note(rank, report, 0.0)
    assert progress.faults(0.0, name_of) == []
    return progress.faults(now_s, name_of) or progress.faults(now_s + 3 * BEAT_S, name_of)


def test_a_rank_that_is_late_is_named_with_its_stage():
    reports = (Report(2), Report(1), Report(3))
    assert after(50.0, *reports) == []
    assert after(61.0, *reports) == [(1, "rank 1 on n1: did not come through starting in 60 s")]


def test_steps_that_end_nowhere_and_a_rank_that_is_behind():
    def steps(*numbers):
        return [Report(3, number) for number in numbers]

    assert after(290.0, *steps(7, 7, 7)) == []
    assert after(301.0, *steps(7, 7, 7)) == [(0, "no rank has ended a step for 300 s: all are at step 7")]
    ((rank, text),) = after(301.0, *steps(7, 8, 6))
    assert rank == 2
    assert text == "rank 2 on n2: no step ended for 300 s: it is at step 6, and others are at step 8"


@pytest.mark.parametrize("steps", [None, 0])
def test_before_the_first_step_and_outside_of_loops_nothing_is_limited(steps):
    """A program is compiled before its first step ends, which takes minutes."""
    assert after(9999.0, Report(3, steps), Report(3, steps)) == []


def test_a_rank_that_goes_on_is_not_stuck():
    progress = Progress(range(2), STAGES, LIMITS, now_s=0.0)
    for number in range(1, 6):
        for rank in range(2):
            progress.note(rank, Report(3, number), 290.0 * number)
        assert progress.faults(290.0 * number, name_of) == []


def test_a_later_step_may_take_as_long_as_the_first_with_its_compilation():
    """A prompt that takes a free place in the batch is compiled for and read between two steps."""
    progress = Progress(range(2), STAGES, LIMITS, now_s=0.0)
    for now, number in ((0.0, 0), (400.0, 1), (401.0, 2)):
        for rank in range(2):
            progress.note(rank, Report(3, number), now)
    assert progress.faults(401.0 + 1200.0, name_of) == []
    assert progress.faults(401.0 + 1201.0, name_of) == [(0, "no rank has ended a step for 1200 s: all are at step 2")]


CUT = "do not hear each other for 30 s, and rank 0 hears both"


def test_a_pair_that_is_cut_is_named_once_the_word_of_both_is_there():
    one_sided = (Report(3), Report(3), Report(3, silent=[3]), Report(3))
    assert after(40.0, *one_sided) == [(2, f"rank 2 on n2 and rank 3 on n3 {CUT}")]
    several = (Report(3), Report(3, silent=[2, 3]), Report(3, silent=[1]), Report(3, silent=[1]))
    assert after(40.0, *several) == [(1, f"rank 1 on n1 and rank 2 on n2, rank 3 on n3 {CUT}")]


def test_ranks_that_go_on_ending_steps_have_lost_their_datagrams_alone():
    """A firewall may begin to drop datagrams; what the ranks compute with passes."""
    progress = Progress(range(3), STAGES, LIMITS, now_s=0.0)
    for number in range(1, 100):
        for rank in range(3):
            progress.note(rank, Report(3, number, silent=[2] if rank == 1 else []), float(number))
        assert progress.faults(float(number), name_of) == []
    silent_s = LIMITS.silence_s / 2 + 1
    assert progress.faults(99.0 + silent_s, name_of) == []
    assert progress.faults(99.0 + silent_s + 2 * BEAT_S, name_of) == [(1, f"rank 1 on n1 and rank 2 on n2 {CUT}")]


def test_a_word_that_is_taken_back_is_no_cut():
    progress = Progress(range(3), STAGES, LIMITS, now_s=0.0)
    for now, silent in ((40.0, [2]), (40.0 + BEAT_S, []), (40.0 + 2 * BEAT_S, [2])):
        for rank in range(3):
            progress.note(rank, Report(3, silent=silent if rank == 1 else []), now)
        assert progress.faults(now, name_of) == []


def test_ranks_that_have_left_are_not_cut_off():
    progress = Progress(range(3), STAGES, LIMITS, now_s=0.0)
    for rank in range(3):
        progress.note(rank, Report(3, silent=[2] if rank == 1 else []), 0.0)
    progress.forget(2)
    progress.note(2, Report(3), 1.0)  # its last sign of life
    assert progress.faults(40.0, name_of) == progress.faults(50.0, name_of) == []


def test_ranks_that_never_heard_each_other_are_cut_off_only_while_they_start():
    """A site may let no datagrams pass: then all ranks miss all, and a collective shows that the links are well."""

    def reports(stage):
        return (Report(stage), Report(stage, never_heard=[2]), Report(stage, never_heard=[1]))

    assert after(40.0, *reports(2)) == [(1, f"rank 1 on n1 and rank 2 on n2 {CUT}")]
    assert after(40.0, *reports(3)) == []
    no_datagrams = [Report(2, never_heard=[other for other in range(3) if other != rank]) for rank in range(3)]
    assert after(40.0, *no_datagrams) == []
