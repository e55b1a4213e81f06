"""The parts of one Llama layer. Weights keep the checkpoint's order, outputs before inputs.

Weights that multiply the same array are stored as one: query, key and value, and gate and up. One product reads them
faster than several do (docs/log/llama.md: "Weights stored as one are multiplied faster, and cuBLAS beats Triton
above 16 sequences").

Every layer's parameters are declared stacked along a leading `layers` axis. `Llama` scans over it, or creates each
layer's parameters apart; either way the code below sees those of one layer.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from tree_attn.models.llama.config import LlamaConfig
from tree_attn.models.llama.layer_caches import AnyCache
from tree_attn.models.llama.parameters import Create, Parameter
from tree_attn.models.llama.products import ACTIVATIONS, Branch, product_of
from tree_attn.models.llama.projections import ForwardContext, add_parts, from_heads, query_key_value
from tree_attn.models.llama.rope import apply_rotation


class RMSNorm(nnx.Module):
    """`x / sqrt(mean(x^2) + eps) * scale` over the last dimension, computed in float32.

    With `adds_one` the factor is `1 + scale`.
    """

    def __init__(self, parameter: Parameter, eps: float, create: Create, *, adds_one: bool = False):
        self.scale = nnx.Param(create(parameter))
        self.eps = eps
        self.adds_one = adds_one

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        normalised = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        # Rounded before the scale is applied, or after, as the published implementations do.
        if self.adds_one:
            return (normalised * (1.0 + self._scale_along(x).astype(jnp.float32))).astype(x.dtype)
        return normalised.astype(x.dtype) * self._scale_along(x)

    def _scale_along(self, x: jax.Array) -> jax.Array:
        return self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))


class SelfAttention(nnx.Module):
    """Projections and rotary embedding around the attention of the context."""

    def __init__(self, config: LlamaConfig, create: Create):
        group = config.group_size
        # Each KV head has its query heads, its key and its value: a cut over KV heads leaves these on one device.
        self.query_key_value = nnx.Param(
            create(
                Parameter(
                    name="layers.attention.query_key_value",
                    shape=(config.num_layers, config.num_kv_heads, group + 2, config.head_dim, config.hidden_size),
                    axes=("layers", "kv_heads", None, "kv_head_dim", "embed"),
                    fan_in=config.hidden_size,
                    parts=(("query", group), ("key", 1), ("value", 1)),
                )
            )
        )
        self.bias = _query_key_value_bias(config, create) if config.query_key_value_bias else None
        self.query_norm = _head_norm("query_norm", config, create) if config.query_key_norm else None
        self.key_norm = _head_norm("key_norm", config, create) if config.query_key_norm else None
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

    def __call__(
        self, branch: Branch, cache: AnyCache, layer: jax.Array | int, context: ForwardContext
    ) -> tuple[jax.Array, AnyCache]:
        """Returns attention to the branch's input, `[B, T, N, H]`; writes new keys and values to the cache's layer."""
        query, key, value, cache = self.rotated(branch, cache, layer, context)
        with jax.named_scope("attend"):
            return context.attend(query, key, value, cache, layer)

    @property
    def is_plain(self) -> bool:
        """True if queries, keys and values have neither biases nor norms."""
        return self.bias is None and self.query_norm is None and self.key_norm is None

    def rotated(self, branch: Branch, cache: AnyCache, layer: jax.Array | int, context: ForwardContext):
        """Returns queries, keys and values, and the cache; without keys and values where it has them already."""
        if context.appends and self.is_plain:
            with jax.named_scope("append"):
                rotation, weights = context.cosine_sine(layer), self.query_key_value[...]
                appended = context.products.append(branch, weights, rotation, cache, layer)
            if appended is not None:
                query, cache = appended
                return query, None, None, cache
        with jax.named_scope("project"):
            bias = None if self.bias is None else self.bias[...]
            query, key, value = query_key_value(branch, self.query_key_value[...], bias, context)
        if self.query_norm is not None and self.key_norm is not None:
            with jax.named_scope("norm"):
                query, key = self.query_norm(query), self.key_norm(key)
        with jax.named_scope("rope"):
            cosine_sine = context.cosine_sine(layer)
            query, key = apply_rotation(query, cosine_sine), apply_rotation(key, cosine_sine)
        return query, key, value, cache


def _query_key_value_bias(config: LlamaConfig, create: Create) -> nnx.Param:
    group = config.group_size
    return nnx.Param(
        create(
            Parameter(
                name="layers.attention.bias",
                shape=(config.num_layers, config.num_kv_heads, group + 2, config.head_dim),
                axes=("layers", "kv_heads", None, "kv_head_dim"),
                fan_in=config.hidden_size,
                parts=(("query_bias", group), ("key_bias", 1), ("value_bias", 1)),
            )
        )
    )


def _head_norm(name: str, config: LlamaConfig, create: Create) -> RMSNorm:
    """Returns a norm over the dimensions of each head; every device has its whole scale."""
    shape = (config.num_layers, config.head_dim)
    parameter = Parameter(name=f"layers.attention.{name}.scale", shape=shape, axes=("layers", None))
    return RMSNorm(parameter, config.rms_norm_eps, create, adds_one=config.norms_add_one)


class GatedMLP(nnx.Module):
    """`down(activation(gate(x)) * up(x))`."""

    def __init__(self, config: LlamaConfig, create: Create):
        self.activation = config.activation
        layers, wide, narrow = config.num_layers, config.intermediate_size, config.hidden_size
        self.gate_up = nnx.Param(
            create(
                Parameter(
                    name="layers.mlp.gate_up",
                    shape=(layers, 2, wide, narrow),
                    axes=("layers", None, "mlp", "embed"),
                    fan_in=narrow,
                    parts=(("gate", 1), ("up", 1)),
                )
            )
        )
        axes = ("layers", "embed", "mlp")
        self.down = nnx.Param(
            create(Parameter(name="layers.mlp.down", shape=(layers, narrow, wide), axes=axes, fan_in=wide))
        )

    def __call__(self, branch: Branch, context: ForwardContext) -> jax.Array:
        """Adds the MLP to the branch's `x`, `[B, T, D]`."""
        gate_up, down = self.gate_up[...], self.down[...]
        token_axis, is_cut = context.token_axis, context.sharding.num_shards("mlp") > 1
        if not is_cut:
            hidden = context.products.gate(branch, self.activation, gate_up)
            token_axis = None if context.clashes("mlp") else token_axis
            hidden = context.sharding.constrain(hidden, "batch", token_axis, "mlp")
            return context.products.add(branch, hidden, down)
        if context.joins("mlp"):

            def gated(x, gate_up, down):
                part = dataclasses.replace(branch, x=x)
                return context.products.of_shard.gate(part, self.activation, gate_up), down

            return add_parts(branch, gated, context, (branch.x, gate_up, down), cut=(None, 1, 1))
        x, activation = branch.normed(), ACTIVATIONS[self.activation]
        if token_axis is not None and context.clashes("mlp"):
            # A mesh axis holds one dimension at a time. Either the tokens gather for the first product and scatter
            # after the second, or the weights gather: long prompts are larger than each of the three. They gather one
            # by one, for XLA would transpose an array that it gathers along a second dimension.
            if x.size > down.size:
                gate, up, down = (context.sharding.constrain(kernel, None, None) for kernel in (*gate_up, down))
                hidden = activation(product_of(x, gate)) * product_of(x, up)
                return branch.plus(product_of(context.sharding.constrain(hidden, "batch", token_axis, None), down))
            token_axis = None
        constrain = lambda hidden: context.sharding.constrain(hidden, "batch", token_axis, "mlp")
        gate_and_up = _product_of_cut(x, gate_up)
        hidden = constrain(activation(gate_and_up[:, :, 0]) * gate_and_up[:, :, 1])
        return branch.plus(product_of(hidden, down))


def _product_of_cut(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiplies as `product_of` by weights `[2, F, D]` cut along F; as `[2 F, D]` devices would hold other rows."""
    return jnp.einsum("btd,cfd->btcf", x, kernel)


class LlamaLayer(nnx.Module):
    """Attention and MLP, each behind a norm, or between two, and added to its input."""

    def __init__(self, config: LlamaConfig, create: Create):
        def norm(name: str) -> RMSNorm:
            shape = (config.num_layers, config.hidden_size)
            parameter = Parameter(name=f"layers.{name}.scale", shape=shape, axes=("layers", "embed"))
            return RMSNorm(parameter, config.rms_norm_eps, create, adds_one=config.norms_add_one)

        self.attention_norm = norm("attention_norm")
        self.attention = SelfAttention(config, create)
        self.attention_post_norm = norm("attention_post_norm") if config.post_norms else None
        self.mlp_norm = norm("mlp_norm")
        self.mlp = GatedMLP(config, create)
        self.mlp_post_norm = norm("mlp_post_norm") if config.post_norms else None

    def __call__(
        self, x: jax.Array, cache: AnyCache, layer: jax.Array | int, context: ForwardContext
    ) -> tuple[jax.Array, AnyCache]:
        """Maps `x`, `[B, T, D]`, to the same shape; `layer` is the index of this layer in the cache."""
        with jax.named_scope("attention"):
            branch = Branch(x=x, norm=self.attention_norm, post_norm=self.attention_post_norm)
            attended, cache = self.attention(branch, cache, layer, context)
        return self.after_attention(branch, attended, context), cache

    def after_attention(self, branch: Branch, attended: jax.Array, context: ForwardContext) -> jax.Array:
        """Adds attention, `[B, T, N, H]`, and the MLP to the `x` of the attention's branch."""
        axes = ("batch", context.token_axis, "embed")
        with jax.named_scope("attention/output"):
            x = from_heads(branch, attended, self.attention.output[...], context)
            x = context.sharding.constrain(x, *axes)
        with jax.named_scope("mlp"):
            branch = Branch(x=x, norm=self.mlp_norm, post_norm=self.mlp_post_norm)
            return context.sharding.constrain(self.mlp(branch, context), *axes)
