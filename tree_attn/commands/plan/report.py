"""The table of `tree-attn plan`."""

from typing import Any

from tree_attn.commands import terminal
from tree_attn.commands.units import size, time


def print_document(document: dict[str, Any]) -> None:
    """Prints the result of `predict_all`: a line per strategy, the sources of the links, and the choice."""
    console = terminal.output()
    step, sizes = document["step"], document["axis_sizes"]
    nodes = f"{sizes[1]} nodes of {sizes[0]}" if len(sizes) > 1 else f"{sizes[0]}"
    title = f"PREDICTED per step: {step['num_keys']:,} keys, batch {step['batch']}, on {nodes} x {document['machine']}"
    headings = ("strategy", "time", "attention", "exchange", "sent", "memory", "fits")
    table = terminal.table(*headings, title=title, left=("strategy",))
    is_alone = step["n_devices"] == 1  # then all strategies are one
    for one in document["strategies"][: 1 if is_alone else None]:
        label = "any" if is_alone else one["label"]
        sent = " + ".join(map(size, one["bytes_sent"]))
        times = map(time, (one["latency_us"], one["local_us"], one["latency_us"] - one["local_us"]))
        table.add_row(label, *times, sent, size(one["memory_bytes"]), "yes" if one["fits"] else "NO")
    console.print(table)
    if len(sizes) > 1:
        terminal.say(console, "sent: inside a node + across nodes")
    if document["datasheet"] is not None:
        terminal.say(console, f"FROM A DATASHEET, NOT MEASURED: {document['datasheet']}.")
    left_out = {} if is_alone else document["left_out"]
    for why in dict.fromkeys(left_out.values()):
        labels = ", ".join(label for label in left_out if left_out[label] == why)
        terminal.say(console, f"not possible: {labels}: {why}.")
    for where, source in () if is_alone else document["links"].items():
        terminal.say(console, f"links {where}: {source}")
    terminal.say(console, document["reason"])
