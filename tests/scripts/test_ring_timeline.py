"""The timeline of a ring: what counts as a transfer, and what of it is hidden."""

import pytest
import ring_timeline

EVENTS = [(0.0, 4.0, "fmha"), (1.0, 6.0, "ncclDevKernel_SendRecv"), (3.0, 5.0, "MemcpyP2P"), (5.5, 9.0, "fusion")]


def test_of_two_transfers_that_meet_the_union_counts():
    assert ring_timeline.overlap(EVENTS) == (5.0, 3.5)
    assert ring_timeline.overlap(EVENTS[1:2]) == (5.0, 0.0)
    assert ring_timeline.overlap([]) == (0.0, 0.0)


def test_times_are_in_us_from_the_first_event_of_all_devices():
    events = {"GPU:0": [(3000.0, 4000.0, "a")], "GPU:1": [(2000.0, 2500.0, "b")], "GPU:2": []}
    found = ring_timeline.from_first(events)
    assert found == {"GPU:0": [(1.0, 2.0, "a")], "GPU:1": [(0.0, 0.5, "b")], "GPU:2": []}


def test_it_draws(tmp_path):
    pytest.importorskip("matplotlib")
    ring_timeline.draw({"/device:GPU:0": EVENTS, "/device:GPU:1": []}, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
