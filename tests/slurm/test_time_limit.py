"""The warning before the time limit, and two sweeps that run into it. They sleep most of it, beside the other tests."""

from jobs import cases, slurm, submit, wait_until

EXPECTED = [
    (*case, keys, 1, None)
    for keys in (8, 16, 24)
    for case in (("tree", "gather"), ("ring_overlapped", None), ("ring_public", None))
]
LIMIT_S = 300  # SLURM counts in minutes and looks every 30 s


def test_a_sweep_is_requeued_at_its_time_limit_until_it_is_done(limited_jobs):
    job = limited_jobs.requeued
    assert job.wait(LIMIT_S) == "COMPLETED", job.story()
    assert int(job.facts["Restarts"]) >= 1, job.story()
    assert "n4: job" in job.output and "is near its time limit: it is requeued" in job.output
    assert cases(job.rows()) == EXPECTED, job.story()


def test_a_job_that_may_not_be_requeued_times_out_and_a_new_one_goes_on(limited_jobs):
    job = limited_jobs.not_requeued
    assert job.wait(LIMIT_S) == "TIMEOUT", job.story()
    assert "it could not be requeued; submit it again with TREE_ATTN_OUT=" in job.output
    assert "ON n5 CANCELLED" in job.output and "DUE TO TIME LIMIT" in job.output
    before = job.rows("001/results.jsonl")
    assert cases(before) == EXPECTED[:3]
    again = submit("matrix", job.out, sbatch=limited_jobs.where, **limited_jobs.settings | {"PAUSE_S": "0"})
    assert again.wait(120) == "COMPLETED", again.story()
    assert cases(again.rows()) == EXPECTED
    assert again.rows()[:3] == before


def test_a_job_that_has_saved_nothing_yet_goes_on_after_the_warning(cluster, tmp_path):
    """Its one rank waits for the warning and then ends well. Afterwards no process of the job is left."""
    job, warned = warned_job(tmp_path, "")
    wait_until(lambda: "has finished nothing in it: it is not requeued" in job.output, 20, job.story)
    warned.touch()
    assert job.wait(60) == "COMPLETED", job.story()
    assert "done: " in job.output
    wait_until(lambda: not job.processes(), 10, job.processes)


def test_a_job_that_has_saved_something_is_requeued_by_the_warning(cluster, tmp_path):
    job, warned = warned_job(tmp_path, f"sleep 1; echo '{{}}' >>{tmp_path}/out/results.jsonl")
    wait_until(lambda: "is near its time limit: it is requeued" in job.output, 20, job.story)
    warned.touch()
    assert job.wait(60) == "COMPLETED", job.story()
    assert (job.facts["Restarts"], len(job.rows())) == ("1", 2), job.story()
    wait_until(lambda: not job.processes(), 10, job.processes)


def warned_job(folder, saves: str):
    """Returns a job of one rank, warned of its limit once it has run `saves`, and the file that lets it end."""
    waits, warned = folder / "waits", folder / "warned"
    waits.write_text(f"#!/bin/sh\n{saves}\necho waits\nuntil [ -e {warned} ]; do sleep 0.2; done\n")
    waits.chmod(0o755)
    where = ("--nodes=1", "--ntasks=1", "--nodelist=n2")
    job = submit("compare", folder / "out", sbatch=where, TREE_ATTN_COMMAND=str(waits))
    wait_until(lambda: "waits" in job.rank_log(0), 60, job.story)
    slurm("scancel", "--batch", "--signal=USR1", job.id)
    return job, warned
