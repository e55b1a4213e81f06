"""Phases on stderr where it is no terminal: a line for each, again where one lasts, and none when quiet."""

import os
import sys
import time

import pytest

from tree_attn.commands import phases


def test_a_phase_that_lasts_is_said_again(capsys, monkeypatch):
    monkeypatch.setattr(phases, "_REPEAT_S", 0.2)
    with phases.command(is_quiet=False):
        with phases.phase("compiling ..."):
            time.sleep(0.5)
        with phases.phase("timing", 3) as timing:
            timing.describe("tree gather")
            timing.advance()
            timing.describe("ring public")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["compiling ...", "compiling (0 s) ..."]
    assert lines[-3:] == ["timing ...", "timing, 1 of 3: tree gather ...", "timing, 2 of 3: ring public ..."]


@pytest.mark.parametrize("is_file", [True, False])
def test_only_a_file_is_told_more_rarely_after_a_while(monkeypatch, tmp_path, is_file):
    monkeypatch.setattr(phases, "_REPEAT_S", 0.1)
    monkeypatch.setattr(phases, "_LATER_S", 0.25)
    read, write = os.pipe()
    if is_file:
        write = os.open(tmp_path / "stderr", os.O_CREAT | os.O_RDWR)
    with os.fdopen(write, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with phases.command(is_quiet=False), phases.phase("compiling"):
            time.sleep(1.5)
        said = os.pread(write, 10_000, 0) if is_file else os.read(read, 10_000)
        monkeypatch.undo()
    os.close(read)
    count = said.count(b"compiling (")
    assert 0 < count <= 4 if is_file else count > 4, said


def test_the_innermost_phase_is_the_one_that_is_said_again(capsys, monkeypatch):
    monkeypatch.setattr(phases, "_REPEAT_S", 0.1)
    with phases.command(is_quiet=False), phases.phase("case 1 of 2"):
        with phases.phase("reading", 2_000_000, is_bytes=True) as reading:
            reading.advance(1_000_000)
            time.sleep(0.35)
        assert "reading, 50% of 2 MB (" in capsys.readouterr().err
        time.sleep(0.35)
        lines = capsys.readouterr().err.splitlines()
    assert lines and all(line.startswith("case 1 of 2 (") for line in lines)


def test_a_quiet_command_has_no_phases(capsys):
    with phases.command(is_quiet=True), phases.phase("compiling"):
        phases.say("a remark")
    assert capsys.readouterr().err == ""


def test_a_remark_is_a_line(capsys):
    with phases.command(is_quiet=False), phases.phase("compiling"):
        phases.say("a [remark]")
    assert capsys.readouterr().err == "compiling ...\na [remark]\n"


def test_a_terminal_has_a_long_remark_with_line_ends_between_words(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    phases.say("a remark that is longer than --a-line")
    assert capsys.readouterr().err == "a remark that is\nlonger than --a-line\n"


def test_the_remark_of_a_command_comes_before_its_first_phase_and_not_without_one(capsys):
    with phases.command(is_quiet=False, remark="programs are kept in x"):
        pass
    with phases.command(is_quiet=False, remark="programs are kept in x"):
        for title in ("reading", "compiling"):
            with phases.phase(title):
                pass
    assert capsys.readouterr().err == "programs are kept in x\nreading ...\ncompiling ...\n"


def test_a_phase_ends_with_an_error_too(capsys):
    with pytest.raises(ValueError, match="wrong"), phases.command(is_quiet=False), phases.phase("compiling"):
        raise ValueError("wrong")
    time.sleep(0.15)
    assert phases._screen._phases == [] and capsys.readouterr().err == "compiling ...\n"
