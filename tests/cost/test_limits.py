"""Limits of the hardware, by the peaks of datasheets."""

import functools

import pytest
from steps import make_step

from tree_attn.cost import limits


def test_limits():
    step = make_step()
    assert limits.read_limit_us(step, "NVIDIA H200") == pytest.approx(2 * 80_000 * 2048 * 2 / 4.8e12 * 1e6)
    assert limits.read_limit_us(step, "cpu") is None


def test_limits_are_the_datasheets_and_the_longer_one_counts():
    """Bytes and products take their maximum, never their sum: 4.8 TB/s and 989.5 TFLOP/s of an H200."""
    limit = functools.partial(limits.limit_us, "NVIDIA H200")
    assert limit(num_bytes=4.8e12) == limit(num_bytes=4.8e12, num_flops=989.5e12) == 1e6
    assert limit(num_bytes=1, num_flops=989.5e12) == 1e6
    assert limits.limit_us("cpu", num_bytes=1, num_flops=1) is None
