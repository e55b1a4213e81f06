"""Every reduction over every topology: the merge of all devices' states, the same bits on each."""

import dataclasses
import logging
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_rounded_once, assert_state
from jax.sharding import PartitionSpec as P

from tree_attn import SoftmaxState, make_mesh, merge_states, reduce
from tree_attn.cost import machine
from tree_attn.reduce import check_reduction, reduce_state
from tree_attn.reduce.hierarchical import hierarchical

ROWS, H = (2, 3, 4), 5
TOPOLOGIES = [({"seq": n}, reduction) for n in (1, 2, 3, 5, 8) for reduction in ("allreduce", "gather")] + [
    ({"device": 4, "node": 2}, "hierarchical"),
    ({"device": 3, "node": 2}, "hierarchical"),
    ({"device": 4, "node": 2}, ("gather", "allreduce")),
    ({"device": 3, "node": 2}, ("allreduce", "gather")),
    ({"device": 2, "node": 2, "rack": 2}, ("gather", "allreduce", "gather")),
    ({"device": 4, "node": 2}, "allreduce"),
    ({"device": 3, "node": 2}, "gather"),
    ({"device": 4, "node": 2}, None),
]


def states_of(num_devices, dtype):
    """A state per device: ordinary rows, rows of +-1e4, rows empty on most devices, and rows empty on all of them."""
    rng = np.random.default_rng(num_devices)
    lse = rng.normal(size=(num_devices, *ROWS)).astype(np.float32)
    lse[:, 0, 0] = rng.choice([1e4, -1e4], size=(num_devices, ROWS[-1]))
    lse[1:, 0, 1] = -np.inf
    lse[:, 0, 2] = -np.inf
    out = rng.normal(size=(*lse.shape, H)).astype(np.float32)
    out[np.isneginf(lse)] = 0
    return SoftmaxState(jnp.asarray(out, dtype), jnp.asarray(lse))


def reduced_on_each_device(states, axis_sizes, reduction):
    """Returns the result of each device, stacked along a new first axis."""
    axes = tuple(axis_sizes)

    def on_device(state):
        merged = reduce_state(jax.tree.map(lambda x: x[0], state), axes, reduction)
        return jax.tree.map(lambda x: x[None], merged)

    over_all = P(axes)
    return jax.jit(
        jax.shard_map(on_device, mesh=make_mesh(axis_sizes), in_specs=over_all, out_specs=over_all, check_vma=False)
    )(states)


@pytest.mark.parametrize("axis_sizes, reduction", TOPOLOGIES, ids=str)
def test_every_device_gets_the_merge_of_all_to_the_same_bit(axis_sizes, reduction):
    states = states_of(math.prod(axis_sizes.values()), jnp.float32)
    everywhere = reduced_on_each_device(states, axis_sizes, reduction)
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape)), everywhere)
    assert_state(jax.tree.map(lambda x: x[0], everywhere), merge_states(states, axis=0))


@pytest.mark.parametrize(
    "axis_sizes, reduction",
    [({"seq": 3}, "allreduce"), ({"seq": 3}, "gather"), ({"device": 4, "node": 2}, "hierarchical")],
    ids=str,
)
def test_narrow_out_is_summed_in_float32(axis_sizes, reduction):
    """Each level rounds `out` to its dtype once; within a level nothing is narrower than float32."""
    states = states_of(math.prod(axis_sizes.values()), jnp.bfloat16)
    got = jax.tree.map(lambda x: x[0], reduced_on_each_device(states, axis_sizes, reduction))
    expected = merge_states(SoftmaxState(states.out.astype(jnp.float32), states.lse), axis=0)
    assert got.out.dtype == jnp.bfloat16
    assert_rounded_once(got.out, expected.out)
    assert_state(SoftmaxState(expected.out, got.lse), expected)


@pytest.mark.parametrize(
    "axis_sizes, picked", [({"seq": 2}, "'gather'"), ({"device": 2, "node": 2}, "('gather', 'gather')")]
)
def test_none_picks_what_runs_here_and_says_why(axis_sizes, picked, caplog):
    caplog.set_level(logging.INFO, "tree_attn")
    reduced_on_each_device(states_of(math.prod(axis_sizes.values()), jnp.float32), axis_sizes, None)
    assert f"reduction=None picked {picked}" in caplog.text
    assert "reduction=None: fused" in caplog.text


@pytest.mark.parametrize(
    "axis_sizes, elements, tried",
    [
        ({"seq": 4}, 16 * 129, ["fused", "gather"]),  # small: fused is cheapest, and cannot run here
        ({"seq": 4}, 1 << 20, ["allreduce"]),  # large: it sends least
        ({"device": 4, "node": 2}, 8 * 129, ["gather"]),  # one launch over both, with one hop between nodes
        ({"device": 4, "node": 2}, 160 * 129, [("fused", "gather"), "gather"]),  # less to send between nodes
        ({"device": 4, "node": 2}, 512 * 129, [("fused", "gather"), ("gather", "gather")]),
    ],
    ids=str,
)
def test_on_a_known_machine_none_is_what_costs_least(axis_sizes, elements, tried, monkeypatch, caplog):
    """The H200's numbers, in nodes of four; states that are only shapes."""
    caplog.set_level(logging.INFO, "tree_attn")
    known = dataclasses.replace(machine.load("NVIDIA H200"), gpus_per_node=4)
    monkeypatch.setattr("tree_attn.reduce.machine_here", lambda: known)
    state = SoftmaxState(jnp.zeros((elements // 129, 128)), jnp.zeros(elements // 129))
    on_device = lambda state: reduce_state(state, tuple(axis_sizes), None)
    mapped = jax.shard_map(on_device, mesh=make_mesh(axis_sizes), in_specs=P(), out_specs=P(), check_vma=False)
    jax.jit(mapped).trace(state)
    said = [record.getMessage() for record in caplog.records if "reduction=None" in record.getMessage()]
    assert len(said) == len(tried)
    assert said[-1] == f"reduction=None picked {tried[-1]!r}"
    assert all("fused" in line for line in said[:-1])


def test_none_is_never_fused_where_it_was_not_run(monkeypatch):
    tried = lambda: list(reduce._by_cost(16 * 129, (2,)))
    device = types.SimpleNamespace(compute_capability="9.0", device_kind="unknown")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setattr("tree_attn.reduce.machine_here", lambda: None)
    assert tried() == ["fused", "gather"]
    device.compute_capability = "8.0"
    assert tried() == ["gather"]


def test_hierarchical_means_a_gather_at_each_level():
    assert check_reduction("hierarchical", ("device", "node")) == ("gather", "gather")


def test_hierarchical_merges_over_the_first_axis_first():
    """The fastest link is named first, so that the slow ones carry merged results only; no level rounds."""
    order = []
    state = SoftmaxState(jnp.ones((1, 2), jnp.bfloat16), jnp.zeros(1))
    reductions = [lambda state, axes, i=i: (order.append((i, axes, state.out.dtype)), state)[1] for i in range(3)]
    assert hierarchical(state, ("device", "node", "rack"), tuple(reductions)).out.dtype == jnp.bfloat16
    assert order == [(0, ("device",), jnp.float32), (1, ("node",), jnp.float32), (2, ("rack",), jnp.float32)]
