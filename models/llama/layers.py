"""The parts of one Llama layer. Kernels keep the checkpoint's order, outputs before inputs: loading only reshapes.

Every layer's parameters are declared stacked along a leading `layers` axis. `Llama` scans over it or has each layer's
made by itself; either way the code below sees those of one layer.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from models.llama.config import LlamaConfig
from models.llama.parameters import Create, Parameter
from models.llama.rope import apply_rotation
from models.llama.sharding import LlamaSharding, as_tuple
from tree_attn.cache import KVCache
from tree_attn.reduce.activations import gather_activations, sum_activations


class Attend(Protocol):
    """Attention and its cache, for one layer: `(query, key, value, cache, layer) -> (out, cache)`."""

    def __call__(
        self, query: jax.Array, key: jax.Array, value: jax.Array, cache: KVCache, layer: jax.Array | int
    ) -> tuple[jax.Array, KVCache]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass:
    """What the layers of one forward pass share.

    Attributes:
      cosine_sine: of the tokens' positions, from `rope.rotation`.
      attend: writes the new keys and values to the cache and attends.
      sharding: where the parts of an intermediate array go.
      token_axis: the logical axis of the token dimension: `sequence` in prefill, None (replicated) in decoding.
    """

    cosine_sine: tuple[jax.Array, jax.Array]
    attend: Attend
    sharding: LlamaSharding
    token_axis: str | None

    def clashes(self, axis: str) -> bool:
        """Whether a logical axis is cut over devices of the sequence: an array can have one of the two."""
        return bool(set(as_tuple(getattr(self.sharding, axis))) & set(as_tuple(self.sharding.sequence)))

    def joins(self, *axes: str) -> bool:
        """Whether, in decoding, what is cut over these logical axes, as the sequence is, is joined within a layer.

        That is written out rather than left to XLA, for it is few numbers (`tree_attn.reduce.activations`).
        """
        cut = {as_tuple(getattr(self.sharding, axis)) for axis in axes}
        is_over_sequence = cut == {as_tuple(self.sharding.sequence)} and not self.clashes("embed")
        return self.token_axis is None and is_over_sequence and self.sharding.num_shards("sequence") > 1


class RMSNorm(nnx.Module):
    """`x / sqrt(mean(x^2) + eps) * scale` over the last dimension, worked out in float32."""

    def __init__(self, parameter: Parameter, eps: float, create: Create):
        self.scale = nnx.Param(create(parameter))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        normalised = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        # Rounded before the scale is applied, as the published implementations do.
        return normalised.astype(x.dtype) * self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))


class SelfAttention(nnx.Module):
    """Projections and rotary embedding around an attention that is passed in."""

    def __init__(self, config: LlamaConfig, create: Create):
        def projection(name: str, num_heads: int, axis: str) -> nnx.Param:
            shape = (config.num_layers, num_heads, config.head_dim, config.hidden_size)
            axes = ("layers", axis, "head_dim", "embed")
            name = f"layers.attention.{name}"
            return nnx.Param(create(Parameter(name=name, shape=shape, axes=axes, fan_in=config.hidden_size)))

        self.query = projection("query", config.num_heads, "heads")
        self.key = projection("key", config.num_kv_heads, "kv_heads")
        self.value = projection("value", config.num_kv_heads, "kv_heads")
        self.output = nnx.Param(
            create(
                Parameter(
                    name="layers.attention.output",
                    shape=(config.num_layers, config.hidden_size, config.num_heads, config.head_dim),
                    axes=("layers", "embed", "heads", "head_dim"),
                    fan_in=config.num_heads * config.head_dim,
                )
            )
        )

    def __call__(self, x: jax.Array, cache: KVCache, layer: jax.Array | int, shared: Pass) -> tuple[jax.Array, KVCache]:
        """`x` is `[B, T, D]`; returns the same shape, and the cache that holds this layer's new keys and values."""
        kernels = self.query[...], self.key[...], self.value[...]
        with jax.named_scope("project"):
            if shared.joins("heads", "kv_heads"):
                query, key, value = _to_all_heads(x, kernels, shared)
            else:
                axes = "heads", "kv_heads", "kv_heads"
                query, key, value = (_to_heads(x, kernel, axis, shared) for kernel, axis in zip(kernels, axes))
        with jax.named_scope("rope"):
            query, key = apply_rotation(query, shared.cosine_sine), apply_rotation(key, shared.cosine_sine)
        with jax.named_scope("attend"):
            out, cache = shared.attend(query, key, value, cache, layer)
        with jax.named_scope("output"):
            return _from_heads(out, self.output[...], shared), cache


# Heads and head dim are one axis in the products: XLA on CPU would transpose kernels of three axes at every step, which
# takes ten times as long as the product of a single token.


def _to_heads(x: jax.Array, kernel: jax.Array, axis: str, shared: Pass) -> jax.Array:
    """`[B, T, D]` times `[N, H, D]` to `[B, T, N, H]`; `axis` is N's.

    In decoding each device makes the heads whose weights it has. In prefill it has tokens of its own, and needs all.
    """
    out = jnp.einsum("btd,fd->btf", x, kernel.reshape(-1, kernel.shape[-1]))
    out = out.reshape(*x.shape[:2], *kernel.shape[:2])
    heads = None if shared.token_axis is not None and shared.clashes(axis) else axis
    return shared.sharding.constrain(out, "batch", shared.token_axis, heads, None if heads is None else "head_dim")


def _to_all_heads(x: jax.Array, kernels: Sequence[jax.Array], shared: Pass) -> list[jax.Array]:
    """In decoding, of several kernels that are cut over heads alike: each device makes its heads, and is given all."""
    axes, mesh = as_tuple(shared.sharding.sequence), shared.sharding.mesh
    counts = [kernel.shape[0] // shared.sharding.num_shards("sequence") for kernel in kernels]

    def of_shard(x, *kernels):
        own = [jnp.einsum("btd,fd->btf", x, kernel.reshape(-1, kernel.shape[-1])) for kernel in kernels]
        own = [part.reshape(*part.shape[:2], *kernel.shape[:2]) for part, kernel in zip(own, kernels)]
        gathered = gather_activations(jnp.concatenate(own, axis=2), axes, mesh)  # [devices, B, T, heads of one, H]
        parts = jnp.split(gathered, np.cumsum(counts)[:-1], axis=3)
        return [jnp.moveaxis(part, 0, 2).reshape(*x.shape[:2], -1, part.shape[-1]) for part in parts]

    return jax.shard_map(
        of_shard,
        mesh=mesh,
        axis_names=set(axes),
        in_specs=(P(), *(P(axes) for _ in kernels)),
        out_specs=[P() for _ in kernels],
        check_vma=False,
    )(x, *kernels)


def _from_heads(x: jax.Array, kernel: jax.Array, shared: Pass) -> jax.Array:
    """`[B, T, N, H]` times `[D, N, H]` to `[B, T, D]`."""

    def product(x, kernel, **how):
        return jnp.einsum("btf,df->btd", x.reshape(*x.shape[:2], -1), kernel.reshape(kernel.shape[0], -1), **how)

    if not shared.joins("heads"):
        return product(x, kernel)
    return _sum_of_parts(product, shared, (x, kernel), cut=(2, 1))


def _sum_of_parts(product: Callable, shared: Pass, arrays: Sequence[jax.Array], cut: Sequence[int | None]) -> jax.Array:
    """In decoding: the sum over devices of `product` of what each has of `arrays`, cut along the dimensions `cut`."""
    axes, mesh = as_tuple(shared.sharding.sequence), shared.sharding.mesh

    def of_shard(*arrays):
        return sum_activations(product(*arrays, preferred_element_type=jnp.float32), axes, mesh)

    total = jax.shard_map(
        of_shard,
        mesh=mesh,
        axis_names=set(axes),
        in_specs=tuple(P() if dim is None else P(*[None] * dim, axes) for dim in cut),
        out_specs=P(),
        check_vma=False,
    )(*arrays)
    return total.astype(arrays[0].dtype)


class GatedMLP(nnx.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: LlamaConfig, create: Create):
        wide, narrow = config.intermediate_size, config.hidden_size

        def kernel(name: str, fan_out: int, fan_in: int, axes: tuple[str, str]) -> nnx.Param:
            shape = (config.num_layers, fan_out, fan_in)
            name = f"layers.mlp.{name}"
            return nnx.Param(create(Parameter(name=name, shape=shape, axes=("layers", *axes), fan_in=fan_in)))

        self.gate = kernel("gate", wide, narrow, ("mlp", "embed"))
        self.up = kernel("up", wide, narrow, ("mlp", "embed"))
        self.down = kernel("down", narrow, wide, ("embed", "mlp"))

    def __call__(self, x: jax.Array, shared: Pass) -> jax.Array:
        gate, up, down = self.gate[...], self.up[...], self.down[...]
        token_axis, axis = shared.token_axis, "mlp"
        if token_axis is not None and shared.clashes("mlp"):
            # An axis holds one dimension at a time. Either the tokens gather for both products and scatter after the
            # third, or the kernels gather: long prompts are more than these.
            if x.size > gate.size:
                gate, up, down = (shared.sharding.constrain(kernel, None, None) for kernel in (gate, up, down))
                axis = None
            else:
                token_axis = None
        if shared.joins("mlp"):
            return _sum_of_parts(_gated, shared, (x, gate, up, down), cut=(None, 0, 0, 1))
        constrain = lambda hidden: shared.sharding.constrain(hidden, "batch", token_axis, axis)
        return _gated(x, gate, up, down, constrain=constrain)


def _gated(x, gate, up, down, constrain=lambda hidden: hidden, **how):
    hidden = jax.nn.silu(jnp.einsum("btd,fd->btf", x, gate)) * jnp.einsum("btd,fd->btf", x, up)
    return jnp.einsum("btf,df->btd", constrain(hidden), down, **how)


class LlamaLayer(nnx.Module):
    """Attention and MLP, each behind a norm and added to what came in."""

    def __init__(self, config: LlamaConfig, create: Create):
        def norm(name: str) -> RMSNorm:
            shape = (config.num_layers, config.hidden_size)
            parameter = Parameter(name=f"layers.{name}.scale", shape=shape, axes=("layers", "embed"))
            return RMSNorm(parameter, config.rms_norm_eps, create)

        self.attention_norm = norm("attention_norm")
        self.attention = SelfAttention(config, create)
        self.mlp_norm = norm("mlp_norm")
        self.mlp = GatedMLP(config, create)

    def __call__(self, x: jax.Array, cache: KVCache, layer: jax.Array | int, shared: Pass) -> tuple[jax.Array, KVCache]:
        """`x` is `[B, T, D]`; `layer` is the index of this layer in the cache."""
        with jax.named_scope("attention"):
            update, cache = self.attention(self.attention_norm(x), cache, layer, shared)
            x = shared.sharding.constrain(x + update, "batch", shared.token_axis, "embed")
        with jax.named_scope("mlp"):
            x = x + self.mlp(self.mlp_norm(x), shared)
            return shared.sharding.constrain(x, "batch", shared.token_axis, "embed"), cache
