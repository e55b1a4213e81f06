"""The one `shard_map`: how an attention function is run over the shards of a sequence.

Tree and Ring Attention differ only in the body they hand to `over_shards`.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tree_attn.arguments import AttentionOptions, check_arrays
from tree_attn.devices import default_platform
from tree_attn.local import check_implementation
from tree_attn.masking import sink_state
from tree_attn.mesh import AxisName, axis_tuple, bound_axis_sizes, check_axes
from tree_attn.placement import Shard, check_block_size
from tree_attn.state import SoftmaxState, merge_state

Body = Callable[..., SoftmaxState]


def over_shards(
    body: Body,
    query,
    key,
    value,
    options: AttentionOptions,
    *,
    axis_name: AxisName | None,
    mesh: Mesh | None,
    block_size: int | None,
    shard_query: bool,
    shard_heads: bool = False,
    shard_batch: bool = False,
    levels: tuple | None = None,
    beside: tuple = (),
    beside_specs: tuple = (),
) -> SoftmaxState:
    """Checks the call, then runs `body(query, key, value, options, shard)` once per shard and joins the sinks.

    Inside an existing `shard_map` that binds `axis_name`, `body` is called as it is. Otherwise it is wrapped in one
    `shard_map` over `mesh` (or the context mesh), manual in `axis_name` only, so that the caller's sharding over other
    axes is kept.

    Args:
      body: gets this device's shard of key and value, and returns the state over all shards.
      axis_name: None: everything is on one device.
      shard_query: whether the query, and so the result, is sharded along the sequence (prefill) or whole (decoding).
      shard_heads: whether `body` returns its device's part of the heads only.
      shard_batch: whether key and value are sharded by sequences of the batch instead of along them.
      levels: of a prefix tree (`tree_attn.shared_prefix.PrefixLevel`), sharded along their keys; `body` gets its part
        of them after its other arguments.
      beside: more arrays (or None) that `body` gets last, each its part by the spec of the same place.
    Raises:
      ValueError: arguments that do not fit; no mesh where the axes are not bound; a mesh that lacks an axis.
    """
    axes = () if axis_name is None else axis_tuple(axis_name)
    check_block_size(block_size)
    check_implementation(options.implementation)
    bound_sizes = bound_axis_sizes(axes) if axes else ()
    parts = math.prod(bound_sizes or (1,))
    own_part = slice(query.shape[0] // parts) if shard_batch and bound_sizes else slice(None)
    check_arrays(jax.eval_shape(lambda x: x[own_part], query) if shard_batch else query, key, value)
    options.check(query, key, value, num_keys=key.shape[1] * (1 if shard_batch else parts))
    for i, level in enumerate(levels or ()):
        level.check(f"levels[{i}]", query, parts)

    def on_shard(query, key, value, options: AttentionOptions, *more) -> SoftmaxState:
        num_shards = math.prod(bound_axis_sizes(axes)) if axes else 1
        # The first axis varies slowest, as in PartitionSpec((first, second)).
        index = jax.lax.axis_index(axes) if axes else 0
        shard = Shard(index=index, num_shards=num_shards, block_size=block_size)
        state = body(query, key, value, options, shard, *more)
        if options.sinks is None:
            return state
        heads = state.lse.shape[-1]
        sinks = jax.lax.dynamic_slice(options.sinks, [shard.index * heads], [heads]) if shard_heads else options.sinks
        # Sinks belong to the whole set of keys, so they join once, at the end.
        return merge_state(state, sink_state(sinks, state))

    if bound_sizes is not None:
        if mesh is not None:
            raise ValueError(f"mesh must be None inside a shard_map that binds axis_name {axes}, got {mesh}")
        return on_shard(query, key, value, options, *([] if levels is None else [levels]), *beside)
    mesh = _mesh_with(axes, mesh)
    num_shards = math.prod(mesh.shape[axis] for axis in axes)
    along_sequence = P(None, axes)
    if shard_batch and key.shape[0] % num_shards:
        raise ValueError(
            f"shard_suffix='batch' needs as many sequences as a multiple of {num_shards} devices, got {key.shape[0]}"
        )
    if not shard_batch:
        key, value, options = _fit(key, value, options, num_shards, block_size, may_pad=not shard_query)
    of_key = P(axes) if shard_batch else along_sequence
    if levels is not None:
        levels = tuple(_fit_level(f"levels[{i}]", level, num_shards) for i, level in enumerate(levels))
        of_levels = tuple(
            dataclasses.replace(jax.tree.map(lambda _: P(), level), key=along_sequence, value=along_sequence)
            for level in levels
        )
    query_spec = along_sequence if shard_query else P()
    mapped = jax.shard_map(
        on_shard,
        mesh=mesh,
        axis_names=set(axes),
        in_specs=(query_spec, of_key, of_key, P(), *([] if levels is None else [of_levels]), *beside_specs),
        out_specs=P(None, None, axes) if shard_heads else query_spec,
        check_vma=False,  # a merged state is the same on every device, which the checker cannot see
    )
    with _kernels_for(mesh):
        options = jax.tree.map(jnp.asarray, options)
        return mapped(query, key, value, options, *([] if levels is None else [levels]), *beside)


def check_one_device(**sharding) -> None:
    """Raises ValueError where an option of sharding is given and no `axis_name` is."""
    for name, given in sharding.items():
        if given is not None:
            raise ValueError(f"{name} must be None where axis_name is, got {given!r}")


def _kernels_for(mesh: Mesh):
    """Makes the choice of kernels follow the mesh where it is not on the default platform: CPU devices beside a GPU."""
    if isinstance(mesh, Mesh) and mesh.devices.flat[0].platform != default_platform():
        return jax.default_device(mesh.local_devices[0])
    return contextlib.nullcontext()


def _mesh_with(axes: tuple[str, ...], mesh: Mesh | None):
    """Returns the mesh to map over: the given one or the context's, which must have all of `axes`."""
    context = jax.sharding.get_abstract_mesh()
    if mesh is None and context.empty:
        raise ValueError(f"mesh must be given where no surrounding shard_map binds axis_name {axes}, got None")
    chosen = context if mesh is None else mesh
    check_axes(axes, chosen)
    return chosen


def _fit_level(name: str, level, num_shards: int):
    """As `_fit`, for the nodes of a level."""
    options = AttentionOptions(key_value_seq_lengths=level.lengths)
    try:
        key, value, options = _fit(level.key, level.value, options, num_shards, level.block_size, may_pad=True)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return dataclasses.replace(level, key=key, value=value, lengths=options.key_value_seq_lengths)


def _fit(key, value, options: AttentionOptions, num_shards: int, block_size: int | None, *, may_pad: bool):
    """Pads contiguous keys to a multiple of the shards, if that is allowed; lengths hide the padding."""
    num_keys = key.shape[1]
    unit = num_shards * (block_size or 1)
    padding = -num_keys % unit
    if not padding:
        return key, value, options
    if block_size is not None or not may_pad:
        raise ValueError(f"key must hold a multiple of num_shards * block_size = {unit} slots, got {num_keys}")
    lengths = options.key_value_seq_lengths
    # A traced length may be too long; clipped later it would be clipped to the padded size.
    lengths = (
        jnp.full(key.shape[:1], num_keys, jnp.int32) if lengths is None else jnp.minimum(jnp.asarray(lengths), num_keys)
    )
    options = dataclasses.replace(options, key_value_seq_lengths=lengths)
    widths = [(0, 0), (0, padding), (0, 0), (0, 0)]
    return jnp.pad(key, widths), jnp.pad(value, widths), options
