"""over_shards: a call without `jit` is traced and compiled once, and never answered by what another call decided."""

import contextlib

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_attention, assert_same_bits
from jax.sharding import AxisType

from tree_attn import (
    KVCache,
    attention_moments,
    bifurcated_decode,
    energy,
    make_mesh,
    sparq_decode,
    storage_order,
    topology,
    tree_decode,
)
from tree_attn.ring_baseline import ring_attention, ring_decode

RNG = np.random.default_rng(0)
QUERY, PROMPT, KEY, VALUE = (
    jnp.asarray(RNG.normal(size=shape), jnp.float32)
    for shape in ((2, 1, 4, 8), (2, 16, 4, 8), (2, 16, 2, 8), (2, 16, 2, 8))
)
LENGTHS = np.array([16, 3], np.int32)


def sequence_on(num_devices):
    return dict(axis_name="seq", mesh=make_mesh({"seq": num_devices}), block_size=1)


def append(**sharding):
    sizes = dict(batch=2, capacity=16, num_kv_heads=2, head_dim=8, dtype=jnp.float32)
    cache = KVCache.create(**sizes, **sharding)
    return lambda key, value: cache.append(key[:, :1], value[:, :1])


EAGER = {
    "tree_decode": lambda **on: tree_decode(QUERY, KEY, VALUE, key_value_seq_lengths=LENGTHS, **on),
    "tree_decode_in_grad": lambda **on: jax.grad(lambda q: tree_decode(q, KEY, VALUE, **on).sum())(QUERY),
    "ring_decode": lambda **on: ring_decode(QUERY, KEY, VALUE, key_value_seq_lengths=LENGTHS, **on),
    "ring_decode_public": lambda **on: ring_decode(QUERY, KEY, VALUE, variant="public", **on),
    "ring_attention": lambda **on: ring_attention(PROMPT, KEY, VALUE, key_value_seq_lengths=LENGTHS, **on),
    "energy": lambda **on: energy(QUERY, KEY, VALUE, jnp.zeros_like(QUERY), **on),
    "attention_moments": lambda **on: attention_moments(QUERY, KEY, VALUE, 1, **on),
    "bifurcated_decode": lambda **on: bifurcated_decode(QUERY, KEY[0], VALUE[0], KEY, VALUE, **on),
    "bifurcated_decode_on_one": lambda **_: bifurcated_decode(QUERY, KEY[0], VALUE[0], KEY, VALUE),
    "sparq_decode": lambda **on: sparq_decode(QUERY, KEY, VALUE, num_components=2, num_keys=4, **on),
    "sparq_decode_on_one": lambda **_: sparq_decode(QUERY, KEY, VALUE, num_components=2, num_keys=4),
    "append": lambda **on: append(**on)(KEY, VALUE),
}


@contextlib.contextmanager
def programs():
    """Yields the list to which the programs are added that JAX traces or compiles meanwhile."""
    programs_made, is_on = [], [True]

    def note(event, *_, fun_name=None, **__):
        if is_on[0] and event in (
            "/jax/core/compile/jaxpr_trace_duration",
            "/jax/core/compile/backend_compile_duration",
        ):
            programs_made.append((event.rsplit("/", 1)[1], fun_name))

    jax.monitoring.register_event_duration_secs_listener(note)
    yield programs_made
    is_on[0] = False


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                name.endswith("in_grad") and jax.__version_info__ < (0, 11),
                reason="JAX 0.10 transposes an inlined program into single operations",
            ),
        )
        for name in EAGER
    ],
)
def test_a_second_call_without_jit_is_neither_traced_nor_compiled(name):
    on = sequence_on(2)
    EAGER[name](**on)
    with programs() as programs_made:
        EAGER[name](**on)
    assert not programs_made


def test_a_reduction_is_chosen_anew_where_the_nodes_have_changed():
    on = sequence_on(2)
    tree_decode(QUERY, KEY, VALUE, **on)
    with pytest.MonkeyPatch.context() as patch, programs() as programs_made:
        patch.setattr(topology, "_nodes", ("here",))
        tree_decode(QUERY, KEY, VALUE, **on)
    assert programs_made


def test_kernels_are_chosen_anew_on_another_platform():
    on = sequence_on(2)
    tree_decode(QUERY, KEY, VALUE, **on)
    with jax.default_device(jax.devices()[1]), programs() as programs_made:
        tree_decode(QUERY, KEY, VALUE, **on)
    assert programs_made


def test_calls_that_differ_in_one_static_argument_are_not_confused():
    on = sequence_on(2) | {"key_value_seq_lengths": LENGTHS, "return_lse": True}
    for block_size in (1, 2, None):
        natural = np.argsort(storage_order(16, 2, block_size))
        got = tree_decode(QUERY, KEY, VALUE, **on | {"block_size": block_size})
        assert_attention(got, QUERY, KEY[:, natural], VALUE[:, natural], key_value_seq_lengths=LENGTHS)
    got = tree_decode(QUERY, KEY, VALUE, **on | {"block_size": None, "scale": 0.1})
    assert_attention(got, QUERY, KEY, VALUE, key_value_seq_lengths=LENGTHS, scale=0.1)


# Without the gradient: for any gradient on such axes JAX asks for `jax.set_mesh`.
@pytest.mark.parametrize("name", [name for name in EAGER if name != "tree_decode_in_grad"])
def test_plain_arrays_are_taken_on_explicit_axes(name):
    """`jax.make_mesh` makes axes of type Explicit, over which JAX wants arrays sharded before `shard_map`."""
    mesh = jax.make_mesh((2,), ("seq",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    got, expected = EAGER[name](**sequence_on(2) | {"mesh": mesh}), EAGER[name](**sequence_on(2))
    assert_same_bits(jax.tree.leaves(got), jax.tree.leaves(expected))
    if name == "tree_decode":
        with jax.set_mesh(mesh):
            assert_same_bits(EAGER[name](axis_name="seq", block_size=1), expected)
            assert_same_bits(jax.jit(lambda: EAGER[name](axis_name="seq", block_size=1))(), expected)
