"""Fitting the cost model: parameters come back from times that they made."""

import json
import pathlib

import pytest
from abacus import cost, make_machine

from tree_attn import make_mesh
from tree_attn.commands.doctor import calibrate
from tree_attn.commands.doctor.calibrate import COLLECTIVES, Point
from tree_attn.cost.machine import AlphaBeta, LinkClass

RESULTS = pathlib.Path(__file__).parents[2] / "docs" / "results"

# NCCL's collectives share what they cost over a level of links, and the first of a step takes 100 us more.
NODE, NETWORK = cost(7, 2, 2e9), cost(17, 19, 2e8)
ABACUS = make_machine()
SHARED = make_machine(
    node=LinkClass(source="measured: by hand", costs=dict.fromkeys(calibrate.COLLECTIVES, NODE)),
    network=LinkClass(source="measured: by hand", costs=dict.fromkeys(calibrate.COLLECTIVES, NETWORK)),
)


def points(machine, kind: str, sizes: tuple[int, ...], stride: int = 1, beside_us: float = 0.0) -> list[Point]:
    us = lambda size, num_bytes: beside_us + machine.exchange_us(kind, num_bytes, size, stride)
    return [
        Point(kind=kind, size=size, payload_bytes=num_bytes, us=us(size, num_bytes))
        for size in sizes
        for num_bytes in (4_000, 1_000_000)
    ]


def collectives(sizes: tuple[int, ...], stride: int = 1) -> list[Point]:
    of_kind = lambda kind: points(SHARED, kind, sizes, stride, beside_us=SHARED.collective_us)
    return [*of_kind("allreduce"), *of_kind("gather")]


def assert_cost(found, expected):
    (line,), (expected_line,) = found.lines, expected.lines
    assert (found.round_us, line.alpha_us, line.bytes_per_s) == pytest.approx(
        (expected.round_us, expected_line.alpha_us, expected_line.bytes_per_s), rel=1e-6
    )


def test_two_sizes_of_groups_tell_everything():
    measured = {"device": collectives((2, 4)), "node": collectives((2, 4), stride=4)}
    collective_us, found = calibrate.fit_collectives(measured)
    assert collective_us == pytest.approx(SHARED.collective_us, rel=1e-6)
    assert_cost(found["device"], NODE)
    assert_cost(found["node"], NETWORK)


def test_with_one_size_of_groups_the_launch_has_the_latency_too():
    """A launch of a gather of four has 3 messages that wait, one of an all-reduce 6: it gets what both make of it."""
    collective_us, found = calibrate.fit_collectives({"device": collectives((4,))})
    assert found["device"].round_us == 0
    for point in collectives((4,)):
        how = calibrate.EXCHANGES[point.kind]
        us = how.num_exchanges * found["device"].lines[0].alpha_us
        us += how.payloads_sent(4) * point.payload_bytes / found["device"].lines[0].bytes_per_s * 1e6
        assert collective_us + us == pytest.approx(point.us, rel=1e-6)


def test_without_collectives_there_is_nothing_to_fit():
    assert calibrate.fit_collectives({"device": points(ABACUS, "fused", (2,))}) == (0.0, {})


def test_a_kernel_of_ours_is_fitted_by_itself():
    measured = points(ABACUS, "fused", (2, 4))
    found = make_machine(node=LinkClass(source="", costs={"fused": calibrate.fit(measured, is_across=False)}))
    for point in measured:
        assert found.exchange_us("fused", point.payload_bytes, point.size) == pytest.approx(point.us, rel=1e-6)


def test_rows_of_h200s_are_explained_within_a_tenth():
    """Of steps of 80,000 keys on two and four GPUs, docs/results/reduce_*; payloads of 8 kB, so rates are not in it."""
    measured = []
    for size, folder in ((2, "reduce_2xh200/bench_reduce"), (4, "reduce_4xh200/steps")):
        rows = [json.loads(line) for line in (RESULTS / f"{folder}.jsonl").read_text().splitlines()]
        us = {row["reduction"]: row["us_median"] for row in rows if row.get("keys_per_device") == 80_000}
        measured += [
            Point(kind=kind, size=size, payload_bytes=2064 * 4, us=us[kind] - us["none"]) for kind in COLLECTIVES
        ]
    collective_us, found = calibrate.fit_collectives({"device": measured})
    for point in measured:
        fitted, how = found["device"], calibrate.EXCHANGES[point.kind]
        us = how.num_exchanges * (fitted.lines[0].alpha_us + fitted.round_us * how.rounds(point.size, 1)[0])
        us += how.payloads_sent(point.size) * point.payload_bytes / fitted.lines[0].bytes_per_s * 1e6
        assert collective_us + us == pytest.approx(point.us, rel=0.1)


def test_where_pairs_cannot_meet_in_a_kernel_all_still_can(monkeypatch):
    """As of one process with four GPUs: "fused" is among all of them, or not at all."""

    def step_us(mesh, axis, kind, num_rows):
        if kind == "fused" and mesh.shape.get("group", 1) > 1:
            raise NotImplementedError
        return {None: 100.0, "fused": 105.0}.get(kind, 110.0)

    monkeypatch.setattr(calibrate, "_step_us", step_us)
    monkeypatch.setattr(calibrate, "neighbour_gb_per_s", lambda *args, **how: 100.0)
    found = calibrate._points(make_mesh({"device": 4, "node": 1}), "device")
    assert {(point.size, point.us) for point in found if point.kind == "fused"} == {(4, 5.0)}
    assert {(point.size, point.us) for point in found if point.kind in COLLECTIVES} == {(2, 10.0), (4, 10.0)}


def test_attention_is_timed_over_keys_and_values_that_are_two_arrays(monkeypatch):
    """Of one array in both places a GPU reads half from its cache, so that memory looks faster than it is."""
    timed = []
    monkeypatch.setattr(calibrate, "_median_us", lambda mesh, fn, *arrays: timed.append(arrays) or float(len(timed)))
    mesh = make_mesh({"device": 2, "node": 1})
    calibrate._local_attention(mesh)
    calibrate._step_us(mesh, "device", "gather", 8)
    assert len(timed) == 3
    for _, key, value in timed:
        assert key.shape == value.shape and key is not value


def test_noise_makes_nothing_negative():
    falling = [
        Point(kind="gather", size=2, payload_bytes=num_bytes, us=us) for num_bytes, us in ((4_000, 9.0), (10**6, 8.0))
    ]
    fitted = calibrate.fit(falling, is_across=False)
    assert fitted.lines[0].alpha_us > 0 and fitted.lines[0].bytes_per_s == calibrate.MOST_BYTES_PER_S
    assert calibrate.lines(falling) == (AlphaBeta(alpha_us=9.0, bytes_per_s=calibrate.MOST_BYTES_PER_S),)


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
