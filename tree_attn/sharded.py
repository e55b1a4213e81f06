"""The one `shard_map`, and the steps of every attention function around it.

Tree and Ring Attention differ only in the body they hand to `over_shards`. A function checks its call (`check_call`),
pads keys that the devices do not divide (`pad_keys`), and runs its body over operands and their specs (`over_shards`).
The body finds its shard (`local_shard`) and adds the sinks at its end (`tree_attn.masking.add_sinks`). Specs name the
dimensions of batch and heads, which `over_shards` maps over their own mesh axes (`tree_attn.array_axes`).

A body is a value: a frozen dataclass of what is static in the call, or a function of a module. Equal bodies over equal
shapes are one program, so an eager call is traced and compiled once.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from tree_attn import topology
from tree_attn.arguments import AttentionOptions, check_arrays, clip_to_int32
from tree_attn.array_axes import ArrayAxes, array_axes, reshard
from tree_attn.devices import default_platform, default_runtime
from tree_attn.local import check_implementation
from tree_attn.masking import depends_on_positions
from tree_attn.mesh import AxisName, are_auto, bound_axis_sizes, check_axes, checks_replication
from tree_attn.placement import (
    UNNAMED,
    ZIGZAG,
    BlockSize,
    Placement,
    Shard,
    named_block_size,
    slot_unit,
    slot_unit_name,
)

EVERYWHERE = P()  # the same on every device
Result = TypeVar("Result")


def over_shards(
    body: Callable[..., Result],
    operands: tuple,
    specs: tuple,
    *,
    axes: tuple[str, ...],
    mesh: Mesh | None,
    batch_axis_name: AxisName | None = None,
    out_specs=EVERYWHERE,
) -> Result:
    """Runs `body(*operands)` once per shard and returns its result over all shards.

    One `shard_map` over `mesh`, or the context mesh, wraps the body. It is manual in `axes`, in those of batch and
    heads as far as they are known (`call_axes`), and in all Explicit ones. Auto axes beside these are left to XLA.
    Inside an existing `shard_map` that binds all of them, the body is called as it is.

    Args:
      body: takes this device's parts of the operands; hashable, equal to a body that does the same (no closure).
      operands: pytrees of arrays, checked and padded already; the second is the key.
      specs: one for each operand, a prefix of its tree, with `BATCH` and `HEADS` of `tree_attn.array_axes`.
      axes: mesh axes; `()`: everything is on one device.
      batch_axis_name: as of `call_axes`.
      out_specs: of the result, a prefix of its tree; default: the same on every device.
    Raises:
      ValueError: a mesh where the axes are bound; no mesh where they are not; a mesh that lacks an axis.
    """
    if not axes:
        return run_on_mesh(body, operands, specs, axes=axes, mesh=None, out_specs=out_specs)
    chosen, found = call_axes(operands[1], axes=axes, mesh=mesh, batch_axis_name=batch_axis_name)
    if not found.mapped:
        return body(*operands)
    specs, out_specs = jax.tree.map(found.resolve, (specs, out_specs))
    return run_on_mesh(body, operands, specs, axes=found.mapped, mesh=chosen, out_specs=out_specs)


def call_axes(
    key, *, axes: tuple[str, ...], mesh: Mesh | None, batch_axis_name: AxisName | None = None
) -> tuple[Mesh | AbstractMesh, ArrayAxes]:
    """Returns the mesh of a call and the axes that its `shard_map` is to map, as `array_axes` finds them."""
    if not is_local(axes):
        chosen = _mesh_with(axes, mesh)
    elif mesh is None:
        chosen = jax.sharding.get_abstract_mesh()
    else:
        raise ValueError(f"mesh must be None inside a shard_map that binds axis_name {axes}, got {mesh}")
    return chosen, array_axes(key, axes, chosen, batch_axis_name)


def run_on_mesh(
    body: Callable[..., Result],
    operands: tuple,
    specs: tuple,
    *,
    axes: tuple[str, ...],
    mesh: Mesh | AbstractMesh | None,
    out_specs,
) -> Result:
    """Runs `body(*operands)` in a `shard_map` over `axes` of `mesh`, or without one where `mesh` is None.

    Arguments as `over_shards`. What was traced and compiled for equal arguments serves again.
    """
    if default_runtime() == "cuda":
        # It adds settings to JAX's, which are part of a program's key: imported in a trace, it would cause another.
        from jax.experimental.pallas import mosaic_gpu  # noqa: F401
    leaves, tree = jax.tree.flatten((specs, out_specs))
    with _kernels_for(mesh):
        return _run_over_shards(
            jax.tree.map(jnp.asarray, operands), body=body, specs=tuple(leaves), spec_tree=tree, axes=axes, mesh=mesh,
            nodes=topology.nodes(), is_checked=is_nested_in_checked(),
        )  # fmt: skip


# `inline`: within a caller's jit the program is the one that the body makes.
@partial(jax.jit, static_argnames=("body", "specs", "spec_tree", "axes", "mesh", "nodes", "is_checked"), inline=True)
def _run_over_shards(operands, *, body, specs, spec_tree, axes, mesh, nodes, is_checked):
    """Runs `body(*operands)`, over `mesh` where there is one; traced and compiled once for equal arguments.

    `nodes` is not read here: what None picks for a reduction depends on it. What else None depends on is part of the
    key of JAX's own cache (the default device, the context mesh), or fixed when JAX starts.
    """
    if mesh is None:
        return body(*operands)
    in_specs, out_specs = jax.tree.unflatten(spec_tree, specs)
    operands = jax.tree.map(
        lambda spec, part: jax.tree.map(partial(reshard, spec=spec, mesh=mesh), part), in_specs, operands
    )
    if math.prod(mesh.shape[axis] for axis in axes) == 1 < mesh.size and are_auto(axes, mesh):
        # Else the gradient of an operand that every device has would be a sum over one device, which XLA refuses where
        # it shards the other axes (`tree_attn.reduce.collectives`).
        in_specs = jax.tree.map(lambda x: P(tuple(sorted(axes))) if jnp.ndim(x) else EVERYWHERE, operands)
    return jax.shard_map(
        # JAX does not lower what a gradient keeps of a checked `shard_map` in another: there nothing is kept.
        jax.checkpoint(body) if is_checked else body,
        mesh=mesh,
        axis_names=set(axes),
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=is_checked,  # unchecked, a ring needs no collective to say that its result is replicated
    )(*operands)


def is_nested_in_checked() -> bool:
    """Returns whether a surrounding `shard_map`, over whichever axes, checks replication."""
    bound = jax.sharding.get_abstract_mesh().manual_axes
    return bool(bound) and checks_replication(tuple(bound))


def check_call(
    query,
    key,
    value,
    options: AttentionOptions,
    *,
    axes: tuple[str, ...],
    block_size: Placement,
    batch_parts: int = 1,
    is_prompt: bool = False,
    needs_positions: bool = False,
) -> BlockSize:
    """Returns the placement of a call whose arrays and options fit each other.

    Args:
      axes: mesh axes; where they are bound, `key` and `value` are one of their shards.
      batch_parts: the number of parts of the batch, of which `key` and `value` hold one with whole sequences.
      is_prompt: the queries are at the positions of the keys, and sharded as they are.
      needs_positions: the result depends on the positions of the keys, whatever the options.
    Raises:
      ValueError, TypeError: an argument does not fit, or the placement must be named; the message names it.
    """
    check_implementation(options.implementation)
    sequences = query if batch_parts == 1 else jax.eval_shape(lambda x: x[: x.shape[0] // batch_parts], query)
    check_arrays(sequences, key, value)
    num_shards = num_held_shards(axes) if batch_parts == 1 else 1
    options.check(query, key, value, num_keys=key.shape[1] * num_shards)
    needs_positions |= depends_on_positions(options, query.shape[1] * (num_shards if is_prompt else 1))
    return named_block_size(block_size, axes=axes, depends_on_positions=needs_positions, takes_zigzag=is_prompt)


def pad_keys(
    key, value, options: AttentionOptions, *, axes: tuple[str, ...], mesh: Mesh | None, block_size: int | None
):
    """Pads contiguous keys and values to a multiple of the shards; lengths hide the padding.

    Returns:
      `(key, value, options)`, unchanged where they fill the shards, or are this device's already.
    Raises:
      ValueError: block-cyclic keys that do not fill the shards; no mesh; a mesh that lacks an axis.
    """
    num_keys, lengths = key.shape[1], options.key_value_seq_lengths
    padding = -num_keys % _slot_unit(axes, mesh, block_size)
    if not padding:
        return key, value, options
    if block_size is not None:
        check_shards_are_full(key, axes=axes, mesh=mesh, block_size=block_size)
    # A traced length may be too long; clipped later it would be clipped to the padded size.
    lengths = jnp.full(key.shape[:1], num_keys, jnp.int32) if lengths is None else clip_to_int32(lengths, 0, num_keys)
    options = dataclasses.replace(options, key_value_seq_lengths=lengths, reads_keys_early=False)  # copies are new
    chosen, widths = _mesh_with(axes, mesh), [(0, 0), (0, padding), (0, 0), (0, 0)]

    def padded(x):
        x = jnp.asarray(x)
        # A gradient is cut as it was padded, which JAX does not do to a sharded one. It becomes what `x` was.
        return jnp.pad(reshard(x, P(), chosen) if jax.typeof(x).sharding.mesh.empty else x, widths)

    return padded(key), padded(value), options


def check_shards_are_full(key, *, axes: tuple[str, ...], mesh: Mesh | None, block_size: BlockSize) -> None:
    """Raises ValueError unless `key` fills its shards: whole blocks, as many on each."""
    unit = _slot_unit(axes, mesh, block_size)
    if key.shape[1] % unit:
        name = slot_unit_name(block_size, is_of_shard=is_local(axes))
        raise ValueError(f"key must hold a multiple of {name} = {unit} slots, got {key.shape[1]}")


def check_one_device(**sharding) -> None:
    """Raises ValueError if an option of sharding is given without `axis_name`."""
    for name, value in sharding.items():
        if value is not None and value is not UNNAMED:
            raise ValueError(f"{name} must be None where axis_name is, got {value!r}")


def local_shard(axes: tuple[str, ...], block_size: BlockSize) -> Shard:
    """Returns this device's shard, inside a `shard_map` that binds `axes`; `()`: the whole sequence."""
    if not axes:
        return Shard(block_size=block_size)
    # The first axis varies slowest, as in PartitionSpec((first, second)).
    index = jax.lax.axis_index(axes)
    return Shard(index=index, num_shards=math.prod(bound_axis_sizes(axes) or ()), block_size=block_size)


def is_local(axes: tuple[str, ...]) -> bool:
    """Returns whether arrays are this device's part already: `axes` are bound, or there are none."""
    return not axes or bound_axis_sizes(axes) is not None


def num_held_shards(axes: tuple[str, ...]) -> int:
    """Returns the number of shards where `axes` are bound and arrays are shards; 1 where arrays are whole."""
    return math.prod(bound_axis_sizes(axes) or (1,)) if axes else 1


def num_mesh_shards(axes: tuple[str, ...], mesh: Mesh | None) -> int:
    """Returns how many shards `axes` make on `mesh`, or on the context mesh; raises ValueError if it lacks one."""
    chosen = _mesh_with(axes, mesh)
    return math.prod(chosen.shape[axis] for axis in axes)


def _slot_unit(axes: tuple[str, ...], mesh: Mesh | None, block_size: BlockSize) -> int:
    """Returns the unit in which arrays have slots: a block, or two halves, on each shard of theirs."""
    if is_local(axes):
        return slot_unit(block_size) if axes or block_size == ZIGZAG else 1
    return num_mesh_shards(axes, mesh) * slot_unit(block_size)


def _kernels_for(mesh: Mesh | AbstractMesh | None):
    """Makes the choice of kernels follow a mesh that is not on the default platform: CPU devices beside a GPU."""
    if isinstance(mesh, Mesh) and mesh.devices.flat[0].platform != default_platform():
        return jax.default_device(mesh.local_devices[0])
    return contextlib.nullcontext()


def _mesh_with(axes: tuple[str, ...], mesh: Mesh | None) -> Mesh | AbstractMesh:
    """Returns the mesh to map over: the given one or the context's, which must have all of `axes`."""
    context = jax.sharding.get_abstract_mesh()
    if mesh is None and context.empty:
        raise ValueError(f"mesh must be given where no surrounding shard_map binds axis_name {axes}, got None")
    chosen = context if mesh is None else mesh
    check_axes(axes, chosen)
    if not context.empty and dict(chosen.shape) != dict(context.shape):
        raise ValueError(f"mesh must be that of the context, {dict(context.shape)}, or None, got {dict(chosen.shape)}")
    expected, found = (_axis_types(mesh) for mesh in (context, chosen))
    if any(found.get(axis, kind) != kind for axis, kind in expected.items()):
        raise ValueError(f"mesh must have the axis types of the context's, {expected}, or be None, got {found}")
    return chosen


def _axis_types(mesh: Mesh | AbstractMesh) -> dict[str, str]:
    """Returns whether each axis is Auto or Explicit, without those that a `shard_map` binds."""
    kinds = zip(mesh.axis_names, mesh.axis_types)
    return {axis: kind.name for axis, kind in kinds if kind != AxisType.Manual}
