"""All functions over shards: programs without `jit`, axes of every type, named placements."""

import contextlib
import dataclasses
import functools

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_attention, assert_same_bits
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tree_attn import (
    KVCache,
    PrefixLevel,
    attention_moments,
    bifurcated_decode,
    energy,
    hydragen_decode,
    make_mesh,
    sparq_decode,
    storage_order,
    topology,
    tree_decode,
)
from tree_attn.arguments import AttentionOptions
from tree_attn.ring_baseline import ring_attention, ring_decode, ulysses_attention
from tree_attn.sharded import pad_keys

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
    "ulysses_attention": lambda **on: ulysses_attention(PROMPT, KEY, VALUE, key_value_seq_lengths=LENGTHS, **on),
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


LEVEL = PrefixLevel(key=KEY[:1], value=VALUE[:1], sequences=((0, 1),))
MATTERS = {
    "tree_decode": lambda **on: tree_decode(QUERY, KEY, VALUE, key_value_seq_lengths=LENGTHS, **on),
    "tree_decode_in_a_window": lambda **on: tree_decode(QUERY, KEY, VALUE, local_window_size=4, **on),
    "tree_decode_of_two": lambda **on: tree_decode(PROMPT[:, :2], KEY, VALUE, is_causal=True, **on),
    "tree_decode_at_positions": lambda **on: tree_decode(
        QUERY, KEY, VALUE, is_causal=True, query_positions=np.array([3], np.int32), **on
    ),
    "ring_decode": lambda **on: ring_decode(QUERY, KEY, VALUE, key_value_seq_lengths=LENGTHS, **on),
    "ring_attention": lambda **on: ring_attention(PROMPT, KEY, VALUE, **on),
    "ulysses_attention": lambda **on: ulysses_attention(PROMPT, KEY, VALUE, **on),
    "energy": lambda **on: energy(QUERY, KEY, VALUE, QUERY, key_value_seq_lengths=LENGTHS, **on),
    "attention_moments": lambda **on: attention_moments(QUERY, KEY, VALUE, 1, key_value_seq_lengths=LENGTHS, **on),
    "hydragen_decode": lambda **on: hydragen_decode(QUERY, [], KEY, VALUE, key_value_seq_lengths=LENGTHS, **on),
    "sparq_decode_with_recent_keys": lambda **on: sparq_decode(
        QUERY, KEY, VALUE, num_components=2, num_keys=4, local_window=1, **on
    ),
}
# Every query sees every key, whatever their order.
NEED_NOT = {
    "tree_decode": lambda **on: tree_decode(QUERY, KEY, VALUE, is_causal=True, local_window_size=(None, 2), **on),
    "ring_decode": lambda **on: ring_decode(QUERY, KEY, VALUE, **on),
    "ring_attention": lambda **on: ring_attention(PROMPT, KEY, VALUE, is_causal=False, **on),
    "energy": lambda **on: energy(QUERY, KEY, VALUE, QUERY, **on),
    "hydragen_decode": lambda **on: hydragen_decode(QUERY, [LEVEL], KEY, VALUE, **on),
    "hydragen_decode_of_whole_suffixes": lambda **on: hydragen_decode(
        QUERY, [LEVEL], KEY, VALUE, shard_suffix="batch", key_value_seq_lengths=LENGTHS, **on
    ),
    "bifurcated_decode": lambda **on: bifurcated_decode(QUERY, KEY[0], VALUE[0], KEY, VALUE, **on),
    "sparq_decode": lambda **on: sparq_decode(QUERY, KEY, VALUE, num_components=2, num_keys=4, **on),
}
MUST_BE_NAMED = r"block_size must be named where .*: None for contiguous .* b for block-cyclic .*cache.attend\(query\)"


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("name", MATTERS)
def test_a_placement_that_matters_must_be_named(name, num_devices):
    on = sequence_on(num_devices)
    del on["block_size"]
    with pytest.raises(ValueError, match=MUST_BE_NAMED):
        MATTERS[name](**on)
    jax.eval_shape(lambda: MATTERS[name](**on, block_size=None))


@pytest.mark.parametrize("name", NEED_NOT)
def test_a_placement_that_does_not_matter_need_not_be_named(name):
    on = sequence_on(2)
    del on["block_size"]
    jax.eval_shape(lambda: NEED_NOT[name](**on))


def test_the_last_query_of_a_sequence_needs_no_placement_in_ones_own_shard_map():
    """It sees all keys; the queries of a prompt that is cut into shards do not."""
    query, along = QUERY[:, -1:], P(None, "seq")
    mapped = jax.shard_map(
        functools.partial(tree_decode, is_causal=True, axis_name="seq"),
        mesh=make_mesh({"seq": 2}), in_specs=(P(), along, along), out_specs=P(),
    )  # fmt: skip
    jax.eval_shape(mapped, query, KEY, VALUE)


def test_the_placement_of_nodes_and_of_a_context_with_lengths_must_be_named():
    on = sequence_on(2)
    level = dataclasses.replace(LEVEL, lengths=np.array([3], np.int32))
    with pytest.raises(ValueError, match=rf"levels\[0\]: {MUST_BE_NAMED}"):
        hydragen_decode(QUERY, [level], KEY, VALUE, **on)
    with pytest.raises(ValueError, match=f"prefix_{MUST_BE_NAMED}"):
        bifurcated_decode(QUERY, KEY[0], VALUE[0], KEY, VALUE, prefix_length=3, **on)


def test_a_context_has_a_placement_of_its_own():
    on, order = sequence_on(2), storage_order(16, 2, 2)
    decode = functools.partial(bifurcated_decode, prefix_block_size=2, prefix_length=3, return_lse=True, **on)
    context = KEY[0], VALUE[0]
    got = decode(QUERY, *(x[order] for x in context), KEY[:, :0], VALUE[:, :0])
    assert_attention(got, QUERY, *(jnp.stack([x[:3]] * 2) for x in context))


@pytest.mark.parametrize("function", [energy, attention_moments])
def test_a_mesh_without_an_axis_is_refused(function):
    last = QUERY if function is energy else 1
    with pytest.raises(ValueError, match="mesh must be None where axis_name is, got Mesh"):
        function(QUERY, KEY, VALUE, last, mesh=make_mesh({"seq": 2}))


def test_a_mesh_that_is_not_the_contexts_is_refused():
    meshes = make_mesh({"seq": 2}), make_mesh({"seq": 4})
    with (
        jax.set_mesh(meshes[0]),
        pytest.raises(ValueError, match=r"mesh must be that of the context, \{'seq': 2\}, or"),
    ):
        tree_decode(QUERY, KEY, VALUE, axis_name="seq", mesh=meshes[1])


@pytest.mark.parametrize("types", [("Auto", "Explicit"), ("Explicit", "Auto")])
def test_a_mesh_of_other_axis_types_than_the_contexts_is_refused(types):
    meshes = [jax.make_mesh((2,), ("seq",), axis_types=(getattr(AxisType, name),)) for name in types]
    message = (
        rf"mesh must have the axis types of the context's, {{'seq': '{types[0]}'}}, .* got {{'seq': '{types[1]}'}}"
    )
    with jax.set_mesh(meshes[0]), pytest.raises(ValueError, match=message):
        tree_decode(QUERY, KEY, VALUE, axis_name="seq", mesh=meshes[1])


def test_keys_on_explicit_axes_of_another_mesh_are_refused():
    other = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    key = jax.device_put(KEY, NamedSharding(other, P(None, "x")))
    with pytest.raises(ValueError, match=r"key must be sharded over axes of the mesh \('seq',\), got \['x'\]"):
        tree_decode(QUERY, key, VALUE, axis_name="seq", mesh=make_mesh({"seq": 2}))


@pytest.mark.parametrize("num_devices, is_early", [(4, True), (3, False)])
def test_keys_that_are_padded_are_new(num_devices, is_early):
    """Three devices do not divide 16 keys, so that they are copied."""
    options = AttentionOptions(reads_keys_early=True)
    where = dict(axes=("seq",), mesh=make_mesh({"seq": num_devices}), block_size=None)
    assert pad_keys(KEY, VALUE, options, **where)[2].reads_keys_early == is_early
