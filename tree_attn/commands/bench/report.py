"""The table of `tree-attn bench`."""

from collections.abc import Sequence

from tree_attn.commands import terminal


def print_rows(rows: Sequence[dict], *, as_json: bool) -> None:
    """Prints the rows, as a table or as one JSON document."""
    if as_json:
        terminal.print_document({"rows": list(rows)})
        return
    console = terminal.output()
    has_batch = any(row["batch"] > 1 for row in rows)
    headings = [
        "context",
        "attention",
        "prefill\ns",
        "prefill\n+ 10 s",
        "ms per\ntoken",
        "roofline\nms",
        "GB\n(measured)",
    ]
    if has_batch:
        headings[1:1], headings[6:6] = ["batch"], ["tokens\n/ s"]
    table = terminal.table(*headings, left=("attention",))
    for row in rows:
        cells = [
            f"{row['context']:,}",
            _label(row),
            f"{row['prefill_s']:.3g}",
            f"{row['prefill_plus_10_tokens_s']:.3g}",
            f"{row['per_token_ms_median']:.3g}",
            "unknown" if row["roofline_ms"] is None else f"{row['roofline_ms']:.3g}",
            _memory(row),
        ]
        if has_batch:
            cells[1:1], cells[6:6] = [f"{row['batch']:,}"], [f"{row['tokens_per_s']:.4g}"]
        table.add_row(*cells)
    terminal.say(console, f"{rows[0]['config']} on {rows[0]['hardware']}, weights {rows[0]['weights']}")
    console.print(table)
    for sentence in conclusions(rows):
        terminal.say(console, sentence)


def conclusions(rows: Sequence[dict]) -> list[str]:
    """Returns a sentence for each context and batch: the fastest attention, and how much faster it is than the next."""
    sentences = []
    for context, batch in dict.fromkeys((row["context"], row["batch"]) for row in rows):
        here = [row for row in rows if (row["context"], row["batch"]) == (context, batch)]
        best, *others = sorted(here, key=lambda row: row["per_token_ms_median"])
        spread = f"p10 to p90: {best['per_token_ms_p10']:.3g} to {best['per_token_ms_p90']:.3g}"
        words = f"After {context:,} tokens a new one takes {best['per_token_ms_median']:.3g} ms by {_label(best)}"
        words += f" ({spread})"
        if batch > 1:
            words += f", for each of {batch:,} sequences"
        if others:
            ratio = others[0]["per_token_ms_median"] / best["per_token_ms_median"]
            factor = "as fast" if ratio < 1.05 else f"{ratio:.2g} times as fast"
            words += f", {factor} as by {_label(others[0])}"
        sentences.append(f"{words}.")
    return sentences


def _label(row: dict) -> str:
    return row["attention"] + (f" {row['reduction']}" if row["reduction"] else "")


def _memory(row: dict) -> str:
    # Older rows have neither.
    predicted, measured = (row.get(f"{name}_bytes_per_device") for name in ("predicted", "measured"))
    text = "unknown" if predicted is None else f"{predicted / 1e9:.3g}"
    return text + ("" if measured is None else f" ({measured / 1e9:.3g})")
