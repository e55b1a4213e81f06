"""One device's part of a ring over prompts: K and V pass its queries hop by hop, forward and backward."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from tree_attn.arguments import AttentionOptions, clip_to_int32
from tree_attn.devices import default_platform
from tree_attn.local.gradient import Gradient, first_derivative_only, zero_gradient
from tree_attn.masking import add_sinks
from tree_attn.mesh import vary_as
from tree_attn.placement import BlockSize, Shard
from tree_attn.ring_baseline.rotate import source, to_next
from tree_attn.ring_baseline.rotation import Way, choose_rotation, joined, split_ways
from tree_attn.ring_baseline.runs import hop_gradient, hop_state
from tree_attn.sharded import local_shard
from tree_attn.state import SoftmaxState, empty_like, merge_state


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptRing:
    """Self-attention of a prompt that `axes` shard; to be called where a `shard_map` binds them.

    axes: `()` where the device has whole prompts
    block_size: as in `ring_attention`
    rotation: as in `ring_attention`
    returns_lse: False where no result depends on the lse, so that cuDNN's backward pass may run
    """

    axes: tuple[str, ...]
    block_size: BlockSize
    rotation: str | None = None
    returns_lse: bool = True

    def __call__(self, query, key, value, options: AttentionOptions) -> SoftmaxState:
        """Returns the state of this device's queries over all keys and sinks; differentiable once."""
        shard = local_shard(self.axes, self.block_size)
        rotation = choose_rotation(self.rotation, query, key, value, self.axes, is_causal=options.is_causal)
        query = _zero_in_padding(query, options.key_value_seq_lengths, shard)
        # So typed, what every device has gets the sum of all devices' gradients, outside of the rule below.
        query, key, value, options = vary_as((query, key, value, options), shard.index)
        return _differentiable(dataclasses.replace(self, rotation=rotation), query, key, value, options)

    def forward(self, query, key, value, options: AttentionOptions) -> SoftmaxState:
        """Returns what a call returns."""
        shard = local_shard(self.axes, self.block_size)
        ways = split_ways(self.rotation, query, key, value, options)

        def attended(hop, way: Way, load, state: SoftmaxState) -> SoftmaxState:
            with jax.named_scope("ring_attention_hop"):
                part = hop_state(
                    way.query, *way.key_value(load, hop), way.options, shard, **self._visiting(shard, hop, way)
                )
            if shard.num_shards == 1:
                return part
            # Merged in float32: a bf16 running output would round once per hop.
            return merge_state(state, SoftmaxState(part.out.astype(part.lse.dtype), part.lse))

        def step(carry, hop):
            arriving = [to_next(load, self.axes, way.step) for way, (load, _) in zip(ways, carry)]
            states = [attended(hop, way, *of_way) for way, of_way in zip(ways, carry)]
            # As in ring_decode: two buffers, and a transfer beside each hop's attention.
            return jax.lax.optimization_barrier(list(zip(arriving, states))), None

        empty = lambda way: vary_as(_empty_state(way), query)
        carry = [(way.load, empty(way)) for way in ways]
        carry = _over_hops(step, carry, shard.num_shards)
        states = [attended(shard.num_shards - 1, way, *of_way) for way, of_way in zip(ways, carry)]
        state = SoftmaxState(*(joined(parts, axis=2) for parts in zip(*states)))
        return add_sinks(SoftmaxState(state.out.astype(query.dtype), state.lse), options.sinks)

    def backward(
        self, query, key, value, options: AttentionOptions, state: SoftmaxState, cotangent: SoftmaxState
    ) -> tuple[Gradient, jax.Array]:
        """Returns the derivatives of the arrays, and that of each query's sum of weights.

        K and V go round once more. Their derivatives follow one hop behind: beside the attention of a hop travels what
        the hops before have added, and after the last hop all of it goes home.
        """
        shard = local_shard(self.axes, self.block_size)
        ways = split_ways(self.rotation, query, key, value, options)
        of_out = cotangent.out.astype(jnp.float32)
        of_sum = cotangent.lse - jnp.sum(of_out * state.out.astype(jnp.float32), axis=-1)
        rows = {"lse": state.lse, "of_out": of_out, "of_sum": of_sum}
        rows = _by_way(rows if self.returns_lse else rows | {"out": state.out}, ways)

        def at_hop(hop, way: Way, load, rows_of_way) -> Gradient:
            with jax.named_scope("ring_attention_backward_hop"):
                arrays, visiting = (way.query, *way.key_value(load, hop)), self._visiting(shard, hop, way)
                return hop_gradient(*arrays, way.options, shard, **visiting, **rows_of_way)

        def sent(way: Way, total: Gradient) -> Gradient:
            if shard.num_shards == 1:
                return total
            of_key, of_value = to_next((total.key, total.value), self.axes, way.step)
            return total._replace(key=of_key, value=of_value)

        def step(carry, hop):
            arriving = [to_next(load, self.axes, way.step) for way, (load, _) in zip(ways, carry)]
            # A first hop has nothing before it, and says so where hops are unrolled.
            is_first = isinstance(hop, int) and hop == 0
            before = [total if is_first else sent(way, total) for way, (_, total) in zip(ways, carry)]
            here = [at_hop(hop, way, load, of_way) for way, (load, _), of_way in zip(ways, carry, rows)]
            arriving, before, here = jax.lax.optimization_barrier((arriving, before, here))
            return list(zip(arriving, jax.tree.map(jnp.add, before, here))), None

        zeros = lambda way: vary_as(zero_gradient(*way[:4]), query)
        carry = _over_hops(step, [(way.load, zeros(way)) for way in ways], shard.num_shards)
        last = shard.num_shards - 1
        before = [sent(way, total) for way, (_, total) in zip(ways, carry)]
        here = [at_hop(last, way, load, of_way) for way, (load, _), of_way in zip(ways, carry, rows)]
        # Without it XLA joins the key's derivatives of other hops with the value's of this one, and waits for both.
        before, here = jax.lax.optimization_barrier((before, here))
        totals = [sent(way, jax.tree.map(jnp.add, *both)) for way, *both in zip(ways, before, here)]
        *arrays, scales = zip(*totals)
        scales = None if scales[0] is None else joined(scales, axis=1)
        return Gradient(*(joined(parts, axis=2) for parts in arrays), scales), of_sum

    def _visiting(self, shard: Shard, hop, way: Way) -> dict[str, Any]:
        """Returns the shard whose keys are here after `hop` hops, and whether it is known to be another's."""
        if isinstance(hop, int) and hop == 0:
            return {"visiting": shard, "is_other": False}
        visiting = dataclasses.replace(shard, index=source(self.axes, way.step * hop))
        return {"visiting": visiting, "is_other": isinstance(hop, int)}


def _by_way(arrays: dict[str, jax.Array], ways: tuple[Way, ...]) -> list[dict[str, jax.Array]]:
    """Returns each way's part of arrays `[B, T, N, ...]`."""
    if len(ways) == 1:
        return [arrays]
    half = ways[0].heads
    return [{name: x[:, :, heads] for name, x in arrays.items()} for heads in (slice(None, half), slice(half, None))]


def _empty_state(way: Way) -> SoftmaxState:
    rows = way.query.shape[:3]
    zeros = jnp.zeros((*rows, way.value.shape[-1]), jnp.float32), jnp.zeros(rows, jnp.float32)
    return empty_like(SoftmaxState(*zeros))


def _over_hops(step, carry, num_shards: int):
    """Runs `step(carry, hop)` for every hop but the last: on GPUs unrolled, so that XLA moves transfers freely.

    XLA's CPU compiler would then send all keys and values before it attends to any. Its TPU compiler would wait for
    each transfer. See docs/log/tpu.md: "A prompt's ring overlaps on TPUs in a loop, and not unrolled".
    """
    if default_platform() == "gpu" or num_shards == 1:
        for hop in range(num_shards - 1):
            carry, _ = step(carry, hop)
        return carry
    return jax.lax.scan(step, carry, jnp.arange(num_shards - 1, dtype=jnp.int32))[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(ring: PromptRing, query, key, value, options: AttentionOptions) -> SoftmaxState:
    return ring.forward(query, key, value, options)


def _forward(ring, query, key, value, options):
    state = first_derivative_only(ring.forward(query, key, value, options))
    return state, (query, key, value, options, state)


def _backward(ring, residuals, cotangent):
    query, key, value, options, state = residuals
    total, of_sum = first_derivative_only(ring.backward(*residuals, cotangent))
    of_options = {}
    if total.scales is not None:
        of_options |= {"key_scale": total.scales[0], "value_scale": total.scales[1]}
    if options.sinks is not None:
        # A sink is a logit without a value. One that is infinite takes all weight, and a little more changes nothing.
        sinks = options.sinks.astype(jnp.float32)[None, None, :]
        weights = jnp.exp(sinks - jnp.where(jnp.isneginf(state.lse), 0.0, state.lse))
        of_sinks = jnp.sum(jnp.where(jnp.isfinite(sinks), weights * of_sum, 0.0), axis=(0, 1))
        of_options["sinks"] = of_sinks.astype(options.sinks.dtype)
    of_arrays = map(_as_cotangent, total[:3], (query, key, value))
    return *of_arrays, _of_options(options, of_options)


_differentiable.defvjp(_forward, _backward)


def _as_cotangent(derivative, primal):
    return derivative.astype(primal.dtype) if jnp.issubdtype(primal.dtype, jnp.floating) else None


def _of_options(options: AttentionOptions, derivatives: dict) -> AttentionOptions:
    """Returns the cotangents of the options' arrays: those given, of arrays that the call has; none of integers."""
    names = [field.name for field in dataclasses.fields(options)]
    of = lambda name: derivatives.get(name) if getattr(options, name) is not None else None
    is_array = lambda name: hasattr(getattr(options, name), "dtype")
    return dataclasses.replace(options, **{name: of(name) for name in names if is_array(name)})


def _zero_in_padding(query, lengths, shard: Shard):
    """Returns `query` with 0 in each prompt's padding; unchanged where lengths are None.

    What is there, NaN or a logit that overflows, would reach all gradients: there a cotangent of 0 multiplies it.
    """
    if lengths is None:
        return query
    is_padding = shard.positions(query.shape[1])[None, :] >= clip_to_int32(lengths)[:, None]
    return jnp.where(is_padding[:, :, None, None], 0, query)
