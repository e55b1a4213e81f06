"""`tree-attn doctor`: what is here, what can run, and for what cannot, why."""

import argparse
import dataclasses
import json
import pathlib
import shutil
import subprocess
from typing import Any

from tree_attn.commands import processes
from tree_attn.cost import machine

HELP = """\
Lists the devices, the links between them, the versions installed, and which local kernels and reductions can run here;
for each that cannot, why. Takes no model and changes nothing.

With --distributed, as several processes: checks how they were started (under srun, torchrun or by the options below),
that all are there, fit together and reach each other, each within TREE_ATTN_TIMEOUT_S (60), and times the links inside
a node and across nodes. The first thing that is wrong ends it, on every rank, with one error that says what to do.
With --machine-out too, it measures what `tree-attn plan --machine FILE` predicts from; that takes a minute or two.

examples:
  tree-attn doctor
  srun --nodes=2 --ntasks-per-node=4 tree-attn doctor --distributed
  srun --nodes=2 --ntasks-per-node=4 tree-attn doctor --distributed --machine-out machine.json
  tree-attn doctor --json | python3 -m json.tool
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tree-attn doctor`."""
    parser.add_argument("--devices", type=int, help="look at this many (default: all there are; emulated if too few)")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument("--distributed", action="store_true", help="check and time the processes and their links only")
    parser.add_argument(
        "--machine-out", type=pathlib.Path, metavar="FILE", help="with --distributed: measure the machine for `plan`"
    )
    processes.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Examines and prints, in process 0; returns 0."""
    path = args.machine_out
    if path is not None and not (args.distributed and path.absolute().parent.is_dir()):
        raise ValueError(f"--machine-out needs --distributed, and a folder that is there, got {path}")
    launch = processes.join(args, args.devices)
    report = examine_distributed(launch, args.devices) if args.distributed else examine(args.devices)
    if path is not None:
        measured = measure_machine(args.devices, args.command_line)
        report["machine"] = dataclasses.asdict(measured)
    if launch.process_id != 0:
        return 0
    if path is not None:
        machine.write(measured, path)
    if args.json:
        print(json.dumps(report))
    else:
        (_print_distributed if args.distributed else _print)(report)
    return 0


def examine_distributed(launch, n_devices: int | None = None) -> dict[str, Any]:
    """Everything `tree-attn doctor --distributed` shows, ready for JSON; every process calls it.

    Returns:
        `launch` (see `tree_attn.cluster.join.Launch`), `hardware`, `n_devices`, and `levels`, fastest links first: the
        fields of `tree_attn.measure.links.AxisLinks`, of axis "device" inside a node and "node" across nodes.
    """
    import jax

    from tree_attn.devices import ensure_devices
    from tree_attn.measure import links, provenance
    from tree_attn.mesh import make_mesh

    devices = list(jax.devices()) if n_devices is None else ensure_devices(n_devices)
    levels = links.measure_axes(make_mesh(("device", "node"), devices))
    return {
        "launch": dataclasses.asdict(launch),
        "hardware": provenance.hardware(devices),
        "n_devices": len(devices),
        "levels": [dataclasses.asdict(level) for level in levels],
    }


def measure_machine(n_devices: int | None, command: str) -> machine.Machine:
    """The parameters of the cost model, measured here, with where they are from; every process calls it."""
    import jax

    from tree_attn.commands.doctor import calibrate
    from tree_attn.devices import ensure_devices
    from tree_attn.measure import provenance

    devices = list(jax.devices()) if n_devices is None else ensure_devices(n_devices)
    measured = calibrate.measure_machine(devices)
    where = {"hardware": provenance.hardware(devices), "n_processes": jax.process_count(), "command": command}
    where |= {"git_commit": provenance.git_commit(), "versions": provenance.versions()}
    return dataclasses.replace(measured, provenance=where | {"points": measured.provenance})


def examine(n_devices: int | None = None) -> dict[str, Any]:
    """Everything `tree-attn doctor` shows, ready for JSON.

    Returns:
        `hardware`, `devices`, `links` (`neighbour_gb_per_s`, `nvidia_smi_topo`), `versions`, `git_commit`, and
        `implementations` and `reductions`: name -> None where it can run, else the reason why not.
    """
    import jax

    from tree_attn.devices import ensure_devices
    from tree_attn.measure import links, provenance
    from tree_attn.mesh import make_mesh

    devices = list(jax.devices()) if n_devices is None else ensure_devices(n_devices)
    mesh = make_mesh({"device": len(devices)}, devices)
    return {
        "hardware": provenance.hardware(devices),
        "devices": [_describe(device) for device in devices],
        "links": {"neighbour_gb_per_s": links.neighbour_gb_per_s(mesh), "nvidia_smi_topo": _nvidia_smi_topo()},
        "versions": provenance.versions(),
        "git_commit": provenance.git_commit(),
        "implementations": _implementations(),
        "reductions": _reductions(devices),
    }


def _describe(device) -> dict[str, Any]:
    import jax

    is_own = device.process_index == jax.process_index()  # others do not tell
    stats = (device.memory_stats() if is_own else None) or {}
    return {
        "id": device.id,
        "platform": device.platform,
        "kind": device.device_kind,
        "process": device.process_index,
        "memory_bytes": stats.get("bytes_limit"),
    }


def _implementations() -> dict[str, str | None]:
    """Every local kernel, tried on a small attention; None where it ran and agreed with the oracle."""
    from tree_attn.local import IMPLEMENTATIONS

    return {name: IMPLEMENTATIONS[name].unavailable() or _try_implementation(name) for name in IMPLEMENTATIONS}


def _try_implementation(name: str) -> str | None:
    import jax
    import numpy as np

    from tree_attn import attend

    query, key, value = _small_attention(num_keys=128)
    try:
        state = jax.jit(lambda *arrays: attend(*arrays, implementation=name))(query, key, value)
        return _difference(np.asarray(state.out), query, key, value)
    except Exception as error:  # whatever keeps it from running is the answer
        return f"it fails: {type(error).__name__}: {str(error).strip()[:500]}"


def _reductions(devices) -> dict[str, str | None]:
    """Every reduction, tried on a small step over all devices; None where it ran and agreed with the oracle."""
    from tree_attn.mesh import make_mesh, node_axes
    from tree_attn.reduce import REDUCTIONS

    found: dict[str, str | None] = {}
    for name in REDUCTIONS:
        axes = node_axes(devices) if name == "hierarchical" else {"seq": len(devices)}
        if axes is None:
            found[name] = f"it needs two mesh axes, and {len(devices)} devices do not factor into two"
        else:
            found[name] = _try_reduction(name, make_mesh(axes, devices), tuple(axes))
    return found


def _try_reduction(name: str, mesh, axes: tuple[str, ...]) -> str | None:
    import jax
    import numpy as np

    from tree_attn import tree_decode

    query, key, value = _small_attention(num_keys=16 * mesh.devices.size)
    options = dict(axis_name=axes, mesh=mesh, reduction=name, implementation="xla")
    try:
        out = jax.jit(lambda *arrays: tree_decode(*arrays, **options))(query, key, value)
        return _difference(np.asarray(out.addressable_data(0)), query, key, value)
    except NotImplementedError as error:
        return str(error)
    except Exception as error:  # whatever keeps it from running is the answer
        return f"it fails: {type(error).__name__}: {str(error).strip()[:500]}"


def _small_attention(num_keys: int):
    """Host arrays, so that they belong to no device yet: query `[1, 1, 4, 64]`, key and value `[1, S, 2, 64]`."""
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(0)
    shapes = ((1, 1, 4, 64), (1, num_keys, 2, 64), (1, num_keys, 2, 64))
    return tuple(rng.standard_normal(shape, np.float32).astype(jnp.bfloat16) for shape in shapes)


def _difference(out, query, key, value) -> str | None:
    import numpy as np

    from tree_attn import reference
    from tree_attn.tolerances import relative_out_tolerance

    expected = reference.attention(query, key, value)[0]
    error, allowed = np.abs(out.astype(np.float64) - expected).max(), relative_out_tolerance("bfloat16", expected)
    return None if error <= allowed else f"it is WRONG here: off by {error:.3g}, and {allowed:.3g} is allowed"


def _nvidia_smi_topo() -> str | None:
    """NVIDIA's matrix of links, or None where there is no nvidia-smi or it fails."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _print_distributed(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    launch, console = report["launch"], Console()
    started = "" if launch["source"] == "single" else f", started by {launch['job'] or launch['source']}"
    console.print(f"{report['hardware']}, processes: {launch['num_processes']}{started}", soft_wrap=True)
    hosts = launch["hosts"]
    for host in dict.fromkeys(hosts):
        ranks = [str(rank) for rank, one in enumerate(hosts) if one == host]
        console.print(f"{host}: rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}", highlight=False, soft_wrap=True)
    if launch["num_processes"] > 1:
        console.print(
            "Variables, roll call, JAX's connection and a first sum over all devices: in order.", soft_wrap=True
        )
    if not report["levels"]:
        console.print("one device: no links")
        return
    table = Table(title="links (4 kB per device; transfers to a neighbour, all at once)")
    for column in ("level", "devices", "sum, us", "gather, us", "to a neighbour, GB/s"):
        table.add_column(column, justify="left" if column == "level" else "right")
    for level in report["levels"]:
        where = "inside a node" if level["axis"] == "device" else "across nodes"
        times = (f"{level[name]:.1f}" for name in ("sum_us", "gather_us"))
        table.add_row(where, str(level["size"]), *times, f"{level['neighbour_gb_per_s']:.3g}")
    console.print(table)
    if "machine" in report:
        _print_machine(report["machine"], console)


def _print_machine(measured: dict[str, Any], console) -> None:
    from rich.table import Table

    table = Table(title="the cost model's parameters (several lines: the cheapest holds)")
    for column in ("level", "exchange", "launch, us", "per message, us", "GB/s"):
        table.add_column(column, justify="left" if column in ("level", "exchange") else "right")
    for name, where in (("node", "inside a node"), ("network", "across nodes")):
        if measured[name]["source"].startswith("measured"):
            for kind, cost in measured[name]["costs"].items():
                launches = ", ".join(f"{line['alpha_us']:.1f}" for line in cost["lines"])
                rates = ", ".join(f"{line['bytes_per_s'] / 1e9:.3g}" for line in cost["lines"])
                table.add_row(where, kind, launches, f"{cost['round_us']:.1f}", rates)
    console.print(table)
    console.print(
        f"keys and values are read at {measured['read_bytes_per_s'] / 1e12:.3g} TB/s; beside that a step takes "
        f"{measured['local_us']:.1f} us, and {measured['collective_us']:.1f} us more where NCCL takes part",
        soft_wrap=True,
    )


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from tree_attn.commands.report import size

    console = Console()
    console.print(f"{report['hardware']}, tree-attn at commit {report['git_commit'] or 'unknown (not a git checkout)'}")
    table = Table(title="devices")
    for column in ("id", "platform", "kind", "process", "memory"):
        table.add_column(column)
    for device in report["devices"]:
        memory = size(device["memory_bytes"])
        table.add_row(str(device["id"]), device["platform"], device["kind"], str(device["process"]), memory)
    console.print(table)
    rate = report["links"]["neighbour_gb_per_s"]
    console.print("one device: no links" if rate is None else f"to a neighbour: {rate:.1f} GB/s per device")
    if report["links"]["nvidia_smi_topo"]:
        console.print(report["links"]["nvidia_smi_topo"], markup=False, highlight=False)
    for title in ("implementations", "reductions"):
        table = Table(title=title)
        for column in ("name", "can run here", "why not"):
            table.add_column(column)
        for name, reason in report[title].items():
            table.add_row(name, "yes" if reason is None else "no", escape(reason or ""))  # "[flash]" is no markup
        console.print(table)
    installed = {name: version for name, version in report["versions"].items() if version is not None}
    console.print("versions: " + ", ".join(f"{name} {version}" for name, version in installed.items()))
