"""Tree Attention decoding: each device attends to its shard of the keys, then collectives merge the partial states."""

import dataclasses
from typing import Literal, Unpack, overload

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Num

from tree_attn.arguments import AnyArray, AttentionOptions, OptionArguments, takes_options
from tree_attn.array_axes import BATCH, HEADS, option_specs
from tree_attn.local import shard_attention
from tree_attn.masking import add_sinks
from tree_attn.mesh import AxisName, axis_tuple
from tree_attn.placement import UNNAMED, Placement, Shard
from tree_attn.reduce import Reduction, check_reduction, reduce_state
from tree_attn.reduce.all_to_all import all_to_all
from tree_attn.sharded import check_call, local_shard, over_shards, pad_keys
from tree_attn.state import SoftmaxState


@overload
def tree_decode(
    query: Float[AnyArray, "B T N H"], key: Num[AnyArray, "B S K H"], value: Num[AnyArray, "B S K Hv"], *,
    axis_name: AxisName, mesh: Mesh | None = ..., batch_axis_name: AxisName | None = ..., block_size: Placement = ...,
    reduction: str | tuple[str, ...] | None = ..., shard_heads: bool = ..., return_lse: Literal[False] = ...,
    **options: Unpack[OptionArguments],
) -> Float[Array, "B T heads Hv"]: ...  # fmt: skip
@overload
def tree_decode(
    query: Float[AnyArray, "B T N H"], key: Num[AnyArray, "B S K H"], value: Num[AnyArray, "B S K Hv"], *,
    axis_name: AxisName, mesh: Mesh | None = ..., batch_axis_name: AxisName | None = ..., block_size: Placement = ...,
    reduction: str | tuple[str, ...] | None = ..., shard_heads: bool = ..., return_lse: Literal[True],
    **options: Unpack[OptionArguments],
) -> tuple[Float[Array, "B T heads Hv"], Float[Array, "B T heads"]]: ...  # fmt: skip
@overload
def tree_decode(
    query: Float[AnyArray, "B T N H"], key: Num[AnyArray, "B S K H"], value: Num[AnyArray, "B S K Hv"], *,
    axis_name: AxisName, mesh: Mesh | None = ..., batch_axis_name: AxisName | None = ..., block_size: Placement = ...,
    reduction: str | tuple[str, ...] | None = ..., shard_heads: bool = ..., return_lse: bool,
    **options: Unpack[OptionArguments],
) -> Float[Array, "B T heads Hv"] | tuple[Float[Array, "B T heads Hv"], Float[Array, "B T heads"]]: ...  # fmt: skip
@takes_options()
def tree_decode(
    query: Float[AnyArray, "B T N H"],
    key: Num[AnyArray, "B S K H"],
    value: Num[AnyArray, "B S K Hv"],
    *,
    axis_name: AxisName,
    mesh: Mesh | None = None,
    batch_axis_name: AxisName | None = None,
    block_size: Placement = UNNAMED,
    reduction: str | tuple[str, ...] | None = None,
    shard_heads: bool = False,
    return_lse: bool = False,
    **options: Unpack[OptionArguments],
) -> Float[Array, "B T heads Hv"] | tuple[Float[Array, "B T heads Hv"], Float[Array, "B T heads"]]:
    """Exact attention of a replicated query over keys and values sharded along the sequence.

    With key set S = S_1 + ... + S_p over p devices, and (out_i, lse_i) the attention over S_i on device i:
      lse = log sum_i exp(lse_i),    out = sum_i exp(lse_i - lse) out_i

    In plain (jitted) code arrays are global; pass `mesh`, or call `jax.set_mesh`. Inside a `shard_map` that binds
    `axis_name`, `key` and `value` are this device's shards.

    Args:
      query: `[B, T, N, H]`, the same on every device of the axes; T is 1 for plain decoding, more for speculation.
      key: `[B, S, K, H]`; value: `[B, S, K, Hv]`, sharded on S, both in query's dtype, float8_e4m3fn or int8.
        Contiguous placement may have any S: where the devices do not divide it, the arrays are padded, in copies.
      axis_name: mesh axis, or an ordered tuple of axes, fastest link first. Any number of devices.
      mesh: the mesh, unless the axes are bound or a context mesh is set. Its axes are Explicit or Auto.
      batch_axis_name: mesh axes that shard the batch besides, over which nothing is sent. Explicit ones are found from
        key's type, and so are those of heads; name Auto ones here.
      block_size: placement. None: contiguous, shard i holds the i-th run. b: block-cyclic, b keys to each in turn. It
        must be named where the result depends on it: with lengths or a window, or if T > 1 queries are causal. Of a
        `KVCache` it is the cache's, see `KVCache.attend`.
      reduction: across devices: "allreduce" (the paper's three), "gather" (one packed collective) or "fused" (one
        kernel, for the GPUs of one host). A tuple names one of these for each axis; "hierarchical" is "gather" for
        each. None: the cheapest that can run, by the cost model, see `tree_attn.reduce.reduce_state`.
      shard_heads: leave each of the p devices N / p heads, for a next product that is sharded over heads. It takes one
        all-to-all, of a p-th of the elements that a gather sends; beside axes that XLA shards it is a gather. The
        result is sharded over `axis_name` along N; inside a `shard_map` it is this device's heads. `reduction` must be
        None.
      return_lse: also return `lse`, float32 `[B, T, N]`, natural log.
      options: the attention options of `tree_attn.attend`. Lengths count the valid keys over all shards; they may end
        anywhere, and a shard may hold no valid key. `implementation` is the kernel on each device.
    Returns:
      `out [B, T, N, Hv]` in the query's dtype, the same on every device; with `return_lse`, `(out, lse)`. A query that
      sees no key has `out = 0, lse = -inf`.
    Raises:
      ValueError, TypeError: an argument does not fit, an axis is unknown, or no mesh; the message names it.
      NotImplementedError: the named implementation or reduction cannot do what is asked; it never falls back.

    Example:
      >>> mesh = make_mesh({"seq": 8})
      >>> out = jax.jit(functools.partial(tree_decode, axis_name="seq", mesh=mesh))(query, key, value)

    Source: Tree Attention, section 5.2, Algorithm 3.
    """
    axes = axis_tuple(axis_name)
    reduction = check_reduction(reduction, axes)
    if shard_heads and reduction is not None:
        raise ValueError(f"reduction must be None with shard_heads=True, which has one of its own, got {reduction!r}")
    attention = AttentionOptions(**options)
    block_size = check_call(query, key, value, attention, axes=axes, block_size=block_size)
    key, value, attention = pad_keys(key, value, attention, axes=axes, mesh=mesh, block_size=block_size)
    body = _TreeDecode(axes=axes, mesh=mesh, block_size=block_size, reduction=reduction, shard_heads=shard_heads)
    of_query, of_keys = P(BATCH, None, HEADS), P(BATCH, axes, HEADS)
    state = over_shards(
        body, (query, key, value, attention), (of_query, of_keys, of_keys, option_specs(attention)), axes=axes,
        mesh=mesh, batch_axis_name=batch_axis_name,
        out_specs=P(BATCH, None, (HEADS, *axes)) if shard_heads else of_query,
    )  # fmt: skip
    return (state.out, state.lse) if return_lse else state.out


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TreeDecode:
    """The part of each device. The fields are the arguments of `tree_decode`."""

    axes: tuple[str, ...]
    mesh: Mesh | None
    block_size: int | None
    reduction: Reduction | None
    shard_heads: bool

    def __call__(self, query, key, value, options: AttentionOptions) -> SoftmaxState:
        shard = local_shard(self.axes, self.block_size)
        local = shard_attention(query, key, value, options, shard)
        if not self.shard_heads:
            with jax.named_scope("tree_decode"):
                state = reduce_state(local, self.axes, self.reduction, self.mesh)
            return add_sinks(state, options.sinks)
        _check_heads(query.shape[2], shard.num_shards)
        with jax.named_scope("tree_decode"):
            state = all_to_all(local.run(), self.axes)
        return add_sinks(state, _sinks_of_shard(options.sinks, shard, state.lse.shape[-1]))


def _sinks_of_shard(sinks, shard: Shard, num_heads: int):
    """Returns the sinks of a shard's `num_heads` heads, or None."""
    return None if sinks is None else jax.lax.dynamic_slice(sinks, [shard.index * num_heads], [num_heads])


def _check_heads(num_heads: int, num_shards: int) -> None:
    if num_heads % num_shards:
        raise ValueError(f"shard_heads needs a number of heads that the {num_shards} devices divide, got {num_heads}")
