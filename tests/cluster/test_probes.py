"""Datagrams between ranks, over real sockets of this machine."""

import time

import pytest

from tree_attn.cluster import join
from tree_attn.cluster.probes import Probes, partners
from tree_attn.cluster.rollcall import Members


def joined(count: int, tokens: str = "") -> list[Probes]:
    """Returns the probes of `count` ranks on loopback; rank i has the word `tokens[i]`."""
    probes = [Probes() for _ in range(count)]
    for rank, one in enumerate(probes):
        addresses = {other: ("127.0.0.1", probes[other].port) for other in range(count) if other != rank}
        members = Members({}, {}, None, 0, "127.0.0.1", (tokens or "a" * count)[rank], addresses)
        one.begin(rank, ["n"] * count, members, now_s=0.0)
    return probes


def exchange(probes: list[Probes], now_s: float) -> None:
    """Lets all send, and all read what was sent."""
    for one in probes:
        one.exchange(now_s)
    time.sleep(0.02)
    for one in probes:
        one.exchange(now_s)


def test_ranks_hear_each_other_until_one_falls_silent():
    probes = joined(3)
    exchange(probes, 1.0)
    assert [one.silent(10.0, 10.0) for one in probes] == [[], [], []]
    exchange(probes[:2], 11.5)
    exchange(probes[:2], 23.0)  # without what the third had sent before
    assert [one.silent(23.0, 10.0) for one in probes[:2]] == [[2], [2]]
    assert [one.never_heard(23.0, 10.0) for one in probes] == [[], [], []]


def test_a_rank_that_was_never_heard_is_another_matter():
    probes = joined(2)
    probes[0].exchange(1.0)
    assert probes[0].silent(50.0, 10.0) == []
    assert (probes[0].never_heard(9.0, 10.0), probes[0].never_heard(11.0, 10.0)) == ([], [1])


def test_a_join_that_fails_leaves_no_socket(monkeypatch):
    probes = Probes()
    monkeypatch.setattr(join, "Probes", lambda: probes)
    monkeypatch.setattr(join.rollcall, "report_problem", lambda *_: None)  # which waits for ranks that there are not
    with pytest.raises(ValueError, match="n_devices must be a multiple of num_processes=2, got 3"):
        join.initialize("localhost:1", 2, 1, n_devices=3, timeout_s=0.1)
    with pytest.raises(OSError):
        probes.exchange(1.0)


def test_datagrams_of_another_run_are_not_heard():
    probes = joined(3, tokens="aab")
    exchange(probes, 1.0)
    assert [one.never_heard(11.0, 10.0) for one in probes] == [[2], [2], [0, 1]]


def test_in_a_large_run_one_rank_of_each_node_watches_the_others():
    hosts = [f"n{rank // 8}" for rank in range(256)]
    assert partners(0, hosts) == set(range(8, 256, 8)) and partners(8, hosts) == set(range(0, 256, 8)) - {8}
    assert partners(9, hosts) == set()
    assert partners(1, hosts[:16]) == set(range(16)) - {1}


def test_in_the_largest_runs_a_rank_hears_no_more_than_its_socket_holds():
    hosts = [f"n{rank // 2}" for rank in range(1200)]
    of_rank = {rank: partners(rank, hosts) for rank in range(1200)}
    assert of_rank[0] == set(range(2, 1200, 2))
    assert max(len(of_rank[rank]) for rank in range(1, 1200)) == 129
    assert all(rank in of_rank[other] for rank, others in of_rank.items() for other in others - {0})
    assert all(0 in of_rank[rank] for rank in range(2, 1200, 2))
