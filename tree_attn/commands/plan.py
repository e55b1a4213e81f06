"""`tree-attn plan`: what each strategy would take on a cluster, predicted, and which one to choose."""

import argparse
import dataclasses
import json
import pathlib
from typing import Any

HELP = """\
Predicts one step of decoding on a cluster, by every reduction of Tree Attention and by Ring Attention: time, bytes sent
and memory of each device, and which to choose, with the reason. Touches no device.

The numbers come from the cost model (tree_attn/cost) and a machine's parameters: the package's own, or a file that
`tree-attn doctor --distributed --machine-out FILE` wrote on a machine of yours. Links that nobody measured are
assumed, and every output says so.

examples:
  tree-attn plan --nodes 16 --gpus-per-node 8 --keys 5120000
  tree-attn plan --gpus-per-node 4 --keys 131072 --heads 32 --kv-heads 8
  tree-attn plan --nodes 2 --keys 1000000 --machine machine.json --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tree-attn plan`."""
    parser.add_argument("--nodes", type=int, default=1, help="nodes (default 1)")
    parser.add_argument("--gpus-per-node", type=int, help="GPUs of each (default: the machine's)")
    parser.add_argument("--keys", type=int, required=True, help="keys per sequence, over all GPUs")
    parser.add_argument("--batch", type=int, default=1, help="sequences (default 1)")
    parser.add_argument("--heads", type=int, default=16, help="query heads (default 16)")
    parser.add_argument("--kv-heads", type=int, help="key heads (default: as many as query heads)")
    parser.add_argument("--head-dim", type=int, default=128, help="head dim (default 128)")
    parser.add_argument("--dtype", default="bfloat16", help="of queries, keys and values (default bfloat16)")
    parser.add_argument(
        "--device-kind", default="NVIDIA H200", help="the package's parameters of (default NVIDIA H200)"
    )
    parser.add_argument("--machine", type=pathlib.Path, metavar="FILE", help="parameters in a file, instead")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")


def run(args: argparse.Namespace) -> int:
    """Predicts and prints; returns 0."""
    document = plan(args)
    if args.json:
        print(json.dumps(document))
    else:
        _print(document)
    return 0


def plan(args: argparse.Namespace) -> dict[str, Any]:
    """Everything `tree-attn plan` shows, ready for JSON.

    Returns:
        `machine` and `links` (where their parameters are from), `step`, `axis_sizes`, `strategies` (the fastest first:
        the fields of `tree_attn.cost.predict.Prediction`, `latency_us` and `fits`), `left_out` (label -> why it cannot
        run there), `choice` (a label, or None where nothing fits) and `reason`.

    Raises:
        ValueError: an option out of range, named.
    """
    from tree_attn.commands import rows
    from tree_attn.cost.step import DecodeStep

    for name in ("nodes", "gpus_per_node"):
        size = getattr(args, name)
        if size is not None and size < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {size}")
    machine = rows.machine_of(args.machine, args.device_kind)
    machine = dataclasses.replace(machine, gpus_per_node=args.gpus_per_node or machine.gpus_per_node)
    step = DecodeStep(
        batch=args.batch,
        num_keys=args.keys,
        num_heads=args.heads,
        num_kv_heads=args.heads if args.kv_heads is None else args.kv_heads,
        head_dim=args.head_dim,
        dtype=args.dtype,
        n_devices=args.nodes * machine.gpus_per_node,
    )
    axis_sizes = (machine.gpus_per_node, args.nodes) if args.nodes > 1 else (machine.gpus_per_node,)
    strategies, left_out = strategies_of(step, axis_sizes, machine)
    choice, reason = _choose(strategies, step, machine)
    links = {"inside a node": machine.node.source} | (
        {"across nodes": machine.network.source} if args.nodes > 1 else {}
    )
    return {
        "machine": machine.device_kind,
        "links": dict(list(links.items())[: len(axis_sizes)]),
        "step": dataclasses.asdict(step),
        "axis_sizes": axis_sizes,
        "memory_bytes_per_device": machine.memory_bytes,
        "strategies": strategies,
        "left_out": left_out,
        "choice": choice,
        "reason": reason,
    }


def strategies_of(step, axis_sizes, machine) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Every strategy that can run, the fastest first; and for each that cannot, why."""
    from tree_attn.commands import rows
    from tree_attn.cost import predict

    found, left_out = [], {}
    asked = [("tree", reduction) for reduction in predict.candidates(len(axis_sizes))]
    for strategy, reduction in [*asked, ("ring_overlapped", None), ("ring_public", None)]:
        names = {"label": rows.label(strategy, reduction), "strategy": strategy, "reduction": reduction}
        try:
            _check_size(step, reduction)
            predicted = predict.predict_step(step, strategy, reduction, machine=machine, axis_sizes=axis_sizes)
        except NotImplementedError as error:
            left_out[names["label"]] = str(error)
            continue
        times = {"latency_us": predicted.latency_us, **dataclasses.asdict(predicted)}
        found.append(names | times | {"fits": predicted.memory_bytes <= machine.memory_bytes})
    return sorted(found, key=lambda one: one["latency_us"]), left_out


def _check_size(step, reduction) -> None:
    from tree_attn.cost.machine import EXCHANGES
    from tree_attn.cost.step import STATE_BYTES

    elements = step.packed_state_bytes // STATE_BYTES
    for name in reduction if isinstance(reduction, tuple) else (reduction,):
        most = EXCHANGES[name].max_elements if name in EXCHANGES else None
        if most is not None and elements > most:
            raise NotImplementedError(f"{name} exchanges up to {most:,} elements, and this state has {elements:,}")


def _choose(strategies: list[dict[str, Any]], step, machine) -> tuple[str | None, str]:
    """The fastest that fits, and a sentence that says why."""
    from tree_attn.commands.report import size, time

    fitting = [one for one in strategies if one["fits"]]
    if not fitting:
        held, has = size(step.key_value_bytes_per_device), size(machine.memory_bytes)
        return None, f"Nothing fits: keys and values alone take {held} of each GPU, which has {has}."
    best, *others = fitting
    if step.n_devices == 1:
        return best["label"], f"One GPU holds all keys and exchanges nothing: {time(best['latency_us'])}."
    exchanged = best["latency_us"] - best["local_us"]
    reason = f"{best['label']} is predicted to be the fastest that fits: {time(best['latency_us'])}"
    reason += f", {time(best['local_us'])} of it attention on each GPU and {time(exchanged)} the exchange between them"
    ring = next((one for one in strategies if one["strategy"] != "tree"), None)
    if others:
        reason += f"; next is {others[0]['label']} with {time(others[0]['latency_us'])}"
    if ring is not None and ring is not best:
        reason += f", and the faster ring takes {ring['latency_us'] / best['latency_us']:.1f} times as long"
    return best["label"], reason + "."


def _print(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from tree_attn.commands.report import size, time

    console = Console()
    console = console if console.is_terminal else Console(width=140)
    step, sizes = document["step"], document["axis_sizes"]
    nodes = f"{sizes[1]} nodes of {sizes[0]}" if len(sizes) > 1 else f"{sizes[0]}"
    title = f"PREDICTED per step: {step['num_keys']:,} keys, batch {step['batch']}, on {nodes} x {document['machine']}"
    table = Table(title=title)
    columns = (
        "strategy",
        "time",
        "attention",
        "first collective",
        "exchanges",
        "sent per GPU",
        "memory per GPU",
        "fits",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "strategy" else "right")
    for one in document["strategies"]:
        exchanges = " + ".join(map(time, one["exchanges_us"]))
        sent = " + ".join(map(size, one["bytes_sent"]))
        alone = (time(one[name]) for name in ("latency_us", "local_us", "collective_us"))
        table.add_row(one["label"], *alone, exchanges, sent, size(one["memory_bytes"]), "yes" if one["fits"] else "NO")
    console.print(table)
    if len(sizes) > 1:
        console.print("exchanges and bytes of two levels: inside a node + across nodes", soft_wrap=True)
    left_out = document["left_out"]
    for why in dict.fromkeys(left_out.values()):
        labels = ", ".join(label for label in left_out if left_out[label] == why)
        console.print(f"not possible: {labels}: {why}", soft_wrap=True, highlight=False)
    for where, source in document["links"].items():
        console.print(f"links {where}: {source}", soft_wrap=True, highlight=False)
    console.print(document["reason"], soft_wrap=True, highlight=False)
