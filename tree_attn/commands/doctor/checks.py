"""The examination of `tree-attn doctor`: devices, links, and every kernel and reduction tried on a small step."""

import dataclasses
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tree_attn import attend, reference, tree_decode
from tree_attn.commands.doctor import calibrate, kernels, surroundings
from tree_attn.commands.phases import phase
from tree_attn.commands.units import count
from tree_attn.cost.machine import Machine
from tree_attn.devices import ensure_devices, started_devices
from tree_attn.local import IMPLEMENTATIONS
from tree_attn.measure import links, provenance
from tree_attn.mesh import NODE_AXES, make_mesh, node_axes
from tree_attn.reduce import REDUCTIONS
from tree_attn.tolerances import relative_out_tolerance
from tree_attn.topology import node_by_node


def examine(n_devices: int | None = None) -> dict[str, Any]:
    """Returns everything that `tree-attn doctor` shows, ready for JSON.

    Returns:
      `hardware`, `devices`, `links` (`neighbour_gb_per_s`, `nvidia_smi_topo`), `versions`, `git_commit`;
      `implementations`, `reductions` and `extras`: name -> None where it is there and runs, else the reason why not;
      `kernels` and `unmeasured`, see `kernels`; `caches` and `slow`, see `surroundings`.
    """
    with phase("starting devices"):
        devices = _devices(n_devices)
        mesh = make_mesh({"seq": len(devices)}, devices)
    with phase("timing the links"):
        found = {"neighbour_gb_per_s": links.neighbour_gb_per_s(mesh), "nvidia_smi_topo": _nvidia_smi_topo()}
    with phase("trying local kernels", len(IMPLEMENTATIONS)) as trying:
        implementations = {}
        for name, backend in IMPLEMENTATIONS.items():
            trying.describe(name)
            implementations[name] = backend.unavailable() or _try_implementation(name)
            trying.advance()
    reductions = _reductions(devices)
    with phase("asking what runs what"):
        by_feature = kernels.examine()
    return {
        "hardware": provenance.hardware(devices),
        "devices": [_describe(device) for device in devices],
        "links": found,
        "versions": provenance.versions(),
        **provenance.completed({}),
        "implementations": implementations,
        "reductions": reductions,
        "kernels": by_feature,
        "unmeasured": kernels.find_unmeasured(jax.local_devices()[0], by_feature),
        "extras": surroundings.find_extras(),
        "caches": surroundings.find_caches(),
        "slow": surroundings.find_slow(devices, implementations, reductions),
    }


def examine_distributed(launch, n_devices: int | None = None) -> dict[str, Any]:
    """Returns everything that `tree-attn doctor --distributed` shows, ready for JSON; every process calls it.

    Returns:
      `launch` (see `tree_attn.cluster.launch.Launch`), `hardware`, `n_devices`, and `levels`, fastest links first: the
      fields of `tree_attn.measure.links.AxisLinks`, along axis "device" inside a node and "node" across nodes.
    """
    devices = _devices(n_devices)
    levels = links.measure_axes(make_mesh(NODE_AXES, devices))
    return {
        "launch": dataclasses.asdict(launch),
        "hardware": provenance.hardware(devices),
        "n_devices": len(devices),
        "levels": [dataclasses.asdict(level) for level in levels],
    }


def measure_machine(n_devices: int | None, command: str) -> Machine:
    """Measures the parameters of the cost model, with their provenance; every process calls it."""
    devices = _devices(n_devices)
    measured = calibrate.measure_machine(devices)
    facts = {"hardware": provenance.hardware(devices), "n_processes": jax.process_count(), "command": command}
    facts |= provenance.completed({}) | {"versions": provenance.versions()}
    return dataclasses.replace(measured, provenance=facts | {"points": measured.provenance})


def _devices(n_devices: int | None) -> list[jax.Device]:
    """Returns the devices node by node, for the axes of a hierarchical reduction."""
    return node_by_node(started_devices() if n_devices is None else ensure_devices(n_devices))


def _describe(device: jax.Device) -> dict[str, Any]:
    is_local = device.process_index == jax.process_index()  # other processes' devices have no statistics here
    stats = (device.memory_stats() if is_local else None) or {}
    return {
        "id": device.id,
        "platform": device.platform,
        "kind": device.device_kind,
        "process": device.process_index,
        "memory_bytes": stats.get("bytes_limit"),
    }


def _try_implementation(name: str) -> str | None:
    """Returns None if a local kernel agrees with the oracle on a small attention, else the reason."""
    query, key, value = _small_attention(num_keys=128)
    try:
        state = jax.jit(lambda *arrays: attend(*arrays, implementation=name))(query, key, value)
        return _difference(np.asarray(state.out), query, key, value)
    except Exception as error:  # any exception is the answer: the kernel cannot run here
        return _failure(error)


def _reductions(devices: Sequence[jax.Device]) -> dict[str, str | None]:
    """Returns, for every reduction, None if it agrees with the oracle over all devices, else the reason."""
    found: dict[str, str | None] = {}
    with phase("trying reductions", len(REDUCTIONS)) as trying:
        for name in REDUCTIONS:
            trying.describe(name)
            axes = node_axes(devices) if name == "hierarchical" else {"seq": len(devices)}
            if axes is None:
                found[name] = (
                    "it needs two mesh axes of at least two devices each, and "
                    f"{count(len(devices), 'device')} cannot be arranged so"
                )
            else:
                found[name] = _try_reduction(name, make_mesh(axes, devices), tuple(axes))
            trying.advance()
    return found


def _try_reduction(name: str, mesh: Mesh, axes: tuple[str, ...]) -> str | None:
    query, key, value = _small_attention(num_keys=16 * mesh.devices.size)
    options = dict(axis_name=axes, mesh=mesh, reduction=name, implementation="xla")
    try:
        out = jax.jit(lambda *arrays: tree_decode(*arrays, **options))(query, key, value)
        return _difference(np.asarray(out.addressable_data(0)), query, key, value)
    except NotImplementedError as error:
        return str(error)
    except Exception as error:  # any exception is the answer: the reduction cannot run here
        return _failure(error)


def _small_attention(num_keys: int) -> tuple[np.ndarray, ...]:
    """Returns host arrays, on no device yet: query `[1, 1, 4, 64]`, key and value `[1, S, 2, 64]`."""
    rng = np.random.default_rng(0)
    shapes = ((1, 1, 4, 64), (1, num_keys, 2, 64), (1, num_keys, 2, 64))
    return tuple(rng.standard_normal(shape, np.float32).astype(jnp.bfloat16) for shape in shapes)


def _difference(out: np.ndarray, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> str | None:
    """Returns None if `out` agrees with the oracle, else by how much it does not."""
    expected = reference.attention(query, key, value)[0]
    error, tolerance = np.abs(out.astype(np.float64) - expected).max(), relative_out_tolerance("bfloat16", expected)
    return None if error <= tolerance else f"it is WRONG here: off by {error:.3g}, and {tolerance:.3g} is allowed"


def _failure(error: Exception) -> str:
    return f"it fails: {type(error).__name__}: {str(error).strip()[:500]}"


def _nvidia_smi_topo() -> str | None:
    """Returns NVIDIA's matrix of links, or None where there is no nvidia-smi or it fails."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
