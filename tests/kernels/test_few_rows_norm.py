"""The norm of few rows as a kernel emits it, thread by thread: Pallas' interpreter has another form."""

import types

import emitted
import ml_dtypes
import numpy as np
import pytest
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

from tree_attn.kernels import mlir as ops
from tree_attn.kernels.exchange import THREADS
from tree_attn.kernels.few_rows_broadcast import thread
from tree_attn.kernels.few_rows_norm import multiplied

SCALE_BASE = 1 << 16


def place_of(row: int, feature: int, block_in: int) -> int:
    """Returns where an element lies: in tiles of 8 rows and 64 features, whose chunks of 16 bytes are exchanged."""
    tile, chunk = row // 8 * (block_in // 64) + feature // 64, feature % 64 // 8
    return tile * 1024 + row % 8 * 128 + (chunk ^ row % 8) * 16 + feature % 8 * 2


@pytest.mark.parametrize("columns, adds_one", [(8, False), (8, True), (16, True)])
def test_x_is_multiplied_in_its_place_and_squares_are_added(columns, adds_one):
    config = types.SimpleNamespace(slabs=2, stack=2, block_in=THREADS)
    shape, rng = types.SimpleNamespace(columns=columns, adds_one=adds_one), np.random.default_rng(0)
    draw = lambda *sizes: rng.normal(size=sizes).astype(ml_dtypes.bfloat16)
    x, scale, before = draw(4 * columns, THREADS), draw(4, THREADS), draw(THREADS, columns).astype(np.float32)

    def emit(sums_ref):
        at = lambda column: arith.constant(ir.IndexType.get(), column)
        feature = arith.index_cast(ops.i32(), thread())
        places = [(feature, ops.int32(column)) for column in range(columns)]
        sums = [memref.load(sums_ref, [thread(), at(column)]) for column in range(columns)]
        for column, total in enumerate(multiplied((ops.int32(0), ops.int32(SCALE_BASE)), places, sums, shape, config)):
            memref.store(total, sums_ref, [thread(), at(column)])

    memory, sums = emitted.Memory(), before.copy()
    memory.shared |= {place_of(*where, THREADS): x[where] for where in np.ndindex(x.shape)}
    memory.shared |= {SCALE_BASE + 2 * i: number for i, number in enumerate(scale.flat)}
    block = emitted.emitted(emit, [sums.shape], ["f32"])
    emitted.run(emitted.threads_of(block, [sums], memory, 1, THREADS))
    wide = x.astype(np.float32).reshape(4, columns, THREADS)
    product = (wide * (scale.astype(np.float32) + adds_one)[:, None]).astype(ml_dtypes.bfloat16).reshape(x.shape)
    found = np.array([memory.shared[place_of(*where, THREADS)] for where in np.ndindex(x.shape)]).reshape(x.shape)
    np.testing.assert_array_equal(found, product)
    for of_block in wide:
        before += (of_block * of_block).T
    np.testing.assert_array_equal(sums, before)
