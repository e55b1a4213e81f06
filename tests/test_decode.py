"""tree_decode against the oracle: device counts, reductions, placements, options, and every place it is called from."""

import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_attention, assert_gradients, assert_same_bits, assert_state
from attention_cases import HEAD_SCALES, KEYS, NARROW, OPTIONS, Case
from dense import dense_attention
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tree_attn import make_mesh, reference, storage_order, tree_decode

LENGTHS = [[KEYS, KEYS], [0, 19], [3, 36], [1, 2]]  # full; none; inside the first shard, so that others hold nothing
FLAT = [({"seq": n}, reduction) for n in (1, 2, 3, 5, 8) for reduction in ("allreduce", "gather")]
LEVELS = [
    ({"device": 4, "node": 2}, "hierarchical"),
    ({"device": 3, "node": 2}, "hierarchical"),
    ({"device": 3, "node": 2}, ("gather", "allreduce")),
    ({"device": 4, "node": 2}, "allreduce"),
]


def decode_on(axis_sizes, **options):
    """tree_decode over a mesh of these axes, all of which shard the sequence."""
    options = {"block_size": None, "return_lse": True} | options
    return partial(tree_decode, axis_name=tuple(axis_sizes), mesh=make_mesh(axis_sizes), **options)


def check_with_lengths(decode, arrays, lengths_list, *, order=None, **options):
    """Compiles `decode` once and compares it with the oracle for each of the lengths; `order` stores the keys."""
    query, key, value = arrays
    stored = (key, value) if order is None else (key[:, order], value[:, order])
    call = jax.jit(
        lambda query, key, value, lengths: decode(query, key, value, key_value_seq_lengths=lengths, **options)
    )
    for lengths in np.asarray(lengths_list, np.int32):
        got = call(query, *stored, lengths)
        assert_attention(got, *arrays, key_value_seq_lengths=lengths, **options)


@pytest.mark.parametrize("axis_sizes, reduction", FLAT + LEVELS, ids=str)
def test_every_device_count_and_reduction_with_keys_that_do_not_divide(axis_sizes, reduction):
    check_with_lengths(decode_on(axis_sizes, reduction=reduction), Case().arrays(), LENGTHS, is_causal=True)


@pytest.mark.parametrize("block_size", [1, 2, 5])
@pytest.mark.parametrize("axis_sizes", [{"seq": 3}, {"seq": 8}, {"device": 3, "node": 2}], ids=str)
def test_block_cyclic_placement(axis_sizes, block_size):
    num_shards = int(np.prod(list(axis_sizes.values())))
    num_keys = num_shards * block_size * 2
    lengths = [[num_keys, num_keys - 1], [0, block_size], [num_keys // 2, 1]]
    order = storage_order(num_keys, num_shards, block_size)
    decode = decode_on(axis_sizes, block_size=block_size)
    check_with_lengths(decode, Case(keys=num_keys).arrays(), lengths, order=order, is_causal=True)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option(options):
    arrays, order = Case(keys=36).arrays(), storage_order(36, 3, 2)
    decode = decode_on({"seq": 3}, block_size=2, reduction="gather")
    check_with_lengths(decode, arrays, [[36, 35], [0, 19], [5, 3]], order=order, **options)


@pytest.mark.parametrize(
    "name, axis_sizes, reduction",
    [("float8_bfloat16", {"seq": n}, reduction) for n in (3, 8) for reduction in ("allreduce", "gather")]
    + [("float8_bfloat16", *level) for level in LEVELS]
    + [(name, {"seq": 3}, "gather") for name in NARROW if name != "float8_bfloat16"],
    ids=str,
)
def test_scaled_float8_and_int8_under_every_reduction(name, axis_sizes, reduction):
    """States are float32 whatever is stored, so one dtype meets all reductions and every dtype meets one."""
    check_with_lengths(decode_on(axis_sizes, reduction=reduction), NARROW[name].arrays(), LENGTHS[:3], **HEAD_SCALES)


@pytest.mark.parametrize(
    "case",
    [
        Case(queries=1),
        Case(heads=4, kv_heads=4),
        Case(heads=4, kv_heads=1),
        Case(value_dim=5),
        Case(keys=3),
        Case(keys=0),
        Case(logit_size=1e4),
        Case(dtype="bfloat16"),
        Case(dtype="float16"),
        Case(dtype="bfloat16", stored_dtype="float8_e4m3fn"),
    ],
    ids=[
        "one_query",
        "mha",
        "mqa",
        "value_dim",
        "fewer_keys_than_devices",
        "no_keys",
        "huge_logits",
        "bf16",
        "fp16",
        "fp8",
    ],
)
def test_every_shape_and_dtype_without_lengths(case):
    arrays = case.arrays()
    assert_attention(jax.jit(decode_on({"seq": 8}, reduction="allreduce"))(*arrays), *arrays)


def test_the_first_axis_of_a_tuple_varies_slowest():
    """The order of axes is that of PartitionSpec: an array sharded by P(None, axes) is decoded in place."""
    mesh, axes = make_mesh({"device": 3, "node": 2}), ("device", "node")
    query, key, value = Case(keys=36).arrays()
    options = OPTIONS["window"] | {"key_value_seq_lengths": np.array([36, 10], np.int32)}
    placed = jax.device_put((key, value), NamedSharding(mesh, P(None, axes)))
    decode = partial(tree_decode, axis_name=axes, mesh=mesh, block_size=None, return_lse=True, **options)
    got = jax.jit(decode)(query, *placed)
    assert_attention(got, query, key, value, **options)


@pytest.mark.parametrize("reduction", ["allreduce", "gather"])
def test_inside_a_shard_map_every_device_holds_the_same_bits(reduction):
    """Lengths count the keys of all shards here too."""
    query, key, value = Case(keys=40).arrays()
    options = dict(key_value_seq_lengths=np.array([40, 7], np.int32), is_causal=True)

    def on_device(query, key, value):
        state = tree_decode(
            query, key, value, axis_name="seq", block_size=None, reduction=reduction, return_lse=True, **options
        )
        return jax.tree.map(lambda x: x[None], state)

    everywhere = jax.jit(
        jax.shard_map(
            on_device,
            mesh=make_mesh({"seq": 8}),
            in_specs=(P(), P(None, "seq"), P(None, "seq")),
            out_specs=P("seq"),
            check_vma=False,
        )
    )(query, key, value)
    for x in everywhere:
        np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape))
    assert_attention([x[0] for x in everywhere], query, key, value, **options)


def test_the_output_is_whole_on_every_device():
    mesh = make_mesh({"seq": 8})
    query, key, value = Case(keys=40).arrays()
    placed = jax.device_put((key, value), NamedSharding(mesh, P(None, "seq")))
    out = jax.jit(partial(tree_decode, axis_name="seq", mesh=mesh))(query, *placed)
    assert out.sharding.is_fully_replicated and len(out.addressable_shards) == 8
    for shard in out.addressable_shards:
        np.testing.assert_array_equal(shard.data, out)


def test_a_context_mesh_serves_as_the_mesh():
    arrays = Case().arrays()
    call = lambda mesh: jax.jit(partial(tree_decode, axis_name="seq", mesh=mesh))(*arrays)
    mesh = make_mesh({"seq": 4})
    with jax.set_mesh(mesh):
        from_context = call(None)
    assert_same_bits(from_context, call(mesh))


@pytest.mark.parametrize(
    "query_spec, key_spec",
    [(P("other"), P("other", "seq")), (P(None, None, "other"), P(None, "seq", "other"))],
    ids=["batch", "heads"],
)
def test_sharding_over_other_axes_is_kept(query_spec, key_spec):
    mesh = make_mesh({"other": 2, "seq": 4})
    arrays = Case(keys=40).arrays()
    options = HEAD_SCALES | {"key_value_seq_lengths": np.array([40, 11], np.int32)}
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    placed = [place(x, spec) for x, spec in zip(arrays, (query_spec, key_spec, key_spec), strict=True)]
    decode = jax.jit(partial(tree_decode, axis_name="seq", mesh=mesh, block_size=None, return_lse=True, **options))
    got = decode(*placed)
    for x in got:
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, query_spec), x.ndim)
    assert_attention(got, *arrays, **options)


@pytest.mark.parametrize("reduction", ["allreduce", "gather", "hierarchical"])
def test_gradients_are_those_of_dense_attention(reduction):
    """Sequence 0 sees nothing at all, and two shards hold nothing of sequence 1."""
    arrays = Case(keys=36).arrays()
    axis_sizes = {"device": 2, "node": 2} if reduction == "hierarchical" else {"seq": 4}
    options = dict(key_value_seq_lengths=np.array([0, 17], np.int32), is_causal=True, logits_soft_cap=3.0)

    def loss(attention, *arrays):
        out, lse = attention(*arrays, **options)
        return jnp.sum(out**2) + jnp.sum(jnp.where(jnp.isneginf(lse), 0.0, lse))

    gradient = lambda attention: jax.jit(jax.grad(partial(loss, attention), argnums=(0, 1, 2)))(*arrays)
    assert_gradients(gradient(decode_on(axis_sizes, reduction=reduction)), gradient(dense_attention))


def test_return_lse():
    arrays, mesh = Case().arrays(), make_mesh({"seq": 2})
    decode = jax.jit(partial(tree_decode, axis_name="seq", mesh=mesh), static_argnames="return_lse")
    out, lse = decode(*arrays, return_lse=True)
    assert_state((out, lse), reference.attention(*arrays))
    assert_same_bits(decode(*arrays), out)


def test_outside_jit():
    arrays = Case(queries=1).arrays()
    assert_attention(decode_on({"seq": 2})(*arrays), *arrays)


def test_traced_lengths_out_of_range_are_clipped():
    """Values that cannot be checked make no key outside the arrays be read, and none inside be lost."""
    arrays = Case().arrays()
    decode = jax.jit(lambda lengths: decode_on({"seq": 3})(*arrays, key_value_seq_lengths=lengths))
    assert_attention(decode(np.array([-3, 99], np.int32)), *arrays, key_value_seq_lengths=np.array([0, KEYS]))


def test_what_none_picked_is_logged(caplog):
    caplog.set_level(logging.INFO, "tree_attn")
    jax.eval_shape(decode_on({"seq": 2}), *Case().arrays())
    assert "reduction=None picked 'gather'" in caplog.text
    assert "implementation=None picked" in caplog.text


@pytest.mark.parametrize("shard_heads", [False, True])
def test_sinks_join_once_and_with_the_heads_of_their_device(shard_heads):
    arrays, options = Case().arrays(), OPTIONS["sinks"]
    got = jax.jit(decode_on({"seq": 2}, shard_heads=shard_heads, **options))(*arrays)
    assert_attention(got, *arrays, **options)
