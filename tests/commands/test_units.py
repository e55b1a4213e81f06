"""Numbers in the tables of commands: one rule of units, and no exponents."""

import pytest

from tree_attn.commands import units


@pytest.mark.parametrize(
    "num_bytes, written",
    [(None, "-"), (0, "0 B"), (999, "999 B"), (999.6, "1 kB"), (1310, "1.31 kB"), (999_499, "999 kB"),
     (999_500, "1 MB"), (999_999_999, "1 GB"), (83_886_080, "83.9 MB"), (2e15, "2 PB")],
)  # fmt: skip
def test_sizes(num_bytes, written):
    assert units.size(num_bytes) == written


@pytest.mark.parametrize(
    "microseconds, written",
    [(None, "-"), (0.0, "0.00 us"), (9.996, "10.0 us"), (35.21, "35.2 us"), (999.96, "1.00 ms"), (1420, "1.42 ms"),
     (999_960, "1.00 s"), (2_500_000, "2.50 s"), (4.2e9, "4200.0 s")],
)  # fmt: skip
def test_times(microseconds, written):
    assert units.time(microseconds) == written


@pytest.mark.parametrize(
    "keys, written",
    [(1, "1"), (700, "700"), (1500, "1.5k"), (8192, "8k"), (16_384, "16k"), (50_001, "50k"), (81_920, "80k"),
     (640_000, "640k"), (999_999, "1000k"), (1_048_576, "1M"), (1_280_000, "1.28M"), (32_768.0, "32k")],
)  # fmt: skip
def test_lengths(keys, written):
    assert units.length(keys) == written


def test_numbers_have_no_exponents():
    numbers = [units.number(x) for x in (0.0, 0.03151, 1.4, 99.96, 100.4, 5665.5, -1234.0)]
    assert numbers == ["0", "0.0315", "1.4", "100", "100", "5,666", "-1,234"]
    assert [units.number(x, 2) for x in (1.06, 9.96, 10.4, 109.8)] == ["1.1", "10", "10", "110"]


def test_rates():
    assert [units.rate(rate) for rate in (None, 349.6, 0.00131, 5_240.0)] == ["-", "350 GB/s", "1.31 MB/s", "5.24 TB/s"]


def test_ratios_and_counts():
    assert [units.times_as(ratio) for ratio in (1.34, 9.96, 14.4, 5665.5)] == ["1.3", "10", "14", "5,666"]
    assert [units.count(number, "device") for number in (0, 1, 8000)] == ["0 devices", "1 device", "8,000 devices"]
