"""`tree-attn slurm`: the files are copied whole, and none of a user's is overwritten."""

import os
import pathlib

import pytest

from tree_attn import cli

FILES = pathlib.Path(__file__).parent.parent.parent.parent / "slurm"


def test_all_files_are_copied_with_their_modes(tmp_path, capsys):
    assert cli.main(["slurm", "--copy-to", str(tmp_path / "new")]) == 0
    copied = tmp_path / "new" / "slurm"
    files = [path.relative_to(FILES) for path in FILES.rglob("*") if path.is_file()]
    assert sorted(path.relative_to(copied) for path in copied.rglob("*") if path.is_file()) == sorted(files)
    assert all((copied / file).read_bytes() == (FILES / file).read_bytes() for file in files)
    assert os.access(copied / "minicluster" / "minicluster", os.X_OK)
    assert capsys.readouterr().out.startswith(f"{len(files)} files are in {copied}; how to submit jobs")
    assert cli.main(["slurm", "--copy-to", str(tmp_path / "new")]) == 0, "equal files are no conflict"


def test_a_file_that_differs_is_kept_and_nothing_is_copied(tmp_path, capsys):
    changed = tmp_path / "slurm" / "env.sh"
    changed.parent.mkdir()
    changed.write_text("export NCCL_DEBUG=INFO\n")
    assert cli.main(["slurm", "--copy-to", str(tmp_path)]) == 2
    error = f"--copy-to must be a folder without other SLURM files, got one with {changed}"
    assert capsys.readouterr().err == f"tree-attn slurm: error: {error}\n"
    assert [path.name for path in changed.parent.iterdir()] == ["env.sh"]
    assert changed.read_text() == "export NCCL_DEBUG=INFO\n"


def test_the_folder_must_be_named(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["slurm"])
    assert "--copy-to" in capsys.readouterr().err
