"""Tables of `tree-attn doctor`."""

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.markup import escape

from tree_attn.commands import terminal
from tree_attn.commands.units import count, rate, size, time


def print_distributed(report: dict[str, Any]) -> None:
    """Prints the result of `examine_distributed`: processes by node, links, and the machine if it was measured."""
    launch, console = report["launch"], terminal.output()
    started = "" if launch["source"] == "single" else f", started by {launch['job'] or launch['source']}"
    terminal.say(console, f"{report['hardware']}, processes: {launch['num_processes']}{started}")
    hosts = launch["hosts"]
    for host in dict.fromkeys(hosts):
        ranks = [str(rank) for rank, name in enumerate(hosts) if name == host]
        terminal.say(console, f"{host}: rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}")
    if launch["num_processes"] > 1:
        terminal.say(console, "Variables, roll call, JAX's connection and a first sum over all devices: in order.")
    if not report["levels"]:
        console.print("one device: no links")
        return
    title = "links (4 kB per device; transfers to a neighbour, all at once)"
    headings = ("links", "devices", "sum", "gather", "to a neighbour")
    table = terminal.table(*headings, title=title, left=("links",))
    for axis in report["levels"]:
        where = "inside a node" if axis["axis"] == "device" else "across nodes"
        times = (time(axis[name]) for name in ("sum_us", "gather_us"))
        table.add_row(where, str(axis["size"]), *times, rate(axis["neighbour_gb_per_s"]))
    console.print(table)
    if "machine" in report:
        _print_machine(report["machine"], console)


def _print_machine(measured: dict[str, Any], console: Console) -> None:
    title = "the cost model's parameters (several lines: the cheapest holds)"
    headings = ("links", "exchange", "launch", "per message", "rate")
    table = terminal.table(*headings, title=title, left=("links", "exchange"))
    for name, where in (("node", "inside a node"), ("network", "across nodes")):
        if measured[name]["source"].startswith("measured"):
            for exchange, cost in measured[name]["costs"].items():
                launches = "\n".join(time(line["alpha_us"]) for line in cost["lines"])
                rates = "\n".join(rate(line["bytes_per_s"] / 1e9) for line in cost["lines"])
                table.add_row(where, exchange, launches, time(cost["round_us"]), rates)
    console.print(table)
    terminal.say(
        console,
        f"keys and values are read at {rate(measured['read_bytes_per_s'] / 1e9)}; beside that a step takes "
        f"{time(measured['local_us'])}, and {time(measured['collective_us'])} more where NCCL takes part",
    )


def print_all(report: dict[str, Any]) -> None:
    """Prints the result of `examine`."""
    console = terminal.output()
    commit = report["git_commit"] or "unknown (not a git checkout)"
    terminal.say(console, f"{report['hardware']}, tree-attn at commit {commit}")
    headings = ("id", "platform", "kind", "process", "memory")
    table = terminal.table(*headings, title="devices", left=("platform", "kind"))
    for device in report["devices"]:
        memory = size(device["memory_bytes"])
        table.add_row(str(device["id"]), device["platform"], device["kind"], str(device["process"]), memory)
    console.print(table)
    gb_per_s = report["links"]["neighbour_gb_per_s"]
    console.print("one device: no links" if gb_per_s is None else f"to a neighbour: {rate(gb_per_s)} per device")
    if report["links"]["nvidia_smi_topo"]:
        console.print(report["links"]["nvidia_smi_topo"], markup=False, highlight=False)
    for title in ("implementations", "reductions"):
        table = terminal.table("name", "runs here", "why not", title=title, left=("name", "runs here", "why not"))
        for name, reason in report[title].items():
            table.add_row(name, "yes" if reason is None else "no", escape(reason or ""))  # "[flash]" is no markup
        console.print(table)
    _print_kernels(report["kernels"], console)
    for sentence in report["unmeasured"]:
        terminal.say(console, sentence)
    installed = {name: version for name, version in report["versions"].items() if version is not None}
    terminal.say(console, "versions: " + ", ".join(f"{name} {version}" for name, version in installed.items()))
    for text in _surroundings(report):
        terminal.say(console, text)


def _print_kernels(kernels: dict[str, dict[str, Any]], console: Console) -> None:
    """Prints what runs what, then why other backends do not, with the features unless the reason holds for all."""
    headings = ("bfloat16, heads of 128", "runs by", "known here")
    table = terminal.table(*headings, title="what runs what", left=headings)
    reasons: dict[str, dict[str, list[str]]] = {}
    for feature, found in kernels.items():
        table.add_row(feature, found["runs_by"], found["known"])
        for backend, reason in found["passed_over"].items():
            reasons.setdefault(backend, {}).setdefault(reason, []).append(feature)
    console.print(table)
    for backend, by_reason in reasons.items():
        for reason, features in by_reason.items():
            is_general = len(by_reason) == 1 and len(features) > 1
            where = "" if is_general else f" ({'; '.join(features)})"
            terminal.say(console, f"not {backend}: {reason}{where}")


def _surroundings(report: dict[str, Any]) -> Iterator[str]:
    extras = report["extras"]
    yield f"extras: {', '.join(name for name in extras if extras[name] is None) or 'none'} installed"
    for name, reason in extras.items():
        if reason is not None:
            yield f"extra {name}: {reason}"
    for name, found in report["caches"].items():
        yield f"{name} kept: {count(found['files'], 'file')}, {size(found['bytes'])}, in {found['folder']}"
    yield "What is slow here, and why:" if report["slow"] else "Nothing is known to be slow here."
    for sentence in report["slow"]:
        yield f"- {sentence}"
