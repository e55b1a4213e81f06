"""`tree-attn figures`: the paper's Figures 3 and 4 and equations 8 to 14, from measured rows and predicted beyond."""

import argparse
import dataclasses
import pathlib

HELP = """\
Draws the paper's figures from rows of `tree-attn compare`, and the cost model's predictions beyond them:

  3          time of tree and ring attention: relative over keys, absolute over 1 to 128 GPUs; with the model's errors
  4          peak memory of a GPU, over keys and over hidden sizes
  equations  memory by equations 8 and 9 and traffic by 10 to 14, beside those of the compiled programs

Measured points are full and joined by solid lines, predicted ones hollow and joined by dashed lines. Limits are
dotted: one read of K and V by the datasheet, the bytes of K and V, and one state sent. The numbers are printed as
well; drawing needs the extra 'plot'.

examples:
  tree-attn figures 3 --rows docs/results/compare_4xh200_4processes --out figures/
  tree-attn figures 4 --rows results/2gpus results/8gpus --out figures/ --json
  tree-attn figures equations --rows results/8gpus --out figures/
  tree-attn figures 3 --rows results/8gpus --machine machine.json --out figures/
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tree-attn figures`."""
    parser.add_argument("figure", choices=("3", "4", "equations"), help="figure to draw")
    parser.add_argument(
        "--rows", type=pathlib.Path, nargs="+", required=True, metavar="DIR", help="folders that `compare --out` wrote"
    )
    parser.add_argument(
        "--machine", type=pathlib.Path, metavar="FILE", help="parameters for figure 3 (default: the package's)"
    )
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR", help="folder of the drawing")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")


def run(args: argparse.Namespace) -> int:
    """Computes, draws and prints; returns 0."""
    from tree_attn.commands import drawing, phases, terminal
    from tree_attn.commands.figures import paper, plots, report, rows  # these load JAX, which --help does without
    from tree_attn.commands.options import check_folder
    from tree_attn.commands.plan.prediction import machine_of

    measured = rows.read(args.rows)
    check_folder("--out", args.out)
    device_kinds = sorted({rows.device_kind(row) for row in measured})
    shapes = {dataclasses.replace(rows.step(row), num_keys=1, n_devices=1) for row in measured}
    if len(device_kinds) > 1 or len(shapes) > 1:
        found = f"{device_kinds} and {len(shapes)}"
        raise ValueError(f"--rows must be of one kind of device and one shape of heads, got {found}")
    is_of_times = args.figure == "3"
    if is_of_times and args.machine is None and device_kinds == [rows.EMULATED]:
        raise ValueError(
            "--rows of emulated devices have times that no cost model predicts: figure 3 needs rows of GPUs or TPUs, "
            "or --machine FILE; figure 4 and the equations need neither"
        )
    name = "equations" if args.figure == "equations" else f"figure_{args.figure}"
    remark = rows.REMARK if device_kinds == [rows.EMULATED] else ""
    if is_of_times or args.machine is not None:
        machine = machine_of(args.machine, device_kinds[0])
    if is_of_times:
        figure, remark = paper.figure_3(measured, machine), f"links across nodes: {machine.network.source}"
    else:
        figure = getattr(paper, name)(measured)
    files = {}
    if drawing.has_matplotlib():
        args.out.mkdir(parents=True, exist_ok=True)
        files["drawing"] = str(args.out / f"{name}.png")
        with phases.phase("drawing"):
            caption = ["full: measured; hollow, dashed: PREDICTED; dotted: limit", *rows.setting(measured)]
            if name == "figure_4":
                caption[-1] += "; other hidden sizes have other numbers of heads"
            plots.draw(figure, args.out / f"{name}.png", [*caption, remark] if remark else caption)
    if args.json:
        points = [dataclasses.asdict(point) for point in figure.points]
        terminal.print_document({"points": points, "comparisons": figure.comparisons, "files": files})
        return 0
    report.print_figure(figure, remark)
    console = terminal.output()
    for sentence in report.conclusions(figure):
        terminal.say(console, sentence)
    terminal.say(console, f"Drawn: {files['drawing']}" if files else f"Not drawn: {drawing.advice()}")
    return 0
