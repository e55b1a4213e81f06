"""The lean kernel compiled ahead of time for Hopper (sm_90a): no register is spilled, and its CTAs fit an SM."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from lean_cases import variants

WHEELS = os.environ.get("TREE_ATTN_TEST_CUDA_WHEELS")
REGISTERS_PER_SM = 65536
REGISTER_UNIT = 8  # per thread, as the hardware hands them out
THREADS = 2 * 128  # of a CTA of the first kernel
MOST_OF_MERGE = 168  # registers; its CTAs are small, and come and go

pytestmark = pytest.mark.skipif(
    WHEELS is None,
    reason="runs with TREE_ATTN_TEST_CUDA_WHEELS=DIR, where pip install --no-deps --target DIR has put "
    "jax-cuda12-plugin and jax-cuda12-pjrt of JAX's version, and nvidia-cuda-nvcc-cu12",
)


@pytest.fixture(scope="module")
def compiled():
    """What ptxas said of each variant: `{call: (CTAs per SM, {kernel: (registers, spilled bytes)})}`."""
    script = pathlib.Path(__file__).with_name("compile_lean.py")
    path = os.pathsep.join([WHEELS, *sys.path])
    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return parsed(done.stdout)


def parsed(output: str):
    said, result = {}, {}
    for line in output.splitlines():
        if entry := re.search(r"Function properties for (lean_\w+?)_mosaic_gpu_kernel", line):
            kernel = entry[1]
        elif spills := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spilled = int(spills[1]) + int(spills[2])
        elif used := re.search(r"Used (\d+) registers", line):
            said[kernel] = int(used[1]), spilled
        elif line.startswith("{"):
            variant = json.loads(line)
            result[variant["call"]], said = (variant["ctas_per_sm"], said), {}
    return result


@pytest.mark.parametrize("call", variants(), ids=str)
def test_it_spills_no_register_and_its_ctas_fit(call, compiled):
    ctas_per_sm, kernels = compiled[str(call)]
    registers, spilled = kernels["lean_attention"]
    handed_out = -(-registers // REGISTER_UNIT) * REGISTER_UNIT
    assert handed_out * THREADS * ctas_per_sm <= REGISTERS_PER_SM, f"{ctas_per_sm} CTAs per SM at {registers} registers"
    assert spilled == 0


def test_no_merge_spills(compiled):
    merges = [kernels["lean_merge"] for _, kernels in compiled.values() if "lean_merge" in kernels]
    assert len(merges) > 10  # of equal ones JAX compiles one
    assert {spilled for _, spilled in merges} == {0}
    assert max(registers for registers, _ in merges) <= MOST_OF_MERGE
