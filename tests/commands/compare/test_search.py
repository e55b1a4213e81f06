"""`tree-attn compare --nccl search`: which processes it starts, what it picks, and its errors."""

import itertools
import json

import pytest

from tree_attn import cli
from tree_attn.commands.compare import search
from tree_attn.measure.rows import read

OPTIONS = ["--devices", "2", "--keys", "64", "128", "--heads", "2", "--head-dim", "16", "--dtype", "float32"]
OPTIONS += ["--iters", "2", "--chain", "1", "--reduction", "gather"]
BYTES = {64: 64 * 2 * 16 * 4 // 2, 128: 128 * 2 * 16 * 4 // 2}  # of K on each device


def searched(out, *options: str) -> int:
    return cli.main(["compare", "--nccl", "search", "--out", str(out), *OPTIONS, *options])


@pytest.fixture
def ranks(monkeypatch, tmp_path):
    """Replaces the processes: notes each setting with its options, and writes rates of transfers."""
    started = []
    rates = {"own": (80.0, 350.0), "chunks-64k": (300.0, 340.0), "channels-64": (200.0, 200.0)}

    def run(args, name, *options):
        started.append((name, *options))
        if "--links-only" not in options:
            return 0
        with (tmp_path / search.TRANSFERS).open("a") as file:
            for num_bytes, rate in zip(BYTES.values(), rates.get(name, ())):
                row = {"bytes": num_bytes, "n_devices": 2, "nccl_setting": name, "gb_per_s": rate}
                file.write(json.dumps(row) + "\n")
        return 0 if name in rates else 1

    monkeypatch.setattr(search, "_run_ranks", run)
    return started


def test_every_setting_is_timed_and_the_fastest_of_each_size_compared_with_nccls_own(ranks, tmp_path, capsys):
    assert searched(tmp_path, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["fastest"] == {str(BYTES[64]): "chunks-64k", str(BYTES[128]): "own"}
    assert ranks[: len(search.SETTINGS)] == [(name, "--links-only") for name in search.SETTINGS]
    assert ranks[len(search.SETTINGS) :] == [("own",), ("chunks-64k",)]
    ranks.clear()
    assert searched(tmp_path) == 0  # a rerun times those that failed again
    assert ("own", "--links-only") not in ranks and ("user-buffers", "--links-only") in ranks
    text = capsys.readouterr().out
    assert "chunks-64k (fastest)" in text and "own (fastest)" in text
    assert "Could not be timed here: chunks-128k, " in text


def test_a_rank_has_all_options_of_the_call(monkeypatch, tmp_path):
    commands = []

    def started(ranks):
        commands.extend(ranks)
        raise KeyboardInterrupt

    monkeypatch.setattr(search, "_started", started)
    searched(tmp_path, "--two-way")
    assert len(commands) == 2
    for rank, command in enumerate(commands):
        assert command[1:6] == ["-m", "tree_attn", "compare", "--nccl", "own"]
        assert "--links-only" in command and "--two-way" in command and "--prefill" not in command
        options = dict(itertools.pairwise(command))
        assert (options["--keys"], options["--reduction"], options["--heads"]) == ("64,128", "gather", "2")
        assert (options["--num-processes"], options["--process-id"]) == ("2", str(rank))


@pytest.mark.parametrize(
    "options, message",
    [
        (("--devices", "1"), "--nccl search needs --devices of at least 2, got 1"),
        (
            ("--coordinator-address", "localhost:9", "--num-processes", "2", "--process-id", "1"),
            "--nccl search must be one process, which starts one per device by itself, got rank 1",
        ),
        (("--nccl", "fast"), "--nccl must be one of 'search', 'own', 'chunks-128k', "),
    ],
)
def test_a_wrong_call_starts_nothing(ranks, tmp_path, capsys, options, message):
    assert searched(tmp_path, *options) != 0
    assert message in capsys.readouterr().err and ranks == []


def test_without_any_rate_there_is_nothing_to_compare(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(search, "_run_ranks", lambda args, name, *options: 1)
    assert searched(tmp_path) == 2
    assert "--nccl search could time no transfer" in capsys.readouterr().err


@pytest.mark.slow
def test_processes_on_emulated_devices_write_rows_under_both_settings(monkeypatch, tmp_path, capsys):
    few = {name: search.SETTINGS[name] for name in ("own", "chunks-64k")}
    monkeypatch.setattr(search, "SETTINGS", few)
    assert searched(tmp_path, "--keys", "64", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert {row["nccl_setting"] for row in document["transfers"]} == set(few)
    rows = read(tmp_path / "results.jsonl")
    assert {row["nccl_setting"] for row in rows} == {"own", *document["fastest"].values()}
    for row in rows:
        assert row["error"] is None and row["n_processes"] == 2
        assert ("NCCL_P2P_NVL_CHUNKSIZE" in row["nccl"]) == (row["nccl_setting"] == "chunks-64k")
