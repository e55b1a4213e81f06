"""Every file of rows is written by `MeasuredRows`, and every row has its date, host, driver, clocks and commit."""

import ast
import pathlib

import pytest

from tree_attn.measure import provenance
from tree_attn.measure.rows import MeasuredRows, read

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = [
    path for folder in ("tree_attn", "models", "ring_baseline", "scripts") for path in (ROOT / folder).rglob("*.py")
]
# Rows of these are tokens, no measurements.
PLAIN_ROWS = {"tree_attn/measure/rows.py", "tree_attn/commands/generate/saved_tokens.py"}
# JSON that is no row of a measurement, and what it is.
OTHER_JSON = {
    "models/llama/checkpoint/chat_template.py": "a prompt's text",
    "models/llama/checkpoint/reading.py": "bytes of a tokenizer",
    "scripts/fit_choice.py": "fitted constants",
    "scripts/gpu_check.py": "printed rows, and their keys",
    "scripts/cache_error.py": "a printed row",
    "scripts/layer_timeline.py": "the numbers of a picture",
    "scripts/oracle_case.py": "a field of a row",
    "scripts/sanitize.py": "a printed row",
    "scripts/plot_concepts.py": "a digest of the numbers of a figure",
    "scripts/ring_timeline.py": "the intervals of a time line",
    "scripts/soak_fused.py": "a printed row",
    "scripts/sweep_flashinfer.py": "messages to a worker, whose replies become rows",
    "scripts/sweep_flashinfer_worker.py": "those replies",
    "scripts/sweep_programs.py": "messages to processes that compile",
    "scripts/warp_stalls.py": "what rows say of a run",
    "tree_attn/cluster/channel.py": "messages between processes",
    "tree_attn/cluster/facts.py": "facts that processes compare",
    "tree_attn/commands/terminal.py": "documents of --json",
    "tree_attn/cost/machine.py": "a machine's parameters",
    "tree_attn/kernels/tuning.py": "the table of layouts",
    "tree_attn/measure/rows.py": "rows",
}


def calls_in(path: pathlib.Path) -> set[str]:
    """Returns the names of the functions that a file calls: the last part of each."""
    calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    named = lambda call: call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "")
    json_calls = ("json.dumps", "json.dump")
    return {ast.unparse(call) if ast.unparse(call) in json_calls else named(call) for call in calls}


def test_rows_of_measurements_have_one_writer():
    calls = {str(path.relative_to(ROOT)): calls_in(path) for path in SOURCES}
    assert {path for path, names in calls.items() if "RowWriter" in names} <= PLAIN_ROWS
    writers = {path for path, names in calls.items() if "MeasuredRows" in names}
    assert len(writers) >= 15
    assert {path for path, names in calls.items() if {"json.dumps", "json.dump"} & names} == OTHER_JSON.keys()


def test_a_row_gets_what_it_lacks_and_keeps_what_it_has(tmp_path):
    writer = MeasuredRows(tmp_path / "results.jsonl", is_writer=True)
    writer.append({"us": 1.0, "date": "2026-11-22", "clock_sm_mhz": 1980})
    writer.append({"us": 2.0} | dict.fromkeys(provenance.ORIGIN, "known"))
    writer.replace(1, {"us": 3.0})
    first, second = read(writer.path)
    assert first == writer.rows[0] and set(first) == set(second) == {"us", *provenance.ORIGIN}
    assert (first["date"], first["clock_sm_mhz"], second["us"]) == ("2026-11-22", 1980, 3.0)
    assert second["host"] == provenance.place()["host"] and second["git_commit"] == provenance.git_commit()
    assert second["date"] > "2026-11-22"


def test_a_process_that_does_not_write_asks_for_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "completed", lambda row: pytest.fail("not this process's"))
    writer = MeasuredRows(tmp_path / "results.jsonl", is_writer=False)
    writer.append({"us": 1.0})
    writer.replace(0, {"us": 2.0})
    assert writer.rows == [{"us": 2.0}] and not writer.path.exists()


def test_the_reports_of_doctor_have_the_same_fields():
    for name in ("examine", "measure_machine"):
        source = (ROOT / "tree_attn/commands/doctor/checks.py").read_text()
        function = next(node for node in ast.parse(source).body if getattr(node, "name", "") == name)
        assert "provenance.completed({})" in ast.unparse(function)
