"""The rotation that the rates of bare transfers favour."""

import pytest

from tree_attn import make_mesh
from tree_attn.commands.compare import report, transfers
from tree_attn.cost.step import DecodeStep
from tree_attn.measure import links


def step_of(num_keys=81_920, num_kv_heads=8):
    sizes = dict(batch=1, num_heads=8, head_dim=128, dtype="bfloat16", n_devices=2)
    return DecodeStep(num_keys=num_keys, num_kv_heads=num_kv_heads, **sizes)


@pytest.mark.parametrize(
    "rates, step, device_kind, expected",
    [
        ((300.0, 310.0, 305.0), step_of(), "NVIDIA H200", "one_way"),  # the copies of one array cost more
        ((150.0, 310.0, 205.0), step_of(), "NVIDIA H200", "joint"),
        ((150.0, 310.0, 205.0), step_of(), "unheard of", "two_way"),
        ((150.0, 310.0, 205.0), step_of(num_kv_heads=1), "unheard of", "one_way"),
        ((5000.0, 5000.0, 9000.0), step_of(), "NVIDIA H200", "one_way"),  # all are hidden by the attention
    ],
)
def test_the_rotation_is_chosen_by_the_rates(rates, step, device_kind, expected, monkeypatch):
    def rate(mesh, num_bytes, *, both_ways):
        whole = step.key_value_bytes_per_device
        return rates[2] if both_ways else rates[{whole // 2: 0, whole: 1}[num_bytes]]

    monkeypatch.setattr(links, "neighbour_gb_per_s", rate)
    found = transfers.measure(make_mesh({"seq": 2}), [step], device_kind=device_kind)
    assert found.rotation == {step: expected}
    assert found.one_way() == {step: rates[0]}
    assert found.of_row(step, expected)["neighbour_gb_per_s"] == found.gb_per_s[step][expected]
    emulated = transfers.measure(make_mesh({"seq": 2}), [step], ["two_way"])
    assert emulated.rotation == {step: "one_way"} and set(emulated.gb_per_s[step]) == {"one_way", "two_way"}


def test_the_report_names_the_rotation_and_its_share_of_the_fastest_transfers():
    row = dict(
        strategy="ring_overlapped", reduction=None, rotation="two_way", n_devices=2, num_keys=1000, sent_gb_per_s=290.0,
        transfers_gb_per_s={"one_way": 300.0, "two_way": 310.0}, hardware="2 x NVIDIA H200",
    )  # fmt: skip
    (sentence,) = report._rotations([row, row | {"strategy": "ring_two_way"}])
    assert sentence == (
        "ring overlapped over 1,000 keys sends two way at 290 GB/s, 0.94 of the fastest bare transfers "
        "(one way 300 GB/s, two way 310 GB/s)."
    )
