"""Settings of transfers; what links measure is in test_calibrate.py and the GPUs' rows."""

import os

from tree_attn.cost.rotation import JOIN_FLAG
from tree_attn.measure import links


def test_the_environment_has_the_last_word_on_transfers(monkeypatch):
    monkeypatch.setenv("NCCL_P2P_NVL_CHUNKSIZE", "")  # so that it is set back
    monkeypatch.delenv("NCCL_P2P_NVL_CHUNKSIZE")
    links.spread_transfers()
    assert os.environ["NCCL_P2P_NVL_CHUNKSIZE"] == "65536"
    monkeypatch.setenv("NCCL_P2P_NVL_CHUNKSIZE", "524288")
    links.spread_transfers()
    assert os.environ["NCCL_P2P_NVL_CHUNKSIZE"] == "524288"


def test_the_environment_has_the_last_word_on_what_xla_joins(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    for _ in range(2):
        links.join_transfers()
        assert os.environ["XLA_FLAGS"] == f"--xla_a=1 {JOIN_FLAG}=17179869184"
    monkeypatch.setenv("XLA_FLAGS", f"{JOIN_FLAG}=5")
    links.join_transfers()
    assert os.environ["XLA_FLAGS"] == f"{JOIN_FLAG}=5"
