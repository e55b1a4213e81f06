"""The table of `tree-attn bench`."""

import json
from collections.abc import Sequence

from rich.table import Table

from tree_attn.commands import terminal


def print_rows(rows: Sequence[dict], *, as_json: bool) -> None:
    """Prints the rows, as a table or as one JSON document."""
    if as_json:
        print(json.dumps({"rows": list(rows)}))
        return
    console, table = terminal.output(width=132), Table()
    columns = ("context", "batch", "attention", "prefill s", "ms per token (p10 to p90)", "roofline ms", "tokens / s",
               "prefill + 10 s", "GB (measured)")  # fmt: skip
    for column in columns:
        table.add_column(column, justify="left" if column == "attention" else "right")
    for row in rows:
        table.add_row(
            f"{row['context']:,}",
            f"{row['batch']:,}",
            row["attention"] + (f" {row['reduction']}" if row["reduction"] else ""),
            f"{row['prefill_s']:.3g}",
            f"{row['per_token_ms_median']:.3g} ({row['per_token_ms_p10']:.3g} to {row['per_token_ms_p90']:.3g})",
            "unknown" if row["roofline_ms"] is None else f"{row['roofline_ms']:.3g}",
            f"{row['tokens_per_s']:.4g}",
            f"{row['prefill_plus_10_tokens_s']:.3g}",
            _memory(row),
        )
    console.print(f"{rows[0]['config']} on {rows[0]['hardware']}, weights {rows[0]['weights']}")
    console.print(table)


def _memory(row: dict) -> str:
    # Older rows have neither.
    predicted, measured = (row.get(f"{name}_bytes_per_device") for name in ("predicted", "measured"))
    text = "unknown" if predicted is None else f"{predicted / 1e9:.3g}"
    return text + ("" if measured is None else f" ({measured / 1e9:.3g})")
