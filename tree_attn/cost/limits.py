"""The least time that the hardware allows, from the rates in a machine's file (`tree_attn/cost/machines/`)."""

from tree_attn.cost import machine
from tree_attn.cost.step import DecodeStep


def read_limit_us(step: DecodeStep, device_kind: str) -> float | None:
    """Returns the least time of a step in microseconds: every device reads its keys and values once.

        us = 2 b t d_kv / Machine.copy_bytes_per_s * 1e6

    Args:
      step: the shape of the step.
      device_kind: `jax.Device.device_kind`. None is returned for one without a measured rate.

    Example:
      >>> step = DecodeStep(batch=1, num_keys=640_000, num_heads=16, num_kv_heads=16, head_dim=128,
      ...                   dtype="bfloat16", n_devices=8)
      >>> round(read_limit_us(step, "NVIDIA H200"))
      152
    """
    return memory_limit_us(step.key_value_bytes_per_device, device_kind)


def memory_limit_us(num_bytes: float, device_kind: str) -> float | None:
    """Returns the least time to read `num_bytes` from a device's own memory; None without a measured rate.

    Example:
      >>> memory_limit_us(4.3e12, "NVIDIA H200")
      1000000.0
    """
    known = machine.load(device_kind)
    return _time_us(num_bytes, known and known.copy_bytes_per_s)


def products_limit_us(num_flops: float, device_kind: str) -> float | None:
    """Returns the least time of so many operations in bfloat16 matrix products; None without a measured rate."""
    known = machine.load(device_kind)
    return _time_us(num_flops, known and known.product_flops_per_s)


def _time_us(amount: float, per_s: float | None) -> float | None:
    return None if per_s is None else amount / per_s * 1e6
