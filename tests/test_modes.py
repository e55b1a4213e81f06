"""JAX as users have it: inside their own `shard_map`, checked or not, and on meshes of every type.

Values and gradients are compared with dense attention. In an unchecked `shard_map` a gradient taken inside follows the
rule of JAX's own `psum` there (docs/conventions.md: "Gradients inside shard_map").
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients
from attention_cases import SINKS
from dense import dense_attention
from jax.sharding import PartitionSpec as P

from tree_attn import PrefixLevel, attention_moments, energy, hydragen_decode, make_mesh, sparq_decode, tree_decode
from tree_attn.local import xla
from tree_attn.ring_baseline import ring_attention, ring_decode

BATCH, KEYS, HEADS, KV_HEADS, HEAD_DIM = 2, 8, 4, 2, 4
LENGTHS = np.array([7, 3], np.int32)
OPTIONS = {"key_value_seq_lengths": LENGTHS, "is_causal": True, "sinks": SINKS}
NO_SINKS = {"key_value_seq_lengths": LENGTHS, "is_causal": True}
ONE, TWO = ("seq",), ("device", "node")


def draw(num_queries: int = 2):
    """Returns query, key, value and a cotangent of the output."""
    rng = np.random.default_rng(0)
    shapes = (num_queries, HEADS), (KEYS, KV_HEADS), (KEYS, KV_HEADS), (num_queries, HEADS)
    return [jnp.asarray(rng.normal(size=(BATCH, *shape, HEAD_DIM)), jnp.float32) for shape in shapes]


def tree(reduction, **options):
    return functools.partial(tree_decode, reduction=reduction, block_size=None, **(OPTIONS | options))


def ring(variant):
    return functools.partial(ring_decode, variant=variant, block_size=None, **OPTIONS)


def sparq(selection):
    """SparQ that keeps everything, which is exact."""
    return functools.partial(
        sparq_decode, num_components=HEAD_DIM, num_keys=2 * KEYS, selection=selection, block_size=None, **NO_SINKS
    )


def as_gradient(query, key, value, **options):
    """Attention as the gradient of the energy."""
    return jax.grad(lambda source: energy(query, key, value, source, **options).sum())(jnp.zeros_like(query))


# name -> function, mesh axes, options of dense attention
CASES = {
    "tree": (tree(None), ONE, OPTIONS),
    "tree_allreduce": (tree("allreduce"), ONE, OPTIONS),
    "tree_hierarchical": (tree("hierarchical"), TWO, OPTIONS),
    "tree_tuple": (tree(("allreduce", "gather")), TWO, OPTIONS),
    "ring": (ring("overlapped"), ONE, OPTIONS),
    "ring_public": (ring("public"), ONE, OPTIONS),
    "sparq_global": (sparq("global"), ONE, NO_SINKS),
    "sparq_per_shard": (sparq("per_shard"), ONE, NO_SINKS),
    "hydragen": (lambda q, k, v, **o: hydragen_decode(q, [], k, v, block_size=None, **OPTIONS, **o), ONE, OPTIONS),
}


def axis_name(axes):
    return axes if len(axes) > 1 else axes[0]


def in_shard_map(function, axes, *, check_vma: bool, sharded_query: bool = False):
    """Returns `function(query, key, value)` in a `shard_map` of two devices per axis, and its mesh and specs."""
    mesh = make_mesh({axis: 2 for axis in axes})
    along = P(None, axes)
    specs = (along if sharded_query else P(), along, along)
    mapped = functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, check_vma=check_vma)
    return mapped(functools.partial(function, axis_name=axis_name(axes)), out_specs=specs[0]), mapped, specs


def values_and_gradients(function, axes, arrays, *, check_vma: bool, sharded_query: bool = False):
    """Returns the output, and its gradients outside and inside of the `shard_map`, from one compiled program."""
    *arrays, weights = arrays
    outer, mapped, specs = in_shard_map(function, axes, check_vma=check_vma, sharded_query=sharded_query)

    def inside(query, key, value, weights):
        loss = lambda *arrays: jnp.vdot(function(*arrays, axis_name=axis_name(axes)), weights)
        total = lambda *arrays: jax.lax.psum(loss(*arrays), axes) if sharded_query else loss(*arrays)
        gradients = jax.grad(total, (0, 1, 2))(query, key, value)
        # Unchecked, each device has the gradient of its own copy of a replicated query.
        is_partial = not check_vma and not sharded_query
        return (jax.lax.psum(gradients[0], axes), *gradients[1:]) if is_partial else gradients

    @jax.jit
    def program(*arrays):
        gradient = jax.grad(lambda *arrays: jnp.vdot(outer(*arrays), weights), (0, 1, 2))
        inner = mapped(inside, in_specs=(*specs, specs[0]), out_specs=specs)
        return outer(*arrays), gradient(*arrays), inner(*arrays, weights)

    return program(*arrays)


def expected(arrays, options):
    *arrays, weights = arrays
    out = lambda *arrays: dense_attention(*arrays, **options)[0]
    return out(*arrays), jax.grad(lambda *arrays: jnp.vdot(out(*arrays), weights), (0, 1, 2))(*arrays)


@pytest.mark.parametrize("name", CASES)
def test_a_checked_shard_map_takes_every_function_and_gradients_are_right_on_both_sides(name):
    function, axes, options = CASES[name]
    arrays = draw()
    out, outside, inside = values_and_gradients(function, axes, arrays, check_vma=True)
    expected_out, gradients = expected(arrays, options)
    assert_gradients(out, expected_out)
    assert_gradients(outside, gradients)
    assert_gradients(inside, gradients)


@pytest.mark.parametrize("name", ["tree", "tree_allreduce", "ring", "sparq_global"])
def test_unchecked_a_gradient_inside_is_that_of_the_sum_over_devices(name):
    """p equal losses on p devices: the same rule as `psum` has there, under every reduction."""
    function, axes, options = CASES[name]
    arrays = draw()
    out, outside, inside = values_and_gradients(function, axes, arrays, check_vma=False)
    expected_out, gradients = expected(arrays, options)
    assert_gradients(out, expected_out)
    assert_gradients(outside, gradients)
    assert_gradients(inside, jax.tree.map(lambda x: 2 * x, gradients))


def test_the_rule_of_gradients_inside_is_that_of_psum():
    """JAX's own primitives alone, as docs/conventions.md states it: checked 1, unchecked p times; outside always 1."""
    mesh = make_mesh({"seq": 4})

    def ratio(collective, check_vma, is_inside):
        def mapped(f):
            return jax.shard_map(f, mesh=mesh, in_specs=P("seq"), out_specs=P("seq"), check_vma=check_vma)

        if is_inside:
            gradient = mapped(jax.grad(lambda x: collective(x).sum()))
        else:
            total = jax.shard_map(collective, mesh=mesh, in_specs=P("seq"), out_specs=P(), check_vma=check_vma)
            gradient = jax.grad(lambda x: total(x).sum())
        return jax.jit(gradient)(jnp.ones(4)).tolist()

    psum = lambda x: jax.lax.psum(x, "seq")
    assert ratio(psum, True, True) == ratio(psum, True, False) == ratio(psum, False, False) == [1.0] * 4
    assert ratio(psum, False, True) == [4.0] * 4
    # A transpose that is right inside is p times too small outside: there each device gets a p-th of the cotangent.
    once = jax.custom_vjp(psum)
    once.defvjp(lambda x: (psum(x), None), lambda _, cotangent: (cotangent,))
    assert ratio(once, False, True) == [1.0] * 4
    assert ratio(once, False, False) == [0.25] * 4


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_ring_attention_in_a_shard_map(check_vma):
    """Its output is sharded, so a loss is a sum over devices, `psum`: p times too large unchecked, as JAX has it."""
    arrays = draw(num_queries=KEYS)
    function = functools.partial(ring_attention, block_size=None, sinks=SINKS)
    out, outside, inside = values_and_gradients(function, ONE, arrays, check_vma=check_vma, sharded_query=True)
    expected_out, gradients = expected(arrays, {"is_causal": True, "sinks": SINKS})
    assert_gradients(out, expected_out)
    assert_gradients(outside, gradients)
    assert_gradients(inside, jax.tree.map(lambda x: x if check_vma else 2 * x, gradients))


def test_a_checked_shard_map_takes_chunks_of_keys_and_tiles_of_queries(monkeypatch):
    """Loops, branches and checkpoints of the backend in XLA."""
    monkeypatch.setattr(xla, "MAX_CHUNK_KEYS_ON_CPU", 3)
    monkeypatch.setattr(xla, "MAX_TILE_QUERIES", 2)
    arrays = draw(num_queries=3)
    *arrays, weights = arrays
    loss = lambda *arrays: jnp.vdot(tree(None)(*arrays, axis_name="seq"), weights)
    _, mapped, specs = in_shard_map(loss, ONE, check_vma=True)
    inside = jax.jit(mapped(jax.grad(loss, (0, 1, 2)), out_specs=specs))(*arrays)
    assert_gradients(inside, expected([*arrays, weights], OPTIONS)[1])


def test_a_checked_shard_map_takes_prefix_levels():
    query, key, value, _ = draw()
    served = PrefixLevel(key=key[:1], value=value[:1], sequences=((0, 1),))
    along = P(None, "seq")
    level = PrefixLevel(key=along, value=along, sequences=((0, 1),))
    out = jax.jit(
        jax.shard_map(
            lambda q, k, v, level: hydragen_decode(q, [level], k, v, axis_name="seq"),
            mesh=make_mesh({"seq": 2}),
            in_specs=(P(), along, along, level),
            out_specs=P(),
        )
    )(query, key, value, served)
    both = [jnp.concatenate([jnp.repeat(x[:1], 2, axis=0), x], axis=1) for x in (key, value)]
    assert_gradients(out, dense_attention(query, *both)[0])


@pytest.mark.parametrize("check_vma", [True, False])
def test_heads_left_on_their_devices_in_a_shard_map(check_vma):
    query, key, value, _ = draw()
    heads = functools.partial(tree_decode, shard_heads=True, axis_name="seq", block_size=None, **OPTIONS)
    along = P(None, "seq")
    out = jax.jit(
        jax.shard_map(
            heads, mesh=make_mesh({"seq": 2}), in_specs=(P(), along, along), out_specs=P(None, None, "seq"),
            check_vma=check_vma,
        )
    )(query, key, value)  # fmt: skip
    assert_gradients(out, dense_attention(query, key, value, **OPTIONS)[0])


def test_attention_as_a_gradient_inside_a_checked_shard_map():
    """Reverse mode by hand, and forward mode in `attention_moments`, which is right in both modes."""
    query, key, value, _ = draw()
    along, options = P(None, "seq"), dict(axis_name="seq", block_size=None, **OPTIONS)

    def both(query, key, value):
        return as_gradient(query, key, value, **options), attention_moments(query, key, value, order=1, **options)[0]

    out = jax.jit(jax.shard_map(both, mesh=make_mesh({"seq": 2}), in_specs=(P(), along, along), out_specs=(P(), P())))(
        query, key, value
    )
    expected_out = dense_attention(query, key, value, **OPTIONS)[0]
    assert_gradients(out, (expected_out, expected_out))
