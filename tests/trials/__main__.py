"""Runs the trials for some minutes: prints how many draws ran, and a minimal reproducer of every fault.

Draws run in processes of their own, `ROUND_MINUTES` each: one that ends the process is a fault like others, and what
compiled programs hold of memory goes with them. The exit status is 1 if something failed.
"""

import argparse
import collections
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import time

import numpy as np

from . import count, kind, minimal, outcome, subjects

SECONDS_TO_SIMPLIFY = 90
MAX_PER_KIND = 3  # reproducers shown of one kind of fault
ROUND_MINUTES = 10
FOUND = 3  # exit status of a round with faults; Python's own is 1 when a draw raises
GRACE_S = 900  # for the last case of a round, and for the simplest case of a fault


def main() -> int:
    """Runs the trials, one case, or mutants of the core."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.trials", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=10, help="default: 10")
    parser.add_argument("--count", type=int, help="end after so many draws")
    parser.add_argument("--subject", action="append", help="may be repeated; default: all")
    parser.add_argument("--case", help="the case to check, as Python source; needs --subject")
    parser.add_argument("--simplify-seconds", type=float, default=SECONDS_TO_SIMPLIFY)
    parser.add_argument("--mutants", type=int, metavar="N", help="change the core N times and run its tests instead")
    parser.add_argument("--round", type=pathlib.Path, help=argparse.SUPPRESS)  # the folder of a process of `_rounds`
    args = parser.parse_args()
    if args.mutants is not None:
        from . import mutants

        return mutants.run(args.mutants, args.seed)
    if args.case is None and args.round is None:
        return _rounds(args)
    _configure()
    modules = subjects()
    chosen = {name: modules[name] for name in args.subject or modules}
    if args.case is None:
        return _round(chosen, args)
    (module,) = chosen.values()
    fault = outcome(module, eval(args.case, dict(vars(module))))
    print(fault or "nothing is wrong")
    return int(fault is not None)


def _configure() -> None:
    """Makes eight devices of the CPU. Programs run once: their compilation is most of the time, so LLVM does little."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_disable_most_optimizations", True)


def _rounds(args) -> int:
    """Runs rounds, each in a process, until the time is over or so many draws are made."""
    totals = {name: collections.Counter() for name in ("draws", "seconds", "failed")}
    end = time.monotonic() + 60 * args.minutes
    for number in range(1 << 30):
        left, draws = (end - time.monotonic()) / 60, totals["draws"].total()
        if left <= 0 or (args.count is not None and draws >= args.count):
            break
        with tempfile.TemporaryDirectory() as folder:
            minutes = min(left, ROUND_MINUTES)
            command = [sys.executable, "-m", __package__, "--seed", str(args.seed * 1_000_003 + number)]
            command += ["--minutes", str(minutes), "--round", folder, "--simplify-seconds", str(args.simplify_seconds)]
            command += [f"--subject={name}" for name in args.subject or ()]
            command += [] if args.count is None else ["--count", str(args.count - draws)]
            for name, numbers in _run_round(command, pathlib.Path(folder), 60 * minutes + GRACE_S).items():
                totals[name].update(numbers)
    for name, draws in totals["draws"].items():
        print(f"{name}: {draws} draws in {totals['seconds'][name]:.0f} s, {totals['failed'][name]} cases failed")
    return int(totals["failed"].total() > 0)


def _run_round(command: list[str], folder: pathlib.Path, seconds: float) -> dict:
    """Runs a round and returns its counts; a process that dies or hangs is a fault of the case that it was at."""
    try:
        status = subprocess.run(command, timeout=seconds).returncode
        reason = f"process ended: exit status {status}"
    except subprocess.TimeoutExpired:
        status, reason = None, "process hung"
    counts = folder / "counts.json"
    found = json.loads(counts.read_text()) if counts.exists() else {"draws": {}, "seconds": {}, "failed": {}}
    if status not in (0, FOUND):
        case = folder / "case.txt"
        name, reproducer = case.read_text().split("\n", 1) if case.exists() else ("none", "none")
        print(f"FAULT {reason}\n  {_reproducer(name, reproducer)}", flush=True)
        found["failed"][name] = found["failed"].get(name, 0) + 1
    return found


def _round(chosen: dict, args) -> int:
    """Draws and checks cases until the time is over; writes what it is at, and the counts so far."""
    rngs = {name: np.random.default_rng([args.seed, *name.encode()]) for name in chosen}
    draws, seconds, failed, shown = (collections.Counter() for _ in range(4))
    end = time.monotonic() + 60 * args.minutes
    while time.monotonic() < end and (args.count is None or draws.total() < args.count):
        # The subject that ran for the shortest time is next, so that fast ones get as much time as slow ones.
        name = min(chosen, key=lambda name: seconds[name])
        subject, begin = chosen[name], time.monotonic()
        case = subject.draw(rngs[name])
        (args.round / "case.txt").write_text(f"{name}\n{case!r}")
        fault = outcome(subject, case)
        draws[name] += count(subject, case)
        seconds[name] += time.monotonic() - begin
        failed[name] += fault is not None
        if fault is not None:
            shown[name, kind(fault)] += 1
            if shown[name, kind(fault)] <= MAX_PER_KIND:
                case, fault = minimal(subject, case, fault, seconds=args.simplify_seconds)
                print(f"FAULT {fault}\n  {_reproducer(name, repr(case))}", flush=True)
        (args.round / "counts.json").write_text(json.dumps({"draws": draws, "seconds": seconds, "failed": failed}))
    return FOUND if failed.total() else 0


def _reproducer(name: str, case: str) -> str:
    return f"python3 -m tests.trials --subject {name} --case {shlex.quote(case)}"


if __name__ == "__main__":
    sys.exit(main())
