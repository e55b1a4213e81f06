"""Settings of NCCL and XLA under which bare transfers between neighbours are timed, and the fastest of them by size.

A process reads them once, before its first transfer, so that each is tried in processes of its own
(`tree-attn compare --nccl search`). Transfers are sends and receives: algorithms and protocols of collectives
(`NCCL_ALGO`, `NCCL_PROTO`) do not apply to them. Channels, chunks, buffers and their registration do.
"""

import os
from collections.abc import Iterable, Mapping
from typing import Any

from tree_attn.arguments import one_of

_CHUNKS, _BUFFERS = "NCCL_P2P_NVL_CHUNKSIZE", "NCCL_BUFFSIZE"
_CHANNELS = {"NCCL_MIN_P2P_NCHANNELS": "64", "NCCL_MAX_P2P_NCHANNELS": "64"}
_REGISTERED = {"XLA_FLAGS": "--xla_gpu_enable_nccl_user_buffers=true"}
# Environment variables by the name of a setting. XLA_FLAGS is added to what is there.
SETTINGS: dict[str, dict[str, str]] = {
    "own": {},  # NCCL's defaults
    "chunks-128k": {_CHUNKS: str(128 * 1024)},
    "chunks-64k": {_CHUNKS: str(64 * 1024)},  # `links.spread_transfers`
    "chunks-32k": {_CHUNKS: str(32 * 1024)},
    "channels-64": _CHANNELS,
    "channels-64-chunks-64k": _CHANNELS | {_CHUNKS: str(64 * 1024)},
    "buffers-16m": {_BUFFERS: str(16 * 1024 * 1024)},
    "user-buffers": _REGISTERED,
    "user-buffers-chunks-64k": _REGISTERED | {_CHUNKS: str(64 * 1024)},
}


def apply(name: str) -> None:
    """Sets the environment to one of `SETTINGS`, and removes the variables of the others; before JAX starts devices.

    Raises:
      ValueError: there is no such setting.
    """
    one_of("setting", name, SETTINGS)
    variables = {variable for setting in SETTINGS.values() for variable in setting} - {"XLA_FLAGS"}
    for variable in variables:
        os.environ.pop(variable, None)
    for variable, value in SETTINGS[name].items():
        is_flag = variable == "XLA_FLAGS"
        os.environ[variable] = f"{os.environ.get(variable, '')} {value}".strip() if is_flag else value


def fastest(rows: Iterable[Mapping[str, Any]]) -> dict[int, str]:
    """Returns the name of the setting with the highest rate, by bytes of a transfer; of equals the first.

    Args:
      rows: each with "bytes", "nccl_setting" and "gb_per_s".

    Example:
      >>> fastest([{"bytes": 8, "nccl_setting": "own", "gb_per_s": 80.2}])
      {8: 'own'}
    """
    best: dict[int, Mapping[str, Any]] = {}
    for row in rows:
        if row["bytes"] not in best or row["gb_per_s"] > best[row["bytes"]]["gb_per_s"]:
            best[row["bytes"]] = row
    return {num_bytes: row["nccl_setting"] for num_bytes, row in best.items()}
