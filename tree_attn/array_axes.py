"""The mesh axes of a call's arrays: the sequence's, and those that shard the batch and the heads besides.

Attention needs no exchange between sequences, nor between KV heads. So `over_shards` maps over the axes of these
dimensions too, and each device has its part of them: no collective runs over them, and kernels see local shapes. Where
the axes are Explicit, as `jax.make_mesh` makes them, the types of the arrays name them. Otherwise nothing does, inside
jit, but the caller: `batch_axis_name`.
"""

import dataclasses
import math

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tree_attn.arguments import AttentionOptions
from tree_attn.mesh import AxisName, axis_tuple

# Names of dimensions in the specs that functions hand to `over_shards`, in the place of mesh axes.
BATCH, HEADS = "the batch's axes", "the heads' axes"


def option_specs(options: AttentionOptions) -> AttentionOptions:
    """Returns the spec of each array of `options`, in its place."""
    specs = {
        "key_value_seq_lengths": P(BATCH),
        "query_positions": P(BATCH) if getattr(options.query_positions, "ndim", 1) == 2 else P(),
        "sinks": P(HEADS),
        "key_scale": P(HEADS),
        "value_scale": P(HEADS),
    }
    return dataclasses.replace(
        options, **{name: spec for name, spec in specs.items() if getattr(options, name) is not None}
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayAxes:
    """The mesh axes that a call's dimensions are sharded over, those bound already left out.

    sequence, batch, heads: mesh axes, in the order of a PartitionSpec
    replicated: further Explicit axes, which must be mapped because no Explicit type may reach a body
    """

    sequence: tuple[str, ...]
    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()

    @property
    def mapped(self) -> frozenset[str]:
        """All axes that a `shard_map` is to map."""
        return frozenset(self.sequence + self.batch + self.heads + self.replicated)

    def resolve(self, spec: P) -> P:
        """Returns `spec` with mesh axes in the place of `BATCH` and `HEADS`, and of nothing else than is mapped."""
        named = {BATCH: self.batch, HEADS: self.heads}

        def axes(entry) -> tuple[str, ...] | None:
            found = [axis for name in _names(entry) for axis in named.get(name, (name,))]
            return tuple(axis for axis in found if axis in self.mapped) or None

        return P(*map(axes, spec))


def array_axes(
    key, axes: tuple[str, ...], mesh: Mesh | AbstractMesh, batch_axis_name: AxisName | None = None
) -> ArrayAxes:
    """Returns the axes of a call, from the type of `key [B, S, K, H]` and from `batch_axis_name`.

    Args:
      key: sharded over Explicit axes or not; query and value are resharded to go with it.
      axes: the sequence's.
      mesh: with these axes; those that a surrounding `shard_map` binds are of type Manual in it.
      batch_axis_name: of the batch; None: the Explicit axes that the type of `key` names there.
    Raises:
      ValueError: as `check_batch_axes`; the type of `key` names an axis that the mesh lacks.
    """
    free = [axis for axis, kind in zip(mesh.axis_names, mesh.axis_types) if kind != AxisType.Manual]
    explicit = [axis for axis, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Explicit]
    spec = jax.typeof(key).sharding.spec
    unknown = sorted({axis for entry in spec for axis in _names(entry)} - set(mesh.axis_names))
    if unknown:
        raise ValueError(f"key must be sharded over axes of the mesh {mesh.axis_names}, got {unknown}")
    by_type = [_names(entry) for entry in (*spec, None, None, None)]
    batch, heads = (tuple(axis for axis in by_type[i] if axis in explicit and axis not in axes) for i in (0, 2))
    if batch_axis_name is not None:
        check_batch_axes(batch_axis_name, axes, mesh, key.shape[0])
        batch = tuple(axis for axis in axis_tuple(batch_axis_name) if axis in free)
        heads = tuple(axis for axis in heads if axis not in batch)
    named = (*axes, *batch, *heads)
    return ArrayAxes(
        sequence=tuple(axis for axis in axes if axis in free),
        batch=batch,
        heads=heads,
        replicated=tuple(axis for axis in explicit if axis not in named),
    )


def reshard(x: jax.Array, spec: P, mesh: Mesh | AbstractMesh) -> jax.Array:
    """Returns `x` with a type that says `spec`, where axes of the mesh are Explicit; Auto axes are left to XLA."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types))
    if AxisType.Explicit not in kinds.values():
        return x
    explicit = [tuple(axis for axis in _names(entry) if kinds[axis] == AxisType.Explicit) or None for entry in spec]
    return jax.sharding.reshard(x, NamedSharding(mesh, P(*explicit)))


def _names(entry) -> tuple[str, ...]:
    """Returns the axes of an entry of a PartitionSpec: it has a tuple of them, a name, or None."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def check_batch_axes(batch_axis_name: AxisName, axes: tuple[str, ...], mesh: Mesh | AbstractMesh, batch: int) -> None:
    """Raises ValueError unless the names are axes of the mesh beside `axes`, and the free ones divide the batch."""
    batch_axes = axis_tuple(batch_axis_name, "batch_axis_name")
    kinds = dict(zip(mesh.axis_names, mesh.axis_types))
    missing = [axis for axis in batch_axes if axis not in kinds or axis in axes]
    if missing:
        raise ValueError(
            f"batch_axis_name {batch_axes} must name axes of the mesh {mesh.axis_names} beside axis_name {axes}, "
            f"got {missing}"
        )
    num_parts = math.prod(mesh.shape[axis] for axis in batch_axes if kinds[axis] != AxisType.Manual)
    if batch % num_parts:
        raise ValueError(f"batch must be a multiple of the {num_parts} devices of batch_axis_name, got {batch}")
