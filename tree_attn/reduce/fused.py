"""Everyone to everyone within one kernel: no collective, and no host in between."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tree_attn.cost.machine import EXCHANGES
from tree_attn.kernels.epilogue import PARTIALS_AT_ONCE, Epilogue
from tree_attn.kernels.exchange import (
    MAX_CTAS,
    NUM_CTAS,
    PARTIAL_WORDS,
    Buffers,
    exchange,
    exchange_gather,
    exchange_sum,
)
from tree_attn.local import ShardAttention
from tree_attn.reduce.peer_memory import peer_memory
from tree_attn.state import SoftmaxState

MAX_ELEMENTS = EXCHANGES["fused"].max_elements  # of one device's state
OLDEST_JAX = (0, 11)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Merges over the devices that meet in `buffers`; a local kernel that leaves partial states calls it itself."""

    rank: jax.Array | None
    buffers: Buffers

    def merge(self, state: SoftmaxState) -> SoftmaxState:
        rows, head_dim = state.lse.size, state.out.shape[-1]
        given = state.out.reshape(rows, 1, head_dim), state.lse.reshape(rows, 1)
        out, lse = exchange(*given, self.rank, self.buffers)
        return SoftmaxState(out.reshape(state.out.shape), lse.reshape(state.lse.shape))

    def epilogue(
        self, result: jax.ShapeDtypeStruct, num_ctas: int, num_partials: int, padded_head_dim: int
    ) -> Epilogue | None:
        """What merges at the end of a kernel that makes partial states; None if it cannot.

        Args:
          result: of the merged `out`, `[rows, columns, H]`; it may be padded, so larger than the one asked for.
          num_ctas, num_partials: of the kernel; each partial is of `columns` columns and `padded_head_dim` head dims.
        """
        *rows, columns, head_dim = result.shape
        words = (num_partials + PARTIALS_AT_ONCE) * (padded_head_dim + 2) * columns  # some are read in vain
        has_room = math.prod(rows) * columns * (head_dim + 1) <= self.buffers.capacity and words <= PARTIAL_WORDS
        return Epilogue(self.buffers, num_ctas) if has_room and NUM_CTAS <= num_ctas <= MAX_CTAS else None


def fused(state: SoftmaxState | ShardAttention, axes: tuple[str, ...], mesh: Mesh | None = None) -> SoftmaxState:
    """Merges over `axes`, links of one host: each device writes its state to all others and merges what it gets.

    One latency, and no launch but the kernel's own, for `2 (p - 1) B T N (H + 1)` elements sent: each goes with the
    number of the step, by which the receiver knows it.

    Args:
      state: this device's, or its attention yet to be run, of which partial states then need no merge of their own.
      mesh: whose devices these are. Without it they must be all of `jax.devices()`, in that order.
    Raises:
      NotImplementedError: what is needed is missing (NVIDIA GPUs of one host, in one process or one each; JAX 0.11), or
        the state is larger than `MAX_ELEMENTS`.
    """
    if isinstance(state, ShardAttention):
        return state.run(exchange=Exchange(*_meeting(axes, mesh, state.num_elements)))
    return Exchange(*_meeting(axes, mesh, state.out.size + state.lse.size)).merge(state)


def fused_sum(x: jax.Array, axes: tuple[str, ...], mesh: Mesh | None = None) -> jax.Array:
    """`jax.lax.psum(x, axes)` of few elements by the same kernel, added in float32; arguments and errors as `fused`."""
    rank, buffers = _meeting(axes, mesh, x.size)
    return exchange_sum(x.reshape(-1), rank, buffers).reshape(x.shape)


def fused_gather(x: jax.Array, axes: tuple[str, ...], mesh: Mesh | None = None) -> jax.Array:
    """`jax.lax.all_gather(x, axes)` of few elements, floats of at most 4 bytes, by the same kernel; as `fused_sum`."""
    rank, buffers = _meeting(axes, mesh, x.size)
    return exchange_gather(x.reshape(-1), rank, buffers).reshape(-1, *x.shape)


def why_not(elements: int, axes: tuple[str, ...], mesh: Mesh | None = None) -> str | None:
    """Returns the reason why no state of `elements` can be exchanged over `axes`, or None where it can."""
    try:
        _meeting_place(axes, mesh, elements)
    except NotImplementedError as error:
        return str(error)
    return None


def _meeting(axes: tuple[str, ...], mesh: Mesh | None, elements: int) -> tuple[jax.Array | None, Buffers]:
    """Returns this device's rank, as the kernel takes it, and the buffers in which the devices along `axes` meet."""
    group, buffers = _meeting_place(axes, mesh, elements)
    is_alone = all(device.process_index != other.process_index for device, other in itertools.pairwise(group))
    return None if is_alone else jax.lax.axis_index(axes).astype(jnp.int32)[None], buffers


def _meeting_place(axes: tuple[str, ...], mesh: Mesh | None, elements: int) -> tuple[tuple[jax.Device, ...], Buffers]:
    """Returns the first group of devices that meet along `axes`, and the buffers of all groups."""
    if jax.__version_info__ < OLDEST_JAX:
        raise NotImplementedError(f"fused was run with JAX 0.11 and newer only, this is {jax.__version__}")
    if elements > MAX_ELEMENTS:
        raise NotImplementedError(f"fused exchanges up to {MAX_ELEMENTS} elements, got {elements}")
    groups = _groups(axes, mesh)
    buffers = Buffers(table=0, num_ranks=len(groups[0]), capacity=MAX_ELEMENTS)
    return groups[0], buffers.replace(table=peer_memory(groups, buffers.num_bytes))


def _groups(axes: tuple[str, ...], mesh: Mesh | None) -> tuple[tuple[jax.Device, ...], ...]:
    """The devices that meet along `axes`, in the order of their index along them; one group per index of the rest."""
    if not isinstance(mesh, Mesh):
        mesh = mesh or jax.sharding.get_abstract_mesh()
        if mesh.size != jax.device_count():
            raise NotImplementedError(
                f"fused needs mesh where the axes {mesh.axis_names} are not of all {jax.device_count()} devices"
            )
        grid = np.array(jax.devices()).reshape(mesh.axis_sizes)
    else:
        grid = mesh.devices
    order = [mesh.axis_names.index(axis) for axis in axes]
    rest = [i for i in range(grid.ndim) if i not in order]
    ranks = int(np.prod([grid.shape[i] for i in order]))
    return tuple(map(tuple, grid.transpose(rest + order).reshape(-1, ranks)))
