"""Rows of Nsight Compute's samples."""

import json

import pytest
import warp_stalls

SOURCE = """\
"Kernel Name","lean_attention_mosaic_gpu_kernel",
"Address","Source","# Samples","Instructions Executed","stall_long_sb","stall_wait","stall_wait (Not Issued)"
"0x0","      LDC R1, c[0x0][0x28]","1","4","0","1","1"
"0x1","@!P1  BRA   0x7f","99","8","97","2","0"
"Kernel Name","lean_merge_mosaic_gpu_kernel",
"Address","Source","# Samples","Instructions Executed","stall_long_sb","stall_wait","stall_wait (Not Issued)"
"0x0","      EXIT","0","4","-","0","0"
"Kernel Name","lean_attention_mosaic_gpu_kernel",
"Address","Source","# Samples","Instructions Executed","stall_long_sb","stall_wait","stall_wait (Not Issued)"
"0x0","      EXIT","5","4","0","5","5"
"Kernel Name","lean_merge_mosaic_gpu_kernel",
"Address","Source","# Samples","Instructions Executed","stall_long_sb","stall_wait","stall_wait (Not Issued)"
"0x0","      EXIT","1","4","1","0","0"
"""


DETAILS = """\
==PROF== Connected
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","lean_attention","Duration","us","1,234.5"
"0","lean_attention","Duration","us","9"
"0","lean_attention","Registers Per Thread","register/thread","64"
"1","lean_merge","Duration","us","2"
"2","lean_attention","Duration","us","3"
"3","lean_merge","Duration","us","4"
"""


@pytest.fixture
def arguments(tmp_path):
    """Returns the arguments of a run on files that hold the above, of steps a and b; and the file of rows."""
    source, details, origin, out = (tmp_path / name for name in ("source.csv", "details.csv", "origin.json", "rows"))
    source.write_text(SOURCE)
    details.write_text(DETAILS)
    origin.write_text(json.dumps({"steps": ["a", "b"], "host": "vm"}))
    options = {"--source": source, "--details": details, "--origin": origin, "--out": out}
    return [str(x) for option in options.items() for x in option], out


def test_each_kernel_has_a_row_with_its_step_and_where_warps_wait(arguments, capsys):
    warp_stalls.main(arguments[0])
    rows = [json.loads(line) for line in arguments[1].read_text().splitlines()]
    named = [(row["kernel"].removesuffix("_mosaic_gpu_kernel"), row["step"], row["host"]) for row in rows]
    assert named == [(name, step, "vm") for step in ("a", "b") for name in ("lean_attention", "lean_merge")]
    assert [row["duration_us"] for row in rows] == [1234.5, 2.0, 3.0, 4.0]
    first, empty, *_ = rows
    assert first["waits"] == [{"at": 1, "instruction": "@!P1 BRA 0x7f", "share": 0.99, "stall": "long_sb"}]
    assert first["stalls"] == {"long_sb": 97, "wait": 3} and first["samples"] == 100
    assert (first["instructions"], first["warp_instructions"]) == (2, 12)
    assert first["opcodes"] == {"BRA": 8, "LDC": 4} and first["registers_per_thread"] == 64
    assert empty["samples"] == 0 and empty["waits"] == []
    assert "99.0% long_sb" in capsys.readouterr().out


@pytest.mark.parametrize("run", ["31", "31:99,", "31:a"])
def test_a_step_that_is_no_seed_and_case_is_refused(run, tmp_path, capsys):
    with pytest.raises(SystemExit):
        warp_stalls.main(["--run", run, "--origin", str(tmp_path / "origin.json")])
    assert f"--run: must be SEED:CASE of each step, as 31:99,31:51, got {run}\n" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_file_without_kernels_is_refused(arguments, tmp_path, capsys):
    (tmp_path / "source.csv").write_text("==WARNING== no kernels were profiled\n")
    (tmp_path / "details.csv").write_text("==WARNING== no kernels were profiled\n")
    with pytest.raises(SystemExit):
        warp_stalls.main(arguments[0])
    assert "got 0 and 0" in capsys.readouterr().err


@pytest.mark.parametrize("steps, lines", [(["a", "b", "c"], None), (["a", "b"], -1)], ids=["steps", "details"])
def test_kernels_that_are_not_as_many_for_each_step_are_refused(steps, lines, arguments, tmp_path, capsys):
    (tmp_path / "origin.json").write_text(json.dumps({"steps": steps}))
    (tmp_path / "details.csv").write_text("\n".join(DETAILS.splitlines()[:lines]))
    with pytest.raises(SystemExit):
        warp_stalls.main(arguments[0])
    assert "--source: must have as many kernels" in capsys.readouterr().err
    assert not arguments[1].exists() or not arguments[1].read_text()
