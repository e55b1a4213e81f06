"""The backward pass of ring_attention: dense attention's own derivative, in memory that grows as prompts do."""

from functools import partial

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
from assertions import assert_gradients
from attention_cases import HEAD_SCALES, SINKS, Case
from dense import dense_attention
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from prompts import LENGTHS, assert_as_dense

from tree_attn import attend, make_mesh, storage_order
from tree_attn.commands.compare.prompts import expected_results
from tree_attn.local import gradient
from tree_attn.measure import hlo
from tree_attn.ring_baseline import hops, ring_attention, runs, ulysses_attention

EVERYTHING = {"logits_soft_cap": 2.0, "local_window_size": (40, None), "sinks": SINKS, **HEAD_SCALES}
CASES = {
    "causal": ({"seq": 3}, 1, {}),
    "one_device": ({"seq": 1}, 1, {}),
    "two_axes": ({"device": 2, "node": 4}, 1, {}),
    "contiguous_window": ({"seq": 2}, None, {"local_window_size": (9, 2)}),
    "blocks_all_pairs": ({"seq": 5}, 4, {"is_causal": False}),
    "window_not_causal": ({"seq": 8}, 1, {"is_causal": False, "local_window_size": 3}),
    "soft_cap_scale": ({"seq": 3}, 1, {"logits_soft_cap": 1.5, "scale": 0.6}),
    "sinks": ({"seq": 3}, 2, {"sinks": SINKS}),
    "scales": ({"seq": 5}, 1, HEAD_SCALES),
    "everything": ({"seq": 3}, 1, EVERYTHING),
    "zigzag": ({"seq": 3}, "zigzag", {}),
    "zigzag_one_device": ({"seq": 1}, "zigzag", {"sinks": SINKS}),
    "zigzag_all_pairs": ({"seq": 2}, "zigzag", {"is_causal": False}),
    "zigzag_everything": ({"seq": 5}, "zigzag", EVERYTHING),
    "zigzag_two_axes": ({"device": 3, "node": 2}, "zigzag", {"logits_soft_cap": 1.5}),
}


FAST = ("causal", "one_device", "two_axes", "contiguous_window", "everything")
BOTH_WAYS = ("one_device", "two_axes", "everything")


def some_are_slow(name, has_lengths, rotation):
    is_slow = name not in FAST or (rotation == "two_way" and name != "everything")
    return pytest.param(name, has_lengths, rotation, marks=[pytest.mark.slow] if is_slow else [])


@pytest.mark.parametrize(
    "name, has_lengths, rotation",
    [some_are_slow(name, i % 3 > 0, "one_way") for i, name in enumerate(CASES)]
    + [some_are_slow(name, i != 0, "two_way") for i, name in enumerate(BOTH_WAYS)],
)
def test_every_option_placement_and_number_of_devices(name, has_lengths, rotation, monkeypatch):
    """Blocks are small, so that each device has several of them, and the last ones overlap."""
    monkeypatch.setattr(gradient, "MAX_TILE_QUERIES", 9)
    monkeypatch.setattr(gradient, "MIN_CHUNK_KEYS", 7)
    lengths = LENGTHS if has_lengths else None
    assert_as_dense(ring_attention, *CASES[name], lengths=lengths, rotation=rotation)


def test_unrolled_as_on_gpus_the_gradient_of_keys_makes_as_many_hops_as_there_are_devices(monkeypatch):
    """K and V make one fewer, twice; nothing is sent before there is anything."""
    monkeypatch.setattr(hops, "default_platform", lambda: "gpu")
    arrays = Case(queries=24, keys=24).arrays()
    ring = partial(ring_attention, axis_name="seq", mesh=make_mesh({"seq": 3}), block_size=1)
    loss = lambda attention, *arrays: jnp.sum(attention(*arrays) ** 2)
    gradient = lambda attention: jax.jit(jax.grad(partial(loss, attention), (0, 1, 2)))
    order = storage_order(24, 3, 1)
    lowered = gradient(ring).lower(*(x[:, order] for x in arrays))
    assert hlo.counts(lowered.as_text(dialect="hlo")) == {"collective-permute": 2 * (2 + 2 + 3)}
    dense = gradient(lambda *arrays: dense_attention(*arrays, is_causal=True)[0])(*arrays)
    assert_gradients(lowered.compile()(*(x[:, order] for x in arrays)), [x[:, order] for x in dense])


@pytest.mark.parametrize(
    "block_size, rotation",
    [
        ("zigzag", "one_way"),
        pytest.param(None, "two_way", marks=pytest.mark.slow),
        pytest.param("zigzag", "two_way", marks=pytest.mark.slow),
    ],
)
def test_unrolled_as_on_gpus_hops_between_runs_need_no_mask(block_size, rotation, monkeypatch):
    monkeypatch.setattr(hops, "default_platform", lambda: "gpu")
    attend_shard, masked = runs.attend_shard, []

    def noted(query, key, value, options, shard, **more):
        masked.append(options.is_causal)
        return attend_shard(query, key, value, options, shard, **more)

    monkeypatch.setattr(runs, "attend_shard", noted)
    options = {"logits_soft_cap": 2.0, "sinks": SINKS, **HEAD_SCALES}
    assert_as_dense(ring_attention, {"seq": 3}, block_size, options, lengths=LENGTHS, rotation=rotation)
    # A device's own shard has a diagonal; each of two hops has a branch with attention, or two.
    branches = 2 if block_size == "zigzag" else 1
    assert masked.count(False) == 2 * branches * masked.count(True) > 0


@pytest.mark.parametrize("block_size", [1, pytest.param("zigzag", marks=pytest.mark.slow)])
def test_gradients_are_those_of_the_oracle_in_float64(block_size):
    """The oracle's gradient is written out, in numpy; the cotangent is the output itself."""
    arrays = Case(queries=24, keys=24).arrays()
    order = storage_order(24, 3, block_size)
    ring = partial(ring_attention, axis_name="seq", mesh=make_mesh({"seq": 3}), block_size=block_size)

    def gradients(*arrays):
        out, pull = jax.vjp(ring, *arrays)
        return pull(out)

    expected = expected_results(*arrays, has_gradient=True)
    assert expected[0].dtype == np.float64
    assert_gradients(jax.jit(gradients)(*(x[:, order] for x in arrays)), [x[:, order] for x in expected])


@pytest.mark.slow
def test_zigzag_on_eight_devices():
    assert_as_dense(ring_attention, {"seq": 8}, "zigzag", {}, lengths=np.array([96, 41], np.int32), tokens=96)


@pytest.mark.parametrize("block_size", [1, *(pytest.param(x, marks=pytest.mark.slow) for x in (None, 2, "zigzag"))])
def test_finite_differences(block_size):
    arrays = Case(queries=12, keys=12).arrays()
    sinks = jnp.asarray(SINKS[:4]) / 30
    options = dict(axis_name="seq", mesh=make_mesh({"seq": 3}), block_size=block_size, return_lse=True)
    options |= dict(key_value_seq_lengths=np.array([12, 7], np.int32), logits_soft_cap=3.0, local_window_size=(6, None))
    attention = jax.jit(lambda query, key, value, sinks: ring_attention(query, key, value, sinks=sinks, **options))
    jax.test_util.check_grads(attention, (*arrays, sinks), order=1, modes=("rev",), atol=3e-3, rtol=3e-3, eps=1e-2)


def test_a_second_derivative_is_refused_by_name():
    query, key, value = Case(queries=24, keys=24).arrays()
    attention = partial(ring_attention, axis_name="seq", mesh=make_mesh({"seq": 3}), block_size=1)
    loss = lambda query: jnp.sum(attention(query, key, value) ** 2)
    twice = lambda query: jax.grad(lambda query: jnp.sum(jax.grad(loss)(query)))(query)
    for call in (twice, jax.jit(twice), lambda query: jax.jvp(jax.grad(loss), (query,), (query,))):
        with pytest.raises(NotImplementedError, match="a first derivative only, got a derivative of their gradient"):
            jax.eval_shape(call, query)


def test_rows_without_keys_and_heads_of_infinite_sinks_have_no_gradient():
    arrays = Case(queries=24, keys=24).arrays()
    options = dict(axis_name="seq", mesh=make_mesh({"seq": 3}), block_size=1)
    options["key_value_seq_lengths"] = np.array([0, 24], np.int32)
    sinks = jnp.array([np.inf, 0.3, -np.inf, 1.0], jnp.float32)
    loss = lambda query, key, value, sinks: ring_attention(query, key, value, sinks=sinks, **options).sum()
    *found, of_sinks = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*arrays, sinks)
    for x in found:
        assert np.isfinite(x).all() and not np.asarray(x[0]).any() and np.asarray(x[1]).any()
    assert not np.asarray(found[0][:, :, 0]).any() and np.asarray(found[0][1, :, 1:]).any()
    assert (np.asarray(of_sinks) != 0).tolist() == [False, True, False, True]


@pytest.mark.parametrize("stored", [None, "float8_e4m3fn"])
def test_bfloat16(stored):
    case = Case(queries=24, keys=24, dtype="bfloat16", stored_dtype=stored)
    call = partial(ring_attention, axis_name="seq", mesh=make_mesh({"seq": 3}), block_size=None)
    wide = lambda arrays: [x.astype(jnp.float32) for x in arrays]
    loss = lambda attention, *arrays: jnp.sum(attention(*arrays).astype(jnp.float32) ** 2)
    dense = lambda *arrays: dense_attention(*arrays, is_causal=True)[0]
    expected = jax.grad(partial(loss, dense))(*wide(case.arrays()))
    got = jax.jit(jax.grad(partial(loss, call)))(*case.arrays())
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, atol=0.04 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sinks_of_a_narrow_dtype_have_a_gradient_of_it(dtype):
    arrays = [x.astype(dtype) for x in Case(queries=24, keys=24).arrays()]
    call = partial(ring_attention, axis_name="seq", mesh=make_mesh({"seq": 3}), block_size=None)
    loss = lambda attention, sinks: jnp.sum(attention(*arrays, sinks=sinks).astype(jnp.float32))
    sinks = jnp.asarray(SINKS[:4], dtype)
    got = jax.jit(jax.grad(partial(loss, call)))(sinks)
    expected = jax.grad(partial(loss, lambda *arrays, **sinks: attend(*arrays, is_causal=True, **sinks).out))(sinks)
    assert got.dtype == expected.dtype == sinks.dtype
    wide = np.asarray(expected, np.float32)
    np.testing.assert_allclose(np.asarray(got, np.float32), wide, atol=0.04 * np.abs(wide).max())


MIX = {"device": 2, "node": 4}
WAYS = {
    "striped": (ring_attention, {"seq": 8}, {"block_size": 1}),
    "contiguous": (ring_attention, {"seq": 8}, {"block_size": None}),
    "zigzag": (ring_attention, {"seq": 8}, {"block_size": "zigzag"}),
    "joint": (ring_attention, {"seq": 8}, {"block_size": 1, "rotation": "joint"}),
    "two_way": (ring_attention, {"seq": 8}, {"block_size": 1, "rotation": "two_way"}),
    "ulysses": (ulysses_attention, {"seq": 8}, {"block_size": 1}),
    "mix": (ulysses_attention, MIX, {"block_size": 1}),
}
# 8 x 257 and 8 x 65: a query more than a tile takes, on each device, and on the two that exchange heads.
MEMORY = [("striped", tokens) for tokens in (64, 1024, 8 * 257, 4096, 32768)] + [("mix", 8 * 65)]
SLOW_MEMORY = [(way, tokens) for way in WAYS for tokens in (8 * 257 + 8, 32768)]
MORE_MEMORY = [(way, tokens) for way in WAYS for tokens in (64, 1024)]


@pytest.mark.parametrize(
    "way, tokens",
    [
        *MEMORY,
        *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW_MEMORY if one not in MEMORY),
        *(pytest.param(*one, marks=pytest.mark.thorough) for one in MORE_MEMORY if one not in MEMORY),
    ],
)
def test_memory_is_a_small_multiple_of_the_arguments(way, tokens):
    """Compiled, and not run: the probabilities of a hop alone would take more at 4,096 tokens."""
    assert times_the_arguments(way, tokens) <= 6


@pytest.mark.parametrize("tokens", [1600, pytest.param(16384, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype, head_dim", [("bfloat16", 64), ("float32", 16)])
def test_memory_with_narrow_arguments_or_small_heads_is_a_little_more(dtype, head_dim, tokens):
    """Derivatives are summed in float32, and a row of logits has the same bytes for any head dim."""
    assert times_the_arguments("striped", tokens, dtype, head_dim) <= 8


def times_the_arguments(way: str, tokens: int, dtype: str = "float32", head_dim: int = 64) -> float:
    function, axis_sizes, options = WAYS[way]
    mesh, axes = make_mesh(axis_sizes), tuple(axis_sizes)
    along = NamedSharding(mesh, P(None, axes))
    array = jax.ShapeDtypeStruct((1, tokens, 4 if function is ring_attention else 8, head_dim), dtype, sharding=along)
    call = partial(function, axis_name=axes, mesh=mesh, **options)
    loss = lambda query, key, value, weights: jnp.vdot(call(query, key, value), weights)
    memory = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*[array] * 4).compile().memory_analysis()
    return memory.temp_size_in_bytes / memory.argument_size_in_bytes
