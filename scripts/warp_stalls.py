"""Says where the warps of a decode step's kernels wait, by samples that Nsight Compute takes of each instruction.

    ncu --clock-control none --graph-profiling node -k 'regex:lean_attention|tall_' --section SourceCounters \
        --section SpeedOfLight --section LaunchStats -o REPORT \
        python3 scripts/warp_stalls.py --run 31:99,31:51 --origin ORIGIN.json
    ncu --import REPORT.ncu-rep --page source --csv --print-source sass > SOURCE.csv
    ncu --import REPORT.ncu-rep --page details --csv > DETAILS.csv
    python3 scripts/warp_stalls.py --source SOURCE.csv --details DETAILS.csv --origin ORIGIN.json --out ROWS.jsonl

The first command runs `mosaic_gpu` of steps that are named SEED:CASE, as `bench_sweep.py` draws them. The last one
writes a row for each kernel that was sampled, and prints the instructions at which most samples found a warp.
"""

import argparse
import collections
import csv
import json
import os
import pathlib
import re
from collections.abc import Iterable

MIN_SHARE = 0.02  # of a kernel's samples, for an instruction to have a place in its row
MAX_OPCODES = 15  # that a row counts
DETAILS = {
    "Duration": "duration_us",
    "DRAM Throughput": "dram_percent",
    "Registers Per Thread": "registers_per_thread",
    "Grid Size": "ctas",
}


def main(arguments: list[str] | None = None) -> None:
    """Runs steps, or makes rows of what was sampled; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--run", help="steps to run, e.g. 31:99,31:51")
    what.add_argument("--source", type=pathlib.Path, help="CSV file that Nsight Compute wrote")
    parser.add_argument("--origin", type=pathlib.Path, required=True, help="JSON file of what rows say of the run")
    parser.add_argument("--details", type=pathlib.Path, help="CSV file of the details page, with --source")
    parser.add_argument("--out", type=pathlib.Path, help="JSONL file of rows, with --source")
    args = parser.parse_args(arguments)
    if args.run is not None:
        if not re.fullmatch(r"\d+:\d+(,\d+:\d+)*", args.run):
            parser.error(f"--run: must be SEED:CASE of each step, as 31:99,31:51, got {args.run}")
        run(args.run.split(","), args.origin)
        return
    if args.out is None or args.details is None:
        parser.error("--source: needs --details and --out")
    from tree_attn.measure.rows import MeasuredRows

    writer, origin = MeasuredRows(args.out), json.loads(args.origin.read_text())
    titles, kernels = origin.pop("steps"), read(args.source.read_text().splitlines())
    details = read_details(args.details.read_text().splitlines())
    if not kernels or len(kernels) % len(titles) or len(kernels) != len(details):
        parser.error(
            f"--source: must have as many kernels for each of {len(titles)} steps, and those of --details, "
            f"got {len(kernels)} and {len(details)}"
        )
    for number, (kernel, instructions) in enumerate(kernels):
        step = titles[number * len(titles) // len(kernels)]
        row = {"launch": number, "kernel": kernel, "step": step} | details[number] | summary(instructions)
        writer.append(row | origin)
        print(f"{step}: {kernel}, {row['samples']} samples")
        for wait in row["waits"]:
            print(f"  {wait['share']:6.1%} {wait['stall']:12s} {wait['at']:5d}  {wait['instruction']}")


def run(names: list[str], origin_path: pathlib.Path) -> None:
    """Runs `mosaic_gpu` of each step once, and writes what rows say of the run."""
    os.environ.setdefault("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")  # kernels by themselves
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax
    from benching import origin
    from sweep_cases import draw

    from tree_attn.measure.steps import ways

    steps = [draw(*map(int, name.split(":"))) for name in names]
    origin_path.write_text(json.dumps({"steps": [step.title() for step in steps]} | origin()))
    for step in steps:
        way = ways.way_of(step, ways.OURS)
        query, (arrays, *_), shared = ways.inputs(step)
        jax.block_until_ready(jax.jit(way.run)(query, *way.cache(arrays), *shared))


def read(lines: Iterable[str]) -> list[tuple[str, list[dict]]]:
    """Returns the kernels of Nsight Compute's source page: their names, and a dict for each instruction."""
    kernels: list[tuple[str, list[dict]]] = []
    head: list[str] = []
    for cells in filter(None, csv.reader(line for line in lines if not line.startswith("=="))):
        if cells[0] == "Kernel Name":
            kernels.append((cells[1], []))
        elif cells[0] == "Address":
            head = cells
        else:
            kernels[-1][1].append(dict(zip(head, cells)))
    return kernels


def read_details(lines: Iterable[str]) -> list[dict]:
    """Returns the fields `DETAILS` of each kernel on Nsight Compute's details page."""
    found: dict[str, dict] = {}
    for cells in csv.DictReader(line for line in lines if not line.startswith("==")):
        fields, name = found.setdefault(cells["ID"], {}), DETAILS.get(cells["Metric Name"])
        if name:
            fields.setdefault(name, float(cells["Metric Value"].replace(",", "")))
    return list(found.values())


def summary(instructions: list[dict]) -> dict:
    """Returns a row's fields: how many samples there are, of which kinds, and the instructions that have most."""
    samples = [int(instruction["# Samples"]) for instruction in instructions]
    total, stalls, waits = sum(samples), collections.Counter(), []
    for at, (instruction, count) in enumerate(zip(instructions, samples)):
        kinds = {name: int(x) for name, x in instruction.items() if name.startswith("stall_") and x.isdigit()}
        kinds = {name.removeprefix("stall_"): x for name, x in kinds.items() if x and "Not Issued" not in name}
        stalls.update(kinds)
        if count >= MIN_SHARE * total > 0:
            text = " ".join(instruction["Source"].split())
            stall = max(kinds, key=kinds.get, default="")
            waits.append({"at": at, "instruction": text, "share": count / total, "stall": stall})
    executed: collections.Counter[str] = collections.Counter()
    for instruction in instructions:
        words = [word for word in instruction["Source"].split() if not word.startswith("@")]
        executed[words[0].partition(".")[0]] += int(instruction["Instructions Executed"])
    return {
        "samples": total,
        "instructions": len(instructions),
        "warp_instructions": executed.total(),
        "opcodes": dict(executed.most_common(MAX_OPCODES)),
        "stalls": dict(stalls.most_common()),
        "waits": waits,
    }


if __name__ == "__main__":
    main()
