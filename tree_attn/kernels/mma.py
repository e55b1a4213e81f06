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

Shapes in comments: t a thread's place in a group of four, g the group's in the warp.
"""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu

from tree_attn.kernels.interpreter import is_interpreted
from tree_attn.kernels.lean_layout import LeanShape
from tree_attn.kernels.mlir import asm_results, i32, int32
from tree_attn.kernels.warps import (
    KEYS,
    LAYOUT,
    PER_COLUMN,
    THREADS,
    WARPS,
    across,
    across_groups,
    address_of,
    bag,
    bagged,
    element,
    fragmented,
    halves,
    of_thread,
    pair_of,
    places,
    shuffled,
    store_floats,
    swizzled,
    thread,
)

PART = 64  # head dims of the states that warps leave at a time, for there is not much shared memory
WEIGHT_EXPONENT = 15  # of the largest weight in float16
_BYTES = "0x1404", "0x3424"  # of a word, each the upper of a half, the lower ones zero


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
    fragments = plgpu.ShapeDtypeStruct((THREADS * count,), jnp.int32, layout=bag(count))
    factors = plgpu.ShapeDtypeStruct((shape.cols,), jnp.float32, layout=PER_COLUMN)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms),), return_type=(fragments, factors))
    def emit(_, query):
        _, group, place = thread()
        itemsize = shape.key_itemsize
        columns, factors = [], []
        for column in range(0, shape.cols, 8):
            row = arith.addi(group, int32(column))
            words = []
            for first in range(0, shape.head_dim, 16):
                for half in range(2):
                    # In bytes: a thread has 4 neighbours of 16 head dims, or 2 of each 8.
                    at = int32(2 * first + 4 * half) if itemsize == 1 else int32(2 * first + 16 * half)
                    at = arith.addi(at, arith.muli(place, int32(8 if itemsize == 1 else 4)))
                    chunk, within = arith.shrui(at, int32(4)), arith.andi(at, int32(15))
                    address = arith.addi(swizzled(ir.MemRefType(query.type), 2, row, chunk), within)
                    (word,) = asm_results("ld.shared.b32 $0, [$1];", "r", arith.addi(address_of(query), address))
                    words.append(word)
            factor = arith.constant(ir.F32Type.get(), 1.0)
            if is_scaled(shape):
                words, factor = _scaled(words)
            columns += words
            factors.append(pair_of(*(shuffled(factor, arith.muli(place, int32(8)), int32(4 * i)) for i in range(2))))
        return bagged(columns), fragmented(factors, (shape.cols,), PER_COLUMN)

    fragments, factors = emit(query_smem)
    return fragments, factors if is_scaled(shape) else None


def logits(key_smem, transforms, fragments, shape: LeanShape):
    """Returns `K Q^T`, `[kv, cols]`."""
    if is_interpreted():
        keys = _interpreted_read(key_smem)
        return keys.astype(jnp.float32) @ fragments.astype(jnp.float32).T
    kv = key_smem.shape[0]
    count = shape.cols // 8 * shape.head_dim // 8
    result = plgpu.ShapeDtypeStruct((kv, shape.cols), jnp.float32, layout=LAYOUT)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), bag(count)), return_type=result)
    def emit(_, keys, fragments):
        itemsize, blocks = shape.key_itemsize, shape.cols // 8
        steps = shape.head_dim // 16
        words = [element(x) for x in fragments.registers.flat]
        right = np.array(words, dtype=object).reshape(blocks, steps, 2)
        read, dtype = reader(keys, itemsize, trans=False), _operand_type(shape)
        zero = arith.constant(ir.F32Type.get(), 0.0)
        out = []
        for block_kv in range(0, kv, 64):
            sums = np.full((2, blocks, 4), zero, dtype=object)  # of even and odd steps, whose products overlap
            for step, left in enumerate(_key_fragments(read, block_kv, steps, shape)):
                for block in range(blocks):
                    sums[step % 2, block] = multiply_and_add(left, right[block, step], sums[step % 2, block], dtype)
            for block in range(blocks):
                total = [arith.addf(*both) for both in zip(*sums[:, block])] if steps > 1 else sums[0, block]
                out += [pair_of(*total[:2]), pair_of(*total[2:])]
        return fragmented(out, (kv, shape.cols), LAYOUT)

    return emit(key_smem, fragments)


def largest(x, shape: LeanShape):
    """Returns the largest of each column of `[kv, cols]` among a warp's keys, `[cols]`."""
    if is_interpreted():
        return x.max(axis=0)
    result = plgpu.ShapeDtypeStruct((shape.cols,), jnp.float32, layout=PER_COLUMN)

    @plgpu.inline_mgpu(arg_types=(LAYOUT,), return_type=result)
    def emit(_, x):
        pairs = [across_groups(both, arith.maximumf) for both in of_thread(x, arith.maximumf)]
        return fragmented(pairs, (shape.cols,), PER_COLUMN)

    return emit(x)


def sums(x, shape: LeanShape):
    """Returns the sums of each column of `[kv, cols]` over a thread's keys, `[cols]`."""
    if is_interpreted():
        return x.sum(axis=0)
    result = plgpu.ShapeDtypeStruct((shape.cols,), jnp.float32, layout=PER_COLUMN)

    @plgpu.inline_mgpu(arg_types=(LAYOUT,), return_type=result)
    def emit(_, x):
        return fragmented([pair_of(*both) for both in of_thread(x, arith.addf)], (shape.cols,), PER_COLUMN)

    return emit(x)


def accumulated(acc, weights, value_smem, transforms, shape: LeanShape):
    """Returns `acc + V^T P^T` of each warp, `acc_shape`, from float32 weights `[kv, cols]`."""
    if is_interpreted():
        return acc + _interpreted_update(weights, _interpreted_read(value_smem), shape)
    kv = value_smem.shape[0]
    layout = plgpu.ShapeDtypeStruct(acc_shape(shape), jnp.float32, layout=LAYOUT)

    @plgpu.inline_mgpu(arg_types=(LAYOUT, LAYOUT, plgpu.RefType(transforms)), return_type=layout)
    def emit(_, acc, weights, values):
        itemsize, blocks, rows = shape.key_itemsize, shape.cols // 8, shape.padded_head_dim // 16
        sums = np.array([element(x, i) for x in acc.registers.flat for i in range(2)], dtype=object)
        sums = sums.reshape(rows, blocks, 4)
        pairs = np.array([_transposed(_narrowed(x, shape)) for x in weights.registers.flat], dtype=object)
        right = pairs.reshape(kv // 64, blocks, 2)
        read, dtype = reader(values, itemsize, trans=True), _operand_type(shape)
        for block_kv in range(0, kv, 64):
            for row, left in enumerate(_value_fragments(read, block_kv, rows, shape)):
                for block in range(blocks):
                    sums[row, block] = multiply_and_add(left, right[block_kv // 64, block], sums[row, block], dtype)
        out = [pair_of(*x) for x in sums.reshape(-1, 2)]
        return fragmented(out, acc_shape(shape), LAYOUT)

    return emit(acc, weights, value_smem)


def leave_states(acc, top, total, first_dim: int, accs_smem, stats_smem, shape: LeanShape) -> None:
    """Writes each warp's state to shared memory, of `PART` head dims from `first_dim` on.

    That is `acc` to `[4, PART, cols]`, `top` and the sum of weights to `[4, 2, cols]`. No thread may read them before
    `warps.await_all()`.

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

    @plgpu.inline_mgpu(arg_types=(LAYOUT, PER_COLUMN, PER_COLUMN, plgpu.RefType(), plgpu.RefType()))
    def emit(_, acc, top, total, accs, stats):
        warp, group, place = thread()
        blocks, cols = shape.cols // 8, shape.cols

        def store(ref, offset, pair, column):
            column = arith.addi(arith.muli(place, int32(2)), int32(column))
            store_floats(arith.addi(address_of(ref), arith.muli(int32(4), arith.addi(offset, column))), pair)

        registers = acc.registers.reshape(shape.padded_head_dim // 16, blocks, 2)
        registers = registers[first_dim // 16 : (first_dim + PART) // 16]
        for row, block, half in itertools.product(*map(range, registers.shape)):
            within = arith.addi(arith.muli(group, int32(2)), int32(half)) if shape.key_itemsize == 1 else None
            within = arith.addi(group, int32(8 * half)) if within is None else within
            dim = arith.addi(arith.addi(arith.muli(warp, int32(PART)), int32(16 * row)), within)
            store(accs, arith.muli(dim, int32(cols)), registers[row, block, half], 8 * block)
        sums = [across_groups([element(x, i) for i in range(2)], arith.addf) for x in total.registers.flat]
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, group, int32(0))):
            for i, registers in enumerate((list(top.registers.flat), sums)):
                offset = arith.muli(arith.addi(arith.muli(warp, int32(2)), int32(i)), int32(cols))
                for block in range(blocks):
                    store(stats, offset, registers[block], 8 * block)

    emit(acc, top, total, accs_smem, stats_smem)


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


def _scaled(words):
    """Returns pairs of bfloat16 as pairs of float16, multiplied by a power of two, and that power's inverse."""
    f32 = ir.F32Type.get()
    as_float = lambda x: arith.bitcast(f32, x)
    pairs = [(as_float(arith.shli(x, int32(16))), as_float(arith.andi(x, int32(-65536)))) for x in words]
    size = functools.reduce(arith.maximumf, [_absolute(x) for pair in pairs for x in pair])
    for distance in (1, 2):
        size = across(size, distance, arith.maximumf)
    # The exponent's field; of less than 2^-100, nothing of which shows in a logit, the scale would overflow.
    field = arith.maxsi(arith.shrui(arith.bitcast(i32(), size), int32(23)), int32(27))
    power = lambda x: as_float(arith.shli(x, int32(23)))
    scale = power(arith.subi(int32(2 * 127 + WEIGHT_EXPONENT), field))
    inverse = power(arith.subi(field, int32(WEIGHT_EXPONENT)))
    return [halves(*(arith.mulf(x, scale) for x in pair)) for pair in pairs], inverse


def _absolute(x):
    return arith.bitcast(x.type, arith.andi(arith.bitcast(i32(), x), int32(0x7FFFFFFF)))


def _narrowed(pair, shape: LeanShape):
    """Returns two weights in the dtype that the tensor core takes."""
    return halves(element(pair, 0), element(pair, 1), _operand_type(shape))


def _transposed(word):
    return asm_results("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "r", word)[0]


def _operand_type(shape: LeanShape) -> str:
    return "bf16" if shape.dtype == jnp.bfloat16 and not shape.is_widened else "f16"


def reader(ref, itemsize: int, trans: bool, offset=None):
    """Returns `(first row, chunk) -> words` of a warp's 16 rows: 8 rows and the next 8, of that chunk and the next.

    The chunk's number is even. With `is_alone` the next chunk is not read.

    Args:
      offset: bytes before row 0, a multiple of 1024, or None.
    """
    tiled = ir.MemRefType(ref.type)
    warp, group, place = places(arith.index_cast(i32(), gpu.thread_id(gpu.Dimension.x)))
    lane = arith.addi(arith.muli(group, int32(4)), place)
    row = arith.addi(arith.muli(warp, int32(KEYS)), arith.andi(lane, int32(15)))
    within = swizzled(tiled, itemsize, row, arith.shrui(lane, int32(4)))
    base = address_of(ref) if offset is None else arith.addi(address_of(ref), offset)
    is_plain = len(tiled.shape) == 2
    by_row, by_tile = (itemsize * x for x in tiled.get_strides_and_offset()[0][:2])
    chunks_of_tile = 0 if is_plain else itemsize * tiled.shape[-1] // 16
    transposed = "trans." if trans else ""

    def read(first_row: int, chunk: int, *, is_alone: bool = False):
        if is_plain:
            offset = arith.addi(within, int32(first_row * by_row + 16 * chunk))
        else:
            # A lane's first chunk is 0 or 1 before the swizzle, which exchanges bits: an even one is added by them.
            offset = arith.xori(within, int32(chunk % chunks_of_tile * 16))
            offset = arith.addi(offset, int32(first_row // 8 * by_row + chunk // chunks_of_tile * by_tile))
        words = ["$0", "$1"] if is_alone else ["$0", "$1", "$2", "$3"]
        text = f"ldmatrix.sync.aligned.m8n8.x{len(words)}.{transposed}shared.b16 "
        text += f"{{{', '.join(words)}}}, [${len(words)}];"
        return asm_results(text, "r" * len(words), arith.addi(base, offset))

    return read


def _widened(word, shape: LeanShape):
    """Returns four float8 as two pairs of float16."""
    if not shape.target.has_float8:
        return [_widened_pair(_permuted(word, order)) for order in _BYTES]
    text = "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }"
    return asm_results(text, "rr", word, moves=True)


def _permuted(word, order: str):
    """Returns bytes of a word, or zeros, in an order: a digit names each, 0 to 3 in the word, the last one first."""
    return asm_results(f"prmt.b32 $0, $1, 0, {order};", "r", word, moves=True)[0]


def _widened_pair(word):
    """Returns two float8, each the upper byte of a half of `word`, as two float16.

    Their bits, moved down by one but for the sign, are float16 that are 2^-8 times as large. NaN has all bits set: it
    would become 480, so it is given the largest exponent.
    """
    magnitude = arith.andi(word, int32(0x7F007F00))
    is_nan = arith.andi(arith.addi(magnitude, int32(0x01000100)), int32(-0x7FFF8000))  # in the place of the sign
    sign = arith.andi(word, int32(-0x7FFF8000))
    bits = arith.xori(arith.shrui(magnitude, int32(1)), sign)
    (wide,) = asm_results("mul.rn.f16x2 $0, $1, $2;", "r", bits, int32(0x5C005C00), moves=True)  # 2^8
    exponent = arith.subi(is_nan, arith.shrui(is_nan, int32(5)))
    return asm_results("or.b32 $0, $1, $2;", "r", wide, exponent, moves=True)[0]


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
            pairs = [_widened(_permuted(x, "0x3120"), shape) for x in (first, second)]
            yield *pairs[0], *pairs[1]


def multiply_and_add(left, right, acc, dtype: str):
    """Emits `acc + left right` of 16 rows, 8 columns and 16 terms.

    Args:
      left, right, acc: four, two and four registers of each thread.
      dtype: of the operands, "bf16" or "f16".
    """
    numbers = iter(range(14))
    groups = ["{" + ", ".join(f"${next(numbers)}" for _ in range(n)) + "}" for n in (4, 4, 2)]
    text = f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 {', '.join(groups)}, "
    text += "{" + ", ".join(f"${next(numbers)}" for _ in range(4)) + "};"
    return asm_results(text, "ffff", *left, *right, *acc, moves=True)
