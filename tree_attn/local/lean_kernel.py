"""LeanAttention on Hopper as two Mosaic GPU kernels: partial states by equal runs of KV tiles, then their merge.

The shape of the first kernel, `_attend_runs`, per CTA:
- one warpgroup moves (TMA), one computes; K and V have barriers of their own, so that a slot's K refills while its V is
  in use;
- operands are swapped, S^T = K Q^T and O^T = V^T P^T, so that the 64 rows a tensor core wants are keys, and the few
  query columns of a decode step (T x G) are padded to a multiple of 8 only;
- the CTA walks its run over the rows it touches and leaves one unnormalised partial `(acc, max, sum)` for each.
`_merge_partials` folds each row's partials in a fixed order, so results are the same to the bit in every run. Why it is
a launch of its own and not the end of the first: docs/log.md. Where every run is known to hold whole rows, there is
nothing to merge: the first kernel writes the results, and is the only one. Nor is there a second where an exchange with
other devices ends the first (`tree_attn/reduce/epilogue_kernel.py`).

Inside, logits are in base 2: `exp2(x log2 e)` is one instruction. Shapes are in comments: `kv` keys of a tile, `cols`
query columns, H head dim (Hp: padded to 64).
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.schedule import MIN_TILES_PER_RUN, num_runs, partials_of_row, run_start

LOG2_E = math.log2(math.e)
# A finite stand-in for -inf: exp2(LOWEST - LOWEST) is 1, where -inf - -inf would be NaN.
LOWEST = float(np.finfo(np.float32).min)
SMEM_BYTES_PER_SM = 227 * 1024
RESERVED_SMEM_BYTES = 1024  # per CTA, by the hardware
MERGE_HEAD_DIMS = 64  # of one merging CTA
MIN_BLOCK_KV = 64  # rows that a tensor core takes
TALL_ROWS = 128  # query columns of a block where they are the rows of the tensor core; else there are at most 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeanConfig:
    """What is tuned per device: tile size, pipeline depth, CTAs.

    block_kv:    keys per tile, a multiple of 64
    num_stages:  tiles of K and of V in flight per CTA
    num_ctas:    runs at most; all must be resident at once for the schedule to be fair
    """

    block_kv: int = 64
    num_stages: int = 3
    num_ctas: int = 264

    def __post_init__(self):
        if self.block_kv < MIN_BLOCK_KV or self.block_kv % MIN_BLOCK_KV:
            raise ValueError(f"block_kv must be a multiple of {MIN_BLOCK_KV}, got {self.block_kv}")
        if self.num_stages < 2:
            raise ValueError(f"num_stages must be at least 2, got {self.num_stages}")
        if self.num_ctas < 1:
            raise ValueError(f"num_ctas must be at least 1, got {self.num_ctas}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeanShape:
    """The static part of a call, as both kernels see it.

    rows_per_sequence: KV heads times blocks of query columns; block_cols of the latter per head
    cols:              query columns of a block, padded to a multiple of 8
    static_tiles:      tiles of every row if that is known when compiling (no lengths, or no slots beyond the first
                       tile), else None
    mask:              "none"; "span": one range of slots per sequence; "columns": one per query column
    num_slots:         slots per sequence, what ends the span of a static schedule
    page_size:         keys per page where K and V are paged, else None
    is_packed:         K and V hold all sequences end to end
    whole_rows:        the table of runs cuts no row
    """

    batch: int
    num_kv_heads: int
    col_blocks: int
    cols: int
    head_dim: int
    scale: float
    soft_cap: float | None
    mask: str
    num_slots: int
    static_tiles: int | None = None
    page_size: int | None = None
    is_packed: bool = False
    whole_rows: bool = False
    dtype: Any  # of the query, in which tensor cores multiply
    key_dtype: Any  # of K and V as stored; float8_e4m3fn is widened in registers

    replace = dataclasses.replace

    @property
    def is_tall(self) -> bool:
        """Of the kernel that takes query columns for rows (`tall_kernel.py`)."""
        return self.cols == TALL_ROWS

    @property
    def is_short(self) -> bool:
        """Whether a sequence has so few slots that a row is no more than what a run has at the least."""
        return self.num_slots <= MIN_TILES_PER_RUN * MIN_BLOCK_KV and not self.is_packed

    @property
    def is_widened(self) -> bool:
        return self.key_dtype != self.dtype

    @property
    def rows_per_sequence(self) -> int:
        return self.num_kv_heads * self.col_blocks

    @property
    def num_rows(self) -> int:
        return self.batch * self.rows_per_sequence

    @property
    def padded_head_dim(self) -> int:
        """V's columns are rows of O^T, which a tensor core takes 64 at a time."""
        return -(-self.head_dim // 64) * 64


# Columns of the table of sequences.
FIRST_SLOT, NUM_TILES, OFFSET, SPAN_START, SPAN_END = range(5)


def smem_bytes(shape: LeanShape, config: LeanConfig) -> int:
    """Shared memory of one CTA of the first kernel."""
    itemsize = jnp.dtype(shape.dtype).itemsize
    tile = config.block_kv * (shape.head_dim + shape.padded_head_dim)
    stages = config.num_stages * tile * jnp.dtype(shape.key_dtype).itemsize + shape.is_widened * tile * itemsize
    queries = shape.cols * (shape.head_dim + config.block_kv) * itemsize
    results = shape.cols * (shape.padded_head_dim + 2) * 4
    return stages + queries + results + scratch_bytes(shape) + 1024


# Jitted, as the other kernels are: the layers of a program then share what takes two seconds to lower and compile.
@functools.partial(jax.jit, static_argnames=("shape", "config"))
def lean_attention(query, key, value, *, shape: LeanShape, config: LeanConfig, **tables):
    """Runs both kernels; every check is the caller's.

    Args:
      query: `[rows, G', H]` with `G' <= cols`: the query columns of each row.
      key, value: `[B, S, K, H]`, S a multiple of 8; `[1, total, K, H]` if packed; `[pages, page_size, K, H]` if paged.
      tables: of these, those that are not None:
        sequences: int32 `[B, 5]` (first slot, tiles per row, tiles before, first and end of the visible slots), or None
          where all slots are visible, so that `shape.static_tiles` is known.
        runs: int32 `[num_ctas, 4]` from `tree_attn.schedule.run_table`, or None if `shape.static_tiles`.
        columns: int32 `[2, B, col_blocks * cols]`, first and end visible slot per query column, if `mask="columns"`.
        pages: int32 `[B, pages per sequence]`, if paged.
        scales: float32 `[2, K]`, what K and V of each head are to be multiplied by, or None.
    Returns:
      out `[rows, G', H]` in the dtype of `query`, lse float32 `[rows, cols]`.
    """
    attended = _launch_runs(query, key, value, tables, shape, config)
    if has_whole_rows(shape, config):
        return attended
    sequences = tables.get("sequences")
    groups = _merge_warpgroups(shape, config)
    return launch(
        functools.partial(_merge_partials, groups, shape, config),
        out_type=_results(query, shape),
        grid=(shape.num_rows, shape.padded_head_dim // MERGE_HEAD_DIMS),
        grid_names=("row", "head_dims"),
        num_threads=groups,
        thread_name="warpgroup",
        scratch_bytes=scratch_bytes(shape),
        name="lean_merge",
    )(*attended, *(() if sequences is None else (sequences,)))


@functools.partial(jax.jit, static_argnames=("shape", "config", "epilogue", "result"))
def lean_exchange(query, key, value, rank, *, shape: LeanShape, config: LeanConfig, epilogue, result, **tables):
    """`lean_attention` of rows that runs cut, merged with the states of other devices, in one launch.

    Args:
      epilogue: takes partials as they are left, and merges (`tree_attn.reduce.epilogue_kernel.Epilogue`).
      rank: what it takes by this name, int32 `[1]` or None.
    Returns:
      out, like `result`: `[rows, columns, H]`; lse float32 `[rows, columns]`.
    """
    tables |= {"spans": spans_of_rows(shape, config, tables), "rank": rank}
    lse = jax.ShapeDtypeStruct(result.shape[:-1], jnp.float32)
    return _launch_runs(query, key, value, tables, shape, config, (result, lse), epilogue)


def spans_of_rows(shape: LeanShape, config: LeanConfig, tables):
    """Which partials are of a row, int32 `[rows, 2]`: from the first up to the second."""
    if shape.static_tiles is not None:  # on the host: XLA would compute it again at every step
        spans = [partials_of(shape, config, None, row) for row in range(shape.num_rows)]
        return jnp.asarray(np.array([(first, first + count) for first, count in spans], np.int32))
    first, count = partials_of(shape, config, tables["sequences"], jnp.arange(shape.num_rows, dtype=jnp.int32))
    return jnp.stack([first, first + count], axis=1)


def num_partials(shape: LeanShape, config: LeanConfig) -> int:
    """That runs leave at most: one at every CTA's end and one at every row's."""
    return config.num_ctas + shape.num_rows


def _launch_runs(query, key, value, tables, shape: LeanShape, config: LeanConfig, results=None, epilogue=None):
    """The first kernel: `results` of its `epilogue`, or where it leaves whole rows; else partial states.

    These are float32 `[partials, Hp, cols]`, sums of values weighted by `2^(x - max)`, x logits in base 2, and
    `[partials, 2, cols]`, max, and the sum of those weights.
    """
    tables = {name: table for name, table in tables.items() if table is not None}
    partials = (
        jax.ShapeDtypeStruct((num_partials(shape, config), shape.padded_head_dim, shape.cols), jnp.float32),
        jax.ShapeDtypeStruct((num_partials(shape, config), 2, shape.cols), jnp.float32),
    )
    results = results or (_results(query, shape) if has_whole_rows(shape, config) else partials)
    return launch(
        functools.partial(_attend_runs, tuple(tables), shape, config, epilogue),
        out_type=results,
        grid=(config.num_ctas,),
        grid_names=("cta",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_bytes=scratch_bytes(shape),
        name="lean_attention" if epilogue is None else "lean_exchange",
    )(query, key, value, *tables.values())


def _results(query, shape: LeanShape):
    lse = jax.ShapeDtypeStruct((shape.num_rows, shape.cols), jnp.float32)
    return jax.ShapeDtypeStruct(query.shape, query.dtype), lse


def has_whole_rows(shape: LeanShape, config: LeanConfig) -> bool:
    """Whether no run ends within a row, as far as is known when compiling."""
    if shape.static_tiles is None:
        return shape.whole_rows
    runs = num_runs(shape.num_rows * shape.static_tiles, config.num_ctas)
    return shape.static_tiles == 1 or shape.num_rows % runs == 0


def launch(body, *, scratch_bytes: int, name: str, **options):
    params = plgpu.CompilerParams(
        approx_math=True,  # ex2.approx and lg2.approx: 2 ulp, far below what bf16 products leave
        reduction_scratch_bytes=scratch_bytes,
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
    )
    body.__name__ = name
    return plgpu.kernel(body, compiler_params=params, kernel_name=name, **options)


def _merge_warpgroups(shape: LeanShape, config: LeanConfig) -> int:
    """Few rows have many partials each, which four warpgroups share; many rows need their registers for one another."""
    most = 4 if shape.cols <= 48 else 2  # with 64 columns, four warpgroups spill
    return most if shape.num_rows * shape.padded_head_dim // MERGE_HEAD_DIMS <= config.num_ctas else 1


def scratch_bytes(shape: LeanShape) -> int:
    return 4 * 4 * 8 * shape.cols


def tiling(dtype, elements: int):
    """The widest swizzle whose tiles divide a row of `elements`; none fits 80 bytes."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = next((s for s in (128, 64, 32) if elements * itemsize % s == 0), None)
    if swizzle is None:
        return ()
    return plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)


def _attend_runs(names, shape: LeanShape, config: LeanConfig, epilogue, query_ref, key_ref, value_ref, *refs):
    tables, outputs = dict(zip(names, refs)), refs[len(names) :]
    dtype, cols, block_kv, stages = shape.dtype, shape.cols, config.block_kv, config.num_stages
    # K, V and P meet in the tensor core with one swizzle, and P is a tile of `block_kv` keys.
    swizzled = tiling(dtype, math.gcd(shape.head_dim, block_kv))
    smem = functools.partial(plgpu.SMEM, dtype=dtype, transforms=swizzled)
    stored = functools.partial(plgpu.SMEM, dtype=shape.key_dtype, transforms=tiling(shape.key_dtype, shape.head_dim))
    stored = stored if shape.is_widened else smem
    widened = {}
    if shape.is_widened:
        widened = {"wide_key": smem((block_kv, shape.head_dim)), "wide_value": smem((block_kv, shape.padded_head_dim))}
    if has_whole_rows(shape, config):
        left = {
            "acc_smem": smem((cols, shape.padded_head_dim), transforms=tiling(dtype, math.gcd(shape.head_dim, 64))),
            "stats_smem": plgpu.SMEM((cols,), jnp.float32),
        }
    elif epilogue is not None:
        left = {}
    else:
        left = {
            "acc_smem": plgpu.SMEM((shape.padded_head_dim, cols), jnp.float32),
            "stats_smem": plgpu.SMEM((2, cols), jnp.float32),
        }
    pl.run_scoped(
        functools.partial(
            _attend_runs_scoped, tables, shape, config, epilogue, query_ref, key_ref, value_ref, *outputs
        ),
        query_smem=smem((cols, shape.head_dim)),
        key_smem=stored((stages, block_kv, shape.head_dim)),
        value_smem=stored((stages, block_kv, shape.padded_head_dim)),
        weights_smem=smem((cols, block_kv)),
        query_full=plgpu.Barrier(),
        query_free=plgpu.Barrier(),
        key_full=plgpu.Barrier(num_barriers=stages),
        key_free=plgpu.Barrier(num_barriers=stages),
        value_full=plgpu.Barrier(num_barriers=stages),
        value_free=plgpu.Barrier(num_barriers=stages),
        **left,
        **widened,
        collective_axes="warpgroup",
    )


def _attend_runs_scoped(
    tables, shape: LeanShape, config: LeanConfig, epilogue, query_ref, key_ref, value_ref, *outputs,
    query_smem, key_smem, value_smem, weights_smem, query_full, query_free, key_full, key_free, value_full, value_free,
    acc_smem=None, stats_smem=None, wide_key=None, wide_value=None,
):  # fmt: skip
    block_kv, stages, cols = config.block_kv, config.num_stages, shape.cols
    padded = shape.padded_head_dim
    dynamic_zero = lax.axis_index("cta") * 0
    run = run_of_cta(tables, shape, config)

    @pl.when(lax.axis_index("warpgroup") == 1)
    def _move():
        def move_query(row):
            # G' may be less than cols: what lies out of bounds is filled with zeros.
            plgpu.copy_gmem_to_smem(query_ref.at[row.index, pl.ds(dynamic_zero, cols)], query_smem, query_full)

        barriers = Barriers(query_free, key_full, key_free, value_full, value_free)
        move_tiles(tables, shape, config, run, move_query, (key_ref, value_ref), (key_smem, value_smem), barriers)

    @pl.when(lax.axis_index("warpgroup") == 0)
    def _compute():
        per_column = plgpu.Layout.WGMMA.reduce(0)
        step = None if epilogue is None else epilogue.begin(tables.get("rank"))

        def segment(row, begin):
            plgpu.barrier_wait(query_full)
            first, end = visible_slots(tables, shape, row, (block_kv, cols), per_column)
            key_scale, value_scale = (tables["scales"][i, row.head] if "scales" in tables else None for i in range(2))

            def tile_step(i, carry):
                acc, top, total = carry
                tile = begin.tiles_done + i
                slot = lax.rem(tile, stages)
                is_refilled = tile + stages < run.num_tiles  # else nobody waits for it

                plgpu.barrier_wait(key_full.at[slot])

                keys = _operand(key_smem.at[slot], wide_key)

                def products(acc_ref):
                    plgpu.wgmma(acc_ref, keys, query_smem.transpose((1, 0)))
                    return acc_ref[...]

                logits = pl.run_scoped(products, plgpu.ACC((block_kv, cols), jnp.float32))  # [kv, cols]

                @pl.when(is_refilled)
                def _():
                    plgpu.barrier_arrive(key_free.at[slot])

                logits = scaled_logits(logits, shape, key_scale)
                if shape.mask != "none":
                    slots = plgpu.broadcasted_iota(jnp.int32, (block_kv, cols), 0, layout=plgpu.Layout.WGMMA)
                    slots = slots + (row.first_slot + (begin.tile + i) * block_kv)
                    logits = jnp.where((slots >= first) & (slots < end), logits, -jnp.inf)
                new_top = jnp.maximum(top, logits.max(axis=0))  # [cols]
                decay = jnp.exp2(top - new_top)
                weights = jnp.exp2(logits - _spread(new_top, logits.shape))
                # Summed over keys at the end only: a sum over keys crosses warps.
                total = total * _spread(decay, total.shape) + weights  # [kv, cols]
                store_transposed(weights_smem, weights.astype(shape.dtype))
                plgpu.commit_smem()

                plgpu.barrier_wait(value_full.at[slot])
                values = _operand(value_smem.at[slot], wide_value)

                def weighted(acc_ref):
                    plgpu.wgmma(acc_ref, values.transpose((1, 0)), weights_smem.transpose((1, 0)))
                    return acc_ref[...]

                update = pl.run_scoped(weighted, plgpu.ACC((padded, cols), jnp.float32))  # [Hp, cols]

                @pl.when(is_refilled)
                def _():
                    plgpu.barrier_arrive(value_free.at[slot])

                return acc * _spread(decay, acc.shape) + update, new_top, total

            empty = (
                full(0.0, (padded, cols), plgpu.Layout.WGMMA),
                full(LOWEST, (cols,), per_column),
                full(0.0, (block_kv, cols), plgpu.Layout.WGMMA),
            )
            acc, top, total = lax.fori_loop(0, begin.num_tiles, tile_step, empty)

            @pl.when(begin.tiles_done + begin.num_tiles < run.num_tiles)
            def _():
                plgpu.barrier_arrive(query_free)

            acc = acc if value_scale is None else acc * value_scale
            partial = lax.axis_index("cta") + row.index
            if epilogue is not None:
                columns = outputs[0].shape[1]
                epilogue.leave(tables.get("rank"), step, partial, acc, top, total.sum(axis=0), columns)
                return
            accs_ref, stats_ref = outputs
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last segment's partial has left
            if has_whole_rows(shape, config):
                finish(acc, top, total.sum(axis=0), acc_smem, stats_smem)
                # What lies out of bounds, columns beyond G' and head dims beyond H, is not written.
                columns, head_dims = pl.ds(dynamic_zero, cols), pl.ds(dynamic_zero, padded)
                acc_gmem, stats_gmem = accs_ref.at[row.index, columns, head_dims], stats_ref.at[row.index]
            else:
                acc_smem[...] = acc
                stats_smem[0] = top
                stats_smem[1] = total.sum(axis=0)
                plgpu.commit_smem()
                acc_gmem, stats_gmem = accs_ref.at[partial], stats_ref.at[partial]
            plgpu.copy_smem_to_gmem(acc_smem, acc_gmem)
            plgpu.copy_smem_to_gmem(stats_smem, stats_gmem)

        walk(run, tables, shape, segment)
        plgpu.wait_smem_to_gmem(0)
        if epilogue is not None:
            epilogue.end(tables.get("rank"), step, tables["spans"], *outputs, shape.padded_head_dim)


class Barriers(NamedTuple):
    """What the moving warpgroup and those that compute wait for; of K and V one per stage."""

    query_free: Any
    key_full: Any
    key_free: Any
    value_full: Any
    value_free: Any


def move_tiles(tables, shape: LeanShape, config: LeanConfig, run: "_Run", move_query, refs, smems, barriers) -> None:
    """The moving warpgroup: the query of every row that the run touches, and all tiles of its keys and values.

    Args:
      move_query: of a row, begins the copy of its query.
      refs, smems: of keys and of values.
    """
    (key_ref, value_ref), (key_smem, value_smem) = refs, smems
    query_free, key_full, key_free, value_full, value_free = barriers
    block_kv, stages = config.block_kv, config.num_stages
    value_dims = value_smem.shape[-1]

    def segment(row, begin):
        @pl.when(begin.is_later)
        def _():
            plgpu.barrier_wait(query_free)

        move_query(row)

        def tile_step(i, _):
            tile = begin.tiles_done + i
            slot = lax.rem(tile, stages)
            where = _locate(tables, shape, row, row.first_slot + (begin.tile + i) * block_kv)
            is_refill = tile >= stages

            @pl.when(is_refill)
            def _():
                plgpu.barrier_wait(key_free.at[slot])

            block, start, head = where
            rows = pl.ds(start, block_kv)
            plgpu.copy_gmem_to_smem(key_ref.at[block, rows, head], key_smem.at[slot], key_full.at[slot])

            @pl.when(is_refill)
            def _():
                plgpu.barrier_wait(value_free.at[slot])

            columns = slice(None) if value_dims == shape.head_dim else pl.ds(row.index * 0, value_dims)
            plgpu.copy_gmem_to_smem(value_ref.at[block, rows, head, columns], value_smem.at[slot], value_full.at[slot])

        lax.fori_loop(0, begin.num_tiles, tile_step, None)

    walk(run, tables, shape, segment)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """A CTA's run: where it begins and how many tiles it has (scalars in the kernel)."""

    sequence: Any
    row: Any  # within the sequence
    tile: Any  # within the row
    num_tiles: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Row:
    """One output row: its number, sequence, KV head, block of columns, and the slot its first tile begins at."""

    index: Any
    sequence: Any
    head: Any
    col_block: Any
    first_slot: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Segment:
    """A run's tiles within one row: the first of them, how many, and how many tiles of the run come before."""

    tile: Any
    num_tiles: Any
    tiles_done: Any
    is_later: Any  # not the run's first segment


def run_of_cta(tables, shape: LeanShape, config: LeanConfig) -> _Run:
    cta = lax.axis_index("cta")
    if shape.static_tiles is None:
        sequence, row, tile, num_tiles = (tables["runs"][cta, i] for i in range(4))
        return _Run(sequence=sequence, row=row, tile=tile, num_tiles=num_tiles)
    # All is known but the CTA's number: no table to wait for.
    total = shape.num_rows * shape.static_tiles
    runs = num_runs(total, config.num_ctas)
    start, end = run_start(cta, total, runs), run_start(cta + 1, total, runs)
    index = lax.div(start, shape.static_tiles)
    return _Run(
        sequence=lax.div(index, shape.rows_per_sequence),
        row=lax.rem(index, shape.rows_per_sequence),
        tile=lax.rem(start, shape.static_tiles),
        num_tiles=jnp.where(cta < runs, end - start, 0),
    )


def walk(run: _Run, tables, shape: LeanShape, segment) -> None:
    """Calls `segment(row, begin)` for every row that the run touches, in order."""

    def is_left(carry):
        return carry[3] < run.num_tiles

    def step(carry):
        sequence, row, tile, tiles_done = carry
        if shape.static_tiles is None:
            first_slot, row_tiles = (tables["sequences"][sequence, i] for i in (FIRST_SLOT, NUM_TILES))
        else:
            first_slot, row_tiles = 0, shape.static_tiles
        num_tiles = jnp.minimum(run.num_tiles - tiles_done, row_tiles - tile)
        segment(
            _Row(
                index=sequence * shape.rows_per_sequence + row,
                sequence=sequence,
                head=lax.div(row, shape.col_blocks),
                col_block=lax.rem(row, shape.col_blocks),
                first_slot=first_slot,
            ),
            _Segment(tile=tile, num_tiles=num_tiles, tiles_done=tiles_done, is_later=tiles_done > 0),
        )
        is_last_row = row == shape.rows_per_sequence - 1
        next_sequence = jnp.where(is_last_row, sequence + 1, sequence)
        return next_sequence, jnp.where(is_last_row, 0, row + 1), jnp.int32(0), tiles_done + num_tiles

    lax.while_loop(is_left, step, (run.sequence, run.row, run.tile, jnp.int32(0)))


def _locate(tables, shape: LeanShape, row: _Row, slot):
    """Where `key[block, start:]` holds a tile that begins at `slot` of the sequence: `(block, start, head)`."""
    if shape.page_size is not None:
        page = tables["pages"][row.sequence, lax.div(slot, shape.page_size)]
        return page, pl.multiple_of(lax.rem(slot, shape.page_size), 8), row.head
    return 0 if shape.is_packed else row.sequence, pl.multiple_of(slot, 8), row.head


def visible_slots(tables, shape: LeanShape, row: _Row, tile_shape=None, per_column=None):
    """First and end visible slot: scalars of the sequence, or `[kv, cols]` where each query column has its own."""
    if shape.mask == "none":
        return None, None
    if shape.mask == "span":
        if "sequences" not in tables:
            return 0, shape.num_slots
        return tuple(tables["sequences"][row.sequence, i] for i in (SPAN_START, SPAN_END))
    columns = pl.ds(pl.multiple_of(row.col_block * shape.cols, 8), shape.cols)
    refs = (tables["columns"].at[i, row.sequence, columns] for i in range(2))
    return tuple(lax.broadcast_in_dim(load(ref, per_column), tile_shape, [1]) for ref in refs)


def _operand(stored, wide):
    """K or V of a tile as the tensor core takes it: as stored, or widened to the query's dtype (exact for float8)."""
    if wide is None:
        return stored
    narrow = load(stored, plgpu.Layout.WGMMA_UPCAST_2X)
    # Hopper converts e4m3 to float16 only; bfloat16 goes by way of float32.
    wide[...] = (
        narrow.astype(wide.dtype) if wide.dtype == jnp.float16 else narrow.astype(jnp.float32).astype(wide.dtype)
    )
    plgpu.commit_smem()
    return wide


def scaled_logits(logits, shape: LeanShape, key_scale):
    """Base-2 logits: `log2(e) cap(scale key_scale x)`."""
    scale = shape.scale if key_scale is None else shape.scale * key_scale
    if shape.soft_cap is None:
        return logits * (scale * LOG2_E)
    # tanh(x) = 1 - 2 / (exp(2 x) + 1); the hardware's own tanh has 11 bits.
    grown = jnp.exp2(logits * (scale * (2 * LOG2_E / shape.soft_cap)))
    return (1.0 - 2.0 / (grown + 1.0)) * (shape.soft_cap * LOG2_E)


def _merge_partials(groups: int, shape: LeanShape, config: LeanConfig, accs_ref, stats_ref, *refs):
    sequences_ref, (out_ref, lse_ref) = (refs[0] if len(refs) == 3 else None), refs[-2:]
    pl.run_scoped(
        functools.partial(_merge_scoped, groups, shape, config, accs_ref, stats_ref, sequences_ref, out_ref, lse_ref),
        acc_smem=plgpu.SMEM((groups, MERGE_HEAD_DIMS, shape.cols), jnp.float32),
        stats_smem=plgpu.SMEM((groups, 2, shape.cols), jnp.float32),
        out_smem=plgpu.SMEM(
            (shape.cols, MERGE_HEAD_DIMS),
            out_ref.dtype,
            transforms=tiling(out_ref.dtype, math.gcd(shape.head_dim, MERGE_HEAD_DIMS)),
        ),
        lse_smem=plgpu.SMEM((shape.cols,), jnp.float32),
        written=plgpu.Barrier(num_arrivals=groups),
        collective_axes="warpgroup",
    )


def _merge_scoped(
    groups: int, shape: LeanShape, config: LeanConfig, accs_ref, stats_ref, sequences_ref, out_ref, lse_ref, *,
    acc_smem, stats_smem, out_smem, lse_smem, written,
):  # fmt: skip
    """Warpgroup i of n folds every n-th partial from the i-th; the first folds their results and writes them."""
    row, block, group = (lax.axis_index(name) for name in ("row", "head_dims", "warpgroup"))
    first, count = partials_of(shape, config, sequences_ref, row)
    head_dims = pl.ds(pl.multiple_of(block * MERGE_HEAD_DIMS, MERGE_HEAD_DIMS), MERGE_HEAD_DIMS)
    cols = shape.cols
    at_once = max(1, min(4 if groups > 1 else 8, 64 // cols))  # a dependent load takes longer than all arithmetic here

    def step(i, state):
        indices = [group + groups * (i * at_once + j) for j in range(at_once)]
        # Past the end the last partial is read again and weighs nothing.
        partials = [first + jnp.minimum(index, count - 1) for index in indices]
        refs = [(accs_ref.at[p, head_dims], stats_ref.at[p]) for p in partials]
        return _fold(state, refs, [jnp.where(index < count, 1.0, 0.0) for index in indices])

    rounds = lax.div(count + groups * at_once - 1, groups * at_once)
    acc, top, total = lax.fori_loop(0, rounds, step, _empty(cols))

    @pl.when((group > 0) & (group < count))
    def _():
        acc_smem[group] = acc
        stats_smem[group, 0] = top
        stats_smem[group, 1] = total

    plgpu.barrier_arrive(written)

    @pl.when(group == 0)
    def _():
        plgpu.barrier_wait(written)

        def others(i, state):
            return _fold(state, [(acc_smem.at[i], stats_smem.at[i])], [1.0])

        acc_all, top_all, total_all = lax.fori_loop(1, jnp.minimum(count, groups), others, (acc, top, total))
        finish(acc_all, top_all, total_all, out_smem, lse_smem)
        # What lies out of bounds, columns beyond G' and head dims beyond H, is not written.
        plgpu.copy_smem_to_gmem(out_smem, out_ref.at[row, pl.ds(row * 0, cols), head_dims])

        @pl.when(block == 0)
        def _():
            plgpu.copy_smem_to_gmem(lse_smem, lse_ref.at[row])

        plgpu.wait_smem_to_gmem(0)


def finish(acc, top, total, out_smem, lse_smem) -> None:
    """Leaves `acc / total` and `ln(total 2^top)` in shared memory, for a copy."""
    inverse = jnp.where(total > 0, 1.0 / total, 0.0)
    store_transposed(out_smem, (acc * _spread(inverse, acc.shape)).astype(out_smem.dtype))
    lse_smem[...] = jnp.where(total > 0, (top + jnp.log2(total)) * (1 / LOG2_E), -jnp.inf)
    plgpu.commit_smem()


def _fold(state, refs, weights):
    """Folds unnormalised partials, read from `refs` all at once, into `state`; each counts `weight` times, 0 or 1."""
    acc, top, total = state
    per_column = plgpu.Layout.WGMMA.reduce(0)
    accs = [load(acc_ref, plgpu.Layout.WGMMA) for acc_ref, _ in refs]
    tops = [load(stats_ref.at[0], per_column) for _, stats_ref in refs]
    totals = [load(stats_ref.at[1], per_column) for _, stats_ref in refs]
    new_top = functools.reduce(jnp.maximum, tops, top)
    decay = jnp.exp2(top - new_top)
    acc, total = acc * _spread(decay, acc.shape), total * decay
    for weight, part_acc, part_top, part_total in zip(weights, accs, tops, totals):
        decay = jnp.exp2(part_top - new_top) * weight
        acc, total = acc + part_acc * _spread(decay, acc.shape), total + part_total * decay
    return acc, new_top, total


def _empty(cols: int):
    """The empty partial: `(acc, top, total)`."""
    return (
        full(0.0, (MERGE_HEAD_DIMS, cols), plgpu.Layout.WGMMA),
        full(LOWEST, (cols,), plgpu.Layout.WGMMA.reduce(0)),
        full(0.0, (cols,), plgpu.Layout.WGMMA.reduce(0)),
    )


def load(ref, layout):
    index = () if jax.__version_info__ >= (0, 11) else ((),)  # JAX 0.10 insists on one, JAX 0.12 has none
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def store_transposed(ref, x):
    if jax.__version_info__ < (0, 11):  # knows one layout only that can be stored so
        x = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)
    ref.transpose((1, 0))[...] = x


def full(fill: float, shape, layout):
    return plgpu.layout_cast(jnp.full(shape, fill, jnp.float32), layout)


def _spread(x, shape):
    """`[cols]` to `[..., cols]`."""
    return lax.broadcast_in_dim(x, shape, [1])


def partials_of(shape: LeanShape, config: LeanConfig, sequences_ref, row):
    """First partial of `row`, and how many."""
    if shape.static_tiles is not None:
        total = shape.num_rows * shape.static_tiles
        runs = num_runs(total, config.num_ctas)
        return partials_of_row(row, row * shape.static_tiles, shape.static_tiles, total, runs)
    sequence, within = lax.div(row, shape.rows_per_sequence), lax.rem(row, shape.rows_per_sequence)
    row_tiles = sequences_ref[sequence, NUM_TILES]
    first = sequences_ref[sequence, OFFSET] + within * row_tiles
    last = shape.batch - 1
    total = sequences_ref[last, OFFSET] + shape.rows_per_sequence * sequences_ref[last, NUM_TILES]
    return partials_of_row(row, first, row_tiles, total, num_runs(total, config.num_ctas))
