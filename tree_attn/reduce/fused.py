"""The fused reduction: an exchange of all devices with all within one kernel, without a collective or the host."""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tree_attn.cost.machine import EXCHANGES
from tree_attn.local import Epilogue, ShardAttention
from tree_attn.mesh import vary_as
from tree_attn.state import SoftmaxState

MAX_ELEMENTS = EXCHANGES["fused"].max_elements  # of one device's state
OLDEST_JAX = (0, 11)
RUN_ON = "9.0"  # compute capability


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The merge over the devices that meet in `buffers`: a `tree_attn.local.Exchange`.

    rank:     this device's, int32 `[1]`; None where each process has one device
    buffers:  the devices' `tree_attn.kernels.exchange_words.Buffers`
    """

    rank: jax.Array | None
    buffers: Any

    def merge(self, state: SoftmaxState) -> SoftmaxState:
        """Returns the state over all devices, in a kernel of its own."""
        from tree_attn.kernels.exchange import exchange

        count, head_dim = state.lse.size, state.out.shape[-1]
        out, lse = state.out.reshape(count, 1, head_dim), state.lse.reshape(count, 1)
        out, lse = exchange(out, lse, self.rank, self.buffers)
        return SoftmaxState(out.reshape(state.out.shape), lse.reshape(state.lse.shape))

    def epilogue(
        self, result: jax.ShapeDtypeStruct, num_ctas: int, num_partials: int, padded_head_dim: int
    ) -> Epilogue | None:
        """Returns the exchange as the end of a kernel that makes partial states; None if this kernel cannot end in it.

        Args:
          result: the merged `out`, `[output tiles, columns, H]`; padding counts, so it may exceed `MAX_ELEMENTS`.
          num_ctas: of the kernel.
          num_partials: the most that it leaves, each of `columns` columns and `padded_head_dim` head dims.
        """
        from tree_attn.kernels import epilogue, exchange_words

        *output_tiles, columns, head_dim = result.shape
        # The last read of an output tile's partials may reach beyond them, by up to `PARTIALS_AT_ONCE`.
        words = (num_partials + epilogue.PARTIALS_AT_ONCE) * (padded_head_dim + 2) * columns
        elements = math.prod(output_tiles) * columns * (head_dim + 1)
        has_room = elements <= self.buffers.capacity and words <= exchange_words.PARTIAL_WORDS
        if not has_room or not exchange_words.MIN_CTAS <= num_ctas <= exchange_words.MAX_CTAS:
            return None
        return epilogue.Epilogue(self.buffers, num_ctas)


def fused(state: SoftmaxState | ShardAttention, axes: tuple[str, ...], mesh: Mesh | None = None) -> SoftmaxState:
    """Merges over `axes`, links of one host: each device writes its state to all others and merges those it receives.

    It costs one latency and one launch, for `2 (p - 1) B T N (H + 1)` elements sent. Each element travels with the
    step's number, by which the receiver recognises it.

    Args:
      state: this device's, or its attention, not yet run: its kernel's partial states then need no merge of their own.
      mesh: the mesh of the axes. Without it they must be of all `jax.devices()`, in that order.
    Raises:
      NotImplementedError: the devices are not NVIDIA GPUs of one host, in one process or one process each; they cannot
        reach each other's memory, or have 64 multiprocessors or fewer; JAX is older than 0.11; or the state is larger
        than `MAX_ELEMENTS`.
    """
    if isinstance(state, ShardAttention):
        merged = state.run(exchange=Exchange(*meeting(axes, mesh, state.num_elements)))
        return vary_as(merged, state.query, but_for=axes)
    merged = Exchange(*meeting(axes, mesh, state.out.size + state.lse.size)).merge(state)
    return vary_as(merged, state, but_for=axes)  # a kernel's results have no type of their own


def fused_sum(
    x: jax.Array, axes: tuple[str, ...], mesh: Mesh | None = None, residual: jax.Array | None = None
) -> jax.Array:
    """Returns `jax.lax.psum(x, axes)` of few elements, added in float32 by the same kernel.

    With a residual, of the shape of x and the same on all devices, it is `residual + psum(x)`, of the residual's dtype.
    Other arguments and errors as `fused`.
    """
    from tree_attn.kernels.exchange import exchange_sum

    rank, buffers = meeting(axes, mesh, x.size)
    flat = None if residual is None else residual.reshape(-1)
    return exchange_sum(x.reshape(-1), rank, buffers, flat).reshape(x.shape)


def fused_gather(x: jax.Array, axes: tuple[str, ...], mesh: Mesh | None = None) -> jax.Array:
    """Returns `jax.lax.all_gather(x, axes)` of few elements, floats of at most 4 bytes, by the same kernel.

    Arguments and errors as `fused`.
    """
    from tree_attn.kernels.exchange import exchange_gather

    rank, buffers = meeting(axes, mesh, x.size)
    return exchange_gather(x.reshape(-1), rank, buffers).reshape(-1, *x.shape)


def was_run_here() -> bool:
    """Returns whether the exchange was run on devices of this kind, or cannot run on them at all."""
    return getattr(jax.devices()[0], "compute_capability", RUN_ON) == RUN_ON


def why_not(elements: int, axes: tuple[str, ...], mesh: Mesh | None = None) -> str | None:
    """Returns the reason why no state of `elements` can be exchanged over `axes`, or None where it can."""
    from tree_attn.reduce import peer_memory

    try:
        # First, for kernels are imported below, and with them settings of JAX that are part of every program's key.
        peer_memory.check_platform(_groups(axes, mesh)[0])
        _meeting_place(axes, mesh, elements)
    except NotImplementedError as error:
        return str(error)
    return None


def meeting(axes: tuple[str, ...], mesh: Mesh | None, elements: int) -> tuple[jax.Array | None, Any]:
    """Returns this device's rank, as the kernel takes it, and the buffers in which the devices along `axes` meet."""
    group, buffers = _meeting_place(axes, mesh, elements)
    is_alone = all(device.process_index != other.process_index for device, other in itertools.pairwise(group))
    return None if is_alone else jax.lax.axis_index(axes).astype(jnp.int32)[None], buffers


def _meeting_place(axes: tuple[str, ...], mesh: Mesh | None, elements: int) -> tuple[tuple[jax.Device, ...], Any]:
    """Returns the first group of devices that meet along `axes`, and the buffers of all groups."""
    from tree_attn.kernels.exchange_words import Buffers, exchanging_ctas
    from tree_attn.kernels.launch_order import runs_kernels_in_order
    from tree_attn.reduce import peer_memory

    if jax.__version_info__ < OLDEST_JAX:
        raise NotImplementedError(f"fused was run with JAX 0.11 and newer only, this is {jax.__version__}")
    if not runs_kernels_in_order():
        raise NotImplementedError(
            "fused needs kernels to run in order: XLA_FLAGS must have no --xla_gpu_command_buffer_scheduling_mode "
            "other than LHS or SERIALIZE"
        )
    if elements > MAX_ELEMENTS:
        raise NotImplementedError(f"fused exchanges up to {MAX_ELEMENTS} elements, got {elements}")
    groups = _groups(axes, mesh)
    num_ctas = exchanging_ctas(getattr(groups[0][0], "core_count", None))
    buffers = Buffers(table=0, num_ranks=len(groups[0]), capacity=MAX_ELEMENTS, num_ctas=num_ctas)
    return groups[0], buffers.replace(table=peer_memory.peer_memory(groups, buffers.num_bytes))


def _groups(axes: tuple[str, ...], mesh: Mesh | None) -> tuple[tuple[jax.Device, ...], ...]:
    """Returns the devices that meet along `axes`, in the order of their index; one group per index of the rest."""
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
