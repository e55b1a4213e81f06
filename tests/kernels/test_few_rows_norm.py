"""The norm of few rows as a kernel emits it, thread by thread: Pallas' interpreter has another form."""

import emitted
import ml_dtypes
import numpy as np
import pytest
from few_rows_cases import Product
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

from tree_attn.kernels import mlir as ops
from tree_attn.kernels.exchange_words import THREADS
from tree_attn.kernels.few_rows_broadcast import thread
from tree_attn.kernels.few_rows_layout import FewRowsConfig
from tree_attn.kernels.few_rows_norm import leave_sums, left_sum, multiplied, num_sums

SCALE_BASE = 1 << 16


def place_of(row: int, feature: int, block_in: int) -> int:
    """Returns where an element lies: in tiles of 8 rows and 64 features, whose chunks of 16 bytes are exchanged."""
    tile, chunk = row // 8 * (block_in // 64) + feature // 64, feature % 64 // 8
    return tile * 1024 + row % 8 * 128 + (chunk ^ row % 8) * 16 + feature % 8 * 2


@pytest.mark.parametrize(
    "rows, block_in, adds_one, is_compact",
    [
        (1, 128, False, False), (3, 128, True, False), (12, 128, True, False), (2, 256, False, False),
        (5, 64, True, False), (1, 128, True, True), (3, 128, False, True), (2, 256, True, True),
    ],
)  # fmt: skip
def test_x_is_multiplied_in_its_place_and_squares_are_added(rows, block_in, adds_one, is_compact):
    rng = np.random.default_rng(0)
    shape = Product(rows=rows, in_features=4 * block_in, options={"eps": 1e-5, "adds_one": adds_one}).shape
    config = FewRowsConfig(
        tile=8, tiles=1, num_ctas=1, block_in=block_in, num_stages=2, slabs=2, stack=2, is_compact=is_compact
    )
    x_rows = config.x_rows(shape)
    draw = lambda *sizes: rng.normal(size=sizes).astype(ml_dtypes.bfloat16)
    x, scale = draw(4, x_rows, block_in), draw(4, block_in)
    x[:, rows:] = 0
    count = num_sums(shape, config)
    before = rng.normal(size=(THREADS, count)).astype(np.float32)

    def emit(sums_ref):
        sums = [memref.load(sums_ref, [thread(), at(i)]) for i in range(count)]
        for i, total in enumerate(multiplied((ops.int32(0), ops.int32(SCALE_BASE)), sums, shape, config)):
            memref.store(total, sums_ref, [thread(), at(i)])

    memory, sums = emitted.Memory(), before.copy()
    flat = x.reshape(-1, block_in)
    place = (lambda row, feature, width: (row * width + feature) * 2) if is_compact else place_of
    memory.shared |= {place(*where, block_in): flat[where] for where in np.ndindex(flat.shape)}
    memory.shared |= {SCALE_BASE + 2 * i: number for i, number in enumerate(scale.flat)}
    run(emit, sums, memory)
    wide = x.astype(np.float32)
    product = (wide * (scale.astype(np.float32) + adds_one)[:, None]).astype(ml_dtypes.bfloat16).reshape(flat.shape)
    found = np.array([memory.shared[place(*where, block_in)] for where in np.ndindex(flat.shape)])
    np.testing.assert_array_equal(found.reshape(flat.shape), product)
    totals = added_up(sums - before, shape, config)
    np.testing.assert_allclose(totals[:, :rows], np.tile((wide**2).sum((0, 2))[:rows], (64, 1)), rtol=1e-5)


def added_up(sums, shape, config):
    """Returns what threads find of each column in the rows of a tile, `[64, cols]`."""
    memory, found = emitted.Memory(), np.zeros((64, shape.columns), np.float32)

    def leave(sums_ref):
        leave_sums(ops.int32(SCALE_BASE), [memref.load(sums_ref, [thread(), at(i)]) for i in range(sums.shape[1])])

    def read(found_ref):
        for column in range(shape.columns):
            total = left_sum(ops.int32(SCALE_BASE), at(column), shape, config)
            memref.store(total, found_ref, [arith.remui(thread(), at(64)), at(column)])

    run(leave, sums, memory)
    run(read, found, memory)
    return found


def at(number: int):
    return arith.constant(ir.IndexType.get(), number)


def run(emit, array, memory) -> None:
    """Runs what `emit` emits for a reference to a float32 array, by the threads of one warpgroup."""
    block = emitted.emitted(emit, [array.shape], ["f32"])
    emitted.run(emitted.threads_of(block, [array], memory, 1, THREADS))
