"""Provenance of a measured number: date, host, hardware, driver, clocks, commit, versions, command, NCCL settings."""

import datetime
import os
import pathlib
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

import tree_attn
from tree_attn.devices import loaded_nccl_version, visible_gpus

MAX_WAIT_S = 20  # for nvidia-smi
# Every row of a measurement or check has these.
ORIGIN = ("date", "host", "driver", "clock_sm_mhz", "clock_memory_mhz", "git_commit")


def of_script(devices: Sequence[jax.Device]) -> dict[str, Any]:
    """Returns the fields of a row that say when, where and by what it was measured, for a script.

    Clocks are not among them: they belong to the moment of a measurement, see `clocks_during`.

    Example:
      >>> sorted(of_script(jax.devices()))
      ['command', 'date', 'driver', 'git_commit', 'hardware', 'host', 'versions']
    """
    return place() | {
        "hardware": hardware(devices),
        "git_commit": git_commit(),
        "versions": versions(),
        "command": " ".join(["python3", *sys.argv]),
    }


def completed(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the row with those fields of `ORIGIN` that it lacks; clocks are those of this moment.

    Example:
      >>> sorted(completed({"us_median": 3.2}))
      ['clock_memory_mhz', 'clock_sm_mhz', 'date', 'driver', 'git_commit', 'host', 'us_median']
    """
    missing, found = set(ORIGIN) - row.keys(), {}
    if missing & {"date", "host", "driver"}:
        found |= place()
    if missing & {"clock_sm_mhz", "clock_memory_mhz"}:
        found |= clocks()
    if "git_commit" in missing:
        found["git_commit"] = git_commit()
    return dict(row) | {name: found[name] for name in ORIGIN if name in missing}


def place() -> dict[str, str | None]:
    """Returns date (UTC), host and driver."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"date": date, "host": platform.node(), "driver": driver()}


def hardware(devices: Sequence[jax.Device]) -> str:
    """Describes the devices: "8 x NVIDIA H200", or "8 emulated CPU devices on 2 cores (x86_64)"."""
    device_kinds = sorted({device.device_kind for device in devices})
    if devices[0].platform == "cpu":
        plural = "s" * (len(devices) != 1)
        return f"{len(devices)} emulated CPU device{plural} on {os.cpu_count()} cores ({platform.machine()})"
    return f"{len(devices)} x {', '.join(device_kinds)}"


def driver() -> str | None:
    """Returns the version of the NVIDIA driver, or None without `nvidia-smi`."""
    process = _start_nvidia_smi("driver_version")
    return next(iter(_lines(process)), None)


def clocks() -> dict[str, int | None]:
    """Returns the clocks of JAX's first GPU as they are; right after a program they are still those that it ran at."""
    return clocks_during(lambda: None, repetitions=1)


def clocks_during(run: Callable[[], Any], repetitions: int | None = None) -> dict[str, int | None]:
    """Returns the clocks of JAX's first GPU, read by `nvidia-smi` while `run()` is repeated; None where there is none.

    Args:
      run: keeps the GPU busy.
      repetitions: a fixed number of runs, for processes that run together; default: until the clocks are there.

    Example:
      >>> clocks_during(lambda: jax.block_until_ready(program(query, key, value)))
      {'clock_sm_mhz': 1980, 'clock_memory_mhz': 3201}
    """
    clocks: dict[str, int | None] = {"clock_sm_mhz": None, "clock_memory_mhz": None}
    process = _start_nvidia_smi("clocks.sm,clocks.mem", *visible_gpus()[:1])
    deadline = time.monotonic() + MAX_WAIT_S
    for _ in range(repetitions or 0):
        run()
    while not repetitions and process is not None and process.poll() is None and time.monotonic() < deadline:
        run()
    for line in _lines(process)[:1]:
        numbers = [int(word) if word.strip().isdigit() else None for word in line.split(",")]
        clocks.update(zip(clocks, numbers))
    return clocks


def _start_nvidia_smi(query: str, *addresses: str) -> subprocess.Popen | None:
    """Starts `nvidia-smi` with a query of the GPUs at these PCI addresses, by default of each; None where it is not."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    command += [f"--id={address}" for address in addresses]
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return None


def _lines(process: subprocess.Popen | None) -> list[str]:
    """Returns the lines that a process printed; none if it failed or hangs."""
    if process is None:
        return []
    try:
        printed, _ = process.communicate(timeout=MAX_WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return []
    return [] if process.returncode else [line.strip() for line in printed.splitlines()]


def git_commit() -> str | None:
    """Returns the commit of this package's checkout, with "-dirty" for uncommitted changes; None outside of one.

    The environment variable `TREE_ATTN_GIT_COMMIT` replaces it, for a copy of the tree without its history.
    """
    if "TREE_ATTN_GIT_COMMIT" in os.environ:
        return os.environ["TREE_ATTN_GIT_COMMIT"]
    folder = pathlib.Path(__file__).parent
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        # Fails for an installed copy: git would describe whatever repository the copy happens to lie in.
        _git(folder, "ls-files", "--error-unmatch", pathlib.Path(__file__).name)
        is_dirty = bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("-dirty" if is_dirty else "")


def versions() -> dict[str, str | None]:
    """Returns the versions of Python and of the packages that matter to a measurement; None if not installed.

    "nccl" is the version that this process has loaded. It is another than its package's where a user names a file.
    """
    from importlib import metadata

    packages = ("jax", "jaxlib", "flax", "numpy", "jax-cuda13-plugin", "jax-cuda12-plugin")
    packages += ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-nccl-cu13", "nvidia-nccl-cu12", "flash-attn-jax")
    packages += ("libtpu", "jax-rocm7-plugin", "jax-rocm60-plugin")
    found: dict[str, str | None] = {"python": platform.python_version(), "tree-attn": tree_attn.__version__}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found | {"nccl": loaded_nccl_version()}


def nccl_settings() -> dict[str, str]:
    """Returns NCCL's settings in the environment, but for paths; some make transfers several times as slow."""
    settings = {
        name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_") and "/" not in value
    }
    settings.pop("NCCL_VERSION", None)  # set by container images, and no setting
    return settings


def _git(folder: pathlib.Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.strip()
