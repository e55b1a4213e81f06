"""How the lean kernel is laid out per device: as measured (`tuning.json`), by formula where nobody has."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp

from tree_attn.kernels.lean_layout import ROWS, LeanConfig, LeanShape, smem_bytes
from tree_attn.kernels.registers import RESERVED_SMEM_BYTES, SMEM_BYTES_PER_SM
from tree_attn.kernels.schedule import MIN_TILES_PER_RUN

DEFAULT_SMS = 132  # of an H100 or H200, for programs that are compiled where there is none
MOST_COLS_OF_TWO = 16  # query columns of two CTAs whose registers an SM holds; 8 where K and V are widened in registers
TABLE = pathlib.Path(__file__).with_name("tuning.json")


def lean_config(shape: LeanShape, is_static: bool) -> LeanConfig:
    """Returns the layout for `shape` on this process's first device: the table's, if it has this kind of call.

    Args:
      is_static: the schedule is known when compiling, because there are no lengths.
    """
    sms = num_sms()
    entry = _table().get(device_kind(), {}).get(call_kind(shape, sms, is_static))
    if entry is None:
        return formula(shape, sms, is_static)
    num_ctas = even_ctas(shape, entry["ctas_per_sm"] * sms, is_static)
    return LeanConfig(block_kv=entry["block_kv"], num_stages=entry["num_stages"], num_ctas=num_ctas)


def call_kind(shape: LeanShape, sms: int, is_static: bool) -> str:
    """The key of a tuning table: what the best layout was seen to depend on."""
    rows = "many rows" if shape.num_rows > sms else "few rows"
    kind = "short" if _is_short(shape, is_static) else "even" if is_static else "ragged"
    return f"{jnp.dtype(shape.key_dtype).name} head_dim {shape.head_dim} cols {shape.cols} {kind} {rows}"


def formula(shape: LeanShape, sms: int, is_static: bool) -> LeanConfig:
    """The layout for a device nobody has tuned.

    Two stages of tiles of 64 keys and two CTAs per SM: 128 KiB of K and V on their way to each SM, and one CTA computes
    while the other waits. More stages were slower on an H200, if by little. Where that does not fit in shared memory or
    in registers, one CTA.
    """
    if shape.is_tall:  # the registers of a whole SM
        block_kv = 128 if shape.head_dim <= 128 else 64
        return LeanConfig(block_kv=block_kv, num_stages=2, num_ctas=even_ctas(shape, sms, is_static))
    orders = ((2, 128, 2), (2, 64, 2), (1, 64, 2)) if shape.head_dim <= 64 else ((2, 64, 2), (1, 64, 2))
    if shape.cols > (8 if shape.is_widened else MOST_COLS_OF_TWO):
        orders = orders[-1:]
    elif _is_short(shape, is_static) and shape.cols == 8 and not shape.is_widened:
        orders = ((3, 64, 2), *orders)
    for ctas_per_sm, block_kv, stages in orders:
        num_ctas = even_ctas(shape, ctas_per_sm * sms, is_static)
        config = LeanConfig(block_kv=block_kv, num_stages=stages, num_ctas=num_ctas)
        if ctas_per_sm * (smem_bytes(shape, config) + RESERVED_SMEM_BYTES) <= SMEM_BYTES_PER_SM:
            return config
    raise AssertionError(f"two tiles of K and V must fit in shared memory, got {shape}")


def _is_short(shape: LeanShape, is_static: bool) -> bool:
    """Whether rows are so short that none is cut, however many CTAs there are: a tile, or two that the schedule spares.

    A schedule that is known when compiling has equal runs, which may cut rows of two.
    """
    most_tiles = 1 if is_static else MIN_TILES_PER_RUN
    return shape.num_slots <= most_tiles * ROWS and not shape.is_packed


def even_ctas(shape: LeanShape, ctas: int, is_static: bool) -> int:
    """Up to `ctas`, so that rows of equal length, as those of one sequence are, are cut alike.

    Then CTAs read the same keys of all heads at about the same time, which memory serves faster
    (docs/log/lean.md: "Runs that cut every output tile alike read faster").
    """
    rows = shape.num_rows
    if not is_static and shape.batch > 1:
        return ctas
    even = rows * (ctas // rows) if rows <= ctas else -(-rows // -(-rows // ctas))
    return even if even >= 0.9 * ctas else ctas


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


def write_table(device: str, entries: dict[str, dict[str, int]]) -> None:
    """Adds entries for `device`: kind of call -> `block_kv`, `num_stages`, `ctas_per_sm` (`scripts/tune_lean.py`)."""
    table = dict(_table()) | {device: _table().get(device, {}) | entries}
    TABLE.write_text(json.dumps(table, indent=2, sort_keys=True) + "\n")
    _table.cache_clear()
