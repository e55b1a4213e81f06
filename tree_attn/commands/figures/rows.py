"""Rows that `tree-attn compare` wrote, and the cost model's predictions for them."""

import dataclasses
import pathlib
from collections.abc import Sequence

from tree_attn.cost.machine import Machine
from tree_attn.cost.predict import STRATEGIES, Prediction, predict_step
from tree_attn.cost.step import DecodeStep
from tree_attn.measure import rows

# The fixed cost of a program call, by device kind, which rows without a `long_chain` share among their steps: the
# median `program_us` of the steps in docs/results/reduce_2xh200. The older rows have no measurement of it.
PROGRAM_US = {"NVIDIA H200": 760.0}
EMULATED = "emulated CPU devices"
UNPREDICTED = ("shard_heads",)  # a reduction of which the cost model has no time
REMARK = "The measured bytes are those of programs compiled for emulated CPU devices, not for GPUs."


def read(folders: Sequence[pathlib.Path]) -> list[dict]:
    """Returns the rows without an error in `results.jsonl` of each folder that the cost model predicts.

    Raises:
      ValueError: a folder without that file, a line that is not JSON (names both), or no row at all.
    """
    found = []
    for folder in folders:
        path = folder / "results.jsonl"
        if not path.is_file():
            raise ValueError(f"--rows must be folders that `tree-attn compare --out` wrote, and {path} is not there")
        found += [row for row in rows.read(path) if row["error"] is None and _is_predicted(row)]
    if not found:
        raise ValueError("--rows must have at least one row that was measured")
    return found


def _is_predicted(row: dict) -> bool:
    """Returns False for a ring by another rotation than one way, a prompt, and heads that are sharded."""
    is_plain = row.get("rotation") in (None, "one_way") and row["reduction"] not in UNPREDICTED
    return row["strategy"] in STRATEGIES and is_plain


def device_kind(row: dict) -> str:
    """Returns the device kind in a row's hardware: "NVIDIA H200" of "4 x NVIDIA H200"; `EMULATED` on a CPU."""
    kind = row["hardware"].split(" x ", 1)[-1]
    return EMULATED if " emulated " in f" {kind}" else kind


def step(row: dict) -> DecodeStep:
    """Returns the step that a row measured."""
    return DecodeStep(**{field.name: row[field.name] for field in dataclasses.fields(DecodeStep) if field.name in row})


def reduction(row: dict) -> str | tuple[str, ...] | None:
    """Returns a row's reduction as the library takes it: JSON has lists for tuples."""
    return tuple(row["reduction"]) if isinstance(row["reduction"], list) else row["reduction"]


def predict(row: dict, machine: Machine) -> Prediction:
    """Returns the cost model's prediction for the row's step."""
    return predict_step(
        step(row), row["strategy"], reduction(row), machine=machine, axis_sizes=tuple(row["axis_sizes"])
    )


def predicted_us(row: dict, machine: Machine) -> float:
    """Returns the predicted latency as the row was timed: with a program's fixed cost, where the row has it."""
    fixed_us = 0.0 if row.get("long_chain") else PROGRAM_US.get(device_kind(row), 0.0) / row["chain"]
    return predict(row, machine).latency_us + fixed_us


def setting(found: Sequence[dict]) -> tuple[str, str]:
    """Returns two lines of what all rows have in common: hardware and commits; heads, dtype and batch."""
    row = found[0]
    numbers = dict.fromkeys(one["hardware"].removesuffix(f" x {device_kind(one)}") for one in found)
    kind = "" if device_kind(row) == EMULATED else f" x {device_kind(row)}"
    commits = ", ".join(dict.fromkeys((one["git_commit"] or "unknown")[:7] for one in found))
    heads = f"{row['num_heads']} query and {row['num_kv_heads']} KV heads of {row['head_dim']}"
    return f"{', '.join(numbers)}{kind}; commit {commits}", f"{heads}, {row['dtype']}, batch {row['batch']}"
