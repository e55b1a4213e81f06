"""Standard output: numbers in words, tables that fit 80 columns, and one JSON document instead."""

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tree_attn.commands import phases

COLUMNS = 80


def size(num_bytes: float | None) -> str:
    """Formats a number of bytes: "3.6 kB", "1.31 GB"; "-" for None."""
    if num_bytes is None:
        return "-"
    return _largest_unit(num_bytes, ("B", "kB", "MB", "GB", "TB", "PB", "EB"), lambda number: f"{number:.3g}")


def time(microseconds: float | None) -> str:
    """Formats a time: "35.2 us", "1.42 ms", "2.50 s"; "-" for None."""
    if microseconds is None:
        return "-"
    return _largest_unit(microseconds, ("us", "ms", "s"), lambda number: f"{number:.{2 if number < 9.995 else 1}f}")


def times_as(ratio: float) -> str:
    """Formats a ratio, with two figures or all before the point: "1.3", "14", "5,666"."""
    return f"{ratio:,.0f}" if ratio >= 9.95 else f"{ratio:.1f}"


def count(number: int, noun: str) -> str:
    """Formats a number of things: "1 device", "8 devices"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _largest_unit(number: float, units: Sequence[str], write: Callable[[float], str]) -> str:
    """Returns a number in the largest unit in which it is 1 or more as it is written: 999,999 bytes are "1 MB"."""
    *smaller, last = units
    for unit in smaller:
        if float(write(number)) < 1000:
            return f"{write(number)} {unit}"
        number /= 1000
    return f"{write(number)} {last}"


def counted(count: int, noun: str) -> str:
    """Formats a number of things: "1 device", "8 devices", "2,048 tokens"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def output() -> Console:
    """Returns standard output; in a file or a pipe it has 80 columns, as a terminal has by default."""
    phases.leave_starting()
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=COLUMNS, highlight=False)


def table(*columns: str, title: str | None = None, left: Sequence[str] = ()) -> Table:
    """Returns an empty table, numbers to the right.

    Args:
      columns: the headings.
      left: headings of columns of words. Where the table is wider than the terminal, words go on in the next line.
        Numbers are never cut.
    """
    drawn = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        is_left = column in left
        drawn.add_column(column, justify="left" if is_left else "right", no_wrap=not is_left, overflow="fold")
    return drawn


def print_wide(
    console: Console, title: str | None, first: str, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]
) -> None:
    """Prints rows with many columns of numbers, as several tables where one would be too wide.

    Args:
      first: heading of the rows' names.
      columns: headings of the numbers.
      rows: a name, and a cell for each column.
    """
    head = lambda name: max(map(len, name.split("\n")))
    widths = [max(head(name), *(len(cells[i]) for _, cells in rows)) + 2 for i, name in enumerate(columns)]
    room = console.width - max(head(first), *(len(name) for name, _ in rows)) - 2
    start = 0
    while start < len(columns):
        end = start + 1
        while end < len(columns) and sum(widths[start : end + 1]) <= room:
            end += 1
        drawn = table(first, *columns[start:end], title=title if start == 0 else None, left=(first,))
        for name, cells in rows:
            drawn.add_row(name, *cells[start:end])
        console.print(drawn)
        start = end


def say(console: Console, text: str) -> None:
    """Prints a sentence; square brackets in it are no markup."""
    console.print(text, markup=False, soft_wrap=not console.is_terminal)


def print_document(document: dict[str, Any]) -> None:
    """Prints one JSON document, which is all that standard output gets under `--json`."""
    phases.leave_starting()
    json.dump(document, sys.stdout)
    sys.stdout.write("\n")
