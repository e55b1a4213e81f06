"""The table of `tree-attn plan`."""

from typing import Any

from tree_attn.commands import terminal
from tree_attn.commands.units import size, time
from tree_attn.cost import rotation


def print_document(document: dict[str, Any]) -> None:
    """Prints the result of `predict_all`: a line per strategy, the sources of the links, and the choice."""
    console = terminal.output()
    step, sizes = document["step"], document["axis_sizes"]
    nodes = f"{sizes[1]} nodes of {sizes[0]}" if len(sizes) > 1 else f"{sizes[0]}"
    what = "prompt, forward and backward" if "gradient" in document else "prompt, forward"
    what = what if "prefill" in document else "step"
    where = f"{step['num_keys']:,} keys, batch {step['batch']}, on {nodes} x {document['machine']}"
    title = f"PREDICTED per {what}: {where}"
    headings = ("strategy", "time", "attention", "exchange", "sent", "memory", "fits")
    table = terminal.table(*headings, title=title, left=("strategy",))
    is_alone = step["n_devices"] == 1  # then all strategies are one
    for one in document["strategies"][: 1 if is_alone else None]:
        label = "any" if is_alone else one["label"]
        sent = " + ".join(map(size, one["bytes_sent"]))
        parts = map(time, (one["local_us"], one["latency_us"] - one["local_us"]))
        fits = "yes" if one["fits"] else "NO"
        table.add_row(label, _time_and_range(one), *parts, sent, size(one["memory_bytes"]), fits)
    console.print(table)
    if len(sizes) > 1 and "prefill" in document:
        terminal.say(console, "sent: by the exchange of heads + by the ring")
    elif len(sizes) > 1:
        terminal.say(console, "sent: inside a node + across nodes")
    if document["strategies"][0]["latency_range_us"] is not None:
        terminal.say(console, _why_ranges(document))
    if "prefill" in document:
        terminal.say(console, "Least times: products take what the datasheet's peak allows.")
    if document["datasheet"] is not None:
        terminal.say(console, f"FROM A DATASHEET, NOT MEASURED: {document['datasheet']}.")
    left_out = {} if is_alone else document["left_out"]
    for why in dict.fromkeys(left_out.values()):
        labels = ", ".join(label for label in left_out if left_out[label] == why)
        terminal.say(console, f"not possible: {labels}: {why}.")
    for where, source in () if is_alone else document["links"].items():
        terminal.say(console, f"links {where}: {source}")
    if document["rotations"]:
        terminal.say(console, _rotation(document["rotations"], is_forward="gradient" in document))
    terminal.say(console, document["reason"])


def _rotation(added_us: dict[str, float], *, is_forward: bool) -> str:
    """Returns the sentence on the rotation that a ring would choose: by its forward pass, if there are two."""
    chosen = rotation.fastest(added_us)
    times = ", ".join(f"{name} {time(us)}" for name, us in added_us.items())
    where = " in the forward pass, by which it chooses" if is_forward else ""
    return f"A ring without a named rotation turns {chosen!r}. Predicted to be added to its attention{where}: {times}."


def _time_and_range(one: dict[str, Any]) -> str:
    """Returns a strategy's time, and below it its range in the same unit, where it has one."""
    latency, spread = time(one["latency_us"]), one["latency_range_us"]
    if spread is None:
        return latency
    microseconds = {"us": 1.0, "ms": 1e3, "s": 1e6}[latency.split()[1]]
    low, high = (us / microseconds for us in spread)
    digits = 0 if high >= 100 else 1
    return f"{latency}\n{low:,.{digits}f} to {high:,.{digits}f}"


def _why_ranges(document: dict[str, Any]) -> str:
    """Returns the sentence that says what the ranges rest on."""
    fitted = document["fitted_devices"]
    if not fitted:
        return "Below each time is its range: no constant was measured on such a device."
    return (
        f"Below each time is its range: constants fitted to {fitted} GPU{'s' * (fitted != 1)} stand for more, or for "
        "links that were not measured."
    )
