"""A decoding program compiled ahead of time for Hopper: what a layer launches, and that no cache is copied."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

WHEELS = os.environ.get("TREE_ATTN_TEST_CUDA_WHEELS")


@pytest.mark.skipif(WHEELS is None, reason="runs with TREE_ATTN_TEST_CUDA_WHEELS, as test_lean_compiled.py")
def test_a_layer_by_the_kernel_is_five_launches_or_one_and_copies_no_cache():
    script = pathlib.Path(__file__).with_name("compile_decode.py")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([WHEELS, *sys.path])}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-5000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    launches = {row["products"]: row["launches"] for row in rows}
    # No weight is copied (below): what is read early must have been there before the program began.
    parts = [launch.rsplit("/", 1)[0] for launch in launches["mosaic_gpu"]]
    # The product of query, key and value; attention, which merges in its launch; the other three products.
    assert parts == ["attention/append", "attention/attend", "attention/output", "mlp", "mlp"]
    assert [launch.rsplit("/", 1)[0] for launch in launches["mosaic_gpu_chain"]] == ["whole"]
    (kernels,) = [row["kernels"] for row in rows if row["products"] == "several layers"]
    assert kernels == ["few_rows_layers", "few_rows"]  # and the head
    (straight,) = [row for row in rows if row["products"] == "generation"]
    assert straight["kernels"] == ["few_rows_layers", "few_rows"] * 3
    # After a head two choose the token, and one looks up its row: all else is made for all steps at first.
    assert straight["others"] == [0, 3, 0, 3, 0]
    assert len(launches["xla"]) > 10
    # Layers after the first read old keys early, by the schedule that the first has read.
    assert [row["schedules"] for row in rows if row["products"] in ("xla", "mosaic_gpu")] == [1, 1]
    for row in rows:
        assert [shape for shape in row["copies"] if "bf16" in shape] == []
