"""Products by `mma.sync`, thread by thread in NumPy, against plain products."""

import math

import jax.numpy as jnp
import ml_dtypes
import mma_threads
import numpy as np
import pytest

from tree_attn.kernels import mma
from tree_attn.kernels.kv_parts import kv_tilings
from tree_attn.kernels.lean_layout import LeanConfig, LeanShape
from tree_attn.kernels.lean_merge import result_tiling
from tree_attn.kernels.lean_products import query_tiling
from tree_attn.kernels.targets import AMPERE, HOPPER, TARGETS


def shape_of(head_dim, cols, dtype, key_dtype, target=AMPERE):
    return LeanShape(
        batch=1, num_kv_heads=1, col_blocks=1, cols=cols, head_dim=head_dim, scale=1.0, logits_soft_cap=None,
        mask="none", num_slots=128, dtype=jnp.dtype(dtype), key_dtype=jnp.dtype(key_dtype), target=target,
    )  # fmt: skip


@pytest.fixture
def memory(monkeypatch):
    with mma_threads.threads(monkeypatch) as memory:
        yield memory


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
    shape = shape_of(head_dim, cols, dtype, key_dtype)
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


@pytest.mark.parametrize("rows", [64, 128, 192])
@pytest.mark.parametrize("cols", [8, 24, 64])
def test_columns_are_reduced_over_all_warps(memory, rows, cols):
    rng = np.random.default_rng(0)
    smem = mma_threads.Ref(memory.allocate(2 * 16 * cols), (2, 4, cols), 4)
    for number, is_sum in ((1, True), (0, False)):
        x = rng.normal(size=(rows, cols)).astype(np.float32)
        x[rng.integers(rows, size=3), rng.integers(cols, size=3)] = -np.inf
        found = mma_threads.per_warp(mma.reduced(mma_threads.split(x), smem, number, is_sum=is_sum))
        expected = x.sum(axis=0, dtype=np.float64) if is_sum else x.max(axis=0)
        np.testing.assert_allclose(found, np.broadcast_to(expected, found.shape), atol=1e-5 if is_sum else 0)


def test_a_place_of_reductions_needs_a_barrier_before_its_next(memory):
    smem, x = mma_threads.Ref(memory.allocate(2 * 16 * 8), (2, 4, 8), 4), mma_threads.split(np.ones((64, 8)))
    mma.reduced(x, smem, 0, is_sum=False)
    with pytest.raises(AssertionError, match="without a barrier"):
        mma.reduced(x, smem, 0, is_sum=False)
    memory.barrier()
    mma.reduced(x, smem, 0, is_sum=False)


@pytest.mark.parametrize(("head_dim", "rows", "first_row"), [(64, 64, 0), (128, 128, 0), (256, 64, 128), (80, 128, 0)])
@pytest.mark.parametrize("cols", [8, 24, 32])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_columns_are_stored_as_rows(memory, dtype, cols, head_dim, rows, first_row):
    shape = shape_of(head_dim, cols, dtype, dtype, HOPPER)
    x = np.random.default_rng(0).normal(size=(rows, cols)).astype(np.float32)
    before = np.full((cols, shape.padded_head_dim), 7, jnp.dtype(dtype))
    ref, transforms = memory.put(before, result_tiling(shape)), result_tiling(shape)
    mma.store_transposed(ref, transforms, mma_threads.split(x), first_row=first_row)
    before[:, first_row : first_row + rows] = x.T.astype(before.dtype)
    expected = memory.put(before, transforms)
    np.testing.assert_array_equal(memory.get(ref, np.uint16), memory.get(expected, np.uint16))


@pytest.mark.parametrize("block_kv", [64, 128])
@pytest.mark.parametrize(("head_dim", "cols"), [(64, 8), (80, 8), (128, 40), (256, 16)])
def test_weights_are_stored_as_rows(memory, head_dim, cols, block_kv):
    shape, config = shape_of(head_dim, cols, "bfloat16", "bfloat16", HOPPER), LeanConfig(block_kv=block_kv)
    x = np.random.default_rng(0).uniform(size=(block_kv, cols)).astype(np.float32)
    transforms = query_tiling(shape, config)
    ref = memory.put(np.zeros((cols, block_kv), ml_dtypes.bfloat16), transforms)
    mma.store_transposed(ref, transforms, mma_threads.split(x))
    expected = memory.put(np.ascontiguousarray(x.T).astype(ml_dtypes.bfloat16), transforms)
    np.testing.assert_array_equal(memory.get(ref, np.uint16), memory.get(expected, np.uint16))


@pytest.mark.parametrize(("size", "number"), [((24,), 0), ((2, 24), 1)])
def test_one_value_per_column_is_stored(memory, size, number):
    smem = mma_threads.Ref(memory.allocate(4 * math.prod(size)), size, 4)
    x = np.random.default_rng(0).normal(size=24).astype(np.float32)
    pairs = mma_threads.split(np.broadcast_to(x, (64, 24))).registers.reshape(3, 2)[:, 0]  # as all rows have them
    mma.store_per_column(smem, mma_threads.Fragments(pairs, None, (24,)), number)
    expected = np.zeros(size, np.float32)
    expected.reshape(-1, 24)[number] = x
    np.testing.assert_array_equal(memory.get(smem, np.float32), expected)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("start", "end"), [(-3, 37), (5, 200), (70, 101), (0, 0)])
@pytest.mark.parametrize("key_dtype", ["float8_e4m3fn", "bfloat16"])
def test_garbage_is_zeroed_and_nothing_else(memory, key_dtype, head_dim, start, end):
    shape = shape_of(head_dim, 8, "bfloat16", key_dtype, HOPPER)
    _, transforms = kv_tilings(shape, LeanConfig(block_kv=128))
    value = np.random.default_rng(0).normal(size=(128, shape.padded_head_dim)).astype(shape.key_dtype)
    ref = memory.put(value, transforms)
    mma.zero_others(ref, transforms, *(mma_threads.scalar(x) for x in (start, end)), shape)
    is_key = (np.arange(128) >= start) & (np.arange(128) < end)
    expected = memory.put(np.where(is_key[:, None], value, 0).astype(value.dtype), transforms)
    bits = {1: np.uint8, 2: np.uint16}[shape.key_itemsize]
    np.testing.assert_array_equal(memory.get(ref, bits), memory.get(expected, bits))


def test_float8_is_widened_alike_with_and_without_the_instruction(memory):
    codes = np.arange(256, dtype=np.uint8)
    words = mma_threads.Value("i32", np.resize(codes, 4 * mma.THREADS).view(np.int32))
    expected = np.resize(codes.view(ml_dtypes.float8_e4m3fn), 4 * mma.THREADS).astype(np.float16).reshape(-1, 2, 2)
    for target in (AMPERE, TARGETS["8.9"]):
        pairs = mma._widened(words, shape_of(64, 8, "float16", "float8_e4m3fn", target))
        for i, pair in enumerate(pairs):
            found = pair.array.view(np.float16).reshape(-1, 2)
            np.testing.assert_array_equal(found, expected[:, i])
