"""Tests of which kernels begin before the one before them has ended."""

import jax
import jax.numpy as jnp
import pytest

from tree_attn.kernels import lean, overlap
from tree_attn.kernels.lean_layout import LeanConfig, padding_bytes
from tree_attn.local import mosaic_gpu

SMS = 132
KEYS = 1024


@pytest.fixture(autouse=True)
def on_an_h200(monkeypatch, fresh_traces):
    """A trace keeps the SMs that it was made for."""
    monkeypatch.setattr(lean, "num_sms", lambda: SMS)


def traced(num_ctas: int, keys: int = KEYS, output_tiles: int | None = None, block_kv: int = 64) -> str:
    """Returns the program of a step, by default with an output tile for each CTA."""
    query, cache = (jax.ShapeDtypeStruct((output_tiles or num_ctas, n, 1, 64), jnp.bfloat16) for n in (1, keys))
    config = LeanConfig(block_kv=block_kv, num_stages=2, num_ctas=num_ctas)
    options = dict(num_slots=keys, scale=1.0, logits_soft_cap=None, config=config)
    step = lambda query, key, value: mosaic_gpu.lean_state(query, key, value, None, **options).out
    return str(jax.make_jaxpr(step)(query, cache, cache))


@pytest.mark.parametrize(
    "num_ctas, is_early",
    # One on an SM has no room beside it; 90 % of twice or three times as many as SMs are even.
    [(112, True), (132, True), (160, False), (224, False), (237, False), (238, True), (264, True), (288, False),
     (356, False), (357, True), (396, True)],
)  # fmt: skip
def test_attention_begins_early_where_sms_have_equally_many_ctas(num_ctas, is_early):
    program = traced(num_ctas)
    waits, launches = (f"griddepcontrol_{name}" in program for name in ("wait", "launch_dependents"))
    assert waits == launches == (is_early and overlap.overlaps())  # with an older JAX no kernel does


@pytest.mark.parametrize("block_kv", [64, 128])
def test_a_cache_of_four_kv_tiles_is_read_early_however_many_ctas_there_are(block_kv):
    programs = [traced(288, 4 * block_kv + more, block_kv=block_kv) for more in (0, 1)]
    assert ["griddepcontrol" in program for program in programs] == [overlap.overlaps(), False]


def test_output_tiles_that_runs_cut_begin_early_by_the_same_rule():
    even, uneven = (traced(num_ctas, output_tiles=150).count("griddepcontrol_wait") for num_ctas in (240, 200))
    assert even - uneven == int(overlap.overlaps())  # a merge in a launch of its own begins early in both


def test_memory_is_left_empty_where_a_kernel_begins_early(monkeypatch):
    requests = []
    monkeypatch.setattr(lean, "padding_bytes", lambda *args: requests.append(args) or padding_bytes(*args))
    traced(160)
    assert not requests
    traced(112)
    assert bool(requests) == overlap.overlaps()
