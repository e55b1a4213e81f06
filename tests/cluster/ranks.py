"""Real processes of one program on this machine, found by torchrun's variables."""

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

SILENCE_S = 3
ENDS_S = 20  # far more than any limit set here, and less than any of JAX's own
STARTS_S = 60


def environment(rank: int, count: int, port: int) -> dict[str, str]:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    limits = {"TREE_ATTN_HEARTBEAT_S": SILENCE_S, "TREE_ATTN_TIMEOUT_S": STARTS_S}
    settings = {name: str(value) for name, value in (place | where | limits).items()}
    runs = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return os.environ | settings | runs | {"PYTHONPATH": os.pathsep.join(sys.path)}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def running(command: list[str], count: int, ranks=None, **extra: str) -> Iterator[list[subprocess.Popen]]:
    """Starts ranks of a command, and ends all of them afterwards."""
    port = free_port()
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # A shell lets what it runs in the background ignore Ctrl-C, and children inherit that.
    options["preexec_fn"] = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    processes = [
        subprocess.Popen(command, env=environment(rank, count, port) | extra, **options)
        for rank in (range(count) if ranks is None else ranks)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def endings(processes: list[subprocess.Popen], limit_s: float = ENDS_S) -> list[tuple[int, str]]:
    """Returns status and stderr of each; all must end within the limit."""
    deadline = time.monotonic() + limit_s
    ended = []
    for process in processes:
        _, errors = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        ended.append((process.returncode, errors))
    return ended
