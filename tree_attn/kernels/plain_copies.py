"""Copies without TMA: rows to shared memory by `cp.async`, and results from registers to global memory.

A warpgroup copies a tile row by row, 16 bytes a thread and instruction. So a row may lie anywhere: no number of slots
and no page size is out of place, and a row that is no key's becomes zeros instead of being read. The barrier counts
each thread once its copies have landed.
"""

import functools
import itertools
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from tree_attn.kernels import mlir as ops
from tree_attn.kernels import warps
from tree_attn.kernels.interpreter import is_interpreted
from tree_attn.kernels.kv_parts import address_of_barriers
from tree_attn.kernels.mlir import int32

CHUNK_BYTES = 16  # of one copy of a thread
BARRIER_BYTES = 8
_SCALAR = plgpu.Layout.WG_SPLAT


def copy_rows(
    ref, tile, transforms, barriers, place, first, seen, *, block=None, head=0, first_dim=0, pages=None, group=None
) -> None:
    """Begins the copy of rows to shared memory, and zeros those that are not seen.

    All threads of a warpgroup call this, and each arrives once.

    Args:
      ref: `[blocks, rows, H]`, or `[blocks, rows, K, H]` of which one head is copied.
      tile: `[n, Hp]`, shared memory with `transforms`. Columns from H on are not written.
      barriers, place: the barrier at which the copy arrives is number `place` of these.
      first: row of the first of the n.
      seen: rows that are copied, `(first, end)`; others become zeros. Those must be rows of `ref`.
      block: number of the block, or None with pages.
      head: of `ref`'s K.
      first_dim: the first column that is copied.
      pages: `(table, sequence)` where a block is a page: int32 `[sequences, pages of one]` and which of them. Rows
        are then numbered through its pages.
      group: G, where `ref` is `[B, T, N, H]` and its rows are (t, g) of the G heads from `head` on; else None.
    """
    if ref.dtype != tile.dtype:
        raise ValueError(f"ref must have the tile's dtype {tile.dtype}, got {ref.dtype}")
    table, sequence = pages if pages is not None else (None, 0)
    block = 0 if block is None else block
    if is_interpreted():
        _interpreted_copy(ref, tile, block, head, first_dim, table, sequence, first, seen, group)
        plgpu.commit_smem()
        plgpu.barrier_arrive(barriers.at[place])
        return
    address = address_of_barriers(barriers) + place * BARRIER_BYTES
    scalars = [jnp.asarray(x, jnp.int32) for x in (address, block, head, first_dim, sequence, first, *seen)]
    refs = [ref, tile] + ([] if table is None else [table])
    types = [plgpu.RefType(), plgpu.RefType(transforms)] + [plgpu.RefType()] * (len(refs) - 2)

    @plgpu.inline_mgpu(arg_types=(*types, *[_SCALAR] * len(scalars)))
    def emit(_, source, tile, *rest):
        *table, address, block, head, first_dim, sequence, first, start, end = rest
        numbers = [x.registers.item() for x in (address, block, head, first_dim, sequence, first, start, end)]
        _emit_copy(source, tile, *(table or [None]), *numbers, group)

    emit(*refs, *scalars)


def _emit_copy(source, tile, table, address, block, head, first_dim, sequence, first, start, end, group) -> None:
    kind, tiled = ir.MemRefType(source.type), ir.MemRefType(tile.type)
    itemsize = utils.bitwidth(kind.element_type) // 8
    _, rows_of_block, *_, head_dim = kind.shape
    row_bytes = math.prod(kind.shape[2:]) * itemsize
    num_rows, num_dims = tiled.shape[0], tiled.shape[1]
    if len(tiled.shape) == 4:
        num_rows, num_dims = num_rows * tiled.shape[2], num_dims * tiled.shape[3]
    chunks = min(head_dim, num_dims) * itemsize // CHUNK_BYTES
    base = ops.plus(_global_address(source), _times(head, head_dim * itemsize), _times(first_dim, itemsize))
    if group is not None:
        base = ops.plus(base, _times(block, rows_of_block * row_bytes))
    elif table is None:
        begin = arith.addi(_times(block, rows_of_block), arith.extsi(ops.i64(), first))
        base = ops.plus(base, arith.muli(begin, ops.constant(row_bytes)))
    else:
        pages = ir.MemRefType(table.type).shape[1]
        table_base = ops.plus(_global_address(table), _times(sequence, 4 * pages))
    thread = arith.andi(ops.asm("mov.u32 $0, %tid.x;", ops.i32()), int32(warps.THREADS - 1))
    smem = warps.address_of(tile)

    def copy(number):
        row, chunk = arith.divui(number, int32(chunks)), arith.remui(number, int32(chunks))
        slot = arith.addi(first, row)
        is_seen = arith.andi(
            arith.cmpi(arith.CmpIPredicate.sge, slot, start), arith.cmpi(arith.CmpIPredicate.slt, slot, end)
        )
        if group is not None:
            at = _of_group(slot, group, row_bytes, head_dim * itemsize)
        elif table is None:
            at = arith.muli(row, int32(row_bytes))
        else:
            # What is not seen may lie beyond the table.
            which = arith.select(is_seen, arith.divui(slot, int32(rows_of_block)), int32(0))
            page = ops.load(ops.plus(table_base, _times(which, 4)))
            at = arith.addi(
                _times(page, rows_of_block), arith.extsi(ops.i64(), arith.remui(slot, int32(rows_of_block)))
            )
            at = arith.muli(at, ops.constant(row_bytes))
        at = at if at.type == ops.i64() else arith.extui(ops.i64(), at)
        source_address = ops.plus(base, at, arith.extui(ops.i64(), arith.muli(chunk, int32(CHUNK_BYTES))))
        destination = arith.addi(smem, warps.swizzled(tiled, itemsize, row, chunk))
        size = arith.select(is_seen, int32(CHUNK_BYTES), int32(0))
        text = "cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;"
        ops.asm(text, None, destination, source_address, size)

    total = num_rows * chunks
    for i in range(0, total, warps.THREADS):
        number = arith.addi(thread, int32(i))
        if i + warps.THREADS <= total:
            copy(number)
        else:
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, number, int32(total))):
                copy(number)
    ops.asm("cp.async.mbarrier.arrive.noinc.shared.b64 [$0];", None, address)


def _of_group(number, group: int, stride: int, stride_of_head: int):
    """Returns where (t, g) of that number begins: t strides and g of a head."""
    token, head = (f(number, int32(group)) for f in (arith.divui, arith.remui))
    return arith.addi(arith.muli(token, int32(stride)), arith.muli(head, int32(stride_of_head)))


def store_result(out_ref, lse_ref, output_tile, result, *, first_dim=0, first_column=0, is_first=True) -> None:
    """Writes part of a result from registers.

    Args:
      out_ref: `[output tiles, G', H]`; lse_ref: `[output tiles, cols]`.
      result: `(out, lse)`: `[head dims, cols]`, of the head dims from `first_dim` on, and `[cols]`.
      first_column: the first of these columns; the interpreter takes all.
      is_first: whether lse is written.
    """
    out, lse = result
    _, columns, head_dim = out_ref.shape
    num_rows = jnp.minimum(head_dim - first_dim, out.shape[0])
    if is_interpreted():
        if out.shape[1] != lse_ref.shape[1]:
            raise NotImplementedError("the interpreter writes all columns of a result")
        part = math.gcd(head_dim, out.shape[0])
        for row in range(0, out.shape[0], part):

            @pl.when(row < num_rows)
            def _(row=row):
                rows = out[row : row + part, :columns].T.astype(out_ref.dtype)
                first = jnp.minimum(first_dim + row, head_dim - part)  # what is not written must not be out of bounds
                out_ref[output_tile, :, pl.ds(first, part)] = rows

        @pl.when(is_first)
        def _():
            lse_ref[output_tile] = lse

        return
    num_rows = out.shape[0] if head_dim % 64 == 0 else num_rows
    offset = output_tile * (columns * head_dim) + first_column * head_dim + first_dim
    lse_offset, num_columns = output_tile * lse_ref.shape[1] + first_column, columns - first_column
    store_columns(out_ref, out, offset, strides=(1, head_dim), num_rows=num_rows, num_columns=num_columns)

    @pl.when(is_first)
    def _():
        store_row(lse_ref, lse, lse_offset)


def store_columns(ref, x, offset, *, strides: tuple[int, int], num_rows, num_columns) -> None:
    """Writes `[rows, cols]` float32 of the layout WGMMA to global memory, in the dtype of `ref`.

    Args:
      ref: an array; its elements are counted as if it had one axis.
      offset: the first element's number.
      strides: from row to row, and from column to column, in elements.
      num_rows, num_columns: how many are written, numbers or scalars in the kernel.
    """
    are_all = [isinstance(number, int) and number == size for number, size in zip((num_rows, num_columns), x.shape)]

    def store(array, x, offset, *numbers):
        base, kind = _element_address(array, offset)
        limits = [None if is_all else number for is_all, number in zip(are_all, numbers)]
        warp, quad, place = warps.thread()
        registers = x.registers.reshape(x.shape[0] // 64, x.shape[1] // 8, 2)
        for block_row, block, half in itertools.product(*map(range, registers.shape)):
            first = 64 * block_row + 8 * half
            row = arith.addi(arith.addi(arith.muli(warp, int32(16)), quad), int32(first))
            column = arith.addi(arith.muli(place, int32(2)), int32(8 * block))
            _store_pair(base, kind, registers[block_row, block, half], row, column, strides, limits)

    _emit_store(store, ref, x, plgpu.Layout.WGMMA, offset, num_rows, num_columns)


def store_rows(ref, x, begin, *, first_dim, group: int | None = None) -> None:
    """Writes 64 rows of a result of many queries from registers, those that are queries.

    Args:
      ref: `[B, T, N, H]`.
      x: `[64, head dims]` float32 of the layout WGMMA, of the head dims from `first_dim` on.
      begin: `(sequence, first query, first head, rows of one head)`. Rows of one head, a power of two, are of
        consecutive queries, and the next head's follow.
      group: G, where rows are (t, g) of the G heads from the first one on, and the first query is the first row's
        number; else None.
    """
    sequence, first, head, rows_of_head = begin
    _, num_queries, num_heads, head_dim = ref.shape
    if is_interpreted():
        if group is None:
            raise NotImplementedError("the interpreter writes rows (t, g) only")
        _interpreted_store(ref, x.astype(ref.dtype), sequence, first, head, group, first_dim)
        return

    def store(array, x, token, element, num_rows, first_row):
        base, kind = _element_address(array, element)
        base = ops.plus(base, _times(token, num_heads * head_dim * utils.bitwidth(kind) // 8))
        warp, quad, place = warps.thread()
        registers = x.registers.reshape(x.shape[1] // 8, 2)
        for half in range(2):
            row = arith.addi(arith.addi(arith.muli(warp, int32(16)), quad), int32(8 * half))
            if group is None:
                within, which = (f(row, int32(rows_of_head)) for f in (arith.remui, arith.divui))
                at = arith.addi(arith.muli(within, int32(num_heads * head_dim)), arith.muli(which, int32(head_dim)))
            else:
                within = arith.addi(row, first_row)
                at = _of_group(within, group, num_heads * head_dim, head_dim)
            column = arith.muli(place, int32(2))
            address = ops.plus(base, _times(arith.addi(at, column), utils.bitwidth(kind) // 8))
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, within, num_rows)):
                for block, pair in enumerate(registers[:, half]):
                    narrow = arith.truncf(ir.VectorType.get((2,), kind), pair)
                    word = vector.bitcast(ir.VectorType.get((1,), ops.i32()), narrow)
                    to = ops.plus(address, ops.constant(8 * block * utils.bitwidth(kind) // 8))
                    ops.asm("st.global.b32 [$0], $1;", None, to, warps.element(word))

    element = head * head_dim + first_dim
    if group is None:
        scalars = sequence * num_queries + first, element, num_queries - first, 0
    else:
        scalars = sequence * num_queries, element, num_queries * group, first
    _emit_store(store, ref, x, plgpu.Layout.WGMMA, *scalars)


def store_row(ref, x, offset) -> None:
    """Writes `[cols]` float32, of the layout of WGMMA's columns, to the elements of `ref` from number `offset` on."""

    def store(array, x, offset):
        base, kind = _element_address(array, offset)
        warp, quad, place = warps.thread()
        is_writer = arith.cmpi(arith.CmpIPredicate.eq, arith.ori(warp, quad), int32(0))
        with mgpu.when(is_writer):
            for block, pair in enumerate(x.registers.flat):
                column = arith.addi(arith.muli(place, int32(2)), int32(8 * block))
                _store_pair(base, kind, pair, int32(0), column, (0, 1), (None, None))

    _emit_store(store, ref, x, plgpu.Layout.WGMMA.reduce(0), offset)


def _emit_store(store, ref, x, layout, *scalars) -> None:
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, *[_SCALAR] * len(scalars)))
    def emit(_, array, x, *scalars):
        store(array, x, *(scalar.registers.item() for scalar in scalars))

    emit(ref, x, *(jnp.asarray(scalar, jnp.int32) for scalar in scalars))


def _store_pair(base, kind, pair, row, column, strides, limits) -> None:
    """Emits the stores of two neighbouring columns, if within the limits of rows and columns, each maybe None."""
    (row_stride, column_stride), itemsize = strides, utils.bitwidth(kind) // 8
    max_row, max_column = limits
    is_less = lambda x, limit: arith.cmpi(arith.CmpIPredicate.slt, x, limit)
    conditions = [] if max_row is None else [is_less(row, max_row)]
    at = arith.addi(arith.muli(row, int32(row_stride)), arith.muli(column, int32(column_stride)))
    at = ops.plus(base, arith.extui(ops.i64(), arith.muli(at, int32(itemsize))))
    both = [warps.element(pair, i) for i in range(2)]
    if column_stride == 1 and itemsize == 4 and max_column is None:
        with _when(conditions):
            ops.asm("st.global.v2.f32 [$0], {$1, $2};", None, at, *both)
        return
    for i, x in enumerate(both):
        within = conditions if max_column is None else [*conditions, is_less(arith.addi(column, int32(i)), max_column)]
        address = ops.plus(at, ops.constant(i * column_stride * itemsize))
        with _when(within):
            if itemsize == 4:
                ops.asm("st.global.f32 [$0], $1;", None, address, x)
            else:
                half = arith.bitcast(ir.IntegerType.get_signless(16), arith.truncf(kind, x))
                ops.asm("st.global.b16 [$0], $1;", None, address, half)


def _when(conditions):
    return mgpu.when(functools.reduce(arith.andi, conditions, arith.constant(ir.IntegerType.get_signless(1), 1)))


def _element_address(array, offset):
    kind = ir.MemRefType(array.type).element_type
    return ops.plus(_global_address(array), _times(offset, utils.bitwidth(kind) // 8)), kind


def _global_address(ref):
    return llvm.ptrtoint(ops.i64(), utils.memref_ptr(ref))


def _times(x, factor: int):
    """Returns an i32 times a number, as i64."""
    return arith.muli(arith.extsi(ops.i64(), x), ops.constant(factor))


def _interpreted_store(ref, rows, sequence, first, head, group, first_dim) -> None:
    """Writes rows (t, g) to `[B, T, N, H]`, those that are there."""
    count = ref.shape[1] * group

    def write_row(i, _):
        @pl.when(first + i < count)
        def _():
            number = jnp.minimum(first + i, count - 1)  # what is not written must not be out of bounds
            row = lax.dynamic_index_in_dim(rows, i, keepdims=False)
            ref[sequence, number // group, head + number % group, pl.ds(first_dim, rows.shape[1])] = row

    lax.fori_loop(0, rows.shape[0], write_row, None)  # unrolled, XLA would compile each row's index and copy anew


def _interpreted_copy(ref, tile, block, head, first_dim, table, sequence, first, seen, group) -> None:
    count, rows = ref.shape[1], tile.shape[0]
    if group is not None:
        num_dims = min(ref.shape[-1], tile.shape[1])
        numbers = first + jnp.arange(rows)
        loaded = ref[block, :, pl.ds(head, group), pl.ds(first_dim, num_dims)].reshape(count * group, num_dims)
        is_seen = ((numbers >= seen[0]) & (numbers < seen[1]))[:, None]
        found = loaded[jnp.clip(numbers, 0, count * group - 1)]
        tile[:, pl.ds(0, num_dims)] = jnp.where(is_seen, found, 0).astype(tile.dtype)
        return
    if table is None:
        part, blocks = rows, [block]
    else:
        part = math.gcd(count, rows)
        last = table.shape[1] - 1
        blocks = [table[sequence, jnp.clip((first + i) // count, 0, last)] for i in range(0, rows, part)]
    num_dims = min(ref.shape[-1], tile.shape[1])
    index = () if ref.ndim == 3 else (head,)
    index = (*index, pl.ds(first_dim, num_dims))
    found = []
    for i, block in enumerate(blocks):
        start = first + i * part if table is None else (first + i * part) % count
        size = min(part, count)
        begin = jnp.clip(start, 0, count - size)
        loaded = ref[(block, pl.ds(begin, size), *index)]
        found.append(loaded[jnp.clip(start + jnp.arange(part) - begin, 0, size - 1)])
    slots = first + jnp.arange(rows)[:, None]
    is_seen = (slots >= seen[0]) & (slots < seen[1])
    copied = jnp.where(is_seen, jnp.concatenate(found), 0).astype(tile.dtype)
    tile[:, pl.ds(0, num_dims)] = copied
