"""The XLA backend against the oracle: every option, whole and cut into tiny tiles and chunks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_attention, assert_gradients, assert_same_bits, assert_state
from attention_cases import HEAD_DIM, HEAD_SCALES, KEYS, NARROW, OPTIONS, Case
from dense import dense_attention

from tree_attn import Shard, attend, empty_like, merge_states, reference, storage_order
from tree_attn.local import xla

LENGTHS = [[KEYS, KEYS], [0, 19], [5, 36], [1, 2]]
SHAPES = {
    "mha": Case(heads=4, kv_heads=4),
    "gqa": Case(heads=6, kv_heads=2),
    "mqa": Case(heads=4, kv_heads=1),
    "one_query": Case(queries=1),
    "more_queries_than_keys": Case(queries=5, keys=3),
    "value_dim": Case(value_dim=5),
    "no_keys": Case(keys=0),
    "one_key": Case(keys=1),
    "chunks_divide_the_keys": Case(keys=40),
    "huge_logits": Case(logit_size=1e4),
    "bfloat16": Case(dtype="bfloat16"),
    "float16": Case(dtype="float16"),
    **NARROW,
}


needs_gpu = pytest.mark.skipif(
    jax.default_backend() != "gpu", reason="runs with TREE_ATTN_TEST_GPU=1 where JAX finds a CUDA GPU"
)


@pytest.fixture
def tiny_tiles(monkeypatch):
    """Tiles of 2 queries and chunks of 8 keys, which divide nothing here."""
    monkeypatch.setattr(xla, "MAX_TILE_QUERIES", 2)
    monkeypatch.setattr(xla, "MIN_CHUNK_KEYS", 8)
    monkeypatch.setattr(xla, "MAX_LOGITS_PER_CHUNK", 1)


def attend_xla(*arrays, lengths=None, **options):
    return attend(*arrays, implementation="xla", key_value_seq_lengths=lengths, **options)


def check_lengths_that_end_anywhere(options):
    arrays = Case().arrays()
    call = jax.jit(lambda *arrays, lengths: attend_xla(*arrays, lengths=lengths, **options))
    for lengths in LENGTHS:
        lengths = np.array(lengths, np.int32)
        assert_attention(call(*arrays, lengths=lengths), *arrays, key_value_seq_lengths=lengths, **options)


@pytest.mark.usefixtures("tiny_tiles")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_tiled(options):
    check_lengths_that_end_anywhere(options)


@pytest.mark.parametrize("name", ["plain", "causal", "window", "everything"])
def test_options_whole(name):
    check_lengths_that_end_anywhere(OPTIONS[name])


@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES)
def test_every_shape_and_dtype_whole(case):
    arrays = case.arrays()
    assert_attention(jax.jit(attend_xla)(*arrays), *arrays)


@pytest.mark.usefixtures("tiny_tiles")
@pytest.mark.parametrize(
    "name", ["one_query", "no_keys", "one_key", "chunks_divide_the_keys", "huge_logits", "bfloat16"]
)
def test_shapes_and_dtypes_tiled(name):
    arrays, options = SHAPES[name].arrays(), {"is_causal": True, "local_window_size": (17, 0)}
    assert_attention(jax.jit(partial(attend_xla, **options))(*arrays), *arrays, **options)


@pytest.mark.usefixtures("tiny_tiles")
def test_every_option_at_once_in_a_narrow_dtype():
    arrays, options = Case(dtype="float16").arrays(), OPTIONS["everything"]
    assert_attention(jax.jit(partial(attend_xla, **options))(*arrays), *arrays, **options)


@pytest.mark.parametrize("tiling", [None, "tiny_tiles"])
@pytest.mark.parametrize("case", NARROW.values(), ids=NARROW)
def test_scaled_float8_and_int8(case, tiling, request):
    tiling and request.getfixturevalue(tiling)
    arrays, options = case.arrays(), HEAD_SCALES | {"is_causal": True, "key_value_seq_lengths": np.array([36, 0])}
    assert_attention(jax.jit(partial(attend, **options))(*arrays), *arrays, **options)


def test_head_scales_may_be_traced_and_numbers_of_float8_range_do_not_overflow():
    query, key, value = NARROW["float8_float16"].arrays()
    scales = {"key_scale": np.array([1e-3, 0.3], np.float32), "value_scale": np.array([1e-3, 2.0], np.float32)}
    call = jax.jit(lambda *arrays, **scales: attend_xla(*arrays, **scales))
    key, value = (x * jnp.asarray(100, x.dtype) for x in (key, value))  # up to 448
    assert_attention(call(query, key, value, **scales), query, key, value, **scales)


@pytest.mark.usefixtures("tiny_tiles")
@pytest.mark.parametrize("block_size", [None, 1, 5])
def test_the_states_of_all_shards_merge_into_the_whole(block_size):
    """Sequence 0 fills every shard; sequence 1 ends inside the first, so that the others hold nothing."""
    query, key, value = Case(keys=45).arrays()
    options = OPTIONS["causal"] | {"key_value_seq_lengths": np.array([44, 4], np.int32)}
    order = storage_order(45, num_shards=3, block_size=block_size)

    @jax.jit
    def of_shard(index):
        stored = [jax.lax.dynamic_slice_in_dim(x[:, order], 15 * index, 15, axis=1) for x in (key, value)]
        shard = Shard(index=index, num_shards=3, block_size=block_size)
        return attend(query, *stored, shard=shard, implementation="xla", **options)

    states = [of_shard(i) for i in range(3)]
    merged = merge_states(jax.tree.map(lambda *x: jnp.stack(x), *states), axis=0)
    assert_state(merged, reference.attention(query, key, value, **options))
    if block_size != 1:
        last_of_sequence_1 = jax.tree.map(lambda x: x[1], states[2])
        assert_same_bits(last_of_sequence_1, empty_like(last_of_sequence_1))


@pytest.mark.parametrize("name, tiling", [("plain", None), ("plain", "tiny_tiles"), ("everything", "tiny_tiles")])
def test_gradients_are_those_of_dense_attention(name, tiling, request):
    """Sequence 0 sees nothing at all: its gradients must be zero, not NaN."""
    tiling and request.getfixturevalue(tiling)
    query, key, value = Case().arrays()
    options = OPTIONS[name] | {"key_value_seq_lengths": np.array([0, 30], np.int32)}
    weight_out, weight_lse = Case().arrays(seed=1)[0], Case().arrays(seed=2)[0][..., 0]
    per_head = {n: jnp.asarray(options[n]) for n in ("sinks", "key_scale", "value_scale") if n in options}

    def loss(attention, query, key, value, per_head):
        out, lse = attention(query, key, value, **(options | per_head))
        return jnp.sum(out * weight_out) + jnp.sum(jnp.where(jnp.isneginf(lse), 0.0, lse) * weight_lse)

    arguments = query, key, value, per_head
    gradient = lambda attention: jax.jit(jax.grad(partial(loss, attention), argnums=(0, 1, 2, 3)))(*arguments)
    got = gradient(partial(attend, implementation="xla"))
    assert_gradients(got, gradient(dense_attention))
    assert not got[1][0].any() and not got[2][0].any()


@pytest.mark.usefixtures("tiny_tiles")
def test_chunks_keep_their_dtypes_where_jax_counts_in_64_bits():
    loss = lambda *arrays: attend_xla(*arrays, lengths=np.array([37, 30]), is_causal=True).out.sum()
    arrays = Case().arrays()
    expected = jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays)
    with jax.enable_x64(True):
        got = jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays)
    assert_gradients(got, expected)
    assert {x.dtype for x in got} == {jnp.dtype("float32")}


@pytest.mark.usefixtures("tiny_tiles")
def test_gradients_are_finite_for_huge_logits():
    loss = lambda *arrays: sum(x.sum() for x in attend_xla(*arrays, is_causal=True))
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*Case(logit_size=1e4).arrays())
    assert all(np.isfinite(x).all() for x in gradients)


@pytest.mark.usefixtures("tiny_tiles")
def test_two_runs_agree_to_the_bit():
    call = jax.jit(partial(attend_xla, is_causal=True))
    assert_same_bits(call(*Case().arrays()), call(*Case().arrays()))


def temporary_bytes(function, num_queries, num_keys, stored_dtype=jnp.float32):
    query = jax.ShapeDtypeStruct((1, num_queries, 4, 64), jnp.float32)
    key = jax.ShapeDtypeStruct((1, num_keys, 2, 64), stored_dtype)
    return jax.jit(function).lower(query, key, key).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("stored_dtype", ["float32", "int8"])
def test_decoding_memory_does_not_grow_with_the_keys(stored_dtype):
    """Nor are integers widened but a chunk at a time."""
    small, large = (temporary_bytes(attend_xla, 1, 1 << exponent, stored_dtype) for exponent in (15, 18))
    assert large <= 1.1 * small


@needs_gpu
def test_on_a_gpu_scaled_float8_is_not_widened_in_memory(monkeypatch):
    monkeypatch.setattr(xla, "MAX_LOGITS_PER_CHUNK", 1 << 12)
    decode = partial(attend_xla, **HEAD_SCALES)
    small, large = (temporary_bytes(decode, 1, 1 << exponent, jnp.float8_e4m3fn) for exponent in (15, 18))
    assert large <= 1.1 * small


@needs_gpu
@pytest.mark.parametrize("case", NARROW.values(), ids=NARROW)
def test_on_a_gpu_scaled_float8_and_int8(case):
    arrays, options = case.arrays(), HEAD_SCALES | {"is_causal": True}
    assert_attention(jax.jit(partial(attend_xla, **options))(*arrays), *arrays, **options)


def test_prefill_memory_does_not_grow_with_queries_times_keys():
    """Only with a copy or two of the queries: tiles and chunks bound the logits."""
    small, large = (temporary_bytes(partial(attend_xla, is_causal=True), tokens, tokens) for tokens in (2048, 16384))
    query_bytes_more = (16384 - 2048) * 4 * 64 * 4
    assert large - small <= 2 * query_bytes_more


def test_chunks_past_every_length_are_skipped(monkeypatch):
    """A buffer of 64 chunks that holds 3 tokens costs what its lengths do: NaN in the rest is never multiplied."""
    monkeypatch.setattr(xla, "MIN_CHUNK_KEYS", 4)
    monkeypatch.setattr(xla, "MAX_LOGITS_PER_CHUNK", 1)
    query, key, value = Case(keys=256).arrays()
    lengths = np.array([3, 0], np.int32)
    poisoned = [x.at[:, 4:].set(jnp.nan) for x in (key, value)]
    assert_attention(
        jax.jit(attend_xla)(query, *poisoned, lengths=lengths), query, key, value, key_value_seq_lengths=lengths
    )


def test_head_dim_sets_the_default_scale():
    query, key, value = Case().arrays()
    assert_same_bits(attend_xla(query, key, value), attend_xla(query, key, value, scale=HEAD_DIM**-0.5))
