"""ring_decode, both variants, against the oracle and against tree_decode."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_attention, assert_gradients, assert_state
from attention_cases import HEAD_SCALES, KEYS, NARROW, OPTIONS, SINKS, Case
from dense import dense_attention
from jax.sharding import PartitionSpec as P
from prompts import assert_value_and_gradients

from tree_attn import attend, make_mesh, storage_order, tree_decode
from tree_attn.ring_baseline import ring_decode

VARIANTS = ["overlapped", "public"]


def ring_on(num_devices, **options):
    options = {"block_size": None, "return_lse": True} | options
    return partial(ring_decode, axis_name="seq", mesh=make_mesh({"seq": num_devices}), **options)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("num_devices", [1, 3, 8])
def test_every_device_count_with_lengths_that_end_anywhere(num_devices, variant):
    query, key, value = Case().arrays()
    ring = ring_on(num_devices, variant=variant, is_causal=True)
    call = jax.jit(lambda lengths: ring(query, key, value, key_value_seq_lengths=lengths))
    for lengths in np.array([[KEYS, KEYS], [0, 19], [3, 36]], np.int32):
        assert_attention(call(lengths), query, key, value, key_value_seq_lengths=lengths, is_causal=True)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["window_left", "soft_cap", "everything"])
def test_options_under_block_cyclic_placement(name, variant):
    query, key, value = Case(keys=36).arrays()
    options, order = OPTIONS[name] | {"key_value_seq_lengths": np.array([36, 10], np.int32)}, storage_order(36, 3, 2)
    got = jax.jit(ring_on(3, block_size=2, variant=variant, **options))(query, key[:, order], value[:, order])
    assert_attention(got, query, key, value, **options)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "case",
    [Case(dtype="bfloat16"), Case(logit_size=1e4), Case(queries=1, kv_heads=1, value_dim=5)],
    ids=["bf16", "huge_logits", "one_query_mqa_value_dim"],
)
def test_shapes_and_dtypes(case, variant):
    arrays = case.arrays()
    assert_attention(jax.jit(ring_on(3, variant=variant))(*arrays), *arrays)


@pytest.mark.parametrize(
    "num_devices, kv_heads",
    [(3, 3), pytest.param(2, 2, marks=pytest.mark.slow), pytest.param(8, 2, marks=pytest.mark.slow)],
)
def test_two_ways_round_value_and_gradient(num_devices, kv_heads):
    """Three KV heads go two one way and one the other."""
    case = Case(keys=40, heads=2 * kv_heads, kv_heads=kv_heads)
    query, key, value = case.arrays()
    scales = {name: np.resize(x, kv_heads) for name, x in HEAD_SCALES.items()}
    options = dict(key_value_seq_lengths=np.array([40, 17], np.int32), is_causal=True, local_window_size=(30, None))
    options |= scales | {"sinks": np.resize(SINKS, 2 * kv_heads)}
    ring = ring_on(num_devices, rotation="two_way", **options)
    assert_value_and_gradients(ring, query, key, value, **options)


def test_two_ways_round_send_as_much_in_each_direction():
    query, key, value = Case().arrays()
    text = jax.jit(ring_on(3, rotation="two_way")).lower(query, key, value).as_text()
    pairs = re.findall(r"collective_permute.*?source_target_pairs = dense<(\[\[.*?\]\])>", text)
    assert sorted(pairs) == 4 * ["[[0, 1], [1, 2], [2, 0]]"] + 4 * ["[[0, 2], [1, 0], [2, 1]]"]


def test_two_ways_round_need_two_heads_and_the_overlapped_variant():
    query, key, value = Case(kv_heads=1).arrays()
    with pytest.raises(
        NotImplementedError, match="'two_way' sends half of the KV heads each way round, and key has only 1"
    ):
        ring_on(3, rotation="two_way")(query, key, value)
    with pytest.raises(ValueError, match="rotation must be one of None, 'one_way', got 'two_way'"):
        ring_on(3, rotation="two_way", variant="public")(query, key, value)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", NARROW)
def test_scaled_float8_and_int8_travel_as_they_are_stored(name, variant):
    query, key, value = NARROW[name].arrays()
    options = HEAD_SCALES | {"key_value_seq_lengths": np.array([KEYS, 5], np.int32)}
    call = jax.jit(ring_on(3, variant=variant, **options))
    assert_attention(call(query, key, value), query, key, value, **options)
    sent = re.findall(r"collective_permute.*-> tensor<[0-9x]*x(\w+)>", call.lower(query, key, value).as_text())
    assert sent and set(sent) == {"i8" if name.startswith("int8") else "f8E4M3FN"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_inside_a_shard_map_over_two_axes_every_device_holds_the_same_bits(variant):
    query, key, value = Case(keys=36).arrays()
    axes, options = ("device", "node"), dict(key_value_seq_lengths=np.array([36, 10], np.int32), is_causal=True)

    def on_device(query, key, value):
        state = ring_decode(
            query, key, value, axis_name=axes, block_size=None, variant=variant, return_lse=True, **options
        )
        return jax.tree.map(lambda x: x[None], state)

    everywhere = jax.jit(
        jax.shard_map(
            on_device,
            mesh=make_mesh({"device": 3, "node": 2}),
            in_specs=(P(), P(None, axes), P(None, axes)),
            out_specs=P(axes),
            check_vma=False,
        )
    )(query, key, value)
    for x in everywhere:
        np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape))
    assert_attention([x[0] for x in everywhere], query, key, value, **options)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_those_of_dense_attention(variant):
    arrays = Case(keys=36).arrays()
    options = dict(key_value_seq_lengths=np.array([0, 17], np.int32), is_causal=True)
    loss = lambda attention, *arrays: jnp.sum(attention(*arrays, **options)[0] ** 2)
    gradient = lambda attention: jax.jit(jax.grad(partial(loss, attention), argnums=(0, 1, 2)))(*arrays)
    assert_gradients(gradient(ring_on(3, variant=variant)), gradient(dense_attention))


def test_tree_ring_and_one_device_agree():
    arrays = Case().arrays()
    options = OPTIONS["everything"] | {"key_value_seq_lengths": np.array([KEYS, 5], np.int32)}
    alone = jax.jit(partial(attend, **options))(*arrays)
    tree = partial(tree_decode, axis_name="seq", mesh=make_mesh({"seq": 8}), block_size=None, return_lse=True)
    for sharded in (tree, *(ring_on(8, variant=variant) for variant in VARIANTS)):
        assert_state(jax.jit(partial(sharded, **options))(*arrays), alone)


@pytest.mark.parametrize("variant", ["overlapped", "public"])
def test_over_no_keys_it_is_empty_but_for_the_sinks(variant):
    query, key, _ = Case().arrays()
    decode = jax.jit(ring_on(2, variant=variant, sinks=SINKS))
    out, lse = decode(query, key[:, :0], key[:, :0])
    assert not np.asarray(out).any()
    np.testing.assert_array_equal(lse, np.broadcast_to(SINKS, lse.shape))
