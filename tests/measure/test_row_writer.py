"""The file of rows: what a crash, a full disk or a second writer leaves of it; and the names of strategies."""

import json
import os
import pathlib
import subprocess
import tempfile

import pytest

from tree_attn.measure import rows
from tree_attn.measure.rows import RowWriter


def test_rows_come_back(tmp_path):
    writer = RowWriter(tmp_path / "new" / "results.jsonl")
    writer.append({"a": 1, "b": None})
    writer.append({"a": 2})
    again = RowWriter(writer.path)
    assert again.rows == writer.rows == [{"a": 1, "b": None}, {"a": 2}]


@pytest.mark.parametrize("torn", ['{"a": 3, "b"', '{"a": 3}'])
def test_torn_last_line_is_dropped_and_writing_goes_on(tmp_path, torn):
    path = tmp_path / "results.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n' + torn)
    writer = RowWriter(path)
    writer.append({"a": 4})
    assert [json.loads(line)["a"] for line in path.read_text().splitlines()] == [1, 2, 4]


@pytest.mark.parametrize("line", ["nonsense", "[1]"])
def test_other_bad_lines_are_an_error_that_names_them(tmp_path, line):
    path = tmp_path / "results.jsonl"
    path.write_text(f'{{"a": 1}}\n{line}\n{{"a": 2}}\n')
    with pytest.raises(ValueError, match=r"results\.jsonl, line 2, is not"):
        RowWriter(path)


def test_a_row_that_is_not_json_is_refused_before_the_file_is_touched(tmp_path):
    writer = RowWriter(tmp_path / "results.jsonl")
    with pytest.raises(ValueError):
        writer.append({"a": float("nan")})
    assert not writer.path.exists()


@pytest.fixture
def small_disk():
    """A file system of 16 KiB."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a file system of 16 KiB")
    # Under a folder of its own, for pytest's would be removed with the disk still mounted if unmounting failed.
    folder = pathlib.Path(tempfile.mkdtemp())
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(folder)], check=True, timeout=30)
    yield folder
    subprocess.run(["umount", str(folder)], check=True, timeout=30)
    folder.rmdir()


def test_a_disk_that_fills_within_a_row_keeps_the_rows_before_it(small_disk):
    writer = RowWriter(small_disk / "results.jsonl")
    row = {"text": "x" * 3000}
    with pytest.raises(OSError, match=r"No space left on device: row \d+ of .*results\.jsonl could not be written"):
        for _ in range(20):
            writer.append(row)
    assert 2 <= len(writer.rows) < 6
    content = writer.path.read_text()
    assert content.endswith("\n") and [json.loads(line) for line in content.splitlines()] == writer.rows
    writer.append({"fits": True})  # in what is left
    assert RowWriter(writer.path).rows[-1] == {"fits": True}


def test_a_full_disk_leaves_a_row_that_was_to_be_replaced(small_disk):
    writer = RowWriter(small_disk / "results.jsonl")
    writer.append({"old": "x" * 6000})
    with pytest.raises(OSError, match=r"results\.jsonl could not be written, and is as it was"):
        writer.replace(0, {"new": "x" * 12000})
    assert [path.name for path in small_disk.iterdir()] == ["results.jsonl"]
    assert RowWriter(writer.path).rows == writer.rows == [{"old": "x" * 6000}]


def test_a_row_is_replaced_in_its_place(tmp_path):
    writer = RowWriter(tmp_path / "results.jsonl")
    for i in range(3):
        writer.append({"a": i})
    writer.replace(1, {"a": "new"})
    writer.append({"a": 3})
    assert RowWriter(writer.path).rows == writer.rows == [{"a": 0}, {"a": "new"}, {"a": 2}, {"a": 3}]


def test_a_second_writer_is_noticed_before_anything_is_written(tmp_path):
    first, second = (RowWriter(tmp_path / "results.jsonl") for _ in range(2))
    first.append({"a": 1})
    with pytest.raises(OSError, match=r"results\.jsonl has 9 bytes and not 0: another process writes to it"):
        second.append({"a": 1})
    assert RowWriter(first.path).rows == [{"a": 1}]


def test_rows_of_another_sweep_are_refused_and_left_alone(tmp_path):
    path = tmp_path / "results.jsonl"
    sweep = {"seed": 0, "keys": (8, 16)}
    RowWriter(path, sweep).append({"a": 1})
    assert RowWriter(path, sweep).rows == [{"a": 1}]
    with pytest.raises(ValueError) as raised:
        RowWriter(path, {"seed": 1, "keys": (8, 16), "batch": 2})
    assert f"{tmp_path} holds the results of another sweep: seed is 0 there and 1 here; batch is left out there" in str(
        raised.value
    )
    assert RowWriter(path, sweep).rows == [{"a": 1}]


def test_a_sweep_that_cannot_be_read_is_one_error(tmp_path):
    (tmp_path / "results.sweep.json").write_text("[1")
    with pytest.raises(ValueError, match=r"results\.sweep\.json should say which sweep lies here"):
        RowWriter(tmp_path / "results.jsonl", {"seed": 0})


def test_a_process_that_does_not_write_keeps_its_rows_and_touches_no_file(tmp_path):
    writer = RowWriter(tmp_path / "new" / "results.jsonl", {"seed": 0}, is_writer=False)
    writer.append({"a": 1})
    writer.append({"a": 2})
    writer.replace(0, {"a": 3})
    assert writer.rows == [{"a": 3}, {"a": 2}]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "strategy, reduction, expected",
    [
        ("tree", "gather", "tree gather"),
        ("tree", ("fused", "gather"), "tree fused + gather"),
        ("tree", ["fused", "gather"], "tree fused + gather"),  # as JSON has it
        ("ring_overlapped", None, "ring overlapped"),
    ],
)
def test_strategy_labels(strategy, reduction, expected):
    assert rows.strategy_label(strategy, reduction) == expected
