"""Ring Attention over a whole prompt: queries, keys and values are all sharded along the sequence."""

from typing import Literal, Unpack, overload

from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Num

from tree_attn.arguments import AnyArray, AttentionOptions, OptionArguments, one_of, takes_options
from tree_attn.array_axes import BATCH, HEADS, option_specs
from tree_attn.mesh import AxisName, axis_tuple
from tree_attn.placement import UNNAMED, Placement
from tree_attn.ring_baseline.hops import PromptRing
from tree_attn.ring_baseline.rotation import ROTATIONS
from tree_attn.sharded import check_call, check_shards_are_full, over_shards


@overload
def ring_attention(
    query: Float[AnyArray, "B S N H"], key: Num[AnyArray, "B S K H"], value: Num[AnyArray, "B S K Hv"], *,
    axis_name: AxisName, mesh: Mesh | None = ..., batch_axis_name: AxisName | None = ..., block_size: Placement = ...,
    rotation: str | None = ..., return_lse: Literal[False] = ..., **options: Unpack[OptionArguments],
) -> Float[Array, "B S N Hv"]: ...  # fmt: skip
@overload
def ring_attention(
    query: Float[AnyArray, "B S N H"], key: Num[AnyArray, "B S K H"], value: Num[AnyArray, "B S K Hv"], *,
    axis_name: AxisName, mesh: Mesh | None = ..., batch_axis_name: AxisName | None = ..., block_size: Placement = ...,
    rotation: str | None = ..., return_lse: Literal[True], **options: Unpack[OptionArguments],
) -> tuple[Float[Array, "B S N Hv"], Float[Array, "B S N"]]: ...  # fmt: skip
@overload
def ring_attention(
    query: Float[AnyArray, "B S N H"], key: Num[AnyArray, "B S K H"], value: Num[AnyArray, "B S K Hv"], *,
    axis_name: AxisName, mesh: Mesh | None = ..., batch_axis_name: AxisName | None = ..., block_size: Placement = ...,
    rotation: str | None = ..., return_lse: bool, **options: Unpack[OptionArguments],
) -> Float[Array, "B S N Hv"] | tuple[Float[Array, "B S N Hv"], Float[Array, "B S N"]]: ...  # fmt: skip
@takes_options(without=("query_positions", "reads_keys_early"), is_causal=True)
def ring_attention(
    query: Float[AnyArray, "B S N H"],
    key: Num[AnyArray, "B S K H"],
    value: Num[AnyArray, "B S K Hv"],
    *,
    axis_name: AxisName,
    mesh: Mesh | None = None,
    batch_axis_name: AxisName | None = None,
    block_size: Placement = UNNAMED,
    rotation: str | None = None,
    return_lse: bool = False,
    **options: Unpack[OptionArguments],
) -> Float[Array, "B S N Hv"] | tuple[Float[Array, "B S N Hv"], Float[Array, "B S N"]]:
    """Exact self-attention of a prompt sharded along its sequence, by rotating K and V p - 1 times.

    out[t] = sum_{k <= t} softmax_k(scale query[t] . key[k]) value[k]     (without `k <= t` if not causal)

    `block_size=1` (striped) balances the causal mask: the query and key positions of every pair of shards interleave.
    In each hop each device then has half of its pairs to compute, to within one diagonal. The stored order is that of
    `KVCache`, which takes K and V without reordering. `block_size="zigzag"` balances it with long runs of tokens. A hop
    between two devices then needs no mask.

    The backward pass goes over blocks of queries and keys, with the lse of the forward pass over all keys:

    P[t, k] = exp(scale query[t] . key[k] - lse[t]),    D[t] = dout[t] . out[t] - dlse[t]
    dvalue[k] = sum_t P[t, k] dout[t],    dlogits[t, k] = P[t, k] (dout[t] . value[k] - D[t])
    dquery[t] = scale sum_k dlogits[t, k] key[k],    dkey[k] = scale sum_t dlogits[t, k] query[t]

    It keeps the arguments, `out` and `lse`, and computes P again. K and V go round once more, and dkey and dvalue
    follow them in float32. Memory is linear in the tokens of a device: on eight CPU devices the temporaries of a
    gradient in float32, of heads of 64, are at most six times its arguments. Only the first derivative exists, by
    reverse mode.

    Args:
      query, key, value: `[B, S, N or K, H]`, one S, sharded on S in the storage order of `block_size`
        (`tree_attn.placement.storage_order`); S a multiple of devices x block_size, or zigzag of 2 x devices. The query
        stored at index i is at position `storage_order(...)[i]`. key and value may both be float8_e4m3fn or int8.
      block_size: 1 striped (balanced); b block-cyclic; "zigzag" (balanced): of 2 p runs of tokens, device i has runs i
        and 2 p - 1 - i; None contiguous, where the last device does most of the work. It must be named where the
        result depends on it: if causal, with lengths or a window.
      rotation: "one_way": K and V go to the next device, p - 1 times. "joint": as one array. "two_way": half of the KV
        heads go the other way round. None: the one predicted to be the fastest, as in `ring_decode`.
      options: the attention options of `tree_attn.attend`, but for positions; `is_causal` is True by default.
        `key_value_seq_lengths` is the length of each prompt. Queries past it are padding: 0 takes their place,
        whatever they hold, and their result means nothing.
      axis_name, mesh, batch_axis_name, return_lse: as in `tree_attn.tree_decode`.
    Returns:
      `out [B, S, N, Hv]`, sharded as the query is; with `return_lse`, `(out, lse)`.
    Raises:
      ValueError, TypeError: as `tree_attn.tree_decode`; an unknown `rotation`.
      NotImplementedError: as `tree_attn.tree_decode`; a second derivative; "two_way" with a single KV head.

    Example:
      >>> layout = PromptLayout(num_tokens=S, num_shards=8, block_size=1)
      >>> stored = map(layout.store, (query, key, value))
      >>> out = layout.restore(ring_attention(*stored, axis_name="seq", mesh=mesh, block_size=1))

    Source: Ring Attention (Liu et al. 2023), section 3, with the striping of Brandon et al. 2023; the backward pass of
      FlashAttention-2 (Dao 2023), section 3.1.2; Tree Attention, section 5.3.
    """
    axes = axis_tuple(axis_name)
    one_of("rotation", rotation, (None, *ROTATIONS))
    attention = AttentionOptions(**options)
    block_size = check_call(query, key, value, attention, axes=axes, block_size=block_size, is_prompt=True)
    check_self_attention(query, key)
    check_shards_are_full(key, axes=axes, mesh=mesh, block_size=block_size)
    body = PromptRing(axes=axes, block_size=block_size, rotation=rotation, returns_lse=return_lse)
    along = P(BATCH, axes, HEADS)
    state = over_shards(
        body, (query, key, value, attention), (along, along, along, option_specs(attention)), axes=axes, mesh=mesh,
        batch_axis_name=batch_axis_name, out_specs=along,
    )  # fmt: skip
    return (state.out, state.lse) if return_lse else state.out


def check_self_attention(query, key) -> None:
    """Raises ValueError unless there is a query for each key."""
    if query.shape[1] != key.shape[1]:
        raise ValueError(f"query must have one position per key, S = {key.shape[1]}, got T = {query.shape[1]}")
