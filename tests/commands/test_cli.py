"""The front door: help, version, unknown commands, and errors that are one line."""

import importlib
import os
import subprocess
import sys

import pytest

from tree_attn import cli


def test_no_command_prints_help(capsys):
    assert cli.main([]) == 2
    assert "tree-attn demo" in capsys.readouterr().out


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert all(name in text for name in cli.COMMANDS)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_the_agreed_shape_and_teaches_by_example(name, capsys):
    module = importlib.import_module(f"tree_attn.commands.{name}")
    assert callable(module.run)
    with pytest.raises(SystemExit, match="0"):
        cli.main([name, "--help"])
    assert f"tree-attn {name}" in capsys.readouterr().out
    assert f"tree-attn {name}" in module.HELP


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
    assert error == "tree-attn compare: error: num_keys must be an integer of at least 1, got 0\n"


def test_traceback_on_request(monkeypatch, tmp_path):
    monkeypatch.setenv("TREE_ATTN_TRACEBACK", "1")
    with pytest.raises(ValueError, match="num_keys must be"):
        cli.main(["compare", "--keys", "0", "--out", str(tmp_path)])


def test_module_runs_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "tree_attn.cli", "--help"], capture_output=True, text=True, timeout=120, env=os.environ
    )
    assert done.returncode == 0 and "COMMAND" in done.stdout
