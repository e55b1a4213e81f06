"""Kernels compiled ahead of time for five kinds of GPUs: no register is spilled, and their CTAs fit an SM."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import sparq_cases
from gpus import GPUS
from lean_cases import (
    Fused,
    exchanges,
    more_variants,
    more_variants_elsewhere,
    thorough,
    variants,
    variants_elsewhere,
)
from lean_launches import num_launches

from tree_attn.kernels.sparq_attend import CTAS_PER_SM

WHEELS = os.environ.get("TREE_ATTN_TEST_CUDA_WHEELS")
REGISTERS_PER_SM = 65536
REGISTER_UNIT = 8  # per thread, as the hardware hands them out
THREADS = {
    "few_rows": 2 * 128,
    "lean_attention": 2 * 128,
    "lean_exchange": 2 * 128,
    "tall_attention": 3 * 128,
    "tall_streams": 4 * 128,
    "sparq_components": 128,
    "sparq_select": 128,
    "sparq_best": 128,
    "sparq_attend": 128,
}  # of a CTA
MAX_MERGE_REGISTERS = 168  # registers; its CTAs are small, and come and go

pytestmark = pytest.mark.skipif(
    WHEELS is None,
    reason="runs with JAX 0.11 or newer and TREE_ATTN_TEST_CUDA_WHEELS=DIR, where pip install --no-deps --target DIR "
    "has put jax-cuda12-plugin and jax-cuda12-pjrt of JAX's version, and nvidia-cuda-nvcc-cu12",
)


@pytest.fixture(scope="module")
def compiled():
    """Returns what `report_of` does, of `variants` for an H200."""
    return report_of("compile_lean.py", "9.0")


@pytest.fixture(scope="module")
def more_compiled():
    """Returns what `report_of` does, of `more_variants` for an H200."""
    return report_of("compile_lean.py", "9.0", "more")


def report_of(script_name: str, *arguments: str):
    """Returns ptxas's report of each variant that a script compiles, by call.

    That is CTAs per SM, kernels, shared memory, and launches. Kernels are `{name: (registers, spilled bytes)}`. Shared
    memory is the first kernel's bytes, None if it was compiled for an earlier variant, and the most that it was planned
    to have. Launches are counted in the lowered program.
    """
    script = pathlib.Path(__file__).with_name(script_name)
    path = os.pathsep.join([WHEELS, *sys.path])
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env=os.environ | {"PYTHONPATH": path, "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0"},  # no lines of Python, sooner
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,  # it takes some minutes of a core that it has for itself
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return parsed(done.stdout)


def parsed(output: str):
    reported, result = {}, {}
    for line in output.splitlines():
        if entry := re.search(r"Function properties for (\w+?)_mosaic_gpu_kernel", line):
            kernel = entry[1]
        elif spills := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spilled = int(spills[1]) + int(spills[2])
        elif used := re.search(r"Used (\d+) registers", line):
            reported[kernel] = int(used[1]), spilled
        elif line.startswith("{"):
            variant = json.loads(line)
            smem_bytes = next(iter(variant.get("smem_bytes", [])), None)
            smem_bytes = smem_bytes, variant.get("planned_smem_bytes")
            result[variant["call"]] = variant["ctas_per_sm"], reported, smem_bytes, variant.get("launches")
            reported = {}
    return result


def assert_fits(name: str, kernel: tuple[int, int], ctas_per_sm: int):
    registers, spilled = kernel
    allocated = -(-registers // REGISTER_UNIT) * REGISTER_UNIT
    per_sm = allocated * THREADS[name] * ctas_per_sm
    assert per_sm <= REGISTERS_PER_SM, f"{ctas_per_sm} CTAs of {name} per SM at {registers} registers"
    assert spilled == 0, name


def assert_shares_memory(smem_bytes: tuple[int | None, int], ctas_per_sm: int, kib_per_sm: int):
    """Asserts that so many CTAs fit an SM, by what the compiled kernel asks for."""
    found, planned = smem_bytes
    # The hardware takes 1 KiB of each CTA, and ptxas a byte.
    assert ctas_per_sm * ((planned if found is None else found) + 1 + 1024) <= kib_per_sm * 1024


def of_variants(calls: list, more: list) -> list:
    """Returns parameters of a test: the name of the fixture that has compiled a call, and the call."""
    return [("compiled", call) for call in calls] + thorough([("more_compiled", call) for call in more])


@pytest.mark.parametrize("fixture, call", of_variants(variants(), more_variants()), ids=str)
def test_it_spills_no_register_its_ctas_fit_and_it_is_as_few_launches_as_can_be(fixture, call, request):
    ctas_per_sm, kernels, smem_bytes, launches = request.getfixturevalue(fixture)[str(call)]
    assert_shares_memory(smem_bytes, ctas_per_sm, GPUS["9.0"][-1])
    found, planned = smem_bytes
    assert found is None or found <= planned, "no more than planned"
    name = "tall_attention" if call.are_rows else "lean_attention"
    name = next((other for other in ("lean_exchange", "tall_streams") if other in kernels), name)
    assert_fits(name, kernels[name], ctas_per_sm)
    assert isinstance(call, Fused) or launches == num_launches(call)


def test_kernels_that_have_registers_for_it_end_in_an_exchange(compiled):
    ends = [set(compiled[str(call)][1]) & {"lean_exchange", "fused_exchange"} for call in exchanges()]
    assert ends[:3] == [{"lean_exchange"}] * 3 and not any("lean_exchange" in end for end in ends[3:])


@pytest.mark.parametrize("call", sparq_cases.COMPILED, ids=str)
def test_kernels_of_sparq_spill_no_register_and_their_ctas_fit(call, compiled):
    _, kernels, *_ = compiled[f"sparq {call}"]
    assert "sparq_select" in kernels
    for name, ctas_per_sm in {
        "sparq_select": 3 if call.slots <= 4096 else 2,
        "sparq_components": 6,
        "sparq_best": 3,
        "sparq_attend": CTAS_PER_SM,
    }.items():
        if name in kernels:  # of equal ones JAX compiles one
            assert_fits(name, kernels[name], ctas_per_sm)


@pytest.mark.parametrize("fixture", ["compiled", *thorough(["more_compiled"])])
def test_no_merge_spills(fixture, request):
    compiled = request.getfixturevalue(fixture)
    merges = [kernel for _, kernels, *_ in compiled.values() for name, kernel in kernels.items() if "merge" in name]
    assert len(merges) > 5  # of equal ones JAX compiles one
    assert {spilled for _, spilled in merges} == {0}
    assert max(registers for registers, _ in merges) <= MAX_MERGE_REGISTERS


ELSEWHERE = ["8.0", "12.0"]  # with much shared memory and with little, as 10.0 and 8.9 have


@pytest.mark.parametrize("capability", ELSEWHERE + thorough(["8.9", "10.0"]))
def test_elsewhere_than_on_hopper_it_spills_no_register_and_its_ctas_fit(capability):
    results = report_of("compile_lean.py", capability)
    assert len(results) == len(variants_elsewhere())
    names = assert_all_fit(capability, results)
    assert len(names) > len(results), "merges too"
    assert names.count("lean_exchange") >= 2 and "fused_exchange" in names


@pytest.mark.thorough
@pytest.mark.parametrize("capability", [capability for capability in GPUS if capability != "9.0"])
def test_elsewhere_than_on_hopper_more_variants_fit(capability):
    results = report_of("compile_lean.py", capability, "more")
    assert len(results) == len(more_variants_elsewhere())
    assert_all_fit(capability, results)


def assert_all_fit(capability: str, results: dict) -> list[str]:
    """Asserts that no kernel spills and that all CTAs fit, and returns the kernels' names."""
    *_, kib_per_sm = GPUS[capability]
    names, measured = [], []
    for ctas_per_sm, kernels, smem_bytes, _ in results.values():
        assert_shares_memory(smem_bytes, ctas_per_sm, kib_per_sm)
        assert smem_bytes[0] <= smem_bytes[1], "no more than planned"
        measured.append(smem_bytes[0])
        for name, kernel in kernels.items():  # of equal ones JAX compiles one
            names.append(name)
            if name in ("lean_attention", "lean_exchange"):
                assert_fits(name, kernel, ctas_per_sm)
            assert kernel[1] == 0
    assert None not in measured
    return names
