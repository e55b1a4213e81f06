"""The table of `tree-attn bench`."""

from collections.abc import Sequence

from tree_attn.commands import terminal
from tree_attn.commands.units import size, time, times_as

WEIGHTS = {"spread": "sharded over the devices", "replicated": "whole on each device"}


def print_rows(rows: Sequence[dict], *, as_json: bool) -> None:
    """Prints the rows, as a table or as one JSON document."""
    if as_json:
        terminal.print_document({"rows": list(rows)})
        return
    console = terminal.output()
    has_batch = any(row["batch"] > 1 for row in rows)
    columns = {
        "prefill": lambda row: time(row["prefill_s"] * 1e6),
        "per\ntoken": lambda row: _ms(row["per_token_ms_median"]),
    }
    columns |= {"tokens\nper s": lambda row: f"{row['tokens_per_s']:,.0f}"} if has_batch else {}
    columns["prefill\nand 10\ntokens"] = lambda row: time(row["prefill_plus_10_tokens_s"] * 1e6)
    # Of a kind of device without known rates there is no roofline, and on a CPU no measured memory.
    if any(row["roofline_ms"] is not None for row in rows):
        columns["roofline\nof a\ntoken"] = lambda row: _ms(row["roofline_ms"])
    columns |= {
        f"memory\n{name}": lambda row, name=name: size(row.get(f"{name}_bytes_per_device"))
        for name in ("predicted", "measured")
        if any(row.get(f"{name}_bytes_per_device") is not None for row in rows)
    }
    weights = WEIGHTS[rows[0]["weights"]]
    terminal.say(
        console, f"{rows[0]['config']} on {rows[0]['hardware']}, weights {weights}; memory is that of one device"
    )
    lines = [(_title(row, has_batch), [cell(row) for cell in columns.values()]) for row in rows]
    terminal.print_wide(console, None, f"context{' x batch' if has_batch else ''}, attention", list(columns), lines)
    if "emulated" in rows[0]["hardware"]:
        terminal.say(console, "Devices are emulated on the CPU: these times say nothing about GPUs.")
    for sentence in conclusions(rows):
        terminal.say(console, sentence)


def conclusions(rows: Sequence[dict]) -> list[str]:
    """Returns a sentence for each context and batch: the fastest attention, and how much faster it is than the next."""
    sentences = []
    for context, batch in dict.fromkeys((row["context"], row["batch"]) for row in rows):
        here = [row for row in rows if (row["context"], row["batch"]) == (context, batch)]
        best, *others = sorted(here, key=lambda row: row["per_token_ms_median"])
        spread = f"p10 to p90: {_ms(best['per_token_ms_p10'])} to {_ms(best['per_token_ms_p90'])}"
        words = f"After {context:,} tokens a new one takes {_ms(best['per_token_ms_median'])} by {_label(best)}"
        words += f" ({spread})"
        if batch > 1:
            words += f", for each of {batch:,} sequences"
        if others:
            ratio = others[0]["per_token_ms_median"] / best["per_token_ms_median"]
            factor = "as fast" if ratio < 1.05 else f"{times_as(ratio)} times as fast"
            words += f", {factor} as by {_label(others[0])}"
        sentences.append(f"{words}.")
    return sentences


def _title(row: dict, has_batch: bool) -> str:
    batch = f" x {row['batch']:,}" if has_batch else ""
    return f"{row['context']:,}{batch}, {_label(row)}"


def _label(row: dict) -> str:
    return row["attention"] + (f" {row['reduction']}" if row["reduction"] else "")


def _ms(milliseconds: float | None) -> str:
    return time(None if milliseconds is None else milliseconds * 1e3)
