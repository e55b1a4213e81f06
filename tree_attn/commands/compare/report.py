"""Tables of `tree-attn compare`: predictions and results."""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console

from tree_attn.commands import terminal
from tree_attn.commands.compare.cases import Case
from tree_attn.commands.compare.prompts import PromptCase
from tree_attn.commands.units import count, rate, size, time, times_as
from tree_attn.cost import limits
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
    is_prompt = isinstance(cases[0], PromptCase)
    title = "Predicted per device and step (equations 8 to 14 of the Tree Attention paper)"
    title = "Predicted per device and prompt" if is_prompt else title
    headings = ("keys", "strategy", "peak memory", "sent", "sending takes\nat least")
    table = terminal.table(*headings, title=title, left=("strategy",))
    for case in cases:
        peak, sent = case.peak_memory_bytes, case.bytes_sent
        gb_per_s = neighbour_gb_per_s[case.step]
        least_us = sent / gb_per_s / 1e3 if sent is not None and gb_per_s else None
        table.add_row(f"{case.step.num_keys:,}", case.label, size(peak), size(sent), time(least_us))
    console = terminal.output()
    console.print(table)
    for step in () if is_prompt else dict.fromkeys(case.step for case in cases):
        _print_limit(console, step, device_kind, neighbour_gb_per_s[step])


def _print_limit(console: Console, step: DecodeStep, device_kind: str, neighbour_gb_per_s: float | None) -> None:
    limit_us = limits.read_limit_us(step, device_kind)
    limit = "" if limit_us is None else f", which takes its memory at least {time(limit_us)}"
    num_bytes = size(step.key_value_bytes_per_device)
    terminal.say(console, f"Over {step.num_keys:,} keys each device reads {num_bytes} of keys and values{limit}.")
    if neighbour_gb_per_s is not None:
        shard = size(step.key_value_bytes_per_device / 2)
        terminal.say(
            console,
            f"Sent alone, {shard} reach the next device at {rate(neighbour_gb_per_s)} here; the table's last "
            "column is for this rate.",
        )


def print_results(rows: Sequence[dict], what: str = "step") -> None:
    """Prints a table of the rows that ran, and the reason of each that did not.

    Args:
      what: of each device the table is about.
    """
    console, finished = terminal.output(), [row for row in rows if row["error"] is None]
    has_kernels = len({row["implementation"] for row in finished}) > 1
    headings = ("keys", "strategy", *(("kernel",) if has_kernels else ()), "time", "p10", "p90", "memory", "sent")
    table = terminal.table(*headings, title=f"Measured per device and {what} (median)", left=("strategy", "kernel"))
    for row in finished:
        kernel = (row["implementation"],) if has_kernels else ()
        times = (time(row[f"latency_us_{name}"]) for name in ("median", "p10", "p90"))
        sizes = (size(row[name]) for name in ("peak_memory_bytes_compiled", "bytes_sent_per_device_compiled"))
        table.add_row(f"{row['num_keys']:,}", label(row), *kernel, *times, *sizes)
    console.print(table)
    for sentence in _remarks(rows, finished, has_kernels, what):
        terminal.say(console, sentence)


def _remarks(rows: Sequence[dict], finished: Sequence[dict], has_kernels: bool, what: str) -> Iterator[str]:
    if finished and not has_kernels:
        yield f"Local kernel: {finished[0]['implementation']}."
    sent = {label(row): row["collectives_compiled"] for row in finished if row["collectives_compiled"]}
    if sent:
        counts = (f"{name} {_counted(collectives)}" for name, collectives in sent.items())
        yield f"Collectives of a {what}: {'; '.join(counts)}."
    if finished:
        worst = max(finished, key=lambda row: row["max_abs_error"] / row["tolerance"])
        yield (
            f"Every result was checked against attention in float64: {label(worst)} is the furthest off, by "
            f"{worst['max_abs_error']:.1e} of {worst['tolerance']:.1e} allowed."
        )
    yield from _rotations(finished)
    for row in rows:
        if row["error"] is not None:
            yield f"Not measured: {label(row)}, {row['num_keys']:,} keys: {row['error']}"
    if any(_sends_more_than_predicted(row) for row in rows):
        yield "Some programs send more than predicted: XLA on CPU moves 16-bit numbers as float32 (see --dtype)."


def _rotations(finished: Sequence[dict]) -> Iterator[str]:
    """Yields, for each ring that chose its rotation, which it is, and its rate beside those of bare transfers."""
    for row in finished:
        if row["strategy"] != "ring_overlapped" or row.get("rotation") is None or row["n_devices"] == 1:
            continue
        rates = {name: gb_per_s for name, gb_per_s in (row["transfers_gb_per_s"] or {}).items() if gb_per_s}
        sentence = f"{label(row)} over {row['num_keys']:,} keys sends {row['rotation'].replace('_', ' ')}"
        if rates and row["sent_gb_per_s"] and "emulated" not in row["hardware"]:
            bare = ", ".join(f"{name.replace('_', ' ')} {rate(gb_per_s)}" for name, gb_per_s in rates.items())
            share = row["sent_gb_per_s"] / max(rates.values())
            sentence += f" at {rate(row['sent_gb_per_s'])}, {share:.2f} of the fastest bare transfers ({bare})"
        yield f"{sentence}."


def conclusions(rows: Sequence[dict]) -> list[str]:
    """Returns, for each number of keys, the sentence that compares the best tree with the best ring."""
    sentences = []
    for num_keys in dict.fromkeys(row["num_keys"] for row in rows):
        here = [row for row in rows if row["num_keys"] == num_keys and row["error"] is None]
        latency = lambda row: row["latency_us_median"]
        trees = sorted((row for row in here if row["strategy"] == "tree"), key=latency)
        rings = sorted((row for row in here if row["strategy"] != "tree"), key=latency)
        if rings and not trees:
            sentences += _fastest_first(rings, num_keys)
        if not trees or not rings:
            continue
        fast, slow = sorted((trees[0], rings[0]), key=latency)
        ratio = latency(slow) / latency(fast)
        factor = "as fast as" if ratio < 1.05 else f"{times_as(ratio)} times as fast as"
        other = f"the best {'tree' if slow is trees[0] else 'ring'} ({label(slow)})"
        times = f"{time(latency(fast))} against {time(latency(slow))}"
        where = "On these emulated devices, which say nothing about GPUs, " if "emulated" in fast["hardware"] else ""
        sentences.append(f"{where}{label(fast)} is {factor} {other} over {num_keys:,} keys: {times}.")
    return sentences


def _fastest_first(rows: Sequence[dict], num_keys: int) -> list[str]:
    """Returns the sentence that names the fastest of the rows, and the times of the others."""
    fast, *others = rows
    times = ", ".join(f"{label(row)} {time(row['latency_us_median'])}" for row in others)
    where = "On these emulated devices, which say nothing about GPUs, " if "emulated" in fast["hardware"] else ""
    after = f"; {times}" if others else ""
    return [f"{where}{label(fast)} is the fastest over {num_keys:,} keys: {time(fast['latency_us_median'])}{after}."]


def label(row: dict) -> str:
    """Returns the name of a row's strategy, with NCCL's setting where rows were measured under several."""
    setting = row.get("nccl_setting")
    return strategy_label(row["strategy"], row["reduction"]) + (f", NCCL {setting}" if setting else "")


def _counted(collectives: dict[str, int]) -> str:
    return ", ".join(count(number, name) for name, number in collectives.items())


def _sends_more_than_predicted(row: dict) -> bool:
    sent, predicted = row["bytes_sent_per_device_compiled"], row["bytes_sent_per_device_predicted"]
    return "CPU" in row["hardware"] and None not in (sent, predicted) and sent > 1.01 * predicted
