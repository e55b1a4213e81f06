"""Options of every command: the folder of compiled programs, and choices that are said once."""

import argparse
import logging
import os
import sys

import pytest

from tree_attn import cli
from tree_attn.commands import common


@pytest.fixture
def before_jax(monkeypatch, tmp_path):
    """The state of a process that has not imported JAX, whose user has a cache folder in `tmp_path`."""
    monkeypatch.delitem(sys.modules, "jax")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in (common.CACHE_VARIABLE, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        monkeypatch.setenv(name, "")  # so that what the test sets is taken back
        monkeypatch.delenv(name)


def keep(is_wanted: bool = True):
    return common.keep_compiled(argparse.Namespace(compilation_cache=is_wanted))


def test_compiled_programs_are_kept_in_the_users_cache_and_that_is_said_once(before_jax, tmp_path, monkeypatch):
    folder = keep()
    assert folder.parent == tmp_path / "tree-attn" and folder.is_dir()
    assert os.environ[common.CACHE_VARIABLE] == str(folder)
    monkeypatch.delenv(common.CACHE_VARIABLE)
    (folder / "program").touch()
    assert keep() is None and os.environ[common.CACHE_VARIABLE] == str(folder)


def test_the_users_own_folder_is_kept(before_jax, tmp_path, monkeypatch):
    monkeypatch.setenv(common.CACHE_VARIABLE, "/elsewhere")
    assert keep() is None
    assert os.environ[common.CACHE_VARIABLE] == "/elsewhere" and list(tmp_path.iterdir()) == []


def test_without_the_cache_nothing_is_kept(before_jax, tmp_path):
    assert keep(is_wanted=False) is None
    assert common.CACHE_VARIABLE not in os.environ and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_commands_that_measure_compilation_or_compile_nothing_have_no_cache(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main([name, "--help"])
    text = capsys.readouterr().out
    assert ("--no-compilation-cache" in text) == (name in common.COMPILING)
    assert "--verbose" in text and "--quiet" in text


def test_a_choice_is_said_once(capsys):
    logger = logging.getLogger("tree_attn")
    level = logger.level
    try:
        common.show_choices(1)
        for _ in range(2):
            logger.info("implementation=None picked %r", "xla")
            logger.debug("passed over")
    finally:
        common.show_choices(0)
        logger.setLevel(level)
    logger.warning("not on this handler any more")
    assert capsys.readouterr().err == "tree_attn: implementation: picked 'xla'\n"
