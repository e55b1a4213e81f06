"""Phases of a command, on stderr: a bar on a terminal, elsewhere a line for each, and none with `--quiet`.

Where stderr is no terminal, a phase that goes on says so every 2.5 s. In a file, which is read later, it does so every
30 s after half a minute.
"""

import contextlib
import dataclasses
import os
import shutil
import stat
import sys
import textwrap
import threading
import time
from collections.abc import Iterator

from tree_attn.commands.units import size

STARTING = "starting JAX"
_BEFORE_STARTING_S = 2.0  # a command that ends sooner has no phase
ROOM_FOR_CTRL_C = 3  # columns
_REPEAT_S, _LATER_S, _LATER_REPEAT_S = 2.5, 30.0, 30.0


@dataclasses.dataclass
class Phase:
    """One phase that runs.

    Attributes:
      title: what is being done.
      total: steps or bytes, where they are known.
      is_bytes: `total` counts bytes.
      done: steps or bytes so far.
      detail: what is being done now, after the title.
    """

    title: str
    total: int | None = None
    is_bytes: bool = False
    done: int = 0
    detail: str = ""
    began: float = dataclasses.field(default_factory=time.monotonic)

    def advance(self, count: int = 1) -> None:
        """Counts steps or bytes that are done."""
        self.done += count
        _screen.show()

    def describe(self, detail: str) -> None:
        """Says what is being done now: a new line where stderr is no terminal."""
        self.detail = detail
        _screen.show(is_new=True)

    @property
    def text(self) -> str:
        """The phase in words: "timing, 3 of 14: tree gather, 8,192 keys"."""
        count = ""
        if self.total and self.is_bytes:
            count = f", {self.done / self.total:.0%} of {size(self.total)}"
        elif self.total:
            count = f", {min(self.done + 1, self.total)} of {self.total}"
        return self.title + count + (f": {self.detail}" if self.detail else "")


class _Screen:
    """Standard error, and the phases that run, the innermost last."""

    def __init__(self):
        self.is_quiet = False
        self.remark: str | None = None
        self._phases: list[Phase] = []
        self._lock = threading.RLock()
        self._live = None  # rich's display, on a terminal
        self._last_line = 0.0
        self._repeater: threading.Thread | None = None

    def push(self, phase: Phase) -> None:
        """Shows a phase until `pop`."""
        with self._lock:
            if phase.title != STARTING and self.remark is not None:
                text, self.remark = self.remark, None
                self.say(text)
            self._phases.append(phase)
            self.show(is_new=phase.title != STARTING)

    def pop(self, phase: Phase) -> None:
        """Ends a phase."""
        with self._lock:
            if phase in self._phases:
                self._phases.remove(phase)
            self.show()

    def leave_starting(self) -> None:
        """Ends the phase before the first."""
        with self._lock:
            self._phases = [phase for phase in self._phases if phase.title != STARTING]
            self.show()

    def stop(self) -> bool:
        """Takes everything off the terminal, at the end of the command; returns whether there was a bar."""
        with self._lock:
            had_bar = self._live is not None
            self._phases = []
            self.show()
            return had_bar

    def show(self, *, is_new: bool = False) -> None:
        """Shows the innermost phase as it is now; `is_new` begins a line where stderr is no terminal."""
        with self._lock:
            if self.is_quiet:
                return
            if self._live is not None or sys.stderr.isatty():  # what has begun as a bar must end as one
                self._show_live()
            elif self._phases:
                if is_new:
                    shown = self._phases[-1]
                    self._print(shown.text if shown.detail else shown.title)
                if self._repeater is None:
                    self._repeater = threading.Thread(target=self._repeat, daemon=True, name="phases")
                    self._repeater.start()

    def say(self, text: str) -> None:
        """Prints a line above the phase that runs."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            self.leave_starting()
            if self.is_quiet:
                return
            if self._live is not None:
                self._live.console.print(text, markup=False, highlight=False)
            else:
                print_wrapped(text)

    def _show_live(self) -> None:
        if not self._phases:
            if self._live is not None:
                self._live.stop()
                self._live = None
            return
        if self._live is None:
            self._live = _new_bar()
            self._live.start()
        phase = self._phases[-1]
        (task,) = self._live.task_ids or [self._live.add_task("")]
        if self._live.tasks[0].fields.get("phase") is not phase:
            self._live.reset(task, phase=phase)
        self._live.update(task, description=phase.text, total=phase.total, completed=phase.done)

    def _repeat(self) -> None:
        """Says again what goes on, as long as there is something."""
        while True:
            time.sleep(0.1)
            with self._lock:
                if not self._phases or self.is_quiet:
                    self._repeater = None
                    return
                phase, now = self._phases[-1], time.monotonic()
                is_later = now - phase.began >= _LATER_S and _is_file(sys.stderr)
                wait_s = _LATER_REPEAT_S if is_later else _REPEAT_S
                if phase.title == STARTING and not self._last_line:
                    wait_s = _BEFORE_STARTING_S
                if now - max(phase.began, self._last_line) >= wait_s:
                    self._print(f"{phase.text} ({now - phase.began:.0f} s)")

    def _print(self, text: str) -> None:
        self._last_line = time.monotonic()
        with contextlib.suppress(OSError, ValueError):  # a closed pipe: the work is worth more than its lines
            print(f"{text} ...", file=sys.stderr, flush=True)


def print_wrapped(text: str) -> None:
    """Prints lines on stderr; a terminal gets them with line ends between words."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        text = "\n".join(textwrap.fill(line, width, break_on_hyphens=False) for line in text.split("\n"))
    print(text, file=sys.stderr, flush=True)


def _is_file(stream) -> bool:
    try:
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):  # no file behind it
        return False


_screen = _Screen()


@contextlib.contextmanager
def phase(title: str, total: int | None = None, *, is_bytes: bool = False) -> Iterator[Phase]:
    """Shows a phase on stderr while the block runs.

    Args:
      title: what is being done, such as "compiling".
      total: steps or bytes, where they are known.
      is_bytes: `total` counts bytes.

    Example:
      >>> with phase("timing", len(cases)) as timing:
      ...     for case in cases:
      ...         timing.describe(case.label)
      ...         timing.advance()
    """
    _screen.leave_starting()
    shown = Phase(title.removesuffix(" ..."), total, is_bytes)
    _screen.push(shown)
    try:
        yield shown
    finally:
        _screen.pop(shown)


@contextlib.contextmanager
def command(*, is_quiet: bool, remark: str | None = None) -> Iterator[None]:
    """Shows that JAX starts, until the first phase; leaves the terminal clean after the command.

    Args:
      is_quiet: show nothing.
      remark: a line above the first phase; a command that is refused before has none.
    """
    _screen.is_quiet, _screen.remark, _screen._last_line = is_quiet, remark, 0.0
    if "jax" not in sys.modules:
        _screen.push(Phase(STARTING))
    try:
        yield
    finally:
        _screen.stop()


def say(text: str) -> None:
    """Prints a line on stderr, above what is being done, unless the command is quiet."""
    _screen.say(text)


def leave_starting() -> None:
    """Ends the phase before the first, for output that comes before any phase."""
    _screen.leave_starting()


def stop() -> bool:
    """Takes everything off the terminal; returns whether there was a bar."""
    return _screen.stop()


def _new_bar():
    from rich.console import Console, ConsoleDimensions
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    class _Narrower(Console):
        """Leaves room for the "^C" that a terminal shows after the bar: in the next line it would keep the bar."""

        @property
        def size(self) -> ConsoleDimensions:
            width, height = super().size
            return ConsoleDimensions(max(width - ROOM_FOR_CTRL_C, 1), height)

    text = TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True))
    columns = (SpinnerColumn(), text, BarColumn(bar_width=10), TimeElapsedColumn())
    return Progress(*columns, console=_Narrower(stderr=True), transient=True, expand=True)
