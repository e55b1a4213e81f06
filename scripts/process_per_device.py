"""One process per device: their start and meeting, and the fields of a row that say where it was measured."""

import functools
import math
import os
import pathlib
import signal
import socket
import subprocess
import sys

COORDINATOR_TIMEOUT_S = 120


@functools.cache
def environment(num_devices: int) -> dict:
    """Returns the fields of a row that name date, host, devices, processes, hardware, driver, commit and command.

    Clocks are those of the run's start: a check has no time that they could explain. A measurement has its own.
    """
    import jax

    from tree_attn.measure import provenance

    counts = {"n_devices": num_devices, "n_processes": jax.process_count()}
    fields = provenance.of_script(jax.devices())
    del fields["versions"]  # checks write many small rows
    return counts | fields | provenance.clocks() | {"jax_version": jax.__version__}


def writable(row: dict) -> dict:
    """Returns the row with NaN and infinity as text: JSON has neither, and a wrong result may have both."""
    is_odd = lambda value: isinstance(value, float) and not math.isfinite(value)
    plain = lambda value: list(map(plain, value)) if isinstance(value, list) else str(value) if is_odd(value) else value
    return {name: plain(value) for name, value in row.items()}


def has_gpu() -> bool:
    """Returns whether this machine has an NVIDIA GPU, without starting JAX."""
    return pathlib.Path("/dev/nvidia0").exists()


def spawn(command: list[str], count: int) -> int:
    """Runs `command` in one process per device, each with the option `--worker`; returns the worst exit status.

    GPUs are the first of CUDA_VISIBLE_DEVICES, if that is set. SIGTERM ends the processes too: they would keep the GPUs
    busy that the next run is timed on.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(rank) for rank in range(count)] if visible is None else visible.split(",")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    if has_gpu() and len(gpus) < count:
        raise ValueError(f"CUDA_VISIBLE_DEVICES must name {count} GPUs or more, got {visible!r}")
    before, workers = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number)), []
    try:
        for rank in range(count):
            env = os.environ | ({"CUDA_VISIBLE_DEVICES": gpus[rank]} if has_gpu() else {})
            workers.append(subprocess.Popen([*command, "--worker", f"127.0.0.1:{port},{count},{rank}"], env=env))
        return max(worker.wait() for worker in workers)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        signal.signal(signal.SIGTERM, before)


def join(worker: str) -> None:
    """Joins this process, which `spawn` has started, with the others."""
    import jax

    coordinator, count, rank = worker.split(",")
    if not has_gpu():
        jax.config.update("jax_num_cpu_devices", 1)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, int(count), int(rank), initialization_timeout=COORDINATOR_TIMEOUT_S)
