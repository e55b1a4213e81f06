"""`tree-attn compare` on emulated devices: its rows, what it checks before it times, continuing, and failing."""

import json
import os
import socket
import subprocess
import sys

import jax
import pytest

from tree_attn import cli
from tree_attn.cluster import join
from tree_attn.cluster.launch import Launch
from tree_attn.commands.compare import cases, data, plots, report, trial
from tree_attn.commands.compare.trial import Laboratory
from tree_attn.commands.figures import rows as figure_rows
from tree_attn.cost.step import DecodeStep
from tree_attn.extras import how_to_install
from tree_attn.measure import latency
from tree_attn.measure.rows import RowWriter

# The fields that were agreed, all of them.
FIELDS = [
    "strategy",
    "reduction",
    "implementation",
    "n_devices",
    "n_processes",
    "batch",
    "num_keys",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "dtype",
    "latency_us_median",
    "latency_us_p10",
    "latency_us_p90",
    "n_iters",
    "compile_s",
    "peak_memory_bytes_compiled",
    "peak_memory_bytes_runtime",
    "peak_memory_bytes_predicted",
    "collectives_lowered",
    "collectives_compiled",
    "bytes_sent_per_device_compiled",
    "bytes_sent_per_device_predicted",
    "max_abs_error",
    "hardware",
    "jax_version",
    "nccl",
    "git_commit",
    "command",
    "date",
    "host",
    "driver",
    "clock_sm_mhz",
    "clock_memory_mhz",
]
SMALL = ["--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--dtype", "float32", "--iters", "2"]
SIZES = ("batch", "num_heads", "num_kv_heads", "head_dim", "dtype", "n_devices")
ORDER = ["tree allreduce", "tree gather", "tree hierarchical", "ring_overlapped None", "ring_public None"]


def compare(out, *options: str) -> int:
    return cli.main(["compare", "--out", str(out), *SMALL, *options])


def names(rows) -> list[str]:
    return [f"{row['strategy']} {row['reduction']}" for row in rows]


def document_of(capsys) -> dict:
    """Returns the one JSON document on stdout."""
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Returns the folder and the rows of a whole run over 4 devices at two lengths."""
    out = tmp_path_factory.mktemp("compare")
    assert compare(out, "--devices", "4", "--keys", "64,128", "--chain", "2") == 0
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    return out, rows


def test_one_row_per_strategy_and_length(finished):
    _, rows = finished
    assert names(rows) == ORDER * 2
    assert [row["num_keys"] for row in rows] == [64] * 5 + [128] * 5
    assert all(row["error"] is None for row in rows)


def test_rows_have_all_fields_and_sensible_values(finished):
    _, rows = finished
    for row in rows:
        assert set(FIELDS) <= set(row)
        assert 0 < row["latency_us_p10"] <= row["latency_us_median"] <= row["latency_us_p90"]
        assert row["max_abs_error"] <= row["tolerance"] < 1e-4
        assert (row["n_devices"], row["n_processes"], row["n_iters"], row["chain"]) == (4, 1, 2, 2)
        assert (row["long_chain"], row["program_us"]) == (None, None)  # emulated devices keep one chain
        assert row["peak_memory_bytes_runtime"] is None  # unknown on CPU
        assert row["oracle_num_keys"] == row["num_keys"]
        assert row["command"].startswith("tree-attn compare --out ")
        assert row["jax_version"] == jax.__version__
        assert row["nccl"]["NCCL_P2P_NVL_CHUNKSIZE"] == os.environ["NCCL_P2P_NVL_CHUNKSIZE"]


def test_traffic_and_collectives_are_those_predicted(finished):
    _, rows = finished
    for row in rows:
        assert row["bytes_sent_per_device_compiled"] == pytest.approx(row["bytes_sent_per_device_predicted"])
    collectives = {name: row["collectives_lowered"] for name, row in zip(names(rows), rows)}
    assert collectives == {
        "tree allreduce": {"all-reduce": 3},
        "tree gather": {"all-gather": 1},
        "tree hierarchical": {"all-gather": 2},
        "ring_overlapped None": {"collective-permute": 6},
        "ring_public None": {"collective-permute": 8},
    }


def test_sharded_heads_stand_beside_rings(tmp_path, capsys):
    """An all-to-all, and for the next step a gather of the heads; on a CPU it must be named."""
    assert compare(tmp_path, "--devices", "4", "--keys", "64", "--reduction", "shard_heads", "--json") == 0
    row, *rings = document_of(capsys)["rows"]
    assert len(rings) == 2 and row["reduction"] == "shard_heads" and row["error"] is None
    assert row["collectives_compiled"] == {"all-to-all": 1, "all-gather": 1}
    assert (
        row["bytes_sent_per_device_compiled"] == row["bytes_sent_per_device_predicted"] == 3 / 4 * 4 * (4 * 17 + 4 * 16)
    )
    assert [r["strategy"] for r in figure_rows.read([tmp_path])] == ["ring_overlapped", "ring_public"]  # not predicted
    assert "shard_heads" in {case.reduction for case in plan_on("gpu")} - {case.reduction for case in plan_on("cpu")}


def plan_on(platform: str) -> list[cases.Case]:
    sizes = dict(batch=1, num_keys=64, num_heads=4, num_kv_heads=2, head_dim=16, dtype="float32", n_devices=4)
    return cases.plan([DecodeStep(**sizes)], [], ["xla"], platform)


def test_heads_that_devices_do_not_divide_are_a_row_with_the_reason(tmp_path, capsys):
    assert compare(tmp_path, "--devices", "3", "--keys", "63", "--reduction", "shard_heads,gather", "--json") == 0
    row, *others = document_of(capsys)["rows"]
    assert row["error"] == "NotImplementedError: shard_heads needs heads that 3 devices divide, got 4"
    assert all(other["error"] is None for other in others)


@pytest.mark.slow
def test_a_ring_both_ways_round_is_compared_on_request(tmp_path):
    options = ("--devices", "3", "--keys", "96", "--joint", "--two-way", "--reduction", "gather", "--no-plots")
    assert compare(tmp_path, *options) == 0
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    rings = ["ring_overlapped None", "ring_joint None", "ring_two_way None", "ring_public None"]
    assert names(rows) == ["tree gather", *rings]
    one_way, joint, two_way = rows[1:4]
    assert [row["rotation"] for row in rows] == [None, "one_way", "joint", "two_way", None]
    assert joint["error"] is None and joint["collectives_lowered"] == {"collective-permute": 2}
    for row in (one_way, joint, two_way):
        assert row["neighbour_gb_per_s"] == row["transfers_gb_per_s"][row["rotation"]] > 0
    assert two_way["error"] is None and two_way["collectives_lowered"] == {"collective-permute": 8}
    for name in ("bytes_sent_per_device_predicted", "peak_memory_bytes_predicted"):
        assert one_way[name] == two_way[name]
    assert two_way["bytes_sent_per_device_compiled"] == pytest.approx(two_way["bytes_sent_per_device_predicted"])
    assert "ring_two_way" not in {row["strategy"] for row in figure_rows.read([tmp_path])}  # it has no prediction


def test_plots_are_drawn(finished):
    out, _ = finished
    for name in ("latency", "peak_memory", "communication"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_rerun_measures_nothing_again_and_reports_everything(finished, capsys, monkeypatch):
    out, rows = finished
    monkeypatch.setattr(Laboratory, "check", None)  # would fail if it were called
    monkeypatch.setattr(Laboratory, "time", None)
    assert compare(out, "--devices", "4", "--keys", "64,128", "--chain", "2", "--json") == 0
    written = document_of(capsys)
    assert written["rows"] == rows
    assert written["files"]["results"] == str(out / "results.jsonl")
    assert len((out / "results.jsonl").read_text().splitlines()) == 10


def test_continues_where_it_stopped_after_a_torn_line(tmp_path, capsys):
    options = ("--devices", "2", "--keys", "8", "--reduction", "gather", "--no-plots")
    assert compare(tmp_path, *options) == 0
    path = tmp_path / "results.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[1][:40])
    assert compare(tmp_path, *options) == 0
    again = path.read_text().splitlines(keepends=True)
    assert again[0] == lines[0]
    assert names(json.loads(line) for line in again) == ["tree gather", "ring_overlapped None", "ring_public None"]
    assert "1 of 3 rows is in" in capsys.readouterr().out


def test_other_options_need_another_folder(finished, capsys):
    out, rows = finished
    assert compare(out, "--devices", "4", "--keys", "64", "--chain", "2", "--seed", "1") == 2
    message = capsys.readouterr().err
    assert f"{out} holds the results of another sweep: seed is 0 there and 1 here; keys is [64, 128] there" in message
    assert [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()] == rows


def test_a_row_with_an_error_is_tried_again_and_stands_once(tmp_path, capsys, monkeypatch):
    options = ("--devices", "2", "--keys", "8", "--reduction", "gather", "--no-plots", "--json")
    with monkeypatch.context() as broken:
        broken.setattr(latency, "latency_us", None)
        assert compare(tmp_path, *options) == 0
    assert all("TypeError" in row["error"] for row in document_of(capsys)["rows"])
    assert compare(tmp_path, *options) == 0
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["error"] for row in rows] == [None] * 3
    assert names(rows) == ["tree gather", "ring_overlapped None", "ring_public None"]


@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, ValueError])  # JAX raises one or the other
def test_a_peer_that_dies_is_no_row(tmp_path, capsys, monkeypatch, kind):
    """Among several processes an error may come from another one's death; a rerun must then measure the row."""
    options = ("--devices", "2", "--keys", "8", "--reduction", "gather", "--no-plots")

    def lose(*_, **__):
        monkeypatch.setattr(join, "current", lambda: Launch(source="slurm", num_processes=2, hosts=("n1", "n2")))
        raise kind("UNKNOWN: Gloo all-reduce failed: Connection closed by peer [n2]:1")

    monkeypatch.setattr(latency, "latency_us", lose)
    assert compare(tmp_path, *options) == 2
    message = capsys.readouterr().err
    assert "compare: rank 0 on n1: error: lost the other processes: UNKNOWN: Gloo" in message
    assert RowWriter(tmp_path / "results.jsonl").rows == []


def test_what_cannot_run_is_a_row_with_its_reason_and_the_others_go_on(tmp_path, capsys):
    options = ("--devices", "3", "--keys", "12", "--implementation", "cudnn", "xla", "--no-plots", "--json")
    assert compare(tmp_path, *options) == 0
    rows = document_of(capsys)["rows"]
    reasons = {(row["implementation"], row["strategy"], row["reduction"]): row["error"] for row in rows}
    assert len(reasons) == 10
    for (implementation, _, reduction), reason in reasons.items():
        if reduction == "hierarchical":
            assert "NotImplementedError: reduction 'hierarchical' needs two mesh axes" in reason
        elif implementation == "cudnn":
            assert "NotImplementedError: implementation='cudnn' cannot run: cudnn needs a CUDA GPU" in reason
        else:
            assert reason is None
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 10


def test_what_cannot_run_at_all_is_one_error_before_anything_is_predicted_or_written(tmp_path, capsys, monkeypatch):
    options = ("--devices", "2", "--keys", "8", "--reduction", "gather", "--no-plots")
    assert compare(tmp_path / "out", *options, "--implementation", "cudnn", "mosaic_gpu") == 2
    out, error = capsys.readouterr()
    assert "error: --implementation must name one that can run here, got cudnn, mosaic_gpu: cudnn needs a CUDA" in error
    assert (out, error.count("\n"), (tmp_path / "out").exists()) == ("", 1, False)
    monkeypatch.setattr(Laboratory, "check", None)  # any other reason that holds for all
    assert compare(tmp_path / "out", *options) == 2
    out, error = capsys.readouterr()
    assert "error: nothing could be measured: TypeError" in error and "Predicted" not in out


def test_the_words_of_a_run_are_those_of_people(finished, capsys):
    _, rows = finished
    steps = [DecodeStep(**{name: rows[0][name] for name in SIZES}, num_keys=keys) for keys in (64, 128)]
    report.print_predictions(cases.plan(steps, [], ["xla"], "cpu"), "cpu", dict.fromkeys(steps, 2.0))
    report.print_results(rows)
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines() if line.startswith(" ")) <= 80  # only tables begin with a blank
    text = " ".join(text.split())
    assert "equations 8 to 14 of the Tree Attention paper" in text and "tree allreduce 3 all-reduces;" in text
    assert "Over 64 keys each device reads" in text and "checked against attention in float64" in text
    assert not any(words in text for words in ("read rate", "oracle", "accelerators"))


@pytest.mark.parametrize("n_devices, words", [(1, "1 device cannot be arranged so"), (3, "3 devices cannot be")])
def test_hierarchical_says_what_it_needs(finished, n_devices, words):
    sizes = {name: finished[1][0][name] for name in SIZES} | {"n_devices": n_devices, "num_keys": 6}
    case = cases.plan([DecodeStep(**sizes)], ["hierarchical"], ["xla"], "cpu")[0]
    with pytest.raises(NotImplementedError, match=f"two mesh axes of at least two devices each, and {words}"):
        Laboratory(jax.devices()[:n_devices], 0).check(case)


def test_a_wrong_result_stops_everything_before_anything_is_timed(tmp_path, capsys, monkeypatch):
    right = data.oracle_output
    monkeypatch.setattr(data, "oracle_output", lambda *args: right(*args) + 0.01)
    monkeypatch.setattr(Laboratory, "time", None)
    assert compare(tmp_path, "--devices", "2", "--keys", "8", "--reduction", "gather", "--no-plots", "--json") == 1
    written = document_of(capsys)
    assert "tree gather (xla, 8 keys, float32) is off by 0.01 from attention in float64" in written["error"]
    assert written["rows"] == []
    assert not (tmp_path / "results.jsonl").exists()


@pytest.mark.parametrize(
    "requested, is_emulated, sent, expected",
    [
        (None, False, 1e4, (32, 128)),
        (None, False, None, (32, 128)),  # a case that cannot run
        (None, False, 2e8, (4, 16)),
        (8, False, 2e8, (8, 32)),
        (1, False, 1e4, (1, None)),
        (None, True, 2e8, (1, None)),
        (8, True, 1e4, (8, None)),
    ],
)
def test_steps_in_the_programs_of_a_sample(requested, is_emulated, sent, expected):
    assert trial.chain_lengths(sent, requested, is_emulated) == expected


def test_a_chain_that_skips_collectives_is_not_timed(tmp_path, capsys, monkeypatch):
    """Without its barrier a chained ring moves K and V once for all steps; that must be noticed, not reported."""
    monkeypatch.setattr(jax.lax, "optimization_barrier", lambda x: x)
    options = ("--devices", "2", "--keys", "8", "--reduction", "gather", "--chain", "4", "--no-plots", "--json")
    assert compare(tmp_path, *options) == 0
    errors = {row["strategy"]: row["error"] for row in document_of(capsys)["rows"]}
    assert "RuntimeError: a chain of 4 steps runs {'collective-permute': 2}" in errors["ring_overlapped"]
    assert errors["tree"] is None


@pytest.mark.parametrize(
    "options, message",
    [
        (("--keys", "0"), "--keys must be an integer of at least 1, got 0"),
        (("--keys", "8", "--out", __file__), f"--out must be a folder, got {__file__}: {__file__} is a file"),
        (("--keys", "8", "--out", f"{__file__}/new"), f"--out must be a folder, got {__file__}/new: "),
        (("--devices", "0", "--keys", "8"), "--devices must be at least 1, got 0"),
        (("--devices", "2", "--keys", "7"), "--keys must be multiples of --devices 2, got 7; take 6 or 8"),
        (("--devices", "8", "--keys", "4"), "--keys must be multiples of --devices 8, got 4; take 8"),
        (("--devices", "2", "--keys", "8", "--iters", "0"), "--iters must be at least 1, got 0"),
        (("--devices", "2", "--keys", "8", "--chain", "-1"), "--chain must be at least 1, got -1"),
        (("--devices", "2", "--keys", "8", "--kv-heads", "3"), "--heads must be a multiple of --kv-heads"),
        (("--devices", "2", "--keys", "8", "--dtype", "int8"), "dtype must be a floating dtype"),
        (("--devices", "2", "--keys", "8", "--reduction", "sum"), "--reduction must be one of 'allreduce', 'gather'"),
        (("--devices", "2", "--keys", "8", "--implementation", "triton"), "implementation must be one of"),
        (("--devices", "9", "--keys", "9", "--no-plots"), "--devices=9 devices were asked for"),
        (
            ("--devices", "2", "--keys", "8", "--process-id", "0"),
            "--coordinator-address, --num-processes must be given too",
        ),
    ],
)
def test_bad_options_are_one_error(tmp_path, capsys, options, message):
    assert compare(tmp_path, *options) == 2
    error = capsys.readouterr().err
    assert error.startswith("tree-attn compare: error: ") and message in error and error.count("\n") == 1


def test_keys_that_are_no_numbers(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        compare(tmp_path, "--keys", "8k")
    assert "must be integers such as 8192,65536, got '8k'" in capsys.readouterr().err


def test_without_matplotlib_all_but_the_plots_is_there(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert compare(tmp_path, "--devices", "2", "--keys", "8", "--reduction", "gather") == 0
    assert how_to_install("plot") in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.jsonl", "results.sweep.json"]


def test_a_matplotlib_that_cannot_be_imported_costs_no_results(finished, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as one whose import fails
    options = ("--devices", "4", "--keys", "64,128", "--chain", "2")
    assert compare(finished[0], *options) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "tree allreduce" in text and "which is here and cannot be imported (ModuleNotFoundError" in text
    assert compare(finished[0], *options, "--json") == 0
    assert set(document_of(capsys)["files"]) == {"results"}


@pytest.mark.slow
def test_a_partial_oracle_is_recorded(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(data, "ORACLE_ELEMENTS", 16)
    monkeypatch.setattr(data, "ORACLE_MAX_ELEMENTS", 64)
    options = ("--devices", "2", "--batch", "2", "--reduction", "gather", "--no-plots", "--json")
    assert compare(tmp_path, *options, "--keys", "16") == 0
    checked = {
        row["num_keys"]: (row["oracle_num_keys"], row["oracle_batch"], row["oracle_num_kv_heads"])
        for row in document_of(capsys)["rows"]
    }
    assert checked == {16: (4, 1, 1)}


@pytest.mark.slow
def test_several_processes_make_one_set_of_rows(tmp_path):
    """Two processes of two emulated devices; the first writes and prints, the second is silent."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    options = ["--devices", "4", "--keys", "16", "--no-plots", "--json", "--out", str(tmp_path), *SMALL]
    options += ["--coordinator-address", f"localhost:{port}", "--num-processes", "2", "--process-id"]
    command = [sys.executable, "-m", "tree_attn.cli", "compare", *options]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    processes = [
        subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for i in range(2)
    ]
    outputs = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[1][0] == "" and "timing" in outputs[0][1] and "timing" not in outputs[1][1]
    rows = json.loads(outputs[0][0])["rows"]
    assert names(rows) == ORDER
    assert {(row["n_processes"], row["n_devices"], row["error"]) for row in rows} == {(2, 4, None)}


def test_the_last_words_compare_the_best_of_both(finished):
    rows = [row | {"latency_us_median": 10.0 if row["strategy"] == "tree" else 144.0} for row in finished[1]]
    words = (
        "tree allreduce is 14 times as fast as the best ring (ring overlapped) over 64 keys: 10.0 us against 144.0 us."
    )
    assert report.conclusions([row | {"hardware": "4 x NVIDIA H200"} for row in rows])[0] == words
    assert report.conclusions(rows)[0] == f"On these emulated devices, which say nothing about GPUs, {words}"
    slow = [row | {"latency_us_median": 20.0 if row["strategy"] == "tree" else 10.0} for row in finished[1]]
    equal = [row | {"hardware": "4 x NVIDIA H200", "latency_us_median": 10.0} for row in finished[1]]
    assert " is as fast as the best ring (ring overlapped) over 64 keys: " in report.conclusions(equal)[0]
    assert report.conclusions([row | {"hardware": "4 x NVIDIA H200"} for row in slow])[1].startswith(
        "ring overlapped is 2.0 times as fast as the best tree (tree allreduce)"
    )


def test_tables_fit_80_columns_with_whole_values(finished, capsys):
    longest = {f"latency_us_{name}": 999.9 for name in ("median", "p10", "p90")}  # what was measured may be in ms
    report.print_results([row | longest for row in finished[1]])
    lines = capsys.readouterr().out.splitlines()
    table = [line for line in lines if "tree" in line and " us " in line and ";" not in line]
    assert len(table) >= 6 and max(map(len, table)) <= 80 and not any("\u2026" in line for line in lines)
    assert sum("tree hierarchical" in line for line in lines) >= 2


def test_pictures_say_what_was_measured_on_what(finished, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda drawing, *_, **__: drawn.append(drawing))
    plots.draw(finished[1], tmp_path)
    latency, memory, traffic = (drawing.axes[0] for drawing in drawn)
    for setting in ("4 emulated CPU devices", "4 query and 2 KV heads of 16", "batch 1"):
        assert setting in latency.get_title(loc="left") and setting in memory.get_title(loc="left")
    assert [label.get_text() for label in latency.get_xticklabels()] == ["64", "128"]
    ends = [segment[:, 1] for bars in latency.collections for segment in bars.get_segments()]
    assert len(ends) == len(finished[1])
    for axes in (memory, traffic):  # what was predicted is seen over a line that agrees, and with one length
        predicted = [line for line in axes.get_lines() if line.get_linestyle() == "--"]
        assert len(predicted) == 5 and {line.get_marker() for line in predicted} == {"x"}
        assert "crosses, dashed: predicted" in axes.get_ylabel()
    assert {tuple(pair) for pair in ends} == {(row["latency_us_p10"], row["latency_us_p90"]) for row in finished[1]}
