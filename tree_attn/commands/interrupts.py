"""Ctrl-C: a command ends within a second, also inside a call of C++, after it has saved what it holds.

Python raises KeyboardInterrupt between bytecodes only, and so after a compilation or a collective. Here a thread of
its own is woken by the signal, saves, and ends the process: no code of the command is cut in its middle.
"""

import argparse
import atexit
import contextlib
import json
import pathlib
import signal
import socket
import threading
from collections.abc import Callable

from tree_attn.cluster import ending
from tree_attn.cluster.ending import INTERRUPTED_STATUS, exit_now
from tree_attn.commands import phases

SAVING_S = 0.6  # for the savers, and to tell other ranks; the rest of the second is for this process's end

# Held by a command while it changes what a saver writes.
lock = threading.RLock()
_savers: list[Callable[[], None]] = []


@contextlib.contextmanager
def saved_by(saver: Callable[[], None]):
    """Calls `saver` if the block is interrupted; it may run in another thread, with `lock` held.

    Example:
      >>> saved = []
      >>> with saved_by(lambda: saved.append("row")):
      ...     pass
      >>> saved  # the block was not interrupted
      []
    """
    _savers.append(saver)
    try:
        yield
    finally:
        _savers.remove(saver)


def save_all() -> None:
    """Calls the savers of all blocks that run."""
    if lock.acquire(timeout=SAVING_S):
        for saver in _savers:
            saver()


def watch(end: Callable[[], None]) -> None:
    """Lets Ctrl-C call `end` and end this process with status 130, whatever its main thread does.

    Args:
      end: saves and prints the line, in a thread of its own; it may end the process by itself.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return  # a shell lets what it runs in the background ignore Ctrl-C
    ending.keep_stderr()
    receiver, sender = socket.socketpair()
    sender.setblocking(False)

    def wait() -> None:
        while signal.SIGINT not in receiver.recv(16):
            pass
        said = threading.Event()

        def say() -> None:
            with contextlib.suppress(Exception):  # it may meet the command in any state: a line is worth more than why
                end()
                said.set()

        threading.Thread(target=say, daemon=True).start()
        said.wait(SAVING_S)
        exit_now(INTERRUPTED_STATUS, None if said.is_set() else "tree-attn: interrupted; what was saved is on disk")

    threading.Thread(target=wait, daemon=True, name="interrupts").start()
    signal.signal(signal.SIGINT, lambda *_: None)  # the signal reaches the socket all the same
    signal.set_wakeup_fd(sender.detach(), warn_on_full_buffer=False)
    # Registered first, it runs last. Python then takes its handlers back, and a signal would end what is complete.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


def restore_terminal() -> None:
    """Takes the bar away, with the "^C" after it, and shows the cursor again; without a bar it begins a new line."""
    had_bar = phases.stop()
    if ending.is_terminal():
        ending.say("\r\x1b[2K\x1b[?25h" if had_bar else "\x1b[?25h\n", end="")


def resumption(args: argparse.Namespace) -> str:
    """Returns what is saved, and how to go on: the end of the line of an interrupted command."""
    out = getattr(args, "out", None)
    if out is None:
        is_one = not getattr(args, "chat", False) and len(getattr(args, "prompt", None) or ()) < 2
        can_save = hasattr(args, "out") and is_one
        return "nothing is saved without --out DIR" if can_save else "nothing is saved; run it again"
    for name, what in (("results.jsonl", "row"), ("tokens.jsonl", "token")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            paths = [pathlib.Path(out) / name]
            if getattr(args, "command_name", None) == "reproduce" and not paths[0].exists():  # a folder for each run
                paths = sorted(pathlib.Path(out).glob(f"*/{name}")) or paths
            path = paths[0] if len(paths) == 1 else out
            lines = [line for one in paths for line in one.read_bytes().split(b"\n")[:-1]]
            count = sum(len(json.loads(line)["ids"]) for line in lines) if what == "token" else len(lines)
            words = f"1 {what} is" if count == 1 else f"{count} {what}s are"
            return f"{words} saved in {path}; the same command goes on from there"
    return f"nothing is in {out} yet; run it again"
