"""Calibration of the cost model: the steps that are timed, and the groups that devices form."""

import pytest

from tree_attn import make_mesh
from tree_attn.commands.doctor import calibrate
from tree_attn.commands.doctor.fitting import COLLECTIVES


def test_where_pairs_cannot_meet_in_a_kernel_all_still_can(monkeypatch):
    """In one process with four GPUs "fused" runs among all of them, or not at all."""

    def step_us(mesh, axis, exchange, num_rows):
        if exchange == "fused" and mesh.shape.get("group", 1) > 1:
            raise NotImplementedError
        return {None: 100.0, "fused": 105.0}.get(exchange, 110.0)

    monkeypatch.setattr(calibrate, "_step_us", step_us)
    monkeypatch.setattr(calibrate, "neighbour_gb_per_s", lambda *args, **options: 100.0)
    found = calibrate._points(make_mesh({"device": 4, "node": 1}), "device")
    assert {(point.size, point.us) for point in found if point.exchange == "fused"} == {(4, 5.0)}
    assert {(point.size, point.us) for point in found if point.exchange in COLLECTIVES} == {(2, 10.0), (4, 10.0)}


def test_attention_is_timed_over_keys_and_values_that_are_two_arrays(monkeypatch):
    """With one array in both places a GPU reads half from its cache, so that memory looks faster than it is."""
    timed = []
    monkeypatch.setattr(calibrate, "_median_us", lambda mesh, fn, *arrays: timed.append(arrays) or float(len(timed)))
    mesh = make_mesh({"device": 2, "node": 1})
    calibrate._local_attention(mesh)
    calibrate._step_us(mesh, "device", "gather", 8)
    assert len(timed) == 3
    for _, key, value in timed:
        assert key.shape == value.shape and key is not value


def test_one_device_has_no_links():
    with pytest.raises(ValueError, match="need at least 2 devices to be measured, got 1"):
        calibrate.measure_machine([None])
