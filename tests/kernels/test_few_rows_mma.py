"""Products of rows that nothing pads, thread by thread in NumPy, against plain products."""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import mma_threads
import numpy as np
import pytest
from few_rows_cases import Product

from tree_attn.kernels import few_rows_mma
from tree_attn.kernels.few_rows_copies import row_of
from tree_attn.kernels.few_rows_layout import FewRowsConfig
from tree_attn.kernels.registers import tiling

STAGES = 2
# Rows, and what differs in shape and layout. Tiles of 24 have rows of two blocks in one warp.
CASES = [
    (1, {"eps": 1e-5}, {"tile": 32, "stack": 2, "slabs": 2, "rows": 128}),
    (3, {"eps": 1e-5, "adds_one": True, "parts": 2, "activation": "silu"}, {"tile": 56, "rows": 128}),
    (2, {"has_residual": True}, {"tile": 16, "stack": 4, "slabs": 2, "rows": 128}),
    (4, {"eps": 1e-5}, {"tile": 24, "stack": 2}),
    (1, {"eps": 1e-5}, {"tile": 8, "stack": 8}),
    (1, {"eps": 1e-5}, {"tile": 48, "slabs": 2, "rows": 128}),
    (2, {"eps": 1e-5}, {"tile": 40, "block_in": 64}),
    (1, {}, {"tile": 64, "block_in": 256}),
]


@pytest.mark.parametrize(
    ("rows", "options", "layout", "dtype"),
    [
        (*case, dtype)
        for case in CASES
        for dtype in ("bfloat16", *(() if "eps" in case[1] else ("float16",)))  # float16 has no norm
    ],
    ids=str,
)
def test_a_stage_is_multiplied_as_it_should_be(memory, rows, options, layout, dtype):
    shape = Product(rows=rows, options=options, dtype=dtype).shape
    config = FewRowsConfig(**{"tiles": 1, "num_ctas": 1, "block_in": 128, "num_stages": STAGES} | layout)
    blocks, rng = config.slabs * config.stack, np.random.default_rng(0)
    draw = lambda *size: rng.normal(size=size).astype(jnp.dtype(dtype))
    weights = draw(STAGES * config.stage_rows(shape) - config.stacked + 64, config.block_in)
    x, scale = draw(STAGES, blocks, rows, config.block_in), draw(STAGES, blocks, config.block_in)
    refs = [memory.put(weights, tiling(jnp.dtype(dtype), 64)), memory.put(x.reshape(-1, config.block_in), None)]
    if shape.eps is not None:
        refs.append(memory.put(scale.reshape(-1, config.block_in), None))
    zero = mma_threads.scalar(0).registers[0]
    nothing = dataclasses.replace(zero, kind="f32", array=np.zeros(128, np.float32))
    sums, square = [[nothing] * 4 for _ in range(shape.parts)], None if shape.eps is None else nothing
    for stage in range(STAGES):
        number = mma_threads.scalar(stage).registers[0]
        sums, square = few_rows_mma.multiply_stage(sums, square, refs, number, shape, config)
    for part, of_part in enumerate(sums):
        pairs = [few_rows_mma.pair_of(*of_part[:2]), few_rows_mma.pair_of(*of_part[2:])]
        product = few_rows_mma.in_columns(few_rows_mma.fragmented(pairs, few_rows_mma.SIZE, few_rows_mma.LAYOUT))
        found = mma_threads.joined(product, few_rows_mma.SIZE)
        folded = sum(found[place * config.tile :][: config.tile, :rows] for place in range(config.stack))
        expected = expected_of(part, weights, x, scale, shape, config)
        np.testing.assert_allclose(folded, expected, atol=1e-5 * np.abs(expected).max(), rtol=1e-5)
    if square is not None:
        smem = memory.put(np.zeros((8, 4), np.float32), None)
        totals = few_rows_mma.totals(few_rows_mma.bagged([square]), smem, shape, config)
        squares = np.square(x.astype(np.float64)).sum((0, 1, 3))
        found = mma_threads.joined(totals, few_rows_mma.SIZE)[:, :rows]
        np.testing.assert_allclose(found, np.tile(squares, (64, 1)), rtol=1e-5)


def expected_of(part: int, weights, x, scale, shape, config):
    """Returns a part's out-features of the tile, `[tile, rows]`, float64, of x that is rounded when it is scaled."""
    if shape.eps is not None:
        scaled = x.astype(np.float32) * (scale.astype(np.float32) + shape.adds_one)[:, :, None]
        x = scaled.astype(ml_dtypes.bfloat16)
    total = 0.0
    for stage in range(STAGES):
        for block in range(config.slabs * config.stack):
            first = stage * config.stage_rows(shape)
            first += row_of(block // config.stack, part, block % config.stack, 0, shape, config)
            of_block = weights[first : first + config.tile].astype(np.float64)
            total = total + of_block @ x[stage, block].astype(np.float64).T
    return total
