"""SparQ against Algorithm 1 in float64, dense attention at its limits, and itself over any sharding."""

import functools
import logging

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_attention, assert_state
from attention_cases import rounded
from jax.sharding import PartitionSpec as P

from tree_attn import SoftmaxState, attend, make_mesh, merge_states, reference, sparq_decode, storage_order
from tree_attn.measure import hlo
from tree_attn.sparq import hopper, xla
from tree_attn.sparq.transfers import sparq_transfer_elements

B, S, H = 2, 24, 16
LENGTHS = np.array([24, 13], np.int32)
CHOICE = dict(num_components=5, num_keys=7, local_window=2)


def arrays(queries=1, kv_heads=2, group=1, dtype=jnp.float32, logit_size=2.0):
    rng = np.random.default_rng(0)
    shapes = ((B, queries, kv_heads * group, H), (B, S, kv_heads, H), (B, S, kv_heads, H))
    sizes = (logit_size, 1.0, 1.0)
    return tuple(rounded(size * rng.normal(size=shape), dtype) for shape, size in zip(shapes, sizes))


def decode(query, key, value, **options):
    """Runs `sparq_decode`, jitted, with `LENGTHS`."""
    call = functools.partial(sparq_decode, return_lse=True, implementation="xla", **options)
    return SoftmaxState(*jax.jit(lambda *x: call(*x[:3], key_value_seq_lengths=x[3]))(query, key, value, LENGTHS))


@pytest.mark.parametrize(
    "sizes, options",
    [
        ({}, {"reallocate": False}),
        ({"group": 3}, {"scale": 0.5}),
        ({"queries": 4, "kv_heads": 1, "group": 2}, {"is_causal": True}),
        ({"queries": 2}, {"local_window": 0}),
        ({"group": 2}, {"score_temperature": "head_dim"}),
        ({"group": 2}, {"score_temperature": "num_components"}),
        ({"logit_size": 1e4}, {"num_keys": 1, "local_window": 1}),
        ({}, {"num_keys": 100, "num_components": 1}),
    ],
    ids=str,
)
def test_it_is_algorithm_1(sizes, options):
    inputs, options = arrays(**sizes), CHOICE | {"reallocate": True} | options
    assert_state(decode(*inputs, **options), reference.sparq(*inputs, key_value_seq_lengths=LENGTHS, **options))


@pytest.mark.parametrize("reallocate", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_all_components_and_all_keys_are_dense_attention(dtype, reallocate):
    inputs = arrays(group=2, dtype=dtype)
    state = decode(*inputs, num_components=H, num_keys=S, reallocate=reallocate)
    assert_attention(state, *inputs, key_value_seq_lengths=LENGTHS)


@pytest.mark.parametrize("selection", ["global", "per_shard"])
def test_sequences_without_keys_and_queries_of_zeros(selection):
    query, key, value = arrays()
    lengths = np.array([0, 13], np.int32)
    where = dict(axis_name="seq", mesh=make_mesh({"seq": 3}), block_size=None, selection=selection)
    call = functools.partial(sparq_decode, return_lse=True, **CHOICE, **where)
    out, lse = jax.jit(lambda *x: call(*x[:3], key_value_seq_lengths=x[3]))(jnp.zeros_like(query), key, value, lengths)
    assert np.isneginf(lse[0]).all() and not np.asarray(out[0]).any()
    assert np.isfinite(lse[1]).all()  # every key is equally good
    np.testing.assert_allclose(lse[1], np.log(13), rtol=1e-6)


def test_a_query_without_what_its_group_has_most_of_is_finite():
    query, key, value = arrays(kv_heads=1, group=2)
    query = jnp.zeros_like(query).at[:, :, 0, :5].set(9.0).at[:, :, 1, 5:].set(1.0)
    state = decode(query, key, value, num_components=5, num_keys=7, reallocate=True)
    assert np.isfinite(state.out).all() and np.isfinite(state.lse).all()


def test_the_gradient_of_a_query_of_zeros_is_finite():
    query, key, value = (x[:, :, :1] for x in arrays(kv_heads=1, group=1))
    loss = lambda *inputs: decode(*inputs, **CHOICE).out.sum()
    gradients = jax.grad(loss, argnums=(0, 1, 2))(jnp.zeros_like(query), key, value)
    assert all(np.isfinite(x).all() for x in gradients)


def test_where_all_keys_are_kept_the_gradient_is_that_of_dense_attention():
    """The second sequence has 13. The rest then has no weight, and the logarithm of none has no derivative."""
    inputs = arrays()
    loss = lambda *inputs: decode(*inputs, num_components=5, num_keys=13, reallocate=True).out.sum()
    dense = lambda *inputs: attend(*inputs, key_value_seq_lengths=LENGTHS, implementation="xla").out.sum()
    found, expected = (jax.grad(function, argnums=(0, 1, 2))(*inputs) for function in (loss, dense))
    for ours, theirs in zip(found, expected, strict=True):
        assert np.isfinite(ours).all()
        np.testing.assert_allclose(ours[1], theirs[1], atol=1e-5)


def test_groups_leave_the_mean_out_by_default():
    for group, reallocate in ((1, True), (2, False)):
        inputs = arrays(group=group)
        expected = reference.sparq(*inputs, key_value_seq_lengths=LENGTHS, reallocate=reallocate, **CHOICE)
        assert_state(decode(*inputs, **CHOICE), expected)


@pytest.mark.parametrize(
    "axis_sizes, block_size", [({"seq": 2}, None), ({"seq": 3}, 1), ({"seq": 8}, None), ({"device": 3, "node": 2}, 1)]
)
def test_the_global_choice_is_that_of_one_device(axis_sizes, block_size):
    query, key, value = arrays(queries=2, group=2)
    options = CHOICE | {"reallocate": True, "is_causal": True}
    axes, mesh = tuple(axis_sizes), make_mesh(axis_sizes)
    order = storage_order(S, mesh.size, block_size)
    stored = (query, key[:, order], value[:, order])
    got = decode(*stored, axis_name=axes, mesh=mesh, block_size=block_size, **options)
    assert_state(got, decode(query, key, value, **options))


def test_equal_scores_keep_the_same_keys_on_any_number_of_devices():
    query, key, value = arrays()
    key = jnp.broadcast_to(key[:, :1], key.shape)
    expected = decode(query, key, value, **CHOICE)
    for block_size in (None, 2):
        order = storage_order(S, 3, block_size)
        stored = (query, key[:, order], value[:, order])
        where = dict(axis_name="seq", mesh=make_mesh({"seq": 3}), block_size=block_size)
        assert_state(decode(*stored, **where, **CHOICE), expected)


@pytest.mark.parametrize("reallocate", [True, False])
def test_the_choice_per_shard_is_that_of_each_shard_merged(reallocate):
    query, key, value = arrays(group=2)
    mean = np.stack([np.asarray(value)[b, :length].mean(axis=0) for b, length in enumerate(LENGTHS)])
    options = dict(num_components=5, reallocate=reallocate, value_mean=jnp.asarray(mean))
    where = dict(axis_name="seq", mesh=make_mesh({"seq": 3}), block_size=None, selection="per_shard")
    got = decode(query, key, value, num_keys=8, **where, **options)
    states = []
    for shard in range(3):
        local = slice(8 * shard, 8 * shard + 8)
        lengths = np.clip(LENGTHS - 8 * shard, 0, 8)
        one = functools.partial(sparq_decode, num_keys=3, return_lse=True, **options)
        call = jax.jit(lambda *x, one=one: one(*x[:3], key_value_seq_lengths=x[3]))
        states.append(call(query, key[:, local], value[:, local], lengths))
    assert_state(got, merge_states(SoftmaxState(*(jnp.stack(x) for x in zip(*states))), axis=0))


def test_inside_a_callers_shard_map_with_keys_by_component_and_the_mean_at_hand():
    query, key, value = arrays()
    mean = np.stack([np.asarray(value)[b, :length].mean(axis=0) for b, length in enumerate(LENGTHS)])
    call = functools.partial(sparq_decode, axis_name="seq", block_size=None, return_lse=True, **CHOICE)

    def body(query, key, value, by_component, mean):
        return call(query, key, value, key_by_component=by_component, value_mean=mean, key_value_seq_lengths=LENGTHS)

    along = P(None, "seq")
    mapped = jax.shard_map(
        body,
        mesh=make_mesh({"seq": 3}),
        in_specs=(P(), along, along, P(None, None, None, "seq"), P()),
        out_specs=P(),
        check_vma=False,
    )
    got = jax.jit(mapped)(query, key, value, key.transpose(0, 2, 3, 1), jnp.asarray(mean))
    assert_state(got, decode(query, key, value, **CHOICE))
    sharded = decode(query, key, value, key_by_component=key.transpose(0, 2, 3, 1), axis_name="seq", block_size=None,
                     mesh=make_mesh({"seq": 3}), value_mean=jnp.asarray(mean), **CHOICE)  # fmt: skip
    assert_state(sharded, got)


@pytest.mark.parametrize("name", ["key_by_component", "value_mean"])
def test_an_array_at_hand_is_the_one_that_is_read(name):
    query, key, value = arrays()
    wrong = {"key_by_component": jnp.zeros((B, 2, H, S)), "value_mean": jnp.full((B, 2, H), 100.0)}[name]
    right, other = (decode(query, key, value, **CHOICE, **options) for options in ({}, {name: wrong}))
    assert np.abs(right.out - other.out).max() > 0.01


@pytest.mark.parametrize("selection, reductions", [("global", 3), ("per_shard", 0)])
def test_collectives_are_those_documented(selection, reductions):
    query, key, value = arrays()
    mesh = make_mesh({"seq": 3})
    call = functools.partial(
        sparq_decode, axis_name="seq", mesh=mesh, block_size=None, selection=selection, value_mean=jnp.zeros((B, 2, H)),
        reduction="allreduce", **CHOICE,
    )  # fmt: skip
    lowered = jax.jit(call).lower(query, key, value).as_text(dialect="hlo")
    counts = hlo.counts(lowered)
    assert counts == {"all-reduce": 3} | ({"all-gather": reductions} if reductions else {})
    if selection == "global":
        heads = B * 1 * 2
        candidates = 2 * heads * CHOICE["num_keys"]
        received = 3 * 4 * (heads + candidates + heads)
        assert sum(one.bytes_payload for one in hlo.collectives(lowered) if one.opcode == "all-gather") == received


def gathered_elements(call, *arrays) -> int:
    """Returns the elements of the results of the program's gathers."""
    return sum(_gathers(jax.make_jaxpr(call)(*arrays).jaxpr))


def _gathers(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "gather":
            yield equation.outvars[0].aval.size
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from _gathers(inner)


def test_what_is_read_is_equation_11():
    """Gathers read r components and k keys of K, and k values; the mean and a step's writes come on top."""
    query, key, value = arrays()
    options = dict(num_components=5, num_keys=7, value_mean=jnp.zeros((B, 2, H)), reallocate=False)
    read = gathered_elements(functools.partial(sparq_decode, implementation="xla", **options), query, key, value)
    small = B * 2 * 5  # r components of q
    mean_and_writes = 4 * H
    per_head = sparq_transfer_elements(num_keys=S, head_dim=H, num_components=5, num_kept=7)
    assert read - small == B * 2 * (per_head - mean_and_writes)


def test_backends_get_the_chosen_keys_eight_by_eight(monkeypatch):
    slots, attend = [], xla.attend

    def noting(query, key, value, **options):
        slots.append(key.shape[1])
        return attend(query, key, value, **options)

    inputs, options = arrays(), CHOICE | {"reallocate": False}
    monkeypatch.setattr(xla, "attend", noting)
    assert_state(decode(*inputs, **options), reference.sparq(*inputs, key_value_seq_lengths=LENGTHS, **options))
    assert slots == [8]  # of 7


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"num_components": 17}, "num_components must be an integer of at least 1 and at most 16, got 17"),
        ({"num_keys": 0}, "num_keys must be an integer of at least 1, got 0"),
        ({"local_window": 8}, "local_window must be an integer of at least 0 and at most 7, got 8"),
        (
            {"score_temperature": 1.0},
            "score_temperature must be one of 'coverage', 'head_dim', 'num_components', got 1.0",
        ),
        ({"selection": "best"}, "selection must be one of 'global', 'per_shard', got 'best'"),
        ({"value_mean": np.zeros((B, 3, H))}, r"value_mean must have shape \[B, K, Hv\] = \(2, 2, 16\)"),
        ({"key_by_component": np.zeros((B, 2, S, H), np.float32)}, r"key_by_component must hold key as \[B, K, H, S\]"),
        ({"block_size": 2}, "block_size must be None where axis_name is, got 2"),
        ({"axis_name": "seq", "reduction": "star"}, "reduction must be one of"),
        (
            {"axis_name": "seq", "devices": 5, "key_by_component": np.zeros((B, 2, H, S), np.float32)},
            "key_by_component must hold keys that 5 devices divide, got 24",
        ),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(changed, said):
    changed = dict(changed)
    devices = changed.pop("devices", None)
    changed |= {} if devices is None else {"mesh": make_mesh({"seq": devices}, jax.devices()[:devices])}
    with pytest.raises(ValueError, match=said):
        sparq_decode(*arrays(), **CHOICE | changed)


def test_a_context_mesh_must_divide_the_keys_by_component_too():
    components = np.zeros((B, 2, H, S), np.float32)
    with (
        jax.set_mesh(make_mesh({"seq": 5})),
        pytest.raises(ValueError, match="key_by_component must hold keys that 5 devices divide, got 24"),
    ):
        sparq_decode(*arrays(), **CHOICE, axis_name="seq", key_by_component=components)


def test_the_log_says_where_exact_attention_is_the_better_choice(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "tree_attn")
    query, key = jnp.ones((1, 1, 8, 8), jnp.float32), jnp.ones((1, 16, 1, 8), jnp.float32)
    sparq_decode(query, key, key, num_components=4, num_keys=8)
    assert hopper.advice(8, None) is None and "exact attention" not in caplog.text
    monkeypatch.setattr(hopper, "default_platform", lambda: "gpu")
    assert [hopper.advice(group, None) is None for group in (1, 4, 8)] == [True, True, False]
    sparq_decode(query, key, key, num_components=4, num_keys=6)  # traced anew
    assert "sparq_decode: without SparQ's kernels exact attention was faster on an H200" in caplog.messages
