"""Surroundings of the devices for `tree-attn doctor`: extras, folders that are kept, and what makes it slow here."""

import os
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from tree_attn import extras
from tree_attn.commands import common
from tree_attn.commands.units import count


def find_extras() -> dict[str, str | None]:
    """Returns, for each extra, None where it is installed, else what is missing and the command that installs it."""
    return {
        name: f"needs {', '.join(absent)}: {extras.how_to_install(name)}" if (absent := extras.missing(name)) else None
        for name in extras.MODULES
    }


def find_caches() -> dict[str, dict[str, Any]]:
    """Returns the folders of fetched models and of compiled programs: `folder`, `files` and their `bytes`."""
    compiled = pathlib.Path(os.environ.get(common.CACHE_VARIABLE) or common.cache_folder())
    return {"models": _folder(extras.cache_dir()), "compiled programs": _folder(compiled)}


def find_slow(
    devices: Sequence[jax.Device], implementations: Mapping[str, str | None], reductions: Mapping[str, str | None]
) -> list[str]:
    """Returns a sentence for each thing that makes programs slow here, with the reason.

    Args:
      implementations, reductions: name -> None where it can run, else the reason why not.
    """
    found = []
    if devices[0].platform == "cpu":
        found.append(
            f"{count(len(devices), 'device')} {'is' if len(devices) == 1 else 'are'} emulated on "
            f"{count(os.cpu_count() or 1, 'core')}: results are right, and times say nothing about GPUs and TPUs."
        )
        if shutil.which("nvidia-smi") is not None:
            found.append(f"nvidia-smi is here, and JAX runs on the CPU. For GPUs: {extras.how_to_install('cuda13')}")
    elif implementations["mosaic_gpu"] is not None:
        fastest = next((name for name, reason in implementations.items() if reason is None), "no kernel")
        found.append(f"Attention runs by {fastest}, without the Hopper kernels: {implementations['mosaic_gpu']}")
    if devices[0].platform != "cpu" and len(devices) > 1 and reductions["fused"] is not None:
        found.append(f"Partial results meet by collectives, not by one exchange: {reductions['fused']}")
    folder = common.cache_folder()
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if common.CACHE_VARIABLE not in os.environ and not os.access(nearest, os.W_OK):
        found.append(f"Programs are compiled anew in each run: {nearest} cannot be written to.")
    return found


def _folder(path: pathlib.Path) -> dict[str, Any]:
    files = [one for one in path.iterdir() if one.is_file()] if path.is_dir() else []
    return {"folder": str(path), "files": len(files), "bytes": sum(one.stat().st_size for one in files)}
