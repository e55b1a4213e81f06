"""The script that times reductions; it times on GPUs only, so tests run its steps."""

import sys

import bench_reduce
import numpy as np
import pytest
from assertions import assert_attention

from tree_attn import make_mesh, storage_order


def test_ragged_steps_attend_to_the_drawn_lengths(monkeypatch):
    monkeypatch.setattr(bench_reduce, "RAGGED_BATCHES", (3,))
    monkeypatch.setattr(bench_reduce, "RAGGED_KEYS", 512)
    monkeypatch.setattr(bench_reduce, "RAGGED_BLOCK", 64)
    monkeypatch.setattr(bench_reduce, "REDUCTIONS", ("gather", None))
    stored = np.argsort(storage_order(512, 2, 64))
    rows = list(bench_reduce.ragged(make_mesh({"seq": 2})))
    assert [labels["reduction"] for labels, *_ in rows] == ["gather", None]
    for labels, step, (query, *cache), _ in rows:
        lengths = step.keywords["key_value_seq_lengths"]
        assert labels["num_keys"] == lengths.sum() and lengths.max() <= 512
        key, value = (np.asarray(x)[:, stored] for x in cache)
        assert_attention(step(query, *cache, return_lse=True), query, key, value, key_value_seq_lengths=lengths)


def test_a_part_that_is_none_is_refused_before_anything_is_timed(monkeypatch, tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(sys, "argv", ["bench_reduce.py", "--parts", "step,raged", "--out", str(out)])
    with pytest.raises(SystemExit):
        bench_reduce.main()
    assert "--parts: must name parts of exchange, step, ragged, transfer, got raged" in capsys.readouterr().err
    assert not out.exists()
