"""Standard output: tables that fit 80 columns, sentences, and one JSON document instead."""

import json
import sys
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tree_attn.commands import phases

COLUMNS = 80


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
