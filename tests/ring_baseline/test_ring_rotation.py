"""The rotation of a ring: its choice by the cost model, and K and V as one array."""

import dataclasses
import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_attention
from attention_cases import HEAD_SCALES, SINKS, Case
from prompts import LENGTHS, assert_as_dense, assert_value_and_gradients

from tree_attn import make_mesh
from tree_attn.cost import datasheets, machine
from tree_attn.measure import hlo
from tree_attn.ring_baseline import hops, ring_attention, ring_decode, rotation, ulysses_attention


def test_one_array_of_keys_and_values_value_and_gradient():
    query, key, value = Case(keys=40, value_dim=5).arrays()
    options = dict(key_value_seq_lengths=np.array([40, 17], np.int32), is_causal=True, sinks=SINKS) | HEAD_SCALES
    where = dict(axis_name="seq", mesh=make_mesh({"seq": 4}), block_size=None, return_lse=True)
    ring = partial(ring_decode, rotation="joint", **where, **options)
    assert_value_and_gradients(ring, query, key, value, **options)
    lowered = jax.jit(ring).lower(query, key, value)
    assert hlo.counts(lowered.as_text(dialect="hlo")) == {"collective-permute": 3}


@pytest.mark.parametrize("is_unrolled", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_one_array_within_prompts(is_unrolled, monkeypatch):
    monkeypatch.setattr(hops, "default_platform", lambda: "gpu" if is_unrolled else "cpu")
    assert_as_dense(ring_attention, {"seq": 3}, 1, {"sinks": SINKS}, lengths=LENGTHS, rotation="joint")


def test_narrow_arrays_of_a_single_head_join():
    case = Case(dtype="bfloat16", kv_heads=1, stored_dtype="float8_e4m3fn")
    ring = partial(ring_decode, axis_name="seq", mesh=make_mesh({"seq": 3}), return_lse=True, rotation="joint")
    assert_attention(jax.jit(ring)(*case.arrays()), *case.arrays())


H200, TORUS = machine.load("NVIDIA H200"), dataclasses.replace(datasheets.load("TPU v5p"), device_kind="TPU v5p")
# A trace is kept by its shapes: each call has its own number of keys.
CALLS = {
    "few_keys": ("decode", 4096, 8, H200, "one_way"),
    "many_keys": ("decode", 655_360, 8, H200, "one_way"),
    "torus": ("decode", 655_356, 8, TORUS, "two_way"),
    "torus_one_head": ("decode", 655_352, 1, TORUS, "one_way"),
    "no_costs": ("decode", 655_348, 8, None, "one_way"),
    "short_prompt": ("ring", 512, 8, H200, "one_way"),
    "long_prompt": ("ring", 131_072, 8, H200, "joint"),
    "mix": ("ulysses", 131_072, 8, H200, "joint"),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_fastest_by_the_cost_model_is_logged(name, monkeypatch, caplog):
    function, tokens, kv_heads, known, expected = CALLS[name]
    monkeypatch.setattr(rotation, "_machine", lambda: known)
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # XLA joins what has 32 MiB
    shape = lambda tokens, heads: jax.ShapeDtypeStruct((1, tokens, heads, 128), jnp.bfloat16)
    mesh, axes = make_mesh({"seq": 4}), "seq"
    if function == "decode":
        call = partial(ring_decode, block_size=None)
    elif function == "ring":
        call = partial(ring_attention, block_size=1)
    else:
        call, mesh, axes = (
            partial(ulysses_attention, block_size=1),
            make_mesh({"device": 2, "node": 2}),
            ("device", "node"),
        )
    query = shape(1 if function == "decode" else tokens, 8)
    with caplog.at_level(logging.INFO, "tree_attn"):
        jax.eval_shape(partial(call, axis_name=axes, mesh=mesh), query, *2 * [shape(tokens, kv_heads)])
    lines = [record.getMessage() for record in caplog.records if "rotation=None" in record.getMessage()]
    assert lines and all(line.startswith(f"rotation=None picked {expected!r}") for line in lines)
    assert known is None or "us added to the attention, predicted: one_way " in lines[0]
    assert ("two_way" in lines[0]) == (known is not None and kv_heads > 1)


def test_machines_without_measured_costs_are_known_by_their_datasheets(monkeypatch):
    assert rotation._machine() is None, "emulated devices"
    monkeypatch.setattr(rotation, "default_platform", lambda: "gpu")
    monkeypatch.setattr(rotation, "machine_here", lambda: H200)
    assert rotation._machine() is H200
    monkeypatch.setattr(rotation, "machine_here", lambda: None)
    monkeypatch.setattr(rotation.datasheets, "load", {jax.devices()[0].device_kind: TORUS}.get)
    assert rotation._machine() is TORUS


@pytest.mark.parametrize("axes, expected", [(("node",), 4), (("device",), 1), (("device", "node"), 1)])
def test_neighbours_of_the_ring_are_as_far_apart_as_the_faster_axes_are_long(axes, expected):
    found = []
    body = lambda: found.append(rotation._stride(axes)) or jnp.zeros(1)
    mesh = make_mesh({"device": 4, "node": 2})
    jax.eval_shape(jax.shard_map(body, mesh=mesh, in_specs=(), out_specs=jax.sharding.PartitionSpec(), check_vma=False))
    assert found == [expected]
