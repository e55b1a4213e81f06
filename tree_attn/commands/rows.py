"""Rows that `tree-attn compare` wrote, and what the cost model predicts for each."""

import dataclasses
import json
import pathlib
import statistics
from collections.abc import Sequence

from tree_attn.cost import machine
from tree_attn.cost.machine import Machine
from tree_attn.cost.predict import Prediction, predict_step
from tree_attn.cost.step import DecodeStep

# The fixed cost of a program call, by kind of device, which rows without a `long_chain` share among their steps: the
# median `program_us` of the steps in docs/results/reduce_2xh200. What it was in the older rows, nobody measured.
PROGRAM_US = {"NVIDIA H200": 760.0}


def read(folders: Sequence[pathlib.Path]) -> list[dict]:
    """The rows without an error in `results.jsonl` of each folder.

    Raises:
        ValueError: a folder without that file, a line that is not JSON (names both), or no row at all.
    """
    rows = []
    for folder in folders:
        path = folder / "results.jsonl"
        if not path.is_file():
            raise ValueError(f"--rows must be folders that `tree-attn compare --out` wrote, and {path} is not there")
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}, is not JSON ({error})") from error
    rows = [row for row in rows if row["error"] is None]
    if not rows:
        raise ValueError("--rows must have at least one row that was measured")
    return rows


def machine_of(path: pathlib.Path | None, device_kind: str) -> Machine:
    """The machine in a file, or the package's own of this kind.

    Raises:
        ValueError: no file is given and the package has none of this kind; or the file is no machine.
    """
    found = machine.load(device_kind) if path is None else machine.read(path)
    if found is None:
        raise ValueError(
            f"--machine must be given for {device_kind!r}, which is none of {machine.device_kinds()}; "
            "`tree-attn doctor --distributed --machine-out FILE` measures one"
        )
    return found


def device_kind(row: dict) -> str:
    """The kind in a row's hardware: "NVIDIA H200" of "4 x NVIDIA H200"."""
    return row["hardware"].split(" x ", 1)[-1]


def step(row: dict) -> DecodeStep:
    """The step that a row measured."""
    return DecodeStep(**{field.name: row[field.name] for field in dataclasses.fields(DecodeStep) if field.name in row})


def reduction(row: dict) -> str | tuple[str, ...] | None:
    """A row's reduction, as the library takes it: JSON has lists for tuples."""
    return tuple(row["reduction"]) if isinstance(row["reduction"], list) else row["reduction"]


def label(strategy: str, reduction: str | tuple[str, ...] | None) -> str:
    """How tables and figures call a strategy: "tree gather", "tree fused + gather", "ring overlapped"."""
    if reduction is None:
        return strategy.replace("_", " ")
    return f"tree {reduction if isinstance(reduction, str) else ' + '.join(reduction)}"


def predict(row: dict, machine: Machine) -> Prediction:
    """What the model predicts for the row's step."""
    return predict_step(
        step(row), row["strategy"], reduction(row), machine=machine, axis_sizes=tuple(row["axis_sizes"])
    )


def predicted_us(row: dict, machine: Machine) -> float:
    """The latency that the model predicts as the row was timed: with a program's fixed cost, where that is in it."""
    fixed_us = 0.0 if row.get("long_chain") else PROGRAM_US.get(device_kind(row), 0.0) / row["chain"]
    return predict(row, machine).latency_us + fixed_us


def relative_error(row: dict, machine: Machine) -> float:
    """The model's relative error in a row's latency; negative where it predicts too little."""
    return predicted_us(row, machine) / row["latency_us_median"] - 1


def median_error(rows: Sequence[dict], machine: Machine) -> float:
    """The median of the errors' sizes."""
    return statistics.median(abs(relative_error(row, machine)) for row in rows)
