"""ulysses_attention, alone and with a ring outside: exact, with the gradient of dense attention."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_attention
from attention_cases import HEAD_SCALES, SINKS, Case
from prompts import LENGTHS, assert_as_dense

from tree_attn import make_mesh, storage_order
from tree_attn.measure import hlo
from tree_attn.ring_baseline import ulysses_attention

EVERYTHING = {"logits_soft_cap": 2.0, "local_window_size": (40, None), **HEAD_SCALES}
MIX, WIDE_MIX = {"device": 2, "node": 2}, {"device": 2, "node": 4}
# name -> axes, block_size, options, query heads, KV heads
CASES = {
    "one_device": ({"seq": 1}, 1, {"sinks": SINKS}, 4, 2),
    "grouped": ({"seq": 2}, 1, {"local_window_size": (9, 2)}, 4, 2),
    "one_kv_head": ({"seq": 3}, None, {"logits_soft_cap": 1.5, "scale": 0.6}, 6, 1),
    "blocks_all_pairs": ({"seq": 5}, 4, {"is_causal": False}, 5, 5),
    "fewer_kv_heads": ({"seq": 8}, 1, {"sinks": np.tile(SINKS, 2), **EVERYTHING}, 8, 2),
    "zigzag": ({"seq": 2}, "zigzag", {"sinks": SINKS, **EVERYTHING}, 4, 2),
    "mix": (MIX, None, {"sinks": SINKS, **EVERYTHING}, 4, 2),
    "mix_striped": (WIDE_MIX, 1, {}, 4, 2),
    "mix_blocks": (WIDE_MIX, 3, {"is_causal": False, "local_window_size": 30}, 4, 2),
    "mix_fewer_kv_heads": ({"device": 4, "node": 2}, 5, {"sinks": SINKS, **EVERYTHING}, 4, 2),
}


FAST = ("grouped", "zigzag", "one_kv_head", "fewer_kv_heads", "mix", "mix_fewer_kv_heads")


def some_are_slow(name, has_lengths):
    return pytest.param(name, has_lengths, marks=[] if name in FAST else [pytest.mark.slow])


@pytest.mark.parametrize("name, has_lengths", [some_are_slow(name, i % 3 > 0) for i, name in enumerate(CASES)])
def test_every_option_placement_and_number_of_devices(name, has_lengths):
    axis_sizes, block_size, options, heads, kv_heads = CASES[name]
    lengths = LENGTHS if has_lengths else None
    assert_as_dense(ulysses_attention, axis_sizes, block_size, options, lengths=lengths, heads=heads, kv_heads=kv_heads)


@pytest.mark.slow
def test_a_mix_whose_ring_runs_both_ways():
    assert_as_dense(ulysses_attention, WIDE_MIX, 1, {}, heads=8, kv_heads=4, rotation="two_way")


@pytest.mark.parametrize("axis_sizes", [pytest.param({"seq": 2}, marks=pytest.mark.slow), MIX], ids=["alone", "mix"])
@pytest.mark.parametrize("stored_dtype", [None, "float8_e4m3fn", "int8"])
def test_bfloat16_and_narrow_keys_travel_as_they_are_stored(axis_sizes, stored_dtype):
    case = Case(queries=24, keys=24, dtype="bfloat16", stored_dtype=stored_dtype)
    order = storage_order(24, int(np.prod(list(axis_sizes.values()))), 1)
    call = partial(
        ulysses_attention, axis_name=tuple(axis_sizes), mesh=make_mesh(axis_sizes), block_size=1, return_lse=True
    )
    got = jax.jit(call)(*(x[:, order] for x in case.arrays()))
    got = jax.tree.map(lambda x: x[:, np.argsort(order)], got)
    assert_attention(got, *case.arrays(), is_causal=True, query_positions=np.arange(24))


def test_four_exchanges_and_no_other_collective():
    arrays = Case(queries=24, keys=24).arrays()
    call = partial(ulysses_attention, axis_name="seq", mesh=make_mesh({"seq": 2}), block_size=1)
    assert hlo.counts(jax.jit(call).lower(*arrays).compile().as_text()) == {"all-to-all": 4}


@pytest.mark.parametrize("heads, kv_heads, devices", [(6, 2, 4), (6, 6, 4), (12, 3, 2), (12, 6, 4)])
def test_heads_that_the_devices_do_not_divide_are_refused_with_the_numbers(heads, kv_heads, devices):
    arrays = Case(queries=24, keys=24, heads=heads, kv_heads=kv_heads).arrays()
    with pytest.raises(
        ValueError, match=f"that the {devices} devices of its first axis divide, .*, got N={heads} and K={kv_heads}"
    ):
        ulysses_attention(*arrays, axis_name="seq", mesh=make_mesh({"seq": devices}), block_size=1)


def test_a_zigzag_over_two_axes_is_refused():
    arrays = Case(queries=24, keys=24).arrays()
    with pytest.raises(NotImplementedError, match="block_size='zigzag' needs one mesh axis, got axis_name"):
        ulysses_attention(*arrays, axis_name=tuple(MIX), mesh=make_mesh(MIX), block_size="zigzag")


def test_a_second_derivative_is_refused_by_name():
    query, key, value = Case(queries=24, keys=24).arrays()
    attention = partial(ulysses_attention, axis_name="seq", mesh=make_mesh({"seq": 2}), block_size=1)
    loss = lambda query: jnp.sum(attention(query, key, value) ** 2)
    with pytest.raises(NotImplementedError, match="have a first derivative only"):
        jax.eval_shape(jax.grad(lambda query: jnp.sum(jax.grad(loss)(query))), query)
