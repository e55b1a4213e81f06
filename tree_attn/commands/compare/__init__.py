"""`tree-attn compare`: tree and ring attention side by side, checked first, then predicted, then measured."""

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from tree_attn.commands import processes

HELP = """\
Compares one step of decoding by Tree Attention and by Ring Attention: latency, peak memory and communication.

  1. every strategy is checked against a float64 oracle; a wrong result ends the command with status 1
  2. the physical limit and the predictions of the paper (its equations 8, 9, 10 and 14) are printed
  3. every strategy is timed; DIR/results.jsonl gets a row as soon as it is measured

A rerun with the same options and --out continues: it skips the rows that are there and tries those with an error
again; other options need another folder. A case that cannot run here is a row with its reason in "error", and the
others go on. The last line on stdout is one JSON document: all rows, and the files written.

examples:
  tree-attn compare --devices 8 --keys 8192,65536 --out results/
  tree-attn compare --devices 8 --keys 81920 640000 --heads 16 --head-dim 128 --dtype bfloat16 --out results/
  tree-attn compare --devices 4 --keys 16384 --heads 32 --kv-heads 8 --reduction allreduce,gather --out gqa/

one process per GPU, or per node (process 0 writes and prints; --devices counts those of all):
  srun --ntasks-per-node=4 tree-attn compare --devices 8 --keys 81920 --out results/
  torchrun --nproc-per-node=4 -m tree_attn.cli compare --devices 4 --keys 81920 --out results/
or, without any of them:
  for i in 0 1 2 3; do tree-attn compare --devices 4 --keys 81920 --out results/ \\
      --coordinator-address localhost:9876 --num-processes 4 --process-id $i --local-device-ids $i & done; wait
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Session:
    """What all cases of one call share."""

    devices: Sequence[Any]
    seed: int
    n_iters: int
    asked_chain: int | None
    is_emulated: bool
    neighbour_gb_per_s: dict[Any, float | None]  # by step: the bare link, with transfers of the ring's own size
    is_first: bool  # process 0 prints and writes
    writer: Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tree-attn compare`."""
    shape = parser.add_argument_group("the step")
    shape.add_argument("--devices", type=int, default=8, help="devices to shard the keys over (default 8)")
    shape.add_argument("--keys", type=_integers, nargs="+", required=True, help="keys per sequence, e.g. 8192,65536")
    shape.add_argument("--batch", type=int, default=1, help="sequences (default 1)")
    shape.add_argument("--heads", type=int, default=16, help="query heads (default 16)")
    shape.add_argument("--kv-heads", type=int, help="key heads (default: as many as query heads)")
    shape.add_argument("--head-dim", type=int, default=128, help="head dim (default 128)")
    shape.add_argument("--dtype", default="bfloat16", help="of queries, keys and values (default bfloat16)")
    what = parser.add_argument_group("what is compared (the rings always are)")
    what.add_argument(
        "--reduction",
        type=_words,
        nargs="+",
        help="of tree attention, e.g. allreduce,gather (default: all, fused on GPUs only)",
    )
    what.add_argument("--implementation", type=_words, nargs="+", help="local kernels (default: the best that can run)")
    how = parser.add_argument_group("how it is measured")
    how.add_argument("--iters", type=int, default=20, help="timed samples per row (default 20)")
    how.add_argument(
        "--chain",
        type=int,
        help="dependent steps in a program (default 32; 4 where a step sends more than 100 MB; 1 on emulated devices). "
        "On GPUs each sample also runs a program of 4 times as many, and the difference tells what a step takes. 1: "
        "single steps, their launch included",
    )
    how.add_argument("--seed", type=int, default=0, help="of the random data (default 0)")
    how.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR", help="where results and plots go")
    how.add_argument("--no-plots", action="store_true", help="do not draw (drawing needs the extra 'plot')")
    processes.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Compares, prints, writes; returns 0, or 1 if a result was wrong."""
    from tree_attn.commands import plots
    from tree_attn.commands.compare import cases as comparison

    steps, reductions, implementations = _checked(args)
    if not args.no_plots:
        plots.require_matplotlib()
    session = _start(args, steps)
    cases = comparison.plan(steps, reductions, implementations, session.devices[0].platform)
    rows = _new_rows(cases, session, args.command_line)
    is_done = {comparison.row_key(row) for row in session.writer.rows if row.get("error") is None}
    flags = comparison.broadcast_flags([comparison.row_key(row) in is_done for row in rows])
    todo = [(case, row) for case, row, done in zip(cases, rows, flags) if not done]
    say = print if session.is_first else _silent
    if sum(flags):
        say(f"{sum(flags)} of {len(cases)} rows are in {session.writer.path} already, and are kept.")
    try:
        todo = _check_all(todo, session)
    except comparison.WrongResult as error:
        say(json.dumps({"error": str(error), "rows": [], "files": {}}))
        return 1
    if session.is_first:
        _print_predictions([case for case, done in zip(cases, flags) if not done], session)
    _time_all(todo, session)
    if not session.is_first:
        return 0
    final = _rows_of(cases, session, args.command_line)
    _print_results(final)
    files = {"results": str(session.writer.path)}
    if not args.no_plots:
        files |= plots.draw(final, args.out)
    print(json.dumps({"rows": final, "files": files}))
    return 0


def _checked(args: argparse.Namespace):
    """The steps, reductions and local kernels asked for; raises ValueError before any device is touched."""
    from tree_attn.arguments import one_of
    from tree_attn.cost.step import DecodeStep
    from tree_attn.local import check_implementation
    from tree_attn.reduce import REDUCTIONS

    for name in ("devices", "iters", *(("chain",) if args.chain is not None else ())):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}")
    reductions = _flat(args.reduction)
    for reduction in reductions:
        one_of("--reduction", reduction, REDUCTIONS)
    implementations = _flat(args.implementation) or [None]
    for implementation in implementations:
        check_implementation(implementation)
    steps = []
    for num_keys in _flat(args.keys):
        steps.append(
            DecodeStep(
                batch=args.batch,
                num_keys=num_keys,
                num_heads=args.heads,
                num_kv_heads=args.heads if args.kv_heads is None else args.kv_heads,
                head_dim=args.head_dim,
                dtype=args.dtype,
                n_devices=args.devices,
            )
        )
        if num_keys % args.devices:
            below = num_keys - num_keys % args.devices
            nearest = f"{below} or {below + args.devices}" if below else f"{args.devices}"
            raise ValueError(f"--keys must be multiples of --devices {args.devices}, got {num_keys}; take {nearest}")
    return steps, list(dict.fromkeys(reductions)), list(dict.fromkeys(implementations))


def _start(args: argparse.Namespace, steps) -> _Session:
    import jax

    from tree_attn.devices import ensure_devices
    from tree_attn.measure import links
    from tree_attn.measure.rows import RowWriter
    from tree_attn.mesh import make_mesh
    from tree_attn.topology import is_first_process, node_by_node

    processes.join(args, args.devices)
    # Node by node, for the levels of a hierarchical reduction; a scheduler may number the ranks otherwise.
    devices = node_by_node(ensure_devices(args.devices))
    if jax.process_count() > 1 and args.devices != jax.device_count():
        raise ValueError(f"--devices must be all {jax.device_count()} devices of all processes, got {args.devices}")
    emulated = devices[0].platform == "cpu"
    mesh = make_mesh({"device": args.devices}, devices)
    is_first = is_first_process()
    if is_first and emulated:
        print("Devices are emulated on the CPU: its times say nothing about accelerators.")
    return _Session(
        devices=devices,
        seed=args.seed,
        n_iters=args.iters,
        asked_chain=args.chain,
        is_emulated=emulated,
        neighbour_gb_per_s={
            step: links.neighbour_gb_per_s(mesh, num_bytes=step.key_value_bytes_per_device // 2) for step in steps
        },
        is_first=is_first,
        writer=RowWriter(args.out / "results.jsonl", _sweep(args, devices))
        if is_first
        else _NoWriter(args.out / "results.jsonl"),
    )


def _sweep(args: argparse.Namespace, devices: Sequence[Any]) -> dict[str, Any]:
    """What rows must have in common to lie in one file: what decides which rows there are, and their values."""
    import jax

    from tree_attn.measure import provenance

    options = ("devices", "batch", "heads", "kv_heads", "head_dim", "dtype", "iters", "chain", "seed")
    lists = {name: _flat(getattr(args, name)) or None for name in ("keys", "reduction", "implementation")}
    where = {"n_processes": jax.process_count(), "hardware": provenance.hardware(devices)}
    how = {"jax_version": jax.__version__}
    return {name: getattr(args, name) for name in options} | lists | where | how


class _NoWriter:
    """Stands in for the results file in all processes but the first."""

    def __init__(self, path: pathlib.Path):
        self.path, self.rows = path, []

    def append(self, row: dict) -> None:
        self.rows.append(row)

    def replace(self, index: int, row: dict) -> None:
        self.rows[index] = row


def _new_rows(cases, session: _Session, command: str) -> list[dict]:
    from tree_attn.commands.compare import cases as comparison
    from tree_attn.measure import provenance

    hardware, commit = provenance.hardware(session.devices), provenance.git_commit()
    return [comparison.new_row(case, hardware=hardware, git_commit=commit, command=command) for case in cases]


def _check_all(todo, session: _Session):
    """Checks every case against the oracle; returns those that ran, and makes the others rows with their reason."""
    from tree_attn.commands.compare import cases as comparison

    ran = []
    with _progress(session, "checking against the oracle", len(todo)) as (describe, advance):
        for case, row in todo:
            describe(_title(case))
            if _attempt(row, session, lambda case=case: comparison.check_case(case, session.devices, session.seed)):
                ran.append((case, row))
            advance()
    return ran


def _time_all(todo, session: _Session) -> None:
    from tree_attn.commands.compare import cases as comparison

    samples = session.n_iters + 3  # with those that `latency_us` runs to warm up
    with _progress(session, "timing", len(todo) * samples) as (describe, advance):
        for case, row in todo:
            describe(_title(case))
            chain, long_chain = _chains(row, session)

            def measured(case=case, row=row, chain=chain, long_chain=long_chain):
                timed = comparison.time_case(
                    case,
                    session.devices,
                    session.seed,
                    n_iters=session.n_iters,
                    chain=chain,
                    long_chain=long_chain,
                    step_collectives=row["collectives_compiled"],
                    on_sample=advance,
                )
                return timed | _rates(timed, row, session.neighbour_gb_per_s[case.step])

            if _attempt(row, session, measured):
                _write(row, session)


def _chains(row: dict, session: _Session) -> tuple[int, int | None]:
    """Steps in the short program of a sample and in the long one, if there is one."""
    sends_much = (row["bytes_sent_per_device_predicted"] or 0) > 100e6  # for a millisecond, which needs no long chain
    chain = session.asked_chain or (1 if session.is_emulated else 4 if sends_much else 32)
    # Noise of emulated devices may hide the difference.
    return chain, None if session.is_emulated or chain == 1 else 4 * chain


def _write(row: dict, session: _Session) -> None:
    """Writes a row; one that stands there for the same case, with an error, makes room for it."""
    from tree_attn.commands.compare import cases as comparison

    keys = [comparison.row_key(one) for one in session.writer.rows]
    if comparison.row_key(row) in keys:
        session.writer.replace(keys.index(comparison.row_key(row)), row)
    else:
        session.writer.append(row)


def _attempt(row: dict, session: _Session, measure_fields: Callable[[], dict]) -> bool:
    """Puts what `measure_fields` returns into the row; if it fails, writes the row with the reason: False."""
    from tree_attn.commands.compare.cases import WrongResult

    try:
        row.update(measure_fields())
    except WrongResult:
        raise
    except Exception as error:  # any backend may fail in its own way: out of memory, unsupported, not compiled
        _raise_if_peer_failed(error)
        row["error"] = f"{type(error).__name__}: {str(error).strip()[:2000]}"
        _write(row, session)
        return False
    return True


def _raise_if_peer_failed(error: Exception) -> None:
    """Raises ConnectionError where an error says nothing of the case but that a peer or a link failed.

    A rerun would measure such a row, so it must not stand as one that cannot run.
    """
    from tree_attn.cluster import join as distributed

    launch = distributed.current()
    if launch is not None and launch.num_processes > 1 and distributed.speaks_of_others(error):
        raise ConnectionError(
            f"lost the other processes: {str(error).strip()[:500]}. The rows before this one are on disk, and a rerun "
            "goes on with it"
        ) from error


def _rates(timed: dict, row: dict, neighbour_gb_per_s: float | None) -> dict:
    sent = row["bytes_sent_per_device_compiled"]
    return {
        "sent_gb_per_s": None if sent is None else sent / timed["latency_us_median"] / 1e3,
        "neighbour_gb_per_s": neighbour_gb_per_s,
    }


def _rows_of(cases, session: _Session, command: str) -> list[dict]:
    """The newest row of every case of this call, in its order."""
    from tree_attn.commands.compare import cases as comparison

    newest = {comparison.row_key(row): row for row in session.writer.rows}
    return [newest[comparison.row_key(row)] for row in _new_rows(cases, session, command)]


def _print_predictions(cases, session: _Session) -> None:
    from tree_attn.commands import report

    report.print_predictions(cases, session.devices[0].device_kind, session.neighbour_gb_per_s)


def _print_results(rows: list[dict]) -> None:
    from tree_attn.commands import report

    report.print_results(rows)


def _progress(session: _Session, title: str, total: int):
    from tree_attn.commands import report

    return report.progress(title, total, is_shown=session.is_first)


def _title(case) -> str:
    return f"{case.label}, {case.step.num_keys:,} keys"


def _flat(lists) -> list:
    return [item for one in lists or () for item in one]


def _integers(text: str) -> list[int]:
    try:
        return [int(part.replace("_", "")) for part in text.split(",") if part]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be integers such as 8192,65536, got {text!r}") from None


def _words(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _silent(*_: Any) -> None:
    """Prints nothing, in all processes but the first."""
