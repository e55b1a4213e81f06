"""The least time that the hardware allows, by the peaks of its datasheet (`tree_attn/cost/datasheets.json`)."""

from tree_attn.cost import datasheets
from tree_attn.cost.step import DecodeStep


def read_limit_us(step: DecodeStep, device_kind: str) -> float | None:
    """Returns the least time of a step in microseconds: every device reads its keys and values once.

        us = 2 b t d_kv / read_bytes_per_s * 1e6

    Args:
      step: the shape of the step.
      device_kind: `jax.Device.device_kind`. None is returned for one without a datasheet here.

    Example:
      >>> step = DecodeStep(batch=1, num_keys=640_000, num_heads=16, num_kv_heads=16, head_dim=128,
      ...                   dtype="bfloat16", n_devices=8)
      >>> round(read_limit_us(step, "NVIDIA H200"))
      137
    """
    return limit_us(device_kind, num_bytes=step.key_value_bytes_per_device)


def sent_limit_bytes(step: DecodeStep) -> float:
    """Returns the least bytes that a device sends in a step, on average: all states but one are sent, once.

        bytes = (p - 1) / p * 4 b (d + n_h)

    Example:
      >>> step = DecodeStep(batch=1, num_keys=640_000, num_heads=16, num_kv_heads=16, head_dim=128,
      ...                   dtype="bfloat16", n_devices=8)
      >>> sent_limit_bytes(step)
      7224.0
    """
    return (step.n_devices - 1) / step.n_devices * step.packed_state_bytes


def limit_us(device_kind: str, *, num_bytes: float, num_flops: float = 0.0) -> float | None:
    """Returns the least time to read bytes from a device's memory and to make dense bfloat16 products.

        us = max(num_bytes / read_bytes_per_s, num_flops / product_flops_per_s) * 1e6

    Both run at once, so that the longer of the two counts and not their sum. None without a datasheet.

    Example:
      >>> limit_us("NVIDIA H200", num_bytes=4.8e12, num_flops=1e12)
      1000000.0
    """
    try:
        peaks = datasheets.rates(device_kind)
    except KeyError:
        return None
    return max(num_bytes / peaks["read_bytes_per_s"], num_flops / peaks["product_flops_per_s"]) * 1e6
