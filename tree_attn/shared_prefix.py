"""Decoding sequences that share prefixes: keys that many have in common are held once, and read once for all of them.

A prefix tree is a list of prefix levels. Each node of a level holds keys and serves some sequences of the batch. The
keys of a sequence are those of the nodes on its path, then its own suffix. By the algebra its attention is the merge of
one state per node and one of the suffix. All sequences that a node serves attend to it in one call: one product of two
matrices replaces a product of a matrix with each query.

Sharded along the sequence, every device does this over its part of all nodes, and one reduction serves all levels.

Sources: Bifurcated Attention, section 4 (one node); Hydragen, sections 3.1 to 3.3 (trees).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Integer, Num

from tree_attn.arguments import (
    AnyArray,
    AttentionOptions,
    OptionArguments,
    check_lengths,
    clip_to_int32,
    one_of,
    shape_and_dtype,
    takes_options,
)
from tree_attn.array_axes import BATCH, HEADS, option_specs
from tree_attn.local import ShardAttention, attend_after, attend_shard, shard_attention
from tree_attn.masking import add_sinks
from tree_attn.mesh import AxisName, axis_tuple
from tree_attn.placement import UNNAMED, Placement, Shard, named_block_size
from tree_attn.prefix_level import PrefixLevel, check_levels
from tree_attn.reduce import Reduction, check_reduction, reduce_state
from tree_attn.sharded import (
    call_axes,
    check_call,
    check_one_device,
    local_shard,
    num_held_shards,
    over_shards,
    pad_keys,
)
from tree_attn.state import SoftmaxState, empty_like, merge_state, of_batch


@overload
def hydragen_decode(
    query: Float[AnyArray, "B T N H"], levels: Sequence[PrefixLevel], key: Num[AnyArray, "suffixes S K H"],
    value: Num[AnyArray, "suffixes S K Hv"], *, axis_name: AxisName | None = ..., mesh: Mesh | None = ...,
    batch_axis_name: AxisName | None = ..., block_size: Placement = ..., shard_suffix: str = ...,
    reduction: str | tuple[str, ...] | None = ..., return_lse: Literal[False] = ..., **options: Unpack[OptionArguments],
) -> Float[Array, "B T N Hv"]: ...  # fmt: skip
@overload
def hydragen_decode(
    query: Float[AnyArray, "B T N H"], levels: Sequence[PrefixLevel], key: Num[AnyArray, "suffixes S K H"],
    value: Num[AnyArray, "suffixes S K Hv"], *, axis_name: AxisName | None = ..., mesh: Mesh | None = ...,
    batch_axis_name: AxisName | None = ..., block_size: Placement = ..., shard_suffix: str = ...,
    reduction: str | tuple[str, ...] | None = ..., return_lse: Literal[True], **options: Unpack[OptionArguments],
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]: ...  # fmt: skip
@overload
def hydragen_decode(
    query: Float[AnyArray, "B T N H"], levels: Sequence[PrefixLevel], key: Num[AnyArray, "suffixes S K H"],
    value: Num[AnyArray, "suffixes S K Hv"], *, axis_name: AxisName | None = ..., mesh: Mesh | None = ...,
    batch_axis_name: AxisName | None = ..., block_size: Placement = ..., shard_suffix: str = ...,
    reduction: str | tuple[str, ...] | None = ..., return_lse: bool, **options: Unpack[OptionArguments],
) -> Float[Array, "B T N Hv"] | tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]: ...  # fmt: skip
@takes_options(without=("query_positions", "local_window_size", "reads_keys_early"))
def hydragen_decode(
    query: Float[AnyArray, "B T N H"],
    levels: Sequence[PrefixLevel],
    key: Num[AnyArray, "suffixes S K H"],
    value: Num[AnyArray, "suffixes S K Hv"],
    *,
    axis_name: AxisName | None = None,
    mesh: Mesh | None = None,
    batch_axis_name: AxisName | None = None,
    block_size: Placement = UNNAMED,
    shard_suffix: str = "sequence",
    reduction: str | tuple[str, ...] | None = None,
    return_lse: bool = False,
    **options: Unpack[OptionArguments],
) -> Float[Array, "B T N Hv"] | tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Exact attention of each sequence over the nodes of its path in a prefix tree, and its own suffix.

    Sequence b has the node keys P_1, ..., P_d on its path and the suffix keys S_b:
      (out_b, lse_b) = merge(attend(q_b, P_1), ..., attend(q_b, P_d), attend(q_b, S_b))

    Args:
      query: `[B, T, N, H]`; the T tokens' own keys are in the suffix.
      levels: the tree, any number of prefix levels; keys of a node precede those of deeper nodes and of the suffix.
      key: `[B, S, K, H]`; value: `[B, S, K, Hv]`: the suffixes. S may be 0.
      axis_name, mesh, batch_axis_name, block_size, reduction: as in `tree_attn.tree_decode`; None: all on one device.
        Nodes are sharded along their keys, each level by its own `block_size`, and not over the batch's axes; inside a
        `shard_map` they are this device's part.
      shard_suffix: "sequence", as in `tree_decode`, or "batch": each device has the suffixes of its part of the batch.
      return_lse: also return `lse`, float32 `[B, T, N]`, natural log.
      options: the attention options of `tree_attn.attend`, but for positions and windows. Lengths are those of the
        suffixes. With `is_causal`, query t sees the suffix up to its own position, and prefixes whole; the T queries
        are the suffix's last.
    Returns:
      As `tree_decode`.
    Raises:
      ValueError, TypeError: an argument does not fit; the message names it.
      NotImplementedError: as in `tree_decode`.

    Example:
      >>> level = PrefixLevel(key=prompt_key[None], value=prompt_value[None], sequences=(tuple(range(64)),))
      >>> out = hydragen_decode(query, [level], key, value, key_value_seq_lengths=lengths)

    Source: Hydragen, sections 3.1 to 3.3.
    """
    attention = AttentionOptions(**options)
    one_of("shard_suffix", shard_suffix, ("sequence", "batch"))
    check_levels(levels)
    if axis_name is None:
        check_one_device(mesh=mesh, batch_axis_name=batch_axis_name, block_size=block_size, reduction=reduction)
        if shard_suffix != "sequence":
            raise ValueError(f"shard_suffix={shard_suffix!r} needs axis_name, got None")
    axes = () if axis_name is None else axis_tuple(axis_name)
    reduction = check_reduction(reduction, axes) if axes else None
    by_batch = shard_suffix == "batch" and bool(axes)
    if by_batch:
        block_size = None if block_size is UNNAMED else block_size  # whole suffixes have no placement
    parts = num_held_shards(axes) if by_batch else 1
    block_size = check_call(query, key, value, attention, axes=axes, block_size=block_size, batch_parts=parts)
    levels = tuple(level.checked(f"levels[{i}]", query, axes) for i, level in enumerate(levels))
    if not by_batch:
        key, value, attention = pad_keys(key, value, attention, axes=axes, mesh=mesh, block_size=block_size)
    levels = tuple(level.padded(f"levels[{i}]", axes, mesh) for i, level in enumerate(levels))
    batch_axes: tuple[str, ...] = ()
    if axes:
        chosen, found = call_axes(key, axes=axes, mesh=mesh, batch_axis_name=batch_axis_name)
        batch_axes = found.batch
        if by_batch:
            _check_batch(query, math.prod(chosen.shape[axis] for axis in (*axes, *batch_axes)))
    body = _DecodeWithPrefixes(
        axes=axes, batch_axes=batch_axes, mesh=mesh, block_size=block_size, by_batch=by_batch, reduction=reduction
    )
    of_query = P(BATCH, None, HEADS)
    of_suffix = P((BATCH, *axes), None, HEADS) if by_batch else P(BATCH, axes, HEADS)
    specs = of_query, of_suffix, of_suffix, option_specs(attention), tuple(level.specs(axes) for level in levels)
    state = over_shards(
        body, (query, key, value, attention, levels), specs, axes=axes, mesh=mesh, batch_axis_name=batch_axis_name,
        out_specs=of_query,
    )  # fmt: skip
    return (state.out, state.lse) if return_lse else state.out


@overload
def bifurcated_decode(
    query: Float[AnyArray, "B T N H"], prefix_key: Num[AnyArray, "S K H"], prefix_value: Num[AnyArray, "S K Hv"],
    key: Num[AnyArray, "suffixes D K H"], value: Num[AnyArray, "suffixes D K Hv"], *,
    prefix_length: Integer[AnyArray, ""] | int | None = ..., axis_name: AxisName | None = ..., mesh: Mesh | None = ...,
    batch_axis_name: AxisName | None = ..., block_size: Placement = ..., prefix_block_size: Placement = ...,
    shard_suffix: str = ..., reduction: str | tuple[str, ...] | None = ..., return_lse: Literal[False] = ...,
    **options: Unpack[OptionArguments],
) -> Float[Array, "B T N Hv"]: ...  # fmt: skip
@overload
def bifurcated_decode(
    query: Float[AnyArray, "B T N H"], prefix_key: Num[AnyArray, "S K H"], prefix_value: Num[AnyArray, "S K Hv"],
    key: Num[AnyArray, "suffixes D K H"], value: Num[AnyArray, "suffixes D K Hv"], *,
    prefix_length: Integer[AnyArray, ""] | int | None = ..., axis_name: AxisName | None = ..., mesh: Mesh | None = ...,
    batch_axis_name: AxisName | None = ..., block_size: Placement = ..., prefix_block_size: Placement = ...,
    shard_suffix: str = ..., reduction: str | tuple[str, ...] | None = ..., return_lse: Literal[True],
    **options: Unpack[OptionArguments],
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]: ...  # fmt: skip
@overload
def bifurcated_decode(
    query: Float[AnyArray, "B T N H"], prefix_key: Num[AnyArray, "S K H"], prefix_value: Num[AnyArray, "S K Hv"],
    key: Num[AnyArray, "suffixes D K H"], value: Num[AnyArray, "suffixes D K Hv"], *,
    prefix_length: Integer[AnyArray, ""] | int | None = ..., axis_name: AxisName | None = ..., mesh: Mesh | None = ...,
    batch_axis_name: AxisName | None = ..., block_size: Placement = ..., prefix_block_size: Placement = ...,
    shard_suffix: str = ..., reduction: str | tuple[str, ...] | None = ..., return_lse: bool,
    **options: Unpack[OptionArguments],
) -> Float[Array, "B T N Hv"] | tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]: ...  # fmt: skip
@takes_options(without=("query_positions", "local_window_size", "reads_keys_early"))
def bifurcated_decode(
    query: Float[AnyArray, "B T N H"],
    prefix_key: Num[AnyArray, "S K H"],
    prefix_value: Num[AnyArray, "S K Hv"],
    key: Num[AnyArray, "suffixes D K H"],
    value: Num[AnyArray, "suffixes D K Hv"],
    *,
    prefix_length: Integer[AnyArray, ""] | int | None = None,
    axis_name: AxisName | None = None,
    mesh: Mesh | None = None,
    batch_axis_name: AxisName | None = None,
    block_size: Placement = UNNAMED,
    prefix_block_size: Placement = UNNAMED,
    shard_suffix: str = "sequence",
    reduction: str | tuple[str, ...] | None = None,
    return_lse: bool = False,
    **options: Unpack[OptionArguments],
) -> Float[Array, "B T N Hv"] | tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Exact attention of many samples over one context that they share, and of each over its own continuation.

      out_b = softmax([q_b K_c^T, q_b K_b^T]) [V_c; V_b]

    `hydragen_decode` with one level of one node.

    Args:
      query: `[B, T, N, H]`; the T tokens' own keys are in the continuation.
      prefix_key: `[S, K, H]`; prefix_value: `[S, K, Hv]`: the context, held once.
      key: `[B, D, K, H]`; value: `[B, D, K, Hv]`: each sample's continuation.
      prefix_length: valid keys of the context; default: all.
      prefix_block_size: placement of the context, as `block_size` is that of the continuations; it must be named where
        the context is sharded and has a `prefix_length`.
      axis_name, mesh, batch_axis_name, block_size, shard_suffix, reduction, return_lse, options: as in
        `hydragen_decode`.
    Returns:
      As `hydragen_decode`.
    Raises:
      ValueError, TypeError, NotImplementedError: as `hydragen_decode`.

    Example:
      >>> out = bifurcated_decode(query, prefix_key, prefix_value, key, value, key_value_seq_lengths=lengths)

    Source: Bifurcated Attention, section 4.2, equations 3 and 4, appendix E.3; T > 1: appendix G.
    """
    for name, x in (("query", query), ("prefix_key", prefix_key), ("prefix_value", prefix_value)):
        rank, layout = (4, "[B, T, N, H]") if name == "query" else (3, "[S, K, H]")
        if not hasattr(x, "shape") or not hasattr(x, "dtype") or len(x.shape) != rank:
            raise ValueError(f"{name} must be {layout}, got shape {shape_and_dtype(x)[0]}")
    axes = () if axis_name is None else axis_tuple(axis_name)
    whole = (tuple(range(query.shape[0])),)
    shapes = {
        name: jax.ShapeDtypeStruct((1, *x.shape), x.dtype) for name, x in (("key", prefix_key), ("value", prefix_value))
    }
    PrefixLevel(sequences=whole, **shapes).checked("prefix_key, prefix_value", query, axes)
    prefix_block_size = named_block_size(
        prefix_block_size, axes=axes, depends_on_positions=prefix_length is not None, name="prefix_block_size"
    )
    if prefix_length is not None:
        check_lengths("prefix_length", prefix_length, None, prefix_key.shape[0] * num_held_shards(axes))
        prefix_length = clip_to_int32(prefix_length)[None]
    level = PrefixLevel(
        key=prefix_key[None], value=prefix_value[None], lengths=prefix_length, sequences=whole,
        block_size=prefix_block_size,
    )  # fmt: skip
    return hydragen_decode(
        query, [level], key, value, axis_name=axis_name, mesh=mesh, batch_axis_name=batch_axis_name,
        block_size=block_size, shard_suffix=shard_suffix, reduction=reduction, return_lse=return_lse, **options,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class _DecodeWithPrefixes:
    """The part of each device. The fields are the arguments of `hydragen_decode`; `batch_axes` shard the batch."""

    axes: tuple[str, ...]
    batch_axes: tuple[str, ...]
    mesh: Mesh | None
    block_size: int | None
    by_batch: bool
    reduction: Reduction | None

    def __call__(self, query, key, value, options: AttentionOptions, levels) -> SoftmaxState:
        shard = local_shard(self.axes, self.block_size)
        nodes_of = functools.partial(_nodes, query, options=options, shard=shard, batch_axes=self.batch_axes)
        *others, last = [found for level in levels if (found := nodes_of(level)) is not None] or [None]
        if self.by_batch:
            state = _attend_suffixes_of_shard(query, key, value, options, shard)
        elif last is not None and last.is_in_order:
            state, last = attend_after(last.attention, shard_attention(query, key, value, options, shard)), None
        else:
            state = attend_shard(query, key, value, options, shard)
        for nodes in (*([] if last is None else [last]), *reversed(others)):
            state = nodes.merged(state)
        if self.axes:
            state = reduce_state(state, self.axes, self.reduction, self.mesh)
        return add_sinks(state, options.sinks)


def _check_batch(query, num_devices: int) -> None:
    if query.shape[0] % num_devices:
        raise ValueError(
            f"shard_suffix='batch' needs as many sequences as a multiple of {num_devices} devices, got {query.shape[0]}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Nodes:
    """The attention of a level's nodes, each with the queries of the sequences that it serves.

    is_in_order:  these are all sequences, in their order
    places:       of each sequence among those of all nodes, int32 `[B]`
    """

    attention: ShardAttention
    is_in_order: bool
    places: AnyArray

    def merged(self, state: SoftmaxState) -> SoftmaxState:
        """Returns `state` `[B, T, N]`, merged with the attention of each sequence to its node, if it has one."""
        batch, num_nodes = state.lse.shape[0], self.attention.query.shape[0]
        if self.is_in_order:
            return of_batch(self.attention.run(merge_with=of_batch(state, num_nodes)), batch)
        num_queries = state.lse.shape[1]
        split = lambda x: x.reshape(-1, num_queries, *x.shape[2:])
        out, lse = jax.tree.map(split, self.attention.run())
        take = functools.partial(jnp.take, indices=self.places, axis=0, mode="fill")
        return merge_state(state, SoftmaxState(take(out, fill_value=0), take(lse, fill_value=-jnp.inf)))


def _nodes(
    query, level: PrefixLevel, *, options: AttentionOptions, shard: Shard, batch_axes: tuple[str, ...]
) -> _Nodes | None:
    """Returns the nodes of a level, or None if they serve none of this device's sequences.

    Args:
      shard: of the suffixes; the level's keys have a placement of their own.
    """
    batch, num_queries, *heads = query.shape
    parts = jax.lax.axis_size(batch_axes) if batch_axes else 1
    sequences, places = level.node_tables(batch, parts)
    _, num_nodes, share = sequences.shape
    if share == 0:
        return None
    is_in_order = num_nodes * share == batch and bool((places == np.arange(batch)).all())
    of_part = lambda table: jnp.asarray(table)[jax.lax.axis_index(batch_axes)] if batch_axes else table[0]
    sequences, places = of_part(sequences), of_part(places)
    # Zeros fill nodes up. With a sequence of the batch there, what is wrong in a node's keys would reach its gradient.
    node_query = query if is_in_order else jnp.take(query, sequences.ravel(), axis=0, mode="fill", fill_value=0)
    options = dataclasses.replace(
        options,
        key_value_seq_lengths=level.lengths,
        is_causal=False,
        key_scale=options.key_scale if level.key_scale is None else level.key_scale,
        value_scale=options.value_scale if level.value_scale is None else level.value_scale,
    )
    node_query = node_query.reshape(num_nodes, share * num_queries, *heads)
    shard = dataclasses.replace(shard, block_size=level.block_size)
    attention = shard_attention(node_query, level.key, level.value, options, shard)
    return _Nodes(attention=attention, is_in_order=is_in_order, places=places)


def _attend_suffixes_of_shard(query, key, value, options: AttentionOptions, shard: Shard) -> SoftmaxState:
    """Attends to the suffixes of this device's part of the batch; the state is empty for the other sequences."""
    share = key.shape[0]
    part = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=shard.index * share, slice_size=share, axis=0)
    lengths = options.key_value_seq_lengths
    options = dataclasses.replace(options, key_value_seq_lengths=None if lengths is None else part(lengths))
    state = attend_shard(part(query), key, value, options, Shard())
    whole = empty_like(jax.tree.map(lambda x: jnp.zeros((query.shape[0], *x.shape[1:]), x.dtype), state))
    put = lambda x, update: jax.lax.dynamic_update_slice_in_dim(x, update, shard.index * share, axis=0)
    return jax.tree.map(put, whole, state)
