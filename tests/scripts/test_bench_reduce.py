"""The script that times reductions; it times on GPUs only, so tests run its steps."""

import bench_reduce
import numpy as np
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
