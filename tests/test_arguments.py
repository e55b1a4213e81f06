"""The attention options: declared once, in every signature, and refused by name where a function does not take one."""

import dataclasses
import fractions
import inspect
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_attention

import tree_attn
from tree_attn import Shard
from tree_attn.arguments import (
    AttentionOptions,
    OptionArguments,
    RaggedOptionArguments,
    check_integer,
    check_lengths,
    takes_options,
)
from tree_attn.ring_baseline import ring_attention, ring_decode, ulysses_attention

OPTIONS = {field.name: field.default for field in dataclasses.fields(AttentionOptions)}
# The options that a function does not take as attention options; paged_decode's lengths are an argument of its own.
WITHOUT = {
    tree_attn.attend: (),
    tree_attn.tree_decode: (),
    ring_decode: ("reads_keys_early",),
    ring_attention: ("query_positions", "reads_keys_early"),
    ulysses_attention: ("query_positions", "reads_keys_early"),
    tree_attn.lean_decode: ("key_value_seq_lengths", "query_positions", "reads_keys_early"),
    tree_attn.paged_decode: ("query_positions", "reads_keys_early"),
    tree_attn.hydragen_decode: ("query_positions", "local_window_size", "reads_keys_early"),
    tree_attn.bifurcated_decode: ("query_positions", "local_window_size", "reads_keys_early"),
    tree_attn.energy: ("logits_soft_cap", "key_scale", "value_scale", "implementation", "reads_keys_early"),
    tree_attn.attention_moments: ("logits_soft_cap", "key_scale", "value_scale", "implementation", "reads_keys_early"),
}
DEFAULTS = {(function, "is_causal"): True for function in (ring_attention, ulysses_attention)}
DEFAULTS |= {(tree_attn.paged_decode, "key_value_seq_lengths"): inspect._empty}


def test_options_have_one_list():
    """A field for each keyword; arrays are leaves of the pytree, the others static."""
    assert set(OPTIONS) == {*RaggedOptionArguments.__annotations__, *OptionArguments.__annotations__}
    flags = ("is_causal", "reads_keys_early")
    assert {name: False if name in flags else None for name in OPTIONS} == OPTIONS
    arrays = {name: np.zeros(2) for name in OPTIONS}
    leaves, structure = jax.tree.flatten(
        AttentionOptions(**arrays | {"is_causal": True, "reads_keys_early": False, "scale": 2.0})
    )
    assert len(leaves) == len(("key_value_seq_lengths", "query_positions", "sinks", "key_scale", "value_scale"))
    assert jax.tree.unflatten(structure, leaves).scale == 2.0


@pytest.mark.parametrize("function", WITHOUT, ids=lambda function: function.__name__)
def test_signatures_show_the_options(function):
    parameters = inspect.signature(function).parameters
    expected = {name: DEFAULTS.get((function, name), default) for name, default in OPTIONS.items()}
    for name in WITHOUT[function]:
        assert name not in parameters
        del expected[name]
    assert {name: parameters[name].default for name in expected} == expected
    assert not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())


@pytest.mark.parametrize("function", WITHOUT, ids=lambda function: function.__name__)
def test_an_unknown_option_is_named(function):
    """The message lists what there is; an option of other functions is as unknown as a typing error."""
    for name in ("is_casual", *WITHOUT[function]):
        with pytest.raises(
            TypeError, match=rf"{function.__name__}\(\) got an unexpected keyword argument '{name}'; .*sinks"
        ):
            function(**{name: None})


def test_the_message_lists_the_keyword_arguments_of_the_function_too():
    with pytest.raises(
        TypeError, match=r"'blocksize'; its keyword arguments are axis_name, mesh, .*block_size, .*sinks"
    ):
        tree_attn.tree_decode(None, None, None, blocksize=1)


def test_a_function_can_take_a_few_options():
    @takes_options(only=("scale", "is_causal"), scale=3.0)
    def function(query, *, axis_name=None, **options: typing.Unpack[OptionArguments]):
        return query, axis_name, options

    assert list(inspect.signature(function).parameters) == ["query", "axis_name", "is_causal", "scale"]
    assert function(1) == (1, None, {"scale": 3.0})
    assert function(1, axis_name="seq", scale=2.0, is_causal=True) == (1, "seq", {"scale": 2.0, "is_causal": True})


def test_options_are_named():
    with pytest.raises(TypeError, match="positional argument"):
        AttentionOptions(True)


def test_options_compare_as_static_fields_must():
    """JAX looks programs up by them: a comparison of an integer of NumPy with a tuple would be an array."""
    one, other = (AttentionOptions(local_window_size=window) for window in (np.int64(3), (1, 2)))
    assert jax.tree.structure(one) != jax.tree.structure(other)
    assert one == AttentionOptions(local_window_size=3)


def test_a_jitted_function_takes_options_too():
    query = np.ones((1, 1, 2, 4), np.float32)
    out = jax.jit(lambda query, scale: tree_attn.attend(query, query, query, key_scale=scale).out)(
        query, np.ones(2, np.float32)
    )
    np.testing.assert_array_equal(out, query)


@pytest.mark.parametrize("value", [0, 6, True, 2.0, None, np.float32(3)])
def test_integers_are_checked_with_their_bounds(value):
    check_integer("depth", np.int64(5), minimum=1, maximum=5)
    with pytest.raises(ValueError, match=r"depth must be an integer of at least 1 and at most 5, got "):
        check_integer("depth", value, minimum=1, maximum=5)


LARGEST = float(np.finfo(np.float32).max)


def attention(**options):
    query, key, value = (np.random.default_rng(i).standard_normal((1, 2, 2, 8)).astype(np.float32) for i in range(3))
    return tree_attn.attend(query, key, value, **options), (query, key, value)


@pytest.mark.parametrize("scale", [10**400, -(10**400), 3.5e38, 1e39, float("inf"), "1", 1j], ids=str)
def test_a_scale_that_float32_does_not_hold_is_refused(scale):
    with pytest.raises(ValueError, match=r"scale must be .*at most 3.4e\+38 in size .*Python number, got"):
        attention(scale=scale)


@pytest.mark.parametrize("cap", [10**400, 1e39, float("inf"), 0, 1e-40, -1.0, float("nan"), "1", True], ids=str)
def test_a_cap_that_float32_does_not_hold_is_refused(cap):
    with pytest.raises(ValueError, match=r"logits_soft_cap must be None or a number from 1.2e-38 to 3.4e\+38, got"):
        attention(logits_soft_cap=cap)


@pytest.mark.parametrize("cap", [1e-30, 1e25, 1e30, 1e38, LARGEST, np.float32(30), fractions.Fraction(1, 3)], ids=str)
def test_caps_of_any_size_are_the_formula(cap):
    state, arrays = attention(logits_soft_cap=cap)
    assert_attention(state, *arrays, logits_soft_cap=float(cap))


def test_numbers_of_any_kind_are_a_scale():
    for scale in (np.float32(0.25), np.int64(1), fractions.Fraction(1, 4), 0):
        state, arrays = attention(scale=scale)
        assert_attention(state, *arrays, scale=float(scale))


def test_an_infinite_sink_leaves_no_weight_to_keys():
    """A sink of -inf has no weight itself; gradients stay finite."""
    sinks = np.array([np.inf, -np.inf], np.float32)
    (out, lse), arrays = attention(sinks=sinks)
    expected_out, expected_lse = tree_attn.reference.attention(*arrays)
    assert not np.any(out[:, :, 0]) and np.all(np.isposinf(lse[:, :, 0]))
    np.testing.assert_allclose(out[:, :, 1], expected_out[:, :, 1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse[:, :, 1], expected_lse[:, :, 1], rtol=1e-5)
    gradients = jax.grad(lambda *arrays: tree_attn.attend(*arrays, sinks=sinks).out.sum(), argnums=(0, 1, 2))(*arrays)
    assert all(np.isfinite(x).all() for x in gradients)


def test_lists_of_numbers_are_arrays():
    """Over shards too, where the spec of an array is not that of each number."""
    rng, mesh = np.random.default_rng(0), tree_attn.make_mesh({"seq": 2})
    query, key, value = (
        rng.normal(size=size).astype(np.float32) for size in ((2, 1, 2, 8), (2, 4, 1, 8), (2, 4, 1, 8))
    )
    options = dict(key_value_seq_lengths=[3, 1], query_positions=[2], sinks=[0.5, 1.5], is_causal=True)
    arrays = {name: np.asarray(x) for name, x in options.items()} | dict(is_causal=True)
    over_shards = dict(axis_name="seq", mesh=mesh, block_size=1, return_lse=True)
    stored = [x[:, tree_attn.storage_order(4, 2, 1)] for x in (key, value)]
    assert_attention(tree_attn.tree_decode(query, *stored, **options, **over_shards), query, key, value, **arrays)
    level = tree_attn.PrefixLevel(
        key=stored[0][:1], value=stored[1][:1], sequences=((0, 1),), lengths=[3], block_size=1
    )
    got = tree_attn.hydragen_decode(query, [level], key[:, :0], value[:, :0], **over_shards)
    shared = [np.stack([x[0, :3]] * 2) for x in (key, value)]
    assert_attention(got, query, *shared)
    with pytest.raises(TypeError, match=r"query_positions must be an array of integers, got \[\[1\], \[2, 3\]\]"):
        tree_attn.attend(query, key, value, query_positions=[[1], [2, 3]])


@pytest.mark.parametrize("length", [0, 3])
def test_the_ends_of_the_range_of_lengths_are_lengths(length):
    check_lengths("lengths", np.array([length]), 1, 3)
    for wrong in (-1, 4):
        with pytest.raises(ValueError, match=rf"lengths must lie in \[0, 3\] .*got \[{wrong}\]"):
            check_lengths("lengths", np.array([wrong]), 1, 3)


@pytest.mark.parametrize(
    "shard, message",
    [
        (Shard(index=2, num_shards=2), "shard.index must be an integer of at least 0 and at most 1, got 2"),
        (Shard(index=-1, num_shards=2), "shard.index must be .*got -1"),
        (Shard(index=np.int32(5), num_shards=2), "shard.index must be .*got .*5"),
        (Shard(index=jnp.int32(5), num_shards=2), "shard.index must be .*got .*5"),
        (Shard(index=0.5), "shard.index must be an integer, got 0.5"),
        (Shard(index="0"), "shard.index must be an integer, got '0'"),
        (Shard(num_shards=0), "shard.num_shards must be an integer of at least 1, got 0"),
        (Shard(num_shards=2.0), "shard.num_shards must be .*got 2.0"),
        (Shard(block_size=0), "shard.block_size must be an integer of at least 1, got 0"),
        (1, "shard must be a Shard, got 1"),
    ],
    ids=str,
)
def test_a_shard_that_there_cannot_be_is_refused(shard, message):
    with pytest.raises((ValueError, TypeError), match=message):
        attention(shard=shard)


def test_a_traced_index_of_a_shard_is_taken():
    query = np.ones((1, 1, 1, 8), np.float32)
    attend = jax.jit(lambda index: tree_attn.attend(query, query, query, shard=Shard(index=index, num_shards=2)).lse)
    np.testing.assert_allclose(attend(1), np.full((1, 1, 1), 8**0.5), rtol=1e-6)


@pytest.mark.parametrize("name", ["return_lse", "shard_heads"])
def test_a_flag_is_true_or_false(name):
    with pytest.raises(TypeError, match=f"{name} must be True or False, got 'no'"):
        tree_attn.tree_decode(None, None, None, axis_name="seq", **{name: "no"})
