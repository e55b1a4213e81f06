"""Tests of which kernels begin before the one before them has ended."""

import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tree_attn.kernels import lean, lean_call, overlap
from tree_attn.kernels.lean_layout import LeanConfig, padding_bytes
from tree_attn.kernels.lean_moves import num_early_kv_tiles
from tree_attn.kernels.lean_walk import tile_slots
from tree_attn.local import mosaic_gpu

SMS = 132
KEYS = 1024


@pytest.fixture(autouse=True)
def on_an_h200(monkeypatch, fresh_traces):
    """A trace keeps the SMs that it was made for."""
    monkeypatch.setattr(lean, "num_sms", lambda: SMS)


def traced(num_ctas: int, keys: int = KEYS, output_tiles: int | None = None, block_kv: int = 64, **more) -> str:
    """Returns the program of a step, by default with an output tile for each CTA."""
    query, cache = (jax.ShapeDtypeStruct((output_tiles or num_ctas, n, 1, 64), jnp.bfloat16) for n in (1, keys))
    config = LeanConfig(block_kv=block_kv, num_stages=2, num_ctas=num_ctas)
    options = dict(num_slots=keys, scale=1.0, logits_soft_cap=None, config=config) | more
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


def test_warpgroups_wait_apart_where_old_keys_are_read_early():
    """The warpgroup that moves keys begins with old ones, and waits for the previous kernel then."""
    waits = [traced(132, num_new=num_new).count("griddepcontrol_wait") for num_new in (None, 1)]
    assert waits == ([1, 2] if overlap.overlaps() else [0, 0])
    assert "griddepcontrol_wait" not in traced(160, num_new=1)  # a kernel that does not begin early
    # So few CTAs that those of several kernels have room at once.
    assert traced(66, num_new=1).count("griddepcontrol_wait") == int(overlap.overlaps())


# Of 507 slots the last KV tile begins earlier, to end with the array.
@pytest.mark.parametrize("num_slots, num_new", [(512, 0), *itertools.product([512, 507], [1, 3, 64, 200])])
def test_only_old_keys_are_read_early_and_as_many_as_there_are_stages(num_slots, num_new):
    query, key = (jax.ShapeDtypeStruct((1, slots, 1, 64), jnp.bfloat16) for slots in (1, num_slots))
    config = LeanConfig(block_kv=64, num_stages=3, num_ctas=2)
    options = dict(num_slots=num_slots, scale=1.0, logits_soft_cap=None)
    shape = lean_call.plan_call(query, key, None, config=config, num_new=num_new, **options).shape

    def expected(begins_at: int, end: int, segment) -> int:
        output_tile = types.SimpleNamespace(first_slot=begins_at)
        of_tile = [int(tile_slots(shape, config, output_tile, segment.kv_tile + i)[0]) for i in range(3)]
        are_old = [slot + 64 <= end - num_new for slot in of_tile[: segment.num_kv_tiles]]
        return sum(np.cumprod(are_old)) if segment.output_tiles_done == 0 else 0

    found, wanted = [], []
    for begins_at, end in ((0, num_slots), (0, 130), (0, 129), (0, 0), (72, 330), (8, 72)):
        num_kv_tiles = max(-(-(end - begins_at) // 64), 1)
        for kv_tile in range(num_kv_tiles):
            for done in (0, 1):
                segment = types.SimpleNamespace(
                    kv_tile=kv_tile, num_kv_tiles=num_kv_tiles - kv_tile, output_tiles_done=done
                )
                output_tile = types.SimpleNamespace(first_slot=begins_at, span_end=end)
                found.append(int(num_early_kv_tiles(shape, config, output_tile, segment)))
                wanted.append(expected(begins_at, end, segment))
    assert found == wanted
    assert max(wanted) == config.num_stages


@pytest.mark.parametrize(
    "queries, options",
    [(1, {"is_packed": True}), (40, {}), (1, {"pages": jax.ShapeDtypeStruct((1, 8), jnp.int32)})],
    ids=["packed", "many queries", "small pages"],
)
def test_other_kernels_and_layouts_read_no_key_early(queries, options):
    page = 16 if "pages" in options else KEYS
    query, key = (jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((1, queries, 4, 64), (1, page, 1, 64)))
    planned = lean_call.plan_call(
        query, key, None, num_slots=128, scale=1.0, logits_soft_cap=None, num_new=1, **options
    )
    assert planned.shape.num_new is None
