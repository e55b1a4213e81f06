"""States over keys that several sequences share, with which the lean kernel's output tiles begin.

The many-query kernel attends to a prefix, and leaves partial states of its query rows, each unnormalised: `(acc, max,
sum)`. Of few queries the lean kernel does so, whose query columns are called rows here too. Then it attends to each
sequence's own keys. Its state over an output tile begins with the partial states of the tile's queries, folded in the
order of their keys. So no kernel merges the prefix's partial states, and none merges the prefix with the rest.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from tree_attn.kernels import mlir as ops
from tree_attn.kernels import warps
from tree_attn.kernels.interpreter import is_interpreted
from tree_attn.kernels.lean_layout import (
    ROWS,
    LeanConfig,
    LeanShape,
    has_whole_output_tiles,
    most_partials,
    num_partials,
    partials_of,
)
from tree_attn.kernels.lean_merge import fold_partials
from tree_attn.kernels.mlir import asm_results, int32
from tree_attn.kernels.registers import LOWEST
from tree_attn.kernels.schedule import quotient, remainder
from tree_attn.kernels.tuning import num_sms

ACCS, STATS, SEQUENCES = "prefix_accs", "prefix_stats", "prefix_sequences"  # names of the lean kernel's tables
# Weighted values that a warpgroup reads together, where it has an SM for itself and where it does not; and states.
READ_ELEMENTS, READ_ELEMENTS_SHARED, READ_STATES = 8192, 2048, 4
MAX_ROUNDS = 4  # how often it reads so at most: CTAs of a merge share what takes longer
# Reading delays an output tile by up to a microsecond. What another launch and its gap take is as much as that of so
# many output tiles of a CTA; of longer ones, whose keys and values take so many bytes, memory is the limit meanwhile.
MAX_SHORT_OUTPUT_TILES, LONG_BYTES = 6, 128 * 1024
MAX_RAGGED_READS = 8  # of a CTA; output tiles whose lengths only the device knows may be short
MAX_ELEMENTS = 16384  # weighted values of an output tile; a state beyond them leaves no registers for another


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefix:
    """The partial states of a prefix, as the lean kernel sees them.

    shape, config:  of the call that left them, whose batch are nodes
    share:          sequences of a node
    num_queries:    queries of a sequence
    group:          query heads of a KV head
    """

    shape: LeanShape
    config: LeanConfig
    share: int
    num_queries: int
    group: int

    @property
    def tokens(self) -> int:
        """Rows of a block that lie one after another: those of one head, or of all heads of the group."""
        return self.shape.tokens or self.shape.cols

    @property
    def rows_of_sequence(self) -> int:
        """Rows of a sequence that lie one after another: its queries of one head, or of all heads of the group."""
        together = self.shape.cols // self.tokens  # query heads whose rows a block has, each head's together
        return self.num_queries * (self.group // together)

    def rows_of(self, sequence, head):
        """Returns the prefix's output tile that has the rows of a sequence and KV head, and the first of them."""
        first = remainder(sequence, self.share) * self.rows_of_sequence
        of_node = quotient(sequence, self.share) * self.shape.output_tiles_per_sequence
        output_tile = of_node + head * self.shape.col_blocks + quotient(first, self.tokens)
        return output_tile, remainder(first, self.tokens)

    @property
    def are_cut(self) -> bool:
        """Returns whether the rows of some sequences lie in two blocks."""
        return self.tokens % self.rows_of_sequence > 0

    @property
    def heads_are_apart(self) -> bool:
        """Returns whether each of several query heads has rows of its own in a block; else rows follow as (t, g)."""
        return self.rows_of_sequence < self.num_queries * self.group

    @property
    def row_strides(self) -> tuple[int, int]:
        """Returns the distances in rows from a query to the next, and from a query head to the next."""
        return (1, self.tokens) if self.heads_are_apart else (self.group, 1)

    @property
    def acc_strides(self) -> tuple[int, int]:
        """Returns the distances in elements from a row to the next, and from a head dim to the next."""
        return (self.shape.head_dim, 1) if self.shape.is_many_query else (1, self.shape.cols)

    @property
    def most_partials(self) -> int:
        """Returns about how many partial states an output tile has at most."""
        return most_partials(self.shape, self.config, are_equal=self.shape.batch == 1)

    def read_at_once(self, suffix: LeanShape, config: LeanConfig) -> int:
        """Returns how many partial states a lean kernel reads together: as registers allow, and as it needs."""
        elements = READ_ELEMENTS if config.num_ctas <= num_sms() else READ_ELEMENTS_SHARED
        by_registers = max(1, min(READ_STATES, elements // (suffix.padded_head_dim * suffix.cols)))
        return min(by_registers, self.most_partials)

    def why_not(self, suffix: LeanShape, config: LeanConfig) -> str | None:
        """Returns why a lean kernel of that shape and layout cannot or should not begin with these states, or None."""
        prefix = self.shape
        if prefix.uses_mma or suffix.uses_mma or prefix.group is not None:
            return "products are not by wgmma, or few queries are rows"
        # The many-query kernel leaves partial states all the same, where it is known when compiling how many there are.
        is_able = prefix.is_many_query and prefix.static_kv_tiles is not None
        if has_whole_output_tiles(prefix, self.config) and not is_able:
            return "no run cuts an output tile of the prefix, so that there are results and no partial states"
        if suffix.is_many_query or suffix.tokens is not None or suffix.col_blocks > 1:
            return "the sequences' queries are not one block of query columns for each KV head"
        if suffix.padded_head_dim * suffix.cols > MAX_ELEMENTS:
            return "too many registers hold an output tile's state"
        if self.most_partials > MAX_ROUNDS * self.read_at_once(suffix, config):
            return "a warpgroup would read for longer than another launch takes"
        is_long = 2 * suffix.num_slots * suffix.head_dim * suffix.key_itemsize >= LONG_BYTES
        if suffix.num_output_tiles > MAX_SHORT_OUTPUT_TILES * config.num_ctas and not is_long:
            return "so many short output tiles would take longer than another launch"
        rounds = -(-self.most_partials // self.read_at_once(suffix, config))
        is_ragged = suffix.static_kv_tiles is None
        if is_ragged and rounds > 1 and suffix.num_output_tiles * rounds > MAX_RAGGED_READS * config.num_ctas:
            return "output tiles of unknown lengths would read in so many rounds for longer than another launch takes"
        if self.rows_of_sequence > self.tokens:
            return "a sequence has more rows than a block of the prefix's"
        if self.are_cut and self.heads_are_apart:
            return "a sequence's rows of each of several heads lie in two blocks"
        if num_partials(prefix, self.config) * prefix.cols * prefix.padded_head_dim >= 2**31:
            return "elements of partial states are not counted by 32 bits"
        return None


def begun(tables, shape: LeanShape, config: LeanConfig, output_tile, is_first):
    """Returns the state `(acc, top, total)` over the prefix of an output tile's queries; empty unless `is_first`.

    Args:
      tables: with those named ACCS and STATS, and SEQUENCES if the prefix has lengths.
      output_tile: of `lean_walk.walk`.
      is_first: whether the output tile's state begins here.
    Returns:
      float32 `[H, cols]`, `[cols]`, `[cols]`: sums of weighted values, largest logits in base 2, sums of weights.
      Columns that hold no query have another's state.
    """
    prefix = shape.prefix
    of_prefix, first_row = prefix.rows_of(output_tile.sequence, output_tile.head)
    output_tiles = [of_prefix]
    if prefix.are_cut:
        output_tiles.append(of_prefix + jnp.where(first_row + prefix.rows_of_sequence > prefix.tokens, 1, 0))
    found = [partials_of(prefix.shape, prefix.config, tables.get(SEQUENCES), number) for number in output_tiles]
    count = functools.reduce(jnp.maximum, [count for _, count in found])

    def read(i):
        partials = [(first + jnp.minimum(i, count - 1), i < count) for first, count in found]
        return _read((tables[ACCS], tables[STATS]), partials, first_row, size, prefix)

    state: list[Any] = []
    size = shape.padded_head_dim, shape.cols
    count = jnp.where(is_first, count, 0)
    fold_partials(count, lambda i: i, state.extend, size, at_once=prefix.read_at_once(shape, config), axis=1, read=read)
    return state


def _read(refs, partials, first_row, size, prefix: Prefix):
    """Reads the columns of one partial state; result as of `begun`.

    Args:
      refs: of accs and stats.
      partials: of the block that has the first row, and of the next if rows are cut: the partial state's number, and
        whether it is one.
      first_row: row of the first column; size: of the state's weighted values.
    """
    if is_interpreted():
        return _interpreted_read(refs, partials, first_row, size, prefix)
    per_column = plgpu.ShapeDtypeStruct(size[1:], jnp.float32, layout=warps.PER_COLUMN)
    returned = plgpu.ShapeDtypeStruct(size, jnp.float32, layout=warps.LAYOUT), per_column, per_column
    scalars = [first_row, *([x for partial in partials for x in partial] if prefix.are_cut else partials[0][:1])]
    arg_types = plgpu.RefType(), plgpu.RefType(), *[plgpu.Layout.WG_SPLAT] * len(scalars)

    @plgpu.inline_mgpu(arg_types=arg_types, return_type=returned)
    def emit(_, accs, stats, *scalars):
        addresses = (llvm.ptrtoint(ops.i64(), utils.memref_ptr(x)) for x in (accs, stats))
        acc, *of_columns = _emit_read(*addresses, *(x.registers.item() for x in scalars), size=size, prefix=prefix)
        stats = (warps.fragmented(x, size[1:], warps.PER_COLUMN) for x in of_columns)
        return warps.fragmented(acc, size, warps.LAYOUT), *stats

    return emit(*refs, *(jnp.asarray(x, jnp.int32) for x in scalars))


def _emit_read(accs, stats, first_row, *partials, size, prefix: Prefix):
    """Emits the loads of a thread, and returns its registers: of the weighted values, the largest logits and the sums.

    Args:
      accs, stats: addresses; first_row, size, prefix: as of `_read`.
      partials: a partial state's number; or, if rows are cut, that of either block, and whether it is one.
    """
    of_row, of_dim = prefix.acc_strides
    # Stats are of 64 rows: the largest logits, and then the sums; or of all columns.
    of_part = ROWS if prefix.shape.is_many_query else prefix.shape.cols
    warp, quad, place = warps.thread()
    zero, lowest = (arith.constant(ir.F32Type.get(), x) for x in (0.0, LOWEST))

    def loaded(begin, offset, is_there, otherwise=zero):
        (x,) = asm_results("ld.global.f32 $0, [$1];", "f", ops.plus(begin, ops.constant(4 * offset)))
        return x if is_there is None else arith.select(is_there, x, otherwise)

    def begin_of(base, partial, elements: int, element):
        number = arith.addi(arith.muli(partial, int32(elements)), element)
        return ops.plus(base, arith.muli(arith.extsi(ops.i64(), number), ops.constant(4)))

    first_dim = arith.addi(arith.muli(warp, int32(16)), quad)  # of the thread
    first_element = arith.muli(first_dim, int32(of_dim))
    acc, tops, totals = {}, [], []
    for block in range(size[1] // 8):
        columns = [arith.addi(arith.muli(place, int32(2)), int32(8 * block + i)) for i in range(2)]
        places = [_place_of(column, first_row, partials, prefix) for column in columns]
        begins = []
        for partial, row, is_there in places:
            element = arith.addi(arith.muli(row, int32(of_row)), first_element)
            begins.append((begin_of(accs, partial, prefix.shape.cols * size[0], element), is_there))
        for tile, half in itertools.product(range(size[0] // 64), range(2)):
            offset = of_dim * (64 * tile + 8 * half)
            acc[tile, block, half] = warps.pair_of(*(loaded(at, offset, is_there) for at, is_there in begins))
        begins = []
        for partial, row, is_there in places:
            part = arith.muli(arith.divui(row, int32(of_part)), int32(of_part))
            begins.append((begin_of(stats, partial, 2 * prefix.shape.cols, arith.addi(row, part)), is_there))
        tops.append(warps.pair_of(*(loaded(at, 0, is_there, lowest) for at, is_there in begins)))
        totals.append(warps.pair_of(*(loaded(at, of_part, is_there) for at, is_there in begins)))
    return [acc[key] for key in sorted(acc)], tops, totals


def _place_of(column, first_row, partials, prefix: Prefix):
    """Emits the partial state and row of a column, and whether there is such a state; None if that is known.

    Arguments are as of `_emit_read`.
    """
    (of_query, of_head), group = prefix.row_strides, prefix.group
    column = arith.minsi(column, int32(prefix.num_queries * group - 1))
    query, head = (f(column, int32(group)) for f in (arith.divui, arith.remui))
    within = arith.addi(arith.muli(query, int32(of_query)), arith.muli(head, int32(of_head)))
    row = arith.addi(first_row, within)
    if len(partials) == 1:
        return partials[0], row, None
    is_next = arith.cmpi(arith.CmpIPredicate.sge, row, int32(prefix.tokens))
    of_block = lambda first, second: arith.select(is_next, second, first)
    row = of_block(row, arith.subi(row, int32(prefix.tokens)))
    is_there = arith.cmpi(arith.CmpIPredicate.ne, of_block(partials[1], partials[3]), int32(0))
    return of_block(partials[0], partials[2]), row, is_there


def _interpreted_read(refs, partials, first_row, size, prefix: Prefix):
    """Does `_read` in the interpreter."""
    (accs_ref, stats_ref), (of_query, of_head), group = refs, prefix.row_strides, prefix.group
    accs, stats = [], []
    for column in range(size[1]):
        column = min(column, prefix.num_queries * group - 1)
        row = first_row + column // group * of_query + column % group * of_head
        partial, is_there = partials[0]
        if prefix.are_cut:
            is_next = row >= prefix.tokens
            row = row - jnp.where(is_next, prefix.tokens, 0)
            partial, is_there = (jnp.where(is_next, *both[::-1]) for both in zip(*partials))
        where = (partial, lax.div(row, ROWS)) if prefix.shape.is_many_query else (partial,)
        row = lax.rem(row, ROWS) if prefix.shape.is_many_query else row
        top, total = (stats_ref[*where, i, row] for i in range(2))
        acc = accs_ref[*where, row] if prefix.shape.is_many_query else accs_ref[*where, :, row]
        accs.append(jnp.where(is_there, acc, 0.0))
        stats.append((jnp.where(is_there, top, LOWEST), jnp.where(is_there, total, 0.0)))
    return jnp.stack(accs, axis=1), *(jnp.stack(x) for x in zip(*stats))
