"""How fast neighbouring devices exchange data: the bare transfer that a ring cannot beat."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

_WARMUP = 3  # a GPU takes a while to raise its clocks


def neighbour_gb_per_s(mesh: Mesh, num_bytes: int | None = None, n_iters: int = 10) -> float | None:
    """Rate at which every device sends to the next one, all at once, in GB/s (1e9 bytes) per device; the median.

    A chain of `ppermute`s, each sending what the one before received, in one program; all axes of the mesh form one
    ring.

    Args:
        num_bytes: size of one transfer; default 256 MB, and 4 MB between emulated devices. A device holds a few such
            buffers meanwhile.

    Returns:
        GB/s, or None where there is one device.

    Example:
        >>> neighbour_gb_per_s(make_mesh({"device": 8}))
    """
    n_devices = mesh.devices.size
    if n_devices == 1:
        return None
    is_emulated = mesh.devices.flat[0].platform == "cpu"
    if num_bytes is None:
        num_bytes = 4_000_000 if is_emulated else 256_000_000
    num_hops = 2 if is_emulated else 16
    axes = tuple(mesh.axis_names)
    permutation = [(i, (i + 1) % n_devices) for i in range(n_devices)]
    num_elements = max(1, num_bytes // 4)

    def send(x):
        for _ in range(num_hops):  # unrolled: a loop would copy each arrival into its carry
            x = jax.lax.ppermute(x, axes, permutation)
        return x

    def fill():
        return jnp.full((1, num_elements), jax.lax.axis_index(axes), jnp.float32)

    shard_map = functools.partial(jax.shard_map, mesh=mesh, out_specs=P(axes), check_vma=False)
    whole = jax.jit(shard_map(fill, in_specs=()))()
    program = jax.jit(shard_map(send, in_specs=P(axes))).lower(whole).compile()
    for _ in range(_WARMUP):
        jax.block_until_ready(program(whole))
    seconds = []
    for _ in range(n_iters):
        start = time.perf_counter()
        jax.block_until_ready(program(whole))
        seconds.append(time.perf_counter() - start)
    return num_hops * num_elements * 4 / float(np.median(seconds)) / 1e9
