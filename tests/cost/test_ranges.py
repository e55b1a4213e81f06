"""Ranges of predictions: none where all was measured, and wide enough for what was predicted blindly."""

import dataclasses

import fit_machine
import pytest
from fake_machine import make_machine
from steps import make_step

from tree_attn.commands.figures import rows as compared
from tree_attn.cost import datasheets, machine, predict
from tree_attn.cost.ranges import latency_range_us

H200 = machine.load("NVIDIA H200")


def test_no_range_where_everything_was_measured_on_as_many_devices():
    for n_devices in (1, 2):
        assert latency_range_us(make_step(n_devices=n_devices), "tree", "gather", machine=H200) is None
    known = make_machine()  # by its file: 4 GPUs a node, and both kinds of links
    assert latency_range_us(make_step(n_devices=4), "tree", "gather", machine=known) is None
    assert latency_range_us(make_step(n_devices=8), "tree", "gather", machine=known) is not None


def test_more_devices_widen_the_exchange_most():
    step = make_step(n_devices=8)
    low, high = latency_range_us(step, "tree", "gather", machine=H200)
    predicted = predict.predict_step(step, "tree", "gather", machine=H200)
    exchanged = predicted.latency_us - predicted.local_us
    assert low == pytest.approx(0.95 * predicted.local_us + 0.6 * exchanged)
    assert high == pytest.approx(1.05 * predicted.local_us + 1.7 * exchanged)
    assert latency_range_us(step, "tree", "gather", machine=dataclasses.replace(H200, fitted_devices=8)) is None


def test_a_datasheet_has_a_range_on_one_device_too():
    step = make_step(n_devices=1, num_keys=80_000)
    predicted = predict.predict_step(step, "tree", "gather", machine=datasheets.load("A100")).latency_us
    low, high = latency_range_us(step, "tree", "gather", machine=datasheets.load("A100"))
    assert (low, high) == pytest.approx((0.95 * predicted, 1.4 * predicted))


def test_assumed_links_across_nodes_have_the_widest():
    known = make_machine(network=machine.ASSUMED_NETWORK, fitted_devices=8)
    step, sizes = make_step(n_devices=8), (4, 2)
    options = dict(machine=known, axis_sizes=sizes)
    across = predict.predict_step(step, "tree", ("fused", "gather"), **options).exchanges_us[1]
    low, high = latency_range_us(step, "tree", ("fused", "gather"), **options)
    assert high - low == pytest.approx((2.5 - 0.4) * across)


def test_ranges_hold_what_was_predicted_blindly():
    """Steps on four and eight GPUs, one process each. NCCL sent the transfers of the other rings over few channels."""
    found = []
    for path in fit_machine.PREDICTED:
        for row in fit_machine.lines(path):
            if "strategy" not in row or row["error"] is not None or row["n_processes"] == 1:
                continue
            if row["strategy"] != "tree" and not fit_machine.is_spread(row):
                continue
            options = dict(machine=H200, axis_sizes=tuple(row["axis_sizes"]))
            low, high = latency_range_us(compared.step(row), row["strategy"], compared.reduction(row), **options)
            found.append(low <= row["latency_us_median"] <= high)
    assert len(found) == 30 and all(found)
