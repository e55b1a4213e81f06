"""Machines by their datasheets: marked as such, scaled from the one that was measured, and never taken for it."""

import re

import pytest

from tree_attn.cost import datasheets, machine

H200 = machine.load("NVIDIA H200")


def test_rates_are_the_datasheets_times_what_an_h200_reaches():
    h100 = datasheets.load("H100")
    assert h100.read_bytes_per_s == pytest.approx(3.35e12 * H200.read_bytes_per_s / 4.8e12)
    assert (h100.memory_bytes, h100.local_us) == (80e9, H200.local_us)
    assert h100.node.costs == H200.node.costs  # the same links
    a100 = datasheets.load("nvidia a100-sxm4-80gb")
    for name, cost in a100.node.costs.items():
        for line, measured in zip(cost.lines, H200.node.costs[name].lines, strict=True):
            assert line.alpha_us == measured.alpha_us
            assert line.bytes_per_s == pytest.approx(measured.bytes_per_s * 300 / 450)


ALL = ("H100", "A100", "A100 40GB", "B200", "L40S", "RTX 4090", "RTX 5090", "TPU v5e", "TPU v5p", "TPU v6e")


@pytest.mark.parametrize("name", ALL)
def test_each_is_found_by_its_names_and_says_that_it_was_not_measured(name):
    found = datasheets.load(name.lower().replace(" ", "-"))
    assert found == datasheets.load(name) == datasheets.load(found.device_kind)
    assert set(datasheets.names()) == set(ALL)
    assert not found.node.is_measured and "not measured" in found.node.source and not found.network.is_measured
    assert ("fused" in found.node.costs) == (name == "H100")
    assert machine.load(found.device_kind) is None  # no program here chooses by it


def test_the_measured_one_and_unknown_ones_have_none():
    assert datasheets.load("H200") is datasheets.load("abacus") is None
    assert "H200" not in datasheets.names()


def test_rates_are_the_datasheets():
    assert datasheets.rates("NVIDIA H200") == {"read_bytes_per_s": 4.8e12, "product_flops_per_s": 989.5e12}
    assert datasheets.rates("h100")["read_bytes_per_s"] == 3.35e12
    with pytest.raises(KeyError, match="Abacus"):
        datasheets.rates("Abacus")


@pytest.mark.parametrize(
    "name, gb, gb_per_s, tflops, link_gb_per_s",
    [
        ("A100", 80, 2039, 312, 300),
        ("A100 80GB", 80, 2039, 312, 300),
        ("NVIDIA A100-SXM4-40GB", 40, 1555, 312, 300),
        ("RTX 4090", 24, 1008, 165.2, 32),
        ("B200", 180, 7700, 2250, 900),
        ("RTX 5090", 32, 1792, 209.5, 64),
        ("TPU v5 lite", 16, 819, 197, 50),
        ("TPU v6e", 32, 1638, 918, 100),
    ],
)
def test_the_figures_are_those_of_the_documents(name, gb, gb_per_s, tflops, link_gb_per_s):
    assert datasheets.load(name).memory_bytes == gb * 1e9
    assert datasheets.rates(name) == {"read_bytes_per_s": gb_per_s * 1e9, "product_flops_per_s": tflops * 1e12}
    assert f", {link_gb_per_s} GB/s each way" in datasheets.load(name).node.source
    # What a link sends is half of the two directions that vendors add up; a white paper has no rate of PCI Express.
    documents = datasheets.sources(name)
    assert set(documents) == set(datasheets.CONSTANTS)
    assert all(
        re.match("(NVIDIA's|Google Cloud's|the PCI Express [45].0) ", document) for document in documents.values()
    )
    with pytest.raises(KeyError, match="Abacus"):
        datasheets.sources("Abacus")
