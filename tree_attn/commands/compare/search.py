"""`tree-attn compare --nccl search`: the fastest setting for the rings' transfers, and rows under it and NCCL's own.

Every setting needs processes of its own, one for each device. This one starts them, and touches no device.
"""

import argparse
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence

from tree_attn.commands import phases, processes, terminal
from tree_attn.commands.compare import report
from tree_attn.commands.units import rate, size
from tree_attn.cost.step import DecodeStep
from tree_attn.measure import transfer_settings
from tree_attn.measure.rows import read
from tree_attn.measure.transfer_settings import SETTINGS

TRANSFERS = "transfers.jsonl"  # beside the rows of steps
LIMIT_S = 1800  # for the processes of one setting
_OPTIONS = ("devices", "batch", "heads", "kv_heads", "head_dim", "dtype", "iters", "chain", "seed", "out")


def compare(args: argparse.Namespace, steps: Sequence[DecodeStep]) -> int:
    """Times bare transfers under every setting, then all cases under NCCL's own and the fastest; returns 0 or 1.

    Raises:
      ValueError: there is one device, or this is one of several processes; or no setting could be timed.
    """
    if args.devices < 2:
        raise ValueError(f"--nccl search needs --devices of at least 2, got {args.devices}: one transfers nothing")
    if (rank := processes.rank_name(args)) is not None:
        raise ValueError(f"--nccl search must be one process, which starts one per device by itself, got {rank}")
    timed = {row["nccl_setting"] for row in _transfers(args)}  # a rerun goes on after them
    with phases.phase("timing transfers", len(SETTINGS)) as searching:
        for name in SETTINGS:
            searching.describe(name)
            if name not in timed:
                _run_ranks(args, name, "--links-only")
            searching.advance()
    sizes = {step.key_value_bytes_per_device // 2 for step in steps}
    rows = [row for row in _transfers(args) if row["bytes"] in sizes]
    best = transfer_settings.fastest(rows)
    if not best:
        raise ValueError("--nccl search could time no transfer: the processes' messages are above")
    names = dict.fromkeys(["own", *(best[step.key_value_bytes_per_device // 2] for step in steps)])
    status = max(_run_ranks(args, name) for name in names)
    _print(args, rows, best, is_whole=status == 0)
    return status


def _transfers(args: argparse.Namespace) -> list[dict]:
    return [row for row in _rows_of(args, TRANSFERS) if row["n_devices"] == args.devices]


def _rows_of(args: argparse.Namespace, name: str) -> list[dict]:
    """Returns the rows of a file in the folder of the call; none if it does not exist."""
    path = args.out / name
    return read(path) if path.exists() else []


def _run_ranks(args: argparse.Namespace, name: str, *options: str) -> int:
    """Runs the command under a setting in one process per device; returns the worst status. Messages go to stderr."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "tree_attn", "compare", "--nccl", name, "--json", "--no-plots", *options]
    for option in _OPTIONS:
        if (value := getattr(args, option)) is not None:
            command += [f"--{option.replace('_', '-')}", str(value)]
    for option in ("keys", "reduction", "implementation"):
        items = [str(item) for some in getattr(args, option) or () for item in some]
        command += [f"--{option}", ",".join(items)] if items else []
    command += [
        f"--{flag.replace('_', '-')}" for flag in ("prefill", "gradient", "joint", "two_way") if getattr(args, flag)
    ]
    command += ["--coordinator-address", address, "--num-processes", str(args.devices)]
    ranks = [[*command, "--process-id", str(rank), *_local_device(rank)] for rank in range(args.devices)]
    with _started(ranks) as started:
        try:
            return max(abs(process.wait(timeout=LIMIT_S)) for process in started)
        except subprocess.TimeoutExpired:
            return 1


def _local_device(rank: int) -> list[str]:
    """Returns the option that gives a rank its own GPU; emulated devices are its own already."""
    has_gpus = any(map(os.path.exists, ("/dev/nvidia0", "/dev/kfd")))  # NVIDIA's, or AMD's
    return ["--local-device-ids", str(rank)] if has_gpus else []


@contextlib.contextmanager
def _started(commands: Sequence[Sequence[str]]) -> Iterator[list[subprocess.Popen]]:
    """Starts the processes, and ends at exit those that still run."""
    started = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands]
    try:
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
        for process in started:
            process.wait()


def _print(args: argparse.Namespace, transfers: Sequence[dict], best: dict[int, str], *, is_whole: bool) -> None:
    """Prints the rates of transfers, and the rows of steps under both settings."""
    rows = [row for row in _rows_of(args, "results.jsonl") if row["nccl_setting"] is not None]
    if args.json:
        terminal.print_document({"rows": rows, "transfers": list(transfers), "fastest": best})
        return
    console = terminal.output()
    table = terminal.table("transfer", "setting", "rate", title="Bare transfers to a neighbour", left=("setting",))
    for row in sorted(transfers, key=lambda row: row["bytes"]):
        mark = " (fastest)" if best[row["bytes"]] == row["nccl_setting"] else ""
        table.add_row(size(row["bytes"]), row["nccl_setting"] + mark, rate(row["gb_per_s"]))
    console.print(table)
    missing = [name for name in SETTINGS if name not in {row["nccl_setting"] for row in transfers}]
    if missing:
        terminal.say(console, f"Could not be timed here: {', '.join(missing)}.")
    if is_whole:
        report.print_results(rows, "prompt" if args.prefill else "step")
        for sentence in report.conclusions(rows):
            terminal.say(console, sentence)
