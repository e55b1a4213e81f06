"""Each command's screen: 80 columns under a terminal, lines on stderr in a pipe, and one JSON document alone."""

import json
import os
import subprocess
import sys

import pytest

from . import screens

SMALL = ["--heads", "4", "--head-dim", "16", "--dtype", "float32", "--iters", "2", "--reduction", "gather"]
COMPARE = ["compare", "--devices", "2", "--keys", "64", *SMALL]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """`compare` in a pipe, with a cache folder and an environment of its own."""
    folder = tmp_path_factory.mktemp("compared")
    options = ["--no-plots", "-v", "--json", "--out", str(folder / "out")]
    return folder, screens.run([*COMPARE, *options], XDG_CACHE_HOME=str(folder / "cache"))


def test_json_is_alone_on_stdout_and_phases_are_on_stderr(compared):
    folder, run = compared
    assert run.status == 0, run
    assert [row["strategy"] for row in json.loads(run.out)["rows"]] == ["tree", "ring_overlapped", "ring_public"]
    lines = run.err.splitlines()
    assert "checking, 1 of 3: tree gather, 64 keys ..." in lines
    assert "timing, 3 of 3: ring public, 64 keys ..." in lines
    assert "tree_attn: implementation: picked 'xla'" in lines  # by -v
    assert not (folder / "cache").exists()  # `compare` measures compilation


def test_a_terminal_of_80_columns_and_the_last_words(compared):
    run = screens.run([*COMPARE, "--out", str(compared[0] / "out"), "--no-plots"], is_terminal=True)
    assert run.status == 0, run
    # Rich may fill a line with blanks up to the last column.
    assert max(len(line.rstrip()) for line in run.lines) <= screens.COLUMNS and "\u2026" not in run.out
    text = " ".join(" ".join(run.lines).split())
    assert "as fast as the best" in text and "Rows: " in text
    assert "checking" not in run.out and "timing, " not in run.out  # all rows are there
    assert "{" not in run.out and run.out.rfind("\x1b[?25h") >= run.out.rfind("\x1b[?25l")


def test_a_quiet_command_says_nothing_on_stderr():
    run = screens.run(["plan", "--keys", "81920", "-q"])
    assert (run.status, run.err) == (0, "")
    table = run.out.partition("Below each time")[0].splitlines()
    assert "ring public" in table[-3] and max(map(len, table)) <= screens.COLUMNS


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_leaves_early_gets_no_words(options):  # `head -1`, for one
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "tree_attn", "plan", "--keys", "81920", "-q", *options]
    with os.fdopen(writer, "wb") as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, timeout=120)
    assert (done.returncode, done.stderr) == (1, b"")
