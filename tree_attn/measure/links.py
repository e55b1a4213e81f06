"""Rates of the links between devices: bare transfers, which no ring can beat, and small collectives."""

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tree_attn.cost.rotation import JOIN_FLAG
from tree_attn.measure.latency import latency_us

TRANSFER_CHUNK_BYTES = 64 * 1024


def spread_transfers() -> None:
    """Makes NCCL spread a transfer over more channels: rings then run at the link's rate from 40 MB on.

    Among p GPUs of a host, NCCL gives a transfer 32 / p channels of some 20 GB/s each. It doubles them only while each
    has more than 32 times `NCCL_P2P_NVL_CHUNKSIZE` to send, 16 MB by default (its `addP2pToPlan`). So 42 MB between
    eight H200s go over four channels, at 80 of 350 GB/s. With chunks of 64 KiB each channel has 2 MB at most.

    On four H200s 17 to 84 MB are sent up to twice as fast; 2 to 8 MB a fifth slower, and 300 MB and more up to 2 %
    (docs/log/ring.md: "NCCL's channels limit transfers below 134 MB"). Call it before JAX starts its devices; what the
    environment says already stays.

    Example:
      >>> spread_transfers()  # then ring_decode, ring_attention
    """
    os.environ.setdefault("NCCL_P2P_NVL_CHUNKSIZE", str(TRANSFER_CHUNK_BYTES))


def join_transfers() -> None:
    """Makes XLA send K and V as one transfer on GPUs, whatever their size, without a copy.

    By default it joins transfers up to 32 MiB. Of larger ones it runs one beside the attention and waits for the other
    (docs/log/ring.md: "XLA runs one of two large transfers beside the attention"). Call it before JAX starts its
    devices; what `XLA_FLAGS` says already stays.

    Example:
      >>> join_transfers()  # then ring_attention
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if JOIN_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {JOIN_FLAG}={1 << 34}".strip()


@dataclasses.dataclass(frozen=True, kw_only=True)
class AxisLinks:
    """Medians for the links along one mesh axis, with all groups of that axis at once.

    Attributes:
      axis: name of the mesh axis.
      size: devices along it.
      sum_us, gather_us: one all-reduce and one all-gather of 4 kB per device, in a chain of dependent ones.
      neighbour_gb_per_s: see the function `neighbour_gb_per_s`.
    """

    axis: str
    size: int
    sum_us: float
    gather_us: float
    neighbour_gb_per_s: float


def measure_axes(mesh: Mesh, num_bytes: int | None = None) -> list[AxisLinks]:
    """Times the links along every axis of more than one device, fastest axis first.

    Args:
      mesh: the devices.
      num_bytes: size of one transfer to a neighbour, see `neighbour_gb_per_s`.

    Example:
      >>> measure_axes(make_mesh(("device", "node")))
    """
    return [
        AxisLinks(
            axis=axis,
            size=mesh.shape[axis],
            sum_us=_collective_us(mesh, lambda x, axis=axis: jax.lax.pmean(x, axis)),
            gather_us=_collective_us(mesh, lambda x, axis=axis: jax.lax.all_gather(x, axis)[0]),
            neighbour_gb_per_s=neighbour_gb_per_s(mesh, num_bytes, axis_name=axis),
        )
        for axis in reversed(mesh.axis_names)
        if mesh.shape[axis] > 1
    ]


def _collective_us(mesh: Mesh, collective) -> float:
    """Returns the median time of `collective`, [1, 1024] -> [1, 1024] float32 on each device, from chains of them."""
    axes = tuple(mesh.axis_names)
    shard_map = functools.partial(jax.shard_map, mesh=mesh, out_specs=P(axes), check_vma=False)
    whole = jax.jit(shard_map(lambda: jnp.ones((1, 1024), jnp.float32), in_specs=()))()
    long_chain, n_iters = (None, 20) if is_emulated(mesh) else (64, 32)
    program = shard_map(collective, in_specs=P(axes))
    return latency_us(program, whole, n_iters=n_iters, chain=16, long_chain=long_chain).median_us


def is_emulated(mesh: Mesh) -> bool:
    """Returns True if the devices are emulated on the CPU: their times measure nothing."""
    return mesh.devices.flat[0].platform == "cpu"


def neighbour_gb_per_s(
    mesh: Mesh,
    num_bytes: int | None = None,
    n_iters: int | None = None,
    axis_name: str | None = None,
    *,
    both_ways: bool = False,
) -> float | None:
    """Returns the rate at which every device sends to the next one, all at once, in GB/s (1e9 bytes) per device.

    The median over chains of `ppermute`s that `latency.latency_us` times; each sends the array that it received.

    Args:
      mesh: the devices.
      num_bytes: size of one transfer; default 256 MB, and 4 MB between emulated devices. A device needs memory for a
        few such buffers.
      n_iters: samples; default 32, and 10 between emulated devices.
      axis_name: every group of devices along this axis forms a ring; default: all axes of the mesh form one.
      both_ways: half of the bytes go to the previous device instead; the rate counts both halves.

    Returns:
      GB/s, or None for one device.

    Example:
      >>> neighbour_gb_per_s(make_mesh({"seq": 8}))
    """
    axes = tuple(mesh.axis_names)
    ring = axes if axis_name is None else axis_name
    ring_size = mesh.devices.size if axis_name is None else mesh.shape[axis_name]
    if ring_size == 1:
        return None
    emulated = is_emulated(mesh)
    if num_bytes is None:
        num_bytes = 4_000_000 if emulated else 256_000_000
    num_hops = 2 if emulated else 16
    steps = (1, -1) if both_ways else (1,)
    permutations = [[(i, (i + step) % ring_size) for i in range(ring_size)] for step in steps]
    num_elements = max(1, num_bytes // 4 // len(steps))

    def send(parts):
        for _ in range(num_hops):  # unrolled: a loop of single hops would copy each arrival into its carry
            parts = [jax.lax.ppermute(x, ring, permutation) for x, permutation in zip(parts, permutations)]
        return parts

    def fill():
        return [jnp.full((1, num_elements), jax.lax.axis_index(axes), jnp.float32) for _ in steps]

    shard_map = functools.partial(jax.shard_map, mesh=mesh, out_specs=P(axes), check_vma=False)
    whole = jax.jit(shard_map(fill, in_specs=()))()
    long_chain, usual = (None, 10) if emulated else (4, 32)
    timing = latency_us(shard_map(send, in_specs=P(axes)), whole, n_iters=n_iters or usual, long_chain=long_chain)
    return num_hops * len(steps) * num_elements * 4 / timing.median_us / 1e3
