"""Predictions of a ring's rotations, against sums done by hand."""

import dataclasses

import pytest
from fake_machine import make_machine

from tree_attn.cost import machine, rotation
from tree_attn.cost.machine import AlphaBeta, ExchangeCost
from tree_attn.cost.rotation import Pass, added_us, fastest, predict_rotations, transfer_us

H200 = machine.load("NVIDIA H200")


def ring_of(num_bytes, attention_us=0.0, num_shards=4):
    return Pass(num_shards=num_shards, key_value_bytes=num_bytes, attention_us=attention_us)


def test_what_transfers_add_and_the_copies_of_one_array():
    """A copy of 1 MB, read and written at 1 TB/s, takes 2 us."""
    added = lambda name, attention: added_us(name, ring_of(1e6, attention), transfer_us=10.0, read_bytes_per_s=1e12)
    assert added("one_way", 4.0) == added("two_way", 4.0) == 3 * 6
    assert added("joint", 4.0) == 2 * 2 + 6 + 2 * 6
    assert added("one_way", 11.0) == 0 and added("joint", 11.0) == pytest.approx(2 * 2 + 2 * 2)
    assert added("joint", 9.0) == pytest.approx(2 * 2 + 1 + 2 * 2), "a copy is longer than what is seen of a transfer"
    alone = ring_of(1e6, num_shards=1)
    assert added_us("joint", alone, transfer_us=10.0, read_bytes_per_s=1e12) == 0


def test_both_directions_cost_what_was_measured_or_what_the_links_are_known_to_carry():
    here, ring, one = make_machine(), ring_of(4e6), make_machine().exchange_us
    assert transfer_us("one_way", ring, here) == 2 * one("neighbour", 2e6, 4)
    assert transfer_us("joint", ring, here) == one("neighbour", 4e6, 4)
    assert transfer_us("two_way", ring, here) == 4 * one("neighbour", 1e6, 4), "a switch"
    torus = dataclasses.replace(here, device_kind="TPU v5p")
    assert transfer_us("two_way", ring, torus) == 2 * one("neighbour", 1e6, 4)
    both = ExchangeCost(round_us=0.0, lines=(AlphaBeta(alpha_us=5.0, bytes_per_s=1e12),))
    node = dataclasses.replace(here.node, costs=here.node.costs | {"both_ways": both})
    measured = dataclasses.replace(here, node=node)
    assert transfer_us("two_way", ring, measured) == pytest.approx(2 * (5 + 2))
    across = dataclasses.replace(ring, num_shards=8)
    assert transfer_us("two_way", across, measured) == 4 * one("neighbour", 1e6, 8), "of the network nothing is known"
    with pytest.raises(ValueError, match="rotation must be one of 'one_way', 'joint', 'two_way', got 'star'"):
        transfer_us("star", ring, here)


def test_one_array_where_launches_count_and_two_where_bytes_do():
    choice = lambda num_bytes, attention_us: fastest(predict_rotations(ring_of(num_bytes, attention_us), H200))
    assert choice(2e6, 5.0) == "joint" and choice(1e9, 250.0) == "one_way"
    assert choice(2e6, 100.0) == "one_way", "the attention hides two transfers, and not the copies"
    torus = dataclasses.replace(H200, device_kind="TPU v5p")
    assert fastest(predict_rotations(ring_of(1e9, 250.0), torus)) == "two_way"
    assert set(predict_rotations(ring_of(1e6), torus, ("one_way", "joint"))) == {"one_way", "joint"}
    assert rotation.ROTATIONS[0] == "one_way", "of equals the first"
