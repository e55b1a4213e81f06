"""How the lean kernel is laid out per device: as measured (`tuning.json`), by formula where nobody has."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp

from tree_attn.local.lean_kernel import RESERVED_SMEM_BYTES, SMEM_BYTES_PER_SM, LeanConfig, LeanShape, smem_bytes

DEFAULT_SMS = 132  # of an H100 or H200, for programs that are compiled where there is none
TABLE = pathlib.Path(__file__).with_name("tuning.json")
MAX_STAGES = 8


def lean_config(shape: LeanShape, is_static: bool) -> LeanConfig:
    """Returns the layout for `shape` on this process's first device: the table's, if it has this kind of call.

    Args:
      is_static: the schedule is known when compiling, because there are no lengths.
    """
    entry = _table().get(device_kind(), {}).get(call_kind(shape, num_sms(), is_static))
    if entry is None:
        return formula(shape, num_sms(), is_static)
    return LeanConfig(**entry | {"num_ctas": _num_ctas(shape, entry["num_ctas"], is_static)})


def call_kind(shape: LeanShape, sms: int, is_static: bool) -> str:
    """The key of a tuning table: what the best layout was seen to depend on."""
    rows = "many rows" if shape.num_rows > sms else "few rows"
    kind = "even" if is_static else "ragged"
    return f"{jnp.dtype(shape.key_dtype).name} head_dim {shape.head_dim} cols {shape.cols} {kind} {rows}"


def formula(shape: LeanShape, sms: int, is_static: bool) -> LeanConfig:
    """The layout for a device nobody has tuned.

    Few rows of equal length: one CTA per SM with tiles of 128 keys, hence few partials to merge. Many rows, or lengths
    that differ: two CTAs per SM with tiles of 64, so that one computes while the other waits. As many stages as shared
    memory holds.
    """
    is_wide = is_static and shape.num_rows <= sms
    orders = ((1, 128, 3), (2, 64, 3), (1, 64, 2)) if is_wide else ((2, 64, 3), (1, 128, 3), (1, 64, 2))
    for ctas_per_sm, block_kv, least in orders:
        stages = _stages(shape, block_kv, SMEM_BYTES_PER_SM // ctas_per_sm - RESERVED_SMEM_BYTES)
        if stages >= least:
            num_ctas = _num_ctas(shape, ctas_per_sm * sms, is_static)
            return LeanConfig(block_kv=block_kv, num_stages=min(stages, MAX_STAGES), num_ctas=num_ctas)
    raise AssertionError(f"two tiles of K and V must fit in shared memory, got {shape}")


def _num_ctas(shape: LeanShape, ctas: int, is_static: bool) -> int:
    """Up to `ctas`, so that rows of equal length are cut alike.

    Then CTAs read the same keys of all heads at about the same time, which memory serves faster (docs/log.md).
    """
    rows = shape.num_rows
    if not is_static:
        return ctas
    even = rows * (ctas // rows) if rows <= ctas else -(-rows // -(-rows // ctas))
    return even if even >= 0.9 * ctas else ctas


def _stages(shape: LeanShape, block_kv: int, available_bytes: int) -> int:
    sizes = [smem_bytes(shape, LeanConfig(block_kv=block_kv, num_stages=stages)) for stages in (2, 3)]
    per_stage = sizes[1] - sizes[0]
    return 2 + (available_bytes - sizes[0]) // per_stage


def num_sms() -> int:
    """Streaming multiprocessors of the first local GPU; an H200's where there is none."""
    device = jax.local_devices()[0]
    return device.core_count if device.platform == "gpu" else DEFAULT_SMS


def device_kind() -> str:
    """The key of a device in the table, e.g. "NVIDIA H200"."""
    return jax.local_devices()[0].device_kind


@functools.cache
def _table() -> dict[str, dict[str, dict[str, int]]]:
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


def write_table(device: str, entries: dict[str, LeanConfig]) -> None:
    """Replaces what the table says of `device`; `scripts/tune_lean.py` calls it."""
    table = dict(_table()) | {device: {kind: dataclasses.asdict(config) for kind, config in sorted(entries.items())}}
    TABLE.write_text(json.dumps(table, indent=2, sort_keys=True) + "\n")
    _table.cache_clear()
