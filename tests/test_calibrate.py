"""Fitting the cost model: parameters come back from times that they made."""

import pytest
from abacus import make_machine

from tree_attn import calibrate
from tree_attn.calibrate import Point
from tree_attn.machine import Line

ABACUS = make_machine()


def points(kind: str, sizes: tuple[int, ...], stride: int = 1) -> list[Point]:
    return [
        Point(kind=kind, size=size, payload_bytes=num_bytes, us=ABACUS.exchange_us(kind, num_bytes, size, stride))
        for size in sizes
        for num_bytes in (4_000, 1_000_000)
    ]


@pytest.mark.parametrize("kind", ["allreduce", "gather"])
@pytest.mark.parametrize("level, stride", [("node", 1), ("network", 4)])
def test_two_sizes_of_groups_tell_everything(kind, level, stride):
    fitted = calibrate.fit(kind, points(kind, (2, 4), stride), is_across=level == "network")
    expected = getattr(ABACUS, level).costs[kind]
    assert fitted.round_us == pytest.approx(expected.round_us, rel=1e-6)
    assert fitted.lines[0].alpha_us == pytest.approx(expected.lines[0].alpha_us, rel=1e-6)
    assert fitted.lines[0].bytes_per_s == pytest.approx(expected.lines[0].bytes_per_s, rel=1e-6)


def test_with_one_size_of_groups_the_launch_has_the_latency_too():
    fitted = calibrate.fit("gather", points("gather", (4,)), is_across=False)
    assert fitted.round_us == 0
    assert fitted.lines[0].alpha_us == pytest.approx(7 + 3 * 2, rel=1e-6)


def test_noise_makes_nothing_negative():
    falling = [
        Point(kind="gather", size=2, payload_bytes=num_bytes, us=us) for num_bytes, us in ((4_000, 9.0), (10**6, 8.0))
    ]
    fitted = calibrate.fit("gather", falling, is_across=False)
    assert fitted.lines[0].alpha_us > 0 and fitted.lines[0].bytes_per_s == calibrate.MOST_BYTES_PER_S
    assert calibrate.lines(falling) == (Line(alpha_us=9.0, bytes_per_s=calibrate.MOST_BYTES_PER_S),)


def test_lines_bend_where_larger_transfers_are_faster_and_pass_over_a_dent():
    measured = [
        Point(kind="neighbour", size=2, payload_bytes=num_bytes, us=us)
        for num_bytes, us in ((0, 10.0), (10**6, 10.0), (10**8, 1010.0), (5 * 10**8, 2010.0))
    ]
    slow, fast = calibrate.lines(measured)
    assert (slow.alpha_us, slow.bytes_per_s) == pytest.approx((10.0, 1e11))  # the second point is below
    assert (fast.alpha_us, fast.bytes_per_s) == pytest.approx((760.0, 4e11))


def test_one_device_has_no_links():
    with pytest.raises(ValueError, match="need at least 2 devices to be measured, got 1"):
        calibrate.measure_machine([None])
