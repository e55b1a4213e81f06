"""Ring Attention over a whole prompt: queries, keys and values are all sharded along the sequence."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from tree_attn.arguments import AttentionOptions, Window
from tree_attn.local import attend_shard
from tree_attn.mesh import AxisName, axis_tuple
from tree_attn.placement import Shard
from tree_attn.ring_baseline.rotate import source, to_next
from tree_attn.sharded import over_shards
from tree_attn.state import SoftmaxState, merge_state


def ring_attention(
    query: Float[Array, "B S N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    *,
    axis_name: AxisName,
    mesh: Mesh | None = None,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    block_size: int | None = 1,
    is_causal: bool = True,
    local_window_size: int | Window | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    scale: float | None = None,
    key_scale: Float[Array, " K"] | None = None,
    value_scale: Float[Array, " K"] | None = None,
    implementation: str | None = None,
    return_lse: bool = False,
) -> Float[Array, "B S N Hv"] | tuple[Float[Array, "B S N Hv"], Float[Array, "B S N"]]:
    """Exact self-attention of a prompt sharded along its sequence, by rotating K and V p - 1 times.

    out[t] = sum_{k <= t} softmax_k(scale query[t] . key[k]) value[k]     (without `k <= t` if not causal)

    Balanced under the causal mask: with `block_size=1` (striped) the query and key positions of every pair of shards
    interleave, so that in each hop each device has half of its pairs to compute, to within one diagonal. The stored
    order is that of the cache, which takes K and V as they are.

    Args:
      query, key, value: `[B, S, N or K, H]`, one S, sharded on S in the storage order of `block_size`
        (`tree_attn.placement.storage_order`); S a multiple of devices x block_size. The query stored at index i is at
        position `storage_order(...)[i]`. key and value may both be float8_e4m3fn or int8.
      key_value_seq_lengths: int32 `[B]`, length of each prompt; queries past it are padding, their result is defined
        (they see the valid keys) and meaningless.
      block_size: 1 striped (balanced); b block-cyclic; None contiguous, where the last device does most of the work.
      The other arguments, the result and the errors are those of `tree_attn.tree_decode`; the result is sharded as
      the query is.

    Example:
      >>> order = storage_order(S, num_shards=8, block_size=1)
      >>> out = ring_attention(query[:, order], key[:, order], value[:, order], axis_name="seq", mesh=mesh)

    Source: Ring Attention (Liu et al. 2023) with the striping of Brandon et al. 2023; Tree Attention, section 5.3.
    """
    axes = axis_tuple(axis_name)
    options = AttentionOptions(
        key_value_seq_lengths=key_value_seq_lengths,
        sinks=sinks,
        key_scale=key_scale,
        value_scale=value_scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        scale=scale,
        implementation=implementation,
    )
    _check_self_attention(query, key)

    def body(query, key, value, options: AttentionOptions, shard: Shard) -> SoftmaxState:
        key_value, state = (key, value), None
        for hop in range(shard.num_shards):
            arriving = to_next(key_value, axes) if hop < shard.num_shards - 1 else None
            visiting = dataclasses.replace(shard, index=source(axes, hop))
            with jax.named_scope(f"ring_attention_hop_{hop}"):
                part = attend_shard(query, *key_value, options, visiting, query_shard=shard, beside_transfers=True)
            # Merged in float32: a bf16 running output would round once per hop.
            part = SoftmaxState(part.out.astype(part.lse.dtype), part.lse)
            state = part if state is None else merge_state(state, part)
            # As in ring_decode: two buffers, and a transfer beside each hop's attention.
            key_value, state = jax.lax.optimization_barrier((arriving, state))
        return SoftmaxState(state.out.astype(query.dtype), state.lse)

    state = over_shards(
        body, query, key, value, options, axis_name=axis_name, mesh=mesh, block_size=block_size, shard_query=True
    )
    return (state.out, state.lse) if return_lse else state.out


def _check_self_attention(query, key) -> None:
    if jnp.ndim(query) == 4 and jnp.ndim(key) == 4 and query.shape[1] != key.shape[1]:
        raise ValueError(f"query must have one position per key, S = {key.shape[1]}, got T = {query.shape[1]}")
