"""Joins several processes into one program: how they start, how a lost one is noticed, and how they end."""

import atexit
import contextlib
import dataclasses
import functools
import math
import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from tree_attn import topology
from tree_attn.cluster import gloo, relay, rollcall
from tree_attn.cluster.launch import Launch, check_coordinator, detect, own_gpus
from tree_attn.cluster.watchdog import Watchdog, exit_now
from tree_attn.devices import planned_cpu_devices, request_cpu_devices, visible_gpus
from tree_attn.mesh import make_mesh

TIMEOUT_VARIABLE = "TREE_ATTN_TIMEOUT_S"
HEARTBEAT_VARIABLE = "TREE_ATTN_HEARTBEAT_S"
# Errors of JAX's runtime begin with one of these, whatever Python type they have.
_RUNTIME_CODES = ("ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "FAILED_PRECONDITION", "INTERNAL", "UNAVAILABLE")
_RUNTIME_CODES += ("UNKNOWN",)
_STAGES = ("connecting to JAX's coordinator", "starting its devices", "the first collective")


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
) -> Launch:
    """Joins this process to the others, if there are others, and watches them until the end.

    The others come from the first of these that is there: the arguments; SLURM, inside a step (under `srun`);
    torchrun's variables. Otherwise there is one process. All variables are checked before anything connects. Then every
    rank answers a roll call, JAX connects, and a first collective is checked, each within the time limit.

    From then on a rank that is lost ends all others (`tree_attn.cluster.watchdog`). Call it before anything uses a
    device. Once joined, a second call returns the first one's result.

    Args:
      coordinator_address: "host:port" of process 0, reachable from all; goes with the next two.
      num_processes: the number of processes.
      process_id: this one, 0 to num_processes - 1; process 0 prints and writes files.
      local_device_ids: numbers of this process's own accelerators among those that it sees. None takes an equal part
        where the number of processes on the node is known, else all.
      n_devices: devices over all processes; without accelerators every process emulates its equal part of them.
      timeout_s: time limit of each step, in seconds; default `TREE_ATTN_TIMEOUT_S`, else 60.
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
    timeout_s = _seconds("timeout_s", timeout_s, TIMEOUT_VARIABLE, 60.0)
    silence_s = _seconds(HEARTBEAT_VARIABLE, None, HEARTBEAT_VARIABLE, 30.0)
    launch = detect(coordinator_address, num_processes, process_id, local_device_ids)
    if n_devices is not None and n_devices % launch.num_processes:
        raise ValueError(f"n_devices must be a multiple of num_processes={launch.num_processes}, got {n_devices}")
    if launch.num_processes == 1:
        _state.launch = _alone(launch)
    else:
        if n_devices is not None:
            request_cpu_devices(n_devices // launch.num_processes)
        _state.launch = _join(launch, timeout_s, silence_s)
    topology.record(_state.launch.hosts)
    return _state.launch


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
      status: of this process; the others end with `tree_attn.cluster.watchdog.LOST_STATUS`.
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
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, ids)))
    return dataclasses.replace(launch, local_device_ids=ids, hosts=(launch.node,))


def _join(launch: Launch, timeout_s: float, silence_s: float) -> Launch:
    gpus = visible_gpus()
    try:
        check_coordinator(launch)
        ids = own_gpus(launch, gpus)
    except ValueError as error:
        # The others then need not wait for the time limit, unless they cannot be reached.
        with contextlib.suppress(Exception):
            rollcall.report_problem(launch, _hello(launch, gpus, None, str(error)))
        raise
    launch = dataclasses.replace(launch, local_device_ids=ids)
    members = rollcall.hold(launch, _hello(launch, gpus, ids), timeout_s)
    hosts = tuple(members.hellos[rank]["node"] for rank in range(launch.num_processes))
    launch = dataclasses.replace(launch, hosts=hosts, num_nodes=len(set(hosts)), address=members.address)
    _state.watchdog = Watchdog(launch, members, _STAGES, timeout_s, silence_s)
    sys.excepthook = functools.partial(_on_exception, sys.excepthook)
    atexit.register(_state.watchdog.leave)
    _connect_jax(launch, members, timeout_s, silence_s)
    return launch


def _hello(launch: Launch, gpus: Sequence[str], ids: Sequence[int] | None, problem: str | None = None) -> dict:
    versions = {"python": platform.python_version(), "jax": jax.__version__, "jaxlib": metadata.version("jaxlib")}
    with contextlib.suppress(metadata.PackageNotFoundError):  # run from a checkout
        versions["tree-attn"] = metadata.version("tree-attn")
    local_gpus = [gpus[number] for number in (range(len(gpus)) if ids is None else ids)] if gpus else []
    return rollcall.describe(
        launch,
        problem=problem,
        versions=versions,
        platform="gpu" if gpus else "cpu",
        n_local_devices=len(local_gpus) if gpus else planned_cpu_devices(),
        gpus=local_gpus,
    )


def _connect_jax(launch: Launch, members: rollcall.Members, timeout_s: float, silence_s: float) -> None:
    """Runs the stages after the roll call. The watchdog keeps their time limits: some of them cannot be interrupted."""
    watchdog = _state.watchdog
    _bypass_proxies()
    if "JAX_ENABLE_PREEMPTION_SERVICE" not in os.environ:
        # It would catch SIGTERM: a cancelled job would go on until it is killed.
        jax.config.update("jax_enable_preemption_service", False)
    gloo.listen_on(members.address)
    port = members.jax_port
    if launch.process_id != 0:
        port = relay.start(members.channels[0].socket.getpeername()[0], port)
    try:
        jax.distributed.initialize(
            f"127.0.0.1:{port}",
            launch.num_processes,
            launch.process_id,
            list(launch.local_device_ids) if launch.local_device_ids else None,
            # `detect` has found and checked all that JAX would detect.
            cluster_detection_method="deactivate",
            # These are the backstop: the watchdog ends first, with a clearer message.
            initialization_timeout=math.ceil(timeout_s) + 30,
            heartbeat_timeout_seconds=max(100, math.ceil(3 * silence_s)),
        )
        watchdog.reach(1)
        jax.devices()
        watchdog.reach(2)
        _first_collective()
        watchdog.reach(3)
    except RuntimeError as error:
        reason = str(error).strip()[:500]
        raise ConnectionError(f"{launch.name_of(launch.process_id)} could not begin: {reason}") from error


def _first_collective() -> None:
    """Sums over all devices, and checks the sum."""
    mesh = make_mesh({"all": jax.device_count()})
    number = lambda: jax.lax.psum(1.0 + jax.lax.axis_index("all").astype(jnp.float32), "all")
    total = jax.jit(jax.shard_map(number, mesh=mesh, in_specs=(), out_specs=P()))()
    expected = jax.device_count() * (jax.device_count() + 1) / 2
    result = float(np.asarray(total.addressable_data(0)))
    if result != expected:
        raise ConnectionError(f"the first sum over {jax.device_count()} devices gave {result} and not {expected}")


def _bypass_proxies() -> None:
    """Keeps gRPC, by which JAX reaches its coordinator, from waiting for an HTTP proxy for ever."""
    if any(os.environ.get(name) for name in ("grpc_proxy", "https_proxy", "http_proxy")):
        for name in ("no_grpc_proxy", "no_proxy"):
            os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1")))


def _on_exception(previous, kind, error, traceback) -> None:
    """Ends the others too after an exception that nothing caught, or this rank as the consequence of another's end."""
    message = f"{kind.__name__}: {str(error).strip() or 'no message'}".splitlines()[0][:500]
    _state.watchdog.fail(message, is_consequence=may_be_consequence(error))
    previous(kind, error, traceback)
    exit_now(1)
