"""Real processes that sum over Gloo for ever, until a fault of one of them: the others end, and name it.

Each rank prints "running" once it is in its loop, so that only the limits themselves take time.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

import pytest

from tree_attn.cluster.watchdog import LOST_STATUS

SILENCE_S = 3
ENDS_S = 20  # far more than any limit set here, and less than any of JAX's own
STARTS_S = 60

LOOP = """
    import os, sys, jax, jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec as P
    from tree_attn import initialize, make_mesh

    launch = initialize(n_devices=2 * int(os.environ["WORLD_SIZE"]))
    mesh = make_mesh(("all",))
    ones = jax.jit(lambda: jnp.ones(jax.device_count()), out_shardings=NamedSharding(mesh, P("all")))()
    add = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "all"), mesh=mesh, in_specs=P("all"), out_specs=P()))
    for turn in range(10**9):
        jax.block_until_ready(add(ones))
        if turn == 0:
            print("running", flush=True)
        if turn == 50:
"""
FOREVER = "            pass"
RAISES = "            assert launch.process_id != 1, 'rank 1 has had enough'"
ENDS = "            sys.exit(0)"


def environment(rank: int, count: int, port: int) -> dict[str, str]:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    limits = {"TREE_ATTN_HEARTBEAT_S": SILENCE_S, "TREE_ATTN_TIMEOUT_S": STARTS_S}
    settings = {name: str(value) for name, value in (place | where | limits).items()}
    runs = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return os.environ | settings | runs | {"PYTHONPATH": os.pathsep.join(sys.path)}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def running(command: list[str], count: int, ranks=None, **extra: str) -> Iterator[list[subprocess.Popen]]:
    """Starts ranks of a command, and ends all of them afterwards."""
    port = free_port()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen(command, env=environment(rank, count, port) | extra, **pipes)
        for rank in (range(count) if ranks is None else ranks)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def in_loop(at_turn_50: str, count: int = 3) -> contextlib.AbstractContextManager[list[subprocess.Popen]]:
    return running([sys.executable, "-c", textwrap.dedent(LOOP + at_turn_50)], count)


def wait_until_running(processes: list[subprocess.Popen]) -> None:
    deadline = time.monotonic() + STARTS_S
    for process in processes:
        os.set_blocking(process.stdout.fileno(), False)
        while "running" not in (process.stdout.readline() or ""):
            assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
            time.sleep(0.02)
        os.set_blocking(process.stdout.fileno(), True)


def endings(processes: list[subprocess.Popen], limit_s: float = ENDS_S) -> list[tuple[int, str]]:
    """Returns status and stderr of each; all must end within the limit."""
    deadline = time.monotonic() + limit_s
    ended = []
    for process in processes:
        _, errors = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        ended.append((process.returncode, errors))
    return ended


@pytest.mark.parametrize(
    "count, victim, what, words",
    [
        (3, 1, signal.SIGKILL, "connection closed"),
        (3, 0, signal.SIGKILL, "connection closed"),
        (2, 1, signal.SIGKILL, "connection closed"),  # rank 0 is left alone, and must still say so
        (3, 2, signal.SIGSTOP, f"silent for {SILENCE_S} s"),
        (2, 0, signal.SIGSTOP, f"silent for {SILENCE_S} s"),
        (2, 1, signal.SIGTERM, "connection closed"),
    ],
    ids=["killed", "rank 0 killed", "the only other killed", "stopped", "rank 0 stopped", "terminated"],
)
def test_a_rank_that_is_lost_ends_the_others(count, victim, what, words):
    with in_loop(FOREVER, count) as processes:
        wait_until_running(processes)
        processes[victim].send_signal(what)
        others = [process for rank, process in enumerate(processes) if rank != victim]
        host = socket.gethostname()
        for status, errors in endings(others):
            assert status == LOST_STATUS, errors
            assert f"tree-attn: rank {victim} on {host}: {words}. rank " in errors
            assert "Check failure stack trace" not in errors  # JAX's own last words


def test_an_exception_ends_all_ranks_in_its_own_words():
    with in_loop(RAISES) as processes:
        (first, failed, last) = endings(processes, STARTS_S)
    assert failed[0] == 1 and "Traceback" in failed[1] and "rank 1 has had enough" in failed[1]
    for status, errors in (first, last):
        assert status == LOST_STATUS and "Traceback" not in errors
        assert f"rank 1 on {socket.gethostname()} failed: AssertionError: rank 1 has had enough. rank " in errors


def test_a_normal_end_is_no_fault():
    with in_loop(ENDS) as processes:
        assert endings(processes, STARTS_S) == [(0, "")] * 3


def test_a_rank_that_never_starts():
    command = [sys.executable, "-m", "tree_attn.cli", "doctor", "--distributed"]
    with running(command, 3, ranks=(0, 2), TREE_ATTN_TIMEOUT_S="2") as processes:
        for status, errors in endings(processes, STARTS_S):
            assert status == 2
            assert errors.startswith("tree-attn doctor: error: after 2 s, 1 of 3 ranks are missing: rank 1 ")
            assert errors.count("\n") == 1


def test_the_doctor_examines_processes_that_are_well():
    command = [sys.executable, "-m", "tree_attn.cli", "doctor", "--distributed", "--devices", "4", "--json"]
    with running(command, 2) as processes:
        outputs = [process.communicate(timeout=STARTS_S) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], outputs
    report = json.loads(outputs[0][0].splitlines()[-1])
    assert report["launch"]["hosts"] == [socket.gethostname()] * 2 and report["launch"]["source"] == "torchrun"
    assert [(level["axis"], level["size"]) for level in report["levels"]] == [("device", 4)]
    assert "launch" not in outputs[1][0]


def test_a_rank_that_is_stuck_while_it_starts():
    """Rank 1 has answered the roll call and sends its signs of life, and never comes to the first collective."""
    code = """
        import os, time, jax
        from tree_attn.cluster import join as distributed
        if os.environ["RANK"] == "1":
            distributed._first_collective = lambda: time.sleep(600)
        distributed.initialize()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with running(command, 2, TREE_ATTN_TIMEOUT_S="5") as processes:
        for status, errors in endings(processes, STARTS_S):
            assert status == LOST_STATUS
            assert f"rank 1 on {socket.gethostname()}: did not come through the first collective in 5 s" in errors


def test_all_ranks_print_the_error_of_one_rank_of_a_command(tmp_path):
    """Rank 1 alone raises an error that the command reports as one line."""
    code = """
        import os, sys
        from tree_attn import cli
        from tree_attn.measure import links
        def fails(*args, **kwargs):
            raise OSError("no more of it")
        if os.environ["RANK"] == "1":
            links.neighbour_gb_per_s = fails
        sys.exit(cli.main(["compare", "--devices", "2", "--keys", "8", "--no-plots", "--out", sys.argv[1]]))
    """
    with running([sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], 2) as processes:
        first, failed = endings(processes, STARTS_S)
    line = f"tree-attn compare: rank 1 on {socket.gethostname()}: error: no more of it"
    assert failed == (2, line + "\n")
    assert first[0] == LOST_STATUS and line in first[1]
