"""Ctrl-C ends a command within a second, with one line and status 130, whatever it is doing."""

import pytest

from . import screens

BLOCKED = """
import sys, time
import jax, jax.numpy as jnp
from tree_attn import cli
from tree_attn.commands import doctor, phases
from tree_attn.models.llama.checkpoint import tokenizer

def in_a_program(args):
    print("waiting", flush=True)
    spin = lambda x: jax.lax.while_loop(lambda x: x >= 0, lambda x: (x + 1) % 7, x)
    jax.block_until_ready(jax.jit(spin)(jnp.int32(0)))

def under_a_bar(args):
    with phases.phase("waiting"):
        time.sleep(600)

def while_a_tokenizer_is_made(args):
    with phases.phase("opening"), tokenizer.making("tokenizer.json"):
        print("waiting", flush=True)
        time.sleep(600)

def in_a_bare_except(args):
    while True:
        try:
            print("waiting", flush=True)
            time.sleep(600)
        except BaseException:
            continue

doctor.run = {where}
sys.argv = ["tree-attn", "doctor"]
sys.exit(cli.main())
"""


def check_end(run: screens.Run, command: str) -> str:
    """Asserts what holds for every interrupted command; returns the line."""
    assert run.status == 130, run
    assert run.ended_s < 1, run
    assert "Traceback" not in run.out + run.err, run
    lines = [line for line in (*run.lines, *run.err.splitlines()) if line.startswith(f"tree-attn {command}: ")]
    assert len(lines) == 1 and "interrupted; " in lines[0], run
    return lines[0]


@pytest.mark.parametrize("where", ["in_a_program", "in_a_bare_except", "while_a_tokenizer_is_made"])
def test_a_command_ends_where_python_would_not_be_interrupted(where):
    """Until a compiled program has run, Python raises no KeyboardInterrupt; a bare except would swallow it."""
    program = ("-c", BLOCKED.replace("{where}", where))
    run = screens.run([], program=program, interrupt_at=lambda text: "waiting" in text, limit_s=60)
    assert check_end(run, "doctor") == "tree-attn doctor: interrupted; nothing is saved; run it again"


def test_ctrl_c_in_a_terminal_leaves_its_cursor_visible():
    program = ("-c", BLOCKED.replace("{where}", "in_a_bare_except"))
    run = screens.run([], program=program, is_terminal=True, interrupt_at=lambda text: "waiting" in text)
    check_end(run, "doctor")
    assert run.out.rfind("\x1b[?25h") > run.out.rfind("\x1b[?25l")


def test_ctrl_c_in_a_terminal_leaves_nothing_of_the_bar():
    program = ("-c", BLOCKED.replace("{where}", "under_a_bar"))
    run = screens.run([], program=program, is_terminal=True, interrupt_at=lambda text: text.count("waiting") > 1)
    check_end(run, "doctor")
    drawn = [line for part in run.out.split("\n") for line in screens.without_escapes(part).split("\r")]
    assert max(map(len, drawn)) <= screens.COLUMNS, "the ^C would begin a line of its own"
    assert any("waiting" in line and line.endswith("^C") for line in drawn)
    assert [line for line in run.lines if "interrupted" not in line] == [""], run.lines


def test_ctrl_c_before_anything_is_imported_is_a_line_too():
    code = "import signal, runpy, sys\nsys.modules['tree_attn.cli'] = None\n"  # importing it fails
    code += "sys.excepthook = lambda *error: signal.raise_signal(signal.SIGINT)\n"
    run = screens.run(["doctor"], program=("-c", code + "runpy.run_module('tree_attn', run_name='__main__')"))
    assert (run.status, run.out, run.err) == (130, "", "tree-attn doctor: interrupted; it had not begun\n")


BROKEN = """
import sys, time
from tree_attn import cli
from tree_attn.commands import doctor, interrupts

def fail():
    raise RuntimeError("a saver that fails")

def run(args):
    with interrupts.saved_by(fail):
        print("waiting", flush=True)
        time.sleep(600)

doctor.run = run
sys.argv = ["tree-attn", "doctor"]
sys.exit(cli.main())
"""


def test_a_saver_that_fails_does_not_keep_the_command():
    run = screens.run([], program=("-c", BROKEN), interrupt_at=lambda text: "waiting" in text, limit_s=60)
    assert (run.status, run.err) == (130, "tree-attn: interrupted; what was saved is on disk\n")
    assert run.ended_s < 1


COMPLETE = """
import os, sys, time
from tree_attn import cli
from tree_attn.commands import doctor

class Last:
    def __del__(self, write=os.write, sleep=time.sleep):
        write(1, b"waiting")
        sleep(0.5)

doctor.run = lambda args: 0
last = Last()
sys.argv = ["tree-attn", "doctor"]
sys.exit(cli.main())
"""


def test_ctrl_c_while_python_ends_changes_nothing():
    run = screens.run([], program=("-c", COMPLETE), interrupt_at=lambda text: "waiting" in text, limit_s=60)
    assert (run.status, run.err) == (0, "")
