"""Ring Attention decoding: the query stays, every shard of K and V visits every device."""

import dataclasses
from typing import Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Num

from tree_attn.arguments import AnyArray, AttentionOptions, OptionArguments, one_of, takes_options
from tree_attn.array_axes import BATCH, HEADS, option_specs
from tree_attn.local import attend_shard
from tree_attn.masking import add_sinks
from tree_attn.mesh import AxisName, axis_tuple
from tree_attn.placement import UNNAMED, Placement
from tree_attn.ring_baseline.rotate import place, source, to_next, typed_as_replicated
from tree_attn.ring_baseline.rotation import ROTATIONS, Way, choose_rotation, joined, split_ways
from tree_attn.sharded import check_call, local_shard, over_shards, pad_keys
from tree_attn.state import SoftmaxState, merge_states

VARIANTS = ("overlapped", "public")


@overload
def ring_decode(
    query: Float[AnyArray, "B T N H"], key: Num[AnyArray, "B S K H"], value: Num[AnyArray, "B S K Hv"], *,
    axis_name: AxisName, mesh: Mesh | None = ..., batch_axis_name: AxisName | None = ..., block_size: Placement = ...,
    variant: str = ..., rotation: str | None = ..., return_lse: Literal[False] = ...,
    **options: Unpack[OptionArguments],
) -> Float[Array, "B T N Hv"]: ...  # fmt: skip
@overload
def ring_decode(
    query: Float[AnyArray, "B T N H"], key: Num[AnyArray, "B S K H"], value: Num[AnyArray, "B S K Hv"], *,
    axis_name: AxisName, mesh: Mesh | None = ..., batch_axis_name: AxisName | None = ..., block_size: Placement = ...,
    variant: str = ..., rotation: str | None = ..., return_lse: Literal[True], **options: Unpack[OptionArguments],
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]: ...  # fmt: skip
@overload
def ring_decode(
    query: Float[AnyArray, "B T N H"], key: Num[AnyArray, "B S K H"], value: Num[AnyArray, "B S K Hv"], *,
    axis_name: AxisName, mesh: Mesh | None = ..., batch_axis_name: AxisName | None = ..., block_size: Placement = ...,
    variant: str = ..., rotation: str | None = ..., return_lse: bool, **options: Unpack[OptionArguments],
) -> Float[Array, "B T N Hv"] | tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]: ...  # fmt: skip
@takes_options(without=("reads_keys_early",))
def ring_decode(
    query: Float[AnyArray, "B T N H"],
    key: Num[AnyArray, "B S K H"],
    value: Num[AnyArray, "B S K Hv"],
    *,
    axis_name: AxisName,
    mesh: Mesh | None = None,
    batch_axis_name: AxisName | None = None,
    block_size: Placement = UNNAMED,
    variant: str = "overlapped",
    rotation: str | None = None,
    return_lse: bool = False,
    **options: Unpack[OptionArguments],
) -> Float[Array, "B T N Hv"] | tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Exact attention of a replicated query over sequence-sharded keys, by rotating K and V: the baseline.

    The formula is that of `tree_attn.tree_decode`. Each device ends with the states of all p shards and merges them in
    ring order, so that all hold the same bits. (Inside a `shard_map` that checks replication, one small all-reduce more
    gives the result its type.) Keys and values in float8_e4m3fn and int8 travel in that dtype (on a CPU
    XLA widens float8 first).

    Args:
      query, key, value, axis_name, mesh, batch_axis_name, block_size, return_lse, options: as in
        `tree_attn.tree_decode`.
      variant: "overlapped": p - 1 hops; the next hop's transfer starts before this hop's attention so that they can
        overlap. Each device sends `2 B S K H (p - 1) / p` elements. "public": p hops in a loop, attention first and
        then the transfer, as the public JAX rings do it (the last hop brings every shard home again).
      rotation: of "overlapped". "one_way": K and V go to the next device, each by a transfer of its own. "joint": as
        one array, by one transfer, which costs copies. "two_way": half of the KV heads go the other way round, so that
        each link carries half in both directions at once. None: the one that the cost model predicts to be the fastest;
        the logger `tree_attn` says which. Without costs of the machine that is "one_way".
    Returns:
      As `tree_attn.tree_decode`.
    Raises:
      ValueError, TypeError: as `tree_attn.tree_decode`; an unknown `variant` or `rotation`, or a pair of them that does
        not exist.
      NotImplementedError: as `tree_attn.tree_decode`; "two_way" with a single KV head.

    Example:
      >>> out = ring_decode(query, key, value, axis_name="seq", mesh=make_mesh({"seq": 8}))

    Source: Ring Attention as Tree Attention compares with it, sections 5.3 and 6; volume: equation 10.
    """
    axes = axis_tuple(axis_name)
    one_of("variant", variant, VARIANTS)
    one_of("rotation", rotation, (None, *ROTATIONS) if variant == "overlapped" else (None, "one_way"))
    attention = AttentionOptions(**options)
    block_size = check_call(query, key, value, attention, axes=axes, block_size=block_size)
    key, value, attention = pad_keys(key, value, attention, axes=axes, mesh=mesh, block_size=block_size)
    body = _RingDecode(axes=axes, block_size=block_size, variant=variant, rotation=rotation)
    of_query, of_keys = P(BATCH, None, HEADS), P(BATCH, axes, HEADS)
    state = over_shards(
        body, (query, key, value, attention), (of_query, of_keys, of_keys, option_specs(attention)), axes=axes,
        mesh=mesh, batch_axis_name=batch_axis_name, out_specs=of_query,
    )  # fmt: skip
    return (state.out, state.lse) if return_lse else state.out


@dataclasses.dataclass(frozen=True, kw_only=True)
class _RingDecode:
    """The part of each device. The fields are the arguments of `ring_decode`."""

    axes: tuple[str, ...]
    block_size: int | None
    variant: str
    rotation: str | None

    def __call__(self, query, key, value, options: AttentionOptions) -> SoftmaxState:
        shard = local_shard(self.axes, self.block_size)
        if key.shape[1] == 0:  # XLA compiles no hops of nothing
            state = attend_shard(query, key, value, options, shard)
            return add_sinks(typed_as_replicated(state, self.axes), options.sinks)

        def attend_to(way: Way, load, hop) -> SoftmaxState:
            visiting = dataclasses.replace(shard, index=source(self.axes, way.step * hop))
            return attend_shard(way.query, *way.key_value(load, hop), way.options, visiting, beside_transfers=True)

        rotation = "one_way"
        if self.variant == "overlapped":
            rotation = choose_rotation(self.rotation, query, key, value, self.axes)
        ways = split_ways(rotation, query, key, value, options)
        rotate = _overlapped if self.variant == "overlapped" else _public
        by_hop = rotate(attend_to, ways, self.axes, shard.num_shards)
        # Every device met the shards in another order. Merged in the ring's order they round alike everywhere.
        places_back = place(self.axes) - jnp.arange(shard.num_shards)
        merged = []
        for way, states in zip(ways, by_hop):
            order = (places_back if way.step == 1 else -places_back) % shard.num_shards
            merged.append(merge_states(jax.tree.map(lambda x: jnp.take(x, order, axis=0), states), axis=0))  # noqa: B023
        state = SoftmaxState(*(joined(parts, axis=2) for parts in zip(*merged)))
        return add_sinks(typed_as_replicated(state, self.axes), options.sinks)


def _overlapped(attend_to, ways: tuple[Way, ...], axes, num_shards) -> list[SoftmaxState]:
    """p - 1 hops, unrolled, so that a transfer lands in a buffer of its own while the previous shard is read."""
    present, by_hop = [way.load for way in ways], []
    for hop in range(num_shards):
        is_last = hop == num_shards - 1
        arriving = None if is_last else [to_next(x, axes, way.step) for way, x in zip(ways, present)]
        with jax.named_scope(f"ring_decode_hop_{hop}"):
            states = [attend_to(way, load, hop) for way, load in zip(ways, present)]
        # The hop ends when both are done. Without the barrier XLA runs all transfers ahead of the attention, which
        # overlaps nothing and needs a buffer per hop instead of two.
        present, states = jax.lax.optimization_barrier((arriving, states))
        by_hop.append(states)
    return [jax.tree.map(lambda *hops: jnp.stack(hops), *of_way) for of_way in zip(*by_hop)]


def _public(attend_to, ways: tuple[Way, ...], axes, num_shards) -> list[SoftmaxState]:
    """p hops in a loop: attend, then send, the last time to no purpose."""
    (way,) = ways

    def step(key_value, hop):
        state = attend_to(way, key_value, hop)
        # Without the barrier XLA may start the transfer first, which is what the other variant is for.
        key_value, state = jax.lax.optimization_barrier((key_value, state))
        return to_next(key_value, axes), state

    _, states = jax.lax.scan(step, (way.key, way.value), jnp.arange(num_shards, dtype=jnp.int32))
    return [states]
