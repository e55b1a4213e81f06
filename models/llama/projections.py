"""Products with a layer's weights, which may be cut over the devices of the sequence."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from tree_attn.models.llama.layer_caches import AnyCache
from tree_attn.models.llama.products import Branch, XlaProducts
from tree_attn.models.llama.sharding import LlamaSharding, as_tuple
from tree_attn.reduce.activations import gather_activations


class Attend(Protocol):
    """Attention and its cache, for one layer: `(query, key, value, cache, layer) -> (out, cache)`.

    Where `ForwardContext.appends`, key and value may be None: the cache has them already.
    """

    def __call__(
        self, query: jax.Array, key: jax.Array, value: jax.Array, cache: AnyCache, layer: jax.Array | int
    ) -> tuple[jax.Array, AnyCache]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardContext:
    """The context of one forward pass, the same for all layers.

    Attributes:
      cosine_sine: `layer -> rope.rotation` of the tokens' positions.
      attend: writes the new keys and values to the cache and attends.
      sharding: maps dimensions of intermediate arrays to mesh axes.
      token_axis: the logical axis of the token dimension: `sequence` in prefill, None (replicated) in decoding.
      products: run the products; `products.of_shard` those of weights that are cut over the sequence's devices.
      appends: whether keys and values may be in the cache before attention.
      attention_options: `layer -> options`, as `tree_attn.attend` takes them, where a launch of products may attend
        too, each query to its sequence's cache; None: only `attend` does.
    """

    cosine_sine: Callable[[jax.Array | int], tuple[jax.Array, jax.Array]]
    attend: Attend
    sharding: LlamaSharding
    token_axis: str | None
    products: XlaProducts
    appends: bool = False
    attention_options: Callable[[int], dict[str, Any]] | None = None

    def clashes(self, axis: str) -> bool:
        """True if a logical axis is cut over devices of the sequence: an array can have only one of the two."""
        return bool(set(as_tuple(getattr(self.sharding, axis))) & set(as_tuple(self.sharding.sequence)))

    def joins(self, axis: str) -> bool:
        """True if, in decoding, this axis is cut over the sequence's devices, so the layer gathers or sums its result.

        The layer does so itself, and not XLA, because the numbers are few (`tree_attn.reduce.activations`).
        """
        mesh_axes = as_tuple(getattr(self.sharding, axis))
        is_over_sequence = mesh_axes == as_tuple(self.sharding.sequence) and not self.clashes("embed")
        return self.token_axis is None and is_over_sequence and self.sharding.num_shards("sequence") > 1


def _biased(heads: jax.Array, bias: jax.Array | None) -> jax.Array:
    return heads if bias is None else heads + bias[None, None]


def query_key_value(
    branch: Branch, kernel: jax.Array, bias: jax.Array | None, context: ForwardContext
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Multiplies a branch's input by `[K, G + 2, H, D]`, and adds biases: `[B, T, N, H]` and twice `[B, T, K, H]`."""
    joined = [dim for dim, axis in ((0, "kv_heads"), (2, "kv_head_dim")) if context.joins(axis)]
    if joined:
        heads = _to_all_heads(branch, kernel, bias, *joined, context)
    else:
        heads = _to_heads(branch, kernel, bias, context)
    query = heads[:, :, :, :-2].reshape(*heads.shape[:2], -1, kernel.shape[-2])
    if not context.clashes("heads"):
        query = context.sharding.constrain(query, "batch", context.token_axis, "heads", "head_dim")
    return query, heads[:, :, :, -2], heads[:, :, :, -1]


def _to_heads(branch: Branch, kernel: jax.Array, bias: jax.Array | None, context: ForwardContext) -> jax.Array:
    """Multiplies a branch's input by `[K, G + 2, H, D]` to `[B, T, K, G + 2, H]`, and adds the bias.

    In decoding each device computes the heads whose weights it holds. In prefill it computes all heads of its tokens.
    """
    is_cut = context.token_axis is None or not context.clashes("kv_heads")
    heads = ("kv_heads", None, "head_dim") if is_cut else (None, None, None)
    product = context.products.project(branch, kernel)
    product = context.sharding.constrain(product, "batch", context.token_axis, *heads)
    return _biased(product, bias)


def _to_all_heads(
    branch: Branch, kernel: jax.Array, bias: jax.Array | None, cut: int, context: ForwardContext
) -> jax.Array:
    """Computes all heads on every device, in decoding, from weights cut along dimension `cut` as the sequence is."""
    axes, mesh = as_tuple(context.sharding.sequence), context.sharding.mesh

    weights = (kernel,) if bias is None else (kernel, bias)

    def on_shard(x, kernel, bias=None):
        # [devices, B, T, K, G + 2, H] with the size of a part along the cut dimension
        product = context.products.of_shard.project(dataclasses.replace(branch, x=x), kernel)
        gathered = gather_activations(_biased(product, bias), axes, mesh)
        whole = list(kernel.shape[:-1])
        whole[cut] = -1
        return jnp.moveaxis(gathered, 0, 2 + cut).reshape(*x.shape[:2], *whole)

    specs = dict(in_specs=(P(), *[P(*[None] * cut, axes)] * len(weights)), out_specs=P())
    return jax.shard_map(on_shard, mesh=mesh, axis_names=set(axes), check_vma=False, **specs)(branch.x, *weights)


def from_heads(branch: Branch, x: jax.Array, kernel: jax.Array, context: ForwardContext) -> jax.Array:
    """Multiplies `[B, T, N, H]` by `[D, N, H]`, and adds it to the branch's `x`, `[B, T, D]`."""
    if not context.joins("heads"):
        return context.products.add(branch, x.reshape(*x.shape[:2], -1), kernel.reshape(kernel.shape[0], -1))

    flat = lambda x, kernel: (x.reshape(*x.shape[:2], -1), kernel.reshape(kernel.shape[0], -1))
    return add_parts(branch, flat, context, (x, kernel), cut=(2, 1))


def add_parts(
    branch: Branch, operands: Callable, context: ForwardContext, arrays: Sequence[jax.Array], cut: Sequence[int | None]
) -> jax.Array:
    """Adds to the branch's `x`, in decoding, the sum over devices of a product of each device's parts of `arrays`.

    Args:
      operands: `operands(*parts)`, the product's: `[B, T, F]` and `[D, F]`.
      cut: for each array, the dimension along which it is cut, or None where each device has it whole.
    """
    axes, mesh = as_tuple(context.sharding.sequence), context.sharding.mesh
    residual = branch.x if branch.post_norm is None else None

    def on_shard(residual, *arrays):
        return context.products.of_shard.total(*operands(*arrays), axes, mesh, residual)

    specs = tuple(P() if dim is None else P(*[None] * dim, axes) for dim in cut)
    total = jax.shard_map(
        on_shard, mesh=mesh, axis_names=set(axes), in_specs=(P(), *specs), out_specs=P(), check_vma=False
    )(residual, *arrays)
    return total if branch.post_norm is None else branch.plus(total.astype(branch.x.dtype))
