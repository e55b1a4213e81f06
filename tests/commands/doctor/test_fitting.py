"""Fitting the cost model: parameters come back from times that were computed from them."""

import json
import pathlib

import pytest
from fake_machine import cost, make_machine

from tree_attn.commands.doctor import fitting
from tree_attn.commands.doctor.fitting import COLLECTIVES, Point
from tree_attn.cost.machine import EXCHANGES, AlphaBeta, LinkClass

RESULTS = pathlib.Path(__file__).parents[3] / "docs" / "results"

# NCCL's collectives have one cost over a class of links, and the first of a step takes 100 us more.
NODE, NETWORK = cost(7, 2, 2e9), cost(17, 19, 2e8)
ABACUS = make_machine()
SHARED = make_machine(
    node=LinkClass(source="measured: by hand", costs=dict.fromkeys(COLLECTIVES, NODE)),
    network=LinkClass(source="measured: by hand", costs=dict.fromkeys(COLLECTIVES, NETWORK)),
)


def points(machine, exchange: str, sizes: tuple[int, ...], stride: int = 1, beside_us: float = 0.0) -> list[Point]:
    us = lambda size, num_bytes: beside_us + machine.exchange_us(exchange, num_bytes, size, stride)
    return [
        Point(exchange=exchange, size=size, payload_bytes=num_bytes, us=us(size, num_bytes))
        for size in sizes
        for num_bytes in (4_000, 1_000_000)
    ]


def collectives(sizes: tuple[int, ...], stride: int = 1) -> list[Point]:
    of = lambda exchange: points(SHARED, exchange, sizes, stride, beside_us=SHARED.collective_us)
    return [*of("allreduce"), *of("gather")]


def assert_cost(found, expected):
    (line,), (expected_line,) = found.lines, expected.lines
    assert (found.round_us, line.alpha_us, line.bytes_per_s) == pytest.approx(
        (expected.round_us, expected_line.alpha_us, expected_line.bytes_per_s), rel=1e-6
    )


def test_two_sizes_of_groups_tell_everything():
    measured = {"device": collectives((2, 4)), "node": collectives((2, 4), stride=4)}
    collective_us, found = fitting.fit_collectives(measured)
    assert collective_us == pytest.approx(SHARED.collective_us, rel=1e-6)
    assert_cost(found["device"], NODE)
    assert_cost(found["node"], NETWORK)


def test_with_one_size_of_groups_the_launch_has_the_latency_too():
    """A launch of a gather among four has 3 messages that wait, one of an all-reduce 6: the fit is between the two."""
    collective_us, found = fitting.fit_collectives({"device": collectives((4,))})
    assert found["device"].round_us == 0
    for point in collectives((4,)):
        pattern = EXCHANGES[point.exchange]
        us = pattern.num_exchanges * found["device"].lines[0].alpha_us
        us += pattern.payloads_sent(4) * point.payload_bytes / found["device"].lines[0].bytes_per_s * 1e6
        assert collective_us + us == pytest.approx(point.us, rel=1e-6)


def test_a_known_latency_is_taken_out_of_the_launch_of_one_size_of_groups():
    collective_us, found = fitting.fit_collectives({"device": collectives((2,))}, round_us=NODE.round_us)
    assert collective_us == pytest.approx(SHARED.collective_us, rel=1e-6)
    assert_cost(found["device"], NODE)  # and so what larger groups cost is right
    _, found = fitting.fit_collectives({"device": collectives((2, 4))}, round_us=99.0)
    assert_cost(found["device"], NODE)  # two sizes tell it by themselves


def test_without_collectives_there_is_nothing_to_fit():
    assert fitting.fit_collectives({"device": points(ABACUS, "fused", (2,))}) == (0.0, {})


def test_a_kernel_of_ours_is_fitted_by_itself():
    measured = points(ABACUS, "fused", (2, 4))
    found = make_machine(node=LinkClass(source="", costs={"fused": fitting.fit_exchange(measured, is_across=False)}))
    for point in measured:
        assert found.exchange_us("fused", point.payload_bytes, point.size) == pytest.approx(point.us, rel=1e-6)


def test_rows_of_h200s_are_explained_within_a_tenth():
    """Steps of 80,000 keys on two and four GPUs, docs/results/reduce_*; with payloads of 8 kB rates do not matter."""
    measured = []
    for size, folder in ((2, "reduce_2xh200/bench_reduce"), (4, "reduce_4xh200/steps")):
        rows = [json.loads(line) for line in (RESULTS / f"{folder}.jsonl").read_text().splitlines()]
        us = {row["reduction"]: row["us_median"] for row in rows if row.get("keys_per_device") == 80_000}
        measured += [
            Point(exchange=exchange, size=size, payload_bytes=2064 * 4, us=us[exchange] - us["none"])
            for exchange in COLLECTIVES
        ]
    collective_us, found = fitting.fit_collectives({"device": measured})
    for point in measured:
        fitted, pattern = found["device"], EXCHANGES[point.exchange]
        us = pattern.num_exchanges * (fitted.lines[0].alpha_us + fitted.round_us * pattern.rounds(point.size, 1)[0])
        us += pattern.payloads_sent(point.size) * point.payload_bytes / fitted.lines[0].bytes_per_s * 1e6
        assert collective_us + us == pytest.approx(point.us, rel=0.1)


def test_noise_makes_nothing_negative():
    falling = [
        Point(exchange="gather", size=2, payload_bytes=num_bytes, us=us)
        for num_bytes, us in ((4_000, 9.0), (10**6, 8.0))
    ]
    fitted = fitting.fit_exchange(falling, is_across=False)
    assert fitted.lines[0].alpha_us > 0 and fitted.lines[0].bytes_per_s == fitting.MAX_BYTES_PER_S
    assert fitting.fit_transfers(falling) == (AlphaBeta(alpha_us=9.0, bytes_per_s=fitting.MAX_BYTES_PER_S),)


def test_lines_bend_where_larger_transfers_are_faster_and_pass_over_a_dent():
    measured = [
        Point(exchange="neighbour", size=2, payload_bytes=num_bytes, us=us)
        for num_bytes, us in ((0, 10.0), (10**6, 10.0), (10**8, 1010.0), (5 * 10**8, 2010.0))
    ]
    slow, fast = fitting.fit_transfers(measured)
    assert (slow.alpha_us, slow.bytes_per_s) == pytest.approx((10.0, 1e11))  # the second point is below
    assert (fast.alpha_us, fast.bytes_per_s) == pytest.approx((760.0, 4e11))
