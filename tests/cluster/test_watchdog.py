"""Real processes that sum over Gloo for ever, until a fault of one of them: the others end, and name it.

Each rank prints "running" once it is in its loop, so that only the limits themselves take time.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest
from ranks import SILENCE_S, STARTS_S, endings, running

from tree_attn.cluster.ending import INTERRUPTED_STATUS, LOST_STATUS

LOOP = """
    import os, sys, time, jax, jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec as P
    from tree_attn import initialize, make_mesh

    launch = initialize(n_devices=2 * int(os.environ["WORLD_SIZE"]))
    mesh = make_mesh(("all",))
    ones = jax.jit(lambda: jnp.ones(jax.device_count()), out_shardings=NamedSharding(mesh, P("all")))()
    add = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "all"), mesh=mesh, in_specs=P("all"), out_specs=P()))
    for turn in range(10**9):
        jax.block_until_ready(add(ones))
        time.sleep(0.005)
        if turn == 0:
            print("running", flush=True)
        if turn == 50:
"""
FOREVER = "            pass"
RAISES = "            assert launch.process_id != 1, 'rank 1 has had enough'"
ENDS = "            sys.exit(0)"


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


def test_ranks_that_are_suspended_together_go_on():
    """The pause is longer than the limit of silence, and no silence of any rank."""
    goes_on = FOREVER + "\n        if turn % 20 == 0:\n            print('goes on', flush=True)"
    with in_loop(goes_on, 2) as processes:
        wait_until_running(processes)
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        time.sleep(SILENCE_S + 1.5)
        for process in processes:
            os.set_blocking(process.stdout.fileno(), False)
            while process.stdout.readline():
                continue
            process.send_signal(signal.SIGCONT)
        time.sleep(1.5)
        for process in processes:
            assert process.poll() is None, process.stderr.read()
            assert process.stdout.readline() == "goes on\n"


def test_ranks_that_are_interrupted_say_so_in_a_line():
    with in_loop(FOREVER, 2) as processes:
        wait_until_running(processes)
        for process in processes:
            process.send_signal(signal.SIGINT)
        for rank, (status, errors) in enumerate(endings(processes)):
            assert status in (INTERRUPTED_STATUS, LOST_STATUS), errors  # whichever comes first: the signal or the word
            assert "interrupted" in errors and errors.count("\n") == 1, errors
            assert f"rank {rank} on " in errors


def test_a_rank_that_ends_no_step_is_named():
    """Rank 1 is stuck outside of collectives while it sends its signs of life; rank 0 waits for it in one."""
    code = """
        import os, sys, time, jax
        from tree_attn import initialize
        from tree_attn.cluster.join import steps
        initialize()
        with steps() as step:
            for number in range(10**9):
                step()
                if number >= 5 and os.environ["RANK"] == "1":
                    time.sleep(600)
                time.sleep(0.2 if number < 8 else 600)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with running(command, 2, TREE_ATTN_STEP_S="2") as processes:
        for status, errors in endings(processes, STARTS_S):
            assert status == LOST_STATUS
            assert f"rank 1 on {socket.gethostname()}: no step ended for 2 s: it is at step 6, and others" in errors


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
    command = [sys.executable, "-m", "tree_attn.cli", "doctor", "--distributed", "--quiet"]
    with running(command, 3, ranks=(0, 2), TREE_ATTN_TIMEOUT_S="2") as processes:
        for rank, (status, errors) in zip((0, 2), endings(processes, STARTS_S)):
            assert status == 2
            line = "error: after 2 s, 1 of 3 ranks are missing: rank 1 "
            assert re.match(rf"tree-attn doctor: rank {rank} .*: {line}", errors), errors
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
        from tree_attn.cluster import connect, join as distributed
        if os.environ["RANK"] == "1":
            connect._first_collective = lambda: time.sleep(600)
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
