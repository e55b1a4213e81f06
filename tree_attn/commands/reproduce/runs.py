"""The runs of an experiment: other commands, and decode steps; each row is written as it is measured."""

import argparse
import contextlib
import functools
import importlib
import io
import pathlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from tree_attn.commands import common, phases
from tree_attn.commands.bench.room import NoRoom
from tree_attn.commands.reproduce.experiment import Command, Steps
from tree_attn.measure import provenance
from tree_attn.measure.rows import MeasuredRows
from tree_attn.measure.steps import lean, prefix, sparq

ROWS = "results.jsonl"
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"  # in XLA's errors
Measure = Callable[[], dict[str, Any]]


class Failed(Exception):
    """A command that a run is made of found a wrong result; the text is what it printed."""


def run(one: Command | Steps, args: argparse.Namespace, n_iters: int) -> list[dict[str, Any]]:
    """Makes the rows of a run that are not in `args.out` yet; returns all of them.

    Raises:
      Failed: a command's check failed.
    """
    if isinstance(one, Command):
        return _run_command(one, args.out / one.folder)
    return _run_steps(one, args, n_iters)


def _run_command(one: Command, out: pathlib.Path) -> list[dict[str, Any]]:
    """Runs another command in this process; its table is dropped, for its rows are shown with the paper's numbers.

    Cases grow within a command: where the memory ends, its rows stand, and the next run begins.
    """
    name, *options = one.arguments
    arguments = [*options, "--out", str(out)]
    module, parser = importlib.import_module(f"tree_attn.commands.{name}"), argparse.ArgumentParser()
    module.add_arguments(parser)
    common.add_arguments(parser, name)
    given_args = parser.parse_args(arguments)
    given_args.command_name, given_args.command_line = name, shlex.join(["tree-attn", name, *arguments])
    printed = io.StringIO()
    status = 0
    try:
        with phases.phase(name), contextlib.redirect_stdout(printed):
            status = module.run(given_args)
    except (RuntimeError, NoRoom) as error:
        if not isinstance(error, NoRoom) and OUT_OF_MEMORY not in str(error):
            raise
        phases.say(f"{name}: the memory ends before the last of its cases; the rows before that are kept")
    if status:
        raise Failed(printed.getvalue().strip())
    return MeasuredRows(out / ROWS).rows


def _run_steps(one: Steps, args: argparse.Namespace, n_iters: int) -> list[dict[str, Any]]:
    """Measures the steps without a row, and those whose row has an error again."""
    writer = MeasuredRows(args.out / ROWS)
    measured = list(_measurements(one, n_iters))
    with phases.phase("timing steps", len(measured)) as timing:
        for labels, measure in measured:
            labels = {name: list(value) if isinstance(value, tuple) else value for name, value in labels.items()}
            index = next((i for i, row in enumerate(writer.rows) if labels.items() <= row.items()), None)
            timing.describe(_title(labels))
            if index is None or writer.rows[index].get("error"):
                row = labels | measure() | _origin(args)
                writer.append(row) if index is None else writer.replace(index, row)
            timing.advance()
    return writer.rows


def _measurements(one: Steps, n_iters: int) -> Iterator[tuple[dict[str, Any], Measure]]:
    """Yields the fields that name each row, and what measures it."""
    if one.kind == "needles":
        from tree_attn.commands.reproduce import needles  # loads the model's code

        yield from needles.measurements(one.cases, _attempt)
        return
    for fields in one.cases:
        for way, labels, measure in {"lean": _lean, "prefix": _prefix, "sparq": _sparq}[one.kind](one, fields, n_iters):
            yield labels | {"dtype": "bfloat16"} | way, measure


def _lean(one: Steps, fields: Mapping[str, Any], n_iters: int):
    case = lean.LeanStep(**fields, figure="")
    labels = {name: value for name, value in case.row().items() if name != "figure"}
    for name in one.ways or [lean.FIXED_SPLIT, *lean.implementations()]:
        measure = functools.partial(_attempt, lean.time_way, case, name, n_iters, with_energy=one.has_energy)
        yield {"implementation": name}, labels, measure


def _prefix(one: Steps, fields: Mapping[str, Any], n_iters: int):
    case = prefix.SharedPrefixStep(**fields)
    for way in one.ways:
        implementation, *alone = way.split(", ")
        measure = functools.partial(_attempt, prefix.time_way, case, not alone, implementation, n_iters)
        yield {"way": way}, dict(fields) | {"limit_us": case.limit_us}, measure


def _sparq(one: Steps, fields: Mapping[str, Any], n_iters: int):
    case = sparq.SparqStep(**fields)
    for way in one.ways:
        measure = functools.partial(_attempt, sparq.time_way, case, way, n_iters)
        yield {"way": way}, dict(fields) | {"limit_us": case.limit_us}, measure


def _attempt(measure: Callable[..., dict], *args, **options) -> dict[str, Any]:
    """Returns the fields of a row; "error" says why a way has no time, and the others go on."""
    try:
        return measure(*args, **options)
    except (RuntimeError, ValueError, NotImplementedError, ImportError, AssertionError) as error:
        return {"error": f"{type(error).__name__}: {str(error)[:500]}"}


def _title(labels: Mapping[str, Any]) -> str:
    names = ("batch", "max_keys", "keys", "prefix", "suffix", "questions", "num_heads")
    sizes = ", ".join(f"{name.replace('_', ' ')} {labels[name]:,}" for name in names if name in labels)
    return ", ".join(filter(None, (labels.get("implementation") or labels.get("way"), sizes)))


def _origin(args: argparse.Namespace) -> dict[str, Any]:
    devices = jax.local_devices()[:1]
    facts = {"hardware": provenance.hardware(devices), "versions": provenance.versions(), "n_devices": 1}
    return facts | {"command": args.command_line}


def folders(out: pathlib.Path, planned: Sequence[Command | Steps]) -> list[pathlib.Path]:
    """Returns the files of rows of these runs, in order."""
    return [out / (one.folder if isinstance(one, Command) else "") / ROWS for one in planned]
