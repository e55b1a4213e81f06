"""`tree-attn doctor` on emulated devices: everything is listed, and what cannot run says why."""

import dataclasses
import json
import re

import jax
import pytest
from platform_table import PLATFORMS, standing_in

from tree_attn import cli
from tree_attn.commands import terminal
from tree_attn.commands.doctor import checks, kernels
from tree_attn.commands.doctor.report import _print_kernels, _print_machine
from tree_attn.cost import machine
from tree_attn.local import IMPLEMENTATIONS
from tree_attn.reduce import REDUCTIONS


@pytest.fixture(scope="module")
def report():
    return checks.examine(8)


def test_lists_devices_links_and_versions(report):
    assert len(report["devices"]) == 8
    assert report["devices"][3] == {"id": 3, "platform": "cpu", "kind": "cpu", "process": 0, "memory_bytes": None}
    assert report["links"]["neighbour_gb_per_s"] > 0
    assert report["versions"]["jax"]


def test_every_implementation_and_reduction_is_there(report):
    assert set(report["implementations"]) == set(IMPLEMENTATIONS)
    assert set(report["reductions"]) == set(REDUCTIONS)


def test_what_can_run_has_no_reason_and_what_cannot_has_one(report):
    assert report["implementations"]["xla"] is None
    assert "needs a CUDA GPU" in report["implementations"]["cudnn"]
    assert report["implementations"]["flash_attn"]
    fused = report["reductions"]["fused"]
    assert (
        fused == f"fused was run with JAX 0.11 and newer only, this is {jax.__version__}"
        or "needs NVIDIA GPUs" in fused
    )
    assert {reason for name, reason in report["reductions"].items() if name != "fused"} == {None}


def test_what_runs_what_is_named_with_reasons(report):
    assert {one["runs_by"] for one in report["kernels"].values()} == {"xla"}
    assert {one["known"] for one in report["kernels"].values()} == {"tested"} and report["unmeasured"] == []
    assert "needs an NVIDIA GPU" in report["kernels"]["SparQ"]["passed_over"]["mosaic_gpu"]


def test_several_reasons_name_their_features(capsys):
    with standing_in(next(platform for platform in PLATFORMS if platform.title == "A100")):
        found = kernels.examine()
    _print_kernels(found, terminal.output())
    text = capsys.readouterr().out
    assert re.search(r"^not mosaic_gpu: .* Hopper .*\(SparQ\)$", text, re.MULTILINE)
    assert re.search(r"^not cudnn: cudnn does not support int8 key and value", text, re.MULTILINE)
    assert re.search(r"^ decode, lengths +mosaic_gpu +runs \(interpreter, compiled\)", text, re.MULTILINE)
    with standing_in(next(platform for platform in PLATFORMS if platform.title == "H200")):
        found = kernels.examine()
    _print_kernels(found, terminal.output())
    assert "does not support int8 key and value (decode, int8 cache)" in capsys.readouterr().out


def test_a_kernel_that_is_wrong_here_is_reported(monkeypatch):
    monkeypatch.setattr("tree_attn.reference.attention", lambda query, *_: (0 * query + 100.0, None))
    assert "it is WRONG here: off by" in checks.examine(1)["implementations"]["xla"]


def test_one_device_has_no_links_and_no_levels():
    report = checks.examine(1)
    assert report["links"]["neighbour_gb_per_s"] is None
    assert "needs two mesh axes" in report["reductions"]["hierarchical"]


def test_json_is_one_document(capsys):
    assert cli.main(["doctor", "--devices", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hardware"].startswith("2 emulated CPU devices")


def test_tables_show_the_reasons(capsys):
    assert cli.main(["doctor", "--devices", "2"]) == 0
    text = capsys.readouterr().out
    assert "cudnn" in text and "xla" in text and "versions:" in text
    assert re.search(r"^ paged cache +xla +tested", text, re.MULTILINE)
    reasons = re.findall(
        r"^not (?:mosaic_gpu|cudnn): .* needs an? (\w+) GPU; programs run on 'cpu' here$", text, re.MULTILINE
    )
    assert reasons == ["NVIDIA", "CUDA"]


def test_too_many_devices_is_one_error(capsys):
    assert cli.main(["doctor", "--devices", "9"]) == 2
    assert "--devices=9 devices were asked for" in capsys.readouterr().err


def test_distributed_of_one_process(capsys):
    assert cli.main(["doctor", "--distributed", "--devices", "4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (level,) = report["levels"]
    assert (level["axis"], level["size"], report["launch"]["num_processes"]) == ("device", 4, 1)
    assert min(level["sum_us"], level["gather_us"], level["neighbour_gb_per_s"]) > 0


def test_distributed_tables_name_the_levels(capsys, monkeypatch):
    halves = lambda devices: {"n1": devices[:2], "n2": devices[2:]}
    monkeypatch.setattr("tree_attn.topology.by_node", halves)
    assert cli.main(["doctor", "--distributed", "--devices", "4"]) == 0
    text = capsys.readouterr().out
    assert "inside a node" in text and "across nodes" in text


@pytest.mark.slow
def test_machine_out_measures_what_plan_reads(capsys, tmp_path, monkeypatch):
    halves = lambda devices: {"n1": devices[:2], "n2": devices[2:]}
    monkeypatch.setattr("tree_attn.topology.by_node", halves)
    path = tmp_path / "machine.json"
    assert cli.main(["doctor", "--distributed", "--devices", "4", "--machine-out", str(path)]) == 0
    text = capsys.readouterr().out
    assert "allreduce" in text and "keys and values are read at" in text
    measured = machine.read(path)
    assert (measured.device_kind, measured.gpus_per_node) == ("cpu", 2)
    for level in (measured.node, measured.network):
        without_gpus = {"allreduce", "gather", "neighbour", "both_ways"}  # fused needs GPUs
        assert level.is_measured and set(level.costs) == without_gpus
    assert measured.provenance["command"].startswith("tree-attn doctor --distributed")
    assert {point["kind"] for point in measured.provenance["points"]["node"]} == set(measured.network.costs)
    assert cli.main(["plan", "--machine", str(path), "--nodes", "2", "--keys", "64"]) == 0
    assert "links across nodes: measured: 2 x 2 x cpu" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options", [["--machine-out", "machine.json"], ["--distributed", "--machine-out", "/no/where"]]
)
def test_machine_out_is_checked_first(options, capsys):
    assert cli.main(["doctor", *options]) == 2
    assert "--machine-out needs --distributed, and a folder that is there" in capsys.readouterr().err


def test_a_machines_parameters_fit_80_columns(capsys):
    """Several lines of a cost are lines of the table too."""
    _print_machine(dataclasses.asdict(machine.load("NVIDIA H200")), terminal.output())
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines() if line.startswith(" ")) <= 80
    assert re.search(r"neighbour +[0-9.]+ us +[0-9.]+ us +[0-9.]+ GB/s *\n +[0-9.]+ us +[0-9.]+ GB/s", text)
