"""Two nodes of four devices with a link of 50 Mbit/s between them: bytes that each strategy sends across."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from jobs import ROOT, SETTINGS, minicluster

# Above the payload: TCP/IP headers (66 bytes a segment of 1448), acknowledgements, and the processes' heartbeats.
OVERHEAD = 1.15


@pytest.fixture(scope="module")
def rows(cluster, tmp_path_factory):
    """Returns the rows of `scripts/slow_link.py`, and prints its table."""
    out = tmp_path_factory.mktemp("slow_link")
    minicluster("shape", "50mbit")
    try:
        command = ["srun", "--nodes=2", "--ntasks-per-node=2", "--nodelist=n[1-2]", "--kill-on-bad-exit=1"]
        command += [sys.executable, str(ROOT / "scripts" / "slow_link.py"), "--out", str(out), "--steps", "3"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=150, env=os.environ | SETTINGS, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        minicluster("shape", "off")
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    print(slow_link().table(rows))
    return {row["reduction"] or row["strategy"]: row for row in rows}


def slow_link():
    spec = importlib.util.spec_from_file_location("slow_link", ROOT / "scripts" / "slow_link.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_hierarchical_sends_no_more_than_its_share_across_the_slow_link(rows):
    hierarchical, flat = rows["hierarchical"], rows["gather"]
    assert hierarchical["axis_sizes"] == [4, 2]
    sent = hierarchical["bytes_sent_per_node_across"]
    share = hierarchical["bytes_share_per_node_across"]
    assert share <= sent <= OVERHEAD * share
    assert sent < 0.7 * flat["bytes_sent_per_node_across"]  # by the model 4 of 7


@pytest.mark.parametrize("strategy", ["gather", "ring_overlapped"])
def test_flat_strategies_send_what_the_model_says(rows, strategy):
    for level in ("within", "across"):
        sent, share = (rows[strategy][f"bytes_{which}_per_node_{level}"] for which in ("sent", "share"))
        assert share <= sent <= OVERHEAD * share


def test_the_ring_pays_for_the_link(rows):
    """A ring must move the keys themselves over it: this is what limits it, at 6.25 MB/s and 32 KiB at once."""
    for strategy in ("ring_overlapped", "ring_public"):
        row = rows[strategy]
        assert row["latency_us_median"] >= 0.8 * row["bytes_share_per_node_across"] / 6.25
    assert rows["ring_overlapped"]["latency_us_median"] > 2 * rows["hierarchical"]["latency_us_median"]


def test_the_published_table_is_made_from_its_rows():
    folder = ROOT / "docs" / "results" / "slow_link"
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert slow_link().table(rows) in (folder / "README.md").read_text()
