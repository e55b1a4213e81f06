"""The lean kernel, whose output tiles begin with the partial states of a prefix: exact, and without races."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lean_cases import AfterPrefix, thorough
from lean_interpreter import check, needs_interpreter

from tree_attn import PrefixLevel, attend, hydragen_decode
from tree_attn.kernels.lean_call import LeanCall, plan_call
from tree_attn.kernels.lean_layout import LeanConfig
from tree_attn.kernels.query_layout import query_slices

pytestmark = [needs_interpreter, pytest.mark.usefixtures("small_layout")]


@pytest.fixture
def runs_after(monkeypatch):
    """Yields the list of prefixes with whose states a kernel began."""
    run_after, found = LeanCall.run_after, []
    monkeypatch.setattr(
        LeanCall, "run_after", lambda suffix, prefix, *args: found.append(prefix) or run_after(suffix, prefix, *args)
    )
    return found


@pytest.mark.parametrize(
    "call, num_kernels",
    [
        # Rows of four heads in a block; runs cut output tiles, of which only the first part begins with the prefix.
        (AfterPrefix(batch=12, slots=448, group=4, head_dim=128), 3),
        # 8 rows of a sequence after those of another, some of them in the next block; a sequence without own keys.
        (AfterPrefix(lengths=(192, *range(193, 215)), slots=240, group=7, kv_heads=1, spare_slots=70), 2),
        # Two nodes, and two queries, the first of which does not see the last key.
        (
            AfterPrefix(
                lengths=tuple(range(200, 224)), slots=240, queries=2, group=2, kv_heads=1, nodes=2,
                options={"is_causal": True, "logits_soft_cap": 30.0},
            ),
            2,
        ),
        # Two nodes, whose keys are one KV tile each.
        (
            AfterPrefix(
                lengths=tuple(range(40, 60)), slots=90, first=40, spare_slots=20, group=4, nodes=2, kv_heads=1
            ),
            2,
        ),
        # Few queries are columns of the prefix's kernel, in two blocks.
        (AfterPrefix(batch=5, slots=420, first=400, group=13, kv_heads=1, spare_slots=70), 2),
        *thorough([(AfterPrefix(batch=3, slots=460, first=400, group=4, dtype="float16"), 2)]),
    ],
    ids=str,
)  # fmt: skip
def test_output_tiles_begin_with_a_prefixs_partial_states(call, num_kernels, runs_after):
    check(call, num_kernels)
    assert len(runs_after) == 1


@pytest.mark.parametrize(
    "call, num_kernels",
    [
        (AfterPrefix(batch=20, slots=200, group=4), 3),  # 40 short output tiles for five CTAs
        # Each head has rows of its own in a block, and sequences have some in two.
        (AfterPrefix(batch=12, slots=256, queries=5, group=4), 3),
        *thorough(
            [(AfterPrefix(batch=12, slots=256, group=4, options={"key_scale": np.array([0.3, 1.7], np.float32)}), 3)]
        ),
    ],
    ids=str,
)
def test_otherwise_the_prefixs_merge_takes_the_state_along(call, num_kernels, runs_after):
    check(call, num_kernels)
    assert not runs_after


def planned(batch, queries, kv_heads, group, slots, lengths=None):
    """Returns the plan of a call of heads of 128."""
    query = jax.ShapeDtypeStruct((batch, queries, kv_heads * group, 128), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((batch, slots, kv_heads, 128), jnp.bfloat16)
    spans = None if lengths is None else tuple(jnp.array(x, jnp.int32)[:, None] for x in (np.zeros(batch), lengths))
    config = LeanConfig(num_ctas=128, block_kv=128, num_stages=2)
    return plan_call(query, key, spans, num_slots=slots, scale=1.0, logits_soft_cap=None, config=config)


@pytest.mark.parametrize(
    "batch, slots, group, reason",
    [
        (128, 16384, 8, None),
        (16, 16384, 8, "longer than another launch takes"),  # 128 partial states for one block of rows
        (1000, 16384, 8, "short output tiles"),
        (9, 64, 8, None),
    ],
)
def test_a_kernel_begins_so_where_that_is_faster(batch, slots, group, reason):
    found = planned(batch, 1, 1, group, 128).why_not_after(planned(1, batch, 1, group, slots))
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(
    "sequences, has_lengths, is_merged", [(127, True, True), (127, False, False), (30, True, False)]
)
def test_output_tiles_of_unknown_lengths_do_not_read_in_many_rounds(sequences, has_lengths, is_merged):
    """A block of 127 rows has 8 partial states for each of 16 heads, of which a warpgroup reads four together."""
    lengths = np.linspace(10, 1051, sequences) if has_lengths else None
    found = planned(sequences, 1, 16, 1, 1051, lengths).why_not_after(planned(1, sequences, 16, 1, 5696))
    assert "in so many rounds" in found if is_merged else found is None


@pytest.mark.parametrize("slots, is_able", [(256, False), (600, True)])
def test_short_prefixes_of_given_lengths_have_results_and_no_partial_states(slots, is_able):
    found = planned(64, 1, 8, 4, 128).why_not_after(planned(2, 32, 8, 4, slots, lengths=[60, 190]))
    assert found is None if is_able else "no run cuts" in found


@pytest.mark.parametrize("queries", range(1, 9))
@pytest.mark.parametrize("group", [1, 2, 4, 5, 7, 8])
@pytest.mark.parametrize("kv_heads", [*thorough([1]), 2])
def test_rows_are_where_the_prefixs_kernel_has_them(kv_heads, group, queries):
    share = 41
    suffix, prefix = planned(share, queries, kv_heads, group, 128), planned(1, share * queries, kv_heads, group, 1000)
    if reason := suffix.why_not_after(prefix):
        assert queries in (3, 5, 6, 7) if "two blocks" in reason else queries * group > 32
        return
    states, shape = suffix._prefix(prefix), prefix.shape
    of_query, of_head = states.row_strides
    for sequence, query, head in itertools.product(range(share), range(queries), range(group)):
        output_tile, first = map(int, states.rows_of(sequence, 0))
        row = first + query * of_query + head * of_head
        if states.are_cut and row >= states.tokens:
            output_tile, row = output_tile + 1, row - states.tokens
        ((_, _, (_, rows, kernel_head)),) = query_slices(shape, output_tile, row, 1)
        token = sequence * queries + query
        expected = (token, head) if kernel_head.item() or shape.cols > shape.tokens else (token * group + head, 0)
        assert (int(rows.start), int(kernel_head)) == expected


def test_gradients_are_those_of_attention_to_all_keys(monkeypatch):
    """The kernels are stood in for by XLA: what is under test is the rule for gradients."""
    call = AfterPrefix(batch=12, slots=256, group=4)
    query, key, value = call.inputs()

    def of_all(suffix, prefix, prefix_arrays, *suffix_arrays):
        (_, *shared), (query, *rest) = prefix_arrays, suffix_arrays
        keys = [jnp.concatenate([jnp.repeat(x, 12, axis=0), y], axis=1) for x, y in zip(shared, rest)]
        return attend(query, *keys, implementation="xla")

    monkeypatch.setattr(LeanCall, "run_after", of_all)

    def loss(run, *arrays):
        out, lse = run(*arrays)
        return jnp.sum(out.astype(jnp.float32)) + jnp.sum(lse)

    def by_xla(query, key, value):
        level = PrefixLevel(key=key[:1, :192], value=value[:1, :192], sequences=(tuple(range(12)),))
        return hydragen_decode(query, [level], key[:, 192:], value[:, 192:], return_lse=True, implementation="xla")

    ours, xlas = (
        jax.grad(lambda *x, run=run: loss(run, *x), (0, 1, 2))(query, key, value) for run in (call.run, by_xla)
    )
    for x, y in zip(ours, xlas):
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), atol=2e-2, rtol=2e-2)
