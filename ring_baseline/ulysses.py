"""Ulysses attention over a whole prompt: devices exchange the sequence for heads, attend, and exchange back."""

import dataclasses
from typing import Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Num

from tree_attn.arguments import (
    AnyArray,
    AttentionOptions,
    OptionArguments,
    check_exchanged_heads,
    one_of,
    takes_options,
)
from tree_attn.array_axes import BATCH, HEADS, option_specs
from tree_attn.mesh import AxisName, axis_tuple
from tree_attn.placement import UNNAMED, ZIGZAG, BlockSize, Placement, PromptLayout
from tree_attn.reduce.collectives import all_to_all
from tree_attn.ring_baseline.attention import check_self_attention
from tree_attn.ring_baseline.hops import PromptRing
from tree_attn.ring_baseline.rotation import ROTATIONS, options_of_heads
from tree_attn.sharded import check_call, check_shards_are_full, over_shards
from tree_attn.state import SoftmaxState


@overload
def ulysses_attention(
    query: Float[AnyArray, "B S N H"], key: Num[AnyArray, "B S K H"], value: Num[AnyArray, "B S K Hv"], *,
    axis_name: AxisName, mesh: Mesh | None = ..., batch_axis_name: AxisName | None = ..., block_size: Placement = ...,
    rotation: str | None = ..., return_lse: Literal[False] = ..., **options: Unpack[OptionArguments],
) -> Float[Array, "B S N Hv"]: ...  # fmt: skip
@overload
def ulysses_attention(
    query: Float[AnyArray, "B S N H"], key: Num[AnyArray, "B S K H"], value: Num[AnyArray, "B S K Hv"], *,
    axis_name: AxisName, mesh: Mesh | None = ..., batch_axis_name: AxisName | None = ..., block_size: Placement = ...,
    rotation: str | None = ..., return_lse: Literal[True], **options: Unpack[OptionArguments],
) -> tuple[Float[Array, "B S N Hv"], Float[Array, "B S N"]]: ...  # fmt: skip
@overload
def ulysses_attention(
    query: Float[AnyArray, "B S N H"], key: Num[AnyArray, "B S K H"], value: Num[AnyArray, "B S K Hv"], *,
    axis_name: AxisName, mesh: Mesh | None = ..., batch_axis_name: AxisName | None = ..., block_size: Placement = ...,
    rotation: str | None = ..., return_lse: bool, **options: Unpack[OptionArguments],
) -> Float[Array, "B S N Hv"] | tuple[Float[Array, "B S N Hv"], Float[Array, "B S N"]]: ...  # fmt: skip
@takes_options(without=("query_positions", "reads_keys_early"), is_causal=True)
def ulysses_attention(
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
    """Exact self-attention of a prompt sharded along its sequence, by exchanging the sequence for heads and back.

    The formula is that of `ring_attention`. With one mesh axis of u devices, each receives all tokens of N / u query
    heads and of their KV heads. It attends to them, and sends each token's result home. So every device has the same
    share of a causal prompt, in any placement.

    With several axes the first one exchanges heads, and a ring runs over the others: u heads' parts times r parts of
    the sequence. The ring then sees whole blocks of tokens, b consecutive ones, or a device's own where contiguous.

    Each device sends `(u - 1) / u` of its query, key, value and result, each once. With fewer KV heads than u devices,
    each KV head goes to u / K of them. The backward pass exchanges as much again, and between the exchanges it is that
    of `ring_attention`, in linear memory.

    Args:
      query, key, value: as in `ring_attention`; u divides N, and u divides K or K divides u.
      axis_name: a mesh axis, or a tuple: the first exchanges heads, and is to have the fastest links.
      block_size, options: as in `ring_attention`; "zigzag" over one axis only.
      rotation: of the ring over the other axes, as in `ring_attention`; each device has K / u KV heads then.
      mesh, batch_axis_name, return_lse: as in `tree_attn.tree_decode`.
    Returns:
      As `ring_attention`.
    Raises:
      ValueError: as `ring_attention`; numbers of heads that u does not divide so.
      TypeError, NotImplementedError: as `ring_attention`.

    Example:
      >>> out = ulysses_attention(query, key, value, axis_name="seq", mesh=make_mesh({"seq": 2}), block_size=None)
      >>> mesh = make_mesh({"device": 2, "node": 4})
      >>> out = ulysses_attention(query, key, value, axis_name=("device", "node"), mesh=mesh, block_size=1)

    Source: DeepSpeed-Ulysses (Jacobs et al. 2023), section 3; the mix: USP (Fang and Zhao 2024), section 3.
    """
    axes = axis_tuple(axis_name)
    one_of("rotation", rotation, (None, *ROTATIONS))
    attention = AttentionOptions(**options)
    block_size = check_call(query, key, value, attention, axes=axes, block_size=block_size, is_prompt=True)
    check_self_attention(query, key)
    check_shards_are_full(key, axes=axes, mesh=mesh, block_size=block_size)
    if block_size == ZIGZAG and len(axes) > 1:
        raise NotImplementedError(
            f"block_size={block_size!r} needs one mesh axis, got axis_name {axes}: a ring outside takes runs or blocks"
        )
    body = _UlyssesAttention(axes=axes, block_size=block_size, rotation=rotation, return_lse=return_lse)
    along = P(BATCH, axes, HEADS)
    return over_shards(
        body, (query, key, value, attention), (along, along, along, option_specs(attention)), axes=axes, mesh=mesh,
        batch_axis_name=batch_axis_name, out_specs=along,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class _UlyssesAttention:
    """The part of each device. The fields are the arguments of `ulysses_attention`."""

    axes: tuple[str, ...]
    block_size: BlockSize
    rotation: str | None
    return_lse: bool

    def __call__(self, query, key, value, options: AttentionOptions):
        exchange, *rest = self.axes
        num_parts, num_kv_heads = jax.lax.axis_size(exchange), key.shape[2]
        check_exchanged_heads(query.shape[2], num_kv_heads, num_parts)
        # Fewer KV heads than devices: each goes to the devices that have some of its queries.
        copies = max(1, num_parts // num_kv_heads)
        key, value = (x if copies == 1 else jnp.repeat(x, copies, axis=2) for x in (key, value))
        options = options_of_heads(
            options, _local_heads(query, exchange, num_parts), _local_heads(key, exchange, num_parts) // copies
        )
        block = self.block_size if isinstance(self.block_size, int) else query.shape[1]
        # In rounds of one block from each device, tokens are block-cyclic over the other axes, and in order without.
        in_order, stored = self._orders(num_parts * query.shape[1], num_parts)
        ring = PromptRing(
            axes=tuple(rest), block_size=block if rest else None, rotation=self.rotation, returns_lse=self.return_lse
        )
        state = ring(*(in_order(_to_heads(x, exchange, num_parts, block)) for x in (query, key, value)), options)
        out = _to_tokens(stored(state.out), exchange, num_parts, block)
        if not self.return_lse:
            return out
        lse = _to_tokens(stored(state.lse[..., None]), exchange, num_parts, block)[..., 0]
        return tuple(SoftmaxState(out, lse))

    def _orders(self, num_tokens: int, num_parts: int):
        """Returns the functions that put received tokens in order, and back; two runs of a device are no one block."""
        if self.block_size != ZIGZAG or not num_tokens:
            return 2 * (lambda x: x,)
        layout = PromptLayout(num_tokens=num_tokens, num_shards=num_parts, block_size=ZIGZAG)
        return layout.restore, layout.store


def _local_heads(x, axis: str, num_parts: int):
    """Returns the indices of the heads of `x [B, S, N, H]` that this device receives."""
    count = x.shape[2] // num_parts
    return jax.lax.axis_index(axis) * count + jnp.arange(count, dtype=jnp.int32)


def _to_heads(x, axis: str, num_parts: int, block: int):
    """Returns this device's heads of all tokens, `[B, p S, N / p, H]`, of the tokens' own heads `[B, S, N, H]`.

    Tokens come in rounds: `block` of each device in turn.
    """
    batch, num_tokens, num_heads, dim = x.shape
    parts = x.reshape(batch, num_tokens, num_parts, num_heads // num_parts, dim)
    received = all_to_all(jnp.moveaxis(parts, 2, 0), axis)
    rounds = received.reshape(num_parts, batch, -1, block, *received.shape[3:])
    return jnp.moveaxis(rounds, 0, 2).reshape(batch, num_parts * num_tokens, -1, dim)


def _to_tokens(x, axis: str, num_parts: int, block: int):
    """Returns this device's tokens of all heads; the inverse of `_to_heads`."""
    batch, num_tokens, num_heads, dim = x.shape
    rounds = jnp.moveaxis(x.reshape(batch, -1, num_parts, block, num_heads, dim), 2, 0)
    received = all_to_all(rounds.reshape(num_parts, batch, num_tokens // num_parts, num_heads, dim), axis)
    return jnp.moveaxis(received, 0, 2).reshape(batch, num_tokens // num_parts, -1, dim)
