"""A cache as users of JAX have it: own shard_maps, meshes of either kind, set_mesh, and a batch that is sharded too."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_attention
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tree_attn import KVCache, make_mesh
from tree_attn.measure import hlo

B, K, N, H = 4, 2, 4, 8
SEQ, DATA = 3, 2


def draw(num_tokens, heads=K, seed=0, batch=B):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(batch, num_tokens, heads, H)), jnp.float32)


def mesh_of(kind):
    """Returns a mesh of two axes, "data" over "seq", of Auto axes or of JAX's own default, Explicit ones."""
    if kind == "auto":
        return make_mesh({"seq": SEQ, "data": DATA})
    return jax.make_mesh((DATA, SEQ), ("data", "seq"), devices=jax.devices()[: DATA * SEQ])


def create(mesh, batch_axis_name="data", **options):
    sizes = dict(batch=B, capacity=12, num_kv_heads=K, head_dim=H, dtype=jnp.float32)
    arrays = dict(keeps_value_sum=True, keeps_key_by_component=True)
    return KVCache.create(mesh=mesh, axis_name="seq", batch_axis_name=batch_axis_name, **sizes | arrays | options)


def use(cache, other, query, key, value, prompt_key, prompt_value):
    """Every change of a cache, then attention; as it stands it runs outside and inside of a shard_map."""
    assert cache.capacity == 12
    cache = cache.write_prefix(prompt_key, prompt_value).with_lengths(jnp.full(cache.lengths.shape, 5, jnp.int32))
    cache = cache.with_sequence(2, other).write(key, value)
    out = cache.attend(query, num_new=2, is_causal=True, return_lse=True)
    cache = cache.advance(2).append(key[:, :1], value[:, :1])
    return cache, out, cache.value_mean(cache.lengths)


def arguments(mesh, put=lambda x, *spec: x):
    other = create(mesh, None, batch=1, capacity=6).append(*(draw(3, seed=seed, batch=1) for seed in (8, 9)))
    data = put(draw(2, N), "data"), *(put(draw(2, seed=seed), "data") for seed in (1, 2))
    return other, *data, *(put(draw(6, seed=seed), "data", "seq") for seed in (3, 4))


def expected_keys():
    """Returns keys or values of each sequence after `use`, before its last append: 5 of a prompt, or 3, and 2 new."""
    whole = []
    for new, prompt, other in ((1, 3, 8), (2, 4, 9)):
        rows = np.zeros((B, 7, K, H), np.float32)
        for b in range(B):
            old = draw(3, seed=other, batch=1)[0] if b == 2 else draw(6, seed=prompt)[b, :5]
            rows[b, : len(old) + 2] = np.concatenate([old, draw(2, seed=new)[b]])
        whole.append(rows)
    return whole, np.array([7, 7, 5, 7], np.int32)


def assert_used(cache, out, mean):
    (key, value), lengths = expected_keys()
    assert_attention(out, draw(2, N), key, value, key_value_seq_lengths=lengths, is_causal=True)
    np.testing.assert_array_equal(cache.lengths, lengths + 1)
    assert not np.asarray(cache.overflowed).any()
    total = value.sum(axis=1) + np.asarray(draw(2, seed=2)[:, 0])
    np.testing.assert_allclose(mean, total / (lengths + 1)[:, None, None], atol=1e-6)
    assert cache.key.sharding.is_equivalent_to(NamedSharding(cache.mesh, P("data", "seq")), 4)


@pytest.mark.parametrize("kind, check_vma", [("auto", True), ("auto", False), ("explicit", True)])
def test_a_cache_works_inside_ones_own_shard_map(kind, check_vma):
    mesh = mesh_of(kind)
    cache = create(mesh)
    other, *arrays = arguments(mesh, lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec))))
    data, prompt = P("data"), P("data", "seq")
    in_specs = cache.specs(), other.specs(), data, data, data, prompt, prompt
    out_specs = cache.specs(), (data, data), data
    mapped = jax.shard_map(use, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
    assert_used(*jax.jit(mapped, donate_argnums=0)(cache, other, *arrays))
    assert cache.key.is_deleted()


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_a_batch_over_a_mesh_axis_needs_no_collective_over_it(kind):
    """Every collective joins the devices of a sequence, and none the parts of the batch."""
    mesh = mesh_of(kind)
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    compiled = jax.jit(use, donate_argnums=0).lower(create(mesh), *arguments(mesh, put)).compile()
    collectives = hlo.collectives(compiled.as_text())
    assert {one.group_size for one in collectives} == {SEQ}
    assert_used(*compiled(create(mesh), *arguments(mesh, put)))


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_plain_arrays_are_placed_where_the_cache_lies(kind):
    mesh = mesh_of(kind)
    assert_used(*jax.jit(use)(create(mesh), *arguments(mesh)))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("row", range(B))
def test_each_row_of_a_sharded_batch_can_be_replaced(row, kind):
    mesh = jax.make_mesh((1, DATA), ("seq", "data"), axis_types=(kind, kind), devices=jax.devices()[:DATA])
    cache = create(mesh).append(draw(3), draw(3, seed=1))
    other = create(mesh, None, batch=1).append(*(draw(2, seed=seed, batch=1) for seed in (5, 6)))
    moved = cache.with_sequence(row, other)
    np.testing.assert_array_equal(moved.lengths, np.where(np.arange(B) == row, 2, 3))
    expected = np.array(cache.key)
    expected[row] = other.key[0]
    np.testing.assert_array_equal(moved.key, expected)


def test_a_batch_that_its_axis_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="batch must be a multiple of the 2 devices of batch_axis_name, got 3"):
        create(mesh_of("auto"), batch=3)
    cache, other = create(mesh_of("auto")), create(mesh_of("auto"), batch=2)
    with pytest.raises(ValueError, match="other must be like this cache, of one sequence"):
        cache.with_sequence(0, dataclasses.replace(other, lengths=other.lengths[:1]))


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_the_mesh_of_set_mesh_serves_where_none_is_given(kind):
    with jax.set_mesh(mesh_of(kind)):
        cache = create(None, None).append(draw(3), draw(3, seed=1))
        assert cache.mesh == mesh_of(kind)
        got = jax.jit(lambda cache: cache.attend(draw(1, N), return_lse=True))(cache)
        assert_attention(got, draw(1, N), draw(3), draw(3, seed=1))
        with pytest.raises(ValueError, match="mesh must be given inside jit"):
            jax.eval_shape(lambda: create(None))
