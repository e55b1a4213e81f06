"""`tree-attn doctor`: the devices here, the kernels and reductions that can run, and why others cannot."""

import argparse
import dataclasses
import pathlib

from tree_attn.commands import processes

HELP = """\
Lists the devices, the links between them, the versions installed, and which local kernels and reductions can run here.
For each that cannot, it says why. It names the kernel that runs each feature here, and what was never measured on such
a device. Then it lists extras and folders that are kept, and says what is slow here and why. It needs no model and
changes nothing.

With --distributed it runs as several processes, started by srun, torchrun or the options below. It checks that all are
there, fit together and reach each other, each within TREE_ATTN_TIMEOUT_S (60). Then it times the links inside a node
and across nodes. The first fault ends it, on every rank, with one error that says what to do. With --machine-out it
also measures the parameters that `tree-attn plan --machine FILE` predicts from; that takes a minute or two.

examples:
  tree-attn doctor
  srun --nodes=2 --ntasks-per-node=4 tree-attn doctor --distributed
  srun --nodes=2 --ntasks-per-node=4 tree-attn doctor --distributed --machine-out machine.json
  tree-attn doctor --json | python3 -m json.tool
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tree-attn doctor`."""
    parser.add_argument("--devices", type=int, help="devices to examine (default: all; emulated if there are too few)")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument("--distributed", action="store_true", help="check and time the processes and their links only")
    parser.add_argument(
        "--machine-out", type=pathlib.Path, metavar="FILE", help="with --distributed: measure the machine for `plan`"
    )
    processes.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Examines and prints, in process 0; returns 0."""
    from tree_attn.commands import terminal
    from tree_attn.commands.doctor import checks, report  # these load JAX, which --help does without
    from tree_attn.cost import machine

    path = args.machine_out
    if path is not None and not (args.distributed and path.absolute().parent.is_dir()):
        raise ValueError(f"--machine-out needs --distributed, and a folder that is there, got {path}")
    launch = processes.join(args, args.devices)
    found = checks.examine_distributed(launch, args.devices) if args.distributed else checks.examine(args.devices)
    if path is not None:
        measured = checks.measure_machine(args.devices, args.command_line)
        found["machine"] = dataclasses.asdict(measured)
    if launch.process_id != 0:
        return 0
    if path is not None:
        machine.write(measured, path)
    if args.json:
        terminal.print_document(found)
    else:
        (report.print_distributed if args.distributed else report.print_all)(found)
    return 0
