"""The lean kernel in Mosaic GPU's interpreter, against the oracle."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_attention, assert_same_bits
from lean_cases import HEAD_SCALES, Call, Exchanged, MergedWith, thorough
from lean_interpreter import check, interpreted, interpreter, needs_interpreter, set_layout

from tree_attn.kernels import lean as lean_kernel
from tree_attn.kernels import lean_call, lean_compute, lean_layout
from tree_attn.kernels import tall as tall_kernel

pytestmark = [needs_interpreter, pytest.mark.usefixtures("small_layout")]
SINKS = {"sinks": np.array([0.5, -1.0, 30.0, 0.0], np.float32)}
CAUSAL, WINDOW = {"is_causal": True}, {"local_window_size": (70, 0)}
RAGGED = (200, 0, 77, 1)  # an empty sequence, and lengths that no tile divides
FLOAT8 = {"stored_dtype": "float8_e4m3fn", "options": HEAD_SCALES}
FLOAT8_CAUSAL = {"stored_dtype": "float8_e4m3fn", "options": CAUSAL | {"logits_soft_cap": 2.0}}
SINKS_OF_TWO = {"sinks": np.array([0.5, -1.0], np.float32)}
CALLS = [
    Call(group=4),
    Call(queries=5, group=16, kv_heads=1, slots=192, head_dim=256, options=CAUSAL, lengths=(100,)),  # three blocks
    Call(
        queries=7, group=6, kv_heads=1, head_dim=128, options=CAUSAL, lengths=(250, 0)
    ),  # 42 columns, copied by threads
    Call(queries=2, group=3, head_dim=96, options=CAUSAL | WINDOW, lengths=(130, 3)),  # fewer than a copy moves
    Call(slots=200, options={"logits_soft_cap": 2.0}, logit_size=4.0),  # a last tile in part, known when compiling
    Call(options=WINDOW | SINKS, group=2, lengths=(200, 0)),
    Call(**FLOAT8, head_dim=80, dtype="float16", slots=192, group=3),
    Call(queries=5, group=8, kv_heads=1, head_dim=128, lengths=(150,), slots=192, **FLOAT8_CAUSAL),  # two blocks
    Call(**FLOAT8, layout="packed", lengths=RAGGED, group=3, head_dim=128),
    Call(layout="packed", lengths=(70, 2, 129), queries=3, options=CAUSAL | {"local_window_size": (50, 0)}, slots=192),
    # Pages that fill a KV tile together, some of which are beyond the table's end, or of no sequence.
    *(
        Call(layout="paged", page=page, lengths=(70, 0, 129, 16), slots=160, **options)
        for page, options in (
            (16, {"queries": 3, "options": CAUSAL | {"local_window_size": (50, 0)}}),
            (32, {"head_dim": 256, "group": 2}),
        )
    ),
    Call(layout="packed", lengths=(0, 0, 9, 0), slots=64, options=SINKS, group=2),
    # Queries before the first position see no key, whatever their window has at its right.
    Call(layout="packed", lengths=(2, 0, 70), slots=192, queries=5, options={"local_window_size": (None, 1)}),
    # Old keys are read before the query is.
    Call(lengths=(200, 0, 3), slots=203, queries=3, options=CAUSAL, is_early=True),
]
MANY = [  # queries, which are then rows of the tensor core
    Call(queries=12, group=3, slots=192, head_dim=128, dtype="float16", options=HEAD_SCALES),
    Call(layout="paged", queries=40, kv_heads=1, lengths=(70, 0, 129), slots=192),
    Call(queries=40, kv_heads=1, lengths=(100,), options={"logits_soft_cap": 1e6}),
    Call(queries=20, slots=192, head_dim=256, options=SINKS | {"scale": -0.1}, group=2),
    # Queries of several heads are read in place: an output tile has 128 or 16 of each head of a group, or 32.
    Call(queries=130, slots=192, kv_heads=3, lengths=(0, 150)),
    Call(queries=9, slots=192, group=16, lengths=(3, 192)),  # not 16
    Call(layout="packed", queries=11, group=3, head_dim=128, lengths=(90, 0, 70), slots=192, logit_size=1e4),
    # Few queries, which have keys of their own.
    Call(queries=8, group=16, kv_heads=1, slots=320, head_dim=128, options=CAUSAL),
    Call(queries=8, group=7, kv_heads=1, slots=320, options=CAUSAL | WINDOW, lengths=(300, 130), logit_size=1e4),
    Call(layout="paged", page=16, queries=6, group=10, kv_heads=1, slots=320, lengths=(0, 300), options=CAUSAL),
    # Of several KV heads.
    Call(queries=5, group=11, kv_heads=3, slots=203, dtype="float16", options=CAUSAL, lengths=(200, 5)),
    # In columns too.
    Call(queries=30, slots=192, head_dim=80),
]
MORE = [
    Call(head_dim=80, lengths=(190, 64), slots=192, dtype="float16"),
    Call(queries=5, group=3, options=CAUSAL, lengths=(250,)),
    Call(logit_size=1e4, lengths=(200, 13)),
    Call(**FLOAT8, layout="paged", page=16, lengths=(70, 0, 129), slots=160, head_dim=128),
    Call(lengths=(100,), options={"logits_soft_cap": 1e6}),
    Call(queries=8, group=8, slots=512, head_dim=128, options=CAUSAL, lengths=(450, 0, 3)),
    Call(slots=200, is_early=True),
    Call(**FLOAT8, lengths=(200, 70), is_early=True),
    Call(lengths=(250, 130), options=WINDOW, group=4, is_early=True),
    Call(head_dim=96, lengths=(130, 0), slots=192, group=3),
    Call(head_dim=256, lengths=(100,), slots=192, group=3, dtype="float16"),
    Call(**FLOAT8, lengths=(200, 70)),
    Call(queries=8, group=4, options=CAUSAL | WINDOW, lengths=(130, 3), head_dim=128, kv_heads=1),
    Call(queries=70, group=2, slots=200, lengths=(150, 0)),
    Call(queries=40, kv_heads=1, slots=192, lengths=(100,), logit_size=1e4, options={"logits_soft_cap": 2.0}),
    Call(queries=40, slots=192, group=4, head_dim=128, lengths=(100,)),
    Call(queries=7, group=8, kv_heads=1, slots=512, head_dim=128, options=CAUSAL, lengths=(450, 0, 3)),
    Call(queries=5, group=11, kv_heads=1, slots=507, dtype="float16", options=CAUSAL, lengths=(500, 5)),
    Call(
        layout="packed", queries=7, group=16, slots=320, lengths=(0, 300, 20), options=CAUSAL | WINDOW, logit_size=1e4
    ),
    Call(queries=20, slots=192, kv_heads=3, lengths=(100, 0)),
    Call(layout="paged", page=32, lengths=(70, 0, 129, 16), slots=160, group=3, head_dim=80, dtype="float16"),
    Call(**FLOAT8, layout="paged", page=32, lengths=(70, 0, 129), slots=160, head_dim=128),
    *(
        Call(layout=layout, queries=6, group=10, kv_heads=1, slots=320, lengths=(0, 300), options=CAUSAL)
        for layout in ("packed", "paged")
    ),
    Call(lengths=(200, 0), kv_heads=1, stored_dtype="float8_e4m3fn", options=WINDOW | SINKS_OF_TWO, group=2),
    Call(queries=10, group=3, lengths=(150, 0), slots=192, **FLOAT8),  # many queries, which are columns still
    Call(head_dim=128, lengths=(250,), group=16),
    Call(**FLOAT8, head_dim=256, slots=192),
    Call(**FLOAT8, layout="paged", lengths=RAGGED, group=3, head_dim=128),
    Call(layout="paged", lengths=(70, 2, 129), queries=3, options=CAUSAL | {"local_window_size": (50, 0)}, slots=192),
    Call(
        layout="paged", page=16, head_dim=128, queries=7, group=6, kv_heads=1, slots=160, lengths=(70, 0, 129, 16),
        options=CAUSAL,
    ),
    Call(lengths=(2, 0, 70), slots=192, queries=5, options={"local_window_size": (4, 1)}),
    Call(queries=40, group=4, kv_heads=1),
    Call(layout="packed", queries=40, kv_heads=1, lengths=(70, 0, 129), slots=192),
    Call(queries=9, slots=192, group=8, lengths=(3, 192), logit_size=1e4),
]  # fmt: skip
WHOLE = [  # output tiles that five CTAs share evenly
    Call(batch=5, slots=128, group=2, head_dim=80, options=SINKS | {"logits_soft_cap": 2.0}),
    Call(
        batch=5, slots=72, kv_heads=3, queries=8, group=4, head_dim=128, dtype="float16"
    ),  # three output tiles per CTA
    # One KV tile holds a sequence whatever its length.
    Call(lengths=(40, 0, 9, 33, 1), slots=40, head_dim=128, group=2, logit_size=1e4),
    Call(lengths=(64, 3), slots=64, queries=3, options=CAUSAL | {"local_window_size": (20, 0)} | FLOAT8["options"]),
    # Only the device knows the lengths, but output tiles are short, or many for their length.
    Call(layout="paged", lengths=(120, 0, 31), slots=128, group=3, stored_dtype="float8_e4m3fn"),
    Call(lengths=(100, 128), slots=128, queries=40, kv_heads=1),
    Call(lengths=(100, 3), slots=128, queries=7, group=8, options=CAUSAL),
]
MORE_WHOLE = [
    Call(lengths=(128, 0, 70, 64, 100), slots=128, group=2, head_dim=80),
    Call(batch=5, slots=64, head_dim=96, group=16, **FLOAT8),
    Call(lengths=(192, 0, 129, 64, 1, 128, 70, 192), slots=192, kv_heads=4),
    Call(batch=5, slots=64, head_dim=256, logit_size=1e4),
    Call(batch=5, slots=128, kv_heads=1, queries=30, group=2),
    Call(layout="paged", lengths=(64, 0, 31), slots=64, group=3, stored_dtype="float8_e4m3fn"),
    Call(lengths=(56, 0), slots=56, queries=40, kv_heads=1),
    Call(lengths=(65, 3, 128), slots=128, queries=3, options=CAUSAL | FLOAT8["options"]),
    Call(lengths=(100, 128), slots=128, queries=11, group=8),
    Call(lengths=(100, 128), slots=128, queries=12, head_dim=80),
]


@pytest.mark.parametrize("call", CALLS + MANY + thorough(MORE), ids=str)
def test_it_is_exact_and_has_no_race(call):
    check(call)


@pytest.mark.usefixtures("fresh_traces")
@pytest.mark.parametrize(
    "call",
    [
        Call(queries=5, group=7, head_dim=128, slots=203, lengths=(200, 3), options=CAUSAL),
        Call(
            layout="paged", page=16, queries=6, group=6, slots=192, lengths=(190, 2), dtype="float16",
            options=CAUSAL | WINDOW,
        ),
    ],
    ids=str,
)  # fmt: skip
def test_up_to_48_columns_of_few_queries_are_rows_where_much_is_read(call, monkeypatch):
    monkeypatch.setattr(lean_layout, "MIN_KV_TILES_OF_ROWS", 0)
    check(call)


OF_PAGES = list(
    itertools.product(
        [((120, 190), 192), ((41, 64), 64)],  # and one KV tile
        [
            {"group": 4},
            {"group": 4, "head_dim": 128, "stored_dtype": "float8_e4m3fn"},
            {"queries": 8, "group": 8, "options": CAUSAL},
        ],
        [16, 32, 64],
    )
)


# Every fourth one: so each of the three comes with some of the others.
@pytest.mark.parametrize(
    "lengths, options, page", OF_PAGES[::4] + thorough([x for i, x in enumerate(OF_PAGES) if i % 4]), ids=str
)
def test_pages_before_a_window_are_not_read(lengths, options, page):
    lengths, slots = lengths
    options = {"options": {}} | options
    call = Call(
        layout="paged", page=page, kv_heads=1, slots=slots, lengths=lengths,
        **options | {"options": options["options"] | {"local_window_size": (20, 0)}},
    )  # fmt: skip
    query, key, value, table, lengths = call.inputs()
    for sequence, length in enumerate(call.valid):
        before = (length - call.queries - 20) // page  # pages of which no query sees a key
        key, value = (x.at[table[sequence, :before]].set(np.nan) for x in (key, value))
    with interpreter():
        state = jax.jit(call.run)(query, key, value, table, lengths)
    assert_attention(state, *call.arrays(), key_value_seq_lengths=np.array(call.valid), **call.options)


@pytest.mark.usefixtures("fresh_traces")
@pytest.mark.parametrize("num_ctas, grain", [(8, 16), (2, 8)], ids=["few of a CTA", "many of a CTA"])
def test_a_short_output_tile_reads_little_beyond_the_last_visible_slot(num_ctas, grain, monkeypatch):
    """The rest may be memory that was never written."""
    set_layout(monkeypatch, num_ctas=num_ctas)
    mark = 2.0**100  # of values that are not to be read; zeros stand in place of others, for no copy writes there

    def zero_unmarked(values, transforms, span, first_slot, shape, *, commits):
        slots = first_slot + jnp.arange(values.shape[0])[:, None]
        is_near = slots < -(-jnp.maximum(span[1], 1) // grain) * grain
        unread = jnp.where(values[...] == mark, jnp.nan, 0)
        values[...] = jnp.where(is_near, values[...], unread).astype(values.dtype)

    monkeypatch.setattr(lean_compute, "zero_garbage", zero_unmarked)
    call = Call(lengths=(3, 20, 0, 64), slots=72, head_dim=128)
    query, key, value = call.arrays()
    lengths = np.array(call.lengths)
    is_far = (np.arange(72)[None, :] >= -(-np.maximum(call.lengths, 1)[:, None] // grain) * grain)[..., None, None]
    unreadable = jnp.where(is_far, jnp.nan, key), jnp.where(is_far, mark, value)
    with interpreter():
        state = jax.jit(call.run)(query, *unreadable, lengths)
    assert_attention(state, query, key, value, key_value_seq_lengths=lengths)


@pytest.mark.parametrize(
    "call", [Call(layout="packed", lengths=(70, 2, 49), group=3), Call(layout="packed", lengths=(7, 90, 3), queries=40)]
)
def test_a_packed_sequence_is_not_reached_by_what_its_neighbours_hold(call):
    """NaN in their keys and values shows in both of their own results."""
    query, key, value, offsets = call.inputs()
    is_other = (np.arange(key.shape[0]) < offsets[1]) | (np.arange(key.shape[0]) >= offsets[2])
    key, value = (jnp.where(is_other[:, None, None], jnp.nan, x).astype(x.dtype) for x in (key, value))
    with interpreter():
        out, lse = jax.jit(call.run)(query, key, value, offsets)
    of_sequence = lambda *arrays: [x[1:2] for x in arrays]
    lengths = {"key_value_seq_lengths": np.array(call.lengths[1:2])}
    assert_attention(of_sequence(out, lse), *of_sequence(*call.arrays()), **lengths)
    assert all(np.isnan(x[0]).all() and np.isnan(x[2]).all() for x in (out, lse))


@pytest.mark.parametrize("call", WHOLE + thorough(MORE_WHOLE), ids=str)
def test_output_tiles_that_no_run_cuts_need_no_merge(call):
    check(call, num_kernels=1)


CUT = [  # more output tiles than the five CTAs: runs hold some whole, and cut others once or twice
    Call(lengths=(250, 0, 70, 180, 3), kv_heads=3, logit_size=1e4),
    Call(layout="packed", lengths=(1000, 2, 129, 30), slots=1024, kv_heads=2, group=3),
    Call(layout="paged", lengths=(500, 64, 0), slots=512, kv_heads=2, head_dim=128),
    # Few queries, as rows in two streams.
    Call(lengths=(500, 60, 3), slots=512, queries=7, group=8, head_dim=128, options=CAUSAL),
    Call(lengths=(600, 60, 3), slots=640, queries=40, group=2),  # many queries
]
MORE_CUT = [
    Call(lengths=(250, 0, 70, 180, 3), queries=3, group=3, options=CAUSAL),  # as columns
    Call(lengths=(500, 60), slots=512, kv_heads=1, queries=10, group=3),  # few output tiles, one of them uncut
    Call(batch=4, slots=192, kv_heads=3, group=2),
    Call(lengths=(250, 0, 70, 180, 3), kv_heads=3, stored_dtype="float8_e4m3fn"),
    Call(lengths=(250, 0, 70, 180, 3), queries=5, group=8, head_dim=256, options=CAUSAL),  # in two blocks
    Call(lengths=(600, 60, 3), slots=640, queries=7, group=8, head_dim=128, options=CAUSAL),  # rows in half a block
]


@pytest.mark.parametrize("call", CUT + thorough(MORE_CUT), ids=str)
def test_output_tiles_that_runs_cut_are_merged_beside_others(call):
    check(call)


@pytest.mark.parametrize(
    "call, num_ctas",
    [
        (CUT[0], 5),
        (CUT[2], 6),
        (Call(lengths=(190, 250), kv_heads=2), 8),  # 1, 3, 1, 2, 2 lanes
        # Few queries as rows, in two streams, of which one has no run.
        (
            Call(layout="paged", page=16, lengths=(250, 70), slots=320, queries=8, group=8, kv_heads=3, options=CAUSAL),
            13,
        ),
        *thorough(
            [
                (CUT[0], 6),
                (CUT[1], 5),
                (Call(lengths=(250, 0, 70, 180, 3), slots=320, queries=8, group=8, options=CAUSAL), 5),
                (Call(lengths=(650, 70, 0), slots=700, queries=8, group=16, head_dim=128, options=CAUSAL), 5),  # blocks
            ]
        ),
    ],
    ids=str,
)
@pytest.mark.usefixtures("fresh_traces")
def test_output_tiles_that_the_schedule_leaves_whole_are_written_where_others_may_be_cut(call, num_ctas, monkeypatch):
    """Only the device knows whether runs cut them. So the kernel that merges is launched, and has nothing to do."""
    set_layout(monkeypatch, merge_kv_tiles=1000, num_ctas=num_ctas)
    kernel = tall_kernel if call.are_rows else lean_kernel
    merge, garbage = kernel.merge_cut, lambda partials: [jnp.full_like(x, jnp.nan) for x in partials]
    monkeypatch.setattr(kernel, "merge_cut", lambda partials, *rest: merge(garbage(partials), *rest))
    check(call, num_kernels=2)


@pytest.mark.parametrize(
    "lengths, options",
    [
        (None, {}),
        ((250, 70), {"queries": 8, "group": 7}),
        *thorough(
            [
                ((250, 70), {"queries": 3, "group": 2}),
                (None, {"queries": 3, "group": 2}),
                (None, {"queries": 8, "group": 7}),
                ((250, 70), {}),
            ]
        ),
    ],
    ids=str,
)
def test_output_tiles_that_runs_cut_are_merged_under_vmap_too(lengths, options):
    call = Call(batch=2, lengths=lengths, kv_heads=3, **options)
    query, key, value, *rest = call.inputs()
    both = [jnp.stack([x, x * 0.5]) for x in (query, key, value)]
    with interpreter():
        states = jax.jit(jax.vmap(call.run, in_axes=(0, 0, 0, *[None] * len(rest))))(*both, *rest)
    for i, arrays in enumerate(zip(*both)):
        options = {} if lengths is None else {"key_value_seq_lengths": np.array(lengths)}
        assert_attention([x[i] for x in jax.tree.leaves(states)], *(jnp.nan_to_num(x) for x in arrays), **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"queries": 8, "group": 8, "options": CAUSAL},
        {"queries": 8, "group": 16, "options": CAUSAL},
        {"queries": 40},
    ],
    ids=["columns", "streams", "rows", "many"],
)
@pytest.mark.usefixtures("fresh_traces")
def test_only_output_tiles_that_runs_cut_wait_for_the_merge(options, monkeypatch):
    call = Call(lengths=(60, 500), slots=512, kv_heads=1, head_dim=128, **options)  # of one KV tile, and of eight
    kernel = tall_kernel if call.are_rows else lean_kernel
    monkeypatch.setattr(kernel, "merge_cut", lambda partials, written, *rest: written)
    state = interpreted(call, num_kernels=1)
    expected = [x[:1] for x in call.arrays()]
    assert_attention([x[:1] for x in state], *expected, key_value_seq_lengths=np.array([60]), **call.options)
    with pytest.raises(AssertionError):
        assert_attention(state, *call.arrays(), key_value_seq_lengths=np.array(call.lengths), **call.options)


@pytest.mark.parametrize(
    "queries, options, in_kernel",
    [
        (70, {"head_dim": 256}, True),
        (70, {"first": 64}, False),  # one KV tile: no output tile is cut, and no merge follows
        (72, {}, True),
        (12, {"group": 1}, False),
        (16, {"group": 1}, True),
    ],
)
def test_a_state_that_would_have_to_be_padded_is_merged_by_xla(queries, options, in_kernel, monkeypatch):
    """Query columns would have to be; query rows come in any number, where there is a merge in a kernel."""
    laid_out, layout = [], lean_call.lse_to_kernel_layout
    monkeypatch.setattr(lean_call, "lse_to_kernel_layout", lambda *args: laid_out.append(args) or layout(*args))
    call = MergedWith(queries=queries, **{"group": 2} | options)
    jax.eval_shape(call.run, *call.inputs())
    assert bool(laid_out) == in_kernel


@pytest.mark.parametrize(
    "call",
    [
        MergedWith(
            queries=10, group=4, kv_heads=1, lengths=(250, 100, 0), head_dim=128
        ),  # of two the other state is empty
        MergedWith(queries=136, group=4, lengths=(250, 0), logit_size=1e4),
        MergedWith(queries=32, group=3, head_dim=128),  # three heads do not share a block's rows
        MergedWith(queries=58, kv_heads=3, head_dim=128, slots=200),  # 8 does not divide them: threads copy rows
        MergedWith(queries=65, kv_heads=3),  # rows in both halves of a block
        MergedWith(queries=10, kv_heads=3, head_dim=80, lengths=(250, 100, 0), logit_size=1e4),
        MergedWith(group=2),  # few queries, which XLA merges
        *thorough(
            [
                MergedWith(queries=64, kv_heads=3),  # rows in one half of a block
                MergedWith(queries=16, group=2, dtype="float16"),
                MergedWith(queries=40, group=4, kv_heads=1),
                MergedWith(queries=70, group=2, lengths=(250, 100)),  # 8 does not divide them: threads copy rows
                MergedWith(queries=72, group=2, lengths=(250, 100)),  # two KV heads
                MergedWith(queries=16, lengths=(250, 100)),  # in columns
                MergedWith(queries=58, kv_heads=3, head_dim=256, slots=200),
                MergedWith(queries=133, group=1, dtype="float16"),
                MergedWith(queries=9, group=8, head_dim=128, lengths=(250, 0), logit_size=1e4),
            ]
        ),
    ],
    ids=str,
)
def test_it_merges_with_a_state_over_other_keys(call):
    check(call)


@pytest.mark.parametrize(
    "call, num_kernels, requested",
    [
        (Exchanged(group=3), 2, ((2, 3, 64), 64)),
        (Exchanged(head_dim=80, lengths=RAGGED, logit_size=1e4), 2, ((8, 1, 80), 128)),
        (Exchanged(queries=5, group=3, kv_heads=1, lengths=(250, 0), options=CAUSAL), 2, ((2, 15, 64), 64)),
        (Exchanged(queries=8, group=16, kv_heads=1, slots=192, head_dim=128), 2, None),  # wide: registers would not do
        (Exchanged(batch=5, slots=128), 1, None),  # there are no partial states: whole output tiles
        (Exchanged(queries=40, group=4, kv_heads=1), 2, None),  # the many-query kernel's, which it merges itself
    ],
    ids=str,
)
def test_an_exchange_merges_partial_states_or_else_the_state(call, num_kernels, requested):
    Exchanged.requests.clear()
    check(call, num_kernels)
    assert Exchanged.requests == ({requested} if requested else set())


@pytest.mark.parametrize(
    "kind, layout",
    [
        ("padded", {"num_ctas": 40}),  # more CTAs than KV tiles
        ("packed", {"num_ctas": 1}),  # one CTA for all output tiles
        ("packed", {"block_kv": 128, "num_ctas": 3}),
        *thorough(
            [
                ("packed", {"num_stages": 1}),
                ("padded", {"num_stages": 1}),
                ("padded", {"num_stages": 3}),
            ]
        ),
    ],
    ids=str,
)
def test_no_layout_changes_the_result(kind, layout, monkeypatch):
    set_layout(monkeypatch, **layout)
    check(Call(layout=kind, lengths=(200, 0, 77)))


LANES = {"num_ctas": 6}  # of two heads, or of three: as many lanes, with three or two CTAs each


@pytest.mark.parametrize(
    "call, num_kernels",
    [
        (Call(slots=512, kv_heads=3), 2),  # all keys: the schedule is static
        (Call(lengths=(500, 0, 70, 180, 3), kv_heads=3, logit_size=1e4), 2),  # a merge for each run
        (Call(queries=40, slots=320, lengths=(300, 70)), 2),  # rows of queries
        (MergedWith(group=2, lengths=(500, 100)), None),
        (Exchanged(lengths=(500, 77, 0), slots=512, group=3), 2),
        *thorough(
            [
                (Call(layout="packed", lengths=(300, 2, 129, 30), slots=512, kv_heads=2, group=3), 2),
                (Call(lengths=(500, 60), slots=512, queries=10, group=3), 2),  # a merge for each output tile
                (Call(lengths=(192, 0, 129, 64, 1, 128, 70, 192), slots=192, kv_heads=2), 2),
                (Call(layout="paged", lengths=(300, 64, 0), slots=320, kv_heads=2, head_dim=128), 2),
            ]
        ),
    ],
    ids=str,
)
def test_lanes_are_exact_and_have_no_race(call, num_kernels, monkeypatch):
    set_layout(monkeypatch, **LANES)
    check(call, *([] if num_kernels is None else [num_kernels]))


def test_two_runs_agree_to_the_bit():
    call = Call(lengths=(200, 0, 77))
    assert_same_bits(interpreted(call), interpreted(call))
