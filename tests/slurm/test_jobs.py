"""The sbatch files on two nodes of two tasks: a model generates as in one process, and each row comes once."""

import os
import signal
import sys

from jobs import ROOT, SETTINGS, cases, submit

# The tokens of `tree-attn generate --attention single` in one process, as in tests/commands/generate/test_generate.py.
PROMPT = "What is the capital of France? Answer in one sentence."
NEW_IDS = [504, 3575, 282, 4649, 314, 7042, 30]
DECODE = ("--max-new-tokens", "12", "--save-every", "2")
TWO_BY_ONE = ("--nodelist=n[1-2]", "--ntasks-per-node=1")
TWO_BY_TWO = ("--nodelist=n[1-2]", "--ntasks-per-node=2")
DECODES_S = 180


def tokens(job) -> list[int]:
    return [token for row in job.rows("tokens.jsonl") for token in row["ids"]]


def test_a_model_generates_what_it_generates_in_one_process(cluster, tmp_path):
    job = submit("decode", tmp_path / "out", *DECODE, sbatch=TWO_BY_TWO, TREE_ATTN_PROMPT=PROMPT)
    assert job.wait(DECODES_S) == "COMPLETED", job.story()
    assert tokens(job) == NEW_IDS, job.story()


def test_a_rank_that_is_killed_while_a_model_generates(cluster, tmp_path):
    job = submit("decode", tmp_path / "out", *DECODE, sbatch=TWO_BY_ONE, TREE_ATTN_PROMPT=PROMPT)
    job.wait_for_rows(1, DECODES_S, "tokens.jsonl")
    os.kill(job.process(1), signal.SIGKILL)
    assert job.wait(60) == "FAILED", job.story()
    assert "n2: task 1: Killed" in job.output
    saved = job.rows("tokens.jsonl")
    assert 0 < len(tokens(job)) < len(NEW_IDS) and tokens(job) == NEW_IDS[: len(tokens(job))]
    job.requeue()
    assert job.wait(DECODES_S) == "COMPLETED", job.story()
    assert [row["ids"] for row in job.rows("tokens.jsonl")] == [NEW_IDS[i : i + 2] for i in range(0, 7, 2)]
    assert job.rows("tokens.jsonl")[: len(saved)] == saved


def test_tree_and_ring_are_compared_over_all_processes(cluster, tmp_path):
    sweep = ("--heads", "2", "--head-dim", "8", "--dtype", "float32", "--iters", "5")
    job = submit("compare", tmp_path / "out", *sweep, sbatch=TWO_BY_TWO, TREE_ATTN_KEYS="16")
    assert job.wait(120) == "COMPLETED", job.story()
    strategies = [("tree", "allreduce"), ("tree", "gather"), ("tree", "hierarchical")]
    strategies += [("ring_overlapped", None), ("ring_public", None)]
    assert cases(job.rows()) == [(*strategy, 16, 4, None) for strategy in strategies]
    assert all(row["n_devices"] == 4 and row["latency_us_median"] > 0 for row in job.rows())
    assert {rank: "Measured per device" in job.rank_log(rank) for rank in range(4)} == {
        0: True,
        1: False,
        2: False,
        3: False,
    }

    other = submit("compare", tmp_path / "out", *sweep, "--seed", "1", sbatch=TWO_BY_TWO, TREE_ATTN_KEYS="16")
    assert other.wait(60) == "FAILED", other.story()
    assert "holds the results of another sweep: seed is 0 there and 1 here" in other.story()
    assert len(job.rows()) == len(strategies)


def test_settings_reach_the_tasks(cluster, tmp_path):
    """`env.sh` is in force in every task, and settings of a site stay."""
    report = tmp_path / "report"
    report.write_text("#!/bin/sh\necho $SLURM_PROCID $NCCL_NVLS_ENABLE $NCCL_DEBUG $PYTHONUNBUFFERED\n")
    report.chmod(0o755)
    job = submit("compare", tmp_path / "out", sbatch=TWO_BY_TWO, TREE_ATTN_COMMAND=str(report), NCCL_DEBUG="INFO")
    assert job.wait(30) == "COMPLETED", job.story()
    assert [job.rank_log(rank) for rank in range(4)] == [f"{rank} 0 INFO 1\n" for rank in range(4)]
    assert SETTINGS["TREE_ATTN_HOME"] not in job.output


def test_a_program_of_ones_own_runs_over_all_tasks(cluster, tmp_path):
    program = (sys.executable, str(ROOT / "docs" / "how-to" / "slurm_program.py"))
    job = submit("run", tmp_path / "out", *program, sbatch=TWO_BY_ONE)
    assert job.wait(120) == "COMPLETED", job.story()
    assert [(row["step"], row["devices"]) for row in job.rows("sums.jsonl")] == [(0, 2), (1, 2), (2, 2)], job.story()
    assert f"done: {job.out}" in job.output


def test_a_run_without_a_program_says_what_is_missing(cluster, tmp_path):
    job = submit("run", tmp_path / "out", sbatch=("--nodes=1", "--ntasks=1", "--nodelist=n1"))
    assert job.wait(30) == "FAILED" and job.facts["ExitCode"] == "2:0", job.story()
    assert "error: run.sbatch needs a program behind it" in job.output
