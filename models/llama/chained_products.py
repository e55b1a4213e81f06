"""Products by the kernel for few rows, in one launch from a layer's attention to the next layer's."""

import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from tree_attn.models.llama.layer_caches import AnyCache, slots_or_beyond, unwritable, with_layer
from tree_attn.models.llama.products import Branch, FewRowsProducts, ProductsOfShards
from tree_attn.models.llama.sharding import as_tuple
from tree_attn.reduce import fused
from tree_attn.reduce.activations import exchanges

_log = logging.getLogger("tree_attn")


@dataclasses.dataclass(frozen=True)
class ChainedProducts(FewRowsProducts):
    """Products by the kernel for few rows. Those between two layers' attention are one launch, where they can be.

    The first layer's product of query, key and value, and the head's, are launches of their own. These read weights
    early where `is_early`; the products of layers that are not chained do not.
    """

    def name_of(self, rows: int) -> str:
        """Does `XlaProducts.name_of`."""
        return _chained(super().name_of(rows))

    def run_layers(self, layers: Sequence[Any], x: jax.Array, cache: AnyCache, context: Any):
        """Does `XlaProducts.run_layers`."""
        if math.prod(x.shape[:-1]) > self.max_rows:
            return super().run_layers(layers, x, cache, context)
        others = dataclasses.replace(context, products=FewRowsProducts(max_rows=self.max_rows))
        return _run_chained(layers, x, cache, context, others)


@dataclasses.dataclass(frozen=True)
class ChainedProductsOfShards(ProductsOfShards):
    """The same of weights that are cut over GPUs; what these exchange is in the launch."""

    def name_of(self, rows: int) -> str:
        """Does `XlaProducts.name_of`."""
        return _chained(super().name_of(rows))

    def run_layers(self, layers: Sequence[Any], x: jax.Array, cache: AnyCache, context: Any):
        """Does `XlaProducts.run_layers`."""
        if math.prod(x.shape[:-1]) > self.max_rows:
            return super().run_layers(layers, x, cache, context)
        return _run_chained(layers, x, cache, context, context)


def _chained(name: str) -> str:
    return name if name == "xla" else "mosaic_gpu_chain"


def _run_chained(layers: Sequence[Any], x: jax.Array, cache: AnyCache, context: Any, others: Any):
    """Runs the layers; `others` is the context of what is not chained, but for the first layer's heads."""
    heads = None  # queries, and keys and values that are in no cache yet, if the launch before has made them
    for i, layer in enumerate(layers):
        with jax.named_scope(f"layer_{i}"):
            branch = Branch(x=x, norm=layer.attention_norm, post_norm=layer.attention_post_norm)
            with jax.named_scope("attention"):
                if heads is None:
                    *heads, cache = layer.attention.rotated(branch, cache, i, context if i == 0 else others)
                with jax.named_scope("attend"):
                    attended, cache = context.attend(*heads, cache, i)
            x, heads, cache = _finish(layers[i : i + 2], branch, attended, cache, i, others)
    return x, cache


def _finish(layers: Sequence[Any], branch: Branch, attended: jax.Array, cache: AnyCache, i: int, context: Any):
    """Returns the first layer's result; the following one's heads, or None; and the cache."""
    links = [_Link(layers[0], layer, branch, attended, i, context) for layer in (*layers[1:], None)]
    for link in links:
        if (reason := link.unavailable(cache)) is None:
            with jax.named_scope("finish"):
                return link.run(cache)
        to = "" if link.following is None else f" to layer {i + 1}"
        _log.info("products: layer %d is not chained%s: %s", i, to, reason)
    return layers[0].after_attention(branch, attended, context), None, cache


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
            return "a chain has no norms after its branches"
        if self.following is not None:
            if not (self.context.appends and self.following.attention.is_plain):
                return "a chain makes queries, keys and values of new tokens, without biases and norms"
            if (reason := unwritable(cache)) is not None:
                return reason
            if (axes := cache.arrays.layers[self.number + 1].axes) != self._axes:
                return f"a chain writes a cache that is cut over {self._axes}, not {axes}"
        arrays, specs = zip(*self._arrays(cache), strict=True)
        if self._num_devices > 1:
            axes = ["heads", "mlp"] + ([] if self.following is None else ["kv_heads"])
            if not all(map(self.context.joins, axes)):
                return f"over several devices a chain needs weights cut over {' and '.join(axes)}, as the sequence is"
            if not exchanges(self._num_exchanged, self._axes, self.context.sharding.mesh):
                return "over several devices a chain needs the exchange kernel"
        planned = self._product(*map(self._part, arrays, specs)).plan()
        return planned if isinstance(planned, str) else None

    def run(self, cache: AnyCache):
        """Returns the layer's result; the following layer's heads, or None; and the cache."""
        arrays, specs = zip(*self._arrays(cache), strict=True)
        mesh = self.context.sharding.mesh

        def on_device(*arrays):
            meeting = fused.meeting(self._axes, mesh, self._num_exchanged) if self._num_devices > 1 else None
            if self.following is None:
                return self._product(*arrays, meeting=meeting).run()
            *arrays, key, value, lengths = arrays
            stored = dataclasses.replace(cache.arrays.layers[self.number + 1], key=key, value=value)
            slots = slots_or_beyond(stored, lengths, self.attended.shape[1])
            return self._product(*arrays, key, value, lengths, slots=slots, meeting=meeting).run()

        if self._num_devices > 1:
            out_specs = P() if self.following is None else (P(), P(), *specs[-3:-1])
            options = dict(mesh=mesh, axis_names=set(self._axes), in_specs=specs, out_specs=out_specs)
            on_device = jax.shard_map(on_device, check_vma=False, **options)
        if self.following is None:
            return on_device(*arrays), None, cache
        y, query, key, value = on_device(*arrays)
        return y, (query, None, None), with_layer(cache, self.number + 1, key, value)

    @property
    def _axes(self) -> tuple[str, ...]:
        return as_tuple(self.context.sharding.sequence)

    @property
    def _num_devices(self) -> int:
        return self.context.sharding.mesh.size

    @property
    def _num_exchanged(self) -> int:
        """Numbers that a device sends at the most: a part of the sum, or its heads."""
        *tokens, features = self.branch.x.shape
        num_heads = 0 if self.following is None else math.prod(self.following.attention.query_key_value[...].shape[:-1])
        return math.prod(tokens) * max(features, num_heads // self._num_devices)

    def _arrays(self, cache: AnyCache) -> list[tuple[jax.Array, P]]:
        """Returns the arrays of `_product`, and how they are cut over devices."""
        mlp, axes = self.layer.mlp, self._axes
        arrays = [(self.branch.x, P()), (self.attended, P()), (self.layer.attention.output[...], P(None, axes))]
        arrays += [(mlp.gate_up[...], P(None, axes)), (mlp.down[...], P(None, axes))]
        if self.following is not None:
            stored = cache.arrays.layers[self.number + 1]
            arrays += [(self.following.attention.query_key_value[...], P(axes))]
            arrays += [(stored.key, P(None, axes)), (stored.value, P(None, axes)), (cache.lengths, P())]
        return arrays

    def _part(self, array: jax.Array, spec: P) -> jax.ShapeDtypeStruct:
        """Returns the shape of a device's part."""
        shape = list(array.shape)
        if len(spec) > 0:
            shape[len(spec) - 1] //= self._num_devices
        return jax.ShapeDtypeStruct(tuple(shape), array.dtype)

    def _product(self, x, attended, output, gate_up, down, *of_next, slots=None, meeting=None):
        from tree_attn.kernels.few_rows_chain_call import AfterAttention, NextHeads

        following = None
        if self.following is not None:
            kernel, key, value, _ = of_next
            following = NextHeads(
                norm=_norm_of(self.following.attention_norm), weights=kernel, key=key, value=value, slots=slots,
                cosine_sine=self.context.cosine_sine(self.number + 1),
            )  # fmt: skip
        return AfterAttention(
            attended=attended, x=x, output=output, gate_up=gate_up, down=down, norm=_norm_of(self.layer.mlp_norm),
            activation=self.layer.mlp.activation, following=following, meeting=meeting,
        )  # fmt: skip


def _norm_of(norm: Any):
    from tree_attn.kernels.few_rows_chain_call import Norm

    return Norm(scale=norm.scale[...], eps=norm.eps, adds_one=norm.adds_one)
