"""A call of the lean kernel or the many-query kernel: planned from shapes and visible slots, then run.

`plan_call` chooses the kernel, its layout and its schedule. `LeanCall.run` launches, and merges with a state over other
keys and with other devices: within a kernel where that can be done, after it otherwise.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tree_attn.kernels import lean, lean_prefix, tall, targets, tuning
from tree_attn.kernels.lean_layout import (
    MANY_QUERY_GROUPS,
    MANY_QUERY_ROWS,
    MAX_QUERIES,
    ROWS,
    SLOT_MULTIPLE,
    LeanConfig,
    LeanShape,
    gathers,
    has_whole_output_tiles,
    is_few_query_rows,
    is_many_query,
    lanes,
    num_partials,
    rows_of_few_queries,
)
from tree_attn.kernels.query_layout import (
    QUERY_MULTIPLE,
    from_kernel_layout,
    is_padded,
    lse_from_kernel_layout,
    lse_to_kernel_layout,
    to_kernel_layout,
)
from tree_attn.kernels.schedule import (
    MERGE_KV_TILES,
    MIN_KV_TILES_PER_RUN,
    longest_run,
    run_table,
    sequence_offsets,
    whole_run_table,
)
from tree_attn.kernels.targets import Target
from tree_attn.state import SoftmaxState, merge_state

# Accumulators of a block of columns, with which a kernel that ends in an exchange spills no register; a quarter of
# them where keys and values are widened.
EXCHANGED_ACCUMULATORS = 4096
# The most with which two CTAs of such a kernel share an SM, of products by `mma.sync` and with lengths.
MAX_SHARED_ACCUMULATORS = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeanCall:
    """A planned call.

    query_shape:  `[B, T, N, H]`
    shape, config:  what the kernels are compiled for
    tables:  arrays by name, as `lean.lean_attention` takes them; None where there is none
    """

    query_shape: tuple[int, int, int, int]
    shape: LeanShape
    config: LeanConfig
    tables: dict[str, Any]

    @property
    def merges_partials(self) -> bool:
        """Runs cut output tiles, so that the kernels make partial states and merge them."""
        return not has_whole_output_tiles(self.shape, self.config)

    def run(self, query, key, value, *, merge_with: SoftmaxState | None = None, exchange=None) -> SoftmaxState:
        """Runs the kernels.

        Args:
          merge_with: a state over other keys, with which the result is merged, or None.
          exchange: merges with the states of other devices (`tree_attn.local.Exchange`), or None. It ends the kernel
            if it can; else it merges the kernel's result.
        """
        if exchange is not None and merge_with is None:
            result = self._result(query)
            epilogue = self._epilogue(exchange, result)
            if epilogue is not None:
                return self._state(
                    *lean.lean_exchange(
                        self._in_kernel_layout(query), key, value, exchange.rank, epilogue=epilogue,
                        result=result, shape=self.shape, config=self.config, **self.tables,
                    )
                )  # fmt: skip
        # Where queries are read in place, the merge of partial states takes one state more for little. One that would
        # have to be padded first is merged by XLA, in the kernel that drops the padding.
        merges_state = merge_with is not None and self.shape.tokens is not None and self.merges_partials
        merges_state = merges_state and not is_padded(self.query_shape, self.shape, self._query_multiple)
        tables = dict(self.tables)
        if merges_state:
            tables["merge_with"] = (
                self._in_kernel_layout(merge_with.out),
                lse_to_kernel_layout(merge_with.lse, self.shape),
            )
        attention = tall.tall_attention if self.shape.is_many_query else lean.lean_attention
        kernel_query = self._in_kernel_layout(query)
        state = self._state(*attention(kernel_query, key, value, shape=self.shape, config=self.config, **tables))
        if merge_with is not None and not merges_state:
            state = merge_state(state, merge_with)
        return state if exchange is None else exchange.merge(state)

    def why_not_after(self, prefix: "LeanCall") -> str | None:
        """Returns why `run_after` cannot be called with that prefix, or None."""
        if self.tables.get("scales") is not None or prefix.tables.get("scales") is not None:
            return "keys and values have scales"
        return self._prefix(prefix).why_not(self.shape, self.config)

    def run_after(self, prefix: "LeanCall", prefix_arrays, query, key, value) -> SoftmaxState:
        """Runs the kernels of a prefix, whose sequences are nodes, and of these sequences' own keys: over all keys.

        Args:
          prefix_arrays: query, key and value of `prefix`.
        """
        prefix_query, *others = prefix_arrays
        tables = {name: prefix.tables.get(name) for name in ("sequences", "runs")}
        leave = tall.tall_partials if prefix.shape.is_many_query else lean.lean_partials
        accs, stats = leave(
            prefix._in_kernel_layout(prefix_query), *others, shape=prefix.shape, config=prefix.config, **tables
        )
        after = {lean_prefix.ACCS: accs, lean_prefix.STATS: stats, lean_prefix.SEQUENCES: tables["sequences"]}
        shape = self.shape.replace(prefix=self._prefix(prefix))
        out = lean.lean_attention(
            self._in_kernel_layout(query), key, value, shape=shape, config=self.config, **self.tables, **after
        )
        return self._state(*out)

    def _prefix(self, prefix: "LeanCall") -> lean_prefix.Prefix:
        batch, num_queries, num_heads, _ = self.query_shape
        return lean_prefix.Prefix(
            shape=prefix.shape, config=prefix.config, share=batch // prefix.query_shape[0], num_queries=num_queries,
            group=num_heads // self.shape.num_kv_heads,
        )  # fmt: skip

    @property
    def _query_multiple(self) -> int:
        """Queries that the kernel takes a multiple of: the many-query kernel any number, where a merge follows it."""
        return 1 if self.shape.is_many_query and self.merges_partials else QUERY_MULTIPLE

    def _in_kernel_layout(self, query):
        """Returns `[B, T, N, H]`, a query or a result, as the kernel takes it."""
        return to_kernel_layout(query, self.shape, self._query_multiple)

    def _result(self, query) -> jax.ShapeDtypeStruct:
        """Returns the shape and dtype in which an exchange at the kernel's end writes `out`."""
        _, num_queries, num_heads, head_dim = self.query_shape
        columns = min(self.shape.cols, num_queries * num_heads // self.shape.num_kv_heads)
        return jax.ShapeDtypeStruct((self.shape.num_output_tiles, columns, head_dim), query.dtype)

    def _epilogue(self, exchange, result: jax.ShapeDtypeStruct):
        """Returns the lean kernel's end in `exchange`, or None: too few registers, nothing to merge, or no room."""
        if self.shape.tokens is not None or not self.merges_partials or not self._has_registers_for_exchange():
            return None
        count = num_partials(self.shape, self.config)
        return exchange.epilogue(result, self.config.num_ctas, count, self.shape.padded_head_dim)

    def _has_registers_for_exchange(self) -> bool:
        """Returns whether a kernel that ends in an exchange spills no register, and all its CTAs fit at once.

        CTAs that exchange wait for all others. Where fewer fit an SM than planned, the others run on the SMs that are
        left. `tests/kernels/test_lean_compiled.py` has registers.
        """
        shape = self.shape
        accumulators = shape.padded_head_dim * shape.cols
        if accumulators > (EXCHANGED_ACCUMULATORS // 4 if shape.uses_mma else EXCHANGED_ACCUMULATORS):
            return False
        if self.config.num_ctas <= tuning.num_sms():
            return True
        if shape.mask == "columns" and shape.padded_head_dim > 128:
            return False  # ranges of slots for each column leave no registers for two CTAs of an SM
        is_static = shape.static_kv_tiles is not None  # tables of lengths take registers
        if shape.uses_mma:
            return shape.cols <= 8 and (is_static or accumulators <= MAX_SHARED_ACCUMULATORS)
        return is_static or shape.cols <= 8 or shape.num_output_tiles == 1

    def _state(self, out, lse) -> SoftmaxState:
        return SoftmaxState(
            from_kernel_layout(out, self.query_shape, self.shape),
            lse_from_kernel_layout(lse, self.query_shape[:3], self.shape),
        )


def plan_call(
    query, key, spans, *, num_slots: int, scale: float, logits_soft_cap: float | None, scales=None, pages=None,
    is_packed: bool = False, leaves_whole: bool = False, leaves_partials: bool = False, num_new: int | None = None,
    config: LeanConfig | None = None,
) -> LeanCall:  # fmt: skip
    """Plans a call: the static shape, the tuned layout and the schedule. Arguments are checked already.

    Args:
      query: `[B, T, N, H]`; key: as `lean.lean_attention` takes it.
      spans: first and end visible slot of each query, int32 `[B or 1, T or 1]` each; None where every slot is visible.
        Slots count within a sequence (padded, paged) or over all (packed).
      num_slots: slots that a sequence can have.
      scales: float32 `[2, K]`, factors of stored K and V, or None.
      pages: int32 `[B, pages]` where K and V are pages, else None.
      leaves_whole: the schedule may cut no output tile where lengths are such that a merge would take longer, and few
        queries may be rows of the many-query kernel. Not for a call that is merged with a state over other keys, or
        with other devices.
      leaves_partials: all output tiles leave partial states, which the caller merges, also those that no run cuts.
      num_new: of each sequence's last keys, those that the kernel before may have written; None: any.
      config: default: as tuned.
    """
    batch, num_queries, num_heads, _ = query.shape
    page_size = None if pages is None else key.shape[1]
    shape = lean_shape(
        query, key, num_slots=num_slots, scale=scale, logits_soft_cap=logits_soft_cap, page_size=page_size,
        is_packed=is_packed, allows_rows=leaves_whole,
    )  # fmt: skip
    if shape.target.is_hopper and not (shape.is_many_query or shape.is_gathered or is_packed):
        shape = shape.replace(num_new=num_new)
    config = config or tuning.lean_config(shape, is_static=spans is None, leaves_whole=leaves_whole)
    if page_size is not None and page_size % config.block_kv and page_size % ROWS == 0:
        config = dataclasses.replace(config, block_kv=ROWS)  # a KV tile lies within one page
    tables = {"scales": scales, "pages": pages}
    if spans is None:
        mask = "none" if num_slots % config.block_kv == 0 else "span"
        shape = shape.replace(mask=mask, static_kv_tiles=pl.cdiv(num_slots, config.block_kv))
        return LeanCall(query_shape=query.shape, shape=shape, config=config, tables=tables)
    if num_queries > 1 and max(x.shape[1] for x in spans) > 1:
        shape = shape.replace(mask="columns")
        group = num_heads // shape.num_kv_heads
        tables["columns"] = _column_table(*(jnp.broadcast_to(x, (batch, num_queries)) for x in spans), group, shape)
    shape = shape.replace(whole_output_tiles=not leaves_partials and _keeps_output_tiles_whole(shape, config))
    per_sequence = (jnp.broadcast_to(x, (batch, x.shape[1])) for x in spans)
    if shape.group is not None:
        leaves_whole = leaves_whole and tall.writes_uncut(shape, num_queries)
    else:
        leaves_whole = leaves_whole and lean.writes_uncut(shape)
    tables["sequences"], tables["runs"] = schedule_tables(*per_sequence, shape, config, leaves_whole=leaves_whole)
    if num_slots <= config.block_kv and not (is_packed or leaves_partials or shape.is_gathered):
        # One KV tile holds a sequence: no run cuts an output tile, whatever the lengths. It begins with slot 0, so of
        # several pages it would read those that lie before a window.
        shape, tables["runs"] = shape.replace(static_kv_tiles=1), None
    return LeanCall(query_shape=query.shape, shape=shape, config=config, tables=tables)


def lean_shape(
    query, key, *, num_slots: int, scale: float, logits_soft_cap: float | None, page_size: int | None = None,
    is_packed: bool = False, allows_rows: bool = False,
) -> LeanShape:  # fmt: skip
    """Returns the static part of a call with one span per sequence; arguments as in `plan_call`.

    Args:
      allows_rows: few queries may be rows of the many-query kernel, which cannot end in an exchange.
    """
    batch, num_queries, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[2]
    target = targets.current()
    if page_size is not None and page_size % ROWS and not gathers(page_size):  # pages do not fill a KV tile
        target = dataclasses.replace(target, is_hopper=False)
    group = num_heads // num_kv_heads
    columns, are_rows = num_queries * group, False
    if is_many_query(num_queries, group):
        cols = MANY_QUERY_ROWS
        heads_together = group if num_kv_heads > 1 and group in MANY_QUERY_GROUPS else 1  # in the rows of a block
        tokens = cols // heads_together
        blocks = pl.cdiv(columns // heads_together, tokens)
    elif allows_rows and is_few_query_rows(
        num_queries, group, head_dim, key.dtype != query.dtype, target,
        kv_tiles=pl.cdiv(num_slots, 128) * num_kv_heads * (1 if is_packed else batch) / tuning.num_sms(),
    ):  # fmt: skip
        slots = num_slots // batch if is_packed else num_slots
        blocks, cols = 1, rows_of_few_queries(num_queries, group, head_dim, slots)  # a row for each query and head
        tokens, are_rows = cols, True
    else:
        is_whole = num_slots % SLOT_MULTIPLE == 0 if page_size is None else not gathers(page_size)
        blocks, cols = column_blocks(columns, head_dim, key.dtype != query.dtype, target, is_whole=is_whole)
        tokens = cols if num_queries > MAX_QUERIES else None
    return LeanShape(
        batch=batch,
        num_kv_heads=num_kv_heads,
        col_blocks=blocks,
        cols=cols,
        head_dim=head_dim,
        scale=scale,
        logits_soft_cap=logits_soft_cap,
        mask="span",
        num_slots=num_slots,
        tokens=tokens,
        group=group if are_rows else None,
        dtype=query.dtype,
        key_dtype=key.dtype,
        page_size=page_size,
        is_packed=is_packed,
        target=target,
    )


def column_blocks(
    num_columns: int, head_dim: int, is_widened: bool, target: Target, *, is_whole: bool = True
) -> tuple[int, int]:
    """Returns how many blocks of how many query columns: a multiple of 8, as many as registers hold at most.

    Args:
      is_whole: 8 divides the array's slots, or one page holds a KV tile. Other copies take registers.
    """
    if not target.is_hopper:
        max_columns = 32 if head_dim <= 64 else 16 if head_dim <= 128 else 8
    elif is_widened:
        max_columns = 32 if head_dim <= 64 else 24 if head_dim <= 128 else 8
    else:
        max_columns = (64 if is_whole else 56) if head_dim <= 128 else 32
    blocks = pl.cdiv(num_columns, max_columns)
    return blocks, pl.cdiv(pl.cdiv(num_columns, blocks), 8) * 8


def schedule_tables(first, end, shape: LeanShape, config: LeanConfig, *, leaves_whole: bool = False):
    """Returns the tables `sequences` and `runs` from the visible slots `first .. end` of each query, int32 `[B, T]`.

    Args:
      leaves_whole: as in `plan_call`.
    """
    is_seen = first < end
    span_start = jnp.min(jnp.where(is_seen, first, jnp.iinfo(jnp.int32).max), axis=1)
    span_end = jnp.max(jnp.where(is_seen, end, 0), axis=1)
    is_any = span_start < span_end
    span_start, span_end = jnp.where(is_any, span_start, 0), jnp.where(is_any, span_end, 0)
    # Packed sequences and windows begin anywhere. A KV tile begins at a multiple of 8; in a page at one of its size; or
    # with a page where it has several. What comes before the span is masked.
    grain = SLOT_MULTIPLE if shape.page_size is None else config.block_kv
    grain = shape.page_size if shape.is_gathered else grain
    first_slot = span_start // grain * grain
    # At least one, to write the result of an output tile that sees nothing.
    kv_tiles = jnp.maximum(pl.cdiv(span_end - first_slot, config.block_kv), 1)
    # The schedule of one lane, which is that of all.
    count = lanes(shape, config)
    num_runs, per_sequence = config.num_ctas // count, shape.output_tiles_per_sequence // count
    offsets = sequence_offsets(kv_tiles, per_sequence)
    # Output tiles of one length are cut alike, where that leaves few runs empty.
    even = tuning.even_runs(shape, count, num_runs)
    max_runs = jnp.where(jnp.min(kv_tiles) == jnp.max(kv_tiles), even, num_runs)
    bounds = dict(max_runs=max_runs, short_runs=config.short_runs)
    runs, are_whole = _runs(kv_tiles, offsets, per_sequence, num_runs, bounds, shape, leaves_whole)
    per_call = (jnp.full_like(kv_tiles, x) for x in (max_runs, are_whole))
    columns = first_slot, kv_tiles, offsets, span_start, span_end, *per_call
    if shape.is_many_query and shape.mask == "columns":
        columns = *columns, jnp.max(first, axis=1), jnp.min(end, axis=1)
    sequences = jnp.stack(columns, axis=1).astype(jnp.int32)
    # What a CTA needs of its first sequence stands beside its run: it waits for memory once.
    begins_in = jnp.stack([first_slot, kv_tiles, span_end], axis=1).astype(jnp.int32)[runs[:, 0]]
    return sequences, jnp.concatenate([runs, begins_in], axis=1)


def _runs(kv_tiles, offsets, per_sequence: int, num_runs: int, bounds: dict, shape: LeanShape, leaves_whole: bool):
    """Returns the table of runs without what `schedule_tables` adds, and whether none of them cuts an output tile.

    Args:
      bounds: of the number of runs that cut output tiles, `max_runs` and `short_runs`.
    """
    whole = whole_run_table(kv_tiles, offsets, per_sequence, num_runs)
    if shape.whole_output_tiles:
        return whole, True
    cut = run_table(kv_tiles, offsets, per_sequence, num_runs, **bounds)
    if not leaves_whole:
        return cut, False
    # From counts where they say it: a reduction over a table is a small kernel of XLA's, which the attention waits for.
    longest_cut = longest_run(offsets[-1] + kv_tiles[-1] * per_sequence, **bounds)
    has_one_each = kv_tiles.shape[0] * per_sequence <= num_runs
    longest_whole = jnp.max(kv_tiles) if has_one_each else jnp.max(whole[:, 3])
    are_whole = longest_whole <= longest_cut + MERGE_KV_TILES
    return jnp.where(are_whole, whole, cut), are_whole


def _keeps_output_tiles_whole(shape: LeanShape, config: LeanConfig) -> bool:
    """Returns whether runs should not cut output tiles: nothing is merged, and the longest run is a little longer only.

    That holds where an output tile has no more KV tiles than the shortest run, or than half the output tiles of a CTA:
    each of those has a KV tile or more.
    """
    most_kv_tiles = pl.cdiv(shape.num_slots, config.block_kv)
    fits = most_kv_tiles <= max(MIN_KV_TILES_PER_RUN, shape.num_output_tiles // (2 * config.num_ctas))
    return fits and not shape.is_packed


def _column_table(first, end, group: int, shape: LeanShape):
    """Returns the visible slots of every query column, int32 `[2, B, col_blocks * cols]`; none for padding."""
    ranges = jnp.repeat(jnp.stack([first, end]).astype(jnp.int32), group, axis=2)  # columns are (t, g)
    return jnp.pad(ranges, [(0, 0), (0, 0), (0, shape.col_blocks * shape.cols - ranges.shape[2])])
