"""Columns and rows that pass through shared memory, thread by thread in NumPy, and their barriers."""

import math

import jax.numpy as jnp
import ml_dtypes
import mma_threads
import numpy as np
import pytest

from tree_attn.kernels import columns
from tree_attn.kernels.kv_parts import kv_tilings
from tree_attn.kernels.lean_layout import LeanConfig
from tree_attn.kernels.lean_merge import result_tiling
from tree_attn.kernels.lean_products import query_tiling
from tree_attn.kernels.targets import HOPPER


@pytest.mark.parametrize("rows", [64, 128, 192])
@pytest.mark.parametrize("cols", [8, 24, 64])
def test_columns_are_reduced_over_all_warps(memory, rows, cols):
    rng = np.random.default_rng(0)
    smem = mma_threads.Ref(memory.allocate(2 * 16 * cols), (2, 4, cols), 4)
    for number, is_sum in ((1, True), (0, False)):
        x = rng.normal(size=(rows, cols)).astype(np.float32)
        x[rng.integers(rows, size=3), rng.integers(cols, size=3)] = -np.inf
        found = mma_threads.per_warp(columns.reduced(mma_threads.split(x), smem, number, is_sum=is_sum))
        expected = x.sum(axis=0, dtype=np.float64) if is_sum else x.max(axis=0)
        np.testing.assert_allclose(found, np.broadcast_to(expected, found.shape), atol=1e-5 if is_sum else 0)


def test_a_place_of_reductions_needs_a_barrier_before_its_next(memory):
    smem, x = mma_threads.Ref(memory.allocate(2 * 16 * 8), (2, 4, 8), 4), mma_threads.split(np.ones((64, 8)))
    columns.reduced(x, smem, 0, is_sum=False)
    with pytest.raises(AssertionError, match="without a barrier"):
        columns.reduced(x, smem, 0, is_sum=False)
    memory.barrier()
    columns.reduced(x, smem, 0, is_sum=False)


@pytest.mark.parametrize(("head_dim", "rows", "first_row"), [(64, 64, 0), (128, 128, 0), (256, 64, 128), (80, 128, 0)])
@pytest.mark.parametrize("cols", [8, 24, 32])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_columns_are_stored_as_rows(memory, dtype, cols, head_dim, rows, first_row):
    shape = mma_threads.shape_of(head_dim, cols, dtype, dtype, HOPPER)
    x = np.random.default_rng(0).normal(size=(rows, cols)).astype(np.float32)
    before = np.full((cols, shape.padded_head_dim), 7, jnp.dtype(dtype))
    ref, transforms = memory.put(before, result_tiling(shape)), result_tiling(shape)
    columns.store_transposed(ref, transforms, mma_threads.split(x), first_row=first_row)
    before[:, first_row : first_row + rows] = x.T.astype(before.dtype)
    expected = memory.put(before, transforms)
    np.testing.assert_array_equal(memory.get(ref, np.uint16), memory.get(expected, np.uint16))


@pytest.mark.parametrize("block_kv", [64, 128])
@pytest.mark.parametrize(("head_dim", "cols"), [(64, 8), (80, 8), (128, 40), (256, 16)])
def test_weights_are_stored_as_rows(memory, head_dim, cols, block_kv):
    shape, config = mma_threads.shape_of(head_dim, cols, "bfloat16", "bfloat16", HOPPER), LeanConfig(block_kv=block_kv)
    x = np.random.default_rng(0).uniform(size=(block_kv, cols)).astype(np.float32)
    transforms = query_tiling(shape, config)
    ref = memory.put(np.zeros((cols, block_kv), ml_dtypes.bfloat16), transforms)
    columns.store_transposed(ref, transforms, mma_threads.split(x))
    expected = memory.put(np.ascontiguousarray(x.T).astype(ml_dtypes.bfloat16), transforms)
    np.testing.assert_array_equal(memory.get(ref, np.uint16), memory.get(expected, np.uint16))


@pytest.mark.parametrize(("size", "number"), [((24,), 0), ((2, 24), 1)])
def test_one_value_per_column_is_stored(memory, size, number):
    smem = mma_threads.Ref(memory.allocate(4 * math.prod(size)), size, 4)
    x = np.random.default_rng(0).normal(size=24).astype(np.float32)
    pairs = mma_threads.split(np.broadcast_to(x, (64, 24))).registers.reshape(3, 2)[:, 0]  # as all rows have them
    columns.store_per_column(smem, mma_threads.Fragments(pairs, None, (24,)), number)
    expected = np.zeros(size, np.float32)
    expected.reshape(-1, 24)[number] = x
    np.testing.assert_array_equal(memory.get(smem, np.float32), expected)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("start", "end"), [(-3, 37), (5, 200), (70, 101), (0, 0)])
@pytest.mark.parametrize("key_dtype", ["float8_e4m3fn", "bfloat16"])
def test_garbage_is_zeroed_and_nothing_else(memory, key_dtype, head_dim, start, end):
    shape = mma_threads.shape_of(head_dim, 8, "bfloat16", key_dtype, HOPPER)
    _, transforms = kv_tilings(shape, LeanConfig(block_kv=128))
    value = np.random.default_rng(0).normal(size=(128, shape.padded_head_dim)).astype(shape.key_dtype)
    ref = memory.put(value, transforms)
    columns.zero_others(ref, transforms, *(mma_threads.scalar(x) for x in (start, end)), shape)
    is_key = (np.arange(128) >= start) & (np.arange(128) < end)
    expected = memory.put(np.where(is_key[:, None], value, 0).astype(value.dtype), transforms)
    bits = {1: np.uint8, 2: np.uint16}[shape.key_itemsize]
    np.testing.assert_array_equal(memory.get(ref, bits), memory.get(expected, bits))
