"""Placement: the shard and slot of each key, contiguous, block-cyclic and zigzag."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tree_attn import PromptLayout, Shard, storage_order
from tree_attn.placement import locate

PLACEMENTS = [(1, None, 6), (3, None, 4), (1, 2, 6), (2, 1, 5), (3, 2, 4), (8, 5, 10)]  # shards, block, slots per shard
PLACEMENTS += [(1, "zigzag", 4), (3, "zigzag", 6), (8, "zigzag", 4)]


def shards(num_shards, block_size):
    return [Shard(index=i, num_shards=num_shards, block_size=block_size) for i in range(num_shards)]


@pytest.mark.parametrize(
    "num_shards, block_size, expected",
    [
        (2, None, [0, 1, 2, 3, 4, 5, 6, 7]),
        (2, 1, [0, 2, 4, 6, 1, 3, 5, 7]),
        (2, 2, [0, 1, 4, 5, 2, 3, 6, 7]),
        (4, 1, [0, 4, 1, 5, 2, 6, 3, 7]),
        (2, "zigzag", [0, 1, 6, 7, 2, 3, 4, 5]),
        (4, "zigzag", [0, 7, 1, 6, 2, 5, 3, 4]),
    ],
)
def test_storage_order_by_hand(num_shards, block_size, expected):
    order = storage_order(8, num_shards, block_size)
    assert order.dtype == np.int32
    np.testing.assert_array_equal(order, expected)


@pytest.mark.parametrize("num_shards, block_size, num_slots", PLACEMENTS)
def test_positions_are_the_shards_of_the_storage_order(num_shards, block_size, num_slots):
    order = storage_order(num_shards * num_slots, num_shards, block_size).reshape(num_shards, num_slots)
    for shard, expected in zip(shards(num_shards, block_size), order, strict=True):
        positions = shard.positions(num_slots)
        np.testing.assert_array_equal(positions, expected)
        np.testing.assert_array_equal(shard.positions(num_slots, start=1, size=2), positions[1:3])


@pytest.mark.parametrize("num_shards, block_size, num_slots", PLACEMENTS)
def test_valid_keys_are_the_prefix_that_local_lengths_counts(num_shards, block_size, num_slots):
    lengths = np.arange(num_shards * num_slots + 1, dtype=np.int32)
    counts = [shard.local_lengths(lengths, num_slots) for shard in shards(num_shards, block_size)]
    for shard, count in zip(shards(num_shards, block_size), counts, strict=True):
        is_valid = np.asarray(shard.positions(num_slots))[None, :] < lengths[:, None]
        is_prefix = np.arange(num_slots)[None, :] < np.asarray(count)[:, None]
        np.testing.assert_array_equal(is_valid, is_prefix)
    if isinstance(block_size, int):
        assert (np.max(counts, axis=0) - np.min(counts, axis=0)).max() <= block_size


def test_the_index_of_a_shard_may_be_traced():
    traced = jax.jit(lambda i: Shard(index=i, num_shards=3, block_size=2).positions(4))
    np.testing.assert_array_equal(traced(2), Shard(index=2, num_shards=3, block_size=2).positions(4))


@pytest.mark.parametrize("num_shards, block_size, num_slots", [case for case in PLACEMENTS if isinstance(case[1], int)])
def test_locate_is_the_inverse_of_positions(num_shards, block_size, num_slots):
    for shard in shards(num_shards, block_size):
        holder, slots = locate(shard.positions(num_slots), num_shards, block_size)
        np.testing.assert_array_equal(holder, np.full(num_slots, shard.index))
        np.testing.assert_array_equal(slots, np.arange(num_slots))


@pytest.mark.parametrize("block_size", [None, 2, "zigzag"])
def test_no_tokens_have_an_empty_order(block_size):
    assert storage_order(0, num_shards=2, block_size=block_size).shape == (0,)


@pytest.mark.parametrize(
    "num_tokens, num_shards, block_size", [(7, 3, 1), (7, 3, 2), (12, 2, 3), (5, 4, None), (1, 8, 1), (17, 3, "zigzag")]
)
def test_a_prompt_is_padded_stored_and_restored(num_tokens, num_shards, block_size):
    layout = PromptLayout(num_tokens=num_tokens, num_shards=num_shards, block_size=block_size)
    padded, unit = layout.padded_tokens, num_shards * (2 if block_size == "zigzag" else block_size or 1)
    assert padded % unit == 0 and num_tokens <= padded < num_tokens + unit
    x = np.arange(1, 2 * num_tokens + 1, dtype=np.float32).reshape(2, num_tokens)
    by_hand = np.pad(x, [(0, 0), (0, padded - num_tokens)])[:, storage_order(padded, num_shards, block_size)]
    np.testing.assert_array_equal(layout.positions, storage_order(padded, num_shards, block_size))
    for numbers, axis in ((x, 1), (x, -1), (jnp.asarray(x), 1)):
        stored = layout.store(numbers, axis)
        assert isinstance(stored, type(numbers))
        np.testing.assert_array_equal(stored, by_hand)
        np.testing.assert_array_equal(layout.restore(stored, axis), x)
    np.testing.assert_array_equal(layout.store(x.T, axis=0), by_hand.T)
    lengths = np.arange(1, num_tokens + 1, dtype=np.int32)
    np.testing.assert_array_equal(by_hand[0, layout.last(lengths)], x[0])
    # An empty prompt has no last token, and one that is too long ends at the end: whatever the index, it exists.
    np.testing.assert_array_equal(layout.last(jnp.array([0, 99])), layout.last(np.array([1, num_tokens])))
    np.testing.assert_array_equal(layout.last(np.array([0, 99], np.uint32)), layout.last(np.array([1, num_tokens])))
    np.testing.assert_array_equal(jax.jit(layout.last)(lengths), layout.last(lengths))


@pytest.mark.parametrize("block_size", [None, 2, "zigzag"])
def test_a_prompt_over_explicit_axes_is_stored_and_restored(block_size):
    mesh = jax.make_mesh((2, 3), ("data", "seq"), (AxisType.Explicit,) * 2, devices=jax.devices()[:6])
    shard = lambda x: jax.device_put(x, NamedSharding(mesh, P("data", "seq")))
    x = np.arange(18.0, dtype=np.float32).reshape(2, 9)
    layout = PromptLayout(num_tokens=9, num_shards=3, block_size=block_size)
    np.testing.assert_array_equal(layout.store(shard(x)), layout.store(x))
    layout = PromptLayout(num_tokens=8, num_shards=3, block_size=block_size)
    np.testing.assert_array_equal(layout.restore(shard(layout.store(x[:, :8]))), x[:, :8])
