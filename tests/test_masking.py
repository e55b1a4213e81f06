"""`Visibility` against the rule written out for one query and one key."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from tree_attn import Shard, SoftmaxState
from tree_attn.arguments import AttentionOptions
from tree_attn.masking import normalise_window, sink_state, visibility

SLOTS = 6


def sees(key, query, length, is_causal, window):
    left, right = window if isinstance(window, tuple) else (window, window)
    return (
        key < length
        and (not is_causal or key <= query)
        and (left is None or key >= query - left)
        and (right is None or key <= query + right)
    )


def visible(queries=2, shard=None, **options):
    return visibility(
        AttentionOptions(**options), batch=2, num_queries=queries, num_slots=SLOTS, shard=shard or Shard()
    )


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [None, 0, 2, (1, 3), (None, 1), (2, None), (None, None)])
@pytest.mark.parametrize("lengths", [None, [0, 7]], ids=["all_valid", "lengths"])
@pytest.mark.parametrize("positions", [None, [0, 9], [[3, -1], [11, 2]]], ids=["last", "shared", "each"])
@pytest.mark.parametrize("block_size", [None, 2], ids=["contiguous", "block_cyclic"])
def test_mask_is_the_rule(is_causal, window, lengths, positions, block_size):
    shard = Shard(index=1, num_shards=2, block_size=block_size)
    keys = np.asarray(shard.positions(SLOTS))
    ends = [2 * SLOTS] * 2 if lengths is None else lengths
    last = [[end - 2, end - 1] for end in ends]
    queries = last if positions is None else np.broadcast_to(positions, (2, 2))
    as_array = lambda x: None if x is None else np.array(x, np.int32)
    view = visible(
        shard=shard,
        is_causal=is_causal,
        local_window_size=window,
        key_value_seq_lengths=as_array(lengths),
        query_positions=as_array(positions),
    )
    expected = np.zeros((2, 2, SLOTS), bool)
    for b, t, slot in itertools.product(range(2), range(2), range(SLOTS)):
        expected[b, t, slot] = sees(keys[slot], queries[b][t], ends[b], is_causal, window)
    np.testing.assert_array_equal(np.broadcast_to(view.mask(), expected.shape), expected)
    np.testing.assert_array_equal(np.broadcast_to(view.mask(2, 3), (2, 2, 3)), expected[..., 2:5])
    first, end = (np.broadcast_to(x, (2, 2))[..., None] for x in view.slot_ranges())
    np.testing.assert_array_equal((first <= np.arange(SLOTS)) & (np.arange(SLOTS) < end), expected)
    if view.by_length_only:  # then kernels may pass the lengths alone
        count = SLOTS if lengths is None else np.asarray(view.local_lengths())[:, None, None]
        np.testing.assert_array_equal(expected, np.broadcast_to(np.arange(SLOTS) < count, expected.shape))


@pytest.mark.parametrize("position", [-(2**31), -(2**31) + 1, 2**31 - 2, 2**31 - 1])
@pytest.mark.parametrize("window", [None, 0, 3, (2**30, None), (None, 2**30)])
def test_ranges_of_slots_do_not_overflow_where_positions_are_extreme(position, window):
    view = visible(is_causal=True, local_window_size=window, query_positions=np.full(2, position, np.int32))
    first, end = (np.broadcast_to(x, (2, 2)) for x in view.slot_ranges())
    expected = [sees(slot, position, SLOTS, True, window) for slot in range(SLOTS)]
    for a, b in zip(first.ravel(), end.ravel()):
        assert [a <= slot < b for slot in range(SLOTS)] == expected


@pytest.mark.parametrize(
    "options, by_length_only, is_total",
    [
        ({}, True, True),
        ({"key_value_seq_lengths": np.array([1, 2])}, True, False),
        # A single query at the last position sees all keys, causal or not, and has none to its right.
        ({"queries": 1, "is_causal": True}, True, True),
        ({"queries": 1, "local_window_size": (None, 3)}, True, True),
        ({"queries": 1, "local_window_size": (3, None)}, False, False),
        ({"queries": 1, "is_causal": True, "query_positions": np.array([4])}, False, False),
        ({"is_causal": True}, False, False),
        ({"local_window_size": 3}, False, False),
        ({"local_window_size": (None, None)}, True, True),
    ],
)
def test_the_plainest_kernel_that_serves_is_known_statically(options, by_length_only, is_total):
    view = visible(**options)
    assert (view.by_length_only, view.is_total) == (by_length_only, is_total)


def test_lengths_beyond_the_keys_are_clipped():
    view = visible(key_value_seq_lengths=jnp.array([-3, 99]))
    np.testing.assert_array_equal(view.lengths, [0, SLOTS])


@pytest.mark.parametrize(
    "window, expected", [(None, None), (3, (3, 3)), ((1, None), (1, None)), ((None, None), None), (0, (0, 0))]
)
def test_normalise_window(window, expected):
    assert normalise_window(window) == expected


def test_sinks_weigh_in_the_denominator_and_add_no_value():
    like = SoftmaxState(jnp.ones((2, 3, 4, 5), jnp.bfloat16), jnp.zeros((2, 3, 4)))
    state = sink_state(np.arange(4, dtype=np.float32), like)
    assert state.out.dtype == jnp.bfloat16 and not state.out.any()
    np.testing.assert_array_equal(state.lse, np.broadcast_to(np.arange(4.0), (2, 3, 4)))
