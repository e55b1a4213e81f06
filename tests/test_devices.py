"""Devices that a command gets: real ones, or emulated on the CPU."""

import os
import subprocess
import sys
import textwrap

import jax
import pytest

from tree_attn import devices


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
