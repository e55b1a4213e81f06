"""Reductions that end with each device's part of the heads: the same result, elsewhere."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_attention, assert_gradients
from jax.sharding import PartitionSpec as P

from tree_attn import SoftmaxState, attend, make_mesh, tree_decode
from tree_attn.measure import hlo

N = 8
SINKS = np.linspace(-1, 3, N).astype(np.float32)


def inputs(dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = (2, 3, N, 16), (2, 48, 2, 16), (2, 48, 2, 16)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def decoded(axis_sizes, arrays, **options):
    mesh, axes = make_mesh(axis_sizes), tuple(axis_sizes)
    decode = functools.partial(
        tree_decode, axis_name=axes, mesh=mesh, block_size=None, shard_heads=True, return_lse=True, **options
    )
    return SoftmaxState(*jax.jit(decode)(*arrays))


@pytest.mark.parametrize("axis_sizes", [{"seq": 1}, {"seq": 2}, {"seq": 8}, {"device": 2, "node": 4}], ids=str)
def test_it_is_the_same_attention_in_parts(axis_sizes):
    options = dict(key_value_seq_lengths=np.array([41, 0], np.int32), sinks=SINKS)
    arrays = inputs()
    state = decoded(axis_sizes, arrays, **options)
    assert_attention(state, *arrays, **options)
    devices = int(np.prod(list(axis_sizes.values())))
    shards = {shard.index[2].indices(N)[:2] for shard in state.out.addressable_shards}
    assert shards == {(i * N // devices, (i + 1) * N // devices) for i in range(devices)}


def test_narrow_out_is_merged_in_float32_and_rounded_once():
    arrays = inputs(jnp.bfloat16)
    state = decoded({"seq": 4}, arrays)
    assert state.out.dtype == jnp.bfloat16
    assert_attention(state, *arrays)


def test_within_a_callers_shard_map_it_is_this_devices_heads():
    arrays, mesh = inputs(), make_mesh({"seq": 4})
    decode = functools.partial(tree_decode, axis_name="seq", block_size=None, shard_heads=True, sinks=SINKS)
    along_keys = P(None, "seq")
    mapped = jax.shard_map(
        decode, mesh=mesh, in_specs=(P(), along_keys, along_keys), out_specs=P(None, None, "seq"), check_vma=False
    )
    expected = attend(*arrays, sinks=SINKS).out
    np.testing.assert_allclose(jax.jit(mapped)(*arrays), expected, atol=2e-6)


def test_its_gradients_are_those_of_the_whole():
    arrays, mesh = inputs(), make_mesh({"seq": 4})
    loss = lambda attention: lambda *arrays: jnp.sum(jnp.sin(attention(*arrays)))
    decode = functools.partial(tree_decode, axis_name="seq", mesh=mesh, shard_heads=True)
    gradients = [
        jax.jit(jax.grad(loss(attention), argnums=(0, 1, 2)))(*arrays)
        for attention in (decode, lambda *arrays: attend(*arrays).out)
    ]
    assert_gradients(*gradients)


def test_it_sends_a_pth_of_what_a_gather_does():
    arrays, mesh = inputs(), make_mesh({"seq": 4})
    sent = {}
    for name, options in {"heads": {"shard_heads": True}, "all": {"reduction": "gather"}}.items():
        program = jax.jit(functools.partial(tree_decode, axis_name="seq", mesh=mesh, **options))
        found = hlo.collectives(program.lower(*arrays).compile().as_text(), num_devices=4)
        sent[name] = hlo.counts(found), hlo.total_bytes_sent_per_device(found)
    assert sent["heads"][0] == {"all-to-all": 1}
    assert sent["heads"][1] * 4 == sent["all"][1]


@pytest.mark.parametrize(
    "options, said",
    [
        ({"reduction": "gather"}, "reduction must be None with shard_heads=True.*'gather'"),
        ({"num": 3}, "heads that the 3 devices divide, got 8"),
    ],
)
def test_what_does_not_fit_is_named(options, said):
    devices = options.pop("num", 2)
    with pytest.raises(ValueError, match=said):
        decoded({"seq": devices}, inputs(), **options)
