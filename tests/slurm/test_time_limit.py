"""Two sweeps that run into their time limit of a minute. They sleep most of it, beside the other tests."""

from jobs import cases, submit

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
    assert "n3: job" in job.output and "is near its time limit: it is requeued" in job.output
    assert cases(job.rows()) == EXPECTED, job.story()


def test_a_job_that_may_not_be_requeued_times_out_and_a_new_one_goes_on(limited_jobs):
    job = limited_jobs.not_requeued
    assert job.wait(LIMIT_S) == "TIMEOUT", job.story()
    assert "it could not be requeued; submit it again with TREE_ATTN_OUT=" in job.output
    assert "ON n4 CANCELLED" in job.output and "DUE TO TIME LIMIT" in job.output
    before = job.rows("001/results.jsonl")
    assert cases(before) == EXPECTED[:3]
    again = submit("matrix", job.out, sbatch=limited_jobs.where, **limited_jobs.settings | {"PAUSE_S": "0"})
    assert again.wait(120) == "COMPLETED", again.story()
    assert cases(again.rows()) == EXPECTED
    assert again.rows()[:3] == before
