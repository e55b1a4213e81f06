"""Provenance of a measured number: hardware, commit, versions, command and NCCL settings."""

import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax

import tree_attn


def of_script(devices: Sequence[jax.Device]) -> dict[str, Any]:
    """Returns the fields of a row that say where and by what it was measured, for a script.

    Example:
      >>> sorted(of_script(jax.devices()))
      ['command', 'git_commit', 'hardware', 'versions']
    """
    return {
        "hardware": hardware(devices),
        "git_commit": git_commit(),
        "versions": versions(),
        "command": " ".join(["python3", *sys.argv]),
    }


def hardware(devices: Sequence[jax.Device]) -> str:
    """Describes the devices: "8 x NVIDIA H200", or "8 emulated CPU devices on 2 cores (x86_64)"."""
    device_kinds = sorted({device.device_kind for device in devices})
    if devices[0].platform == "cpu":
        plural = "s" * (len(devices) != 1)
        return f"{len(devices)} emulated CPU device{plural} on {os.cpu_count()} cores ({platform.machine()})"
    return f"{len(devices)} x {', '.join(device_kinds)}"


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
    """Returns the versions of Python and of the packages that matter to a measurement; None if not installed."""
    from importlib import metadata

    packages = ("jax", "jaxlib", "flax", "numpy", "jax-cuda13-plugin", "jax-cuda12-plugin")
    packages += ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-nccl-cu13", "nvidia-nccl-cu12", "flash-attn-jax")
    found: dict[str, str | None] = {"python": platform.python_version(), "tree-attn": tree_attn.__version__}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


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
