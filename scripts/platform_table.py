"""Prints the tables of docs/platforms.md: what runs each feature on a platform, and how far that was tried.

    python3 scripts/platform_table.py platforms
    python3 scripts/platform_table.py datasheets

Platforms are stood in for by what JAX says of their devices. The answers are those of the functions by which the
library chooses. The datasheets are those of the cost model.
"""

import contextlib
import dataclasses
import sys
import types
from collections.abc import Iterator
from unittest import mock

import jax

from tree_attn.commands.doctor import evidence, kernels
from tree_attn.cost import datasheets
from tree_attn.local import cudnn
from tree_attn.reduce import fused, peer_memory

CUDNN = 91_900  # a version that JAX takes
JAX = (0, 12, 0)


@dataclasses.dataclass(frozen=True)
class Platform:
    """A device as JAX describes it. `capability` is None where its devices have none."""

    title: str
    device_kind: str
    capability: str | None
    platform: str = "gpu"
    version: str = "cuda 13000"

    def device(self) -> types.SimpleNamespace:
        """Returns a device with what the library and JAX's cuDNN module ask of one."""
        named = {} if self.capability is None else {"compute_capability": self.capability}
        return types.SimpleNamespace(
            id=0, process_index=0, platform=self.platform, device_kind=self.device_kind, core_count=132,
            client=types.SimpleNamespace(platform_version=self.version), **named,
        )  # fmt: skip


PLATFORMS = (
    Platform("A100", "NVIDIA A100-SXM4-80GB", "8.0"),
    Platform("RTX 4090", "NVIDIA GeForce RTX 4090", "8.9"),
    Platform("H100", "NVIDIA H100 80GB HBM3", "9.0"),
    Platform("H200", "NVIDIA H200", "9.0"),
    Platform("B200", "NVIDIA B200", "10.0"),
    Platform("RTX 5090", "NVIDIA GeForce RTX 5090", "12.0"),
    Platform("AMD GPU", "AMD Instinct MI300X", "gfx942", version="rocm 70000"),
    Platform("TPU v5e", "TPU v5 lite", None, platform="tpu", version="PJRT"),
)


@contextlib.contextmanager
def standing_in(platform: Platform, version: tuple[int, ...] = JAX) -> Iterator[types.SimpleNamespace]:
    """Lets JAX, in a version of it and with cuDNN, describe one device of `platform`; yields the device."""
    device, cudnn_module = platform.device(), cudnn._fused_attention()
    bridge = types.SimpleNamespace(get_backend=lambda: device.client, local_devices=lambda backend: [device])
    patched = (
        (jax, "default_backend", lambda: platform.platform), (jax, "devices", lambda: [device]),
        (jax, "local_devices", lambda: [device]), (jax, "__version_info__", version),
        (cudnn_module, "check_cudnn_version", lambda: CUDNN), (cudnn_module, "xla_bridge", bridge),
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.default_device(None))
        for owner, name, value in patched:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield device


def why_not_fused(device) -> str | None:
    """Returns why two such devices cannot exchange states in a kernel, or None; the driver is stood in for."""
    with (
        mock.patch.object(fused, "_groups", lambda axes, mesh: ((device, device),)),
        mock.patch.object(peer_memory, "peer_memory", lambda groups, num_bytes: 0),
    ):
        return fused.why_not(1024, ("seq",))


def cell(feature: str, backend: str, device) -> str:
    """Returns a cell: a word for a kernel of this library, else "no", and the backend that runs instead."""
    found = evidence.find(feature, backend, device)
    word = f"[{found.word}](results/{found.folder})" if found.folder else found.word
    if backend == "mosaic_gpu":
        return word
    return f"no: `{backend}`" + ("" if found.word == evidence.UNTRIED else f", {word}")


def column(platform: Platform) -> dict[str, str]:
    """Returns the cells of a platform by feature."""
    with standing_in(platform) as device:
        cells = {name: cell(name, found["runs_by"], device) for name, found in kernels.examine().items()}
        runs = why_not_fused(device) is None
        return cells | {"reduction `fused`": cell("fused", "mosaic_gpu", device) if runs else "no: `gather`"}


def platform_table() -> str:
    """Returns the table of features and platforms."""
    columns = [column(platform) for platform in PLATFORMS]
    lines = ["| | " + " | ".join(platform.title for platform in PLATFORMS) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {feature} | " + " | ".join(cells[feature] for cells in columns) + " |" for feature in columns[0]]
    return "\n".join(lines) + "\n"


def datasheet_table() -> str:
    """Returns the table of datasheets, with the documents that their constants are from."""
    units = {"memory_bytes": 1e9, "read_bytes_per_s": 1e9, "product_flops_per_s": 1e12, "link_bytes_per_s": 1e9}
    lines = ["| | memory, GB | read, GB/s | bfloat16, TFLOP/s | link, GB/s | documents |", "|---" * 6 + "|"]
    for name in datasheets.names():
        constants, documents = datasheets.constants(name), datasheets.sources(name)
        numbers = " | ".join(f"{constants[constant] / unit:,g}" for constant, unit in units.items())
        document, *others = dict.fromkeys(documents.values())
        remarks = "".join(f"; {other.removeprefix(f'{document}, ')}" for other in others)
        lines.append(f"| {name} | {numbers} | {document}{remarks} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    table = {"platforms": platform_table, "datasheets": datasheet_table}
    print(table[sys.argv[1]](), end="")
