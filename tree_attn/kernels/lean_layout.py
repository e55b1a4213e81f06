"""The static part of a call of LeanAttention's kernels, what is tuned of it, and where its partial states lie."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from tree_attn.kernels.schedule import (
    MIN_KV_TILES_PER_RUN,
    num_runs,
    partials_of_output_tile,
    quotient,
    remainder,
)
from tree_attn.kernels.targets import HOPPER, Target

HEAD_DIMS = (64, 80, 96, 128, 256)
MANY_QUERY_HEAD_DIMS = (64, 128, 256)
MANY_QUERY_GROUPS = (1, 2, 4, 8)  # query heads that share a block's rows; moving queries of 16 takes more registers
MAX_QUERIES, MAX_GROUP = 8, 16
# With more query columns the many-query kernel is as fast or faster, if all of a sequence's queries see the same keys.
MAX_LEAN_COLUMNS = 32
MIN_KV_TILES_OF_ROWS = 32  # with which up to 48 columns of few queries are faster so too
# Of a sequence, with which two streams are faster than one for head dims of 128; for 64 they always are.
MAX_SLOTS_OF_STREAMS = 512
MAX_SPARE_COLUMNS = 48  # query columns with which the lean kernel has registers to spare; with 56 more of it spills
SLOT_MULTIPLE = 8  # K and V lie in shared memory in groups of 8 slots
# Slots; an output tile's last KV tile is read up to a multiple of them. The finer one takes code, for which few output
# tiles of each CTA do not make up (docs/log/lean.md).
GRAIN, FINE_GRAIN = 16, SLOT_MULTIPLE
OUTPUT_TILES_OF_FINE_GRAIN = 4  # of a CTA, of head dims from 128 on
MIN_GATHERED_PAGE = 16  # keys
ROWS = 64  # of a tensor core's left operand
MANY_QUERY_ROWS = 2 * ROWS  # that a CTA of the many-query kernel has at once; the lean kernel has at most 64 columns

# Columns of the table of sequences.
FIRST_SLOT, NUM_KV_TILES, OFFSET, SPAN_START, SPAN_END, MAX_RUNS, ARE_WHOLE = range(7)
# Further ones where each query row has slots of its own: what all of them see.
SHARED_START, SHARED_END = range(7, 9)
# Columns of the table of runs, after those of `schedule.run_table`: of the sequence in which a run begins.
RUN_FIRST_SLOT, RUN_NUM_KV_TILES, RUN_SPAN_END = range(4, 7)


def gathers(page_size: int) -> bool:
    """Returns whether TMA copies a KV tile from several pages of so many keys: a copy for each, 4 or 2 of 64 keys."""
    return page_size % MIN_GATHERED_PAGE == 0 and ROWS % page_size == 0 and page_size < ROWS


def is_many_query(num_queries: int, group: int) -> bool:
    """Returns whether the many-query kernel is the faster one: empty rows of its blocks cost as much as full ones."""
    return num_queries > MAX_QUERIES and num_queries * group > MAX_LEAN_COLUMNS


def is_few_query_rows(
    num_queries: int, group: int, head_dim: int, is_widened: bool, target: Target, kv_tiles: float = 0
) -> bool:
    """Returns whether few queries are faster as the rows of the many-query kernel, in one block of them.

    Args:
      kv_tiles: of 128 slots, that an SM has. The merge is a launch of its own, as with `MAX_SPARE_COLUMNS` it is not.
    """
    # With 256 head dims no register is left for what each row sees.
    is_able = target.is_hopper and not is_widened and head_dim in MANY_QUERY_HEAD_DIMS and head_dim <= 128
    max_lean_columns = MAX_LEAN_COLUMNS if kv_tiles >= MIN_KV_TILES_OF_ROWS else MAX_SPARE_COLUMNS
    return is_able and num_queries <= MAX_QUERIES and max_lean_columns < num_queries * group <= MANY_QUERY_ROWS


def rows_of_few_queries(num_queries: int, group: int, head_dim: int, num_slots: int) -> int:
    """Returns the rows of a block of few queries (`is_few_query_rows`): 64 where they fit and streams are faster.

    Two streams hide the wait for each next output tile. But their runs cut more output tiles, and the larger heads have
    KV tiles of 64 keys, which are read more slowly (docs/log/lean.md).

    Args:
      num_slots: of a sequence, of packed ones on average.
    """
    is_fast = head_dim < 128 or num_slots <= MAX_SLOTS_OF_STREAMS
    return ROWS if num_queries * group <= ROWS and is_fast else MANY_QUERY_ROWS


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeanConfig:
    """The tuned part of a call, per device.

    block_kv:    keys of a KV tile, a multiple of 64
    num_stages:  KV tiles of K, and of V, in flight per CTA, or per stream
    num_ctas:    CTAs, or streams of all CTAs where they have several, and so the most runs; the schedule is fair only
                 if all are resident at once
    short_runs:  runs that a lane may have even where each has a single KV tile
    """

    block_kv: int = 64
    num_stages: int = 3
    num_ctas: int = 264
    short_runs: int = 1

    def __post_init__(self):
        if self.block_kv < ROWS or self.block_kv % ROWS:
            raise ValueError(f"block_kv must be a multiple of {ROWS}, got {self.block_kv}")
        if self.num_stages < 1:
            raise ValueError(f"num_stages must be at least 1, got {self.num_stages}")
        if self.num_ctas < 1:
            raise ValueError(f"num_ctas must be at least 1, got {self.num_ctas}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeanShape:
    """The static part of a call, as the lean kernel and the many-query kernel see it.

    num_kv_heads:        KV heads
    col_blocks:          blocks of query columns per KV head
    cols:                query columns of a block, padded to a multiple of 8; rows in the many-query kernel
    mask:                "none"; "span": one range of slots per sequence; "columns": one range per query column, or
                         row
    num_slots:           slots per sequence, and the end of the span of a static schedule
    static_kv_tiles:     KV tiles of every output tile if known when compiling (no lengths, or no slots beyond the first
                         KV tile), else None
    page_size:           keys per page where K and V are paged, else None
    is_packed:           K and V hold all sequences end to end
    whole_output_tiles:  the table of runs cuts no output tile
    tokens:              queries of a block where queries stay `[B, T, N, H]`: columns are then (g, t) and
                         `cols = G * tokens`, or with `group` rows (t, g), `cols = tokens` of them; None where they are
                         folded to `[output tiles, columns, H]`, as (t, g)
    group:               G, where few queries are rows of the many-query kernel: threads copy the rows (t, g) of a KV
                         head from `[B, T, N, H]`, and write results there; else None
    dtype:               of the query, in which tensor cores multiply
    key_dtype:           of K and V as stored; float8_e4m3fn is widened in registers
    target:              what the GPU offers
    num_new:             of each sequence's last keys, those that the kernel before may have written: the lean kernel
                         reads others before that has ended; None where it reads none so
    prefix:              with whose states output tiles begin (`lean_prefix.Prefix`), or None
    """

    batch: int
    num_kv_heads: int
    col_blocks: int
    cols: int
    head_dim: int
    scale: float
    logits_soft_cap: float | None
    mask: str
    num_slots: int
    static_kv_tiles: int | None = None
    page_size: int | None = None
    is_packed: bool = False
    whole_output_tiles: bool = False
    tokens: int | None = None
    group: int | None = None
    dtype: Any
    key_dtype: Any
    target: Target = HOPPER
    num_new: int | None = None
    prefix: Any = None

    replace = dataclasses.replace

    @property
    def is_many_query(self) -> bool:
        """Query columns are the rows of a tensor core: the call is the many-query kernel's (`tall.py`)."""
        return self.cols == MANY_QUERY_ROWS or self.group is not None

    @property
    def streams(self) -> int:
        """Runs that a CTA has at once, each with warpgroups and shared memory of its own: two of blocks of 64 rows."""
        return MANY_QUERY_ROWS // self.cols if self.is_many_query else 1

    @property
    def query_places(self) -> int:
        """Queries that a stream holds at most: the next is copied while one is attended to, if there is room for it."""
        return 2 if not self.is_many_query or self.head_dim <= 128 else 1  # of 256 there is no room for two

    @property
    def is_widened(self) -> bool:
        """K and V are stored in a narrower dtype than the query's."""
        return self.key_dtype != self.dtype

    @property
    def uses_mma(self) -> bool:
        """Products are `mma.sync`'s (`mma.py`), not `wgmma`'s, which would need widened K and V in shared memory."""
        return self.is_widened or not self.target.is_hopper

    @property
    def is_gathered(self) -> bool:
        """A KV tile lies in several pages, from which TMA copies it."""
        return self.target.is_hopper and self.page_size is not None and gathers(self.page_size)

    @property
    def key_itemsize(self) -> int:
        """Bytes of an element of K and V."""
        return jnp.dtype(self.key_dtype).itemsize

    @property
    def output_tiles_per_sequence(self) -> int:
        """KV heads times blocks of query columns."""
        return self.num_kv_heads * self.col_blocks

    @property
    def num_output_tiles(self) -> int:
        """Output tiles of all sequences."""
        return self.batch * self.output_tiles_per_sequence

    @property
    def padded_head_dim(self) -> int:
        """Rows of O^T: V's columns, which a tensor core takes 64 at a time."""
        return -(-self.head_dim // 64) * 64


def max_smem_bytes(shape: LeanShape, config: LeanConfig) -> int:
    """Returns an upper bound on the shared memory of one CTA of the first kernel.

    `lean._attend_runs` and `tall_cta.tall_scratch` describe it.
    """
    itemsize = jnp.dtype(shape.dtype).itemsize
    kv_tile = config.block_kv * (shape.head_dim + shape.padded_head_dim)
    stages = config.num_stages * kv_tile * shape.key_itemsize
    queries = shape.cols * shape.query_places * shape.head_dim * itemsize
    if shape.is_many_query:
        return shape.streams * (stages + queries) + 2048
    states = 0
    if shape.target.is_hopper:
        states += shape.cols * (shape.padded_head_dim * itemsize + 4)
        if not has_whole_output_tiles(shape, config):
            states += shape.cols * (shape.padded_head_dim + 2) * 4
    if shape.uses_mma:
        states += shape.cols * (ROWS + 2) * 4 * 4 + 1024  # of four warps, in two arrays that are aligned
    else:
        queries += shape.cols * config.block_kv * itemsize
        states += -(-32 * shape.cols // 1024) * 1024  # of reductions over keys
    gaps = 2048 if shape.target.is_hopper else 1024  # of arrays that are aligned, and barriers
    gaps += 1024 if shape.target.is_hopper and not has_whole_output_tiles(shape, config) else 0
    return stages + queries + states + gaps


def padding_bytes(shape: LeanShape, config: LeanConfig, ctas_per_sm: int) -> int:
    """Returns the shared memory to be left empty by each CTA, so that no more than `ctas_per_sm` fit an SM."""
    kv_tile = config.block_kv * (shape.head_dim + shape.padded_head_dim) * shape.key_itemsize
    wanted = shape.target.smem_bytes_per_sm // (ctas_per_sm + 1) - config.num_stages * kv_tile
    room = shape.target.smem_bytes_per_sm // ctas_per_sm - 1024 - max_smem_bytes(shape, config)
    return max(0, min(wanted, room))


def grain_of(shape: LeanShape, config: LeanConfig) -> int:
    """Returns the slots of which a multiple is read of an output tile's last KV tile."""
    has_many = shape.num_output_tiles >= OUTPUT_TILES_OF_FINE_GRAIN * config.num_ctas
    return FINE_GRAIN if has_many and shape.head_dim >= 128 and not shape.uses_mma else GRAIN


def has_whole_output_tiles(shape: LeanShape, config: LeanConfig) -> bool:
    """Returns whether it is known when compiling that no run ends within an output tile: nothing is merged then."""
    if shape.static_kv_tiles is None:
        return shape.whole_output_tiles
    _, runs = static_runs(shape, config)
    return shape.static_kv_tiles == 1 or shape.num_output_tiles // lanes(shape, config) % runs == 0


def lanes(shape: LeanShape, config: LeanConfig) -> int:
    """Returns L, the number of lanes: output tile `i` is number `i // L` of lane `i % L`, and so is a CTA's run.

    Each lane has its own CTAs and all lanes are cut alike, because L divides the output tiles of a sequence and the
    CTAs. So at any moment L heads read the same keys, which memory serves faster than keys here and there.
    """
    if shape.cols > MAX_SPARE_COLUMNS and not shape.is_many_query:
        return 1  # no register is left to count by lanes
    return math.gcd(shape.output_tiles_per_sequence, config.num_ctas)


def static_runs(shape: LeanShape, config: LeanConfig) -> tuple[int, int]:
    """Returns how many KV tiles a lane has, and how many runs, where that is known when compiling."""
    count = lanes(shape, config)
    total = shape.num_output_tiles // count * shape.static_kv_tiles
    return total, num_runs(total, config.num_ctas // count, config.short_runs)


def num_partials(shape: LeanShape, config: LeanConfig) -> int:
    """Returns an upper bound on partial states: each run and each output tile ends at most one."""
    return config.num_ctas + shape.num_output_tiles


def most_partials(shape: LeanShape, config: LeanConfig, *, are_equal: bool = False) -> int:
    """Returns about how many partial states an output tile has at most, before it is known where runs begin.

    Args:
      are_equal: all output tiles have one length, though only the device may know it.
    """
    of_lane = lanes(shape, config)
    runs, output_tiles = config.num_ctas // of_lane, shape.num_output_tiles // of_lane
    if shape.static_kv_tiles is not None or are_equal:
        runs = -(-runs // output_tiles)
    most_kv_tiles = -(-shape.num_slots // config.block_kv)
    return min(runs, max(most_kv_tiles // MIN_KV_TILES_PER_RUN + 1, min(most_kv_tiles, config.short_runs)))


def partial_of(shape: LeanShape, config: LeanConfig, cta, output_tile):
    """Returns the number of a CTA's partial state of output tile number `output_tile`: lanes lie one after another."""
    count = lanes(shape, config)
    place, lane = quotient(output_tile, count), remainder(output_tile, count)
    return lane * _lane_partials(shape, config) + place + quotient(cta, count)


def partials_of(shape: LeanShape, config: LeanConfig, sequences_ref, output_tile):
    """Returns the first partial of `output_tile`, and how many it has."""
    count = lanes(shape, config)
    place, lane = quotient(output_tile, count), remainder(output_tile, count)
    if shape.static_kv_tiles is not None:
        kv_tiles = shape.static_kv_tiles
        first, (total, runs) = place * kv_tiles, static_runs(shape, config)
    else:
        per_sequence, last = shape.output_tiles_per_sequence // count, shape.batch - 1
        sequence, within = quotient(place, per_sequence), remainder(place, per_sequence)
        kv_tiles = sequences_ref[sequence, NUM_KV_TILES]
        first = sequences_ref[sequence, OFFSET] + within * kv_tiles
        total = sequences_ref[last, OFFSET] + per_sequence * sequences_ref[last, NUM_KV_TILES]
        runs = num_runs(total, sequences_ref[last, MAX_RUNS], config.short_runs)
    first_partial, number = partials_of_output_tile(place, first, kv_tiles, total, runs)
    if shape.static_kv_tiles is None:
        number = jnp.where(sequences_ref[last, ARE_WHOLE] > 0, 1, number)  # that one is no partial
    return lane * _lane_partials(shape, config) + first_partial, number


def _lane_partials(shape: LeanShape, config: LeanConfig) -> int:
    """Returns an upper bound on the partial states of a lane."""
    return num_partials(shape, config) // lanes(shape, config)


def partial_spans(shape: LeanShape, config: LeanConfig, tables):
    """Returns the partials of each output tile, int32 `[output tiles, 2]`: the first, and one past the last."""
    count = shape.num_output_tiles
    if shape.static_kv_tiles is not None:  # on the host: XLA would compute it again at every step
        spans = [partials_of(shape, config, None, output_tile) for output_tile in range(count)]
        return jnp.asarray(np.array([(first, first + number) for first, number in spans], np.int32))
    first, number = partials_of(shape, config, tables["sequences"], jnp.arange(count, dtype=jnp.int32))
    return jnp.stack([first, first + number], axis=1)
