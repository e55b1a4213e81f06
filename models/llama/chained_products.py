"""Products by the kernel for few rows, in one launch from a layer's attention to the next layer's."""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import jax

from tree_attn.models.llama.layer_caches import AnyCache, unwritable, written_by
from tree_attn.models.llama.products import Branch, FewRowsProducts

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
        from tree_attn.kernels.few_rows_chain_call import AfterAttention, NextHeads

        mlp, x, following = self.layer.mlp, self.branch.x, None
        if self.following is not None:
            following = NextHeads(
                norm=_norm_of(self.following.attention_norm), weights=self.following.attention.query_key_value[...],
                key=key, value=value, slots=slots, cosine_sine=self.context.cosine_sine(self.number + 1),
            )  # fmt: skip
        return AfterAttention(
            attended=self.attended.reshape(*x.shape[:2], -1), x=x,
            output=self.layer.attention.output[...].reshape(x.shape[-1], -1),
            gate_up=mlp.gate_up[...], down=mlp.down[...], norm=_norm_of(self.layer.mlp_norm),
            activation=mlp.activation, following=following,
        )  # fmt: skip


def _norm_of(norm: Any):
    from tree_attn.kernels.few_rows_chain_call import Norm

    return Norm(scale=norm.scale[...], eps=norm.eps, adds_one=norm.adds_one)
