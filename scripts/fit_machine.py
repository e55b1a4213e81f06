"""Fits the H200's cost model to rows of one and two GPUs, and prints its errors on four and eight.

    python3 scripts/fit_machine.py fit --out tree_attn/cost/machines/nvidia_h200.json
    python3 scripts/fit_machine.py errors                                               # a table for docs/results.md

`FITTED` names the rows that constants come from, `PREDICTED` those that the table of errors counts. No row is in both:
tests/cost/test_blind.py compares them, and fits again.

One constant cannot come from two GPUs: the latency of a message that waits for another, of which the launch of a
collective cannot be told apart there. It is the one that NCCL's source has for its LL protocol over NVLink.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tree_attn.commands.doctor.fitting import (
    COLLECTIVES,
    NCCL_ROUND_US,
    Point,
    fit_collectives,
    fit_exchange,
    fit_transfers,
)
from tree_attn.commands.figures import rows as compared
from tree_attn.cost import machine, predict
from tree_attn.cost.machine import ExchangeCost, LinkClass, Machine
from tree_attn.measure.rows import read, strategy_label

RESULTS = pathlib.Path(__file__).parents[1] / "docs" / "results"
KIND = "NVIDIA H200"
MEMORY_BYTES = 141_000_000_000  # the datasheet's

REDUCE, FUSED, ONE = (
    "reduce_2xh200/bench_reduce.jsonl",
    "reduce_2xh200/exchange.jsonl",
    "compare_1xh200/results.jsonl",
)
TWO = "compare_2xh200_2processes/results.jsonl"
DOCTOR = "doctor_2xh200/machine.json"
# The rows that constants are fitted to. `fused` is fitted to exchanges alone, of a later kernel than the other rows'.
FITTED: dict[str, Callable[[dict], bool]] = {
    REDUCE: lambda row: row["what"] == "step" and row["reduction"] in ("none", *COLLECTIVES),
    FUSED: lambda row: row["reduction"] == "fused",
    ONE: lambda row: row["error"] is None and row["strategy"] == "tree",
    TWO: lambda row: row["error"] is None and row["strategy"] == "ring_overlapped",
    DOCTOR: lambda point: point["kind"] != "fused",
}
# The folders whose rows are predicted: steps by `compare`, and what exchanges add to the steps of `bench_reduce.py`.
PREDICTED = (
    "compare_4xh200_4processes_pairs/results.jsonl",
    "compare_4xh200_4processes_spread/results.jsonl",
    "reduce_4xh200/steps.jsonl",
    "compare_4xh200_1process_pairs/results.jsonl",
    "compare_8xh200_8processes/results.jsonl",
    "reduce_8xh200/steps.jsonl",
    "compare_8xh200_1process/results.jsonl",
)
UNSPREAD_BYTES = 134e6  # NCCL's own settings use all channels of four GPUs from here on (docs/log/ring.md)


def lines(path: str) -> list[dict]:
    """Returns the rows of a file, or the points of a machine that `doctor` measured."""
    if path != DOCTOR:
        return read(RESULTS / path)
    return json.loads((RESULTS / path).read_text())["provenance"]["points"]["device"]


def fitted_rows() -> dict[str, list[int]]:
    """Returns the lines of each file that constants are fitted to, counted from 1."""
    return {path: [i for i, row in enumerate(lines(path), start=1) if keep(row)] for path, keep in FITTED.items()}


def fit(rows_of: Callable[[str], list[dict]] = lines) -> Machine:
    """Returns the machine that the rows of one and two GPUs make.

    Args:
      rows_of: returns the rows of a file in docs/results.
    """
    found = {path: [row for row in rows_of(path) if keep(row)] for path, keep in FITTED.items()}
    read_bytes_per_s, local_us = _local(found)
    steps = found[REDUCE]
    alone = {row["keys_per_device"]: row["us_median"] for row in steps if row["reduction"] == "none"}
    points = [
        Point(exchange=row["kind"], **{name: row[name] for name in ("size", "payload_bytes", "us")})
        for row in found[DOCTOR]
    ]
    points += [
        _point(row["reduction"], predict_elements(row), row["us_median"] - alone[row["keys_per_device"]])
        for row in steps
        if row["reduction"] != "none"
    ]
    points += [_point("fused", row["elements"], row["us_median"]) for row in found[FUSED]]
    collective_us, costs = fit_collectives({"device": points}, round_us=NCCL_ROUND_US)
    transfers = [point for point in points if point.exchange == "neighbour"]
    for row in found[TWO]:  # within a ring a transfer shares the memory with the attention beside it
        step = compared.step(row)
        local = step.key_value_bytes_per_device / read_bytes_per_s * 1e6 + local_us  # of one shard, before it arrives
        us = (row["latency_us_median"] - local) / 2  # of keys, and of values
        transfers.append(Point(exchange="neighbour", size=2, payload_bytes=step.key_value_bytes_per_device // 2, us=us))
    fused = fit_exchange([point for point in points if point.exchange == "fused"], is_across=False)
    node = dict.fromkeys(COLLECTIVES, costs["device"]) | {"fused": fused}
    node["neighbour"] = ExchangeCost(round_us=0.0, lines=fit_transfers(transfers))
    return Machine(
        device_kind=KIND,
        gpus_per_node=8,
        memory_bytes=MEMORY_BYTES,
        read_bytes_per_s=_rounded(read_bytes_per_s),
        local_us=_rounded(local_us),
        collective_us=_rounded(collective_us),
        node=LinkClass(
            source="measured on two H200s over NVLink; more are extrapolated",
            costs={name: _rounded_cost(cost) for name, cost in node.items()},
        ),
        fitted_devices=2,
        provenance=PROVENANCE | {"fitted_rows": fitted_rows()},
    )


PROVENANCE = {
    "fit": "python3 scripts/fit_machine.py fit --out FILE: least squares of relative errors; no row of more than two "
    "GPUs is in it (tests/cost/test_blind.py)",
    "read_bytes_per_s, local_us": "local steps on two GPUs, and on one the median over equal programs",
    "collective_us, allreduce, gather": "what reductions add to steps of two GPUs, at 4 kB, 8 kB and 1 MB",
    "round_us of allreduce and gather": "NCCL 2.28's source, src/graph/tuning.cc: LL over NVLink. Two GPUs cannot tell "
    "it from a launch",
    "fused": "exchanges alone of two GPUs, of 8 kB to 1 MB, with 1 us of the chain's own kernels; at the end of the "
    "attention's kernel a small one adds less; more devices send 2 (p - 1) payloads at this rate",
    "neighbour": "bare transfers between two GPUs, and those of overlapped rings of two, which are 8 % slower; all "
    "with NCCL_P2P_NVL_CHUNKSIZE=65536",
    "memory_bytes": "the datasheet's 141 GB",
    "jax_version": "0.11.2",
}


def predict_elements(row: dict) -> int:
    """Returns the elements of the state of a step of `bench_reduce.py`: one query, head dim 128."""
    return row["heads"] * 129


def _local(found: dict[str, list[dict]]) -> tuple[float, float]:
    """Returns the rate of reading and the time beside it, by least squares of relative errors."""
    times = [
        (4 * row["keys_per_device"] * row["heads"] * 128, row["us_median"])
        for row in found[REDUCE]
        if row["reduction"] == "none"
    ]
    by_length: dict[int, list[float]] = {}  # on one GPU every reduction is the same program
    for row in found[ONE]:
        by_length.setdefault(compared.step(row).key_value_bytes_per_device, []).append(row["latency_us_median"])
    times += [(num_bytes, statistics.median(us)) for num_bytes, us in by_length.items()]
    num_bytes, us = (np.array(column, dtype=float) for column in zip(*times))
    columns = np.stack([num_bytes, np.ones(len(us))], axis=1) / us[:, None]
    us_per_byte, local_us = np.linalg.lstsq(columns, np.ones(len(us)), rcond=None)[0]
    return 1e6 / us_per_byte, float(local_us)


def _point(exchange: str, elements: int, us: float) -> Point:
    return Point(exchange=exchange, size=2, payload_bytes=4 * elements, us=us)


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _rounded_cost(cost: ExchangeCost) -> ExchangeCost:
    lines = (
        dataclasses.replace(line, alpha_us=_rounded(line.alpha_us), bytes_per_s=_rounded(line.bytes_per_s))
        for line in cost.lines
    )
    return ExchangeCost(round_us=_rounded(cost.round_us), lines=tuple(lines))


def errors(known: Machine) -> Iterator[dict[str, Any]]:
    """Yields, for each predicted row, its file, line and setting, what is predicted, both times, and the error."""
    for path in PREDICTED:
        rows = lines(path)
        predictions = _added if "keys_per_device" in rows[0] else _whole
        for i, what, predicted, measured in predictions(rows, known):
            row = rows[i]
            yield {
                "file": path, "line": i + 1, "n_devices": row["n_devices"], "n_processes": row["n_processes"],
                "what": what, "predicted": predicted, "measured": measured, "error": predicted / measured - 1,
            }  # fmt: skip


def _whole(rows: list[dict], known: Machine) -> Iterator[tuple[int, str, float, float]]:
    """Yields the index of each row of `compare` that ran, its strategy, and its times; rings NCCL spread or not."""
    for i, row in enumerate(rows):
        if row["error"] is None:
            what = strategy_label(row["strategy"], row["reduction"])
            if row["strategy"] != "tree" and not is_spread(row):
                what += ", few channels"
            yield i, what, compared.predicted_us(row, known), row["latency_us_median"]


def is_spread(row: dict) -> bool:
    """Returns whether NCCL sent a ring's transfers over all of its channels."""
    num_bytes = compared.step(row).key_value_bytes_per_device / 2
    return "NCCL_P2P_NVL_CHUNKSIZE" in (row.get("nccl") or ()) or num_bytes > UNSPREAD_BYTES


def _added(rows: list[dict], known: Machine) -> Iterator[tuple[int, str, float, float]]:
    """Yields the index of each step with a named reduction, and what the reduction adds to the step without it."""
    alone = {row["keys_per_device"]: row["us_median"] for row in rows if row["reduction"] == "none"}
    for i, row in enumerate(rows):
        if row["reduction"] not in (None, "none"):
            sizes, name = (row["n_devices"],), row["reduction"]
            us = sum(predict.reduction_us(name, elements=predict_elements(row), axis_sizes=sizes, machine=known))
            us += known.collective_us * predict.num_collectives(name, sizes)
            yield i, f"{name} adds", us, row["us_median"] - alone[row["keys_per_device"]]


def print_errors(known: Machine) -> None:
    """Prints a Markdown table: errors of predictions by number of GPUs and by what is predicted."""
    by_setting: dict[tuple, list[dict]] = {}
    for one in errors(known):
        by_setting.setdefault((one["n_devices"], one["n_processes"], one["what"]), []).append(one)
    print("| GPUs | predicted | rows | median error | from | to | rows of |")
    print("|---|---|---|---|---|---|---|")
    for (devices, processes, what), found in by_setting.items():
        here = [one["error"] for one in found]
        where = ", ".join(dict.fromkeys(one["file"].removesuffix("/results.jsonl") for one in found))
        gpus = f"{devices}" + (" in one process" if processes == 1 else "")
        median = statistics.median(map(abs, here))
        print(f"| {gpus} | {what} | {len(here)} | {median:.0%} | {min(here):+.0%} | {max(here):+.0%} | {where} |")


def main() -> int:
    """Fits, or prints the table of errors of the package's machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("fit", "errors"))
    parser.add_argument("--out", type=pathlib.Path, help="the machine's file (fit)")
    args = parser.parse_args()
    if args.what == "errors":
        print_errors(machine.load(KIND))
    elif args.out is None:
        parser.error("--out must be given with fit")
    else:
        machine.write(fit(), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
