"""The roll call over real sockets: a rank that does not fit ends it on every rank, in the same words, and soon."""

import concurrent.futures
import contextlib
import dataclasses
import json
import socket
import threading
import time

import pytest

from tree_attn.cluster import rollcall
from tree_attn.cluster.channel import Channel
from tree_attn.cluster.launch import Launch

LIMIT_S = 10  # for every error here; the roll call itself is given longer, so that it cannot be the one to end it
VERSIONS = {"python": "3.12.1", "jax": "0.11.2", "jaxlib": "0.11.2"}


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    """No rank comes late here."""
    monkeypatch.setattr(rollcall, "_GRACE_S", 1.0)
    monkeypatch.setattr(rollcall, "_WELCOME_S", 1.0)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def place(rank: int, num_processes: int, port: int, job: str | None = "SLURM job 1 step 0") -> Launch:
    """Two ranks on each node, in order."""
    return Launch(
        source="slurm",
        process_id=rank,
        num_processes=num_processes,
        node=f"n{rank // 2 + 1}",
        hosts=tuple(f"n{i // 2 + 1}" for i in range(num_processes)),
        coordinator_host="127.0.0.1",
        coordinator_port=port,
        job=job,
    )


def hello(launch: Launch, **changed) -> dict:
    facts = {"versions": VERSIONS, "platform": "cpu", "n_local_devices": 4, "gpus": [], "pid": 100 + launch.process_id}
    return rollcall.describe(launch, **facts) | changed


def outcome(launch: Launch, said: dict, timeout_s: float):
    try:
        return rollcall.hold(launch, said, timeout_s)
    except (ValueError, OSError) as error:
        return error


def call(launches, timeout_s: float = 30.0, **changed_last) -> list:
    """Returns the results of a roll call of these ranks, the last one with another `hello`; closes all connections."""
    said = [hello(launch) for launch in launches[:-1]] + [hello(launches[-1], **changed_last)]
    start = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(len(launches)) as pool:
        results = list(pool.map(outcome, launches, said, [timeout_s] * len(launches)))
    assert time.monotonic() - start < LIMIT_S
    for members in results:
        if isinstance(members, rollcall.Members):
            close(members)
    return results


def close(members: rollcall.Members) -> None:
    for channel in members.channels.values():
        channel.close()
    if members.listener:
        members.listener.close()


@pytest.fixture
def ranks():
    """Four launches that fit together."""
    port = free_port()
    return [place(rank, 4, port) for rank in range(4)]


def test_all_that_fit_begin_and_know_each_other(ranks):
    members = call(ranks)
    assert [one.hellos[3]["node"] for one in members] == ["n2"] * 4
    assert len({one.jax_port for one in members}) == 1
    assert [one.address for one in members] == ["127.0.0.1"] * 4
    assert set(members[0].channels) == {1, 2, 3} and set(members[3].channels) == {0}


@pytest.mark.parametrize(
    "changed, message",
    [
        (
            {"versions": VERSIONS | {"jax": "0.10.2"}},
            r"versions of jax: 0.11.2 in rank 0 on n1 .* 0.10.2 in rank 3 on n2",
        ),
        ({"rank": 1}, r"rank 1 is there twice: rank 1 on n\d \(pid 10[13]\) and rank 1 on n\d \(pid 10[13]\)"),
        ({"num_processes": 5}, r"agree on num_processes: 4 in rank 0 on n1 \(pid 100\), 5 in rank 3 on n2"),
        ({"n_local_devices": 3}, r"agree on n_local_devices: 4 in rank 0 on n1 .*, 3 in rank 3 on n2"),
        ({"platform": "gpu"}, r"agree on platform: cpu in rank 0 on n1 .*, gpu in rank 3 on n2 .*look for the driver"),
        ({"problem": "GPUs are hidden"}, r"rank 3 on n2 \(pid 103\) cannot take part: GPUs are hidden"),
    ],
    ids=["versions", "twice", "number", "devices", "platform", "its own problem"],
)
def test_ranks_that_do_not_fit_together(ranks, changed, message):
    errors = call(ranks, **changed)
    with pytest.raises(ValueError, match=message):
        raise errors[0]
    assert {type(error) for error in errors} == {ValueError}
    assert len({str(error) for error in errors}) == 1


def test_two_ranks_that_take_one_gpu():
    port = free_port()
    first, second = place(0, 2, port), place(1, 2, port)
    said = [hello(launch, gpus=["0000:1B:00.0"], platform="gpu") for launch in (first, second)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(outcome, (first, second), said, [30, 30]))
    assert all("rank 0 on n1 (pid 100) and rank 1 on n1 (pid 101) both take GPU 0000:1B" in str(one) for one in errors)


def test_ranks_that_are_missing_are_named_with_their_hosts(ranks):
    errors = call([ranks[0], ranks[2]], timeout_s=1.0)
    assert [type(error) for error in errors] == [TimeoutError] * 2
    for error in errors:
        assert "after 1 s, 2 of 4 ranks are missing: rank 1 on n1, rank 3 on n2." in str(error)


def test_rank_0_is_missing(ranks):
    (error,) = call(ranks[3:], timeout_s=1.0)
    assert isinstance(error, TimeoutError)
    assert "after 1 s, rank 0 on n1 is missing: rank 3 on n2 could not reach it at 127.0.0.1:" in str(error)


def test_a_rank_that_dies_in_the_roll_call(ranks):
    def die():
        channel = connect(ranks[0].coordinator_port)
        channel.send(**hello(ranks[1]), frame="hello")
        channel.close()

    with in_background(die):
        (error,) = call(ranks[:1])
    assert str(error) == "rank 1 on n1 (pid 101) ended before all ranks were there"


def test_two_jobs_on_one_port(ranks):
    """The job that was there goes on; the other one's rank gets its error at once."""
    stranger = place(1, 4, ranks[0].coordinator_port, job="SLURM job 2 step 0")
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        first = pool.submit(outcome, ranks[0], hello(ranks[0]), 30.0)
        error = pool.submit(outcome, stranger, hello(stranger), 30.0).result(LIMIT_S)
        others = [pool.submit(outcome, launch, hello(launch), 30.0) for launch in ranks[1:]]
        members = [future.result(LIMIT_S) for future in (first, *others)]
    assert "is used by two jobs at once: SLURM job 1 step 0 and SLURM job 2 step 0. Set TREE_ATTN_COORD" in str(error)
    assert all(isinstance(one, rollcall.Members) for one in members)
    for one in members:
        close(one)


def test_rank_0_reports_a_port_that_is_taken(ranks):
    with socket.create_server(("", ranks[0].coordinator_port)):
        (error,) = call(ranks[:1])
    port = ranks[0].coordinator_port
    assert f"rank 0 on n1 cannot listen on port {port} (Address already in use)" in str(error)
    assert "Set TREE_ATTN_COORDINATOR_PORT to a free port" in str(error)


@pytest.mark.parametrize(
    "says, reason", [(b"", "it said nothing for 1 s"), (b"HTTP/1.1 400\r\n\r\n", "does not speak")]
)
def test_another_program_on_the_port(ranks, says, reason):
    with socket.create_server(("127.0.0.1", ranks[1].coordinator_port)) as server:

        def serve():
            connection, _ = server.accept()
            connection.sendall(says)
            connections.append(connection)

        connections: list[socket.socket] = []
        with in_background(serve):
            (error,) = call(ranks[1:2])
        connections[0].close()
    assert isinstance(error, ValueError)
    assert "where rank 0 on n1 should, is another program: " in str(error) and reason in str(error)


def test_other_programs_that_connect_change_nothing(ranks):
    """Port scanners, health checks."""
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        first = pool.submit(outcome, ranks[0], hello(ranks[0]), 30.0)
        for words in (b"GET / HTTP/1.1\r\n\r\n", b'{"frame": "hello"}\n', b"[1]\n", b""):
            channel = connect(ranks[0].coordinator_port)
            channel.socket.sendall(words)
            channel.close()
        members = [first, *(pool.submit(outcome, launch, hello(launch), 30.0) for launch in ranks[1:])]
        results = [future.result(LIMIT_S) for future in members]
    assert all(isinstance(one, rollcall.Members) for one in results), results
    for one in results:
        close(one)


def test_frames_that_come_in_pieces_and_together():
    with socket.create_server(("127.0.0.1", 0)) as server:
        channel = Channel(socket.create_connection(server.getsockname()))
        right, _ = server.accept()
    lines = b"".join(json.dumps({"frame": name}).encode() + b"\n" for name in ("one", "two"))
    right.sendall(lines[:5])
    assert channel.receive() == [] and channel.wait(0.01) is None
    right.sendall(lines[5:])
    assert channel.wait(5) == {"frame": "one"} and channel.wait(5) == {"frame": "two"}
    right.close()
    assert channel.wait(5) is None and channel.lost == "connection closed"
    channel.close()


def test_a_launch_of_another_number_is_not_mistaken(ranks):
    """A rank of the same job that believes in fewer processes, first of all to come."""
    few = dataclasses.replace(ranks[1], num_processes=2)
    errors = call([ranks[0], few])
    assert all("agree on num_processes: 4 in rank 0 on n1 (pid 100), 2 in rank 1" in str(error) for error in errors)


def connect(port: int) -> Channel:
    """A connection to rank 0, which may be about to listen."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            return Channel(socket.create_connection(("127.0.0.1", port), timeout=1))
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@contextlib.contextmanager
def in_background(function):
    thread = threading.Thread(target=function)
    thread.start()
    yield
    thread.join(LIMIT_S)
    assert not thread.is_alive()
