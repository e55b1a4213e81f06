"""Which backend runs: the named one or an error, and without a name the first of a documented order."""

import logging

import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Case

from tree_attn import SoftmaxState, attend, make_mesh, tree_decode
from tree_attn.local import IMPLEMENTATIONS, cudnn

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


@needs_cpu
def test_none_takes_xla_where_cudnn_cannot_run_and_says_so(caplog):
    caplog.set_level(logging.DEBUG, "tree_attn")
    attend(*Case().arrays())
    assert "picked 'xla'" in caplog.text
    assert "passed over 'cudnn'" in caplog.text and "GPU" in caplog.text


@pytest.mark.usefixtures("cudnn_that_answers_42")
@pytest.mark.parametrize(
    "dtype, options, expected",
    [("bfloat16", {}, "cudnn"), ("float32", {}, "xla"), ("bfloat16", {"logits_soft_cap": 2.0}, "xla")],
)
def test_none_takes_cudnn_for_what_it_can_do(dtype, options, expected, caplog):
    caplog.set_level(logging.INFO, "tree_attn")
    out, _ = attend(*Case(dtype=dtype).arrays(), **options)
    assert f"picked {expected!r}" in caplog.text
    assert np.all(np.asarray(out) == 42) == (expected == "cudnn")
