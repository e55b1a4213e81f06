"""Tables of `tree-attn compare`: predictions and results."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from tree_attn.commands import terminal
from tree_attn.commands.compare.cases import Case
from tree_attn.commands.terminal import size, time
from tree_attn.cost import limits, predict
from tree_attn.cost.step import DecodeStep
from tree_attn.measure.rows import strategy_label


def print_predictions(
    cases: Sequence[Case], device_kind: str, neighbour_gb_per_s: Mapping[DecodeStep, float | None]
) -> None:
    """Prints the predictions of the paper's equations for each case, and the physical limit of each step.

    Args:
      neighbour_gb_per_s: by step, the rate of bare transfers of one shard's keys, or None.
    """
    if not cases:
        return
    table = Table(title="Predicted per device and step: memory by equations 8 and 9, traffic by 10 and 14")
    for column in ("keys", "strategy", "peak memory", "sent", "least time to send"):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    for case in cases:
        peak, sent = predict.peak_memory_bytes(case.step, case.strategy), case.bytes_sent
        rate = neighbour_gb_per_s[case.step]
        least_us = sent / rate / 1e3 if sent is not None and rate else None
        table.add_row(f"{case.step.num_keys:,}", case.label, size(peak), size(sent), time(least_us))
    console = terminal.output()
    console.print(table)
    for step in dict.fromkeys(case.step for case in cases):
        _print_limit(console, step, device_kind, neighbour_gb_per_s[step])


def _print_limit(console: Console, step: DecodeStep, device_kind: str, neighbour_gb_per_s: float | None) -> None:
    limit_us = limits.read_limit_us(step, device_kind)
    limit = f"at least {time(limit_us)}" if limit_us is not None else f"no read rate is known for {device_kind!r}"
    num_bytes = size(step.key_value_bytes_per_device)
    console.print(f"Physical limit, {step.num_keys:,} keys: each device reads {num_bytes} of keys and values: {limit}.")
    if neighbour_gb_per_s is not None:
        shard = size(step.key_value_bytes_per_device / 2)
        console.print(f"  A bare transfer of {shard} to a neighbour runs at {neighbour_gb_per_s:.1f} GB/s here.")


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
                strategy_label(row["strategy"], row["reduction"]),
                row["implementation"],
                time(row["latency_us_median"]),
                f"{time(row['latency_us_p10'])}-{time(row['latency_us_p90'])}",
                size(row["peak_memory_bytes_compiled"]),
                size(row["bytes_sent_per_device_compiled"]),
                " ".join(f"{count} {name}" for name, count in (row["collectives_compiled"] or {}).items()) or "none",
                f"{row['max_abs_error']:.1e}",
            )
    console = terminal.output()
    console.print(table)
    for row in rows:
        if row["error"] is not None:
            label = strategy_label(row["strategy"], row["reduction"])
            console.print(f"not measured: {label}, {row['num_keys']:,} keys: {row['error']}", markup=False)
    if any(_sends_more_than_predicted(row) for row in rows):
        console.print(
            "Some programs send more than predicted: XLA on CPU moves 16-bit numbers as float32 (see --dtype)."
        )


def _sends_more_than_predicted(row: dict) -> bool:
    sent, predicted = row["bytes_sent_per_device_compiled"], row["bytes_sent_per_device_predicted"]
    return "CPU" in row["hardware"] and None not in (sent, predicted) and sent > 1.01 * predicted
