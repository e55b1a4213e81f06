"""Joins several processes into one program: how they start, how a lost one is noticed, and how they end."""

import atexit
import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata

import jax

import tree_attn
from tree_attn import topology
from tree_attn.cluster import facts, rollcall
from tree_attn.cluster.connect import STAGES, connect_jax
from tree_attn.cluster.ending import INTERRUPTED_STATUS, exit_now
from tree_attn.cluster.launch import Launch, check_coordinator, detect, own_gpus
from tree_attn.cluster.probes import Probes
from tree_attn.cluster.progress import Limits
from tree_attn.cluster.watchdog import Watchdog
from tree_attn.devices import planned_cpu_devices, request_cpu_devices, visible_gpus

TIMEOUT_VARIABLE = "TREE_ATTN_TIMEOUT_S"
HEARTBEAT_VARIABLE = "TREE_ATTN_HEARTBEAT_S"
STEP_VARIABLE = "TREE_ATTN_STEP_S"
# Errors of JAX's runtime begin with one of these, whatever Python type they have.
_RUNTIME_CODES = ("ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "FAILED_PRECONDITION", "INTERNAL", "UNAVAILABLE")
_RUNTIME_CODES += ("UNKNOWN",)

_log = logging.getLogger("tree_attn")


@dataclasses.dataclass
class _State:
    """This process's place, and its watchdog where there are others."""

    launch: Launch | None = None
    watchdog: Watchdog | None = None


_state = _State()


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: Sequence[int] | None = None,
    *,
    n_devices: int | None = None,
    timeout_s: float | None = None,
    arguments: Mapping[str, str] | None = None,
) -> Launch:
    """Joins this process to the others, if there are others, and watches them until the end.

    The others come from the first of these that is there: the arguments; SLURM, inside a step (under `srun`);
    torchrun's variables. Otherwise there is one process. All variables are checked before anything connects. Then every
    rank answers a roll call, JAX connects, and a first collective is checked, each within the time limit. Ranks must
    have equal versions, source files of this library, options of JAX, XLA and NCCL, and `arguments`.

    From then on a rank that is lost ends all others (`tree_attn.cluster.watchdog`). Call it before anything uses a
    device. Once joined, a second call returns the first one's result. A TPU's metadata is not read: on a slice of
    several hosts give the first three arguments. Nothing of it was run on TPUs or AMD GPUs.

    Args:
      coordinator_address: "host:port" of process 0, reachable from all; goes with the next two.
      num_processes: the number of processes.
      process_id: this one, 0 to num_processes - 1; process 0 prints and writes files.
      local_device_ids: numbers of this process's own accelerators among those that it sees. None takes an equal part of
        NVIDIA's GPUs where the number of processes on the node is known, else all. AMD's are not dealt out: processes
        of one node must name them. A process on a TPU host takes its chips.
      n_devices: devices over all processes; without accelerators every process emulates its equal part of them.
      timeout_s: time limit of each step, in seconds; default `TREE_ATTN_TIMEOUT_S`, else 60.
      arguments: further facts that must be alike on all ranks, by name; the error names the ranks that differ in them.
    Raises:
      ValueError: a variable or argument is wrong, or the ranks do not fit together; the same on every rank.
      TimeoutError: ranks are missing; names them and their hosts.
      ConnectionError: JAX could not connect, or the first collective gave a wrong result.

    Example:
      >>> launch = initialize()
      >>> mesh = make_mesh(("device", "node"))

    Source: `jax.distributed.initialize`, which it calls; the variables that `srun` and `torchrun` document.
    """
    if _state.watchdog is not None:
        return _state.launch
    limits = Limits(
        stage_s=_seconds("timeout_s", timeout_s, TIMEOUT_VARIABLE, 60.0),
        silence_s=_seconds(HEARTBEAT_VARIABLE, None, HEARTBEAT_VARIABLE, 30.0),
        step_s=_seconds(STEP_VARIABLE, None, STEP_VARIABLE, 300.0),
    )
    launch = detect(coordinator_address, num_processes, process_id, local_device_ids)
    problem = None
    if n_devices is not None and n_devices % launch.num_processes:
        problem = f"n_devices must be a multiple of num_processes={launch.num_processes}, got {n_devices}"
    if launch.num_processes == 1:
        if launch.idle_tasks:
            _log.warning("this is one process on %s, and %s", launch.node, launch.idle_tasks)
        _state.launch = _alone(launch)
    else:
        if n_devices is not None and problem is None:
            request_cpu_devices(n_devices // launch.num_processes)
        _state.launch = _join(launch, limits, arguments or {}, problem)
    topology.record(_state.launch.hosts)
    return _state.launch


def agree(facts: Mapping[str, str]) -> None:
    """Returns once all ranks have called it with the same facts; call it alike on all ranks, before the first step.

    Args:
      facts: texts by name, short ones (`tree_attn.cluster.facts.brief`).
    Raises:
      ValueError: the facts differ; names the ranks and what they differ in, the same text on every rank.

    Example:
      >>> agree({"num_layers": "30"})
    """
    if _state.watchdog is not None and (error := _state.watchdog.agree(facts)) is not None:
        raise ValueError(error)


@contextlib.contextmanager
def steps() -> Iterator[Callable[[], None]]:
    """Watches a loop of steps: yields a function to call after each step, on all ranks.

    Where no step ends for `TREE_ATTN_STEP_S` seconds (300) after one has ended, all ranks end and name those behind.
    The limit is three times the longest step so far where that is more. The first one lasts from here, compilation
    included.

    Example:
      >>> with steps() as step:
      ...     for token in tokens:
      ...         step()
    """
    watchdog, counter = _state.watchdog, itertools.count(1)
    if watchdog is None:
        yield lambda: None
        return
    watchdog.step(0)
    try:
        yield lambda: watchdog.step(next(counter))
    finally:
        watchdog.step(None)


def current() -> Launch | None:
    """Returns the result of `initialize`, or None before it."""
    return _state.launch


def shutdown() -> None:
    """Leaves the others in good order; waits, as JAX does, until all have come to their end. Runs at exit by itself."""
    if _state.watchdog is not None:
        _state.watchdog.leave()
        jax.distributed.shutdown()


def fail(message: str, status: int = 1, details: str = "") -> None:
    """Ends this process, with `message` on its stderr, and all others; returns at once where no others are watched.

    It is for an error that a program reports by itself: call it where the error is handled. If the error is the
    consequence of another rank's end (see `may_be_consequence`), the message names that rank, here too. Exceptions that
    nothing catches end all ranks without it. A rank that calls `sys.exit(1)` leaves the others waiting for as long as
    JAX lets them.

    Args:
      message: one line; the others print it too, with this rank's name.
      status: of this process; the others end with `tree_attn.cluster.ending.LOST_STATUS`.
      details: printed here below the message.
    """
    if _state.watchdog is not None:
        error = sys.exception()
        _state.watchdog.fail(message, is_consequence=error is not None and may_be_consequence(error))
        exit_now(status, f"{message}\n{details}".rstrip())


def may_be_consequence(error: BaseException) -> bool:
    """Returns whether an error may follow from another rank's end: a broken connection, or an error of JAX's runtime.

    JAX raises Gloo's errors as JaxRuntimeError from one call and as ValueError from another. Errors that all ranks meet
    alike (no memory, not implemented) are none of these.
    """
    if isinstance(error, ConnectionError):
        return True
    code = str(error).lstrip().partition(":")[0]
    is_runtime = isinstance(error, jax.errors.JaxRuntimeError) or code in _RUNTIME_CODES
    return is_runtime and not any(code in str(error) for code in ("RESOURCE_EXHAUSTED", "UNIMPLEMENTED"))


def _seconds(name: str, argument: float | None, variable: str, default: float) -> float:
    text = os.environ.get(variable) if argument is None else argument
    try:
        value = default if text in (None, "") else float(text)
    except (TypeError, ValueError):
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{name if argument is not None else variable} must be seconds above 0, got {text!r}")
    return value


def _alone(launch: Launch) -> Launch:
    ids = own_gpus(launch, visible_gpus()) if launch.source != "single" or launch.local_device_ids else None
    if ids is not None:
        for runtime in ("cuda", "rocm"):
            jax.config.update(f"jax_{runtime}_visible_devices", ",".join(map(str, ids)))
    return dataclasses.replace(launch, local_device_ids=ids, hosts=(launch.node,))


def _join(launch: Launch, limits: Limits, arguments: Mapping[str, str], problem: str | None) -> Launch:
    probes = Probes()
    try:
        launch, members = _answer_roll_call(launch, limits, arguments, probes, problem)
    except BaseException:
        probes.close()
        raise
    hosts = tuple(members.hellos[rank]["node"] for rank in range(launch.num_processes))
    launch = dataclasses.replace(launch, hosts=hosts, num_nodes=len(set(hosts)), address=members.address)
    _state.watchdog = Watchdog(launch, members, STAGES, limits, probes)
    sys.excepthook = functools.partial(_on_exception, sys.excepthook)
    atexit.register(_state.watchdog.leave)
    connect_jax(launch, members, limits, _state.watchdog)
    return launch


def _answer_roll_call(
    launch: Launch, limits: Limits, arguments: Mapping[str, str], probes: Probes, problem: str | None
) -> tuple[Launch, rollcall.Members]:
    """Returns this process's place with its own devices, and all ranks."""
    gpus = visible_gpus()
    hello = functools.partial(_hello, launch, gpus, arguments, probes)
    try:
        if problem:
            raise ValueError(problem)
        check_coordinator(launch)
        ids = own_gpus(launch, gpus)
    except ValueError as error:
        # The others then need not wait for the time limit, unless they cannot be reached.
        with contextlib.suppress(Exception):
            rollcall.report_problem(launch, hello(None, str(error)))
        raise
    launch = dataclasses.replace(launch, local_device_ids=ids)
    return launch, rollcall.hold(launch, hello(ids), limits.stage_s)


def _hello(
    launch: Launch,
    gpus: Sequence[str],
    arguments: Mapping[str, str],
    probes: Probes,
    ids: Sequence[int] | None,
    problem: str | None = None,
) -> dict:
    versions = {"python": platform.python_version(), "jax": jax.__version__, "jaxlib": metadata.version("jaxlib")}
    versions["tree-attn"] = tree_attn.__version__
    versions["tree-attn's source files"] = facts.source_digest()
    local_gpus = [gpus[number] for number in (range(len(gpus)) if ids is None else ids)] if gpus else []
    return rollcall.describe(
        launch,
        problem=problem,
        versions=versions,
        settings=dict(arguments) | facts.settings(),
        probe_port=probes.port,
        platform="gpu" if gpus else "cpu",
        n_local_devices=len(local_gpus) if gpus else planned_cpu_devices(),
        gpus=local_gpus,
    )


def _on_exception(previous, kind, error, traceback) -> None:
    """Ends the others too after an exception that nothing caught, or this rank as the consequence of another's end."""
    if isinstance(error, KeyboardInterrupt):
        fail(f"tree-attn: {_state.launch.name_of(_state.launch.process_id)}: interrupted", INTERRUPTED_STATUS)
    message = f"{kind.__name__}: {str(error).strip() or 'no message'}".splitlines()[0][:500]
    _state.watchdog.fail(message, is_consequence=may_be_consequence(error))
    previous(kind, error, traceback)
    exit_now(1)
