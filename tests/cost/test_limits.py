"""Limits of the hardware, from the rates in the machines' files."""

import pytest
from steps import make_step

from tree_attn.cost import limits, machine


def test_limits():
    step = make_step()
    assert limits.read_limit_us(step, "NVIDIA H200") == pytest.approx(2 * 80_000 * 2048 * 2 / 4.3e12 * 1e6)
    assert limits.read_limit_us(step, "cpu") is None


def test_limits_use_the_rate_that_committed_tables_name():
    """The tables of docs/results.md have limits at 4.3 TB/s; predictions use the kernel's own, higher rate."""
    h200 = machine.load("NVIDIA H200")
    assert (h200.copy_bytes_per_s, h200.read_bytes_per_s) == (4.3e12, 4.53e12)
    assert limits.memory_limit_us(4.3e12, "NVIDIA H200") == 1e6
    assert limits.products_limit_us(790e12, "NVIDIA H200") == 1e6
    assert limits.products_limit_us(1, "cpu") is None
