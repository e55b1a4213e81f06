"""Settings of transfers; what links measure is in test_calibrate.py and the GPUs' rows."""

import os

from tree_attn.measure import links


def test_the_environment_has_the_last_word_on_transfers(monkeypatch):
    monkeypatch.setenv("NCCL_P2P_NVL_CHUNKSIZE", "")  # so that it is set back
    monkeypatch.delenv("NCCL_P2P_NVL_CHUNKSIZE")
    links.spread_transfers()
    assert os.environ["NCCL_P2P_NVL_CHUNKSIZE"] == "65536"
    monkeypatch.setenv("NCCL_P2P_NVL_CHUNKSIZE", "524288")
    links.spread_transfers()
    assert os.environ["NCCL_P2P_NVL_CHUNKSIZE"] == "524288"
