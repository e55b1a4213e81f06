"""Devices that a command gets: real ones, or emulated on the CPU."""

import functools
import os
import subprocess
import sys
import textwrap
import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas
from jax.sharding import PartitionSpec as P

from tree_attn import devices, make_mesh, reduce, sharded
from tree_attn.arguments import AttentionOptions
from tree_attn.local import choose, cudnn, flash_attn, mosaic_gpu
from tree_attn.masking import visibility
from tree_attn.placement import Shard
from tree_attn.reduce import fused


def test_enough_devices():
    assert devices.ensure_devices(3) == jax.devices()[:3]
    assert len(devices.ensure_devices(8)) == 8


def test_too_late_for_more_devices_says_how_to_get_them():
    with pytest.raises(ValueError, match=r"n_devices=9 .* already started with 8 CPU devices.*jax_num_cpu_devices', 9"):
        devices.ensure_devices(9)


def test_the_platform_of_programs_is_that_of_the_default_device():
    assert devices.default_platform() == "cpu"
    for device in ("cpu", jax.devices()[1]):
        with jax.default_device(device):
            assert devices.default_platform() == "cpu"


def stand_in(platform: str, version: str, kind: str) -> types.SimpleNamespace:
    client = types.SimpleNamespace(platform_version=version)
    return types.SimpleNamespace(
        id=0, process_index=0, platform=platform, device_kind=kind, client=client, compute_capability="gfx942"
    )


ROCM = stand_in("gpu", "PJRT C API\nrocm 70000", "AMD Instinct MI300X")
CUDA = stand_in("gpu", "PJRT C API\ncuda 13000", "NVIDIA H200")
TPU = stand_in("tpu", "PJRT C API\nTFRT TPU v5 lite", "TPU v5 lite")


def on(monkeypatch, device) -> None:
    """Lets JAX describe `device` as the one that it has."""
    monkeypatch.setattr(jax, "default_backend", lambda: device.platform)
    for name in ("devices", "local_devices"):
        monkeypatch.setattr(jax, name, lambda: [device])


class Nccl:
    """NCCL as loaded: its version, and whether it has the function that JAX 0.12 calls."""

    def __init__(self, number: int, **functions):
        self.number = number
        vars(self).update(functions)

    def ncclGetVersion(self, found) -> int:
        found._obj.value = self.number
        return 0


def test_an_nccl_that_is_too_old_is_named_before_a_mesh_is_made(monkeypatch):
    loaded = functools.partial(monkeypatch.setattr, devices, "_loaded_nccl")
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    loaded(lambda: Nccl(22_809))
    assert devices.loaded_nccl_version() == "2.28.9"
    with pytest.raises(
        NotImplementedError, match=r"devices must be one GPU .* NCCL 2\.28\.9, got 2: .*nvidia-nccl-cu13"
    ):
        make_mesh({"seq": 2}, [CUDA, CUDA])
    for others in ([CUDA], [ROCM, ROCM], jax.devices()):
        devices.check_nccl(others)
    loaded(lambda: Nccl(22_902, ncclGetPeerDevicePointer=None))
    devices.check_nccl([CUDA, CUDA])
    loaded(lambda: Nccl(22_809))
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    devices.check_nccl([CUDA, CUDA])


@pytest.mark.skipif("gpu" in jax.default_backend(), reason="a process with GPUs has loaded NCCL")
def test_without_nccl_there_is_no_version_of_it():
    assert devices.loaded_nccl_version() is None


@pytest.mark.parametrize("device, runtime", [(ROCM, "rocm"), (CUDA, "cuda"), (TPU, "tpu")])
def test_the_runtime_tells_gpus_apart(monkeypatch, device, runtime):
    assert devices.default_runtime() == "cpu" == devices.runtime_of(jax.devices()[0])
    assert devices.runtime_of(device) == runtime
    on(monkeypatch, device)
    assert (devices.default_runtime(), devices.default_platform()) == (runtime, device.platform)


@pytest.mark.parametrize("device, runtime", [(ROCM, "rocm"), (TPU, "tpu")])
def test_nothing_of_nvidia_is_tried_on_other_accelerators(monkeypatch, device, runtime):
    """XLA and a gather are picked, each refusal names the platform, and no kernel is loaded."""
    for name in ("tree_attn.kernels.exchange", "tree_attn.kernels.targets", "jax.experimental.pallas.mosaic_gpu"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it raises
    monkeypatch.delattr(pallas, "mosaic_gpu", raising=False)
    on(monkeypatch, device)
    run = functools.partial(sharded.run_on_mesh, specs=(P(),), axes=(), mesh=None, out_specs=P())
    assert jax.eval_shape(functools.partial(run, jnp.sum), (jnp.ones(3),)).shape == ()
    monkeypatch.setattr(flash_attn, "load", lambda: None)
    assert cudnn.unavailable() == f"cudnn needs a CUDA GPU; programs run on {runtime!r} here"
    assert flash_attn.unavailable() == f"flash_attn needs a CUDA GPU; programs run on {runtime!r} here"
    assert mosaic_gpu.unavailable() == f"mosaic_gpu needs an NVIDIA GPU; programs run on {runtime!r} here"
    monkeypatch.setattr(fused, "_groups", lambda axes, mesh: ((device, device),))
    assert fused.why_not(1024, ("seq",)) == f"fused needs NVIDIA GPUs, got {runtime!r} devices"
    assert reduce.cheapest(1024, {"seq": 2}) == "gather"
    sizes = [jax.ShapeDtypeStruct((1, count, 2, 64), "bfloat16") for count in (1, 128, 128)]
    view = visibility(AttentionOptions(), batch=1, num_queries=1, num_slots=128, shard=Shard())
    assert choose(*sizes, implementation=None, logits_soft_cap=None, visible=view) == "xla"


@pytest.mark.parametrize("n_devices", [0, -2, 1.0, "8", True])
def test_bad_device_count(n_devices):
    with pytest.raises(ValueError, match="n_devices must be an integer of at least 1, got"):
        devices.ensure_devices(n_devices)


@pytest.mark.parametrize("flags, count, expected", [("", 5, 5), ("--xla_force_host_platform_device_count=6", 2, 6)])
def test_devices_are_emulated_in_a_fresh_process(flags, count, expected):
    code = f"""
        import jax
        from tree_attn import devices
        assert len(devices.ensure_devices({count})) == {count}
        assert len(jax.devices("cpu")) == {expected}
    """
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, env=environment, timeout=120)
