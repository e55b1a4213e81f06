"""Several processes: the options that join them, and values that process 0 alone knows.

Under `srun` and `torchrun` none of the options is needed.
"""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from tree_attn.commands import common
from tree_attn.commands.options import integers_like

# Options that may differ between ranks. A model is compared by its files, and process 0 alone writes.
_OF_A_RANK = ("coordinator_address", "process_id", "local_device_ids", "command_line", "model", "out", "json")
_OF_A_RANK += common.NAMES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options to a command that can run as several processes."""
    group = parser.add_argument_group("several processes (found without options under srun and torchrun)")
    group.add_argument("--coordinator-address", metavar="HOST:PORT", help="of process 0")
    group.add_argument("--num-processes", type=int, metavar="N")
    group.add_argument("--process-id", type=int, metavar="I")
    group.add_argument(
        "--local-device-ids",
        type=integers_like("0,1"),
        metavar="I,J",
        help="this process's accelerators (default: its part)",
    )


def join(args: argparse.Namespace, n_devices: int | None):
    """Calls `tree_attn.initialize` with these options, and has XLA and NCCL use links well; returns the Launch.

    An option `nccl` names another setting of NCCL. All ranks must have the same command and options, but for those in
    `_OF_A_RANK`.
    """
    from tree_attn.cluster import facts
    from tree_attn.cluster.join import initialize
    from tree_attn.measure import links, transfer_settings

    if getattr(args, "nccl", None) is None:
        links.spread_transfers()
    else:
        transfer_settings.apply(args.nccl)
    links.join_transfers()
    return initialize(
        args.coordinator_address,
        args.num_processes,
        args.process_id,
        args.local_device_ids,
        n_devices=n_devices,
        arguments=facts.of_arguments(vars(args), without=_OF_A_RANK),
    )


def rank_name(args: argparse.Namespace) -> str | None:
    """Returns "rank 3 on n2" in one of several processes, joined or not yet; None in a single one."""
    join = sys.modules.get("tree_attn.cluster.join")  # its import takes seconds, and a wrong call has not needed it
    current = getattr(join, "current", None)  # an interrupt may come while it is imported
    joined = current and current()
    if joined and joined.num_processes > 1:
        return joined.name_of(joined.process_id)
    launch = _detected(args)
    return None if launch is None else f"rank {launch.process_id} on {launch.node}"


def is_first(args: argparse.Namespace) -> bool:
    """Returns False in one of several processes that is not the first; it need not have joined."""
    launch = _detected(args)
    return launch is None or launch.process_id == 0


def _detected(args: argparse.Namespace):
    """Returns the place of one of several processes; None in a single one, and where options contradict each other."""
    from tree_attn.cluster.launch import detect

    names = ("coordinator_address", "num_processes", "process_id")
    try:  # also after an earlier command of this process alone: `initialize` would detect the processes again
        launch = detect(*(getattr(args, name, None) for name in names))
    except ValueError:
        return None
    return launch if launch.num_processes > 1 else None


def agree_on_model(path: pathlib.Path, config: Any) -> None:
    """Returns once all ranks have found the same model.

    Args:
      path: its file or folder.
      config: its configuration, a dataclass.
    Raises:
      ValueError: a rank has another configuration or other files; names it and what differs.
    """
    from tree_attn.cluster import facts
    from tree_attn.cluster.join import agree, current

    launch = current()
    if launch is None or launch.num_processes == 1:
        return
    fields = {name: facts.brief(value) for name, value in dataclasses.asdict(config).items()}
    agree(fields | facts.of_model(path))


def broadcast(x):
    """Returns process 0's value of an array, in every process."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    return x if jax.process_count() == 1 else np.asarray(multihost_utils.broadcast_one_to_all(x))


def broadcast_flags(flags: Sequence[bool]) -> list[bool]:
    """Returns process 0's list of booleans, in every process."""
    import numpy as np

    return [bool(flag) for flag in broadcast(np.asarray(flags, np.int32))]
