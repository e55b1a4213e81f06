"""The script of checks where there is no GPU: a thin selection is what it says."""

import json
import re
import sys

import gpu_check
import part_checks
import pytest
from oracle_case import THINNING

from tree_attn.kernels import targets


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the script with arguments; returns the exit status and the rows."""
    monkeypatch.setattr(gpu_check, "has_gpu", lambda: True)  # else it sets the number of emulated devices again
    monkeypatch.setattr(THINNING, "every", 1)
    monkeypatch.setattr(THINNING, "_number", -1)

    def run(*arguments):
        out = tmp_path / "rows.jsonl"
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(out), *arguments])
        status = gpu_check.main()
        return status, [json.loads(line) for line in out.open()]

    return run


def test_every_nth_check_has_a_row_that_says_so(run, monkeypatch):
    shape = dict(num_queries=1, num_heads=2, num_kv_heads=1, head_dim=8)
    shapes = tuple(shape | {"num_keys": keys} for keys in (9, 10, 11, 12, 13))
    monkeypatch.setattr(part_checks, "ODD_SHAPES", shapes)
    monkeypatch.setattr(part_checks, "PAGED_SHAPES", ())
    monkeypatch.setattr(part_checks, "PREFIX_SHAPES", ())
    status, rows = run("--only", "parts", "--every", "3", "--as", "8.9")
    # Of each shape four options; no backend of a GPU runs them here.
    assert status == 0 and [row["num_keys"] for row in rows] == [9, 9, 10, 11, 12, 12, 13]
    assert [row["options_name"] for row in rows[:4]] == ["plain", "window", "causal", "lengths"]
    assert all(row["passed"] is None and row["every"] == 3 and row["as"] == "8.9" for row in rows)
    assert targets._assumed.get() is None


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("--every", "3"), "--every: needs --only"),
        (("--every", "3", "--only", "sparq"), "none of gradients, sparq, activations, llama"),
        (("--every", "0", "--only", "parts"), "must be at least 1, got 0"),
        (("--as", "7.5"), "--as: must be one of 8.0, .*, got 7.5"),
    ],
)
def test_what_cannot_be_selected_is_one_error(run, arguments, said, capsys):
    with pytest.raises(SystemExit):
        run(*arguments)
    assert re.search(said, capsys.readouterr().err)


def test_processes_of_devices_get_the_selection(run, monkeypatch, tmp_path):
    commands = []
    monkeypatch.setattr(gpu_check, "spawn", lambda command, count: commands.append(command) or 0)
    (tmp_path / "rows.jsonl").touch()
    run("--only", "fused", "--as", "8.9", "--every", "2", "--process-per-device", "--devices", "2")
    (command,) = commands
    assert command[4:] == ["--only", "fused", "--as", "8.9", "--every", "2", "--devices", "2"]
