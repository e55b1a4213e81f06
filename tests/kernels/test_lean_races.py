"""The lean kernel's barriers, in Mosaic GPU's interpreter.

Its race detector does not see reads of the tensor core. So here registers read the same at the same time. A check that
cannot fail shows nothing, so kernels with one wait left out must be found to race.
"""

import pathlib
import types

import pytest
from lean_cases import Call, thorough
from lean_interpreter import check, has_race, needs_interpreter, set_layout

from tree_attn.kernels import kv_parts, lean_compute, lean_merge, lean_moves, tall_cta
from tree_attn.kernels import lean as lean_kernel
from tree_attn.kernels import tall as tall_kernel

pytestmark = [needs_interpreter, pytest.mark.usefixtures("small_layout", "watched_products")]


@pytest.mark.parametrize(
    "call, num_stages, num_kernels",
    [
        (Call(slots=512), 2, 1),  # two output tiles for two CTAs: nothing to merge
        (Call(slots=512, kv_heads=1), 2, 2),
        (Call(lengths=(500, 0, 77), slots=512, kv_heads=1, head_dim=256), 1, 2),  # K and V refill as soon as used
        (Call(layout="packed", lengths=(300, 9, 200), slots=512, kv_heads=1, stored_dtype="float8_e4m3fn"), 2, 2),
        (Call(queries=70, group=2, lengths=(500, 77), slots=512, kv_heads=1), 2, 2),
        (Call(lengths=(40, 3, 0, 64), slots=64), 2, 1),  # short output tiles: two queries are on their way
        (Call(slots=259, kv_heads=1), 2, 2),  # the last KV tile is copied in parts
        (Call(lengths=(500, 0, 77), slots=512, kv_heads=1, is_early=True), 3, 2),  # old keys are read early
        (Call(layout="paged", page=32, lengths=(250, 77), slots=256, kv_heads=1), 2, 2),  # every one is
        *thorough(
            [
                (Call(lengths=(500, 0, 77), slots=512, kv_heads=1), 3, 2),
                (Call(layout="packed", lengths=(300, 9, 200), slots=512, kv_heads=1), 2, 2),
            ]
        ),
    ],
    ids=str,
)
def test_operands_are_there_when_they_are_multiplied_and_stay_until_they_have_been(
    call, num_stages, num_kernels, monkeypatch
):
    set_layout(monkeypatch, num_stages=num_stages, num_ctas=2)
    check(call, num_kernels)


def mutant(module: types.ModuleType, waits: str | None) -> types.ModuleType:
    """Returns a kernel's module without one of its waits; with None all are there, and its imports are made anew."""
    source = pathlib.Path(module.__file__).read_text()
    assert waits is None or source.count(waits) == 1, "the kernel no longer has this wait: name the one it has"
    changed = types.ModuleType("mutant")
    exec(compile(source.replace(waits or "\0", "None"), "mutant", "exec"), changed.__dict__)
    return changed


SHORT_OUTPUT_TILES = Call(lengths=(40, 3, 64), slots=64)


@pytest.mark.parametrize("call", [Call(), SHORT_OUTPUT_TILES], ids=str)
@pytest.mark.parametrize(
    "barrier",
    ["self.barriers.key_full.at[stage]", "self.barriers.value_full.at[stage]", "self.query_full.at[query_place]"],
)
def test_a_wait_that_is_left_out_is_found(barrier, call, monkeypatch):
    set_layout(monkeypatch, num_ctas=1)
    changed = mutant(lean_compute, f"plgpu.barrier_wait({barrier})")
    monkeypatch.setattr(lean_compute, "RunCompute", changed.RunCompute)
    monkeypatch.setattr(lean_compute, "LeanStages", changed.LeanStages)
    monkeypatch.setattr(lean_kernel, "lean_attention", mutant(lean_kernel, None).lean_attention)
    assert has_race(call)


WIDE = Call(kv_heads=3, queries=8, group=8, head_dim=80)  # so many columns that one query is on its way


@pytest.mark.parametrize(
    "barrier, call",
    [("key_free.at[stage]", Call(kv_heads=3)), ("value_free.at[stage]", Call(kv_heads=3)),
     ("query_free.at[query_place]", WIDE)],
)  # fmt: skip
def test_a_wait_that_is_left_out_is_found_where_tiles_are_moved(barrier, call, monkeypatch):
    set_layout(monkeypatch, num_ctas=2)
    leave_out_of_moving(barrier, monkeypatch)
    assert has_race(call, or_is_unawaited=True)  # a run ends within an output tile


def test_a_wait_that_is_left_out_is_found_where_two_queries_are_on_their_way(monkeypatch):
    """An output tile of one KV tile waits for its query anyway, so no wait for its K and V is needed by itself."""
    set_layout(monkeypatch, num_ctas=1)
    leave_out_of_moving("query_free.at[query_place]", monkeypatch)
    assert has_race(SHORT_OUTPUT_TILES, or_is_unawaited=True)


def test_a_barrier_that_does_not_wait_for_all_parts_of_a_tile_is_found(monkeypatch):
    arrivals = kv_parts.num_arrivals
    monkeypatch.setattr(kv_parts, "num_arrivals", lambda *args: arrivals(*args) - 1)
    assert has_race(Call(slots=67), or_is_unawaited=True)


def leave_out_of_moving(barrier: str, monkeypatch):
    """Leaves out a wait of the moving warpgroup.

    It then overwrites what others read, or fills a place twice before they look, whichever thread is ahead.
    """
    monkeypatch.setattr(lean_moves, "move_tiles", mutant(lean_moves, f"plgpu.barrier_wait({barrier})").move_tiles)
    changed = mutant(lean_kernel, None)
    monkeypatch.setattr(lean_kernel, "lean_attention", changed.lean_attention)


STREAMS = Call(kv_heads=3, queries=8, group=8, slots=256, batch=2, options={"is_causal": True})
SHORT_STREAMS = Call(kv_heads=3, queries=8, group=8, slots=64, batch=2, options={"is_causal": True})


@pytest.mark.parametrize("call", [Call(queries=40, kv_heads=1), STREAMS], ids=["many", "streams"])
@pytest.mark.parametrize(
    "barrier", ["key_full.at[stage]", "value_full.at[stage]", "query_full.at[place * self._halves + half]"]
)
def test_a_wait_that_is_left_out_is_found_where_queries_are_rows(barrier, call, monkeypatch):
    set_layout(monkeypatch, num_ctas=1 if call is not STREAMS else 2)
    monkeypatch.setattr(tall_cta, "TallCta", mutant(tall_cta, f"plgpu.barrier_wait(self.{barrier})").TallCta)
    monkeypatch.setattr(tall_kernel, "tall_attention", mutant(tall_kernel, None).tall_attention)
    assert has_race(call, or_is_unawaited=call is STREAMS and barrier.startswith("query"))


@pytest.mark.parametrize(
    "barrier, call",
    [
        ("key_free.at[stage]", STREAMS),
        ("value_free.at[stage]", STREAMS),
        ("query_free.at[query_place]", SHORT_STREAMS),  # otherwise a KV tile waits for what the query does
    ],
)
def test_a_wait_that_is_left_out_is_found_where_streams_move(barrier, call, monkeypatch):
    set_layout(monkeypatch, num_ctas=2)
    leave_out_of_moving(barrier, monkeypatch)
    monkeypatch.setattr(tall_cta, "TallCta", mutant(tall_cta, None).TallCta)
    monkeypatch.setattr(tall_kernel, "tall_attention", mutant(tall_kernel, None).tall_attention)
    assert has_race(call, or_is_unawaited=True)


def test_a_wait_that_is_left_out_is_found_where_warpgroups_merge(monkeypatch):
    set_layout(monkeypatch)
    changed = mutant(lean_merge, "plgpu.barrier_wait(written)")
    monkeypatch.setattr(lean_merge, "fold_partials", changed.fold_partials)
    monkeypatch.setattr(lean_kernel, "lean_attention", mutant(lean_kernel, None).lean_attention)
    assert has_race(Call(kv_heads=1, slots=1024), kernel=1)  # five partials, more than one warpgroup reads at once
