"""`tree-attn compare --prefill` on emulated devices: its rows, its oracle, and what it refuses."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Case
from dense import dense_attention

from tree_attn import cli
from tree_attn.commands.compare import prompts
from tree_attn.cost.step import DecodeStep

SMALL = ["--prefill", "--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--dtype", "float32", "--iters", "2"]

SIZES = dict(batch=1, num_keys=64, num_heads=6, num_kv_heads=3, head_dim=8, dtype="float32", n_devices=8)
RINGS = ("ring", "ring_joint", "ring_two_way", "ring_zigzag")


def compare(out, *options: str) -> int:
    return cli.main(["compare", "--out", str(out), *SMALL, *options])


def rows_of(out) -> list[dict]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def test_every_strategy_is_checked_and_timed_and_sends_what_is_predicted(tmp_path, capsys):
    assert compare(tmp_path, "--devices", "2", "--keys", "96") == 0
    shown = capsys.readouterr().out
    rows = rows_of(tmp_path)
    assert [row["strategy"] for row in rows if row["error"] is None] == [*RINGS, "ulysses"]
    for row in rows:
        if row["error"] is None:
            assert row["bytes_sent_per_device_compiled"] == pytest.approx(row["bytes_sent_per_device_predicted"])
            assert row["max_abs_error"] <= row["tolerance"] and row["oracle_num_keys"] == 64
            assert row["latency_us_median"] > 0 and row["implementation"] == "automatic"
    (failed,) = (row for row in rows if row["error"])
    assert failed["strategy"] == "ulysses_ring" and "two mesh axes of at least two devices" in failed["error"]
    assert "Measured per device and prompt" in shown and "is the fastest over 96 keys" in shown


@pytest.mark.slow
def test_gradients_of_every_strategy(tmp_path):
    assert compare(tmp_path, "--gradient", "--devices", "4", "--keys", "128", "--dtype", "bfloat16") == 0
    rows = rows_of(tmp_path)
    assert [row["strategy"] for row in rows] == [*RINGS, "ulysses", "ulysses_ring"]
    for row in rows:
        assert row["error"] is None and row["max_abs_error"] <= row["tolerance"]
        assert row["bytes_sent_per_device_predicted"] is row["peak_memory_bytes_predicted"] is None


@pytest.mark.parametrize("gradient", [[], ["--gradient"]], ids=["forward", "gradient"])
def test_one_gpu_has_cudnns_own_attention_beside_ours(tmp_path, capsys, monkeypatch, gradient):
    """Through `jax.nn`, whose implementation in XLA stands in here: with grouped heads, causal, checked and timed."""
    monkeypatch.setattr(prompts.cudnn, "unavailable", lambda: None)
    of_jax, called = jax.nn.dot_product_attention, []

    def stand_in(*arrays, implementation, **options):
        called.append(implementation)
        return of_jax(*arrays, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    monkeypatch.setattr(prompts.prompt, "STRATEGIES", ("ring",))
    assert compare(tmp_path, "--devices", "1", "--keys", "32", *gradient) == 0
    ours, cudnns = rows_of(tmp_path)
    assert (ours["strategy"], cudnns["strategy"], cudnns["implementation"]) == ("ring", "jax_nn", "cudnn")
    assert cudnns["error"] is None and cudnns["latency_us_median"] > 0 and set(called) == {"cudnn"}
    assert cudnns["max_abs_error"] <= cudnns["tolerance"] and cudnns["bytes_sent_per_device_compiled"] == 0
    assert "jax nn" in capsys.readouterr().out


def test_cudnns_own_attention_is_a_row_with_its_reason_without_a_gpu_and_no_row_on_several():
    plan = lambda devices: prompts.plan([DecodeStep(**SIZES | {"n_devices": devices})], [None])
    (case,) = (case for case in plan(1) if case.strategy == "jax_nn")
    assert "needs a CUDA GPU" in case.obstacle and not case.bytes_sent and case.peak_memory_bytes is None
    assert all(case.strategy != "jax_nn" for case in plan(8))


def test_the_oracle_is_dense_attention_and_its_gradient():
    arrays = Case(queries=12, keys=12).arrays()
    attention = lambda *arrays: dense_attention(*arrays, is_causal=True)[0]
    out, pull = jax.vjp(attention, *arrays)
    (found,) = prompts.expected_results(*arrays, has_gradient=False)
    np.testing.assert_allclose(found, out, atol=1e-5)
    for one, expected in zip(prompts.expected_results(*arrays, has_gradient=True), pull(out), strict=True):
        np.testing.assert_allclose(one, expected, atol=1e-5)


def test_a_wrong_result_ends_the_command(tmp_path, capsys, monkeypatch):
    wrong = lambda *arrays, has_gradient: [jnp.ones(arrays[0].shape)]
    monkeypatch.setattr(prompts, "expected_results", wrong)
    assert compare(tmp_path, "--devices", "1", "--keys", "8") == 1
    assert "WRONG: ring (automatic, 8 keys, float32) is off by" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, said",
    [
        (["--prefill", "--reduction", "gather"], "--reduction must be left out with --prefill"),
        (["--gradient"], "--gradient needs --prefill"),
    ],
)
def test_options_that_do_not_go_together_are_one_line(tmp_path, capsys, options, said):
    assert cli.main(["compare", "--out", str(tmp_path), "--devices", "2", "--keys", "96", *options]) == 2
    assert said in capsys.readouterr().err


def test_cases_name_the_axes_and_what_cannot_run():
    cases = {case.strategy: case for case in prompts.plan([DecodeStep(**SIZES)], [None])}
    assert cases["ulysses_ring"].axes == ("device", "node") and cases["ring"].axes == ("device",)
    assert cases["ring"].obstacle is None and cases["ring"].peak_memory_bytes > 0
    assert "got N=6 and K=3" in cases["ulysses"].obstacle and cases["ulysses"].bytes_sent is None
