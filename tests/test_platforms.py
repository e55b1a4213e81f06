"""docs/platforms.md against the code: what runs what is asked of the library, and rows show what was measured."""

import json
import pathlib
import re

import gpus
import platform_table
import pytest
import test_tpu_compiled
from platform_table import PLATFORMS, standing_in

from tree_attn.commands.doctor import evidence, kernels
from tree_attn.cost import datasheets, machine

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
TEXT = (ROOT / "docs" / "platforms.md").read_text()
BY_TITLE = {platform.title: platform for platform in PLATFORMS}
OWN = {  # what our kernels run on Hopper, of the call that the table is about
    "decode", "decode, lengths", "decode, soft cap", "decode, float8 cache", "packed ragged batch", "paged cache",
    "shared prefix", "SparQ",
}  # fmt: skip
# A row of each feature's measurement, by the backend that it is about.
IS_ROW = {
    "decode": lambda row: row["way"] == "mosaic_gpu" and not row["gives_lengths"] and row["chain_us_median"] > 0,
    "decode, lengths": lambda row: row["way"] == "mosaic_gpu" and row["gives_lengths"] and row["chain_us_median"] > 0,
    "decode, soft cap": lambda row: row.get("options_name") == "soft_cap" and row["implementation"] == "mosaic_gpu",
    "decode, float8 cache": lambda row: (
        "float8_e4m3fn" in (row["dtype"], row.get("stored_dtype"))
        and "mosaic_gpu" in (row.get("way"), row.get("implementation"))
    ),
    "decode, int8 cache": lambda row: row.get("cache_dtype") == "int8" and row["per_token_ms_median"] > 0,
    "packed ragged batch": lambda row: row.get("how") == "packed" and row["implementation"] == "mosaic_gpu",
    "paged cache": lambda row: row["way"] == "mosaic_gpu" and row["page"] is not None and row["chain_us_median"] > 0,
    "shared prefix": lambda row: row.get("way") == "mosaic_gpu" and row["prefix"] > 0,
    "SparQ": lambda row: row.get("way") == "sparq" and row["device_us_median"] > 0,
    "prompt": lambda row: row.get("prefill_s", 0) > 0,
    "gradient of a prompt": lambda row: "--gradient" in row["command"] and (row["latency_us_median"] or 0) > 0,
    # Of steps alone, or of a model's.
    "fused": lambda row: row.get("reduction") == "fused" and row.get("us_median", row.get("per_token_ms_median")) > 0,
}


@pytest.mark.parametrize("name", ["platforms", "datasheets"])
def test_the_tables_are_what_the_code_says(name):
    (table,) = re.findall(
        rf"<!-- made by: python3 scripts/platform_table.py {name} -->\n(.*?)<!-- end", TEXT, re.DOTALL
    )
    assert table == {"platforms": platform_table.platform_table, "datasheets": platform_table.datasheet_table}[name]()


@pytest.mark.parametrize("title", BY_TITLE)
def test_what_runs_what_follows_the_rules_of_the_backends(title):
    platform = BY_TITLE[title]
    with standing_in(platform):
        found = kernels.examine()
    by_backend = {name: one["runs_by"] for name, one in found.items()}
    is_cuda, is_hopper = platform.version.startswith("cuda"), platform.capability == "9.0"
    for feature, backend in by_backend.items():
        if feature in OWN and (is_hopper or (is_cuda and feature not in ("SparQ", "shared prefix"))):
            assert backend == "mosaic_gpu", feature
        elif is_cuda and feature in ("decode", "decode, lengths", "shared prefix", "prompt", "gradient of a prompt"):
            assert backend == "cudnn", feature
        else:
            assert backend == "xla", feature
        reasons = found[feature]["passed_over"]
        assert all(reasons.values()) and backend not in reasons
        assert reasons or backend == "mosaic_gpu" or (is_cuda and backend == "cudnn")
    if not is_cuda:
        runtime = "rocm" if platform.platform == "gpu" else "tpu"
        assert f"programs run on {runtime!r} here" in found["decode"]["passed_over"]["mosaic_gpu"]


def test_older_gpus_and_older_jax_change_the_answer(monkeypatch):
    with standing_in(BY_TITLE["H100"], version=(0, 10, 2)):
        assert "JAX 0.11 and newer only" in kernels.examine()["paged cache"]["passed_over"]["mosaic_gpu"]
    monkeypatch.setattr(kernels, "HEAD_DIM", 192)
    by_title = {}
    for title in ("A100", "H200", "B200"):
        with standing_in(BY_TITLE[title]):
            by_title[title] = kernels.examine()["decode"]["runs_by"]
    assert by_title == {"A100": "xla", "H200": "cudnn", "B200": "cudnn"}


def test_what_is_called_measured_has_rows_of_that_device():
    for (device_kind, backend), features in evidence.ROWS.items():
        assert machine.load(device_kind) is not None or datasheets.load(device_kind) is not None
        for feature, folder in features.items():
            rows = [json.loads(line) for path in (RESULTS / folder).glob("*.jsonl") for line in path.open()]
            of_device = [row for row in rows if row.get("hardware", "").endswith(f"x {device_kind}")]
            assert any(IS_ROW[feature](row) and row.get("passed", True) for row in of_device), (feature, backend)


def test_what_is_called_compiled_is_compiled_by_a_test():
    assert {"mosaic_gpu": tuple(gpus.GPUS)} == evidence.COMPILED_FOR
    assert {kind for kind, _ in test_tpu_compiled.TOPOLOGIES.values()} == evidence.COMPILED_STEPS.keys()


@pytest.mark.parametrize(
    "title, said",
    [
        ("A100", 'this kind, NVIDIA A100-SXM4-80GB. `tree-attn plan --device-kind "NVIDIA A100-SXM4-80GB"` predicts'),
        ("AMD GPU", "this kind, AMD Instinct MI300X. `tree-attn plan` has no datasheet of it; `tree-attn doctor"),
        ("H200", "Not measured on this device: gradient of a prompt."),
    ],
)
def test_what_is_unmeasured_is_said(title, said):
    with standing_in(BY_TITLE[title]) as device:
        found = kernels.find_unmeasured(device, kernels.examine())
    assert said in found[0] and len(found) == (1 if title == "H200" else 2)


def test_plan_answers_for_every_platform_but_amd():
    for platform in PLATFORMS:
        known = datasheets.load(platform.device_kind) or machine.load(platform.device_kind)
        assert (known is None) == (platform.title == "AMD GPU")
