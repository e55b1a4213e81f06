"""Output to a terminal: numbers in words, consoles, and a progress bar."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def size(num_bytes: float | None) -> str:
    """Formats a number of bytes: "3.6 kB", "1.31 GB"; "-" for None."""
    if num_bytes is None:
        return "-"
    units = ("B", "kB", "MB", "GB", "TB")
    power = next((i for i in range(len(units) - 1) if num_bytes < 1000 ** (i + 1)), len(units) - 1)
    return f"{num_bytes / 1000**power:.3g} {units[power]}"


def time(microseconds: float | None) -> str:
    """Formats a time: "35.2 us", "1.4 ms"; "-" for None."""
    if microseconds is None:
        return "-"
    return f"{microseconds:.1f} us" if microseconds < 1000 else f"{microseconds / 1000:.1f} ms"


def output(width: int = 140) -> Console:
    """Returns standard output; in a file or a pipe it has `width` columns, enough for a whole table."""
    console = Console()
    return console if console.is_terminal else Console(width=width)


@contextlib.contextmanager
def progress(title: str, total: int, *, is_shown: bool) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """Shows a progress bar on stderr; gives `describe(text)` and `advance()`."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not is_shown, transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield (lambda text: bar.update(task, description=f"{title}: {text}")), (lambda: bar.advance(task))
