"""Predicted times, by which `implementation=None` picks where they are known."""

import json
import logging
import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest

from tree_attn import attend
from tree_attn.arguments import AttentionOptions
from tree_attn.local import IMPLEMENTATIONS, prediction
from tree_attn.masking import visibility
from tree_attn.placement import Shard

ROOT = pathlib.Path(__file__).parents[2]
CPU = jax.local_devices()[0].device_kind


def visible(num_queries: int = 1, num_slots: int = 100, **options):
    return visibility(AttentionOptions(**options), batch=2, num_queries=num_queries, num_slots=num_slots, shard=Shard())


@pytest.mark.parametrize(
    "num_queries, options, expected",
    [
        (1, {}, "one query, all keys"),
        (1, {"is_causal": True}, "one query, all keys"),
        (1, {"key_value_seq_lengths": jnp.array([3, 9])}, "one query, lengths"),
        (1, {"local_window_size": (7, 0), "key_value_seq_lengths": jnp.array([3, 9])}, "one query, a window"),
        (4, {"is_causal": True}, "several queries, all keys"),
        (4, {}, None),
    ],
)
def test_kinds_of_calls(num_queries, options, expected):
    assert prediction.kind_of_call(num_queries, visible(num_queries, **options)) == expected


def test_what_is_counted():
    one, seen, slots, gflop = prediction.counts((2, 3, 8, 64), (2, 100, 4, 64), 2, keys_seen=150)
    assert (one, seen, slots) == (1, 150 * 2 * 4 * 64 * 2 / 1e6, 200 * 2 * 4 * 64 * 2 / 1e6)
    assert gflop == 2 * 2 * 3 * 8 * 64 * 150 / 1e9  # products with K and with V, a multiplication and an addition each


def test_a_window_is_what_is_seen(monkeypatch):
    fitted = {CPU: {"xla": {"one query, a window": [0, 1, 0, 0]}, "cudnn": {"one query, a window": [0, 0, 1, 0]}}}
    monkeypatch.setattr(prediction, "constants", lambda: fitted)
    arrays = jnp.zeros((2, 1, 4, 64), jnp.bfloat16), jnp.zeros((2, 100, 4, 64), jnp.bfloat16)
    found = prediction.predicted_us(*arrays, visible(local_window_size=(9, 0)))
    assert found["xla"] == pytest.approx([2 * 10 * 1024 / 1e6])
    assert found["cudnn"] == pytest.approx([2 * 100 * 1024 / 1e6])


def test_lengths_are_not_known(monkeypatch):
    kind = "one query, lengths"
    monkeypatch.setattr(
        prediction, "constants", lambda: {CPU: {"xla": {kind: [1, 2, 0, 0]}, "cudnn": {kind: [0, 0, 3, 0]}}}
    )
    arrays = jnp.zeros((2, 1, 4, 64), jnp.bfloat16), jnp.zeros((2, 100, 4, 64), jnp.bfloat16)
    found = prediction.predicted_us(*arrays, visible(key_value_seq_lengths=jnp.array([3, 9])))
    mb = 2 * 100 * 1024 / 1e6
    assert found["xla"] == pytest.approx([1 + 2 * mb, 1 + mb, 1 + mb / 2])
    assert found["cudnn"] == pytest.approx([3 * mb] * 3)


def test_the_pick_is_nowhere_far_behind():
    assert prediction.pick({"mosaic_gpu": [632, 170], "cudnn": [628, 217]}) == "mosaic_gpu"
    assert prediction.pick({"mosaic_gpu": [632, 170], "cudnn": [400, 217]}) == "cudnn"
    assert prediction.pick({"mosaic_gpu": [7.0], "cudnn": [7.0]}) == "mosaic_gpu"


@pytest.mark.parametrize(
    "fitted, expected, why",
    [
        ({"cudnn": [5, 0, 0, 0], "xla": [9, 0, 0, 0]}, "cudnn", "predicted cudnn 5 us, xla 9 us"),
        ({"cudnn": [5, 0, 0, 0], "xla": [2, 0, 0, 0]}, "xla", "predicted cudnn 5 us, xla 2 us"),
        ({"xla": [2, 0, 0, 0]}, "cudnn", "the first of cudnn, xla; such calls were not measured on this device"),
        ({}, "cudnn", "the first of cudnn, xla; such calls were not measured on this device"),
    ],
)
def test_none_picks_by_prediction_and_says_why(fitted, expected, why, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "tree_attn")
    constants = {CPU: {name: {"one query, all keys": values} for name, values in fitted.items()}}
    monkeypatch.setattr(prediction, "constants", lambda: constants)
    cudnn, xla = IMPLEMENTATIONS["cudnn"], IMPLEMENTATIONS["xla"]
    monkeypatch.setattr(cudnn, "unavailable", lambda: None)
    monkeypatch.setattr(cudnn, "unsupported", lambda *_, **__: None)
    monkeypatch.setattr(cudnn, "attend", xla.attend)
    query, key = (jnp.ones((1, size, 2, 8), jnp.bfloat16) for size in (1, 16))
    attend(query, key, key)
    assert f"implementation=None picked {expected!r}: {why}" in caplog.messages


def test_none_says_what_it_predicts_of_lengths(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "tree_attn")
    constants = {
        name: {"one query, lengths": values} for name, values in {"cudnn": [5, 0, 0, 0], "xla": [9, 0, 0, 0]}.items()
    }
    monkeypatch.setattr(prediction, "constants", lambda: {CPU: constants})
    cudnn, xla = IMPLEMENTATIONS["cudnn"], IMPLEMENTATIONS["xla"]
    monkeypatch.setattr(cudnn, "unavailable", lambda: None)
    monkeypatch.setattr(cudnn, "unsupported", lambda *_, **__: None)
    monkeypatch.setattr(cudnn, "attend", xla.attend)
    query, key = (jnp.ones((1, size, 2, 8), jnp.bfloat16) for size in (1, 16))
    attend(query, key, key, key_value_seq_lengths=jnp.array([3]))
    why = "predicted cudnn 5 or 5 or 5 us, xla 9 or 9 or 9 us, if 1 or 0.5 or 0.25 of the slots hold keys"
    assert f"implementation=None picked 'cudnn': {why}" in caplog.messages


def test_the_constants_are_those_of_the_committed_steps():
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import fit_choice
    finally:
        sys.path.pop(0)
    from tree_attn.measure import rows

    files = [ROOT / "docs/results/sweep_h200" / name for name in ("drawn.jsonl", "table.jsonl")]
    steps = fit_choice.measured([row for file in files for row in rows.read(file)])
    assert fit_choice.fitted(steps) == json.loads(prediction.FILE.read_text())
    assert max(fit_choice.losses(steps)) < 1.1


@pytest.mark.parametrize(
    "num_queries, num_slots, num_heads, num_kv_heads, options",
    [
        (1, 512, 32, 8, {}),
        (1, 1024, 32, 8, {"key_value_seq_lengths": jnp.array([512])}),
        (1, 1024, 32, 8, {"local_window_size": (512, 0)}),
        (2, 1024, 32, 8, {"local_window_size": (127, 0), "is_causal": True}),
        (5, 665, 40, 8, {"key_value_seq_lengths": jnp.array([300]), "is_causal": True}),
        (8, 1024, 8, 1, {"key_value_seq_lengths": jnp.array([300]), "is_causal": True}),
    ],
)
def test_a_small_call_is_the_lean_kernels(num_queries, num_slots, num_heads, num_kv_heads, options, monkeypatch):
    monkeypatch.setattr(prediction, "constants", lambda: {CPU: json.loads(prediction.FILE.read_text())["NVIDIA H200"]})
    query = jax.ShapeDtypeStruct((1, num_queries, num_heads, 128), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((1, num_slots, num_kv_heads, 128), jnp.bfloat16)
    seen = visibility(AttentionOptions(**options), batch=1, num_queries=num_queries, num_slots=num_slots, shard=Shard())
    predicted = prediction.predicted_us(query, key, seen)
    assert prediction.pick(predicted) == "mosaic_gpu"
    assert min(us for times in predicted.values() for us in times) > 5, "a step is a launch at least"


def test_a_fit_finds_the_constants_of_exact_steps():
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import fit_choice
    finally:
        sys.path.pop(0)
    steps = {}
    for case in range(8):
        counts = prediction.counts((1, 1, 8, 64), (1, 100 * 2**case, 8, 64), 2, keys_seen=100 * 2**case - 17 * case)
        steps[str(case)] = counts, 3 + 0.2 * counts[1] + 0.01 * counts[2]
    assert fit_choice.fit(steps.values()) == pytest.approx([3, 0.2, 0.01, 0], abs=0.02)
    assert fit_choice.left_out_error(steps) < 0.01
