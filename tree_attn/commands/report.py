"""What `tree-attn compare` shows in the terminal: predictions, results and progress."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tree_attn.commands.compare.cases import Case
from tree_attn.cost import limits, predict


@contextlib.contextmanager
def progress(title: str, total: int, *, is_shown: bool) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """A progress bar on stderr; gives `describe(what)` and `advance()`."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not is_shown, transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield (lambda what: bar.update(task, description=f"{title}: {what}")), (lambda: bar.advance(task))


def print_predictions(cases: Sequence[Case], device_kind: str, neighbour_gb_per_s: dict) -> None:
    """Prints the physical limit of each step, and what the paper's equations give for each case.

    `neighbour_gb_per_s` has, for each step, the rate of bare transfers of one shard's keys, or None.
    """
    if not cases:
        return
    table = Table(title="Predicted per device and step: memory by equations 8 and 9, traffic by 10 and 14")
    for column in ("keys", "strategy", "peak memory", "sent", "least time to send"):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    for case in cases:
        sent = None
        if case.reduction != "hierarchical" or len(case.axis_sizes) == 2:
            sent = predict.bytes_sent_per_device(case.step, case.strategy, case.reduction, axis_sizes=case.axis_sizes)
        peak = predict.peak_memory_bytes(case.step, case.strategy)
        rate = neighbour_gb_per_s[case.step]
        at_link_rate = sent / rate / 1e3 if sent is not None and rate else None
        table.add_row(f"{case.step.num_keys:,}", case.label, size(peak), size(sent), time(at_link_rate))
    console = _console()
    console.print(table)
    for step in dict.fromkeys(case.step for case in cases):
        limit = limits.read_limit_us(step, device_kind)
        held = size(step.key_value_bytes_per_device)
        least = f"at least {time(limit)}" if limit is not None else f"no read rate is known for {device_kind!r}"
        console.print(f"Physical limit, {step.num_keys:,} keys: each device reads {held} of keys and values: {least}.")
        if neighbour_gb_per_s[step] is not None:
            shard = size(step.key_value_bytes_per_device / 2)
            console.print(
                f"  A bare transfer of {shard} to a neighbour runs at {neighbour_gb_per_s[step]:.1f} GB/s here."
            )


def print_results(rows: Sequence[dict]) -> None:
    """Prints a table of the rows that ran, and the reason of each that did not."""
    table = Table(title="Measured per device and step (median, p10 to p90)")
    for column in (
        "keys",
        "strategy",
        "kernel",
        "latency",
        "p10-p90",
        "memory compiled",
        "sent",
        "collectives",
        "error",
    ):
        table.add_column(column, justify="left" if column in ("strategy", "kernel", "collectives") else "right")
    for row in rows:
        if row["error"] is None:
            table.add_row(
                f"{row['num_keys']:,}",
                label(row),
                row["implementation"],
                time(row["latency_us_median"]),
                f"{time(row['latency_us_p10'])}-{time(row['latency_us_p90'])}",
                size(row["peak_memory_bytes_compiled"]),
                size(row["bytes_sent_per_device_compiled"]),
                " ".join(f"{count} {kind}" for kind, count in (row["collectives_compiled"] or {}).items()) or "none",
                f"{row['max_abs_error']:.1e}",
            )
    console = _console()
    console.print(table)
    for row in rows:
        if row["error"] is not None:
            console.print(f"not measured: {label(row)}, {row['num_keys']:,} keys: {row['error']}", markup=False)
    if any(_sends_more_than_predicted(row) for row in rows):
        console.print(
            "Some programs send more than predicted: XLA on CPU moves 16-bit numbers as float32 (see --dtype)."
        )


def label(row: dict) -> str:
    """How tables and plots call a row's strategy; as `Case.label`."""
    return f"tree {row['reduction']}" if row["reduction"] else row["strategy"].replace("_", " ")


def _sends_more_than_predicted(row: dict) -> bool:
    sent, predicted = row["bytes_sent_per_device_compiled"], row["bytes_sent_per_device_predicted"]
    return "CPU" in row["hardware"] and None not in (sent, predicted) and sent > 1.01 * predicted


def _console() -> Console:
    """Standard output; into a file or a pipe, wide enough for a whole table."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def size(num_bytes: float | None) -> str:
    """A number of bytes for reading: "3.6 kB", "1.31 GB"; "-" for None."""
    if num_bytes is None:
        return "-"
    units = ("B", "kB", "MB", "GB", "TB")
    power = next((i for i in range(len(units) - 1) if num_bytes < 1000 ** (i + 1)), len(units) - 1)
    return f"{num_bytes / 1000**power:.3g} {units[power]}"


def time(microseconds: float | None) -> str:
    """A time for reading: "35.2 us", "1.4 ms"; "-" for None."""
    if microseconds is None:
        return "-"
    return f"{microseconds:.1f} us" if microseconds < 1000 else f"{microseconds / 1000:.1f} ms"
