"""The table of `tree-attn plan`."""

from typing import Any

from rich.table import Table

from tree_attn.commands import terminal
from tree_attn.commands.terminal import size, time


def print_document(document: dict[str, Any]) -> None:
    """Prints the result of `predict_all`: a line per strategy, the sources of the links, and the choice."""
    console = terminal.output()
    step, sizes = document["step"], document["axis_sizes"]
    nodes = f"{sizes[1]} nodes of {sizes[0]}" if len(sizes) > 1 else f"{sizes[0]}"
    title = f"PREDICTED per step: {step['num_keys']:,} keys, batch {step['batch']}, on {nodes} x {document['machine']}"
    table = Table(title=title)
    columns = ("time", "attention", "first collective", "exchanges", "sent per GPU", "memory per GPU", "fits")
    for column in ("strategy", *columns):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    for one in document["strategies"]:
        exchanges = " + ".join(map(time, one["exchanges_us"]))
        sent = " + ".join(map(size, one["bytes_sent"]))
        alone = (time(one[name]) for name in ("latency_us", "local_us", "collective_us"))
        table.add_row(one["label"], *alone, exchanges, sent, size(one["memory_bytes"]), "yes" if one["fits"] else "NO")
    console.print(table)
    if len(sizes) > 1:
        console.print("exchanges and bytes along two axes: inside a node + across nodes", soft_wrap=True)
    left_out = document["left_out"]
    for why in dict.fromkeys(left_out.values()):
        labels = ", ".join(label for label in left_out if left_out[label] == why)
        console.print(f"not possible: {labels}: {why}", soft_wrap=True, highlight=False)
    for where, source in document["links"].items():
        console.print(f"links {where}: {source}", soft_wrap=True, highlight=False)
    console.print(document["reason"], soft_wrap=True, highlight=False)
