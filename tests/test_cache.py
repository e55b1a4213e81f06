"""The cache: balanced however it grows, appended in place, and full before anything is overwritten."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_attention
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tree_attn import make_mesh, sparq_decode, storage_order, tree_decode
from tree_attn.cache import KVCache
from tree_attn.cache_checks import CacheFullError

B, K, H = 2, 2, 8
append = jax.jit(KVCache.append, donate_argnums=0)


def empty_cache(num_devices=3, capacity=12, block_size=1, **options):
    mesh = make_mesh({"seq": num_devices})
    sizes = dict(batch=B, num_kv_heads=K, head_dim=H, dtype=jnp.float32) | options
    return KVCache.create(capacity=capacity, mesh=mesh, axis_name="seq", block_size=block_size, **sizes)


def tokens(count, seed=0):
    """Returns keys and values of `count` tokens; no element is 0, which is what an empty slot holds."""
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.uniform(1, 2, size=(B, count, K, H)), jnp.float32) for _ in range(2))


def natural(cache):
    """Returns the keys and values held, `[..., B, S, K, H]` in the order of their positions."""
    order = storage_order(cache.capacity, cache.num_shards, cache.block_size)
    return tuple(np.asarray(x)[..., np.argsort(order), :, :] for x in (cache.key, cache.value))


def assert_holds(cache, key, value, lengths):
    """Each sequence holds the first of these tokens, as many as its length says, and nothing after them."""
    np.testing.assert_array_equal(cache.lengths, lengths)
    for found, written in zip(natural(cache), (key, value), strict=True):
        for b, length in enumerate(lengths):
            np.testing.assert_array_equal(found[b, :length], written[b, :length])
            assert not found[b, length:].any()


@pytest.mark.parametrize("num_devices, block_size", [(1, 2), (3, 1), (3, 2), (8, 1)])
def test_growth_is_balanced_to_within_one_block(num_devices, block_size):
    cache = empty_cache(num_devices, capacity=20, block_size=block_size)
    key, value = tokens(19)
    for t in range(19):
        cache = append(cache, key[:, t : t + 1], value[:, t : t + 1])
        found = [int((np.asarray(shard.data)[0, :, 0, 0] != 0).sum()) for shard in cache.key.addressable_shards]
        assert sum(found) == t + 1 and max(found) - min(found) <= block_size
    assert_holds(cache, key, value, [19, 19])


def test_capacity_is_rounded_up_to_whole_blocks_on_every_shard():
    cache = empty_cache(num_devices=3, capacity=13, block_size=2)
    assert cache.capacity == 18 and cache.key.shape == cache.value.shape == (B, 18, K, H)
    along_sequence = NamedSharding(cache.mesh, P(None, "seq"))
    assert cache.key.sharding.is_equivalent_to(along_sequence, 4)


@pytest.mark.parametrize("block_size", [1, 2])
def test_several_tokens_after_ragged_lengths(block_size):
    key, value = tokens(12)
    lengths = np.array([5, 0], np.int32)
    cache = empty_cache(block_size=block_size)
    cache = append(cache, key[:, :5], value[:, :5]).with_lengths(lengths)  # sequence 1 is set back to its start
    new_key, new_value = tokens(3, seed=1)
    cache = append(cache, new_key, new_value)
    np.testing.assert_array_equal(cache.lengths, lengths + 3)
    for found, old, new in zip(natural(cache), (key, value), (new_key, new_value), strict=True):
        np.testing.assert_array_equal(found[0, :8], np.concatenate([old[0, :5], new[0]]))
        np.testing.assert_array_equal(found[1, :3], new[1])


def write_every_layer(cache, stacked):
    """A decoding step as a model makes it: one layer after another under a scan, then one count for all."""
    write = lambda cache, layer: (cache.write(stacked[0][layer], stacked[1][layer], layer=layer), None)
    return jax.lax.scan(write, cache, jnp.arange(3, dtype=jnp.int32))[0].advance(stacked[0].shape[2])


def of_three_layers(count):
    return jax.tree.map(lambda *x: jnp.stack(x), *(tokens(count, seed=layer) for layer in range(3)))


@pytest.mark.parametrize("num_layers", [None, 3])
def test_a_step_happens_in_place(num_layers):
    """A whole cache is aliased, none of it is copied, and the donated one is gone."""
    cache = empty_cache(capacity=3 * 1024, num_layers=num_layers)
    step, new = (KVCache.append, tokens(1)) if num_layers is None else (write_every_layer, (of_three_layers(1),))
    compiled = jax.jit(step, donate_argnums=0).lower(cache, *new).compile()
    memory = compiled.memory_analysis()
    bytes_per_device = (cache.key.nbytes + cache.value.nbytes) // cache.num_shards
    assert memory.alias_size_in_bytes >= bytes_per_device
    assert memory.temp_size_in_bytes < bytes_per_device / 50
    compiled(cache, *new)
    assert cache.key.is_deleted() and cache.value.is_deleted()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
def test_layers_that_are_not_stacked_hold_what_stacked_ones_hold(dtype):
    options = dict(num_layers=2, dtype=dtype, keeps_value_sum=True, keeps_key_by_component=True)
    if dtype == jnp.int8:
        options |= {name: jnp.asarray([[0.02, 0.1], [0.05, 0.01]]) for name in ("key_scale", "value_scale")}

    def filled(stacks_layers, batch):
        cache = empty_cache(capacity=12, stacks_layers=stacks_layers, batch=batch, **options)
        for layer in range(2):
            cache = cache.write_prefix(*(x[:batch] for x in tokens(6, seed=layer)), layer=layer)
        cache = cache.with_lengths(np.full(batch, 5, np.int32))
        for layer in range(2):
            cache = cache.write(*(x[:batch] for x in tokens(2, seed=5 + layer)), layer=layer)
        return cache.advance(2)

    caches = []
    for stacks_layers in (True, False):
        cache = jax.jit(lambda stacks=stacks_layers: filled(stacks, B).with_sequence(1, filled(stacks, 1)))()
        assert (cache.shape, cache.dtype, cache.capacity) == ((2, B, 12, K, H), dtype, 12)
        caches.append(cache)
    stacked, layered = caches
    for name in ("key", "value", "value_sum", "key_by_component", "lengths", "overflowed"):
        one = getattr(layered, name)
        assert isinstance(one, tuple) == (name not in ("lengths", "overflowed"))
        np.testing.assert_array_equal(np.stack(one) if isinstance(one, tuple) else one, getattr(stacked, name))
    for layer in (None, 1):
        for one, other in zip(layered.scales(layer).values(), stacked.scales(layer).values(), strict=True):
            np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(layered.value_mean(layered.lengths, 1), stacked.value_mean(stacked.lengths, 1))


def test_layers_that_are_not_stacked_are_named_by_integers_and_written_in_place():
    cache, new = empty_cache(capacity=3 * 1024, num_layers=3, stacks_layers=False), tokens(1)
    for layer, message in (
        (jnp.int32(1), "must be a Python integer"),
        (3, r"must lie in \[0, 3\)"),
        (None, "must be given"),
    ):
        with pytest.raises(ValueError, match=f"layer {message}"):
            cache.write(*new, layer=layer)
    step = lambda cache, *new: cache.write(*new, layer=0).write(*new, layer=2).advance(1)
    compiled = jax.jit(step, donate_argnums=0).lower(cache, *new).compile()
    memory, bytes_of_layer = compiled.memory_analysis(), 2 * cache.key[0].nbytes // cache.num_shards
    assert memory.alias_size_in_bytes >= 3 * bytes_of_layer
    assert memory.temp_size_in_bytes < bytes_of_layer / 50


def test_layers_are_written_apart_and_counted_once():
    stacked = of_three_layers(2)
    cache = jax.jit(write_every_layer, donate_argnums=0)(empty_cache(num_layers=3), stacked)
    np.testing.assert_array_equal(cache.lengths, [2, 2])
    for found, written in zip(natural(cache), stacked, strict=True):
        np.testing.assert_array_equal(found[:, :, :2], written)
        assert not found[:, :, 2:].any()


@pytest.mark.parametrize("block_size, num_layers", [(1, None), (2, None), (2, 3)])
def test_prefix_then_appended_tokens_are_decoded_as_the_oracle_does(block_size, num_layers):
    """A prompt of ragged lengths goes in as prefill stores it; the tokens that follow overwrite its padding."""
    cache = empty_cache(capacity=24, block_size=block_size, num_layers=num_layers)
    layer = None if num_layers is None else 1
    prompt, new = tokens(12), tokens(2, seed=1)
    prompt_lengths = np.array([11, 4], np.int32)
    order = storage_order(12, cache.num_shards, block_size)

    @partial(jax.jit, donate_argnums=0)
    def fill(cache):
        cache = cache.write_prefix(*(x[:, order] for x in prompt), layer=layer).with_lengths(prompt_lengths)
        return cache.write(*new, layer=layer).advance(2)

    cache = fill(cache)
    query = jnp.asarray(np.random.default_rng(2).normal(size=(B, 2, 4, H)), jnp.float32)
    natural_keys = [np.zeros((B, 13, K, H), np.float32) for _ in range(2)]
    for whole, old, added in zip(natural_keys, prompt, new, strict=True):
        for b, length in enumerate(prompt_lengths):
            whole[b, : length + 2] = np.concatenate([old[b, :length], added[b]])
    options = dict(key_value_seq_lengths=prompt_lengths + 2, is_causal=True)

    def decode(cache):
        key, value = (x if layer is None else x[layer] for x in (cache.key, cache.value))
        where = dict(axis_name="seq", mesh=cache.mesh, block_size=block_size, return_lse=True)
        return tree_decode(query, key, value, **where, **options | {"key_value_seq_lengths": cache.lengths})

    assert_attention(jax.jit(decode)(cache), query, *natural_keys, **options)


def nearly_full():
    """Sequence 0 holds 11 of 12 tokens, sequence 1 holds 4."""
    key, value = tokens(12)
    lengths = np.array([11, 4], np.int32)
    in_use = np.arange(12)[None, :, None, None] < lengths[:, None, None, None]
    cache = empty_cache().write_prefix(*(jnp.where(in_use, x, 0)[:, storage_order(12, 3, 1)] for x in (key, value)))
    return cache.with_lengths(lengths), key, value


def test_a_full_cache_is_an_error_before_anything_is_overwritten():
    cache, key, value = nearly_full()
    with pytest.raises(CacheFullError, match="sequence 0 holds 11 of 12 tokens, no room for 2 more"):
        cache.append(*tokens(2, seed=1))
    assert_holds(cache, key, value, [11, 4])
    cache.check_room(1)
    with pytest.raises(CacheFullError, match="sequence 0 holds 11 of 12 tokens"):
        cache.check_room(2)


def test_room_is_checked_outside_jit():
    with pytest.raises(TypeError, match="check_room must be called outside jit"):
        jax.jit(lambda cache: cache.check_room(1))(empty_cache())


def test_inside_jit_a_refused_write_leaves_its_sequence_alone_and_marks_it():
    cache, key, value = nearly_full()
    new = tokens(2, seed=1)
    cache = append(cache, *new)
    np.testing.assert_array_equal(cache.overflowed, [True, False])
    np.testing.assert_array_equal(cache.lengths, [11, 6])
    for found, old, added in zip(natural(cache), (key, value), new, strict=True):
        np.testing.assert_array_equal(found[0, :11], old[0, :11])
        assert not found[0, 11:].any()
        np.testing.assert_array_equal(found[1, :6], np.concatenate([old[1, :4], added[1]]))
    cache = append(cache, *tokens(1, seed=2))  # would fit, yet the sequence is already wrong
    np.testing.assert_array_equal(cache.overflowed, [True, False])
    with pytest.raises(CacheFullError, match=r"sequence 0 .*refused already"):
        cache.check_room(0)


def test_tokens_that_were_refused_are_not_counted_unmarked():
    """A step writes drafts, and counts those that it takes."""
    cache, *_ = nearly_full()
    counted = jax.jit(lambda cache, new: cache.write(*new).advance(1))(cache, tokens(2, seed=1))
    np.testing.assert_array_equal(counted.overflowed, [True, False])
    with pytest.raises(CacheFullError, match=r"sequence 0 .*refused already"):
        counted.check_room(0)


@pytest.mark.parametrize("options", [{}, {"window": 12}, {"window": 6}], ids=str)
@pytest.mark.parametrize("is_jitted", [False, True])
def test_a_prefix_with_lengths_counts_its_tokens(options, is_jitted):
    cache, new = empty_cache(**options), tokens(9)
    write = lambda cache: cache.write_prefix(*(x[:, storage_order(9, 3, 1)] for x in new), lengths=np.array([9, 4]))
    cache = (jax.jit(write) if is_jitted else write)(cache)
    np.testing.assert_array_equal(cache.lengths, [9, 4])
    assert not np.asarray(cache.overflowed).any()


def test_a_cache_can_be_filled_to_its_last_slot():
    cache, key, value = nearly_full()
    cache = append(cache, key[:, 11:], value[:, 11:])
    np.testing.assert_array_equal(cache.lengths, [12, 5])
    assert not np.asarray(cache.overflowed).any()
    for found, written in zip(natural(cache), (key, value), strict=True):
        np.testing.assert_array_equal(found[0], written[0])


def test_two_axes_shard_the_sequence_as_they_are_named():
    mesh = make_mesh({"device": 3, "node": 2})
    cache = KVCache.create(
        batch=B, capacity=12, num_kv_heads=K, head_dim=H, dtype=jnp.float32, mesh=mesh, axis_name=("device", "node")
    )
    key, value = tokens(7)
    assert_holds(append(cache, key, value), key, value, [7, 7])


def test_a_row_takes_another_sequence_and_the_others_keep_every_bit():
    options = dict(num_layers=2, keeps_value_sum=True, keeps_key_by_component=True)
    fill = jax.jit(lambda cache, key, value: cache.write(key, value, layer=1).advance(key.shape[1]))
    cache = fill(empty_cache(capacity=12, **options), *tokens(7))
    cache = fill(cache, *tokens(6, seed=1))  # no room: both rows are marked
    other = fill(empty_cache(capacity=6, batch=1, **options), *(x[:1] for x in tokens(5, seed=2)))
    moved = jax.jit(KVCache.with_sequence)(cache, 1, other)
    np.testing.assert_array_equal(moved.lengths, [7, 5])
    np.testing.assert_array_equal(moved.overflowed, [True, False])
    names = ("key", "value", "value_sum", "key_by_component")
    rows = lambda cache, name, row: np.asarray(getattr(cache, name))[:, row]
    for name in names:
        np.testing.assert_array_equal(rows(moved, name, 0), rows(cache, name, 0))
    np.testing.assert_array_equal(rows(moved, "value_sum", 1), rows(other, "value_sum", 0))
    for found, written in zip(natural(moved), natural(other), strict=True):
        np.testing.assert_array_equal(found[..., 1, :5, :, :], written[..., 0, :5, :, :])
    np.testing.assert_array_equal(in_order(moved)[..., 1, :, :, :5], in_order(other)[..., 0, :, :, :5])


def test_a_sequence_that_does_not_fit_is_refused():
    cache = empty_cache(capacity=12)
    for other in (empty_cache(capacity=12), empty_cache(capacity=15, batch=1), empty_cache(batch=1, num_layers=2)):
        with pytest.raises(ValueError, match="other must be like this cache, of one sequence and at most 12 tokens"):
            cache.with_sequence(0, other)
    with pytest.raises(ValueError, match=r"sequence must lie in \[0, 2\), got 2"):
        cache.with_sequence(2, empty_cache(batch=1))


@pytest.mark.parametrize("num_layers", [None, 2])
def test_the_sum_of_the_values_and_the_keys_by_component_follow_every_change(num_layers):
    """Checks SparQ's arrays after a prefill, appended tokens, a refused write, and tokens that were dropped."""
    cache = empty_cache(capacity=12, num_layers=num_layers, keeps_value_sum=True, keeps_key_by_component=True)
    layer = None if num_layers is None else 1
    prompt, order = tokens(6), storage_order(6, cache.num_shards, 1)

    def assert_kept(cache):
        key, value = (x if layer is None else x[layer] for x in natural(cache))
        total, by_component = (np.asarray(x if layer is None else x[layer]) for x in (cache.value_sum, in_order(cache)))
        np.testing.assert_array_equal(by_component, key.transpose(0, 2, 3, 1))
        for b, length in enumerate(np.asarray(cache.lengths)):
            np.testing.assert_allclose(total[b], value[b, :length].sum(axis=0), rtol=1e-6)
        mean = cache.value_mean(cache.lengths, layer)
        np.testing.assert_allclose(mean, total / np.maximum(cache.lengths, 1)[:, None, None], rtol=1e-6)

    cache = cache.write_prefix(*(x[:, order] for x in prompt), layer=layer).with_lengths(np.array([6, 4], np.int32))
    assert_kept(cache)
    step = jax.jit(lambda cache, key, value: cache.write(key, value, layer=layer).advance(key.shape[1]))
    cache = step(cache, *tokens(3, seed=1))
    assert_kept(cache)
    cache = step(cache, *tokens(4, seed=2))
    np.testing.assert_array_equal(cache.lengths, [9, 11])  # sequence 0 had no room
    assert_kept(cache)
    assert_kept(jax.jit(KVCache.with_lengths)(cache, np.array([0, 8], np.int32)))


def test_a_float8_cache_rounds_and_clips_and_decodes_as_stored():
    cache = empty_cache(dtype=jnp.float8_e4m3fn, keeps_value_sum=True)
    key, value = tokens(5)
    key = key.at[0, 0, 0, 0].set(1e4)
    cache = append(cache, key, value)
    stored = [x.astype(jnp.float8_e4m3fn).astype(jnp.float32) for x in (jnp.clip(key, -448, 448), value)]
    for found, expected in zip(natural(cache), stored, strict=True):
        np.testing.assert_array_equal(found[:, :5].astype(np.float32), expected)
    np.testing.assert_allclose(cache.value_sum, stored[1].sum(axis=1), rtol=1e-6)
    query = jnp.asarray(np.random.default_rng(2).normal(size=(B, 1, 4, H)), jnp.float32)
    decode = partial(tree_decode, axis_name="seq", mesh=cache.mesh, block_size=1, return_lse=True)
    got = jax.jit(lambda cache: decode(query, cache.key, cache.value, key_value_seq_lengths=cache.lengths))(cache)
    assert_attention(got, query, *stored)


@pytest.mark.parametrize("num_layers", [None, 2])
def test_an_int8_cache_is_the_nearest_multiple_of_each_heads_scale_and_decodes_as_stored(num_layers):
    layer = None if num_layers is None else 1
    scales = np.array([[0.02, 0.1], [0.05, 0.01]], np.float32)
    by_layer = scales if num_layers is None else np.stack([np.ones_like(scales), scales], axis=1)  # [2, (L,) K]
    named = dict(key_scale=jnp.asarray(by_layer[0]), value_scale=jnp.asarray(by_layer[1]))
    cache = empty_cache(dtype=jnp.int8, num_layers=num_layers, keeps_value_sum=True, **named)
    prompt, new = tokens(3), tokens(2, seed=1)
    new = (new[0].at[0, 0, 1, 0].set(-1e4), new[1])

    def fill(cache):
        order = storage_order(3, cache.num_shards, 1)
        cache = cache.write_prefix(*(x[:, order] for x in prompt), layer=layer).with_lengths(np.array([3, 3], np.int32))
        return cache.write(*new, layer=layer).advance(2)

    cache = jax.jit(fill, donate_argnums=0)(cache)
    wide = [
        np.concatenate(pair, axis=1) / scale[:, None]
        for pair, scale in zip(zip(prompt, new, strict=True), scales, strict=True)
    ]
    expected = [np.clip(np.round(x), -127, 127) for x in wide]
    assert expected[0].min() == -127 and (np.abs(expected[0]) < 127).any()
    found = [x if layer is None else x[layer] for x in natural(cache)]
    for got, stored in zip(found, expected, strict=True):
        assert got.dtype == np.int8
        np.testing.assert_array_equal(got[:, :5], stored)
    total = cache.value_sum if layer is None else cache.value_sum[layer]
    np.testing.assert_allclose(total, (expected[1] * scales[1][:, None]).sum(axis=1), rtol=1e-6)

    query = jnp.asarray(np.random.default_rng(2).normal(size=(B, 1, 4, H)), jnp.float32)
    decode = partial(tree_decode, axis_name="seq", mesh=cache.mesh, block_size=1, return_lse=True)

    def call(cache):
        key, value = (x if layer is None else x[layer] for x in (cache.key, cache.value))
        return decode(query, key, value, key_value_seq_lengths=cache.lengths, **cache.scales(layer))

    named = dict(key_scale=scales[0], value_scale=scales[1])
    assert_attention(jax.jit(call)(cache), query, *expected, **named)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(dtype=jnp.int8), r"key_scale must be given for dtype='int8', float32 of shape \(2,\), got None"),
        (dict(key_scale=np.ones(K, np.float32)), "key_scale must be None for dtype='float32'"),
        (
            dict(
                dtype=jnp.int8, num_layers=3, key_scale=np.ones((3, K), np.float32), value_scale=np.ones(K, np.float32)
            ),
            r"value_scale must be float32 of shape \(3, 2\), got float32 of shape \(2,\)",
        ),
        (
            dict(dtype=jnp.int8, key_scale=np.array([1, 0], np.float32), value_scale=np.ones(K, np.float32)),
            r"key_scale must be positive and finite, got \[1.0, 0.0\]",
        ),
    ],
)
def test_scales_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        empty_cache(**options)


@pytest.mark.parametrize("num_layers", [None, 2])
def test_a_prefix_is_written_from_its_start_in_every_array(num_layers):
    """Piece by piece, at Python integers and traced ones; the second piece of the second layer."""
    cache = empty_cache(capacity=12, num_layers=num_layers, keeps_key_by_component=True)
    layer, order = None if num_layers is None else 1, storage_order(6, 3, 1)
    pieces = [[x[:, order] for x in tokens(6, seed=seed)] for seed in (0, 1)]
    write = jax.jit(lambda cache, start, key, value: cache.write_prefix(key, value, layer, start))
    cache = write(cache.write_prefix(*pieces[0], layer, start=0), 6, *pieces[1])
    for found, first, second in zip(natural(cache), tokens(6), tokens(6, seed=1), strict=True):
        np.testing.assert_array_equal(found if layer is None else found[1], np.concatenate([first, second], axis=1))
        assert layer is None or not found[0].any()
    by_component = in_order(cache) if layer is None else in_order(cache)[1]
    np.testing.assert_array_equal(by_component, natural(cache)[0].reshape(-1, B, 12, K, H)[-1].transpose(0, 2, 3, 1))
    assert not np.asarray(cache.overflowed).any()


@pytest.mark.parametrize("start", [9, -3, 4])
def test_inside_jit_a_prefix_that_does_not_fit_is_refused_and_marked(start):
    cache = empty_cache(capacity=12, keeps_key_by_component=True).append(*tokens(12))
    new = [x + 5 for x in tokens(6, seed=1)]
    refused = jax.jit(lambda cache, start: cache.write_prefix(*new, start=start))(cache, start)
    np.testing.assert_array_equal(refused.overflowed, [True, True])
    for name in ("key", "value", "key_by_component", "lengths"):
        np.testing.assert_array_equal(getattr(refused, name), getattr(cache, name))
    with pytest.raises(CacheFullError, match="refused already"):
        refused.check_room(0)


def test_inside_jit_lengths_are_clipped_to_the_capacity():
    cache = empty_cache(capacity=12, keeps_value_sum=True).append(*tokens(12))
    clipped = jax.jit(KVCache.with_lengths)(cache, np.array([99, -4], np.int32))
    np.testing.assert_array_equal(clipped.lengths, [12, 0])
    np.testing.assert_allclose(
        clipped.value_mean(clipped.lengths)[0], np.asarray(cache.value)[0].mean(axis=0), rtol=1e-6
    )
    assert not np.asarray(clipped.value_sum)[1].any()


def test_a_nan_that_was_dropped_or_replaced_reaches_no_sum_and_no_result():
    """A sequence that overflowed to NaN gives its place to another; a NaN token is dropped, and the next is good."""
    query = jnp.asarray(np.random.default_rng(2).normal(size=(B, 1, 4, H)), jnp.float32)
    options = dict(keeps_value_sum=True, keeps_key_by_component=True)
    nan, good = [x * jnp.nan for x in tokens(3)], tokens(3, seed=1)
    cache = empty_cache(**options).append(*good).append(*nan)
    other = empty_cache(batch=1, capacity=6, **options).append(*(x[:1] for x in good))
    for replaced in (cache.with_sequence(0, other), jax.jit(KVCache.with_sequence)(cache, 0, other)):
        np.testing.assert_array_equal(replaced.lengths, [3, 6])
        dropped = replaced.with_lengths([3, 3])
        np.testing.assert_allclose(dropped.value_mean(dropped.lengths), good[1].mean(axis=1), rtol=1e-6)
        np.testing.assert_allclose(replaced.value_mean(replaced.lengths)[0], good[1][0].mean(axis=0), rtol=1e-6)
    for attention in (tree_decode, partial(sparq_decode, num_components=H, num_keys=64)):
        attend = jax.jit(lambda cache, attention=attention: cache.attend(query, attention=attention, return_lse=True))
        assert_attention(attend(dropped), query, *good)
    again = dropped.append(*tokens(2, seed=3))
    whole = [jnp.concatenate([old, new], axis=1) for old, new in zip(good, tokens(2, seed=3), strict=True)]
    np.testing.assert_allclose(again.value_mean(again.lengths), whole[1].mean(axis=1), rtol=1e-6)
    assert_attention(jax.jit(lambda cache: cache.attend(query, return_lse=True))(again), query, *whole)


def test_a_sequence_with_other_scales_is_refused():
    scales = lambda size: {name: jnp.full(K, size, jnp.float32) for name in ("key_scale", "value_scale")}
    cache, other = empty_cache(dtype=jnp.int8, **scales(0.5)), empty_cache(dtype=jnp.int8, batch=1, **scales(0.05))
    with pytest.raises(ValueError, match=r"other must have this cache's key_scale, \[0.5, 0.5\], got \[0.05"):
        cache.with_sequence(0, other)
    cache.with_sequence(0, empty_cache(dtype=jnp.int8, batch=1, **scales(0.5)))


def in_order(cache):
    order = storage_order(cache.capacity, cache.num_shards, cache.block_size)
    return np.asarray(cache.key_by_component)[..., np.argsort(order)]


def test_a_mean_that_is_not_kept_is_refused():
    cache = empty_cache()
    with pytest.raises(ValueError, match="create the cache with keeps_value_sum=True"):
        cache.value_mean(cache.lengths)


@pytest.mark.parametrize("num_tokens, is_sorted", [(1, "true"), (3, "false")])
def test_xla_is_told_that_what_is_written_is_apart_and_of_single_tokens_in_order(num_tokens, is_sorted):
    cache = KVCache.create(
        batch=4, capacity=8, num_kv_heads=2, head_dim=4, dtype="float32", mesh=make_mesh({"seq": 2}), axis_name="seq",
        block_size=1,
    )  # fmt: skip
    new = jnp.ones((4, num_tokens, 2, 4))
    lowered = jax.jit(KVCache.append).lower(cache, new, new).as_text()
    assert lowered.count('"stablehlo.scatter"(') == lowered.count("unique_indices = true") == 2
    assert lowered.count(f"indices_are_sorted = {is_sorted}") == 2


def test_any_number_of_tokens_too_many_overflows():
    mesh = make_mesh({"seq": 2})
    cache = KVCache.create(
        batch=1, capacity=4, num_kv_heads=1, head_dim=2, dtype=jnp.float32, mesh=mesh, axis_name="seq"
    )
    for count in (5, 2**31, 2**40):
        assert cache.advance(count).overflowed.all() and not cache.advance(count).lengths.any()
