"""The place of this process among the others, from arguments, SLURM or torchrun; checked before anything connects."""

import dataclasses
import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence

from tree_attn.cluster.hostlist import expand_counts, expand_hostlist
from tree_attn.cluster.variables import Reader

HOST_VARIABLE = "TREE_ATTN_COORDINATOR_HOST"
PORT_VARIABLE = "TREE_ATTN_COORDINATOR_PORT"

_IN_STEP = "SLURM_STEP_"  # `srun` sets these for its tasks; a batch script or the shell of `salloc` has none of them
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """The start of this process, and its place among the others.

    Attributes:
      source: of these facts: "arguments", "slurm", "torchrun", or "single" for one process without any of them.
      process_id: this process, 0 to num_processes - 1.
      num_processes: the number of processes.
      node: the name of this machine: SLURM's where there is one, else the host name.
      local_rank: this process among those of its node, or None where it is not known.
      local_size: processes on this node, or None.
      num_nodes: machines, or None until the roll call has counted them.
      hosts: the node of every rank; before the roll call the expected one, or () where it is not known.
      coordinator_host, coordinator_port: the address of rank 0's roll call; None for one process.
      job: the job and its step, e.g. "SLURM job 42 step 0"; two jobs never join each other.
      local_device_ids: the accelerators that are this process's own; None is all that it sees.
      address: this machine's address as the others reach it, e.g. "10.0.0.2"; None before the roll call.
      idle_tasks: one process alone in an allocation of several tasks: what to do about it; None elsewhere.
    """

    source: str
    process_id: int = 0
    num_processes: int = 1
    node: str = dataclasses.field(default_factory=socket.gethostname)
    local_rank: int | None = None
    local_size: int | None = None
    num_nodes: int | None = None
    hosts: tuple[str, ...] = ()
    coordinator_host: str | None = None
    coordinator_port: int | None = None
    job: str | None = None
    local_device_ids: tuple[int, ...] | None = None
    address: str | None = None
    idle_tasks: str | None = None

    def name_of(self, rank: int) -> str:
        """A rank and where it is, for messages: "rank 2 on n2"."""
        return f"rank {rank} on {self.hosts[rank]}" if self.hosts else f"rank {rank} (its host is not known)"


def detect(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: Sequence[int] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Launch:
    """Reads how this process was started; connects to nothing and touches no device.

    The first of these that is there: the three arguments; a SLURM step (a variable `SLURM_STEP_*`, that is under
    `srun`); torchrun (`RANK`, `WORLD_SIZE` or `LOCAL_RANK`); otherwise there is one process.

    Raises:
      ValueError: something is missing, is no number, is out of range, or contradicts the rest; names the variable
        or argument, its value and the remedy.

    Example:
      >>> detect("n1:9876", num_processes=2, process_id=0, environ={}).source
      'arguments'
    """
    arguments = {"coordinator_address": coordinator_address, "num_processes": num_processes, "process_id": process_id}
    if any(value is not None for value in arguments.values()):
        found = _from_arguments(arguments)
    elif any(name.startswith(_IN_STEP) for name in environ):
        found = _from_slurm(environ)
    elif any(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        found = _from_torchrun(environ)
    else:
        found = Launch(source="single", num_nodes=1, idle_tasks=_idle_tasks(environ))
    ids = None if local_device_ids is None else tuple(local_device_ids)
    return dataclasses.replace(found, local_device_ids=ids)


def check_coordinator(launch: Launch) -> None:
    """Raises ValueError unless the coordinator's name means an address, and one that other nodes can reach.

    Resolving it takes as long as the resolver's own time limit.
    """
    if launch.num_processes == 1:
        return
    host, remedy = launch.coordinator_host, _host_remedy(launch)
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)}
    except OSError as error:
        problem = f"does not resolve on {launch.node} ({error.strerror or error})"
        raise ValueError(f"the coordinator's name {host!r} {problem}: {remedy}") from None
    loopback = sorted(address for address in found if ipaddress.ip_address(address.partition("%")[0]).is_loopback)
    if loopback and (launch.num_nodes or 1) > 1:
        raise ValueError(
            f"the coordinator's name {host!r} means {loopback[0]} on {launch.node}, which is this machine alone, and "
            f"there are {launch.num_nodes} nodes: {remedy}"
        )


def own_gpus(launch: Launch, gpus: Sequence[str], environ: Mapping[str, str] = os.environ) -> tuple[int, ...] | None:
    """Returns the numbers of this process's own GPUs: all with one process on the node, else its equal part.

    Args:
      gpus: the GPUs that this process sees, in order.
    Returns:
      Their numbers, or None where there are none.
    Raises:
      ValueError: the GPUs of the node are not all visible, or cannot be dealt out equally.

    Example:
      >>> own_gpus(Launch(source="slurm", local_rank=1, local_size=2), ["a", "b", "c", "d"], {})
      (2, 3)
    """
    if launch.local_device_ids is not None:
        wrong = [number for number in launch.local_device_ids if gpus and not 0 <= number < len(gpus)]
        if wrong:
            last = len(gpus) - 1
            raise ValueError(f"local_device_ids must lie in 0 .. {last}, the GPUs seen on {launch.node}; got {wrong}")
        return launch.local_device_ids
    if not gpus or launch.local_size is None:
        return None
    on_node = environ.get("SLURM_GPUS_ON_NODE", "") if launch.source == "slurm" else ""
    expected = max(int(on_node) if on_node.isdecimal() else 0, launch.local_size)
    if len(gpus) < expected:
        raise ValueError(_hidden(launch, gpus, on_node, environ))
    share = len(gpus) // launch.local_size
    if len(gpus) % launch.local_size:
        raise ValueError(
            f"the {len(gpus)} GPUs of {launch.node} cannot be dealt out equally to its {launch.local_size} processes: "
            "start as many as divide them, e.g. by --ntasks-per-node or torchrun's --nproc-per-node"
        )
    return tuple(range(launch.local_rank * share, (launch.local_rank + 1) * share))


def _hidden(launch: Launch, gpus: Sequence[str], on_node: str, environ: Mapping[str, str]) -> str:
    names = ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_GPUS_ON_NODE", "SLURM_GPU_BIND")
    found = ", ".join(f"{name}={environ[name]}" for name in names if name in environ) or "no variable says why"
    return (
        f"rank {launch.process_id} sees {len(gpus)} GPU{'s' * (len(gpus) != 1)} of {launch.node}, and must see all "
        f"{on_node or launch.local_size} of it, for its {launch.local_size} processes number them alike ({found}): "
        "with SLURM, ask for --gpus-per-node or --gres=gpu:N, without --gpus-per-task and --gpu-bind; otherwise leave "
        "CUDA_VISIBLE_DEVICES alike for all"
    )


def _host_remedy(launch: Launch) -> str:
    if launch.source == "arguments":
        return "give coordinator_address as a name or address of rank 0's machine that every node can reach"
    named = "MASTER_ADDR" if launch.source == "torchrun" else HOST_VARIABLE
    return f"set {named} to a name or address of rank 0's machine that every node can reach"


def _from_arguments(arguments: Mapping) -> Launch:
    missing = [name for name, value in arguments.items() if value is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} must be given too: {', '.join(arguments)} go together")
    num_processes, process_id = arguments["num_processes"], arguments["process_id"]
    for name in ("num_processes", "process_id"):
        if not isinstance(arguments[name], int) or isinstance(arguments[name], bool):
            raise ValueError(f"{name} must be an integer, got {arguments[name]!r}")
    if num_processes < 1:
        raise ValueError(f"num_processes must be at least 1, got {num_processes}")
    if not 0 <= process_id < num_processes:
        raise ValueError(f"process_id must lie in 0 .. num_processes - 1 = {num_processes - 1}, got {process_id}")
    host, colon, port = str(arguments["coordinator_address"]).rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"coordinator_address must be HOST:PORT, got {arguments['coordinator_address']!r}")
    return Launch(
        source="arguments",
        process_id=process_id,
        num_processes=num_processes,
        coordinator_host=host.strip("[]"),
        coordinator_port=int(port),
    )


def _from_slurm(environ: Mapping[str, str]) -> Launch:
    read = Reader(environ, "SLURM", "start the program with srun, which sets it for every task")
    num_processes = read.integer("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", minimum=1)
    job = f"SLURM job {read.integer('SLURM_JOB_ID')} step {read.text('SLURM_STEP_ID', 'SLURM_STEPID')}"
    if num_processes == 1:
        place = dict(num_nodes=1, local_rank=0, local_size=1, node=_slurm_node(environ))
        return Launch(source="slurm", job=job, idle_tasks=_idle_tasks(environ), **place)
    nodes = read.parsed(expand_hostlist, "SLURM_STEP_NODELIST")
    counts = read.parsed(expand_counts, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    per_node = read.name("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if len(counts) != len(nodes) or sum(counts) != num_processes:
        raise read.wrong(
            per_node,
            f"gives {sum(counts)} tasks on {len(counts)} nodes, and there are {num_processes} tasks on the {len(nodes)}"
            f" nodes of SLURM_STEP_NODELIST={environ['SLURM_STEP_NODELIST']}",
        )
    node_id = read.integer("SLURM_NODEID", maximum=len(nodes) - 1)
    return Launch(
        source="slurm",
        process_id=read.integer("SLURM_PROCID", maximum=num_processes - 1),
        num_processes=num_processes,
        node=nodes[node_id],
        local_rank=read.integer("SLURM_LOCALID", maximum=counts[node_id] - 1),
        local_size=counts[node_id],
        num_nodes=len(nodes),
        hosts=_ranks_to_nodes(nodes, counts, environ.get("SLURM_DISTRIBUTION", "block")),
        coordinator_host=environ.get(HOST_VARIABLE) or nodes[0],
        coordinator_port=_port(environ, _slurm_port(environ)),
        job=job,
    )


def _idle_tasks(environ: Mapping[str, str]) -> str | None:
    """Returns a remark where this is the only process of an allocation of several tasks or nodes."""
    counts = {"task": environ.get("SLURM_NTASKS", ""), "node": environ.get("SLURM_JOB_NUM_NODES", "")}
    several = [f"{count} {name}s" for name, count in counts.items() if count.isdecimal() and int(count) > 1]
    if not several:
        return None
    remedy = "start it with srun, without --ntasks=1, to use them"
    return f"its allocation has {' on '.join(several)}, which stay idle: {remedy}"


def _slurm_node(environ: Mapping[str, str]) -> str:
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def _slurm_port(environ: Mapping[str, str]) -> int:
    """Returns a port that two steps on one node are unlikely to share; below the ports that Linux hands out."""
    step = environ.get("SLURM_STEP_ID") or environ["SLURM_STEPID"]
    return 20000 + (int(environ["SLURM_JOB_ID"]) * 31 + int(step) * 7 if step.isdecimal() else 0) % 12000


def _ranks_to_nodes(nodes: Sequence[str], counts: Sequence[int], distribution: str) -> tuple[str, ...]:
    """Returns the node of every rank, or () for distributions that the variables do not give."""
    if distribution.startswith("cyclic"):
        turns = [(turn, node) for node, count in enumerate(counts) for turn in range(count)]
        return tuple(nodes[node] for _, node in sorted(turns))
    if distribution.startswith("block") or len(nodes) == 1:
        return tuple(node for node, count in zip(nodes, counts) for _ in range(count))
    return ()


def _from_torchrun(environ: Mapping[str, str]) -> Launch:
    read = Reader(environ, "torchrun", f"start with torchrun, or set all of {', '.join(_TORCHRUN)}, or none")
    num_processes = read.integer("WORLD_SIZE", minimum=1)
    rank = read.integer("RANK", maximum=num_processes - 1)
    local_size = read.integer("LOCAL_WORLD_SIZE", minimum=1, maximum=num_processes)
    local_rank = read.integer("LOCAL_RANK", maximum=local_size - 1)
    port = read.integer("MASTER_PORT", minimum=1, maximum=65535)
    # torchrun's agent listens on MASTER_PORT itself, and sets this variable then.
    port += environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    run = environ.get("TORCHELASTIC_RUN_ID")
    return Launch(
        source="torchrun",
        process_id=rank,
        num_processes=num_processes,
        local_rank=local_rank,
        local_size=local_size,
        num_nodes=-(-num_processes // local_size),
        coordinator_host=read.text("MASTER_ADDR"),
        coordinator_port=_port(environ, port),
        job=f"torchrun run {run}" if run else None,
    )


def _port(environ: Mapping[str, str], default: int) -> int:
    if not environ.get(PORT_VARIABLE):
        return default
    return Reader(environ, "it", "take a free port of rank 0's machine").integer(
        PORT_VARIABLE, minimum=1, maximum=65535
    )
