"""A command under a pseudo-terminal or in pipes: what it writes and when, and Ctrl-C at a chosen moment."""

import dataclasses
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence

COLUMNS, LINES = 80, 24
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A command that has ended.

    Attributes:
      status: its exit status.
      out, err: text of stdout and stderr; a terminal has both in `out`.
      longest_silence_s: the longest time without a byte on either, from the start to the end.
      ended_s: seconds from the interrupt to the end; None without an interrupt.
    """

    status: int
    out: str
    err: str
    longest_silence_s: float
    ended_s: float | None

    @property
    def lines(self) -> list[str]:
        """Lines of `out` as they stay on the screen, which wraps none: without escapes and what was written over."""
        rows, row, column = [""], 0, 0
        for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|[\r\n]|[^\r\n\x1b]+", self.out):
            if part == "\r":
                column = 0
            elif part == "\n" or part == "\x1b[1A":
                row, column = max(row + (1 if part == "\n" else -1), 0), 0
                rows += [""] * (row + 1 - len(rows))
            elif part == "\x1b[2K":
                rows[row] = ""
            elif not part.startswith("\x1b"):
                rows[row] = rows[row][:column].ljust(column) + part + rows[row][column + len(part) :]
                column += len(part)
        return rows


def without_escapes(text: str) -> str:
    """Returns the text without what moves the cursor or sets colors."""
    return _ESCAPES.sub("", text)


def run(
    arguments: Sequence[str],
    *,
    is_terminal: bool = False,
    interrupt_s: float | None = None,
    interrupt_at: Callable[[str], bool] | None = None,
    program: Sequence[str] = ("-m", "tree_attn"),
    limit_s: float = 300,
    **environment: str,
) -> Run:
    """Runs `python -m tree_attn` with these arguments to its end.

    Args:
      is_terminal: run it under a pseudo-terminal of 80 columns; else stdout and stderr are pipes.
      interrupt_s: seconds after the start at which SIGINT is sent, as Ctrl-C does.
      interrupt_at: send it instead as soon as this is true of all text so far.
      program: arguments of the interpreter before the command's.
      limit_s: seconds after which the command counts as stuck.
      environment: variables that differ from this process's.
    """
    variables = os.environ | {"COLUMNS": "", "JAX_PLATFORMS": "cpu", "TERM": "xterm"} | environment
    variables = {name: value for name, value in variables.items() if value}
    outer, inner = _terminal() if is_terminal else (None, None)
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), inner) if is_terminal else _pipes()
    # A shell lets what it runs in the background ignore Ctrl-C, and children inherit that.
    command = ["env", "--default-signal=INT", sys.executable, *program, *arguments]
    process = subprocess.Popen(command, env=variables, **streams)
    if is_terminal:
        os.close(inner)
        sources = {outer: "out"}
    else:
        sources = {process.stdout.fileno(): "out", process.stderr.fileno(): "err"}
    try:
        return _follow(process, sources, interrupt_s, interrupt_at, limit_s)
    finally:
        process.kill()
        process.wait()
        if is_terminal:
            os.close(outer)


def _follow(process, sources: dict[int, str], interrupt_s: float | None, interrupt_at, limit_s: float) -> Run:
    """Reads all streams until they close; interrupts the process when it is time."""
    texts, began = {"out": b"", "err": b""}, time.monotonic()
    last, silence, interrupted = began, 0.0, None
    while sources:
        now = time.monotonic()
        assert now - began < limit_s, f"{process.args} has not ended: {texts}"
        is_time = interrupt_s is not None and now - began >= interrupt_s
        if interrupt_at is not None:
            is_time = interrupt_at(b"".join(texts.values()).decode(errors="replace"))
        if interrupted is None and is_time:
            if "err" not in sources.values():
                os.write(next(iter(sources)), b"\x03")  # the terminal shows "^C"; it controls no process here
                time.sleep(0.05)  # it may drop what is written just before "^C" shows
            process.send_signal(signal.SIGINT)
            interrupted = time.monotonic()
        for descriptor in select.select(list(sources), [], [], 0.02)[0]:
            try:
                piece = os.read(descriptor, 1 << 16)
            except OSError:  # a pseudo-terminal whose other side has been closed
                piece = b""
            if not piece:
                del sources[descriptor]
                continue
            texts[sources[descriptor]] += piece
            silence, last = max(silence, time.monotonic() - last), time.monotonic()
    status, end = process.wait(limit_s), time.monotonic()
    out, err = (text.decode(errors="replace") for text in texts.values())
    ended_s = None if interrupted is None else end - interrupted
    return Run(status=status, out=out, err=err, longest_silence_s=max(silence, end - last), ended_s=ended_s)


def _terminal() -> tuple[int, int]:
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    return outer, inner


def _pipes() -> dict[str, int]:
    return {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
