"""The sharding of a Llama: for each logical axis the mesh axes that it is spread over."""

import dataclasses

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tree_attn.mesh import with_auto_axes
from tree_attn.models.llama.config import LlamaConfig

MeshAxes = str | tuple[str, ...] | None

# An H200 reads so much while a gather over NCCL adds 15 us to a step. Each device reads all of less. docs/log/llama.md:
# "With more devices than KV heads, large models shard the fused weight by head dim".
MIN_BYTES_CUT_OVER_HEAD_DIM = 64 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaSharding:
    """Maps logical axes to axes of `mesh`; None is replicated.

    `sequence` carries keys, values and, in prefill, tokens. It must name a mesh axis, for the attention folds over it.
    Weights are replicated by default. `heads`, `kv_heads`, `kv_head_dim`, `mlp` and `vocab` may name the same mesh axis
    as `sequence`, since a weight has no sequence axis. Each device then holds a slice of the weights, and the keys and
    values of all heads for its part of the sequence.

    `kv_heads` shards the fused query/key/value weight by KV head, together with its query heads. `kv_head_dim` shards
    it by head dimension instead, for more devices than KV heads. `heads` and `head_dim` shard the output projection,
    and query activations unless they use the sequence's mesh axes.

    Explicit axes of `mesh`, as `jax.make_mesh` makes them, become Auto ones: the model leaves to XLA how intermediate
    arrays are sharded. So no other mesh may be set by `jax.set_mesh` where the model runs.

    Raises:
      TypeError: `mesh` is no mesh.
      ValueError: an axis that the mesh lacks, or one axis named twice in a tuple.

    Example:
      >>> sharding = LlamaSharding(mesh=jax.make_mesh((8,), ("seq",)), sequence="seq", mlp="seq")
      >>> tuple(sharding.spec("mlp", "embed"))
      ('seq', None)
    """

    mesh: Mesh
    sequence: str | tuple[str, ...] = "seq"
    batch: MeshAxes = None
    embed: MeshAxes = None
    heads: MeshAxes = None
    kv_heads: MeshAxes = None
    kv_head_dim: MeshAxes = None
    head_dim: MeshAxes = None
    mlp: MeshAxes = None
    vocab: MeshAxes = None
    layers: MeshAxes = None

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mesh):
            raise TypeError(f"mesh must be a jax.sharding.Mesh, got {type(self.mesh).__name__}")
        object.__setattr__(self, "mesh", with_auto_axes(self.mesh))
        if not self.sequence:
            raise ValueError(
                f"sequence must name one or more of the mesh axes {self.mesh.axis_names}, got {self.sequence!r}"
            )
        for field in dataclasses.fields(self):
            if field.name == "mesh":
                continue
            axes = as_tuple(getattr(self, field.name))
            for axis in axes:
                if axis not in self.mesh.shape:
                    raise ValueError(f"{field.name} must be one of the mesh axes {self.mesh.axis_names}, got {axis!r}")
            if len(set(axes)) != len(axes):
                raise ValueError(f"{field.name} must name each mesh axis once, got {axes!r}")

    def num_shards(self, logical_axis: str) -> int:
        """Returns the number of pieces into which the logical axis is cut."""
        size = 1
        for axis in as_tuple(getattr(self, logical_axis)):
            size *= self.mesh.shape[axis]
        return size

    @property
    def is_on_cpus(self) -> bool:
        """True if the mesh consists of CPU devices, whose compiler takes long for each further layer."""
        return self.mesh.devices.flat[0].platform == "cpu"

    @property
    def is_on_gpus(self) -> bool:
        """True if the mesh consists of GPUs, for which some programs are compiled otherwise."""
        return self.mesh.devices.flat[0].platform == "gpu"

    def spec(self, *logical_axes: str | None) -> PartitionSpec:
        """Returns the partition of an array whose dimensions are these logical axes (None: replicated)."""
        return PartitionSpec(*(None if name is None else getattr(self, name) for name in logical_axes))

    def named(self, *logical_axes: str | None) -> NamedSharding:
        """Returns `spec` on the mesh."""
        return NamedSharding(self.mesh, self.spec(*logical_axes))

    def place(self, array: np.ndarray, *logical_axes: str | None) -> jax.Array:
        """Places an array that every process has; each places the part of its own devices."""
        return jax.make_array_from_callback(array.shape, self.named(*logical_axes), lambda index: array[index])

    def constrain(self, array: jax.Array, *logical_axes: str | None) -> jax.Array:
        """Constrains an intermediate array to be spread as these logical axes are."""
        return jax.lax.with_sharding_constraint(array, self.named(*logical_axes))

    def check_divides(self, shape: tuple[int, ...], logical_axes: tuple[str | None, ...], name: str) -> None:
        """Raises ValueError where a dimension of parameter `name` does not divide evenly over its mesh axes."""
        for size, axis in zip(shape, logical_axes, strict=True):
            if axis is not None and size % self.num_shards(axis):
                raise ValueError(
                    f"{axis}={getattr(self, axis)!r}: {name} has {size} along it, which must be a multiple of "
                    f"{self.num_shards(axis)} devices; leave {axis} as None to replicate it"
                )


def spread_over(config: LlamaConfig, mesh: Mesh, sequence: str | tuple[str, ...] = "seq") -> LlamaSharding:
    """Returns the commands' sharding: heads, MLP and vocabulary go over the sequence's devices where they divide.

    Each device then reads and holds about 1 / n of the model and 1 / n of the cache: tensor parallelism and context
    parallelism over the same devices (as in NVIDIA's Helix, and vLLM's decode context parallelism). Where KV heads do
    not divide, each device computes all queries, keys and values, or, in a large model, some dimensions of every head.

    Example:
      >>> spread_over(preset("smollm2-135m"), jax.make_mesh((8,), ("seq",))).mlp
      'seq'
    """
    plain = LlamaSharding(mesh=mesh, sequence=sequence)
    if_divided = lambda size: sequence if size % plain.num_shards("sequence") == 0 else None
    kv_heads = if_divided(config.num_kv_heads)
    num_heads = config.num_heads + 2 * config.num_kv_heads
    is_large = 2 * num_heads * config.head_dim * config.hidden_size >= MIN_BYTES_CUT_OVER_HEAD_DIM  # a layer's, bf16
    return dataclasses.replace(
        plain,
        heads=if_divided(config.num_heads),
        kv_heads=kv_heads,
        kv_head_dim=if_divided(config.head_dim) if kv_heads is None and is_large else None,
        mlp=if_divided(config.intermediate_size),
        vocab=if_divided(config.vocab_size),
    )


def as_tuple(axes: MeshAxes) -> tuple[str, ...]:
    """Returns the mesh axes of one entry as a tuple."""
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)
