"""Products by the kernel for few rows, of which those after a layer's attention are one launch."""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from tree_attn.models.llama.layer_caches import AnyCache, unwritable, written_by
from tree_attn.models.llama.products import Branch, FewRowsProducts, ProductsOfShards
from tree_attn.models.llama.sharding import as_tuple
from tree_attn.reduce import fused
from tree_attn.reduce.activations import exchanges

_log = logging.getLogger("tree_attn")


@dataclasses.dataclass(frozen=True)
class ChainedProducts(FewRowsProducts):
    """Products by the kernel for few rows. Those between two layers' attention are one launch, where they can be.

    The first layer's product of query, key and value, and the head's, are launches of their own.
    """

    def name_of(self, rows: int) -> str:
        """Does `XlaProducts.name_of`."""
        name = super().name_of(rows)
        return name if name == "xla" else "mosaic_gpu_chain"

    def run_layers(self, layers: Sequence[Any], x: jax.Array, cache: AnyCache, context: Any):
        """Does `XlaProducts.run_layers`."""
        heads = None  # queries, and keys and values that are in no cache yet, if the launch before has made them
        for i, layer in enumerate(layers):
            with jax.named_scope(f"layer_{i}"):
                branch = Branch(x=x, norm=layer.attention_norm, post_norm=layer.attention_post_norm)
                with jax.named_scope("attention"):
                    if heads is None:
                        *heads, cache = layer.attention.rotated(branch, cache, i, context)
                    with jax.named_scope("attend"):
                        attended, cache = context.attend(*heads, cache, i)
                x, heads, cache = self._finish(layers[i : i + 2], branch, attended, cache, i, context)
        return x, cache

    def _finish(self, layers: Sequence[Any], branch: Branch, attended, cache: AnyCache, i: int, context: Any):
        """Returns the first layer's result; the following one's heads, or None; and the cache."""
        links = [_Link(layers[0], layer, branch, attended, i, context) for layer in (*layers[1:], None)]
        for link in links:
            if (reason := link.unavailable(cache)) is None:
                with jax.named_scope("finish"):
                    return link.run(cache)
            to = "" if link.following is None else f" to layer {i + 1}"
            _log.info("products: layer %d is not chained%s, for %s", i, to, reason)
        return layers[0].after_attention(branch, attended, context), None, cache


@dataclasses.dataclass(frozen=True)
class ChainedProductsOfShards(ProductsOfShards):
    """Products of weights that are cut over GPUs, of which those after a layer's attention are one launch."""

    def name_of(self, rows: int) -> str:
        """Does `XlaProducts.name_of`."""
        name = super().name_of(rows)
        return name if name == "xla" else "mosaic_gpu_chain"

    def run_layers(self, layers: Sequence[Any], x: jax.Array, cache: AnyCache, context: Any):
        """Does `XlaProducts.run_layers`."""
        for i, layer in enumerate(layers):
            with jax.named_scope(f"layer_{i}"):
                branch = Branch(x=x, norm=layer.attention_norm, post_norm=layer.attention_post_norm)
                with jax.named_scope("attention"):
                    attended, cache = layer.attention(branch, cache, i, context)
                if (reason := self._unavailable(layer, branch, attended, context)) is None:
                    with jax.named_scope("finish"):
                        x = self._finish(layer, branch, attended)
                else:
                    _log.info("products: layer %d is not chained, for %s", i, reason)
                    x = layer.after_attention(branch, attended, context)
        return x, cache

    def _unavailable(self, layer, branch: Branch, attended: jax.Array, context: Any) -> str | None:
        """Returns why one launch cannot finish a layer, or None."""
        if layer.attention_post_norm is not None or layer.mlp_post_norm is not None:
            return "it has no norms after its branches"
        if not (context.joins("heads") and context.joins("mlp")):
            return "its weights are cut over heads and over the MLP, as the sequence is"
        axes, mesh = as_tuple(self.sharding.sequence), self.sharding.mesh
        if not exchanges(branch.x.size, axes, mesh):
            return "its sums go by the exchange kernel"
        part = lambda array, dim: jax.ShapeDtypeStruct(
            tuple(size // mesh.size if i == dim else size for i, size in enumerate(array.shape)), array.dtype
        )
        parts = map(part, _arrays_after_attention(layer, branch.x, attended), (None, 2, 1, 1, 1))
        planned = _after_attention(layer, *parts).plan()
        return planned if isinstance(planned, str) else None

    def _finish(self, layer, branch: Branch, attended: jax.Array) -> jax.Array:
        axes, mesh = as_tuple(self.sharding.sequence), self.sharding.mesh

        def on_shard(*arrays):
            return _after_attention(layer, *arrays, meeting=fused.meeting(axes, mesh, branch.x.size)).run()

        specs = P(), P(None, None, axes), P(None, axes), P(None, axes), P(None, axes)
        run = jax.shard_map(
            on_shard, mesh=mesh, axis_names=set(axes), in_specs=specs, out_specs=P(), check_vma=False
        )  # fmt: skip
        return run(*_arrays_after_attention(layer, branch.x, attended))


def _arrays_after_attention(layer, x: jax.Array, attended: jax.Array) -> tuple[jax.Array, ...]:
    """Returns x, attention's result, and the weights after it, as `AfterAttention` takes them."""
    output, mlp = layer.attention.output[...], layer.mlp
    flat = attended.reshape(*x.shape[:2], -1), output.reshape(output.shape[0], -1)
    return x, *flat, mlp.gate_up[...], mlp.down[...]


def _after_attention(layer, x, attended, output, gate_up, down, **options):
    from tree_attn.kernels.few_rows_chain_call import AfterAttention

    return AfterAttention(
        attended=attended, x=x, output=output, gate_up=gate_up, down=down, norm=_norm_of(layer.mlp_norm),
        activation=layer.mlp.activation, **options,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Link:
    """The end of a layer, and the beginning of the following one, if there is one."""

    layer: Any
    following: Any
    branch: Branch
    attended: jax.Array
    number: int
    context: Any

    def unavailable(self, cache: AnyCache) -> str | None:
        """Returns why one launch cannot do it, or None."""
        if self.layer.attention_post_norm is not None or self.layer.mlp_post_norm is not None:
            return "it has no norms after its branches"
        key_and_value = ()
        if self.following is not None:
            if not (self.context.appends and self.following.attention.is_plain):
                return "it makes queries, keys and values of new tokens, without biases and norms"
            if (reason := unwritable(cache)) is not None:
                return reason
            arrays = cache.arrays.layers[self.number + 1]
            key_and_value = arrays.key, arrays.value
        planned = self._product(*key_and_value).plan()
        return planned if isinstance(planned, str) else None

    def run(self, cache: AnyCache):
        """Returns the layer's result; the following layer's heads, or None; and the cache."""
        if self.following is None:
            return self._product().run(), None, cache

        def write(key, value, slots):
            y, query, key, value = self._product(key, value, slots).run()
            return (y, query), key, value

        (y, query), cache = written_by(write, cache, self.number + 1, self.attended.shape[1])
        return y, (query, None, None), cache

    def _product(self, key=None, value=None, slots=None):
        from tree_attn.kernels.few_rows_chain_call import NextHeads

        following = None
        if self.following is not None:
            following = NextHeads(
                norm=_norm_of(self.following.attention_norm), weights=self.following.attention.query_key_value[...],
                key=key, value=value, slots=slots, cosine_sine=self.context.cosine_sine(self.number + 1),
            )  # fmt: skip
        arrays = _arrays_after_attention(self.layer, self.branch.x, self.attended)
        return _after_attention(self.layer, *arrays, following=following)


def _norm_of(norm: Any):
    from tree_attn.kernels.few_rows_chain_call import Norm

    return Norm(scale=norm.scale[...], eps=norm.eps, adds_one=norm.adds_one)
