"""The layout of the lean kernel: valid whatever the shape, and the table's where it has an entry."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import pytest

from tree_attn.kernels import lean, lean_merge, tuning
from tree_attn.kernels.lean_call import _keeps_output_tiles_whole, column_blocks, schedule_tables
from tree_attn.kernels.lean_layout import (
    ARE_WHOLE,
    FIRST_SLOT,
    LeanConfig,
    LeanShape,
    has_whole_output_tiles,
    lanes,
    max_smem_bytes,
    padding_bytes,
    partial_spans,
)
from tree_attn.kernels.registers import RESERVED_SMEM_BYTES
from tree_attn.kernels.schedule import lean_schedule
from tree_attn.kernels.targets import AMPERE, HOPPER, TARGETS
from tree_attn.kernels.tuning import even_ctas, formula, lean_config, table_key, write_table

SHAPE = LeanShape(
    batch=2,
    num_kv_heads=8,
    col_blocks=1,
    cols=8,
    head_dim=128,
    scale=1.0,
    logits_soft_cap=None,
    mask="span",
    num_slots=4096,
    dtype=jnp.dtype("bfloat16"),
    key_dtype=jnp.dtype("bfloat16"),
)


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Gives the test a table of its own, and a device named Testla."""
    monkeypatch.setattr(tuning, "TABLE", tmp_path / "tuning.json")
    monkeypatch.setattr(tuning, "device_kind", lambda: "Testla")
    tuning._table.cache_clear()
    yield tuning.TABLE
    tuning._table.cache_clear()


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("stored", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("capability", ["8.0", "8.9", "9.0"])
def test_by_formula_all_ctas_fit_in_shared_memory_at_once(head_dim, stored, is_static, capability):
    target = TARGETS[capability]
    max_cols = column_blocks(128, head_dim, stored != "bfloat16", target)[1]
    for cols, batch, sms, slots in itertools.product((8, max_cols), (1, 8, 300), (78, 132), (64, 4096)):
        shape = SHAPE.replace(
            head_dim=head_dim, key_dtype=jnp.dtype(stored), cols=cols, batch=batch, num_slots=slots, target=target
        )
        config = formula(shape, sms, is_static)
        ctas_per_sm = -(-config.num_ctas // sms)
        assert ctas_per_sm * (max_smem_bytes(shape, config) + RESERVED_SMEM_BYTES) <= target.smem_bytes_per_sm


@pytest.mark.parametrize(
    "head_dim, batch, slots, layout",
    [
        (128, 8, 400, (2, 64, 2)),
        (128, 64, 4096, (2, 128, 2)),
        (256, 60, 634, (1, 64, 2)),
        (256, 60, 1200, (1, 128, 2)),
        (256, 300, 128, (1, 64, 4)),  # short, but many
    ],
)
def test_few_widened_keys_have_small_kv_tiles(head_dim, batch, slots, layout):
    heads = 32 if head_dim == 128 else 1 if batch == 60 else 4
    float8 = {"key_dtype": jnp.dtype("float8_e4m3fn"), "cols": 8, "head_dim": head_dim}
    config = formula(SHAPE.replace(batch=batch, num_kv_heads=heads, num_slots=slots, **float8), 132, is_static=False)
    assert (-(-config.num_ctas // 132), config.block_kv, config.num_stages) == layout


def test_other_gpus_keep_their_layouts_where_keys_are_few():
    """None of them timed another."""
    float8 = {"key_dtype": jnp.dtype("float8_e4m3fn"), "cols": 8, "head_dim": 128, "num_kv_heads": 32, "batch": 8}
    config = formula(SHAPE.replace(num_slots=150, target=AMPERE, **float8), 108, is_static=False)
    assert (config.block_kv, config.num_stages) == (128, 4)


def test_packed_keys_count_once():
    float8 = {"key_dtype": jnp.dtype("float8_e4m3fn"), "cols": 8, "head_dim": 128, "num_kv_heads": 32, "batch": 8}
    layouts = [
        formula(SHAPE.replace(num_slots=slots, is_packed=is_packed, **float8), 132, is_static=False)
        for is_packed, slots in ((False, 300), (True, 2400))
    ]
    assert [config.block_kv for config in layouts] == [64, 64]


@pytest.mark.parametrize("head_dim", [64, 80, 256])
@pytest.mark.parametrize("stored", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("target", [HOPPER, AMPERE], ids=["hopper", "ampere"])
def test_the_bound_on_shared_memory_holds_for_the_arrays_of_the_kernel(head_dim, stored, whole, target, monkeypatch):
    scratch = {}

    monkeypatch.setattr(lean.pl, "run_scoped", lambda body, **arrays: scratch.update(arrays))
    shape = SHAPE.replace(head_dim=head_dim, key_dtype=jnp.dtype(stored), whole_output_tiles=whole, target=target)
    config = LeanConfig()
    num_outputs = 2 if whole else 4
    query = jax.ShapeDtypeStruct((shape.num_output_tiles, shape.cols, head_dim), shape.dtype)
    lean._attend_runs(("sequences",), shape, config, None, query, *[None] * (3 + num_outputs))
    arrays = [x for name, x in scratch.items() if name.endswith("_smem") and name != "unused_smem"]
    allocated = sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in arrays)
    assert len(arrays) >= (6 if target is HOPPER else 5) and 0 < allocated <= max_smem_bytes(shape, config)


@pytest.mark.parametrize(
    "ctas_per_sm, head_dim, stages", [(1, 64, 2), (1, 128, 2), (2, 128, 2), (3, 64, 2), (1, 256, 3)]
)
def test_no_more_ctas_than_planned_fit_an_sm_where_kernels_begin_early(ctas_per_sm, head_dim, stages):
    """Early CTAs would meet on one SM, and leave another idle."""
    shape, config = SHAPE.replace(head_dim=head_dim), LeanConfig(num_stages=stages, num_ctas=132 * ctas_per_sm)
    padding = padding_bytes(shape, config, ctas_per_sm)
    smem_bytes = stages * config.block_kv * 2 * head_dim * 2 + padding
    assert ctas_per_sm * (max_smem_bytes(shape, config) + padding + RESERVED_SMEM_BYTES) <= HOPPER.smem_bytes_per_sm
    assert (ctas_per_sm + 1) * (smem_bytes + RESERVED_SMEM_BYTES) > HOPPER.smem_bytes_per_sm


@pytest.mark.parametrize(
    "output_tiles, ctas, of_sequences, of_heads",
    [(16, 264, 256, 256), (1, 264, 264, 264), (264, 264, 264, 264), (260, 132, 130, 130), (100, 132, 132, 125),
     (300, 264, 264, 240)],
)  # fmt: skip
def test_output_tiles_of_equal_length_are_cut_alike_where_that_costs_few_ctas(
    output_tiles, ctas, of_sequences, of_heads
):
    shape = SHAPE.replace(batch=output_tiles, num_kv_heads=1)
    assert even_ctas(shape, ctas, True) == of_sequences
    assert even_ctas(shape, ctas, False) == (ctas if output_tiles > 1 else of_sequences)
    one_sequence = SHAPE.replace(batch=1, num_kv_heads=output_tiles)  # all of one length, which only the device knows
    assert even_ctas(one_sequence, ctas, False) == of_heads


@pytest.mark.parametrize(
    "batch, heads, ctas, expected",
    [(1, 56, 132, 112), (7, 8, 132, 112), (4, 28, 132, 126), (1, 37, 132, 111), (1, 55, 132, 132), (1, 56, 264, 252)],
)  # 4 x 28 output tiles would not be cut: states of other keys are merged where they are
def test_one_cta_on_five_of_six_sms_suffices_where_output_tiles_are_cut_alike(batch, heads, ctas, expected):
    """The first is the layout of FlashDecoding's partition, which was measured to be faster than 126 CTAs."""
    shape = SHAPE.replace(batch=batch, num_kv_heads=heads, head_dim=64)
    assert even_ctas(shape, ctas, True) == expected


@pytest.mark.parametrize(
    "other", [{"head_dim": 128}, {"cols": 16}, {"key_dtype": jnp.dtype("float8_e4m3fn")}, {"target": AMPERE}], ids=str
)
def test_other_kernels_keep_nine_of_ten_ctas_where_output_tiles_are_cut_alike(other):
    narrow = SHAPE.replace(batch=1, num_kv_heads=56, head_dim=64)
    assert (even_ctas(narrow, 132, True), even_ctas(narrow.replace(**other), 132, True)) == (112, 126)


@pytest.mark.parametrize(
    "output_tiles, kv_tiles, is_whole",
    [(100, 4, True), (100, 5, False), (128, 4, True), (128, 6, False), (300, 3, True), (300, 4, False),
     (301, 3, False), (51, 3, True), (8, 313, False)],
)  # fmt: skip
def test_equal_output_tiles_are_left_whole_where_a_merge_would_take_longer(output_tiles, kv_tiles, is_whole):
    shape = SHAPE.replace(batch=output_tiles, num_kv_heads=1, num_slots=64 * kv_tiles)
    of = lambda ctas: has_whole_output_tiles(shape.replace(static_kv_tiles=kv_tiles), LeanConfig(num_ctas=ctas))
    assert of(even_ctas(shape, 264, True, 64)) == is_whole
    assert not of(even_ctas(shape, 264, True)), "a state of other keys is merged anyway"
    assert even_ctas(shape, 264, False, 64) == 264, "how long they are is not known"


@pytest.mark.parametrize(
    "heads, ctas, expected",
    [(8, 264, 8), (8, 132, 8), (32, 264, 32), (56, 132, 14), (12, 132, 12), (7, 132, 7), (1, 264, 1)],
)
def test_heads_that_are_cut_alike_are_as_many_as_keep_the_ctas_busy(heads, ctas, expected):
    shape = SHAPE.replace(batch=50, num_kv_heads=heads)
    config = LeanConfig(num_ctas=even_ctas(shape, ctas, False))
    assert lanes(shape, config) == expected and config.num_ctas >= 0.9 * ctas


@pytest.mark.parametrize(
    "slots, is_static, lengths",
    [(64, True, "short"), (65, True, "even"), (128, False, "short"), (129, False, "ragged")],
)
def test_output_tiles_are_short_where_none_is_cut(slots, is_static, lengths):
    """A schedule that is known when compiling may cut output tiles of two KV tiles."""
    assert f" {lengths} " in table_key(SHAPE.replace(num_slots=slots), 132, is_static)
    assert " short " not in table_key(SHAPE.replace(num_slots=64, is_packed=True), 132, is_static)


def test_an_entry_of_the_table_is_taken_and_others_stay(table):
    key = table_key(SHAPE, tuning.num_sms(), is_static=False)
    assert lean_config(SHAPE, is_static=False) == formula(SHAPE, tuning.num_sms(), is_static=False)
    write_table("Testla", {key: {"block_kv": 192, "num_stages": 5, "ctas_per_sm": 1}})
    write_table("Testla", {"another key": {"block_kv": 64, "num_stages": 2, "ctas_per_sm": 2}})
    expected = LeanConfig(block_kv=192, num_stages=5, num_ctas=even_ctas(SHAPE, tuning.num_sms(), False))
    assert lean_config(SHAPE, is_static=False) == expected
    assert lean_config(SHAPE, is_static=True) == formula(SHAPE, tuning.num_sms(), is_static=True)
    assert lean_config(SHAPE.replace(head_dim=64), is_static=False) != expected


def test_every_entry_shipped_is_a_layout():
    for entries in tuning._table().values():
        for key, entry in entries.items():
            assert "head_dim" in key and entry["ctas_per_sm"] in (1, 2, 3)
            LeanConfig(block_kv=entry["block_kv"], num_stages=entry["num_stages"])


@pytest.mark.parametrize("field, value", [("block_kv", 0), ("block_kv", 100), ("num_stages", 0), ("num_ctas", 0)])
def test_a_layout_that_cannot_be_is_named(field, value):
    with pytest.raises(ValueError, match=f"{field} must be .*{value}"):
        LeanConfig(**{field: value})


def test_a_layout_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        LeanConfig().block_kv = 128


@pytest.mark.parametrize("lengths, runs", [((4096, 4090), 32), ((4096, 2048), 33)])
def test_equal_lengths_are_cut_alike_though_only_the_device_knows_them(lengths, runs):
    starts, ends = jnp.zeros((2, 1), jnp.int32), jnp.array(lengths)[:, None]
    config = LeanConfig(block_kv=64, num_ctas=264)
    sequences, table = schedule_tables(starts, ends, SHAPE, config)
    spans = partial_spans(SHAPE, config, {"sequences": sequences})
    kv_tiles = [-(-length // 64) for length in lengths]  # of a lane: eight of them are cut alike
    counts = [sum(segment.output_tile == i for run in lean_schedule(kv_tiles, runs) for segment in run) for i in (0, 1)]
    assert int((table[:, 3] > 0).sum()) == runs
    assert (spans[:, 1] - spans[:, 0]).tolist() == 8 * [counts[0]] + 8 * [counts[1]]
    assert len(set(counts)) == 1 or runs == 33


@pytest.mark.parametrize(
    "lengths, leaves_whole, are_whole",
    [
        ((191, 300, 400), True, True),  # the longest has seven KV tiles, and a run that cuts has five
        ((191, 300, 400), False, False),
        ((191, 300, 4000), True, False),
        ((64, 64, 64), True, True),
    ],
)
def test_output_tiles_are_left_whole_where_a_merge_would_take_longer(lengths, leaves_whole, are_whole):
    starts, ends = jnp.zeros((3, 1), jnp.int32), jnp.array(lengths)[:, None]
    shape, config = SHAPE.replace(batch=3), LeanConfig(block_kv=64, num_ctas=24)
    sequences, runs = schedule_tables(starts, ends, shape, config, leaves_whole=leaves_whole)
    assert (sequences[:, ARE_WHOLE] == int(are_whole)).all()
    kv_tiles = [-(-length // 64) for length in lengths]
    if are_whole:
        assert runs[:, :4].tolist() == [[i, 0, 0, count] for i, count in enumerate(kv_tiles)]
    spans = partial_spans(shape, config, {"sequences": sequences})
    assert bool((spans[:, 1] - spans[:, 0]).max() == 1) == are_whole


@pytest.mark.parametrize("page_size, first_slot", [(None, 2272), (64, 2240)])
def test_a_window_is_read_from_where_it_begins(page_size, first_slot):
    """A KV tile of pages lies within one, and begins at a multiple of its size."""
    starts, ends = jnp.full((2, 1), 2276), jnp.full((2, 1), 2788)
    sequences, _ = schedule_tables(starts, ends, SHAPE.replace(page_size=page_size), LeanConfig(block_kv=64))
    assert sequences[:, FIRST_SLOT].tolist() == [first_slot] * 2


@pytest.mark.parametrize(
    "head_dim, cols, num_slots, block_kv",
    [(64, 24, 4096, 128), (64, 40, 4096, 128), (64, 48, 4096, 64), (128, 24, 4096, 64), (64, 24, 64, 64)],
)
def test_small_head_dims_of_one_cta_have_large_tiles(head_dim, cols, num_slots, block_kv):
    """One CTA of 64 keys of head dim 64 has too few bytes on their way: rows of tuning.jsonl, (1, 64, 2)."""
    shape = SHAPE.replace(head_dim=head_dim, cols=cols, num_slots=num_slots)
    config = formula(shape, 132, is_static=False)
    assert (config.block_kv, config.num_stages) == (block_kv, 2) and config.num_ctas <= 132


@pytest.mark.parametrize("batch, stages, ctas_per_sm", [(30, 2, 1), (200, 1, 2)])
def test_many_output_tiles_of_large_heads_have_two_ctas_of_one_stage(batch, stages, ctas_per_sm):
    shape = SHAPE.replace(head_dim=256, cols=8, batch=batch, num_slots=1024)
    config = formula(shape, 132, is_static=False)
    assert (config.num_stages, -(-config.num_ctas // 132)) == (stages, ctas_per_sm)


@pytest.mark.parametrize(
    "batch, slots, changes, ctas_per_sm",
    [(396, 256, {}, 3), (396, 257, {}, 2), (395, 256, {}, 2), (1, 128, {}, 3), (1, 128, {"head_dim": 256}, 1),
     (396, 256, {"key_dtype": jnp.dtype("float8_e4m3fn")}, 2)],
)  # fmt: skip
def test_many_short_output_tiles_have_three_ctas(batch, slots, changes, ctas_per_sm):
    shape = SHAPE.replace(batch=batch, num_slots=slots, **changes)
    config = formula(shape, 132, is_static=False, leaves_whole=True)
    assert -(-config.num_ctas // 132) == ctas_per_sm
    whole = shape.replace(whole_output_tiles=_keeps_output_tiles_whole(shape, config))
    assert ctas_per_sm * (max_smem_bytes(whole, config) + RESERVED_SMEM_BYTES) <= HOPPER.smem_bytes_per_sm


@pytest.mark.parametrize(
    "output_tiles, slots, changes, is_one_each",
    [(265, 1000, {}, True), (396, 8192, {}, True), (397, 1000, {}, False),
     (133, 1000, {}, True), (132, 1000, {}, False),
     (264, 8192, {}, True), (264, 8193, {}, False), (264, 512, {}, False), (200, 1000, {"head_dim": 64}, False),
     (300, 8193, {}, False), (300, 64, {}, False), (300, 1000, {"cols": 16}, False),
     (300, 1000, {"head_dim": 256}, False), (300, 1000, {"head_dim": 64}, True),
     (300, 1000, {"key_dtype": jnp.dtype("float8_e4m3fn")}, False)],
)  # fmt: skip
def test_ctas_of_an_sm_have_an_output_tile_each_where_fewer_are_too_few(output_tiles, slots, changes, is_one_each):
    shape = SHAPE.replace(batch=output_tiles, num_kv_heads=1, num_slots=slots, **changes)
    one_each, sms = LeanConfig(block_kv=64, num_stages=2, num_ctas=output_tiles), tuning.num_sms()
    assert tuning._one_each(shape, sms) == (one_each if is_one_each else None)
    expected = one_each if is_one_each else formula(shape, sms, is_static=True, leaves_whole=True)
    assert lean_config(shape, is_static=True, leaves_whole=True) == expected
    assert lean_config(shape, is_static=True) == formula(shape, sms, is_static=True), "a state of other keys is merged"
    of_lengths = formula(shape, sms, is_static=False, leaves_whole=True)
    assert lean_config(shape, is_static=False, leaves_whole=True) == of_lengths


@pytest.mark.parametrize(
    "batch, heads, slots, changes, num_ctas",
    [(181, 32, 1302, {}, 264), (12, 40, 20_000, {}, 260), (181, 16, 1302, {}, None), (8, 32, 1302, {}, None),
     (181, 32, 1302, {"head_dim": 64}, None), (181, 32, 1302, {"cols": 16}, None),
     (181, 32, 1302, {"is_packed": True}, None), (181, 32, 64, {}, None),
     (181, 32, 1302, {"key_dtype": jnp.dtype("float8_e4m3fn")}, None)],
)  # fmt: skip
def test_many_heads_have_two_ctas_of_an_sm(batch, heads, slots, changes, num_ctas, monkeypatch):
    monkeypatch.setattr(tuning, "device_kind", lambda: "NVIDIA H200")
    shape = SHAPE.replace(batch=batch, num_kv_heads=heads, num_slots=slots, **changes)
    expected = None if num_ctas is None else LeanConfig(block_kv=64, num_stages=2, num_ctas=num_ctas)
    for is_static in (True, False):
        assert tuning._many_heads(shape, 132, is_static) == expected
        assert expected in (None, lean_config(shape, is_static=is_static, leaves_whole=True))
        assert expected is None or lean_config(shape, is_static=is_static) != expected, "a state of others is merged"


@pytest.mark.parametrize(
    "output_tiles, cols, expected",
    [(8, 64, (4, 8)), (24, 48, (2, 8)), (66, 32, (1, 8)), (133, 8, (1, 8)), (7, 8, (4, 8))],
)
def test_all_ctas_of_a_merge_are_resident_at_once(output_tiles, cols, expected):
    """Each has 64 head dims of 8 query columns; those of four warpgroups have an SM for themselves."""
    shape = SHAPE.replace(batch=output_tiles, num_kv_heads=1, cols=cols)
    layout = lean_merge._merge_layout(shape, LeanConfig(num_ctas=132), {})
    assert layout == expected
