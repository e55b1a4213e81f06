"""The end of a process, at once."""

import contextlib
import os
import sys
import threading
from typing import NoReturn

LOST_STATUS = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong with the command, and it may be run again
INTERRUPTED_STATUS = 130  # as shells report SIGINT

# The file descriptor of stderr. A program has a copy of its own: number 2 leads nowhere while a tokenizer is made.
_stderr = 2


def keep_stderr() -> None:
    """Lets `say` write to where stderr leads now, whatever is done with its number later."""
    global _stderr
    with contextlib.suppress(OSError):  # there may be no stderr
        _stderr = os.dup(2)


def is_terminal() -> bool:
    """Returns whether `say` writes to a terminal."""
    return os.isatty(_stderr)


def exit_now(status: int, line: str | None = None) -> NoReturn:
    """Ends the process at once, whatever its other threads wait for, after a flush of its output.

    No cleaning up: JAX's would wait for the ranks that are lost.
    """

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # closed, full, broken: nothing is worth staying for
                stream.flush()

    # Another thread may hold a stream's lock, and may itself be stuck.
    flushing = threading.Thread(target=flush, daemon=True)
    flushing.start()
    flushing.join(1.0)
    if line is not None:
        say(line)
    os._exit(status)


def say(line: str, *, end: str = "\n") -> None:
    """Writes a line to stderr, past Python's own stream, whose lock a stuck thread may hold."""
    with contextlib.suppress(OSError):
        os.write(_stderr, (line + end).encode(errors="replace"))
