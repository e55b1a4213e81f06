"""The lean kernel's layout per device: as measured (`tuning.json`), or by formula where no measurement is."""

import functools
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp

from tree_attn.kernels.lean_layout import ROWS, LeanConfig, LeanShape, max_smem_bytes
from tree_attn.kernels.registers import RESERVED_SMEM_BYTES
from tree_attn.kernels.schedule import MERGE_KV_TILES, MIN_KV_TILES_PER_RUN, longest_run

DEFAULT_SMS = 132  # of an H100 or H200, for programs that are compiled where there is none
MAX_COLS_OF_TWO_CTAS = 16  # query columns with which an SM has registers for two CTAs
MAX_COLS_OF_128_KEYS = 40  # with which one CTA has registers for KV tiles of 128 keys, of head dims up to 64
# The same of query columns times padded head dims, where K and V are widened in registers; and for 128 keys of one CTA.
MAX_WIDENED_OF_TWO_CTAS, MAX_WIDENED_OF_128_KEYS = 1024, 2048
MIN_KV_TILES_OF_128_KEYS = 4  # of a CTA, widened: with fewer, smaller ones and two stages were faster on Hopper
MAX_SLOTS_OF_ONE_EACH = 8192  # with which CTAs that have an output tile each gain anything
MIN_SLOTS_OF_TWO_CTAS = 512  # beyond which two CTAs of an SM gain so; 1,868 to 3,072 slots were measured
MIN_HEADS_OF_TWO_CTAS = 32  # KV heads with which two CTAs of an SM read faster than one with larger KV tiles
MANY_FOR_SHORT = 8  # output tiles of each of three CTAs of an SM, with which their latency counts most
MAX_SHORT_KV_TILES = 4
MIN_SHARE_OF_CTAS = 0.9  # which work: a few that do not cost nothing
MIN_SHARE_OF_TWO_CTAS = 0.98  # the same where there are two for each SM and many KV heads
MIN_SHARE_OF_SMS = 0.84  # with a CTA, where that cuts output tiles alike: 112 of 132 read faster (docs/log/lean.md)
TABLE = pathlib.Path(__file__).with_name("tuning.json")


def lean_config(shape: LeanShape, is_static: bool, leaves_whole: bool = False) -> LeanConfig:
    """Returns the layout for `shape` on this process's first device: the table's, if it has an entry for such calls.

    The table knows neither how many output tiles there are nor how many KV heads. Layouts that depend on these come
    before: where each CTA has an output tile, and where KV heads are many. They are for results that are merged with no
    others, for so they were measured.

    Args:
      is_static: the schedule is known when compiling, because there are no lengths.
      leaves_whole: output tiles of one length may be left whole where a merge would take longer.
    """
    sms = num_sms()
    if is_static and leaves_whole and (config := _one_each(shape, sms)):
        return config
    if leaves_whole and (config := _many_heads(shape, sms, is_static)):
        return config
    entry = _table().get(device_kind(), {}).get(table_key(shape, sms, is_static))
    if entry is None:
        return formula(shape, sms, is_static, leaves_whole)
    block_kv = entry["block_kv"]
    num_ctas = even_ctas(shape, entry["ctas_per_sm"] * sms, is_static, block_kv if leaves_whole else None)
    return LeanConfig(block_kv=block_kv, num_stages=entry["num_stages"], num_ctas=num_ctas)


def table_key(shape: LeanShape, sms: int, is_static: bool) -> str:
    """Returns the key of a call in the tuning table: the properties that the best layout was seen to depend on."""
    # "rows" are output tiles; the word is the table's.
    rows = "many rows" if shape.num_output_tiles > sms else "few rows"
    lengths = "short" if _is_short(shape, sms, is_static) else "even" if is_static else "ragged"
    # A Hopper GPU runs the other GPUs' kernel too, for comparison.
    products = "" if shape.target.is_hopper else " mma.sync"
    cols = f"{'rows' if shape.is_many_query else 'cols'} {shape.cols}"
    return f"{jnp.dtype(shape.key_dtype).name} head_dim {shape.head_dim} {cols} {lengths} {rows}{products}"


def formula(shape: LeanShape, sms: int, is_static: bool, leaves_whole: bool = False) -> LeanConfig:
    """Returns a layout for a device that was not tuned.

    That is two stages of KV tiles of 64 keys and two CTAs per SM. 128 KiB of K and V are then on their way to each SM,
    and one CTA computes while the other waits. More stages were slower on an H200, if by little. If two CTAs do not fit
    an SM there is one, or two of one stage for many output tiles. KV tiles of widened K and V have 128 keys, or there
    are four stages.
    """
    if shape.is_many_query:  # the registers and the shared memory of a whole SM
        block_kv = 128 if shape.head_dim * shape.streams <= 128 else 64
        return LeanConfig(block_kv=block_kv, num_stages=2, num_ctas=even_ctas(shape, shape.streams * sms, is_static))
    is_short = _is_short(shape, sms, is_static)
    orders = _mma_orders(shape, sms, is_short) if shape.uses_mma else _orders(shape, sms, is_short)
    # There is no memory for partial states, then: `lean_call._keeps_output_tiles_whole`.
    as_planned = shape.replace(whole_output_tiles=True) if is_short and leaves_whole else shape
    for ctas_per_sm, block_kv, stages in orders:
        num_ctas = even_ctas(shape, ctas_per_sm * sms, is_static, block_kv if leaves_whole else None)
        config = LeanConfig(block_kv=block_kv, num_stages=stages, num_ctas=num_ctas)
        if ctas_per_sm * (max_smem_bytes(as_planned, config) + RESERVED_SMEM_BYTES) <= shape.target.smem_bytes_per_sm:
            return config
    raise AssertionError(f"a tile of K and of V must fit in shared memory, got {shape}")


def _one_each(shape: LeanShape, sms: int) -> LeanConfig | None:
    """Returns a layout of two or three CTAs per SM, if these are enough to have an output tile each, and fewer are not.

    Output tiles of equal length are then not cut. Some SMs have a CTA more than others, which costs less than a merge:
    memory is what all of them wait for.
    """
    ctas_per_sm = -(-shape.num_output_tiles // sms)
    min_slots = {2: MIN_SLOTS_OF_TWO_CTAS, 3: ROWS}.get(ctas_per_sm)
    has_registers = shape.cols == 8 and not shape.uses_mma and shape.head_dim <= 128
    if min_slots is None or not (has_registers and min_slots < shape.num_slots <= MAX_SLOTS_OF_ONE_EACH):
        return None
    if ctas_per_sm == 2 and shape.head_dim <= 64:
        return None  # the table's layouts have two, with larger KV tiles
    config = LeanConfig(block_kv=ROWS, num_stages=2, num_ctas=shape.num_output_tiles)
    shape = shape.replace(static_kv_tiles=-(-shape.num_slots // ROWS))  # there is no memory for partial states
    smem_bytes = ctas_per_sm * (max_smem_bytes(shape, config) + RESERVED_SMEM_BYTES)
    return config if smem_bytes <= shape.target.smem_bytes_per_sm else None


def _many_heads(shape: LeanShape, sms: int, is_static: bool) -> LeanConfig | None:
    """Returns a layout of up to two CTAs per SM, if there are many KV heads and more output tiles than CTAs.

    Two CTAs with KV tiles of 64 keys then read faster than one with 128, above all of short sequences. Nearly all are
    in lanes, of which there may be fewer than heads (docs/log/lean.md). CTAs are fewer where they cut nothing so.
    """
    is_due = shape.num_kv_heads >= MIN_HEADS_OF_TWO_CTAS and shape.num_output_tiles > 2 * sms
    is_able = shape.cols == 8 and not shape.uses_mma and 64 < shape.head_dim <= 128 and not shape.is_packed
    if not (is_due and is_able) or _is_short(shape, sms, is_static):
        return None
    num_ctas = even_ctas(shape, 2 * sms, is_static, ROWS, min_share=MIN_SHARE_OF_TWO_CTAS)
    config = LeanConfig(block_kv=ROWS, num_stages=2, num_ctas=num_ctas)
    smem_bytes = 2 * (max_smem_bytes(shape, config) + RESERVED_SMEM_BYTES)
    return config if smem_bytes <= shape.target.smem_bytes_per_sm else None


def _orders(shape: LeanShape, sms: int, is_short: bool):
    """Returns layouts `(CTAs per SM, keys of a KV tile, stages)`, of which the first that fits an SM is to be taken."""
    orders = ((2, 128, 2), (2, 64, 2), (1, 64, 2)) if shape.head_dim <= 64 else ((2, 64, 2), (1, 64, 2))
    if shape.cols == 8 and shape.num_output_tiles > 2 * sms:
        # Where two stages leave no room for a second CTA: many output tiles gain more by it than by a second stage.
        orders = *orders[:-1], (2, 64, 1), orders[-1]
    if shape.cols > MAX_COLS_OF_TWO_CTAS:  # one CTA: with 64 keys at a time too few bytes are on their way
        has_large_tiles = shape.head_dim <= 64 and shape.cols <= MAX_COLS_OF_128_KEYS and not is_short
        return ((1, 128, 2), orders[-1]) if has_large_tiles else orders[-1:]
    return ((3, 64, 2), *orders) if is_short and shape.cols == 8 else orders


def _mma_orders(shape: LeanShape, sms: int, is_short: bool):
    """Returns the same for products by `mma.sync`. A KV tile of widened K and V is half as large, so there are more."""
    accumulators = shape.cols * shape.padded_head_dim
    is_in_small_pages = shape.page_size is not None and shape.page_size % 128 > 0
    # To widen without the instruction, and for more addresses than newer GPUs need.
    takes_registers = not shape.target.has_float8 and (shape.is_widened or shape.cols > 8)
    ctas_per_sm = (2, 1) if accumulators <= MAX_WIDENED_OF_TWO_CTAS and not takes_registers else (1,)
    slots = shape.num_slots * (1 if shape.is_packed else shape.batch)  # packed, they are those of all sequences
    num_keys = slots * shape.output_tiles_per_sequence
    has_many = not shape.target.is_hopper or num_keys >= MIN_KV_TILES_OF_128_KEYS * 128 * ctas_per_sm[0] * sms
    is_large = shape.is_widened and has_many and accumulators <= MAX_WIDENED_OF_128_KEYS
    is_large &= not (is_short or is_in_small_pages)
    stages = (3, 2) if not shape.is_widened else (4, 2) if has_many else (2,)
    orders = itertools.product(ctas_per_sm, (128, 64) if is_large else (64,), stages)
    return *orders, (1, 64, 1)


def _is_short(shape: LeanShape, sms: int, is_static: bool) -> bool:
    """Returns whether output tiles are so short that none is cut, however many CTAs there are.

    They have one KV tile, or two that the schedule leaves whole; four, if there are many output tiles for each CTA. A
    schedule that is known when compiling has equal runs, which may cut output tiles of two.
    """
    most_kv_tiles = 1 if is_static else MIN_KV_TILES_PER_RUN
    if not (is_static or shape.uses_mma) and shape.cols == 8 and shape.num_output_tiles >= MANY_FOR_SHORT * 3 * sms:
        most_kv_tiles = MAX_SHORT_KV_TILES
    return shape.num_slots <= most_kv_tiles * ROWS and not shape.is_packed


def even_ctas(
    shape: LeanShape, ctas: int, is_static: bool, block_kv: int | None = None, min_share: float = MIN_SHARE_OF_CTAS
) -> int:
    """Returns at most `ctas`: a multiple of many lanes, which cuts output tiles of equal length alike.

    So at any moment CTAs read the same keys of many heads, which memory serves faster (docs/log/lean.md). With
    `block_kv`, and if the schedule is known when compiling, none is cut where a merge would take longer. Lanes
    have at least `min_share` of the CTAs, or fewer where that is known to be faster.
    """
    per_sequence = shape.output_tiles_per_sequence
    divisors = (n for n in range(min(per_sequence, ctas), 0, -1) if per_sequence % n == 0)
    lanes = next(n for n in divisors if ctas // n * n >= min_share * ctas)
    runs = ctas // lanes
    if is_static or shape.batch == 1:
        kv_tiles = -(-shape.num_slots // block_kv) if is_static and block_kv else None
        runs = even_runs(shape, lanes, runs, kv_tiles, min_share)
    return lanes * runs


def even_runs(
    shape: LeanShape, lanes: int, runs: int, kv_tiles: int | None = None, min_share: float = MIN_SHARE_OF_CTAS
) -> int:
    """Returns at most `runs`, such that output tiles of equal length, as those of one sequence, are cut alike.

    Args:
      runs: of each lane.
      kv_tiles: of each output tile, where none is to be cut if a merge would take longer than a longer run.
      min_share: of the runs, at least; fewer where that is known to be faster.
    """
    output_tiles = shape.num_output_tiles // lanes
    whole = -(-output_tiles // runs)  # output tiles of a run, if none is cut
    of_whole = -(-output_tiles // whole)
    even = output_tiles * (runs // output_tiles) if output_tiles <= runs else of_whole
    is_enough = even >= min_share * runs or _gains_by_fewer_sms(shape, lanes * runs, lanes * even)
    chosen = even if is_enough else runs
    if kv_tiles is not None and output_tiles % of_whole == 0:
        longest_cut = longest_run(output_tiles * kv_tiles, chosen)
        return of_whole if whole * kv_tiles <= longest_cut + MERGE_KV_TILES else chosen
    return chosen


def _gains_by_fewer_sms(shape: LeanShape, ctas: int, even: int) -> bool:
    """Returns whether `even` of at most `ctas` CTAs read faster because they cut output tiles alike.

    Output tiles are cut, and each SM has one CTA at most: where some had two, those with one would end early. It was
    measured where heads are narrow and reading is all that takes time.
    """
    is_narrow = shape.cols == 8 and shape.head_dim <= 64 and not shape.uses_mma
    sms = num_sms()
    return is_narrow and shape.num_output_tiles < even and ctas <= sms and even >= MIN_SHARE_OF_SMS * sms


def num_sms() -> int:
    """Returns the streaming multiprocessors of the first local GPU; an H200's where there is none."""
    device = jax.local_devices()[0]
    return device.core_count if device.platform == "gpu" else DEFAULT_SMS


def device_kind() -> str:
    """Returns the device kind of the first local device, e.g. "NVIDIA H200": its key in the table."""
    return jax.local_devices()[0].device_kind


@functools.cache
def _table() -> dict[str, dict[str, dict[str, int]]]:
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


def write_table(device: str, entries: dict[str, dict[str, int]]) -> None:
    """Adds entries for `device`: `table_key` -> `block_kv`, `num_stages`, `ctas_per_sm` (`scripts/tune_lean.py`)."""
    table = dict(_table()) | {device: _table().get(device, {}) | entries}
    TABLE.write_text(json.dumps(table, indent=2, sort_keys=True) + "\n")
    _table.cache_clear()
