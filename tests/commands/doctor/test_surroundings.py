"""Surroundings of the devices, as the doctor finds them: extras, folders, and reasons for being slow."""

import pathlib
import tomllib
import types

import pytest

from tree_attn import extras
from tree_attn.commands import common
from tree_attn.commands.doctor import report, surroundings

CPU, GPU = (types.SimpleNamespace(platform=name) for name in ("cpu", "gpu"))


def test_the_modules_of_extras_are_those_that_are_declared():
    text = (pathlib.Path(__file__).parents[3] / "pyproject.toml").read_text()
    declared = tomllib.loads(text)["project"]["optional-dependencies"]
    for name, modules in extras.MODULES.items():
        assert [package.replace("-", "_") for package in declared[name]] == list(modules)


def test_a_missing_extra_names_the_modules_and_the_command(monkeypatch):
    find = extras.importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in ("gguf", "jinja2") else find(name))
    found = surroundings.find_extras()
    assert found["demo"] == f"needs gguf, jinja2: {extras.how_to_install('demo')}"
    assert found["plot"] is None


def test_folders_are_counted(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(common.CACHE_VARIABLE, raising=False)
    (tmp_path / "tree-attn").mkdir()
    (tmp_path / "tree-attn" / "model.gguf").write_bytes(b"12345")
    found = surroundings.find_caches()
    assert found["models"] == {"folder": str(tmp_path / "tree-attn"), "files": 1, "bytes": 5}
    assert (found["compiled programs"]["files"], found["compiled programs"]["bytes"]) == (0, 0)


@pytest.mark.parametrize(
    "devices, reasons, said",
    [
        ([CPU] * 8, {"mosaic_gpu": "no GPU", "xla": None}, ["8 devices are emulated on "]),
        ([GPU], {"mosaic_gpu": None, "xla": None}, []),
        (
            [GPU],
            {"mosaic_gpu": "no Hopper", "cudnn": None},
            ["Attention runs by cudnn, without the Hopper kernels"],
        ),
        ([GPU] * 2, {"mosaic_gpu": None}, ["Partial results meet by collectives, not by one exchange: no peers"]),
    ],
)
def test_what_is_slow_has_a_reason(devices, reasons, said, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda name: None)
    found = surroundings.find_slow(devices, reasons, {"fused": "no peers"})
    assert len(found) == len(said) and all(map(str.startswith, found, said))


def test_a_gpu_that_jax_does_not_use_is_named(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    found = surroundings.find_slow([CPU], {}, {})
    assert f"JAX runs on the CPU. For GPUs: {extras.how_to_install('cuda13')}" in found[1]


def test_the_words_of_the_report(monkeypatch):
    found = {
        "extras": {"demo": None, "plot": "needs matplotlib: pip"},
        "caches": {"models": {"folder": "/here", "files": 1, "bytes": 98_000_000}},
        "slow": ["Devices are emulated."],
    }
    assert list(report._surroundings(found)) == [
        "extras: demo installed",
        "extra plot: needs matplotlib: pip",
        "models kept: 1 file, 98 MB, in /here",
        "What is slow here, and why:",
        "- Devices are emulated.",
    ]
