"""A cache that keeps a window: what it has no slots for is what a whole cache's attention would not see."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_attention, assert_same_bits, assert_state
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tree_attn import KVCache, make_mesh, storage_order, tree_decode
from tree_attn.cache_checks import CacheFullError
from tree_attn.measure import hlo
from tree_attn.ring_baseline import ring_decode, ring_prefill

B, K, N, H = 4, 2, 4, 8
CAPACITY = 36
SCALES = {name: np.array([[0.02, 0.1], [0.05, 0.01]], np.float32) for name in ("key_scale", "value_scale")}


def draw(num_tokens, heads=K, seed=0, batch=B):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(batch, num_tokens, heads, H)), jnp.float32)


def create(num_devices=3, *, mesh=None, **options):
    sizes = dict(batch=B, capacity=CAPACITY, num_kv_heads=K, head_dim=H, dtype=jnp.float32, axis_name="seq")
    return KVCache.create(mesh=mesh or make_mesh({"seq": num_devices}), **sizes | options)


def prompts(lengths, num_tokens, cache, seed=0):
    """Returns keys and values of prompts, NaN after their lengths, in the cache's order."""
    is_padding = np.arange(num_tokens) >= np.asarray(lengths)[:, None]
    order = storage_order(num_tokens, cache.num_shards, cache.block_size)
    new = (draw(num_tokens, seed=seed + i, batch=len(lengths)) for i in range(2))
    return [jnp.where(is_padding[..., None, None], jnp.nan, x)[:, order] for x in new]


def filled(cache, lengths, num_tokens=24, layer=None, seed=0):
    lengths = np.asarray(lengths, np.int32)
    new = prompts(lengths, num_tokens, cache, seed)
    return jax.jit(lambda cache: cache.write_prefix(*new, layer, lengths=lengths).with_lengths(lengths))(cache)


def attended(cache, query, **options):
    return cache.attend(query, return_lse=True, **options)


@partial(jax.jit, donate_argnums=0)
def step(cache, new, query):
    cache = cache.append(*new)
    return cache, attended(cache, query)


@pytest.mark.parametrize("num_devices, block_size, window", [(1, 2, 4), (2, 1, 8), (3, 1, 6), (3, 2, 12)])
def test_prompts_and_new_tokens_are_decoded_as_the_oracle_does(num_devices, block_size, window):
    """Prompts of 0 to several windows, and then as many new tokens as roll through all slots."""
    lengths = np.array([0, window - 1, window, 23])
    cache = create(num_devices, block_size=block_size, window=window)
    assert cache.rolls and cache.shape == (B, window, K, H) and cache.capacity == CAPACITY
    cache = filled(cache, lengths)
    rows = [np.zeros((B, CAPACITY, K, H), np.float32) for _ in range(2)]
    for i, row in enumerate(rows):
        for b, length in enumerate(lengths):
            row[b, :length] = draw(24, seed=i)[b, :length]
    for i in range(window + 1):
        new, query = (draw(1, seed=10 + i), draw(1, seed=40 + i)), draw(1, N, seed=70 + i)
        for row, token in zip(rows, new, strict=True):
            row[np.arange(B), lengths + i] = token[:, 0]
        cache, got = step(cache, new, query)
        seen = dict(key_value_seq_lengths=lengths + i + 1, is_causal=True, local_window_size=(window - 1, None))
        assert_attention(got, query, *rows, **seen)
    np.testing.assert_array_equal(cache.lengths, lengths + window + 1)
    assert not np.asarray(cache.overflowed).any()


@pytest.mark.parametrize("stacks_layers", [True, False])
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_layers_of_narrow_numbers_roll_too(dtype, stacks_layers):
    """Compares with a whole cache: one of two layers, between `write` and `advance`, with a scale for each head."""
    scales = {name: jnp.asarray(scale) for name, scale in SCALES.items()}
    options = dict(dtype=dtype, num_layers=2, stacks_layers=stacks_layers, **scales)
    lengths, new, query = [0, 5, 6, 19], (draw(1, seed=10), draw(1, seed=20)), draw(1, N, seed=30)

    @jax.jit
    def run(cache):
        out = attended(cache := cache.write(*new, layer=1), query, layer=1, num_new=1, local_window_size=(5, None))
        return cache.advance(1), out

    whole, rolling = (create(window=window, **options) for window in (None, 6))
    results = [run(filled(cache, lengths, layer=1)) for cache in (whole, rolling)]
    assert_state(results[1][1], results[0][1])
    np.testing.assert_array_equal(results[1][0].lengths, np.array(lengths) + 1)


def test_outside_jit_it_is_the_same_and_by_the_ring_too():
    cache, new, query = filled(create(window=6), [0, 5, 6, 19]), (draw(1, seed=10), draw(1, seed=20)), draw(1, N)
    eager = cache.append(*new)
    assert_same_bits(eager, jax.jit(KVCache.append)(cache, *new))
    expected = attended(eager, query)
    assert_state(jax.jit(partial(attended, attention=ring_decode))(eager, query), expected)
    assert_state(tree_decode(query, **eager.operands(), return_lse=True), expected)


def test_a_cache_that_no_sequence_outgrows_is_a_plain_one():
    plain = create(capacity=6, window=9)
    assert not plain.rolls and plain.capacity == plain.num_slots == 6
    assert_same_bits(plain.append(draw(3), draw(3)), create(capacity=6).append(draw(3), draw(3)))


def test_memory_is_that_of_the_window_and_a_step_happens_in_place():
    """The whole cache is aliased and none of it is copied; without the window it would be a hundred times as large."""
    whole, rolling = (create(capacity=3 * 4096, window=window) for window in (None, 3 * 1024))
    assert 4 * rolling.key.nbytes == whole.key.nbytes
    new = draw(1), draw(1, seed=1)
    compiled = jax.jit(KVCache.append, donate_argnums=0).lower(rolling, *new).compile()
    memory, bytes_per_device = compiled.memory_analysis(), 2 * rolling.key.nbytes // rolling.num_shards
    assert memory.alias_size_in_bytes >= bytes_per_device
    assert memory.temp_size_in_bytes < bytes_per_device / 50
    compiled(rolling, *new)
    assert rolling.key.is_deleted() and rolling.value.is_deleted()


def test_prompts_stay_on_their_shards():
    cache, lengths = create(window=6), np.array([0, 5, 6, 19], np.int32)
    along = NamedSharding(cache.mesh, P(None, "seq"))
    new = [jax.device_put(x, along) for x in prompts(lengths, 24, cache)]
    write = jax.jit(lambda cache, lengths, *new: cache.write_prefix(*new, lengths=lengths), donate_argnums=0)
    assert not hlo.collectives(write.lower(cache, lengths, *new).compile().as_text())


@pytest.mark.parametrize("capacity", [3, 12, CAPACITY])
def test_a_row_takes_a_prompt_shorter_or_longer_than_the_window(capacity):
    cache, whole = (filled(create(window=window), [0, 5, 6, 19]) for window in (6, None))
    lengths = [capacity - 1]
    one = lambda window: filled(create(batch=1, capacity=capacity, window=window), lengths, capacity, seed=5)
    query = draw(1, N, seed=9)
    moved = jax.jit(KVCache.with_sequence, donate_argnums=0)(cache, 2, one(6))
    expected = whole.with_sequence(2, one(None))
    np.testing.assert_array_equal(moved.lengths, expected.lengths)
    assert_state(attended(moved, query), attended(expected, query, local_window_size=(5, None)))


def use(cache, other, query, key, value, prompt_key, prompt_value):
    lengths = jnp.full(cache.lengths.shape, 11, jnp.int32)
    cache = cache.write_prefix(prompt_key, prompt_value, lengths=lengths).with_lengths(lengths)
    cache = cache.with_sequence(2, other).write(key, value)
    return cache, cache.attend(query, num_new=1, return_lse=True)


@pytest.mark.parametrize("kind, in_shard_map", [("auto", True), ("explicit", True), ("explicit", False)])
def test_it_works_inside_ones_own_shard_map_and_over_a_sharded_batch(kind, in_shard_map):
    shapes = {"data": 2, "seq": 3}
    mesh = make_mesh(shapes) if kind == "auto" else jax.make_mesh((2, 3), tuple(shapes), devices=jax.devices()[:6])
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    cache, plain = (create(mesh=mesh, batch_axis_name="data", window=window) for window in (6, None))
    assert (cache.lengths.sharding, cache.overflowed.sharding) == (plain.lengths.sharding, plain.overflowed.sharding)
    other = filled(create(mesh=mesh, batch=1, capacity=9, window=6), [8], 9, seed=8)
    order = storage_order(12, 3, 1)
    data, prompt = P("data"), P("data", "seq")
    new = [draw(1, N), *(draw(1, seed=seed) for seed in (1, 2))]
    old = [draw(12, seed=seed)[:, order] for seed in (3, 4)]
    arguments = other, *(put(x, *data) for x in new), *(put(x, *prompt) for x in old)
    run = use
    if in_shard_map:
        in_specs = cache.specs(), other.specs(), data, data, data, prompt, prompt
        run = jax.shard_map(use, mesh=mesh, in_specs=in_specs, out_specs=(cache.specs(), (data, data)))
    cache, got = jax.jit(run, donate_argnums=0)(cache, *arguments)
    np.testing.assert_array_equal(cache.lengths, [11, 11, 8, 11])
    rows = [np.zeros((B, 12, K, H), np.float32) for _ in range(2)]
    for row, new_row, of_prompt, of_other in zip(rows, new[1:], (3, 4), (8, 9), strict=True):
        for b, length in enumerate(cache.lengths):
            before = draw(9, seed=of_other, batch=1)[0] if b == 2 else draw(12, seed=of_prompt)[b]
            row[b, : length + 1] = np.concatenate([before[:length], new_row[b]])
    window = dict(key_value_seq_lengths=np.asarray(cache.lengths) + 1, is_causal=True, local_window_size=(5, None))
    assert_attention(got, new[0], *rows, **window)


def test_prompts_in_natural_order_are_read_in_the_window_that_is_kept():
    query, key, value = draw(20, N), draw(20, seed=1), draw(20, seed=2)
    lengths = np.array([0, 5, 6, 19], np.int32)
    whole, rolling = (create(window=window) for window in (None, 6))
    whole, expected = ring_prefill(whole, query, key, value, lengths=lengths, local_window_size=(5, None))
    for _ in range(2):  # the second time in the place of these prompts
        rolling, out = ring_prefill(rolling, query, key, value, lengths=lengths)
        for b, length in enumerate(lengths):
            np.testing.assert_array_equal(out[b, :length], expected[b, :length])
    new = draw(1, N, seed=9)
    assert_state(attended(rolling, new), attended(whole, new, local_window_size=(5, None)))


def test_the_capacity_is_still_the_room():
    lengths = [35, 36, 3, 0]
    cache, new = filled(create(window=6), lengths, CAPACITY), (draw(1, seed=1), draw(1, seed=2))
    with pytest.raises(CacheFullError, match="sequence 1 holds 36 of 36 tokens, no room for 1 more"):
        cache.append(*new)
    full = jax.jit(KVCache.append)(cache, *new)
    np.testing.assert_array_equal(full.lengths, [36, 36, 4, 1])
    np.testing.assert_array_equal(full.overflowed, [False, True, False, False])
    np.testing.assert_array_equal(full.key[1], cache.key[1])
    with pytest.raises(CacheFullError, match="a prefix of 39 tokens does not fit a capacity of 36"):
        filled(create(window=6), lengths, 39)


def test_fewer_tokens_are_held_only_where_their_windows_are_kept():
    """Nothing has rolled away of sequences up to the window; an empty one needs nothing."""
    cache = filled(create(window=6), [4, 6, 19, 20])
    with pytest.raises(ValueError, match=r"at least 20 for sequence 3, or 0, got 18: .* a window of 6 tokens"):
        cache.with_lengths([2, 3, 0, 18])
    marked = jax.jit(lambda cache: cache.with_lengths(np.array([2, 3, 0, 18])))(cache)  # no error can be raised there
    assert np.asarray(marked.overflowed).tolist() == [False, False, False, True]
    shorter = cache.with_lengths([2, 3, 0, 20])
    whole = filled(create(), [2, 3, 0, 20])
    query = draw(1, N)
    assert_state(attended(shorter, query), attended(whole, query, local_window_size=(5, None)))


def test_lengths_beyond_the_prompt_are_clipped_inside_jit():
    cache, new = create(window=6), prompts([12] * B, 12, create())
    written = jax.jit(lambda cache, lengths: cache.write_prefix(*new, lengths=lengths))(cache, np.full(B, 99, np.int32))
    assert_same_bits(written, cache.write_prefix(*new, lengths=[12] * B))


def test_the_sequence_of_a_longer_cache_is_refused():
    rolling, plain = create(window=6), create(capacity=6)
    with pytest.raises(ValueError, match="other must be like this cache, of one sequence and at most 6 tokens"):
        plain.with_sequence(0, dataclasses.replace(rolling, lengths=rolling.lengths[:1]))
