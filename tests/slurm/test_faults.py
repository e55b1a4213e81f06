"""Faults of running jobs: a job ends in time and with a failure, names the rank or node, and loses no row.

The same job, queued again, finishes with the rows of an undisturbed job.
"""

import os
import signal
import subprocess
import sys
import time

from jobs import MINICLUSTER, SETTINGS, Job, cases, minicluster, slurm, submit, wait_until

SWEEP = ("--heads", "2", "--head-dim", "8", "--dtype", "float32", "--reduction", "gather")
LONG = 1000  # samples a row: after the first row, a fault meets the job in a collective
STRATEGIES = [("tree", "gather"), ("ring_overlapped", None), ("ring_public", None)]
UNDISTURBED = [(*strategy, 16, 2, None) for strategy in STRATEGIES]
ENDS_S = 60  # the most that a job may live on after a fault; nothing here is set to more than 25 s
FINISHES_S = 90
CUT = f"do not hear each other for {SETTINGS['TREE_ATTN_HEARTBEAT_S']} s, and rank 0 hears both"


def start(out, keys: str = "16", iters: int = 5, **options) -> Job:
    """Submits a sweep of three rows for each number of keys, over two nodes, a task each."""
    where = ("--nodelist=n[1-2]", "--ntasks-per-node=1")
    return submit("compare", out, *SWEEP, f"--iters={iters}", sbatch=where, TREE_ATTN_KEYS=keys, **options)


def check_ended_badly(job: Job, *words: str, states=("FAILED",), expected=UNDISTURBED) -> None:
    """Checks that the job ended in one of the states, all words are in its logs, and every row so far is whole."""
    state = job.wait(ENDS_S)
    assert state in states, job.story()
    assert job.facts["ExitCode"] != "0:0" or state == "CANCELLED", job.story()
    story = job.story()
    assert [word for word in words if word not in story] == [], story
    assert cases(job.rows()) == expected[: len(job.rows())], story


def check_finishes(job: Job, expected=UNDISTURBED) -> None:
    """Queues the job again, and checks that it ends well with each row once, the earlier ones to the letter."""
    before = job.rows()
    job.requeue()
    assert job.wait(FINISHES_S) == "COMPLETED", job.story()
    assert job.rows()[: len(before)] == before
    assert cases(job.rows()) == expected


def test_a_rank_that_is_stopped(cluster, tmp_path):
    job = start(tmp_path / "out", iters=LONG)
    job.wait_for_rows(1, FINISHES_S)
    os.kill(job.process(1), signal.SIGSTOP)
    check_ended_badly(job, "rank 1", "n2")
    check_finishes(job)


def test_a_rank_that_never_starts(cluster, tmp_path):
    starts = tmp_path / "starts"
    command = f'exec {SETTINGS["TREE_ATTN_COMMAND"]} "$@"'
    waits_s = 8  # the first run need not wait for ranks that start slowly: there is one
    starts.write_text(
        f'#!/bin/sh\n[ "$SLURM_PROCID" = 0 ] || exec sleep 600\nexport TREE_ATTN_TIMEOUT_S={waits_s}\n{command}'
    )
    starts.chmod(0o755)
    job = start(tmp_path / "out", TREE_ATTN_COMMAND=str(starts))
    check_ended_badly(job, "rank 1", "n2")
    assert job.rows() == []
    starts.write_text(f"#!/bin/sh\n{command}")
    check_finishes(job)


def test_a_node_cut_off_in_the_middle_of_a_collective(cluster, tmp_path):
    job = start(tmp_path / "out", iters=LONG)
    job.wait_for_rows(1, FINISHES_S)
    minicluster("cut", "n2")
    try:
        wait_until(lambda: "the ranks ended with status" in job.output, ENDS_S, job.story)
        wait_until(lambda: job.state in ("COMPLETING", "FAILED"), 10, job.story)
    finally:
        minicluster("heal", "n2")
    assert "rank 1 on n2: silent for" in job.output, job.story()
    assert "rank 0 on n1: silent for" in job.rank_log(1), job.story()
    before = job.rows()
    assert 0 < len(before) < len(UNDISTURBED) and cases(before) == UNDISTURBED[: len(before)], job.story()
    check_ended_badly(job)
    check_finishes(job)


def test_two_nodes_cut_off_from_each_other(cluster, tmp_path):
    """Both still reach rank 0, so no rank is silent."""
    where = ("--nodes=3", "--nodelist=n[1-3]", "--ntasks-per-node=1")
    job = submit("compare", tmp_path / "out", *SWEEP, f"--iters={LONG}", sbatch=where, TREE_ATTN_KEYS="24")
    expected = [(*strategy, 24, 3, None) for strategy in STRATEGIES]
    job.wait_for_rows(1, FINISHES_S)
    minicluster("cut", "n2", "n3")
    try:
        check_ended_badly(job, f"rank 1 on n2 and rank 2 on n3 {CUT}", "with status 75", expected=expected)
    finally:
        minicluster("heal", "n2", "n3")
    assert all(CUT in job.rank_log(rank) for rank in range(3)), job.story()


def test_a_suspended_job_goes_on(cluster, tmp_path):
    """The pause is longer than a rank may be silent."""
    job = start(tmp_path / "out", iters=LONG)
    job.wait_for_rows(1, FINISHES_S)
    slurm("scontrol", "suspend", job.id)
    time.sleep(float(SETTINGS["TREE_ATTN_HEARTBEAT_S"]) + 3)
    before = job.rows()
    assert len(before) < len(STRATEGIES), "it was done before it was suspended"
    slurm("scontrol", "resume", job.id)
    assert job.wait(FINISHES_S) == "COMPLETED", job.story()
    assert cases(job.rows()) == UNDISTURBED and job.rows()[: len(before)] == before


def test_a_job_that_lost_a_rank_queues_itself_again(cluster, tmp_path):
    """Its rank finishes a row and is killed; in the second run it ends well."""
    rank, out = tmp_path / "rank", tmp_path / "out"
    rank.write_text(
        f"#!/bin/sh\n[ -e {out}/results.jsonl ] && exit 0\nsleep 1\necho '{{}}' >{out}/results.jsonl\nkill -9 $$"
    )
    rank.chmod(0o755)
    where = ("--nodes=1", "--ntasks=1", "--nodelist=n2")
    job = submit("compare", out, sbatch=where, TREE_ATTN_COMMAND=str(rank), TREE_ATTN_REQUEUE="yes")
    assert job.wait(FINISHES_S) == "COMPLETED", job.story()
    assert job.facts["Restarts"] == "1" and "the job lost a rank: it is requeued" in job.output, job.story()
    assert "a rank was killed from outside, as the kernel does where a node has no memory left" in job.output


def test_a_job_whose_rank_failed_by_itself_is_not_queued_again(cluster, tmp_path):
    """The other rank ends with the higher status of one that has lost another."""
    rank, out = tmp_path / "rank", tmp_path / "out"
    rank.write_text(
        f"#!/bin/sh\n[ $SLURM_PROCID = 0 ] || exec sleep 60\nsleep 1\necho '{{}}' >{out}/results.jsonl\nexit 2"
    )
    rank.chmod(0o755)
    where = ("--nodes=1", "--ntasks=2", "--nodelist=n2")
    job = submit("compare", out, sbatch=where, TREE_ATTN_COMMAND=str(rank), TREE_ATTN_REQUEUE="yes")
    assert job.wait(FINISHES_S) == "FAILED", job.story()
    assert "the ranks ended with status 143" in job.output, job.story()
    assert "a rank failed by itself: the job is not requeued" in job.output, job.story()


def test_a_coordinator_port_that_is_taken(cluster, tmp_path):
    # Below the ports that Linux gives to connections, one of which could have it already.
    listen = "import socket, time; s = socket.create_server(('', 23456)); print('listens', flush=True); time.sleep(600)"
    command = [MINICLUSTER, "exec", "n1", sys.executable, "-c", listen]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as taken:
        try:
            assert taken.stdout.readline() == "listens\n"
            job = start(tmp_path / "out", TREE_ATTN_COORDINATOR_PORT="23456")
            check_ended_badly(job, "23456", "n1")
        finally:
            taken.kill()
    assert job.rows() == []
    check_finishes(job)


def test_a_disk_that_fills(small_disk, tmp_path):
    job_folder = small_disk.folder / "out"
    job_folder.mkdir()
    small_disk.fill_up_to(8192)  # a page for the sweep's description, and one for three rows and a part of the fourth
    job = start(job_folder, "16,32", logs=tmp_path)
    expected = [(*strategy, keys, 2, None) for keys in (16, 32) for strategy in STRATEGIES]
    check_ended_badly(job, "No space left on device: row", "could not be written", "rank 0 on n1", expected=expected)
    assert 0 < len(job.rows()) < len(expected)
    small_disk.make_room()
    check_finishes(job, expected)


def test_a_cancelled_job(cluster, tmp_path):
    job = start(tmp_path / "out", iters=LONG)
    job.wait_for_rows(1, FINISHES_S)
    slurm("scancel", job.id)
    check_ended_badly(job, "ON n1 CANCELLED", "got a signal to end", states=("CANCELLED",))
    check_finishes(job)
