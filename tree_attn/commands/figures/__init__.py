"""`tree-attn figures`: the paper's Figures 3 and 4 and equations 8 to 14, from measured rows and predicted beyond."""

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Sequence

HELP = """\
Draws the paper's figures from rows of `tree-attn compare`, and what the cost model predicts beyond them:

  3          time of tree and ring attention: relative over keys, absolute over 1 to 128 GPUs; with the model's errors
  4          peak memory of a GPU, over keys and over hidden sizes
  equations  memory by equations 8 and 9 and traffic by 10 to 14, beside those of the compiled programs

Measured points are full and joined by solid lines, predicted ones hollow and joined by dashed lines. The numbers are
printed as well. Needs the extra 'plot'.

examples:
  tree-attn figures 3 --rows docs/results/compare_4xh200_4processes --out figures/
  tree-attn figures 4 --rows results/2gpus results/8gpus --out figures/ --json
  tree-attn figures equations --rows results/8gpus --machine machine.json --out figures/
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tree-attn figures`."""
    parser.add_argument("figure", choices=("3", "4", "equations"), help="which one")
    parser.add_argument(
        "--rows", type=pathlib.Path, nargs="+", required=True, metavar="DIR", help="what `compare --out` wrote"
    )
    parser.add_argument("--machine", type=pathlib.Path, metavar="FILE", help="parameters (default: the package's)")
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR", help="where the drawing goes")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")


def run(args: argparse.Namespace) -> int:
    """Computes, draws and prints; returns 0."""
    from tree_attn.commands import plots, rows
    from tree_attn.commands.figures import paper as paper_figures

    plots.require_matplotlib()
    measured = rows.read(args.rows)
    kinds = sorted({rows.device_kind(row) for row in measured})
    shapes = {dataclasses.replace(rows.step(row), num_keys=1, n_devices=1) for row in measured}
    if len(kinds) > 1 or len(shapes) > 1:
        raise ValueError(f"--rows must be of one kind of device and one shape of heads, got {kinds} and {len(shapes)}")
    machine = rows.machine_of(args.machine, kinds[0])
    name = "equations" if args.figure == "equations" else f"figure_{args.figure}"
    figure = getattr(paper_figures, name)(measured, machine)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{name}.png"
    note = "full: measured; hollow, dashed: PREDICTED"
    if args.figure == "3":
        note += f" (links across nodes: {machine.network.source.split(':')[0]})"
    paper_figures.draw(figure, path, note)
    if args.json:
        points = [dataclasses.asdict(point) for point in figure.points]
        print(json.dumps({"points": points, "comparisons": figure.comparisons, "files": {"drawing": str(path)}}))
    else:
        _print(figure, note)
        print(path)
    return 0


def _print(figure, note: str) -> None:
    """The points of each panel, those measured marked, and how far predictions are from measurements."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console = console if console.is_terminal else Console(width=140)
    for panel, (x, y) in figure.axes.items():
        points = [point for point in figure.points if point.panel == panel]
        names = sorted({point.x for point in points})
        table = Table(title=f"{panel}: {y} over {x} (*: measured; all others PREDICTED)")
        table.add_column("")
        for name in names:
            table.add_column(f"{name:,}", justify="right")
        for series in dict.fromkeys(point.series for point in points):
            cells = {point.x: f"{point.y:.4g}" for point in points if point.series == series and not point.is_measured}
            cells |= {point.x: f"{point.y:.4g}*" for point in points if point.series == series and point.is_measured}
            table.add_row(series, *(cells.get(name, "") for name in names))
        console.print(table)
    console.print(note)
    _print_comparisons(figure.comparisons, console)


def _print_comparisons(comparisons: Sequence[dict], console) -> None:
    import statistics

    from rich.table import Table

    table = Table(title="predicted against measured, per GPU and step")
    words = ("", "strategy", "kernel", "by")
    for column in (*words[:3], "keys", "GPUs", "by", "predicted", "measured", "error"):
        table.add_column(column, justify="left" if column in words else "right")
    errors: dict[str, list[float]] = {}
    for one in comparisons:
        numbers = (f"{one['predicted']:,.0f}", f"{one['measured']:,.0f}", f"{one['error']:+.1%}")
        where = (one["strategy"], one["implementation"], f"{one['num_keys']:,}", str(one["n_devices"]))
        table.add_row(one["quantity"], *where, one["by"], *numbers)
        strategy = "tree" if one["strategy"].startswith("tree") else "ring"
        for name in dict.fromkeys((one["by"], f"{one['by']}, {strategy}")):
            errors.setdefault(name, []).append(abs(one["error"]))
    console.print(table)
    for name in sorted(errors):
        console.print(f"median error by {name}: {statistics.median(errors[name]):.1%} of {len(errors[name])} rows")
