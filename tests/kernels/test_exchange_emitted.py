"""The fused exchange as it is emitted, run thread by thread: states and their parts, merged among ranks."""

import dataclasses
import functools
import itertools
import types

import emitted
import numpy as np
import pytest
from few_rows_cases import Product
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

from tree_attn.kernels import epilogue, exchange, exchange_words, few_rows_broadcast
from tree_attn.kernels import mlir as ops
from tree_attn.kernels.exchange_words import Buffers, Place
from tree_attn.kernels.few_rows_layout import FewRowsConfig

THREADS, NUM_CTAS, STEP = 4, 2, 7
DEVICE_BYTES = 1 << 32  # between the buffers of two ranks


@pytest.fixture
def few_threads(monkeypatch):
    monkeypatch.setattr(exchange, "THREADS", THREADS)


def buffers_of(ranks: int, capacity: int) -> Buffers:
    return Buffers(table=0, num_ranks=ranks, capacity=capacity, num_ctas=NUM_CTAS)


def place_of(rank: int, ranks: int) -> Place:
    """Emits where the buffers are."""
    bases = [ops.constant((1 + r) * DEVICE_BYTES) for r in range(ranks)]
    return Place(bases, bases[rank], ops.constant(rank))


def states(ranks: int, shape, seed=0):
    """Random `(out, lse)` of each rank; of some rows a rank, or all of them, has no key."""
    rng = np.random.default_rng(seed)
    out, lse = rng.normal(size=(ranks, *shape)), 5 * rng.normal(size=(ranks, *shape[:2]))
    lse[rng.uniform(size=lse.shape) < 0.2] = -np.inf
    lse[:, -1] = -np.inf
    return np.where(np.isinf(lse)[..., None], 0.0, out).astype(np.float32), lse.astype(np.float32)


def merged(out, lse):
    """The merge of `(out, lse)` over the first axis, in float64."""
    out, lse = out.astype(np.float64), lse.astype(np.float64)
    top = np.maximum(lse.max(axis=0), -1e30)
    weights = np.exp(lse - top)
    total = weights.sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.where(total[..., None] > 0, (weights[..., None] * out).sum(axis=0) / total[..., None], 0.0)
        return mean, np.where(total > 0, top + np.log(total), -np.inf)


def results(shape):
    return np.full(shape, np.nan, np.float32), np.full(shape[:2], np.nan, np.float32)


def stale_memory(buffers: Buffers) -> emitted.Memory:
    """Memory in which every slot has NaN of the step before the last, which none may read."""
    memory = emitted.Memory()
    for rank, word in itertools.product(range(buffers.num_ranks), range(buffers.num_ranks * buffers.capacity)):
        slot = STEP % 2 * buffers.num_ranks * buffers.capacity
        memory.write((1 + rank) * DEVICE_BYTES + 8 * (slot + word), np.nan, STEP - 2)
    return memory


def assert_merged(found, out, lse):
    """All ranks have the same bits, and are near the merge of all."""
    expected_out, expected_lse = merged(out, lse)
    for one in found:
        np.testing.assert_allclose(one[0], expected_out, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(one[1], expected_lse, rtol=1e-5, atol=1e-5)
        for x, y in zip(one, found[0], strict=True):
            np.testing.assert_array_equal(x.view(np.uint32), y.view(np.uint32))


@pytest.mark.usefixtures("few_threads")
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("shape", [(1, 1, 4), (3, 4, 16), (5, 3, 13)])
def test_states_are_merged_over_ranks(ranks, shape):
    out, lse = states(ranks, shape)
    buffers = buffers_of(ranks, capacity=lse[0].size * (shape[-1] + 1))
    memory, found, threads = stale_memory(buffers), [], []
    for rank in range(ranks):

        def emit(*refs, rank=rank):
            step = arith.constant(ops.i32(), STEP)
            purpose = exchange._merging(*refs)
            for way in exchange.both_ways(*purpose, buffers, place_of(rank, ranks), step, NUM_CTAS):
                way()

        block = emitted.emitted(emit, [shape, shape[:2]] * 2, ["f32"] * 4)
        found.append(results(shape))
        threads += emitted.threads_of(block, [out[rank], lse[rank], *found[-1]], memory, NUM_CTAS, THREADS)
    emitted.run(threads)
    assert_merged(found, out, lse)


@pytest.mark.usefixtures("few_threads")
@pytest.mark.parametrize("purpose", [exchange._adding, exchange._gathering])
@pytest.mark.parametrize("count", [1, 8, 45])
def test_numbers_are_added_or_kept(purpose, count, ranks=3):
    x = np.random.default_rng(0).normal(size=(ranks, count)).astype(np.float32)
    buffers = buffers_of(ranks, capacity=count)
    memory, found, threads = stale_memory(buffers), [], []
    shape = (count,) if purpose is exchange._adding else (ranks, count)
    for rank in range(ranks):

        def emit(*refs, rank=rank):
            step = arith.constant(ops.i32(), STEP)
            for way in exchange.both_ways(*purpose(*refs), buffers, place_of(rank, ranks), step, NUM_CTAS):
                way()

        block = emitted.emitted(emit, [(count,), shape], ["f32"] * 2)
        found.append(np.full(shape, np.nan, np.float32))
        threads += emitted.threads_of(block, [x[rank], found[-1]], memory, NUM_CTAS, THREADS)
    emitted.run(threads)
    for one in found:
        np.testing.assert_array_equal(one, x[0] + x[1] + x[2] if purpose is exchange._adding else x)


@pytest.mark.usefixtures("few_threads")
@pytest.mark.parametrize("num_ctas", [2, 5, 40])
@pytest.mark.parametrize("spans", [[0, 1, 2, 3, 3, 9], [0, 3, 3, 4, 17], [0, 25]])
def test_partial_states_are_merged_before(spans, num_ctas, ranks=2):
    """Output tiles have none, one or many partial states, and a thread has elements of different tiles."""
    columns, head_dim, padded = 3, 12, 16
    shape = (len(spans) - 1, columns, head_dim)
    buffers = buffers_of(ranks, capacity=shape[0] * columns * (head_dim + 1))
    memory, found, threads, of_ranks = stale_memory(buffers), [], [], []
    for rank in range(ranks):
        acc, top, total = partials(spans[-1], columns, padded, seed=rank)
        leave_partials(memory, buffers, rank, acc, top, total)
        of_ranks.append(states_of(acc[:, :, :head_dim], top, total, spans))

        def emit(spans_ref, *refs, rank=rank):
            step = arith.constant(ops.i32(), STEP)
            end = epilogue.Epilogue(buffers, num_ctas)
            end.exchange(place_of(rank, ranks), step, spans_ref, exchange.writing(*refs), padded)

        block = emitted.emitted(emit, [(shape[0], 2), shape, shape[:2]], ["i32", "f32", "f32"])
        found.append(results(shape))
        of_tiles = np.stack([spans[:-1], spans[1:]], axis=1).astype(object)
        threads += emitted.threads_of(block, [of_tiles, *found[-1]], memory, num_ctas, THREADS)
    emitted.run(threads)
    assert_merged(found, *map(np.stack, zip(*of_ranks)))


def partials(count: int, columns: int, padded_head_dim: int, seed: int):
    """Random partial states: weighted values, and the maximum and the sum of each column, of exponents of 2."""
    rng = np.random.default_rng(seed)
    top, total = 5 * rng.normal(size=(count, columns)), rng.uniform(1, 9, size=(count, columns))
    is_empty = rng.uniform(size=top.shape) < 0.2
    top, total = np.where(is_empty, exchange.LOWEST, top), np.where(is_empty, 0.0, total)
    acc = total[..., None] * rng.normal(size=(count, columns, padded_head_dim))
    return (x.astype(np.float32) for x in (acc, top, total))


def leave_partials(memory, buffers: Buffers, rank: int, acc, top, total) -> None:
    """Writes partial states as `Epilogue.leave` does."""
    words = np.concatenate([acc, top[..., None], total[..., None]], axis=-1).swapaxes(1, 2)
    base = (1 + rank) * DEVICE_BYTES + buffers.partials_offset
    for i, payload in enumerate(words.ravel()):
        memory.write(base + 8 * i, payload, STEP)


def states_of(acc, top, total, spans):
    """The `(out, lse)` of output tiles from their partial states, in float64."""
    outs, lses = [], []
    for first, end in itertools.pairwise(spans):
        empty = total[first:end, :, None] == 0
        with np.errstate(divide="ignore", invalid="ignore"):
            out = np.where(empty, 0.0, acc[first:end].astype(np.float64) / total[first:end, :, None])
            lse = (top[first:end] + np.log2(total[first:end].astype(np.float64))) * np.log(2)
        nothing = np.zeros((1, *out.shape[1:])), np.full((1, *lse.shape[1:]), -np.inf)
        out, lse = merged(np.concatenate([nothing[0], out]), np.concatenate([nothing[1], lse]))
        outs.append(out)
        lses.append(lse)
    return np.stack(outs), np.stack(lses)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_readers_add_what_each_rank_sends(ranks, monkeypatch, rows=2, num_features=512, column=256):
    """A thread has a feature of each block of x, as in the CTAs of a chain."""
    shape = Product(rows=rows, in_features=num_features).shape
    config = FewRowsConfig(tile=8, tiles=1, num_ctas=1, block_in=128, num_stages=2, stack=2)
    x = np.random.default_rng(0).normal(size=(ranks, rows * num_features)).astype(np.float32)
    buffers = dataclasses.replace(buffers_of(ranks, capacity=x.shape[1]), table=None if ranks == 1 else 0)
    broadcast = few_rows_broadcast.Broadcast(None, buffers, step=None, features=num_features)
    memory, found, threads = stale_memory(buffers), [], []
    for rank in range(ranks):
        place = functools.partial(place_of, rank, ranks)
        monkeypatch.setattr(few_rows_broadcast, "locate", lambda *_, place=place: place())

        def receive(found_ref):
            values = [registers(STEP), registers(column)]
            addresses = few_rows_broadcast._addresses(broadcast, values, shape, config)
            first = [ops.int32(0)] * 2 * len(addresses)  # what was read before any was there
            sums = few_rows_broadcast.awaited_sums(broadcast, addresses, first, ops.int32(STEP))
            for i, total in enumerate(sums):
                memref.store(total, found_ref, [few_rows_broadcast.thread(), at(i)])

        def send(x_ref, place=place):
            sent = exchange_words.transport(buffers, place(), ops.int32(STEP))
            for first in range(0, x.shape[1], 128):
                element = arith.addi(few_rows_broadcast.thread(), at(first))
                sent.send(element, memref.load(x_ref, [element]))

        found.append(np.full((128, 2 * rows), np.nan, np.float32))
        block = emitted.emitted(receive, [found[-1].shape], ["f32"])
        threads += emitted.threads_of(block, [found[-1]], memory, 1, 128)
        block = emitted.emitted(send, [x[rank].shape], ["f32"])
        threads += emitted.threads_of(block, [x[rank]], memory, 1, 128)
    emitted.run(threads)
    expected = functools.reduce(np.add, x).reshape(rows, num_features)[:, column:].reshape(rows, 2, 128)
    for one in found:
        np.testing.assert_array_equal(one.T.reshape(2, rows, 128), expected.swapaxes(0, 1))


def registers(number: int):
    """Returns a scalar as a kernel has it."""
    return types.SimpleNamespace(registers=np.array([ops.int32(number)], dtype=object))


def at(number: int):
    return arith.constant(ir.IndexType.get(), number)
