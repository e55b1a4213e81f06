"""The clock that does not count the time in which its process was suspended."""

from tree_attn.cluster.clock import AwakeClock


def test_a_jump_does_not_count_and_what_follows_does():
    reading = [100.0]
    clock = AwakeClock(longest_gap_s=3.0, read=lambda: reading[0])
    began = clock.now()
    for gap, expected in ((1.0, 1.0), (3.0, 4.0), (42.0, 4.0), (2.0, 6.0), (0.0, 6.0), (3600.0, 6.0), (1.0, 7.0)):
        reading[0] += gap
        assert clock.now() - began == expected
