"""Predictions of a ring's rotations, against sums done by hand."""

import dataclasses

import pytest
from fake_machine import make_machine

from tree_attn.cost import machine, rotation
from tree_attn.cost.machine import AlphaBeta, ExchangeCost
from tree_attn.cost.rotation import Hop, Pass, added_us, fastest, joined_bytes, predict_hop, predict_rotations

H200 = machine.load("NVIDIA H200")


def ring_of(num_bytes, attention_us=0.0, num_shards=4, **more):
    return Pass(num_shards=num_shards, key_value_bytes=num_bytes, attention_us=attention_us, **more)


def test_what_transfers_add_and_what_copies_do():
    """A copy of 1 MB, read and written at 1 TB/s, takes 2 us."""
    added = lambda name, attention, beside_us=10.0, waited_us=0.0: added_us(
        name, ring_of(1e6, attention), Hop(beside_us=beside_us, waited_us=waited_us), read_bytes_per_s=1e12
    )
    assert added("one_way", 4.0) == 3 * 6 and added("two_way", 4.0) == 2 + 3 * 6
    assert added("joint", 4.0) == 2 * 2 + 6 + 2 * 6
    assert added("one_way", 11.0) == 0 and added("joint", 11.0) == pytest.approx(2 * 2 + 2 * 2)
    assert added("joint", 9.0) == pytest.approx(2 * 2 + 1 + 2 * 2), "a copy is longer than what is seen of a transfer"
    assert added("one_way", 11.0, beside_us=5.0, waited_us=7.0) == 3 * 7
    alone = ring_of(1e6, num_shards=1)
    assert added_us("joint", alone, Hop(beside_us=10.0), read_bytes_per_s=1e12) == 0


def test_arrays_that_are_not_joined_and_directions_follow_each_other():
    here, one = make_machine(), make_machine().exchange_us
    hop = lambda name, joined=float("inf"), at=here: predict_hop(name, ring_of(4e6, joined_bytes=joined), at)
    assert hop("one_way") == hop("joint") == Hop(beside_us=one("neighbour", 4e6, 4))
    half, quarter = one("neighbour", 2e6, 4), one("neighbour", 1e6, 4)
    assert hop("one_way", 3e6) == Hop(beside_us=half, waited_us=half)
    assert hop("two_way", 3e6) == Hop(beside_us=half, waited_us=half), "a direction has half of the bytes"
    assert hop("two_way", 1e6) == Hop(beside_us=quarter, waited_us=3 * quarter)
    with pytest.raises(ValueError, match="rotation must be one of 'one_way', 'joint', 'two_way', got 'star'"):
        hop("star")


def test_both_directions_cost_what_was_measured_or_nothing_more_on_a_torus():
    here, one = make_machine(), make_machine().exchange_us
    torus = dataclasses.replace(here, device_kind="TPU v5p")
    both = ExchangeCost(round_us=0.0, lines=(AlphaBeta(alpha_us=5.0, bytes_per_s=1e12),))
    measured = dataclasses.replace(here.node, costs=here.node.costs | {"both_ways": both})
    hop = lambda at, num_shards=4: predict_hop("two_way", ring_of(4e6, num_shards=num_shards), at)
    assert hop(torus) == Hop(beside_us=2 * one("neighbour", 1e6, 4))
    assert predict_hop("one_way", ring_of(4e6), torus) == Hop(beside_us=2 * one("neighbour", 2e6, 4))
    found = hop(dataclasses.replace(here, node=measured))
    assert (found.beside_us, found.waited_us) == (pytest.approx(5 + 2), pytest.approx(5 + 2))
    assert hop(dataclasses.replace(torus, node=measured)).beside_us == pytest.approx(2 * (5 + 2))
    across = hop(dataclasses.replace(here, node=measured), num_shards=8)
    assert across.beside_us == one("neighbour", 2e6, 8), "of the network nothing is known"


def test_one_array_where_two_would_not_run_beside_the_attention():
    choice = lambda num_bytes, attention_us, **more: fastest(
        predict_rotations(ring_of(num_bytes, attention_us, **more), H200)
    )
    assert choice(2e6, 5.0) == choice(2e8, 5000.0) == "one_way", "XLA joins them, and copies nothing"
    assert choice(2e8, 5000.0, joined_bytes=1e6) == "joint"
    assert choice(2e8, 45.0, joined_bytes=1e6) == "one_way", "there is little to run beside"
    torus = dataclasses.replace(H200, device_kind="TPU v5p")
    times = predict_rotations(ring_of(1e9, 250.0), torus)
    assert fastest(times) == "two_way" and list(times) == list(rotation.ROTATIONS)
    assert set(predict_rotations(ring_of(1e6), torus, ("one_way", "joint"))) == {"one_way", "joint"}


def test_the_environment_says_what_xla_joins(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert joined_bytes() == 32 * 2**20
    monkeypatch.setenv("XLA_FLAGS", f"--a=1 {rotation.JOIN_FLAG}=77 --b=2")
    assert joined_bytes() == 77
