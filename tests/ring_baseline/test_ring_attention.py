"""ring_attention over a whole prompt: exact under every placement, and balanced where it says so."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_attention, assert_gradients
from attention_cases import HEAD_SCALES, SINKS, Case
from dense import dense_attention, without_padding
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tree_attn import Shard, make_mesh, storage_order
from tree_attn.measure import hlo
from tree_attn.ring_baseline import ring_attention

TOKENS = 24
OPTIONS = {
    "causal": {},
    "all_pairs": {"is_causal": False},
    "window": {"local_window_size": (5, 2)},
    "window_not_causal": {"is_causal": False, "local_window_size": 3},
    "soft_cap_scale": {"logits_soft_cap": 1.5, "scale": 0.6},
    "sinks": {"sinks": SINKS},
    "head_scales": HEAD_SCALES,
}
PROMPT = Case(queries=TOKENS, keys=TOKENS)


def oracle_options(lengths, options):
    """Returns the same call for a function without self-attention: causal by default, query i at position i."""
    return {"is_causal": True} | options | {"key_value_seq_lengths": lengths, "query_positions": np.arange(TOKENS)}


def ring_in_natural_order(axis_sizes, block_size, **options):
    """Calls ring_attention on arrays in natural order and returns natural order."""
    order = storage_order(TOKENS, int(np.prod(list(axis_sizes.values()))), block_size)
    ring = partial(
        ring_attention, axis_name=tuple(axis_sizes), mesh=make_mesh(axis_sizes), block_size=block_size, return_lse=True
    )

    def call(query, key, value, **more):
        stored = ring(query[:, order], key[:, order], value[:, order], **options, **more)
        return jax.tree.map(lambda x: x[:, np.argsort(order)], stored)

    return call


@pytest.mark.parametrize(
    "name, block_size",
    [(name, 1) for name in OPTIONS]
    + [("causal", 2), ("causal", None), ("window", 4), ("sinks", "zigzag"), ("window", "zigzag")],
)
def test_every_option_and_placement_with_lengths(name, block_size):
    arrays, options = PROMPT.arrays(), OPTIONS[name]
    ring = ring_in_natural_order({"seq": 3}, block_size, **options)
    call = jax.jit(lambda lengths: ring(*arrays, key_value_seq_lengths=lengths))
    for lengths in np.array([[TOKENS, 13], [0, 5]], np.int32):
        query, *rest = arrays
        assert_attention(call(lengths), without_padding(query, lengths), *rest, **oracle_options(lengths, options))


@pytest.mark.parametrize(
    "axis_sizes, case",
    [
        ({"seq": 1}, PROMPT),
        ({"seq": 4}, Case(queries=TOKENS, keys=TOKENS, heads=6, kv_heads=2)),
        ({"seq": 3}, Case(queries=TOKENS, keys=TOKENS, kv_heads=1, value_dim=5)),
        ({"seq": 3}, Case(queries=TOKENS, keys=TOKENS, dtype="bfloat16")),
        ({"seq": 3}, Case(queries=TOKENS, keys=TOKENS, dtype="bfloat16", stored_dtype="float8_e4m3fn")),
        ({"device": 3, "node": 2}, Case(queries=TOKENS, keys=TOKENS, logit_size=1e4)),
    ],
    ids=["one_device", "gqa", "mqa_value_dim", "bf16", "float8", "two_axes_huge_logits"],
)
def test_devices_shapes_and_dtypes(axis_sizes, case):
    arrays = case.arrays()
    got = jax.jit(ring_in_natural_order(axis_sizes, 1))(*arrays)
    assert_attention(got, *arrays, **oracle_options(None, {}))


def test_striped_and_causal_by_default_and_sharded_as_the_query_is():
    mesh, order = make_mesh({"seq": 4}), storage_order(TOKENS, 4, 1)
    arrays, along_sequence = PROMPT.arrays(), NamedSharding(mesh, P(None, "seq"))
    striped = jax.device_put([x[:, order] for x in arrays], along_sequence)
    got = jax.jit(partial(ring_attention, axis_name="seq", mesh=mesh, block_size=1, return_lse=True))(*striped)
    assert all(x.sharding.is_equivalent_to(along_sequence, x.ndim) for x in got)
    assert_attention([x[:, np.argsort(order)] for x in got], *arrays, **oracle_options(None, {}))


def test_gradients_are_those_of_dense_attention():
    arrays = PROMPT.arrays()
    lengths = np.array([0, 17], np.int32)
    loss = lambda attention, *arrays: jnp.sum(attention(*arrays)[0] ** 2)
    gradient = lambda attention, *arrays: jax.jit(jax.grad(partial(loss, attention), argnums=(0, 1, 2)))(*arrays)
    ring = partial(ring_in_natural_order({"seq": 3}, 1), key_value_seq_lengths=lengths)

    options = oracle_options(lengths, {})
    dense = lambda query, *rest: dense_attention(without_padding(query, lengths), *rest, **options)
    expected = gradient(dense, *arrays)
    assert_gradients(gradient(ring, *arrays), expected)
    is_padding = np.arange(TOKENS)[None, :, None, None] >= lengths[:, None, None, None]
    for garbage in (jnp.nan, jnp.inf, 3e38):  # whatever the padding of prompts holds, of queries too
        assert_gradients(gradient(ring, *(jnp.where(is_padding, garbage, x) for x in arrays)), expected)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_keys_and_values_make_one_hop_fewer_than_there_are_devices(num_shards):
    arrays = PROMPT.arrays()
    call = partial(ring_attention, axis_name="seq", mesh=make_mesh({"seq": num_shards}), block_size=1)
    sent = hlo.collectives(jax.jit(call).lower(*arrays).compile().as_text())
    assert sum(one.count for one in sent) == 2 * (num_shards - 1)


def pairs_per_hop(num_shards, slots, block_size):
    """Counts the (query, key) pairs that the causal mask leaves each device in each hop, `[hop, device]`."""
    positions = [
        np.asarray(Shard(index=i, num_shards=num_shards, block_size=block_size).positions(slots))
        for i in range(num_shards)
    ]
    visible = lambda device, hop: positions[(device - hop) % num_shards][None] <= positions[device][:, None]
    return np.array([[visible(d, hop).sum() for d in range(num_shards)] for hop in range(num_shards)])


@pytest.mark.parametrize("num_shards", [2, 3, 8])
def test_striping_balances_every_hop_to_within_one_diagonal(num_shards):
    slots = 16
    pairs = pairs_per_hop(num_shards, slots, block_size=1)
    assert (pairs.max(axis=1) - pairs.min(axis=1)).max() <= slots
    assert pairs.max() <= slots * slots / 2 + slots, "about half of the pairs of two shards"


@pytest.mark.parametrize("num_shards", [2, 3, 8])
def test_zigzag_balances_every_hop_and_leaves_half_of_the_pairs(num_shards):
    slots = 16
    pairs = pairs_per_hop(num_shards, slots, block_size="zigzag")
    assert (pairs[1:] == slots * slots / 2).all() and (pairs[0] == slots * (slots + 1) / 2).all()


@pytest.mark.parametrize("num_shards", [2, 3, 8])
def test_contiguous_placement_is_not_balanced(num_shards):
    """Here a device has either all pairs of a hop or none of them, which is why striping is the default."""
    slots = 16
    per_device = pairs_per_hop(num_shards, slots, block_size=None)
    assert set(per_device[1:].ravel()) == {0, slots * slots}
