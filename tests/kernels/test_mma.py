"""Products by `mma.sync`, thread by thread in NumPy, against plain products."""

import jax.numpy as jnp
import ml_dtypes
import mma_threads
import numpy as np
import pytest

from tree_attn.kernels import mma, warps
from tree_attn.kernels.kv_parts import kv_tilings
from tree_attn.kernels.lean_layout import LeanConfig
from tree_attn.kernels.lean_products import query_tiling
from tree_attn.kernels.targets import AMPERE, TARGETS

CASES = [
    (128, 8, "bfloat16", "float8_e4m3fn"),
    (128, 8, "float16", "float8_e4m3fn"),
    (64, 16, "bfloat16", "float8_e4m3fn"),
    (256, 8, "bfloat16", "float8_e4m3fn"),
    (80, 8, "bfloat16", "float8_e4m3fn"),
    (96, 8, "bfloat16", "float8_e4m3fn"),
    (128, 8, "bfloat16", "bfloat16"),
    (64, 24, "float16", "float16"),
    (256, 8, "bfloat16", "bfloat16"),
    (80, 8, "bfloat16", "bfloat16"),
    (96, 8, "bfloat16", "bfloat16"),
]


@pytest.mark.parametrize("kv", [64, 128])
@pytest.mark.parametrize(("head_dim", "cols", "dtype", "key_dtype"), CASES)
def test_fragments_multiply_what_they_should(memory, head_dim, cols, dtype, key_dtype, kv):
    shape = mma_threads.shape_of(head_dim, cols, dtype, key_dtype)
    rng = np.random.default_rng(0)
    draw = lambda *size: rng.normal(size=size).astype(np.float32)
    size = np.exp2(rng.integers(-60, 60, size=(cols, 1))) if dtype == "bfloat16" else 1.0
    query = (draw(cols, head_dim) * size).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16)
    key = draw(kv, head_dim).astype(jnp.dtype(key_dtype))
    value = draw(kv, shape.padded_head_dim).astype(jnp.dtype(key_dtype))
    config = LeanConfig(block_kv=kv)
    transforms, (key_transforms, value_transforms) = query_tiling(shape, config), kv_tilings(shape, config)

    fragments, factors = mma.query_fragments(memory.put(query, transforms), transforms, shape)
    key_ref, value_ref = memory.put(key, key_transforms), memory.put(value, value_transforms)
    found = mma_threads.joined(mma.logits(key_ref, key_transforms, fragments, shape), (kv, cols))
    found = found if factors is None else found * mma_threads.per_warp(factors)[0]
    expected = key.astype(np.float64) @ query.astype(np.float64).T
    np.testing.assert_allclose(found, expected, atol=1e-5 * abs(expected).max(axis=0).max(), rtol=1e-5)
    np.testing.assert_allclose(found / np.squeeze(size), expected / np.squeeze(size), atol=1e-4)

    tops = mma_threads.per_warp(mma.largest(mma_threads.split(found), shape))
    by_warp = lambda x: x.reshape(kv // 64, 4, 16, -1)
    np.testing.assert_array_equal(tops, by_warp(found).max(axis=(0, 2)))

    weights = rng.uniform(size=(kv, cols)).astype(np.float32)
    weights *= 2.0 ** mma.weight_exponent(shape)
    acc = draw(*mma.acc_shape(shape))
    after = mma.accumulated(mma_threads.split(acc), mma_threads.split(weights), value_ref, value_transforms, shape)
    top_of, sums_of = (mma_threads.split(x) for x in (found, weights))
    end = lambda: (mma.largest(top_of, shape), mma.sums(sums_of, shape))
    accs = mma_threads.Ref(memory.allocate(16 * mma.PART * cols), (4, mma.PART, cols), 4)
    stats = mma_threads.Ref(memory.allocate(32 * cols), (4, 2, cols), 4)

    def left(acc):
        for first_dim in range(0, shape.padded_head_dim, mma.PART):
            mma.leave_states(acc, *end(), first_dim, accs, stats, shape)
            yield memory.get(accs, np.float32).copy()

    update = np.concatenate([x - y for x, y in zip(left(after), left(mma_threads.split(acc)))], axis=1)
    expected = np.einsum("iwkd,iwkc->wdc", by_warp(value.astype(np.float64)), by_warp(weights.astype(np.float64)))
    rounding = 2.0**-8 if dtype == key_dtype == "bfloat16" else 2.0**-11
    np.testing.assert_allclose(update, expected, atol=rounding * abs(expected).max())
    stats = memory.get(stats, np.float32)
    np.testing.assert_array_equal(stats[:, 0], tops)
    np.testing.assert_allclose(stats[:, 1], by_warp(weights).sum(axis=(0, 2)), rtol=1e-6)


def test_float8_is_widened_alike_with_and_without_the_instruction(memory):
    codes = np.arange(256, dtype=np.uint8)
    words = mma_threads.Value("i32", np.resize(codes, 4 * warps.THREADS).view(np.int32))
    expected = np.resize(codes.view(ml_dtypes.float8_e4m3fn), 4 * warps.THREADS).astype(np.float16).reshape(-1, 2, 2)
    for target in (AMPERE, TARGETS["8.9"]):
        pairs = mma._widened(words, mma_threads.shape_of(64, 8, "float16", "float8_e4m3fn", target))
        for i, pair in enumerate(pairs):
            found = pair.array.view(np.float16).reshape(-1, 2)
            np.testing.assert_array_equal(found, expected[:, i])
