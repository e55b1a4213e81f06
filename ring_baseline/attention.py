"""Ring Attention over a whole prompt: queries, keys and values are all sharded along the sequence."""

import dataclasses
from typing import Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Num

from tree_attn.arguments import AnyArray, AttentionOptions, OptionArguments, clip_to_int32, takes_options
from tree_attn.array_axes import BATCH, HEADS, option_specs
from tree_attn.local import attend_shard
from tree_attn.masking import add_sinks
from tree_attn.mesh import AxisName, axis_tuple
from tree_attn.placement import UNNAMED, Placement, Shard
from tree_attn.ring_baseline.rotate import source, to_next
from tree_attn.sharded import check_call, check_shards_are_full, local_shard, over_shards
from tree_attn.state import SoftmaxState, merge_state


@overload
def ring_attention(
    query: Float[AnyArray, "B S N H"], key: Num[AnyArray, "B S K H"], value: Num[AnyArray, "B S K Hv"], *,
    axis_name: AxisName, mesh: Mesh | None = ..., batch_axis_name: AxisName | None = ..., block_size: Placement = ...,
    return_lse: Literal[False] = ..., **options: Unpack[OptionArguments],
) -> Float[Array, "B S N Hv"]: ...  # fmt: skip
@overload
def ring_attention(
    query: Float[AnyArray, "B S N H"], key: Num[AnyArray, "B S K H"], value: Num[AnyArray, "B S K Hv"], *,
    axis_name: AxisName, mesh: Mesh | None = ..., batch_axis_name: AxisName | None = ..., block_size: Placement = ...,
    return_lse: Literal[True], **options: Unpack[OptionArguments],
) -> tuple[Float[Array, "B S N Hv"], Float[Array, "B S N"]]: ...  # fmt: skip
@overload
def ring_attention(
    query: Float[AnyArray, "B S N H"], key: Num[AnyArray, "B S K H"], value: Num[AnyArray, "B S K Hv"], *,
    axis_name: AxisName, mesh: Mesh | None = ..., batch_axis_name: AxisName | None = ..., block_size: Placement = ...,
    return_lse: bool, **options: Unpack[OptionArguments],
) -> Float[Array, "B S N Hv"] | tuple[Float[Array, "B S N Hv"], Float[Array, "B S N"]]: ...  # fmt: skip
@takes_options(without=("query_positions",), is_causal=True)
def ring_attention(
    query: Float[AnyArray, "B S N H"],
    key: Num[AnyArray, "B S K H"],
    value: Num[AnyArray, "B S K Hv"],
    *,
    axis_name: AxisName,
    mesh: Mesh | None = None,
    batch_axis_name: AxisName | None = None,
    block_size: Placement = UNNAMED,
    return_lse: bool = False,
    **options: Unpack[OptionArguments],
) -> Float[Array, "B S N Hv"] | tuple[Float[Array, "B S N Hv"], Float[Array, "B S N"]]:
    """Exact self-attention of a prompt sharded along its sequence, by rotating K and V p - 1 times.

    out[t] = sum_{k <= t} softmax_k(scale query[t] . key[k]) value[k]     (without `k <= t` if not causal)

    `block_size=1` (striped) balances the causal mask: the query and key positions of every pair of shards interleave.
    In each hop each device then has half of its pairs to compute, to within one diagonal. The stored order is that of
    `KVCache`, which takes K and V without reordering.

    It is not for training: the backward pass keeps the probabilities of every hop, `8 B N S^2 / p` bytes on each of p
    devices, and more that grows with S. With B = 1, N = 4, H = 64 and p = 8, a gradient takes temporaries of 10.9, 30
    and 97 MB at S = 1,024, 2,048 and 4,096. A shard of the query has 0.13, 0.26 and 0.52 MB there.

    Args:
      query, key, value: `[B, S, N or K, H]`, one S, sharded on S in the storage order of `block_size`
        (`tree_attn.placement.storage_order`); S a multiple of devices x block_size. The query stored at index i is at
        position `storage_order(...)[i]`. key and value may both be float8_e4m3fn or int8.
      block_size: 1 striped (balanced); b block-cyclic; None contiguous, where the last device does most of the work. It
        must be named where the result depends on it: if causal, with lengths or a window.
      options: the attention options of `tree_attn.attend`, but for positions; `is_causal` is True by default.
        `key_value_seq_lengths` is the length of each prompt. Queries past it are padding: they see the valid keys, and
        their result means nothing. Of what they hold, 0 takes the place of NaN and infinities.
      axis_name, mesh, batch_axis_name, return_lse: as in `tree_attn.tree_decode`.
    Returns:
      `out [B, S, N, Hv]`, sharded as the query is; with `return_lse`, `(out, lse)`.
    Raises:
      ValueError, TypeError, NotImplementedError: as `tree_attn.tree_decode`.

    Example:
      >>> layout = PromptLayout(num_tokens=S, num_shards=8, block_size=1)
      >>> stored = map(layout.store, (query, key, value))
      >>> out = layout.restore(ring_attention(*stored, axis_name="seq", mesh=mesh, block_size=1))

    Source: Ring Attention (Liu et al. 2023) with the striping of Brandon et al. 2023; Tree Attention, section 5.3.
    """
    axes = axis_tuple(axis_name)
    attention = AttentionOptions(**options)
    block_size = check_call(query, key, value, attention, axes=axes, block_size=block_size, is_prompt=True)
    check_self_attention(query, key)
    check_shards_are_full(key, axes=axes, mesh=mesh, block_size=block_size)
    body = _RingAttention(axes=axes, block_size=block_size)
    along = P(BATCH, axes, HEADS)
    state = over_shards(
        body, (query, key, value, attention), (along, along, along, option_specs(attention)), axes=axes, mesh=mesh,
        batch_axis_name=batch_axis_name, out_specs=along,
    )  # fmt: skip
    return (state.out, state.lse) if return_lse else state.out


@dataclasses.dataclass(frozen=True, kw_only=True)
class _RingAttention:
    """The part of each device. The fields are the arguments of `ring_attention`."""

    axes: tuple[str, ...]
    block_size: int | None

    def __call__(self, query, key, value, options: AttentionOptions) -> SoftmaxState:
        shard = local_shard(self.axes, self.block_size)
        query = _finite_in_padding(query, options.key_value_seq_lengths, shard)
        key_value, state = (key, value), None
        for hop in range(shard.num_shards):
            arriving = to_next(key_value, self.axes) if hop < shard.num_shards - 1 else None
            visiting = dataclasses.replace(shard, index=source(self.axes, hop))
            with jax.named_scope(f"ring_attention_hop_{hop}"):
                part = attend_shard(query, *key_value, options, visiting, query_shard=shard, beside_transfers=True)
            # Merged in float32: a bf16 running output would round once per hop.
            part = SoftmaxState(part.out.astype(part.lse.dtype), part.lse)
            state = part if state is None else merge_state(state, part)
            # As in ring_decode: two buffers, and a transfer beside each hop's attention.
            key_value, state = jax.lax.optimization_barrier((arriving, state))
        return add_sinks(SoftmaxState(state.out.astype(query.dtype), state.lse), options.sinks)


def check_self_attention(query, key) -> None:
    """Raises ValueError unless there is a query for each key."""
    if query.shape[1] != key.shape[1]:
        raise ValueError(f"query must have one position per key, S = {key.shape[1]}, got T = {query.shape[1]}")


def _finite_in_padding(query, lengths, shard: Shard):
    """Returns `query` with 0 where a prompt's padding holds NaN or an infinity; all of it, where lengths are None.

    They would reach the gradient of keys and values: there a cotangent of 0 multiplies them.
    """
    if lengths is None:
        return query
    is_padding = shard.positions(query.shape[1])[None, :] >= clip_to_int32(lengths)[:, None]
    return jnp.where(is_padding[:, :, None, None] & ~jnp.isfinite(query), 0, query)
