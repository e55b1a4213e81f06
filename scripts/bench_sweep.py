"""Times drawn decode steps on one GPU, as serving sees them: this library beside cuDNN and FlashInfer.

    python3 scripts/bench_sweep.py --seed 7 --cases 100 --minutes 9 --out FILE.jsonl
    python3 scripts/bench_sweep.py --table --go-on --out FILE.jsonl             # sixteen steps that do not change
    python3 scripts/bench_sweep.py --seed 7 --cases 100 --dry-run               # prints the cases; needs no GPU
    python3 scripts/bench_sweep.py --summary --out FILE.jsonl                   # of rows that are there; or --markdown

The time that counts is a step's in a chain of dependent steps, gaps between launches included: a long chain less a
short one, over the difference of their steps, by the host's clock. Each is dispatched several times before the host
waits, as a decode loop does: enqueueing a program hides behind the one before. XLA programs are unrolled chains in one
jit, with command buffers as JAX has them; `--options` adds the ways with options of XLA. FlashInfer's chains are CUDA
graphs, in a process of its own. Copies of K and V rotate, so that no cache holds them. The profiler gives the sum of
kernel times.

`--workers` processes compile all programs before anything is timed, and `--threads` others FlashInfer's kernels, of
which the first call of each kind compiles one. `--threads 0` is for kernels that were compiled before. A program of
which another way has the same is timed once, and its row says so.

A row is written as soon as it is there. `--go-on` leaves out the rows that the file has of this commit, but for those
that a second try may mend. `--build` compiles FlashInfer's kernels for all cases, and times nothing.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import os
import pathlib
import re
import sys
import time

import sweep_flashinfer
from benching import origin
from sweep_cases import FAMILIES, draw, table
from sweep_programs import REFERENCE, Compilers, load
from sweep_summary import markdown, summary

from tree_attn.measure.rows import MeasuredRows
from tree_attn.measure.steps.step import Step
from tree_attn.measure.steps.ways import OURS, PICKED, Way, more_ways, time_programs, ways

MAX_FAULTS = 3
TRANSIENT = ("process of FlashInfer", "noise hides", "RESOURCE_EXHAUSTED", "out of memory")


def main() -> int:
    """Draws the cases and times them; see the module's docstring."""
    args = _arguments()
    if args.summary or args.markdown:
        print((summary if args.summary else markdown)(_rows(args)))
        return 0
    # Another process shares the GPU: neither may take all memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    cases = [step for step in drawn(args) if step.family in args.only]
    from tree_attn.devices import default_platform

    if args.dry_run or default_platform() != "gpu":
        for step in cases:
            print(f"{step.case:18s} {step.family:8s} {step.bytes_us:7.1f} us  {step.title()}")
        return 0
    if args.build:
        return build(cases, args)
    if args.out.exists() and args.out.stat().st_size and not args.go_on:
        sys.exit(f"--out must be a new file, or --go-on given, got {args.out}")
    Sweep(args).run(cases)
    print(summary(_rows(args)))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the drawn cases")
    parser.add_argument("--cases", type=int, default=0, help="number of drawn cases")
    parser.add_argument("--table", action="store_true", help="the sixteen fixed steps, before the drawn ones")
    parser.add_argument(
        "--numbers", help='draw these cases, and not the first --cases: "3,17", or "41:3" for one of another seed'
    )
    parser.add_argument("--only", default=",".join(FAMILIES), help='leave out the other families: "dense,ragged"')
    parser.add_argument("--ways", help='only ways with one of these in their name: "None,cudnn"')
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("sweep.jsonl"), help="JSONL file of rows")
    parser.add_argument("--go-on", action="store_true", help="add the rows that the file lacks")
    parser.add_argument("--minutes", type=float, default=1e6, help="start no case after so many minutes")
    parser.add_argument("--iters", type=int, default=32, help="samples of each chain")
    parser.add_argument("--options", help='XLA options of a second set of ways: "name=value,name=value"')
    parser.add_argument("--as", dest="capability", help="also time mosaic_gpu as on this compute capability: 10.0")
    parser.add_argument(
        "--layouts", help="also time these of the lean kernel, CTAs per SM x keys x stages: 2x64x1,1x64x3"
    )
    parser.add_argument(
        "--threads", type=int, default=4, help="processes that compile FlashInfer's kernels ahead; 0: all are compiled"
    )
    parser.add_argument("--workers", type=int, default=4, help="processes that compile programs ahead")
    parser.add_argument("--flashinfer", metavar="FOLDER", help="where FlashInfer lies, if it is not installed")
    parser.add_argument("--build", action="store_true", help="compile FlashInfer's kernels for the cases, time nothing")
    parser.add_argument("--dry-run", action="store_true", help="print the cases")
    parser.add_argument("--summary", action="store_true", help="print the summary of the file's rows")
    parser.add_argument("--markdown", action="store_true", help="print a table of the file's rows")
    args = parser.parse_args()
    args.only = args.only.split(",")
    if unknown := set(args.only) - set(FAMILIES):
        parser.error(f"--only must name families of {', '.join(FAMILIES)}, got {', '.join(sorted(unknown))}")
    args.layouts = args.layouts.split(",") if args.layouts else []
    if wrong := [layout for layout in args.layouts if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", layout)]:
        parser.error(f"--layouts must be of three numbers each, as 2x64x1, got {', '.join(wrong)}")
    if args.numbers is not None and not re.fullmatch(r"(\d+:)?\d+(,(\d+:)?\d+)*", args.numbers):
        parser.error(f"--numbers must be numbers of cases, as 3,17 or 41:3, got {args.numbers}")
    if args.threads < (1 if args.build else 0):
        parser.error(f"--threads must be at least 0, and 1 with --build, got {args.threads}")
    if args.iters < 32:
        parser.error(f"--iters must be at least 32, got {args.iters}")
    return args


def drawn(args: argparse.Namespace) -> list[Step]:
    """Returns the cases that the arguments name."""
    names = map(str, range(args.cases)) if args.numbers is None else args.numbers.split(",")
    of_seeds = (name if ":" in name else f"{args.seed}:{name}" for name in names)
    cases = dict.fromkeys(tuple(map(int, name.split(":"))) for name in of_seeds)  # each once
    return (table() if args.table else []) + [draw(*case) for case in cases]


def parse_options(text: str | None) -> dict[str, str | bool | int]:
    """Returns XLA's options from "name=value,name=value"; true, false and integers are taken as such.

    Values with a comma are written with "+": "xla_gpu_enable_command_buffer=FUSION+CUSTOM_CALL".
    """
    found: dict[str, str | bool | int] = {}
    for item in (text or "").split(","):
        name, _, value = item.strip().removeprefix("--").partition("=")
        if name:
            words = {"true": True, "false": False}
            found[name] = words.get(value, int(value) if value.isdigit() else value.replace("+", ","))
    return found


def build(cases: list[Step], args: argparse.Namespace, is_missing=lambda *_: True, is_over=lambda: False) -> int:
    """Compiles FlashInfer's kernels, several at a time, for the ways that are missing of all cases.

    Args:
      is_missing: `(step, way)`, whether its row is wanted.
      is_over: whether the time is over, so that no other kernel is begun.
    """
    needed = {}
    for step in cases:
        small = dataclasses.replace(
            step, lengths=tuple(min(n, 256) for n in step.lengths[:2]), slots=0, prefix=min(step.prefix, 256)
        )
        for way in filter(functools.partial(is_missing, step), _chosen(sweep_flashinfer.ways(step), args.ways)):
            needed.setdefault(sweep_flashinfer.kernel_key(small, way), (small, way))

    def make(item: tuple) -> str | None:
        if is_over():
            return "the time is over"
        worker = sweep_flashinfer.Worker(args.flashinfer)
        reply = worker.time(*item, n_iters=1, only_build=True)
        worker.stop()
        return reply.get("error")

    start, failed = time.monotonic(), 0
    # XQA's kernels are of one file each. Others are of many, and take longest.
    keys = sorted(needed, key=lambda key: "XQA" in key[0])
    with concurrent.futures.ThreadPoolExecutor(args.threads) as pool:
        for key, error in zip(keys, pool.map(make, (needed[key] for key in keys))):
            failed += error is not None
            print(f"{time.monotonic() - start:6.0f} s  {key}  {error or 'built'}", flush=True)
    print(f"{len(needed) - failed} of {len(needed)} kinds of kernels are there")
    return 0


def is_transient(row: dict) -> bool:
    """Returns whether a row's error may go away: a process that ended, memory that another one held, noise."""
    return any(word in row.get("error", "") for word in TRANSIENT)


class Sweep:
    """A run over cases: what is timed already, what rows have in common, and when to end."""

    def __init__(self, args: argparse.Namespace):
        """Opens the file of rows; no process is started yet."""
        self._args, self._writer, self._origin = args, MeasuredRows(args.out), origin()
        self._flashinfer, self._faults = sweep_flashinfer.find(args.flashinfer), 0
        self._end, self._written = time.monotonic() + 60 * args.minutes, time.monotonic()
        self._done = {self._key(row) for row in self._writer.rows if not is_transient(row)}

    def run(self, cases: list[Step]) -> None:
        """Compiles, then times all ways of each case that the file lacks, until the time is over; says what is left.

        Nothing is compiled while something is timed: the host's share of a chain would be measured beside it.
        """
        compilers = Compilers(self._args.workers)
        files = {step.case: self._compiled(step, compilers) for step in cases}
        start = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            is_over = lambda: time.monotonic() > self._end
            wanted = cases if self._flashinfer is not None and self._args.threads else []
            building = pool.submit(build, wanted, self._args, self._is_missing, is_over) if wanted else None
            try:
                compilers.await_all(until=self._end)
            except BaseException:
                self._end = 0.0  # the build would go on, and be waited for
                raise
        if building is not None:
            building.result()  # it raises what went wrong
        print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
        for number, step in enumerate(cases):
            if time.monotonic() > self._end:
                print(f"the time is over: {len(cases) - number} of {len(cases)} cases are left (--go-on)")
                break
            self._case(step, files.pop(step.case))
        compilers.stop()
        if self._flashinfer is not None:
            self._flashinfer.stop()

    def _compiled(self, step: Step, compilers: Compilers) -> dict:
        """Returns futures of files with what a case's missing rows need, by their names, and of the reference."""
        found = {}
        for suffix, options in self._option_sets().items():
            missing = [name.removesuffix(suffix) for name, _, of in self._missing_ways(step) if of == options]
            together = [name for name in missing if name in (OURS, PICKED)]  # often of one program
            for names in (together, *([name] for name in missing if name not in together)):
                if names:
                    found |= dict.fromkeys((name + suffix for name in names), compilers.submit(step, names, options))
        return found | ({REFERENCE: compilers.submit(step, [REFERENCE], {})} if found else {})

    def _missing_ways(self, step: Step) -> list[tuple[str, Way, dict]]:
        """Returns the names of the rows that the file lacks of a case, their ways, and their options of XLA."""
        found = ways(step) + more_ways(step, self._args.capability, self._args.layouts)
        return [
            (way.name + suffix, way, options)
            for suffix, options in self._option_sets().items()
            for way in found
            if self._is_missing(step, way.name + suffix)
        ]

    def _case(self, step: Step, files: dict) -> None:
        start = self._written = time.monotonic()
        labels = step.row() | {"title": step.title()}
        print(f"{step.case}: {step.title()}; bytes {step.bytes_us:.1f} us, products {step.products_us:.1f}", flush=True)
        found = self._missing_ways(step)
        if found:
            compiled = {
                dataclasses.replace(way, name=name): functools.partial(load, files[name], way.name)
                for name, way, _ in found
            }
            reference = load(files[REFERENCE], REFERENCE)
            for name, fields in time_programs(step, compiled, self._args.iters, reference):
                self._add(labels, name, fields)
                self._stop_if_ours_fails(name, fields)
        for name in sweep_flashinfer.ways(step):
            if self._flashinfer is not None and self._is_missing(step, name):
                self._add(labels, name, self._flashinfer.time(step, name, self._args.iters))
        print(f"  {time.monotonic() - start:.1f} s", flush=True)

    def _stop_if_ours_fails(self, name: str, fields: dict) -> None:
        """Ends a run in which the library's own kernel fails case after case: a fault of the machine or of the run."""
        if name == OURS:
            is_fault = "error" in fields and not fields["error"].startswith("NotImplementedError")
            self._faults = self._faults + 1 if is_fault else 0
            if self._faults == MAX_FAULTS:
                sys.exit(f"{OURS} failed in {MAX_FAULTS} cases, one after another; the last: {fields['error']}")

    def _option_sets(self) -> dict[str, dict]:
        options = parse_options(self._args.options)
        return {"": {}} | ({" + options": options} if options else {})

    def _is_missing(self, step: Step, way: str) -> bool:
        key = self._key({"case": step.case, "way": way, "git_commit": self._origin["git_commit"]})
        return key not in self._done and bool(_chosen([way], self._args.ways))

    def _add(self, labels: dict, way: str, fields: dict) -> None:
        row = labels | {"way": way} | fields | self._origin
        self._writer.append(row)
        self._done.add(self._key(row))
        seconds, self._written = time.monotonic() - self._written, time.monotonic()
        us = fields.get("chain_us_median")
        kernels = fields.get("device_us_median") or float("nan")
        times = f"{us:8.1f} chain {kernels:8.1f} kernels" if us else fields["error"][:150]
        print(f"  {way:42s} {times} {fields.get('picked') or ''} ({seconds:.1f} s)", flush=True)

    @staticmethod
    def _key(row: dict) -> tuple:
        return row["case"], row["way"], row["git_commit"]


def _chosen(names: list[str], wanted: str | None) -> list[str]:
    """Returns the names that hold one of the comma-separated words; all for None."""
    return [name for name in names if wanted is None or any(word in name for word in wanted.split(","))]


def _rows(args: argparse.Namespace) -> list[dict]:
    """Returns the file's rows, of the family asked for."""
    from tree_attn.measure.rows import read

    return [row for row in read(args.out) if row["family"] in args.only]


if __name__ == "__main__":
    sys.exit(main())
