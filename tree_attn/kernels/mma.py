"""The products of the lean kernel by `mma.sync`, whose operands are in registers: each warp has keys of its own.

As in `lean.py` the operands are swapped, S^T = K Q^T and O^T = V^T P^T: the rows of the tensor core are keys and head
dims, its 8 columns query columns. Of every 64 keys of a KV tile a warp takes 16. It keeps a maximum, a
sum of weights and weighted values of its own; the four states are folded where a segment ends.

float8 K and V are widened to float16 between shared memory and the tensor core, which is exact:
- K: a thread's four neighbours in a row are a fragment's two pairs. That permutes head dims, and `query_fragments`
  permutes the query's alike.
- V: `ldmatrix.trans` moves pairs of bytes, two head dims of one key. Four bytes, with the middle ones exchanged, are
  two pairs of keys, of an even and an odd head dim. That permutes the rows of O^T, which `leave_states` undoes.

A bfloat16 query of float8 keys is scaled to float16. A power of two of each column puts its largest element just below
float16's largest. What is 2^-32 of that element or more stays exact. Weights are then kept 2^15 times as large,
so that those of 2^-29 have all of float16's bits.

A warp's values are in arrays that Pallas takes for a warpgroup's: `[cols]` may differ from warp to warp. So they go
through elementwise operations and the functions here only.

Products by `wgmma` use `reduced`, `store_transposed`, `store_per_column` and `zero_others` of these functions, for
columns and values that pass through shared memory.

Shapes in comments: t a thread's place in a group of four, g the group's in the warp.
"""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, vector

from tree_attn.kernels.interpreter import is_interpreted
from tree_attn.kernels.lean_layout import LeanShape

WARPS, THREADS = 4, 128
KEYS = 16  # of a warp, among 64
PART = 64  # head dims of the states that warps leave at a time, for there is not much shared memory
WEIGHT_EXPONENT = 15  # of the largest weight in float16
_BYTES = "0x1404", "0x3424"  # of a word, each the upper of a half, the lower ones zero
_LAYOUT, _PER_COLUMN = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(0)


def is_scaled(shape: LeanShape) -> bool:
    """Returns whether the query is scaled to float16."""
    return shape.is_widened and shape.dtype == jnp.bfloat16


def weight_exponent(shape: LeanShape) -> int:
    """Returns the exponent of the largest weight."""
    return WEIGHT_EXPONENT if shape.is_widened else 0


def acc_shape(shape: LeanShape) -> tuple[int, int]:
    """Returns the shape of all warps' weighted values: for every 16 head dims 16 rows of each warp."""
    return WARPS * shape.padded_head_dim, shape.cols


def query_fragments(query_smem, transforms, shape: LeanShape):
    """Returns the query `[cols, H]` as the tensor core's right operand, and factors of logits, `[cols]` or None."""
    if is_interpreted():
        return query_smem[...], None
    count = shape.cols // 8 * shape.head_dim // 8
    fragments = plgpu.ShapeDtypeStruct((THREADS * count,), jnp.int32, layout=_bag(count))
    factors = plgpu.ShapeDtypeStruct((shape.cols,), jnp.float32, layout=_PER_COLUMN)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms),), return_type=(fragments, factors))
    def emit(_, query):
        _, group, place = thread()
        itemsize = shape.key_itemsize
        columns, factors = [], []
        for column in range(0, shape.cols, 8):
            row = arith.addi(group, _i32(column))
            words = []
            for first in range(0, shape.head_dim, 16):
                for half in range(2):
                    # In bytes: a thread has 4 neighbours of 16 head dims, or 2 of each 8.
                    at = _i32(2 * first + 4 * half) if itemsize == 1 else _i32(2 * first + 16 * half)
                    at = arith.addi(at, arith.muli(place, _i32(8 if itemsize == 1 else 4)))
                    chunk, within = arith.shrui(at, _i32(4)), arith.andi(at, _i32(15))
                    address = arith.addi(swizzled(ir.MemRefType(query.type), 2, row, chunk), within)
                    (word,) = asm("ld.shared.b32 $0, [$1];", "r", arith.addi(_address(query), address))
                    words.append(word)
            factor = arith.constant(ir.F32Type.get(), 1.0)
            if is_scaled(shape):
                words, factor = _scaled(words)
            columns += words
            factors.append(_pair(*(_shuffled(factor, arith.muli(place, _i32(8)), _i32(4 * i)) for i in range(2))))
        return _bagged(columns), _fragmented(factors, (shape.cols,), _PER_COLUMN)

    fragments, factors = emit(query_smem)
    return fragments, factors if is_scaled(shape) else None


def logits(key_smem, transforms, fragments, shape: LeanShape):
    """Returns `K Q^T`, `[kv, cols]`."""
    if is_interpreted():
        keys = _interpreted_read(key_smem)
        return keys.astype(jnp.float32) @ fragments.astype(jnp.float32).T
    kv = key_smem.shape[0]
    count = shape.cols // 8 * shape.head_dim // 8
    result = plgpu.ShapeDtypeStruct((kv, shape.cols), jnp.float32, layout=_LAYOUT)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), _bag(count)), return_type=result)
    def emit(_, keys, fragments):
        itemsize, blocks = shape.key_itemsize, shape.cols // 8
        steps = shape.head_dim // 16
        words = [element(x) for x in fragments.registers.flat]
        right = np.array(words, dtype=object).reshape(blocks, steps, 2)
        read = _reader(keys, itemsize, trans=False)
        zero = arith.constant(ir.F32Type.get(), 0.0)
        out = []
        for block_kv in range(0, kv, 64):
            sums = np.full((2, blocks, 4), zero, dtype=object)  # of even and odd steps, whose products overlap
            for step, left in enumerate(_key_fragments(read, block_kv, steps, shape)):
                for block in range(blocks):
                    sums[step % 2, block] = _mma(left, right[block, step], sums[step % 2, block], shape)
            for block in range(blocks):
                total = [arith.addf(*both) for both in zip(*sums[:, block])] if steps > 1 else sums[0, block]
                out += [_pair(*total[:2]), _pair(*total[2:])]
        return _fragmented(out, (kv, shape.cols), _LAYOUT)

    return emit(key_smem, fragments)


def largest(x, shape: LeanShape):
    """Returns the largest of each column of `[kv, cols]` among a warp's keys, `[cols]`."""
    if is_interpreted():
        return x.max(axis=0)
    result = plgpu.ShapeDtypeStruct((shape.cols,), jnp.float32, layout=_PER_COLUMN)

    @plgpu.inline_mgpu(arg_types=(_LAYOUT,), return_type=result)
    def emit(_, x):
        pairs = [_across_groups(both, arith.maximumf) for both in _of_thread(x, arith.maximumf)]
        return _fragmented(pairs, (shape.cols,), _PER_COLUMN)

    return emit(x)


def sums(x, shape: LeanShape):
    """Returns the sums of each column of `[kv, cols]` over a thread's keys, `[cols]`."""
    if is_interpreted():
        return x.sum(axis=0)
    result = plgpu.ShapeDtypeStruct((shape.cols,), jnp.float32, layout=_PER_COLUMN)

    @plgpu.inline_mgpu(arg_types=(_LAYOUT,), return_type=result)
    def emit(_, x):
        return _fragmented([_pair(*both) for both in _of_thread(x, arith.addf)], (shape.cols,), _PER_COLUMN)

    return emit(x)


def accumulated(acc, weights, value_smem, transforms, shape: LeanShape):
    """Returns `acc + V^T P^T` of each warp, `acc_shape`, from float32 weights `[kv, cols]`."""
    if is_interpreted():
        return acc + _interpreted_update(weights, _interpreted_read(value_smem), shape)
    kv = value_smem.shape[0]
    layout = plgpu.ShapeDtypeStruct(acc_shape(shape), jnp.float32, layout=_LAYOUT)

    @plgpu.inline_mgpu(arg_types=(_LAYOUT, _LAYOUT, plgpu.RefType(transforms)), return_type=layout)
    def emit(_, acc, weights, values):
        itemsize, blocks, rows = shape.key_itemsize, shape.cols // 8, shape.padded_head_dim // 16
        sums = np.array([element(x, i) for x in acc.registers.flat for i in range(2)], dtype=object)
        sums = sums.reshape(rows, blocks, 4)
        pairs = np.array([_transposed(_narrowed(x, shape)) for x in weights.registers.flat], dtype=object)
        right = pairs.reshape(kv // 64, blocks, 2)
        read = _reader(values, itemsize, trans=True)
        for block_kv in range(0, kv, 64):
            for row, left in enumerate(_value_fragments(read, block_kv, rows, shape)):
                for block in range(blocks):
                    sums[row, block] = _mma(left, right[block_kv // 64, block], sums[row, block], shape)
        out = [_pair(*x) for x in sums.reshape(-1, 2)]
        return _fragmented(out, acc_shape(shape), _LAYOUT)

    return emit(acc, weights, value_smem)


def reduced(x, smem, number: int, *, is_sum: bool):
    """Returns the sum of each column of `[kv, cols]` over all warps' keys, or the largest, `[cols]`.

    Pallas' reductions have two barriers for each 8 columns. Here is one: what is read after it stays until another
    barrier, which the caller has before it reduces to the same place again.

    Args:
      smem: float32 `[places, 4, cols]`, in shared memory; number: of the place that this reduction takes.
    """
    if is_interpreted():
        return x.sum(axis=0) if is_sum else x.max(axis=0)
    _, cols = x.shape
    result = plgpu.ShapeDtypeStruct((cols,), jnp.float32, layout=_PER_COLUMN)

    @plgpu.inline_mgpu(arg_types=(_LAYOUT, plgpu.RefType()), return_type=result)
    def emit(_, x, smem):
        combine = arith.addf if is_sum else arith.maximumf
        warp, group, place = thread()
        # Of a thread's two columns in each 8, of warp 0.
        first = arith.addi(_address(smem), arith.muli(place, _i32(8)))
        first = arith.addi(first, _i32(4 * WARPS * cols * number))
        of_warp = arith.addi(first, arith.muli(warp, _i32(4 * cols)))
        pairs = [_across_groups(both, combine) for both in _of_thread(x, combine)]
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, group, _i32(0))):
            for block, pair in enumerate(pairs):
                _store_floats(arith.addi(of_warp, _i32(32 * block)), pair)
        utils.warpgroup_barrier()
        out = []
        for block in range(cols // 8):
            at = [arith.addi(first, _i32(4 * cols * i + 32 * block)) for i in range(WARPS)]
            read = [asm("ld.shared.v2.f32 {$0, $1}, [$2];", "ff", x) for x in at]
            out.append(_pair(*(functools.reduce(combine, both) for both in zip(*read))))
        return _fragmented(out, (cols,), _PER_COLUMN)

    return emit(x, smem)


def store_transposed(ref, transforms, x, *, first_row: int = 0) -> None:
    """Stores `x^T` from column `first_row` on, rounded to the 16 bits of `ref`, in shared memory: without a barrier.

    Args:
      ref: `[cols, rows]`, with `transforms`.
      x: float32 `[rows, cols]`, of the layout WGMMA.
    """
    rows, cols = x.shape
    if is_interpreted():
        ref[:, first_row : first_row + rows] = x.T.astype(ref.dtype)
        return
    dtype = "bf16" if ref.dtype == jnp.bfloat16 else "f16"

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), _LAYOUT))
    def emit(_, ref, x):
        tiled = ir.MemRefType(ref.type)
        warp, group, place = thread()
        lane = arith.addi(arith.muli(group, _i32(4)), place)
        # Each thread names a row of 8 elements of a matrix, which is transposed: one column's of 8 rows of x.
        column, matrix = arith.andi(lane, _i32(7)), arith.shrui(lane, _i32(3))
        half, second = arith.andi(matrix, _i32(1)), arith.shrui(matrix, _i32(1))
        first_chunk = arith.addi(arith.muli(warp, _i32(2)), half)
        registers = x.registers.reshape(rows // 64, cols // 8, 2)
        blocks = [(row, block) for block in range(cols // 8) for row in range(rows // 64)]
        for (row, block), *other in (blocks[i : i + 2] for i in range(0, len(blocks), 2)):
            pairs = [pair for at in ((row, block), *other) for pair in registers[at]]
            words = [_halves(element(pair, 0), element(pair, 1), dtype) for pair in pairs]
            column_of, chunk_of = column, first_chunk
            for next_row, next_block in other:
                column_of = arith.addi(column_of, arith.muli(second, _i32(8 * (next_block - block))))
                chunk_of = arith.addi(chunk_of, arith.muli(second, _i32(8 * (next_row - row))))
            column_of = arith.addi(column_of, _i32(8 * block))
            chunk_of = arith.addi(chunk_of, _i32((64 * row + first_row) // 8))
            address = arith.addi(_address(ref), swizzled(tiled, 2, column_of, chunk_of))
            of_words = ", ".join(f"${i + 1}" for i in range(len(words)))
            text = f"stmatrix.sync.aligned.m8n8.x{len(words)}.trans.shared.b16 [$0], {{{of_words}}};"
            asm(text, "", address, *words)

    emit(ref, x)


def store_per_column(ref, x, number: int = 0) -> None:
    """Stores float32 `[cols]`, alike in all warps, to row `number` of `ref`, in shared memory: without a barrier.

    Args:
      ref: `[rows, cols]` or `[cols]`.
    """
    (cols,) = x.shape
    if is_interpreted():
        at = ref if ref.ndim == 1 else ref.at[number]
        at[...] = x
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _PER_COLUMN))
    def emit(_, ref, x):
        warp, group, place = thread()
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, arith.addi(warp, group), _i32(0))):
            for block, pair in enumerate(x.registers.flat):
                at = arith.addi(arith.muli(place, _i32(8)), _i32(4 * cols * number + 32 * block))
                _store_floats(arith.addi(_address(ref), at), pair)

    emit(ref, x)


def zero_others(value_smem, transforms, start, end, shape: LeanShape) -> None:
    """Puts zeros in place of the rows of a KV tile before `start` and from `end` on.

    Each warp does so for the rows that it reads in products by `mma.sync`. For others the caller awaits all warps.
    """
    scalar = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), scalar, scalar))
    def emit(_, values, start, end):
        warp, group, place = thread()
        lane = arith.addi(arith.muli(group, _i32(4)), place)
        start, end = (x.registers.item() for x in (start, end))
        tiled, itemsize = ir.MemRefType(values.type), shape.key_itemsize
        chunks = shape.padded_head_dim * itemsize // 16
        # Tiles of head dims lie at constant distances, so that few addresses take registers.
        chunks_of_tile = chunks if len(tiled.shape) == 2 else itemsize * tiled.shape[-1] // 16
        tile_bytes = itemsize * tiled.get_strides_and_offset()[0][1]
        for block_kv in range(0, value_smem.shape[0], 64):
            row = arith.addi(arith.muli(warp, _i32(KEYS)), arith.andi(lane, _i32(15)))
            row = arith.addi(row, _i32(block_kv))
            is_before = arith.cmpi(arith.CmpIPredicate.slt, row, start)
            is_beyond = arith.cmpi(arith.CmpIPredicate.sge, row, end)
            with mgpu.when(arith.ori(is_before, is_beyond)):
                for chunk in range(0, chunks_of_tile, 2):
                    chunk_of_lane = arith.addi(_i32(chunk), arith.shrui(lane, _i32(4)))
                    address = arith.addi(_address(values), swizzled(tiled, itemsize, row, chunk_of_lane))
                    for tile in range(chunks // chunks_of_tile):
                        at = arith.addi(address, _i32(tile * tile_bytes))
                        asm("st.shared.v4.b32 [$0], {$1, $1, $1, $1};", "", at, _i32(0))
        if shape.uses_mma:  # a copy may follow, and the warp's other threads read
            asm("fence.proxy.async.shared::cta; bar.warp.sync -1;", "")

    emit(value_smem, start, end)


def leave_states(acc, top, total, first_dim: int, accs_smem, stats_smem, shape: LeanShape) -> None:
    """Writes each warp's state to shared memory, of `PART` head dims from `first_dim` on.

    That is `acc` to `[4, PART, cols]`, `top` and the sum of weights to `[4, 2, cols]`. No thread may read them before
    `await_warps()`.

    Args:
      total: a sum of what `sums` returns.
    """
    if is_interpreted():
        per_warp = acc.reshape(shape.padded_head_dim // 16, WARPS, 16, shape.cols).swapaxes(0, 1)
        per_warp = per_warp.reshape(WARPS, shape.padded_head_dim, shape.cols)
        accs_smem[...] = per_warp[:, first_dim : first_dim + PART]
        by_warp = jnp.where(jnp.arange(WARPS)[:, None] == 0, total, 0.0)  # all have one `top`, so any may have the sum
        stats_smem[...] = jnp.stack([jnp.broadcast_to(top, by_warp.shape), by_warp], axis=1)
        return

    @plgpu.inline_mgpu(arg_types=(_LAYOUT, _PER_COLUMN, _PER_COLUMN, plgpu.RefType(), plgpu.RefType()))
    def emit(_, acc, top, total, accs, stats):
        warp, group, place = thread()
        blocks, cols = shape.cols // 8, shape.cols

        def store(ref, offset, pair, column):
            column = arith.addi(arith.muli(place, _i32(2)), _i32(column))
            _store_floats(arith.addi(_address(ref), arith.muli(_i32(4), arith.addi(offset, column))), pair)

        registers = acc.registers.reshape(shape.padded_head_dim // 16, blocks, 2)
        registers = registers[first_dim // 16 : (first_dim + PART) // 16]
        for row, block, half in itertools.product(*map(range, registers.shape)):
            within = arith.addi(arith.muli(group, _i32(2)), _i32(half)) if shape.key_itemsize == 1 else None
            within = arith.addi(group, _i32(8 * half)) if within is None else within
            dim = arith.addi(arith.addi(arith.muli(warp, _i32(PART)), _i32(16 * row)), within)
            store(accs, arith.muli(dim, _i32(cols)), registers[row, block, half], 8 * block)
        sums = [_across_groups([element(x, i) for i in range(2)], arith.addf) for x in total.registers.flat]
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, group, _i32(0))):
            for i, registers in enumerate((list(top.registers.flat), sums)):
                offset = arith.muli(arith.addi(arith.muli(warp, _i32(2)), _i32(i)), _i32(cols))
                for block in range(blocks):
                    store(stats, offset, registers[block], 8 * block)

    emit(acc, top, total, accs_smem, stats_smem)


def await_warps() -> None:
    """Waits until all warps have come here, and shows each what the others wrote to shared memory."""
    if is_interpreted():
        plgpu.commit_smem()
        return
    plgpu.inline_mgpu()(lambda _: utils.warpgroup_barrier())()


def _interpreted_read(ref):
    """Returns what is read; a copy may follow, which the race detector holds to be another thread's without this."""
    x = ref[...]
    plgpu.commit_smem()
    return x


def _interpreted_update(weights, values, shape: LeanShape):
    dtype = jnp.float16 if shape.is_widened else shape.dtype
    weights = weights.astype(dtype).astype(jnp.float32).reshape(-1, WARPS, KEYS, shape.cols)
    values = values.astype(jnp.float32).reshape(-1, WARPS, KEYS, shape.padded_head_dim)
    update = jnp.einsum("iwkd,iwkc->wdc", values, weights)
    return update.reshape(WARPS, -1, 16, shape.cols).swapaxes(0, 1).reshape(acc_shape(shape))


def _bag(count: int):
    """Returns the layout of `count` registers of each thread."""
    return plgpu.Layout.WG_STRIDED((THREADS * count,), vec_size=1)


def _bagged(words):
    vectors = [vector.broadcast(ir.VectorType.get((1,), x.type), x) for x in words]
    layout = _bag(len(words)).to_mgpu()
    return mgpu.FragmentedArray(_registers=np.array(vectors, dtype=object), _layout=layout, _is_signed=True)


def _fragmented(registers, shape, layout):
    layout = layout.to_mgpu()
    array = np.empty(len(registers), dtype=object)
    array[:] = registers
    return mgpu.FragmentedArray(
        _registers=array.reshape(layout.registers_shape(tuple(shape))), _layout=layout, _is_signed=None
    )


def _i32(value: int):
    return arith.constant(ir.IntegerType.get_signless(32), value)


def element(x, i: int = 0):
    """Returns element `i` of a vector."""
    return vector.extract(x, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i]))


def _pair(first, second):
    return vector.from_elements(ir.VectorType.get((2,), first.type), [first, second])


def thread():
    """Returns warp, group and place of this thread.

    They are read anew each time, so that no address that is seldom needed keeps a register all along the loops.
    """
    (number,) = asm("mov.u32 $0, %tid.x;", "r")
    return _places(number)


def _places(number):
    bits = lambda shift, mask: arith.andi(arith.shrui(number, _i32(shift)), _i32(mask))
    return bits(5, WARPS - 1), bits(2, 7), bits(0, 3)


def _address(ref):
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(ref))


def asm(text: str, results: str, *operands, moves: bool = False):
    """Emits PTX with results of the types `results`, each "r" or "f"; with `moves` the compiler may move it."""
    types = {"r": ir.IntegerType.get_signless(32), "f": ir.F32Type.get()}
    letters = {str(kind): letter for letter, kind in types.items()} | {"i64": "l", "i16": "h"}
    constraints = ",".join([f"={x}" for x in results] + [letters[str(x.type)] for x in operands])
    kinds = [types[x] for x in results]
    if len(kinds) == 0:
        kind = ir.Type.parse("!llvm.void")
    else:
        kind = kinds[0] if len(kinds) == 1 else llvm.StructType.get_literal(kinds)
    out = llvm.inline_asm(kind, list(operands), text, constraints, has_side_effects=not moves)
    if len(kinds) <= 1:
        return [out]
    return [llvm.extractvalue(kind, out, [i]) for i, kind in enumerate(kinds)]


def _store_floats(address, pair) -> None:
    asm("st.shared.v2.f32 [$0], {$1, $2};", "", address, *(element(pair, i) for i in range(2)))


def _shuffled(x, lane, plus):
    bits = arith.bitcast(ir.IntegerType.get_signless(32), x)
    (out,) = asm("shfl.sync.idx.b32 $0, $1, $2, 31, -1;", "r", bits, arith.addi(lane, plus))
    return arith.bitcast(x.type, out)


def _across(x, distance: int, combine):
    return combine(x, asm(f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, -1;", "f", x)[0])


def _of_thread(x, combine):
    """Yields the two reductions over a thread's keys of each 8 columns."""
    kv, cols = x.shape
    registers = x.registers.reshape(kv // 64, cols // 8, 2)
    for block in range(cols // 8):
        pairs = list(registers[:, block].flat)
        yield [functools.reduce(combine, [element(pair, i) for pair in pairs]) for i in range(2)]


def _across_groups(both, combine):
    """Returns the reductions of two values over the warp's threads of one place, as a pair."""
    for distance in (4, 8, 16):
        both = [_across(x, distance, combine) for x in both]
    return _pair(*both)


def _scaled(words):
    """Returns pairs of bfloat16 as pairs of float16, multiplied by a power of two, and that power's inverse."""
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    as_float = lambda x: arith.bitcast(f32, x)
    pairs = [(as_float(arith.shli(x, _i32(16))), as_float(arith.andi(x, _i32(-65536)))) for x in words]
    size = functools.reduce(arith.maximumf, [_absolute(x) for pair in pairs for x in pair])
    for distance in (1, 2):
        size = _across(size, distance, arith.maximumf)
    # The exponent's field; of less than 2^-100, nothing of which shows in a logit, the scale would overflow.
    field = arith.maxsi(arith.shrui(arith.bitcast(i32, size), _i32(23)), _i32(27))
    power = lambda x: as_float(arith.shli(x, _i32(23)))
    scale = power(arith.subi(_i32(2 * 127 + WEIGHT_EXPONENT), field))
    inverse = power(arith.subi(field, _i32(WEIGHT_EXPONENT)))
    return [_halves(*(arith.mulf(x, scale) for x in pair)) for pair in pairs], inverse


def _absolute(x):
    i32 = ir.IntegerType.get_signless(32)
    return arith.bitcast(x.type, arith.andi(arith.bitcast(i32, x), _i32(0x7FFFFFFF)))


def _halves(low, high, dtype: str = "f16"):
    return asm(f"cvt.rn.{dtype}x2.f32 $0, $2, $1;", "r", low, high, moves=True)[0]


def _narrowed(pair, shape: LeanShape):
    """Returns two weights in the dtype that the tensor core takes."""
    return _halves(element(pair, 0), element(pair, 1), _operand_type(shape))


def _transposed(word):
    return asm("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "r", word)[0]


def _operand_type(shape: LeanShape) -> str:
    return "bf16" if shape.dtype == jnp.bfloat16 and not shape.is_widened else "f16"


def swizzled(tiled, itemsize: int, row, chunk):
    """Returns the offset in bytes of a row's chunk of 16 bytes, in `[rows / 8, tiles, 8, width]` or in plain rows."""
    if len(tiled.shape) == 2:
        return arith.addi(arith.muli(row, _i32(itemsize * tiled.shape[1])), arith.muli(chunk, _i32(16)))
    (by_tile_row, by_tile, _, _), _ = tiled.get_strides_and_offset()
    width = itemsize * tiled.shape[-1]
    tile, chunk = (f(chunk, _i32(width // 16)) for f in (arith.divui, arith.remui))
    tile_row, row = (f(row, _i32(8)) for f in (arith.divui, arith.remui))
    within = arith.addi(arith.muli(row, _i32(width)), arith.muli(chunk, _i32(16)))
    within = arith.xori(within, arith.andi(arith.shrui(within, _i32(3)), _i32(width - 16)))
    before = arith.addi(arith.muli(tile_row, _i32(itemsize * by_tile_row)), arith.muli(tile, _i32(itemsize * by_tile)))
    return arith.addi(before, within)


def _reader(ref, itemsize: int, trans: bool):
    """Returns `(first row, chunk) -> words` of a warp's 16 rows: 8 rows and the next 8, of that chunk and the next.

    The chunk's number is even. With `is_alone` the next chunk is not read.
    """
    tiled = ir.MemRefType(ref.type)
    warp, group, place = _places(arith.index_cast(ir.IntegerType.get_signless(32), gpu.thread_id(gpu.Dimension.x)))
    lane = arith.addi(arith.muli(group, _i32(4)), place)
    row = arith.addi(arith.muli(warp, _i32(KEYS)), arith.andi(lane, _i32(15)))
    within = swizzled(tiled, itemsize, row, arith.shrui(lane, _i32(4)))
    base = _address(ref)
    is_plain = len(tiled.shape) == 2
    by_row, by_tile = (itemsize * x for x in tiled.get_strides_and_offset()[0][:2])
    chunks_of_tile = 0 if is_plain else itemsize * tiled.shape[-1] // 16
    transposed = "trans." if trans else ""

    def read(first_row: int, chunk: int, *, is_alone: bool = False):
        if is_plain:
            offset = arith.addi(within, _i32(first_row * by_row + 16 * chunk))
        else:
            # A lane's first chunk is 0 or 1 before the swizzle, which exchanges bits: an even one is added by them.
            offset = arith.xori(within, _i32(chunk % chunks_of_tile * 16))
            offset = arith.addi(offset, _i32(first_row // 8 * by_row + chunk // chunks_of_tile * by_tile))
        words = ["$0", "$1"] if is_alone else ["$0", "$1", "$2", "$3"]
        text = f"ldmatrix.sync.aligned.m8n8.x{len(words)}.{transposed}shared.b16 "
        text += f"{{{', '.join(words)}}}, [${len(words)}];"
        return asm(text, "r" * len(words), arith.addi(base, offset))

    return read


def _widened(word, shape: LeanShape):
    """Returns four float8 as two pairs of float16."""
    if not shape.target.has_float8:
        return [_widened_pair(asm(f"prmt.b32 $0, $1, 0, {order};", "r", word, moves=True)[0]) for order in _BYTES]
    text = "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }"
    return asm(text, "rr", word, moves=True)


def _widened_pair(word):
    """Returns two float8, each the upper byte of a half of `word`, as two float16.

    Their bits, moved down by one but for the sign, are float16 that are 2^-8 times as large. NaN has all bits set: it
    would become 480, so it is given the largest exponent.
    """
    magnitude = arith.andi(word, _i32(0x7F007F00))
    is_nan = arith.andi(arith.addi(magnitude, _i32(0x01000100)), _i32(-0x7FFF8000))  # in the place of the sign
    sign = arith.andi(word, _i32(-0x7FFF8000))
    bits = arith.xori(arith.shrui(magnitude, _i32(1)), sign)
    (wide,) = asm("mul.rn.f16x2 $0, $1, $2;", "r", bits, _i32(0x5C005C00), moves=True)  # 2^8
    exponent = arith.subi(is_nan, arith.shrui(is_nan, _i32(5)))
    return asm("or.b32 $0, $1, $2;", "r", wide, exponent, moves=True)[0]


def _key_fragments(read, block_kv: int, steps: int, shape: LeanShape):
    """Yields the left operands of 16 keys by 16 head dims."""
    if shape.key_itemsize == 2:
        for step in range(steps):
            yield read(block_kv, 2 * step)
        return
    for step in range(0, steps, 2):
        words = read(block_kv, step, is_alone=step == steps - 1)
        for low, high in (words[:2], words[2:])[: steps - step]:
            (a, c), (b, d) = _widened(low, shape), _widened(high, shape)
            yield a, b, c, d


def _value_fragments(read, block_kv: int, rows: int, shape: LeanShape):
    """Yields the left operands of 16 head dims by 16 keys."""
    if shape.key_itemsize == 2:
        for row in range(rows):
            a, c, b, d = read(block_kv, 2 * row)
            yield a, b, c, d
        return
    for row in range(0, rows, 2):
        words = read(block_kv, row)
        for first, second in (words[:2], words[2:]):
            pairs = [
                _widened(asm("prmt.b32 $0, $1, 0, 0x3120;", "r", x, moves=True)[0], shape) for x in (first, second)
            ]
            yield *pairs[0], *pairs[1]


def _mma(left, right, acc, shape: LeanShape):
    dtype = _operand_type(shape)
    numbers = iter(range(14))
    groups = ["{" + ", ".join(f"${next(numbers)}" for _ in range(n)) + "}" for n in (4, 4, 2)]
    text = f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 {', '.join(groups)}, "
    text += "{" + ", ".join(f"${next(numbers)}" for _ in range(4)) + "};"
    return asm(text, "ffff", *left, *right, *acc, moves=True)
