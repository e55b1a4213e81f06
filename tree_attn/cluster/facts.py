"""Facts that must be alike on all ranks, each as a short text: source, settings, arguments, a model's files."""

import concurrent.futures
import contextlib
import hashlib
import importlib.util
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax

_LONGEST = 80  # characters of a value that are shown; of longer ones a digest is
_WHOLE_BYTES = 1 << 29  # a model of up to so many bytes is read whole for its digests
_HEAD_BYTES, _BLOCK_BYTES, _NUM_BLOCKS = 1 << 18, 1 << 14, 16  # read of each file of a larger one
_OF_MODELS = ("*.safetensors", "config.json", "generation_config.json", "tokenizer*", "*index.json", "*.jinja")
# Settings that change programs or what they send; but for those of one node: its paths, network interfaces, logs.
_PREFIXES = ("NCCL_", "XLA_FLAGS", "LIBTPU_INIT_ARGS")
_OF_A_NODE = ("DIR", "FILE", "PATH", "IFNAME", "HCA", "DEBUG", "TOPO", "VERSION", "HOSTID")
# Paths of a node; and the number of devices, which the roll call compares.
_OF_A_RANK = ("--xla_dump", "--xla_gpu_cuda_data_dir", "--xla_force_host_platform_device_count")
_JAX_OPTIONS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable")
_JAX_OPTIONS += ("jax_default_dtype_bits", "jax_numpy_dtype_promotion")


def brief(value: Any) -> str:
    """Returns a value as JSON; a long one by its beginning and a digest.

    Example:
      >>> brief({"a": [1, 2]})
      '{"a": [1, 2]}'
    """
    text = json.dumps(value, sort_keys=True, default=str)
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST // 2]}... ({len(text)} characters, {_digest(text.encode())})"


def source_digest() -> str:
    """Returns a digest of the Python files of `tree_attn`: two checkouts of one version may differ."""
    found = hashlib.sha256()
    for package in ("tree_attn", "tree_attn.models", "tree_attn.ring_baseline"):
        spec = importlib.util.find_spec(package)
        for folder in spec.submodule_search_locations or () if spec else ():
            for path in sorted(pathlib.Path(folder).rglob("*.py")):
                found.update(f"{package} {path.relative_to(folder)}".encode() + path.read_bytes())
    return found.hexdigest()[:12]


def settings(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the options of JAX, XLA and NCCL that change results, programs or messages."""
    found = {name: brief(jax.config.values[name]) for name in _JAX_OPTIONS if name in jax.config.values}
    for name, value in sorted(environ.items()):
        if name.startswith(_PREFIXES) and not any(part in name for part in _OF_A_NODE):
            words = sorted(word for word in value.split() if not word.startswith(_OF_A_RANK))
            if words:
                found[name] = brief(" ".join(words))
    return found


def of_model(path: pathlib.Path) -> dict[str, str]:
    """Returns bytes and a digest of each file of a model, by name.

    The digest is that of the whole file where the model is small. Else it is that of its header and of blocks all over
    it, which takes a second for hundreds of gigabytes.

    Args:
      path: a GGUF file, or a folder of Hugging Face's.
    """
    paths = sorted({one for glob in _OF_MODELS for one in path.glob(glob)}) if path.is_dir() else [path]
    paths = [one for one in paths if one.is_file()]
    is_small = sum(one.stat().st_size for one in paths) <= _WHOLE_BYTES
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        digests = list(pool.map(lambda one: _of_file(one, is_small), paths))
    return {one.name if path.is_dir() else "the model's file": text for one, text in zip(paths, digests)}


def of_arguments(arguments: Mapping[str, Any], without: Sequence[str]) -> dict[str, str]:
    """Returns the options of a command, by name as they are written."""
    named = {f"--{name.replace('_', '-')}": value for name, value in arguments.items() if name not in without}
    return {name: brief(value) for name, value in named.items()}


def _of_file(path: pathlib.Path, is_small: bool) -> str:
    size, found = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file, contextlib.suppress(OSError):
        if is_small:
            found = hashlib.file_digest(file, "sha256")
        else:
            found.update(file.read(_HEAD_BYTES))
            for number in range(_NUM_BLOCKS):
                file.seek(max(0, (size - _BLOCK_BYTES) * number // (_NUM_BLOCKS - 1)))
                found.update(file.read(_BLOCK_BYTES))
    return f"{size} bytes ({found.hexdigest()[:12]})"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
