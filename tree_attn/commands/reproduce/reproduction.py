"""One call of `tree-attn reproduce`: its arguments checked, its runs made in order, its numbers printed."""

import argparse
import pathlib
from typing import Any

from tree_attn.commands import drawing, phases, terminal
from tree_attn.commands.options import check_at_least, check_folder, reading
from tree_attn.commands.reproduce import experiments, report
from tree_attn.commands.reproduce.experiment import Experiment, Place
from tree_attn.devices import request_cpu_devices, visible_gpus

EMULATED = 8  # devices, as in other commands
ITERS_ON_CPU = 4  # whose times say nothing


def reproduce(args: argparse.Namespace) -> int:
    """Makes the rows that the folder lacks, and prints the numbers of all; returns 0, or 1 if a result was wrong."""
    experiment, place = _checked(args)
    request_cpu_devices(EMULATED)  # JAX fixes their number as it starts
    from tree_attn.commands.reproduce import runs  # imports that take a while come after the checks

    rows: list[dict[str, Any]] = []
    planned = experiment.plan(place)
    try:
        for number, one in enumerate(planned, start=1):
            with phases.phase(f"{experiment.name}: run {number} of {len(planned)}"):
                rows += runs.run(one, args, args.iters if place.gpus else min(args.iters, ITERS_ON_CPU))
    except runs.Failed as error:
        if args.json:
            terminal.print_document({"error": str(error), "rows": [], "files": {}})
        else:
            terminal.say(terminal.output(), str(error))
        return 1
    files = {"rows": [str(path) for path in runs.folders(args.out, planned)]}
    if not args.no_plots and place.gpus and experiment.x_axis and drawing.has_matplotlib():
        from tree_attn.commands.reproduce import plots

        with phases.phase("drawing"):
            files["drawing"] = str(plots.draw(experiment, rows, args.out / f"{experiment.name}.png"))
    if args.json:
        terminal.print_document(report.document(experiment, place, rows) | {"files": files})
        return 0
    report.print_experiment(experiment, place, rows)
    console = terminal.output()
    drawn = f"; drawn: {files['drawing']}" if "drawing" in files else ""
    terminal.say(console, f"Rows: {', '.join(files['rows'])}{drawn}")
    return 0


def _checked(args: argparse.Namespace) -> tuple[Experiment, Place]:
    """Returns the experiment and the place; sets `args.out`.

    Raises:
      ValueError: an argument is wrong; names it.
    """
    if args.name is None:
        raise ValueError("NAME must be a figure or table; --list prints all")
    experiment = experiments.by_name(args.name)
    check_at_least(args, samples=1, iters=1)
    if args.out is None:
        args.out = pathlib.Path("reproduced") / experiment.name
    check_folder("--out", args.out)
    if experiment.needs_text:
        if args.text is None:
            raise ValueError(
                f"--text must be a file of plain text for {experiment.name}; tree-attn eval --help has one"
            )
        with reading("--text", args.text):
            args.text.read_text(encoding="utf-8")
    gpus = len(visible_gpus())
    if 0 < gpus < experiment.min_gpus:
        raise ValueError(
            f"{experiment.name} needs at least {experiment.min_gpus} GPUs, got {gpus}; JAX_PLATFORMS=cpu runs its "
            "small form on emulated devices"
        )
    return experiment, Place(gpus=gpus, text=args.text, model=args.model, samples=args.samples)
