"""`Visibility` against the rule written out for one query and one key."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_attention

from tree_attn import Shard, SoftmaxState, attend, make_mesh, tree_decode
from tree_attn.arguments import AttentionOptions
from tree_attn.masking import normalise_window, sink_state, visibility
from tree_attn.ring_baseline import ring_attention, ring_decode

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


INT32 = np.iinfo(np.int32)
EDGES = [INT32.min, INT32.min + 1, INT32.min + 7, INT32.max - 7, INT32.max - 1, INT32.max]
SIDES = [None, 0, 1, 5, 2 * SLOTS, 30, 2**30, 2**31 - 2, 2**31 - 1, 2**31, 2**40, np.int64(3), np.int32(2), np.uint8(1)]


@pytest.mark.parametrize("block_size", [None, 1, 2, 3])
@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_slot_ranges_and_mask_are_the_rule_for_drawn_options(num_shards, block_size):
    rng = np.random.default_rng(num_shards * 10 + (block_size or 0))
    pick = lambda options: options[rng.integers(len(options))]
    for _ in range(40):
        shard = Shard(index=int(rng.integers(num_shards)), num_shards=num_shards, block_size=block_size)
        keys = np.asarray(shard.positions(SLOTS))[None, None, :]
        num_keys = num_shards * SLOTS
        lengths = pick([None, rng.integers(0, num_keys + 1, 2)])
        ends = np.full(2, num_keys) if lengths is None else lengths
        near = rng.integers(-2 * num_keys, 3 * num_keys, (2, 3))
        positions = pick([None, near, np.where(rng.random((2, 3)) < 0.5, near, rng.choice(EDGES, (2, 3)))])
        queries = ends[:, None] - 3 + np.arange(3) if positions is None else positions
        is_causal, window = bool(rng.integers(2)), pick([pick(SIDES), (pick(SIDES), pick(SIDES))])
        left, right = window if isinstance(window, tuple) else (window, window)
        left, right = (2**62 if side is None or side >= 2**31 else int(side) for side in (left, right))
        queries = queries[:, :, None].astype(np.int64)
        expected = (keys < ends[:, None, None]) & (keys >= queries - left) & (keys <= queries + right)
        expected &= (keys <= queries) | (not is_causal)
        options = {"is_causal": is_causal, "local_window_size": window}
        options |= {"key_value_seq_lengths": lengths, "query_positions": positions}
        view = visible(queries=3, shard=shard, **options)
        np.testing.assert_array_equal(np.broadcast_to(view.mask(), expected.shape), expected, str((shard, options)))
        first, end = view.slot_ranges()
        assert first.ndim == end.ndim == 2 and first.shape in ((1, 1), (2, 3)) and end.shape in ((1, 1), (2, 1), (2, 3))
        slots = np.arange(SLOTS)
        ranges = (np.asarray(first)[..., None] <= slots) & (slots < np.asarray(end)[..., None])
        np.testing.assert_array_equal(np.broadcast_to(ranges, expected.shape), expected, str((shard, options)))


@pytest.mark.parametrize("dtype", [np.uint32, np.int8, np.uint8, np.int16, np.int64, np.uint64])
def test_lengths_and_positions_of_every_dtype_are_clipped_before_they_are_cast(dtype):
    limits = np.iinfo(dtype)
    with jax.enable_x64():
        values = jnp.array([limits.max, limits.min], dtype)
        view = jax.jit(lambda x: visible(key_value_seq_lengths=x, query_positions=x, is_causal=True))(values)
    np.testing.assert_array_equal(view.lengths, [min(limits.max, SLOTS), 0])
    np.testing.assert_array_equal(view.query_positions[0], [min(limits.max, INT32.max), max(limits.min, INT32.min)])


@pytest.mark.parametrize("position", [-(2**31), -(2**31) + 1, 2**31 - 2, 2**31 - 1])
@pytest.mark.parametrize("window", [None, 0, 3, (2**30, None), (None, 2**30)])
def test_ranges_of_slots_do_not_overflow_where_positions_are_extreme(position, window):
    view = visible(is_causal=True, local_window_size=window, query_positions=np.full(2, position, np.int32))
    first, end = (np.broadcast_to(x, (2, 2)) for x in view.slot_ranges())
    expected = [sees(slot, position, SLOTS, True, window) for slot in range(SLOTS)]
    for a, b in zip(first.ravel(), end.ravel()):
        assert [a <= slot < b for slot in range(SLOTS)] == expected


@pytest.mark.parametrize("window", [2**31 - 1, (np.int64(1), 2**31 - 1), np.int64(1)], ids=str)
def test_every_function_takes_windows_of_any_size_and_integer_type(window):
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((1, 4, 1, 8)).astype(np.float32) for _ in range(3))
    options = {"local_window_size": window, "is_causal": True}
    assert_attention(attend(query, key, value, **options), query, key, value, **options)
    options |= {"mesh": make_mesh({"seq": 2}), "axis_name": "seq", "block_size": None, "return_lse": True}
    for function in (tree_decode, ring_decode, ring_attention):
        state = jax.jit(partial(function, **options))(query, key, value)
        assert_attention(state, query, key, value, is_causal=True, local_window_size=window)


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_positions_beyond_int32_are_refused_where_they_are_known(shape):
    with pytest.raises(ValueError, match="query_positions must fit into int32, got"):
        attend(*[np.zeros((2, 2, 1, 8), np.float32)] * 3, query_positions=np.full(shape, 2**32), is_causal=True)


@pytest.mark.parametrize(
    "num_queries, num_shards, block_size, is_diagonal",
    [(SLOTS, 1, None, True), (SLOTS, 2, 1, True), (SLOTS, 2, 2, False), (SLOTS, 2, None, False), (3, 2, 1, False)],
)
def test_the_diagonal_of_kernels_serves_a_striped_prompt_and_a_shard_with_itself(
    num_queries, num_shards, block_size, is_diagonal
):
    shard, same_place = (Shard(index=0, num_shards=num_shards, block_size=block_size) for _ in range(2))
    sizes = {"batch": 2, "num_queries": num_queries, "num_slots": SLOTS}
    of = lambda query_shard: (
        visibility(AttentionOptions(is_causal=True), **sizes, shard=shard, query_shard=query_shard).is_diagonal
    )
    assert of(same_place) == is_diagonal  # its index could be another one, known on the device only
    assert of(shard) == (num_queries == SLOTS)


@pytest.mark.parametrize("num_shards, of_query, of_key", [(1, 0, 0), (2, 0, 0), (2, 0, 1), (2, 1, 0), (3, 1, 2)])
def test_the_diagonal_is_that_of_the_mask(num_shards, of_query, of_key):
    shard, query_shard = (Shard(index=i, num_shards=num_shards, block_size=1) for i in (of_key, of_query))
    sizes = {"batch": 1, "num_queries": SLOTS, "num_slots": SLOTS}
    view = visibility(AttentionOptions(is_causal=True), **sizes, shard=shard, query_shard=query_shard)
    is_strict = of_query < of_key
    np.testing.assert_array_equal(view.mask()[0], np.tri(SLOTS, k=-int(is_strict), dtype=bool))
    assert (view.is_strict is None) if num_shards == 1 else (view.is_strict == is_strict)


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
    "window, expected",
    [
        (None, None),
        (3, (3, 3)),
        ((1, None), (1, None)),
        ((None, None), None),
        (0, (0, 0)),
        (np.int64(3), (3, 3)),
        ((np.int32(0), None), (0, None)),
        (2**31 - 1, (2**31 - 1, 2**31 - 1)),
        (2**31, None),
        ((2**40, 3), (None, 3)),
    ],
)
def test_normalise_window(window, expected):
    assert normalise_window(window) == expected


def test_sinks_weigh_in_the_denominator_and_add_no_value():
    like = SoftmaxState(jnp.ones((2, 3, 4, 5), jnp.bfloat16), jnp.zeros((2, 3, 4)))
    state = sink_state(np.arange(4, dtype=np.float32), like)
    assert state.out.dtype == jnp.bfloat16 and not state.out.any()
    np.testing.assert_array_equal(state.lse, np.broadcast_to(np.arange(4.0), (2, 3, 4)))
