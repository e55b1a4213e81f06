"""One call of `tree-attn compare`: its cases checked, timed and written, in order."""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tree_attn.arguments import one_of
from tree_attn.cluster import join
from tree_attn.commands import drawing, phases, processes, terminal, units
from tree_attn.commands.compare import cases, plots, prompts, report, search, transfers
from tree_attn.commands.compare.cases import Case
from tree_attn.commands.compare.trial import Laboratory, WrongResult, chain_lengths
from tree_attn.commands.options import check_at_least, check_folder
from tree_attn.cost.step import DecodeStep
from tree_attn.devices import ensure_devices
from tree_attn.local import IMPLEMENTATIONS, check_implementation
from tree_attn.measure import provenance, transfer_settings
from tree_attn.measure.rows import MeasuredRows
from tree_attn.mesh import make_mesh
from tree_attn.reduce import REDUCTIONS
from tree_attn.topology import is_first_process, node_by_node

Pending = list[tuple[Case, dict[str, Any]]]  # cases to run, each with its row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """Everything that the cases of one call share.

    Attributes:
      laboratory: checks and times a case, on the devices of the call.
      n_iters: samples of each row.
      requested_chain: steps in a program; None chooses (`chain_lengths`).
      is_emulated: the devices are emulated on the CPU.
      transfers: rates of bare transfers of the steps' sizes, and the rotation that they favour.
      writer: the rows; process 0 writes them.
      command: the command line, for the rows.
      nccl_setting: the name of NCCL's setting, for the rows; None where none was named.
      prints_text: sentences go to stdout; else, with `--json`, to stderr.
    """

    laboratory: Laboratory
    n_iters: int
    requested_chain: int | None
    is_emulated: bool
    transfers: transfers.Transfers
    writer: MeasuredRows
    command: str
    nccl_setting: str | None = None
    prints_text: bool = True

    @property
    def devices(self) -> list[jax.Device]:
        """Devices of all processes, in the order of the mesh."""
        return self.laboratory.devices

    def new_rows(self, all_cases: Sequence[Case]) -> list[dict[str, Any]]:
        """Returns the rows of the cases before they have run."""
        facts = {"hardware": provenance.hardware(self.devices), "git_commit": provenance.git_commit()}
        facts |= {"command": self.command, "nccl_setting": self.nccl_setting}
        return [cases.new_row(case, **facts) for case in all_cases]

    def say(self, text: str) -> None:
        """Prints a sentence, in the first process."""
        if is_first_process():
            terminal.say(terminal.output(), text) if self.prints_text else phases.print_wrapped(text)

    def write(self, row: dict[str, Any]) -> None:
        """Writes a row, in the place of an earlier one of the same case, which has an error."""
        keys = [cases.row_key(one) for one in self.writer.rows]
        if cases.row_key(row) in keys:
            self.writer.replace(keys.index(cases.row_key(row)), row)
        else:
            self.writer.append(row)


def compare(args: argparse.Namespace) -> int:
    """Compares, prints, writes; returns 0, or 1 if a result was wrong."""
    steps, reductions, implementations = _checked(args)
    if args.nccl == "search":
        return search.compare(args, steps)
    sweep = _start(args, steps, implementations)
    if args.links_only:
        _write_links(args, sweep)
        return 0
    platform = sweep.devices[0].platform
    all_cases = cases.plan(
        steps, reductions, implementations, platform, rotations=_rotations(args), fastest=sweep.transfers.rotation
    )
    if args.prefill:
        all_cases = prompts.plan(steps, implementations, has_gradient=args.gradient)
    pending = _pending(all_cases, sweep)
    try:
        checked = _check_all(pending, sweep)
    except WrongResult as error:
        sweep.say(f"WRONG: {error}")
        if args.json and is_first_process():
            terminal.print_document({"error": str(error), "rows": [], "files": {}})
        return 1
    if not checked and len(pending) == len(all_cases):
        raise ValueError(f"nothing could be measured: {pending[0][1]['error']}")
    if is_first_process() and not args.json and not args.gradient:
        device_kind = sweep.devices[0].device_kind
        report.print_predictions([case for case, _ in pending], device_kind, sweep.transfers.one_way())
    _time_all(checked, sweep)
    if is_first_process():
        _finish(args, all_cases, sweep)
    return 0


def _checked(args: argparse.Namespace) -> tuple[list[DecodeStep], list[str], list[str | None]]:
    """Returns the steps, reductions and local kernels of the call.

    Raises:
      ValueError: an option is wrong; before any device is used.
    """
    check_at_least(args, devices=1, iters=1, chain=1)
    check_folder("--out", args.out)
    if args.prefill and args.reduction:
        raise ValueError("--reduction must be left out with --prefill: prompts are not reduced across devices")
    if args.gradient and not args.prefill:
        raise ValueError("--gradient needs --prefill: a step of decoding has no gradient worth timing")
    reductions = _flat(args.reduction)
    for reduction in reductions:
        one_of("--reduction", reduction, (*REDUCTIONS, cases.SHARD_HEADS))
    implementations = _flat(args.implementation) or [None]
    for implementation in implementations:
        check_implementation(implementation)
    if args.nccl is not None:
        one_of("--nccl", args.nccl, ("search", *transfer_settings.SETTINGS))
    steps = [_step(args, num_keys) for num_keys in _flat(args.keys)]
    return steps, list(dict.fromkeys(reductions)), list(dict.fromkeys(implementations))


def _step(args: argparse.Namespace, num_keys: int) -> DecodeStep:
    step = DecodeStep(
        batch=args.batch,
        num_keys=num_keys,
        num_heads=args.heads,
        num_kv_heads=args.heads if args.kv_heads is None else args.kv_heads,
        head_dim=args.head_dim,
        dtype=args.dtype,
        n_devices=args.devices,
    )
    if num_keys % args.devices:
        below = num_keys - num_keys % args.devices
        nearest = f"{below} or {below + args.devices}" if below else f"{args.devices}"
        raise ValueError(f"--keys must be multiples of --devices {args.devices}, got {num_keys}; take {nearest}")
    return step


def _start(args: argparse.Namespace, steps: Sequence[DecodeStep], implementations: Sequence[str | None]) -> Sweep:
    """Joins the processes, times the links, and opens the file of rows.

    Raises:
      ValueError: none of the implementations can run on the devices.
    """
    processes.join(args, args.devices)
    # Node by node, for the axes of a hierarchical reduction; a scheduler may number the ranks otherwise.
    devices = node_by_node(ensure_devices(args.devices))
    if jax.process_count() > 1 and args.devices != jax.device_count():
        raise ValueError(f"--devices must be all {jax.device_count()} devices of all processes, got {args.devices}")
    reasons = [None if name is None else IMPLEMENTATIONS[name].unavailable() for name in implementations]
    if None not in reasons:
        named = ", ".join(map(str, implementations))
        raise ValueError(
            f"--implementation must name one that can run here, got {named}: {'; '.join(map(str, reasons))}"
        )
    is_emulated = devices[0].platform == "cpu"
    mesh = make_mesh({"seq": args.devices}, devices)
    with phases.phase("timing the links"):
        device_kind = None if is_emulated or args.links_only else devices[0].device_kind
        timed = ("joint", "two_way") if args.prefill else _rotations(args)
        rates = transfers.measure(mesh, steps, timed, device_kind=device_kind)
    return Sweep(
        laboratory=(prompts.PromptLaboratory if args.prefill else Laboratory)(devices, args.seed),
        n_iters=args.iters,
        requested_chain=args.chain,
        is_emulated=is_emulated,
        transfers=rates,
        writer=MeasuredRows(args.out / "results.jsonl", _common(args, devices), is_writer=is_first_process()),
        command=args.command_line,
        nccl_setting=args.nccl,
        prints_text=not args.json,
    )


def _rotations(args: argparse.Namespace) -> list[str]:
    """Returns the rotations that are compared beside the chosen one."""
    return [name for name in ("joint", "two_way") if getattr(args, name)]


def _write_links(args: argparse.Namespace, sweep: Sweep) -> None:
    """Writes a row for each size of a bare transfer between neighbours, which `_start` has timed."""
    writer = MeasuredRows(args.out / search.TRANSFERS, is_writer=is_first_process())
    for step, gb_per_s in sweep.transfers.one_way().items():
        setting = {"nccl_setting": args.nccl, "nccl": provenance.nccl_settings()}
        size = {"n_devices": args.devices, "bytes": step.key_value_bytes_per_device // 2}
        place = {"hardware": provenance.hardware(sweep.devices), "command": args.command_line}
        writer.append({"what": "transfer"} | size | {"gb_per_s": gb_per_s} | setting | place)


def _common(args: argparse.Namespace, devices: Sequence[jax.Device]) -> dict[str, Any]:
    """Returns the facts that the rows of one file have in common: all that decides which rows and values it has."""
    options = ("devices", "batch", "heads", "kv_heads", "head_dim", "dtype", "iters", "chain", "seed")
    lists = {name: _flat(getattr(args, name)) or None for name in ("keys", "reduction", "implementation")}
    place = {"n_processes": jax.process_count(), "hardware": provenance.hardware(devices)}
    flags = {name: True for name in ("prefill", "gradient", "joint", "two_way") if getattr(args, name)}
    return {name: getattr(args, name) for name in options} | lists | place | flags | {"jax_version": jax.__version__}


def _pending(all_cases: Sequence[Case], sweep: Sweep) -> Pending:
    """Returns the cases without a row of theirs in the file, an error aside; the same in every process."""
    rows = sweep.new_rows(all_cases)
    finished = {cases.row_key(row) for row in sweep.writer.rows if row.get("error") is None}
    flags = processes.broadcast_flags([cases.row_key(row) in finished for row in rows])
    if sum(flags):
        of_all, verb = f"{sum(flags)} of {units.count(len(all_cases), 'row')}", "is" if sum(flags) == 1 else "are"
        sweep.say(f"{of_all} {verb} in {sweep.writer.path} already, and {verb} kept.")
    return [(case, row) for case, row, is_done in zip(all_cases, rows, flags) if not is_done]


def _check_all(pending: Pending, sweep: Sweep) -> Pending:
    """Checks every case against the oracle; returns those that ran. The others are rows with their reason."""
    checked = []
    if not pending:
        return checked
    with phases.phase("checking", len(pending)) as checking:
        for case, row in pending:
            checking.describe(_title(case))
            if _attempt(row, sweep, lambda case=case: sweep.laboratory.check(case)):
                checked.append((case, row))
            checking.advance()
    return checked


def _time_all(pending: Pending, sweep: Sweep) -> None:
    if not pending:
        return
    with phases.phase("timing", len(pending)) as timing:
        for case, row in pending:
            timing.describe(_title(case))
            if _attempt(row, sweep, lambda case=case, row=row: _timed(case, row, sweep)):
                sweep.write(row)
            timing.advance()


def _timed(case: Case, row: dict[str, Any], sweep: Sweep) -> dict[str, Any]:
    sent = float("inf") if isinstance(case, prompts.PromptCase) else row["bytes_sent_per_device_predicted"]
    chain, long_chain = chain_lengths(sent, sweep.requested_chain, sweep.is_emulated)
    with join.steps() as step:
        fields = sweep.laboratory.time(
            case,
            n_iters=sweep.n_iters,
            chain=chain,
            long_chain=long_chain,
            step_collectives=row["collectives_compiled"],
            on_sample=step,
        )
    sent = row["bytes_sent_per_device_compiled"]
    fields |= {"sent_gb_per_s": None if sent is None else sent / fields["latency_us_median"] / 1e3}
    return fields | sweep.transfers.of_row(case.step, case.rotation)


def _attempt(row: dict[str, Any], sweep: Sweep, measure_fields: Callable[[], dict]) -> bool:
    """Puts the result of `measure_fields` into the row; if it fails, writes the row with the reason: False."""
    try:
        row.update(measure_fields())
    except WrongResult:
        raise
    except Exception as error:  # any backend may fail in its own way: out of memory, unsupported, not compiled
        _raise_if_peer_failed(error)
        row["error"] = f"{type(error).__name__}: {str(error).strip()[:2000]}"
        sweep.write(row)
        return False
    return True


def _raise_if_peer_failed(error: Exception) -> None:
    """Raises ConnectionError where an error is no fault of the case: a peer or a link failed.

    A rerun would measure such a row, so it must not be in the file as one that cannot run.
    """
    launch = join.current()
    if launch is not None and launch.num_processes > 1 and join.may_be_consequence(error):
        raise ConnectionError(
            f"lost the other processes: {str(error).strip()[:500]}. The rows before this one are on disk, and a rerun "
            "goes on with it"
        ) from error


def _finish(args: argparse.Namespace, all_cases: Sequence[Case], sweep: Sweep) -> None:
    """Prints and draws the newest row of every case, in the order of the cases."""
    newest = {cases.row_key(row): row for row in sweep.writer.rows}
    rows = [newest[cases.row_key(row)] for row in sweep.new_rows(all_cases)]
    files = {"results": str(sweep.writer.path)}
    wants_plots = not args.no_plots and not args.prefill
    draws = wants_plots and drawing.has_matplotlib()
    if draws:
        with phases.phase("drawing"):
            files |= plots.draw(rows, args.out)
    if args.json:
        terminal.print_document({"rows": rows, "files": files})
        return
    report.print_results(rows, "prompt" if args.prefill else "step")
    if wants_plots and not draws:
        sweep.say(f"Not drawn: {drawing.advice()}")
    drawn = ", ".join(path for name, path in files.items() if name != "results")
    for sentence in (*report.conclusions(rows), f"Rows: {files['results']}" + (f"; plots: {drawn}" if drawn else "")):
        sweep.say(sentence)


def _title(case: Case) -> str:
    return f"{case.label}, {case.step.num_keys:,} keys"


def _flat(lists: Sequence[list] | None) -> list:
    return [item for one in lists or () for item in one]
