"""Rings compiled ahead of time for GPUs: the attention of each hop runs between start and end of its transfer."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

WHEELS = os.environ.get("TREE_ATTN_TEST_CUDA_WHEELS")


@pytest.mark.skipif(
    WHEELS is None, reason="runs with TREE_ATTN_TEST_CUDA_WHEELS=DIR, see tests/kernels/test_lean_compiled.py"
)
def test_compiled_for_four_gpus_every_transfer_runs_beside_the_attention():
    script = pathlib.Path(__file__).with_name("compile_rings.py")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([WHEELS, *sys.path])}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    programs = {row.pop("name"): row for row in map(json.loads, done.stdout.splitlines())}
    hops, names = 3, ("decode one_way", "decode joint", "prompt 1", "prompt zigzag")
    for name in names:
        assert programs[name]["waited"] == 0, f"{name}: K and V are one transfer"
        assert len(programs[name]["beside"]) == hops and min(programs[name]["beside"]) > 0
    for name in ("gradient 1", "gradient zigzag"):
        # Three hops forward and three back; the last derivatives go home when there is nothing left to do.
        assert programs[name]["waited"] == 0
        assert sum(count > 0 for count in programs[name]["beside"]) >= 2 * hops, f"{name}: {programs[name]}"
