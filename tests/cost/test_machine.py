"""Costs of exchanges: the model against sums done by hand, the shipped files, and files that describe no machine."""

import dataclasses
import json

import pytest
from fake_machine import cost, make_machine

from tree_attn.cost import machine
from tree_attn.cost.machine import AlphaBeta, ExchangeCost, LinkClass


@pytest.mark.parametrize(
    "kind, size, stride, expected_us",
    [
        # 4000 bytes; alpha, rounds, and what is sent at the level's rate.
        ("gather", 1, 1, 0),
        ("gather", 4, 1, 7 + 3 * 2 + 3 * 4000 / 2e9 * 1e6),
        ("gather", 3, 4, 17 + 2 * 19 + 2 * 4000 / 2e8 * 1e6),  # one device of each of three nodes
        ("gather", 12, 1, 17 + 9 * 2 + 2 * 19 + 11 * 4000 / 2e8 * 1e6),  # a ring crosses 2 of its 11 links
        ("allreduce", 4, 1, 3 * (5 + 6 * 1) + 2 * 3 / 4 * 4000 / 1e9 * 1e6),
        ("allreduce", 16, 1, 3 * (11 + 6 * 1 + 4 * 13) + 2 * 15 / 16 * 4000 / 1e8 * 1e6),
        ("fused", 4, 1, 3 + 0.5 + 2 * 3 * 4000 / 4e9 * 1e6),
        ("fused", 2, 2, 3 + 0.5 + 2 * 4000 / 4e9 * 1e6),  # stride 2, but in one node
        ("neighbour", 4, 1, 1 + 1 + 4000 / 1e9 * 1e6),
        ("neighbour", 8, 1, 23 + 29 + 4000 / 3e8 * 1e6),  # the slow link bounds everyone
    ],
)
def test_exchange_by_hand(kind, size, stride, expected_us):
    assert make_machine().exchange_us(kind, 4000, size, stride) == pytest.approx(expected_us)


def test_the_cheapest_line_holds():
    seconds = make_machine().exchange_us("neighbour", 4e6, 4)
    assert seconds == pytest.approx(1 + 501 + 4e6 / 2e9 * 1e6)


def test_what_cannot_run_over_a_link_says_so():
    with pytest.raises(NotImplementedError, match="no cost of 'fused' is known over links measured: by hand too"):
        make_machine().exchange_us("fused", 4000, 8)
    with pytest.raises(ValueError, match=r"exchange must be one of .* got 'pigeon'"):
        make_machine().exchange_us("pigeon", 4000, 8)


def test_written_and_read_again(tmp_path):
    for one in (make_machine(), machine.load("NVIDIA H200")):
        machine.write(one, tmp_path / "machine.json")
        assert machine.read(tmp_path / "machine.json") == one


def test_a_file_without_a_network_has_the_assumed_one(tmp_path):
    machine.write(make_machine(network=machine.ASSUMED_NETWORK), tmp_path / "machine.json")
    assert "network" not in json.loads((tmp_path / "machine.json").read_text())
    network = machine.read(tmp_path / "machine.json").network
    assert network is machine.ASSUMED_NETWORK
    assert not network.is_measured and "not measured" in network.source


def test_shipped_machines_are_those_of_their_names():
    assert machine.load("NVIDIA H200").device_kind == "NVIDIA H200"
    assert machine.load("cpu") is None


@pytest.mark.parametrize(
    "content, message",
    [
        ("[1]", "does not describe a machine"),
        ("{}", "missing .* required keyword-only argument"),
        ('{"node": {"source": "measured", "costs": {"pigeon": {"round_us": 0, "lines": []}}}}', "lines must be there"),
        ("{", "does not describe a machine: JSONDecodeError"),
    ],
)
def test_a_file_that_is_no_machine(content, message, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        machine.read(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: AlphaBeta(alpha_us=-1, bytes_per_s=1), "alpha_us and bytes_per_s must be positive"),
        (lambda: ExchangeCost(round_us=0, lines=()), "round_us and lines must be there"),
        (
            lambda: LinkClass(source="", costs={"pigeon": cost(1, 1, 1)}),
            r"costs must be of the exchanges .* got \['pigeon'\]",
        ),
        (lambda: dataclasses.replace(make_machine(), gpus_per_node=0), "gpus_per_node must be at least 1, got 0"),
        (lambda: dataclasses.replace(make_machine(), memory_bytes=0), "memory_bytes and read_bytes_per_s must be"),
        (lambda: dataclasses.replace(make_machine(), local_us=-1), "local_us and collective_us must not be negative"),
    ],
)
def test_bad_parameters_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
