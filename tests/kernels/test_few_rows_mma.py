"""Products of rows that nothing pads, thread by thread in NumPy, against plain products."""

import dataclasses

import jax.numpy as jnp
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
    (1, {}, {"tile": 32, "stack": 2, "slabs": 2, "rows": 128}),
    (3, {"parts": 2, "activation": "silu"}, {"tile": 56, "rows": 128}),
    (2, {}, {"tile": 16, "stack": 4, "slabs": 2, "rows": 128}),
    (4, {}, {"tile": 24, "stack": 2}),
    (1, {}, {"tile": 8, "stack": 8}),
    (1, {}, {"tile": 48, "slabs": 2, "rows": 128}),
    (3, {}, {"tile": 40}),
    (1, {}, {"tile": 64, "block_in": 256}),
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("rows", "options", "layout"), CASES, ids=str)
def test_a_stage_is_multiplied_as_it_should_be(memory, rows, options, layout, dtype):
    shape = Product(rows=rows, options=options, dtype=dtype).shape
    config = FewRowsConfig(
        **{"tiles": 1, "num_ctas": 1, "block_in": 128, "num_stages": STAGES, "is_compact": True} | layout
    )
    blocks, rng = config.slabs * config.stack, np.random.default_rng(0)
    draw = lambda *size: rng.normal(size=size).astype(jnp.dtype(dtype))
    weights = draw(STAGES * config.stage_rows(shape) - config.stacked + 64, config.block_in)
    x = draw(STAGES, blocks + 2, rows, config.block_in)  # another product of a chain may have more blocks
    x_ref = memory.put(x.reshape(-1, config.block_in), None)
    x_ref.shape = STAGES, (blocks + 2) * rows, config.block_in
    refs = memory.put(weights, tiling(jnp.dtype(dtype), 64)), x_ref
    zero = mma_threads.scalar(0).registers[0]
    zero = dataclasses.replace(zero, kind="f32", array=np.zeros(128, np.float32))
    sums = [[zero] * 4 for _ in range(shape.parts)]
    for stage in range(STAGES):
        number = mma_threads.scalar(stage).registers[0]
        sums = few_rows_mma.multiply_stage(sums, *refs, number, shape, config)
    for part, of_part in enumerate(sums):
        pairs = [few_rows_mma.pair_of(*of_part[:2]), few_rows_mma.pair_of(*of_part[2:])]
        product = few_rows_mma.in_columns(few_rows_mma.fragmented(pairs, few_rows_mma.SIZE, few_rows_mma.LAYOUT))
        found = mma_threads.joined(product, few_rows_mma.SIZE)
        folded = sum(found[place * config.tile :][: config.tile, :rows] for place in range(config.stack))
        expected = expected_of(part, weights, x, shape, config)
        np.testing.assert_allclose(folded, expected, atol=1e-5 * np.abs(expected).max(), rtol=1e-5)


def expected_of(part: int, weights, x, shape, config):
    """Returns a part's out-features of the tile, `[tile, rows]`, float64."""
    total = 0.0
    for stage in range(STAGES):
        for block in range(config.slabs * config.stack):
            first = stage * config.stage_rows(shape)
            first += row_of(block // config.stack, part, block % config.stack, 0, shape, config)
            of_block = weights[first : first + config.tile].astype(np.float64)
            total = total + of_block @ x[stage, block].astype(np.float64).T
    return total
