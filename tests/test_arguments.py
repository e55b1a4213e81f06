"""The attention options: declared once, in every signature, and refused by name where a function does not take one."""

import dataclasses
import inspect
import typing

import jax
import numpy as np
import pytest

import tree_attn
from tree_attn.arguments import AttentionOptions, OptionArguments, RaggedOptionArguments, check_integer, takes_options
from tree_attn.ring_baseline import ring_attention, ring_decode

OPTIONS = {field.name: field.default for field in dataclasses.fields(AttentionOptions)}
# The options that a function does not take as attention options; paged_decode's lengths are an argument of its own.
WITHOUT = {
    tree_attn.attend: (),
    tree_attn.tree_decode: (),
    ring_decode: (),
    ring_attention: ("query_positions",),
    tree_attn.lean_decode: ("key_value_seq_lengths", "query_positions"),
    tree_attn.paged_decode: ("query_positions",),
    tree_attn.hydragen_decode: ("query_positions", "local_window_size"),
    tree_attn.bifurcated_decode: ("query_positions", "local_window_size"),
    tree_attn.energy: ("logits_soft_cap", "key_scale", "value_scale", "implementation"),
    tree_attn.attention_moments: ("logits_soft_cap", "key_scale", "value_scale", "implementation"),
}
DEFAULTS = {(ring_attention, "is_causal"): True, (tree_attn.paged_decode, "key_value_seq_lengths"): inspect._empty}


def test_options_have_one_list():
    """A field for each keyword; arrays are leaves of the pytree, the others static."""
    assert set(OPTIONS) == {*RaggedOptionArguments.__annotations__, *OptionArguments.__annotations__}
    assert {name: False if name == "is_causal" else None for name in OPTIONS} == OPTIONS
    arrays = {name: np.zeros(2) for name in OPTIONS}
    leaves, structure = jax.tree.flatten(AttentionOptions(**arrays | {"is_causal": True, "scale": 2.0}))
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
    """The message lists the options that there are; an option of other functions is as unknown as a typing error."""
    for name in ("is_casual", *WITHOUT[function]):
        with pytest.raises(
            TypeError, match=rf"{function.__name__}\(\) got an unexpected keyword argument '{name}'; .*sinks"
        ):
            function(**{name: None})


def test_a_function_can_take_a_few_options():
    @takes_options(only=("scale", "is_causal"), scale=3.0)
    def function(query, *, axis_name=None, **options: typing.Unpack[OptionArguments]):
        return query, axis_name, options

    assert list(inspect.signature(function).parameters) == ["query", "axis_name", "is_causal", "scale"]
    assert function(1) == (1, None, {"scale": 3.0})
    assert function(1, axis_name="seq", scale=2.0, is_causal=True) == (1, "seq", {"scale": 2.0, "is_causal": True})


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
