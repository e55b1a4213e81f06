"""The front door: help, version, unknown commands, and errors that are one line."""

import argparse
import importlib
import os
import pathlib
import subprocess
import sys
import types

import pytest

from tree_attn import cli
from tree_attn.cluster import join
from tree_attn.cluster.launch import Launch
from tree_attn.commands import interrupts


def test_no_command_prints_help(capsys):
    assert cli.main([]) == 2
    assert "tree-attn demo" in capsys.readouterr().out


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert all(name in text for name in cli.COMMANDS)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_the_agreed_shape_and_teaches_by_example(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    module = importlib.import_module(f"tree_attn.commands.{name}")
    assert callable(module.run)
    with pytest.raises(SystemExit, match="0"):
        cli.main([name, "--help"])
    text = capsys.readouterr().out
    assert f"tree-attn {name}" in text and max(map(len, text.splitlines())) <= 80
    assert f"tree-attn {name}" in module.HELP


def test_an_interrupted_command_says_in_a_line_where_its_work_is(capsys, monkeypatch):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("tree_attn.commands.compare"), "run", interrupt)
    assert cli.main(["compare", "--keys", "8", "--out", "results"]) == cli.INTERRUPTED_STATUS
    expected = "interrupted; nothing is in results yet; run it again"
    assert capsys.readouterr().err == f"tree-attn compare: {expected}\n"


def test_the_line_of_an_interrupted_command_counts_what_is_saved(tmp_path):
    def line(**options):
        return interrupts.resumption(argparse.Namespace(**options))

    (tmp_path / "results.jsonl").write_text("{}\n{}\n{")  # a torn last line is no row
    path = tmp_path / "results.jsonl"
    assert line(out=tmp_path) == f"2 rows are saved in {path}; the same command goes on from there"
    assert line(out=None) == "nothing is saved without --out DIR"
    assert line() == line(out=None, chat=True) == line(out=None, prompt=["a", "b"]) == "nothing is saved; run it again"
    (tmp_path / "results.jsonl").unlink()
    for name in ("a", "b"):  # `reproduce` has a folder for each run
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.jsonl").write_text("{}\n")
    assert line(out=tmp_path, command_name="reproduce").startswith(f"2 rows are saved in {tmp_path}; ")
    assert line(out=tmp_path, command_name="compare") == f"nothing is in {tmp_path} yet; run it again"
    (tmp_path / "tokens.jsonl").write_text('{"ids": [1, 2]}\n{"ids": [3]}\n')
    assert line(out=tmp_path).startswith("3 tokens are saved in ")


def test_an_interrupt_while_a_module_is_imported_is_a_line_too(capsys, monkeypatch):
    """Ctrl-C is heeded in a thread of its own, which may find modules that another one has half imported."""
    monkeypatch.setitem(sys.modules, "tree_attn.cluster.join", types.ModuleType("tree_attn.cluster.join"))
    cli._end_interrupted(argparse.Namespace(command_name="doctor"))
    assert capsys.readouterr().err == "tree-attn doctor: interrupted; nothing is saved; run it again\n"


@pytest.mark.parametrize(
    "options, message, expected",
    [
        (["max_new_tokens"], "max_new_tokens must be at most 3, got 4", "--max-new-tokens must be at most 3, got 4"),
        (
            ["heads", "kv_heads"],
            "num_heads must be a multiple of num_kv_heads",
            "--heads must be a multiple of --kv-heads",
        ),
        (["num_keys", "keys"], "num_keys must be above 0", "--num-keys must be above 0"),
        (["context", "tail"], "context must be at least tail + 8", "--context must be at least tail + 8"),
        (["model"], "model='nowhere' needs gguf", "--model='nowhere' needs gguf"),
        (["devices"], "no devices in /tmp/n_devices or 'n_devices'", "no devices in /tmp/n_devices or 'n_devices'"),
        (["context"], "head_dim must be even", "head_dim must be even"),
    ],
)
def test_errors_of_the_library_name_options(options, message, expected):
    assert cli._with_flags(message, argparse.Namespace(command_name="x", **dict.fromkeys(options))) == expected


@pytest.mark.parametrize(
    ("options", "error", "expected"),
    [
        ({"out": pathlib.Path("p.txt/x")}, NotADirectoryError(20, "Not a directory", "p.txt/x"), "--out: Not a"),
        ({"copy_to": pathlib.Path("p.txt")}, OSError(20, "Not a directory", "p.txt/slurm"), "--copy-to: Not a"),
        ({"prompt_file": ["a", "b"]}, OSError(2, "No such file", "b"), "--prompt-file: No such file: 'b'"),
        ({"out": None, "seed": 0}, OSError(2, "No such file", "b"), "No such file: 'b'"),
        ({}, OSError(28, "No space left: row 3 of x could not be written"), "No space left: row 3 of x"),
    ],
)
def test_errors_of_files_name_the_option_and_no_number(options, error, expected):
    words = cli._words(error, argparse.Namespace(command_name="x", **options))
    assert words.startswith(expected) and "Errno" not in words


def test_a_saver_runs_while_its_block_runs():
    calls = []
    with interrupts.saved_by(lambda: calls.append(1)):
        interrupts.save_all()
    interrupts.save_all()
    assert calls == [1]


@pytest.mark.parametrize("earlier", [None, Launch(source="single", hosts=("n1",))], ids=["first", "after one alone"])
def test_an_error_before_ranks_have_joined_names_the_rank(capsys, monkeypatch, earlier):
    """Also where this process has run a command alone: the next one joins anew."""
    monkeypatch.setattr(join, "current", lambda: earlier)
    place = {
        "RANK": 1,
        "WORLD_SIZE": 2,
        "LOCAL_RANK": 1,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_ADDR": "n1",
        "MASTER_PORT": 1234,
    }
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    assert cli.main(["compare", "--keys", "9", "--devices", "8", "--no-plots", "--out", "results"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tree-attn compare: rank 1 on ") and ": error: --keys must be multiples" in error


def test_a_platform_that_cannot_start_is_named():
    """Without its plugin, JAX ends in an assertion without words."""
    command = [sys.executable, "-m", "tree_attn.cli", "doctor", "-q"]
    environment = os.environ | {"JAX_PLATFORMS": "rocm"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "tree-attn doctor: error: JAX_PLATFORMS=rocm must name a platform that can start here"
    )
    assert done.stderr.count("\n") == 1


def test_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["compere"])
    assert "invalid choice: 'compere'" in capsys.readouterr().err


def test_help_imports_no_command_and_starts_no_backend():
    code = (
        "import sys, jax\n"
        "from tree_attn import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not [name for name in sys.modules if name.startswith('tree_attn.commands.')]\n"
        "jax.config.update('jax_num_cpu_devices', 2)  # an error once a backend has started\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_help_of_a_command_loads_no_jax():
    """Options are declared in modules that load JAX only when the command runs."""
    code = (
        "import sys\n"
        "from tree_attn import cli\n"
        "for name in cli.COMMANDS:\n"
        "    try: cli.main([name, '--help'])\n"
        "    except SystemExit: pass\n"
        "    assert not {'jax', 'numpy', 'flax', 'rich', 'matplotlib'} & set(sys.modules), name\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_error_is_one_line_and_names_the_command(capsys, tmp_path):
    assert cli.main(["compare", "--keys", "0", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error == "tree-attn compare: error: --keys must be an integer of at least 1, got 0\n"


def test_traceback_on_request(monkeypatch, tmp_path):
    monkeypatch.setenv("TREE_ATTN_TRACEBACK", "1")
    with pytest.raises(ValueError, match="num_keys must be"):
        cli.main(["compare", "--keys", "0", "--out", str(tmp_path)])


def test_module_runs_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "tree_attn.cli", "--help"], capture_output=True, text=True, timeout=120, env=os.environ
    )
    assert done.returncode == 0 and "COMMAND" in done.stdout
