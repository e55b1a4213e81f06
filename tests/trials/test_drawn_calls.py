"""Wrong calls, some of them drawn and all of them in turn."""

import jax
import numpy as np
import pytest

from . import wrong_calls


@pytest.mark.parametrize("name", wrong_calls.CALLS)
def test_the_good_call_is_one(name):
    """Else every change of it would be refused. What compiles nothing is called; the others are traced."""
    case = wrong_calls.Case(function=name, changes=())
    arguments, function = wrong_calls.arguments_of(case), eval(wrong_calls.CALLS[name].function, vars(wrong_calls))
    if name[0].islower() and name not in ("generate", "make_mesh", "storage_order", "by_name", "rank_samples"):
        jax.eval_shape(lambda: jax.tree.leaves(function(**arguments)) and 0)
    else:
        name == "generate" or function(**arguments)


def test_drawn_wrong_calls_raise_what_is_documented():
    rng = np.random.default_rng(7)
    drawn = [wrong_calls.draw(rng) for _ in range(300)]
    assert not {repr(case): found for case in drawn if (found := wrong_calls.check(case))}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("KVCache.attend to a layer", (("query", "floats(*(3, 1, 4, 8))"),)),
        ("KVCache.attend to a layer", (("scale", "'1'"),)),
        ("KVCache.attend to a layer", (("reduction", "'nonsense'"),)),
        ("KVCache.attend to a layer", (("layer", "'0'"),)),
        ("bifurcated_decode", (("prefix_length", "17"),)),
    ],
)
def test_wrong_calls_that_once_compiled_or_named_another_argument(name, changes):
    assert wrong_calls.check(wrong_calls.Case(function=name, changes=changes)) is None


@pytest.mark.slow
def test_every_wrong_call_raises_what_is_documented():
    cases = list(wrong_calls.cases())
    assert len(cases) > 2500
    assert not {repr(case): found for case in cases if (found := wrong_calls.check(case))}


def test_a_case_can_be_made_again_from_what_is_printed():
    case = wrong_calls.draw(np.random.default_rng(0))
    assert eval(repr(case), vars(wrong_calls)) == case


@pytest.mark.parametrize(
    ("changes", "kind"),
    [((("scale", "0.5"),), "accepted"), ((("key", "floats(2, 16, 3, 8)"), ("scale", "'1'")), None)],
)
def test_a_fault_is_found(changes, kind):
    found = wrong_calls.check(wrong_calls.Case(function="attend", changes=changes))
    assert found is None if kind is None else found.startswith(kind)
