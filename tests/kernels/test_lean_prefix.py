"""The lean kernel, whose output tiles begin with the partial states of a prefix: exact, and without races."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lean_cases import AfterPrefix
from lean_interpreter import check, needs_interpreter

from tree_attn import PrefixLevel, attend, hydragen_decode
from tree_attn.kernels.lean_call import LeanCall, plan_call
from tree_attn.kernels.lean_layout import LeanConfig

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
        # Few queries are columns of the prefix's kernel, in two blocks.
        (AfterPrefix(batch=5, slots=420, first=400, group=13, kv_heads=1, spare_slots=70), 2),
        (AfterPrefix(batch=3, slots=460, first=400, group=4, dtype="float16"), 2),
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
        (AfterPrefix(batch=12, slots=256, group=4, options={"key_scale": np.array([0.3, 1.7], np.float32)}), 3),
    ],
    ids=str,
)
def test_otherwise_the_prefixs_merge_takes_the_state_along(call, num_kernels, runs_after):
    check(call, num_kernels)
    assert not runs_after


def planned(batch, num_slots, group, layout, is_prefix):
    """Returns the plan of a prefix of `batch` sequences, or of as many sequences of `num_slots` own keys."""
    sizes = (1, batch, group, 128) if is_prefix else (batch, 1, group, 128)
    query = jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
    key = jax.ShapeDtypeStruct((sizes[0], num_slots, 1, 128), jnp.bfloat16)
    return plan_call(
        query, key, None, num_slots=num_slots, scale=1.0, logits_soft_cap=None, config=LeanConfig(**layout)
    )


@pytest.mark.parametrize(
    "batch, slots, group, num_ctas, reason",
    [
        (128, 16384, 8, 128, None),
        (16, 16384, 8, 128, "longer than another launch takes"),  # 128 partial states for one block of rows
        (1000, 16384, 8, 128, "short output tiles"),
        (9, 64, 8, 128, None),
    ],
)
def test_a_kernel_begins_so_where_that_is_faster(batch, slots, group, num_ctas, reason):
    layout = {"num_ctas": num_ctas, "block_kv": 128, "num_stages": 2}
    prefix, suffix = planned(batch, slots, group, layout, True), planned(batch, 128, group, layout, False)
    found = suffix.why_not_after(prefix)
    assert found is None if reason is None else reason in found


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
