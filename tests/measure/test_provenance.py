"""Provenance: date, driver and clocks, hardware, commit and versions."""

import datetime

import jax
import pytest

import tree_attn
from tree_attn.measure import provenance


def test_hardware_names_emulated_devices_as_such():
    assert provenance.hardware(jax.devices("cpu")[:3]).startswith("3 emulated CPU devices on ")


def test_git_commit_is_a_hash_or_none():
    commit = provenance.git_commit()
    assert commit is None or len(commit.removesuffix("-dirty")) == 40


def test_versions_say_what_is_missing():
    found = provenance.versions()
    assert found["jax"] == jax.__version__
    assert found["tree-attn"] == tree_attn.__version__  # in a checkout that is not installed too
    assert set(found) >= {"python", "jaxlib", "flash-attn-jax"}


def test_rows_of_a_script_say_when_and_where():
    row = provenance.of_script(jax.devices("cpu")[:1])
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(row["date"])
    assert abs(age) < datetime.timedelta(minutes=1)
    assert row["host"] and "driver" in row and row["command"].startswith("python3 ")


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Puts a program of that name on the path; the fixture's value writes what it does."""
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def write(script: str) -> None:
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    return write


def test_clocks_are_read_while_the_program_runs(nvidia_smi):
    nvidia_smi('sleep 0.2; case "$*" in *clocks.sm*) echo "1980, 3201"; echo "345, 1593";; esac')
    runs = []
    assert provenance.clocks_during(lambda: runs.append(1)) == {"clock_sm_mhz": 1980, "clock_memory_mhz": 3201}
    assert len(runs) > 1
    runs.clear()
    provenance.clocks_during(lambda: runs.append(1), repetitions=3)
    assert len(runs) == 3


def test_clocks_are_those_of_the_gpu_in_use(nvidia_smi, monkeypatch):
    """The first GPU of JAX is another of the machine's where CUDA_VISIBLE_DEVICES leaves some out."""
    monkeypatch.setattr(provenance, "visible_gpus", lambda: ("0000:43:00.0", "0000:1B:00.0"))
    nvidia_smi('case "$*" in *--id=0000:43:00.0*) echo "1755, 2619";; *) echo "345, 1593";; esac')
    assert provenance.clocks() == {"clock_sm_mhz": 1755, "clock_memory_mhz": 2619}


def test_driver_of_the_first_gpu(nvidia_smi):
    nvidia_smi("echo 580.159.04; echo 580.159.04")
    assert provenance.driver() == "580.159.04"


@pytest.mark.parametrize("script", ["exit 9", "echo '[N/A], [N/A]'"])
def test_clocks_that_cannot_be_read_are_none(nvidia_smi, script):
    nvidia_smi(script)
    assert provenance.clocks_during(lambda: None) == {"clock_sm_mhz": None, "clock_memory_mhz": None}


def test_without_a_gpu_there_is_neither_driver_nor_clocks(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert provenance.driver() is None
    assert provenance.clocks_during(lambda: pytest.fail("nothing to read")) == {
        "clock_sm_mhz": None,
        "clock_memory_mhz": None,
    }
