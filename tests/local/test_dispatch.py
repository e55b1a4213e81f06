"""The choice of a backend: the named one or an error, and without a name the first of a documented order."""

import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_attention
from attention_cases import HEAD_SCALES, Case

from tree_attn import Shard, SoftmaxState, attend, make_mesh, merge_state, tree_decode
from tree_attn.arguments import AttentionOptions
from tree_attn.local import IMPLEMENTATIONS, attend_shard, choose, cudnn, flash_attn, mosaic_gpu, xla
from tree_attn.masking import visibility

needs_cpu = pytest.mark.skipif(cudnn.unavailable() is None, reason="runs only where cuDNN cannot")


@pytest.fixture
def cudnn_that_answers_42(monkeypatch):
    def answer(query, key, value, **_):
        rows = query.shape[:-1]
        return SoftmaxState(jnp.full((*rows, value.shape[-1]), 42, query.dtype), jnp.zeros(rows, jnp.float32))

    monkeypatch.setattr(cudnn, "unavailable", lambda: None)
    monkeypatch.setattr(cudnn, "attend", answer)


@needs_cpu
@pytest.mark.parametrize("name", sorted(set(IMPLEMENTATIONS) - {"xla"}))
def test_a_named_backend_that_cannot_run_here_raises_with_the_reason(name):
    with pytest.raises(NotImplementedError, match=f"implementation='{name}' cannot run: .*(GPU|not installed)"):
        attend(*Case(dtype="bfloat16").arrays(), implementation=name)


@needs_cpu
def test_a_named_backend_does_not_fall_back_across_devices():
    mesh = make_mesh({"seq": 2})
    with pytest.raises(NotImplementedError, match=r"implementation='cudnn' cannot run: .*GPU"):
        tree_decode(*Case(dtype="bfloat16").arrays(), axis_name="seq", mesh=mesh, implementation="cudnn")


@pytest.mark.usefixtures("cudnn_that_answers_42")
def test_a_named_backend_that_cannot_do_an_option_raises_rather_than_fall_back():
    with pytest.raises(NotImplementedError, match=r"implementation='cudnn' cannot run: .*logits_soft_cap"):
        attend(*Case(dtype="bfloat16").arrays(), implementation="cudnn", logits_soft_cap=2.0)


@pytest.mark.usefixtures("cudnn_that_answers_42")
@pytest.mark.parametrize("name", HEAD_SCALES)
def test_a_named_backend_is_not_given_scales_that_it_would_ignore(name):
    with pytest.raises(NotImplementedError, match=r"implementation='cudnn' cannot run: .*key_scale and value_scale"):
        attend(*Case(dtype="bfloat16").arrays(), implementation="cudnn", **{name: HEAD_SCALES[name]})


def test_flash_attn_is_not_given_scales_that_it_would_ignore(monkeypatch):
    monkeypatch.setattr(flash_attn, "unavailable", lambda: None)
    with pytest.raises(NotImplementedError, match=r"implementation='flash_attn' .*key_scale and value_scale"):
        attend(*Case(dtype="bfloat16").arrays(), implementation="flash_attn", **HEAD_SCALES)


@pytest.mark.parametrize("scales", [{}, HEAD_SCALES], ids=["unscaled", "scaled"])
def test_mosaic_gpu_takes_float8_as_it_is_stored_and_differentiates_the_scales(scales, monkeypatch):
    """Its kernels are stood in for by XLA: what is under test is what reaches them, and the rule for gradients."""
    calls = []

    def kernels(query, key, value, scales, merge_with, visible, scale, logits_soft_cap):
        calls.append((key.dtype, scales))
        options = dict(scale=scale, logits_soft_cap=logits_soft_cap, visible=visible, scales=scales)
        return xla.attend(query, key, value, **options)

    monkeypatch.setattr(mosaic_gpu, "unavailable", lambda: None)
    monkeypatch.setattr(mosaic_gpu, "_lean_padded", kernels)
    rng = np.random.default_rng(0)
    sizes = {"bfloat16": (2, 3, 4, 64), "float8_e4m3fn": (2, 40, 2, 64)}
    query, key = (jnp.asarray(rng.normal(size=size), dtype) for dtype, size in sizes.items())
    assert_attention(attend(query, key, key, implementation="mosaic_gpu", **scales), query, key, key, **scales)
    ((dtype, passed),) = calls
    assert dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(passed, np.stack(list(scales.values())) if scales else None)
    loss = lambda name, query, scales: attend(query, key, key, implementation=name, **scales).lse.sum()
    ours, xlas = (jax.grad(partial(loss, name), argnums=(0, 1))(query, scales) for name in ("mosaic_gpu", "xla"))
    jax.tree.map(np.testing.assert_array_equal, ours, xlas)


def test_mosaic_gpu_differentiates_a_state_that_it_merges_with(monkeypatch):
    def kernels(query, key, value, scales, merge_with, visible, scale, logits_soft_cap):
        options = dict(scale=scale, logits_soft_cap=logits_soft_cap, visible=visible, scales=scales)
        return merge_state(xla.attend(query, key, value, **options), merge_with)

    monkeypatch.setattr(mosaic_gpu, "unavailable", lambda: None)
    monkeypatch.setattr(mosaic_gpu, "_lean_padded", kernels)
    rng = np.random.default_rng(0)
    query, key, out = (jnp.asarray(rng.normal(size=(2, size, 4, 64)), jnp.bfloat16) for size in (3, 40, 3))
    other_state = SoftmaxState(out, jnp.asarray(rng.normal(size=out.shape[:3]), jnp.float32))

    def loss(name, query, other_state):
        state = attend_shard(query, key, key, AttentionOptions(implementation=name), Shard(), merge_with=other_state)
        return state.out.astype(jnp.float32).sum() + state.lse.sum()

    ours, xlas = (jax.grad(partial(loss, name), argnums=(0, 1))(query, other_state) for name in ("mosaic_gpu", "xla"))
    jax.tree.map(np.testing.assert_array_equal, ours, xlas)


@needs_cpu
def test_none_takes_xla_where_cudnn_cannot_run_and_says_so(caplog):
    caplog.set_level(logging.DEBUG, "tree_attn")
    attend(*Case().arrays())
    assert "picked 'xla'" in caplog.text
    assert "passed over 'cudnn'" in caplog.text and "GPU" in caplog.text


@pytest.mark.usefixtures("cudnn_that_answers_42")
@pytest.mark.parametrize(
    "dtype, options, expected",
    [
        ("bfloat16", {}, "cudnn"),
        ("float32", {}, "xla"),
        ("bfloat16", {"logits_soft_cap": 2.0}, "xla"),
        ("bfloat16", HEAD_SCALES, "xla"),
    ],
)
def test_none_takes_cudnn_for_what_it_can_do(dtype, options, expected, caplog):
    caplog.set_level(logging.INFO, "tree_attn")
    out, _ = attend(*Case(dtype=dtype).arrays(), **options)
    assert f"picked {expected!r}" in caplog.text
    assert np.all(np.asarray(out) == 42) == (expected == "cudnn")


def test_a_ring_is_given_another_kernel_than_a_tree(monkeypatch):
    """Beside transfers the lean kernel, which keeps every SM to its end, is slower than cuDNN."""
    for backend in IMPLEMENTATIONS.values():
        monkeypatch.setattr(backend, "unavailable", lambda: None)
        monkeypatch.setattr(backend, "unsupported", lambda *_, **__: None)
    query, key = (jnp.zeros((1, size, 2, 64), jnp.bfloat16) for size in (1, 16))
    visible = visibility(AttentionOptions(), batch=1, num_queries=1, num_slots=16, shard=Shard())
    pick = partial(choose, query, key, key, implementation=None, visible=visible)
    assert pick() == "mosaic_gpu"
    assert pick(beside_transfers=True) == "cudnn"
    assert choose(None, None, None, implementation="mosaic_gpu", beside_transfers=True) == "mosaic_gpu"
