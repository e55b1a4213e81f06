"""Memory of compiled programs, of arrays, and of devices at run time."""

import dataclasses
import math
import os
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledMemory:
    """Bytes that a compiled program needs on each device, from XLA's buffer assignment.

    Attributes:
      argument_bytes, output_bytes, temp_bytes: arguments, outputs and temporaries.
      alias_bytes: the part of the output that shares its memory with (donated) arguments.
    """

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Arguments, outputs and temporaries together, shared memory counted once."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes - self.alias_bytes


def compiled_memory(compiled: jax.stages.Compiled) -> CompiledMemory | None:
    """Returns the memory that a compiled program needs on each device; None where the backend does not say.

    Example:
      >>> compiled_memory(jax.jit(f).lower(x).compile()).temp_bytes
    """
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    return CompiledMemory(
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
    )


def bytes_per_device(arrays: Any) -> int:
    """Returns the bytes that a pytree of arrays (or shapes with shardings) takes on each of its devices.

    Example:
      >>> bytes_per_device(jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=by_rows_over_eight_devices))
      512
    """
    leaves = jax.tree.leaves(arrays)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def device_memory_bytes(num_devices: int | None = None) -> int:
    """Returns the bytes of this process's first device that JAX may use.

    Args:
      num_devices: emulated devices that share the machine's memory; default: all that this process has.
    """
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (num_devices or jax.local_device_count())


def runtime_peak_memory_bytes(devices: list[jax.Device]) -> int | None:
    """Returns the peak memory of this process's `devices`, the largest of them, since the process began; None on CPU.

    The peak cannot be reset. Compare it before and after a program: only a program that raised it needs that much.
    """
    stats = [device.memory_stats() for device in devices if device.process_index == jax.process_index()]
    peaks = [one["peak_bytes_in_use"] for one in stats if one and "peak_bytes_in_use" in one]
    return max(peaks) if peaks else None
