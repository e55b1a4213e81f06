"""Products by the kernel for few rows: a launch of several layers, of one, or from its attention to the next's."""

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from tree_attn.arguments import AttentionOptions, default_scale
from tree_attn.masking import visibility
from tree_attn.models.llama.layer_caches import AnyCache, slots_or_beyond, unwritable, with_layer
from tree_attn.models.llama.products import Branch, FewRowsProducts, ProductsOfShards
from tree_attn.models.llama.sharding import as_tuple
from tree_attn.reduce import fused
from tree_attn.reduce.activations import exchanges
from tree_attn.sharded import local_shard

_log = logging.getLogger("tree_attn")


@dataclasses.dataclass(frozen=True)
class ChainedProducts(FewRowsProducts):
    """Products by the kernel for few rows. Layers with their attention are one launch, where they can be, or one each.

    Otherwise the products between two layers' attention are. The first layer's product of query, key and value is then
    a launch of its own, as the head's always is. These read weights early where `is_early`; the products of layers that
    are not chained do not.
    """

    def name_of(self, rows: int) -> str:
        """Does `XlaProducts.name_of`."""
        return _chained(super().name_of(rows))

    def unrolls_steps(self, layers: Sequence[Any], x: jax.ShapeDtypeStruct, cache: AnyCache, context: Any) -> bool:
        """Does `XlaProducts.unrolls_steps`: where launches have whole layers, and CUDA graphs have these launches."""
        from tree_attn.kernels.few_rows_broadcast import MAX_ROWS

        if not self.is_early or math.prod(x.shape[:-1]) > min(MAX_ROWS, self.max_rows):
            return False
        return all(_Whole(layer, x, i, context).unavailable(cache) is None for i, layer in enumerate(layers))

    def run_layers(self, layers: Sequence[Any], x: jax.Array, cache: AnyCache, context: Any):
        """Does `XlaProducts.run_layers`."""
        if math.prod(x.shape[:-1]) > self.max_rows:
            return super().run_layers(layers, x, cache, context)
        others = dataclasses.replace(context, products=FewRowsProducts(max_rows=self.max_rows))
        return _run_chained(layers, x, cache, context, others)


@dataclasses.dataclass(frozen=True)
class ChainedProductsOfShards(ProductsOfShards):
    """The same of weights that are cut over GPUs; what these exchange is in the launch.

    Attributes:
      joins_attention: whether attention is in a layer's launch.
    """

    joins_attention: bool = True

    def name_of(self, rows: int) -> str:
        """Does `XlaProducts.name_of`."""
        return _chained(super().name_of(rows))

    def run_layers(self, layers: Sequence[Any], x: jax.Array, cache: AnyCache, context: Any):
        """Does `XlaProducts.run_layers`."""
        if math.prod(x.shape[:-1]) > self.max_rows:
            return super().run_layers(layers, x, cache, context)
        if not self.joins_attention:  # no launch may then replace it
            context = dataclasses.replace(context, attention_options=None)
        return _run_chained(layers, x, cache, context, context)


def _chained(name: str) -> str:
    return name if name == "xla" else "mosaic_gpu_chain"


def _run_chained(layers: Sequence[Any], x: jax.Array, cache: AnyCache, context: Any, others: Any):
    """Runs the layers; `others` is the context of what is not chained, but for the first layer's heads."""
    heads = None  # queries, and keys and values that are in no cache yet, if the launch before has made them
    num_run = 0
    while num_run < len(layers) and (launch := _run_together(layers[num_run:], x, cache, num_run, context)) is not None:
        x, cache, count = launch
        num_run += count
    for i, layer in enumerate(layers[num_run:], num_run):
        with jax.named_scope(f"layer_{i}"):
            if heads is None and (whole := _run_whole(layer, x, cache, i, context)) is not None:
                x, cache = whole
                continue
            branch = Branch(x=x, norm=layer.attention_norm, post_norm=layer.attention_post_norm)
            with jax.named_scope("attention"):
                if heads is None:
                    *heads, cache = layer.attention.rotated(branch, cache, i, context if i == num_run else others)
                with jax.named_scope("attend"):
                    attended, cache = context.attend(*heads, cache, i)
            x, heads, cache = _finish(layers[i : i + 2], branch, attended, cache, i, others)
    return x, cache


def _run_together(layers: Sequence[Any], x: jax.Array, cache: AnyCache, i: int, context: Any):
    """Returns the result of several layers, the cache, and how many they are, of one launch; or None: there is none."""
    if context.sharding.mesh.size > 1:
        return None  # over devices each layer is a launch of its own
    from tree_attn.kernels.few_rows_chain_call import Unchained
    from tree_attn.kernels.few_rows_layers_call import MAX_LAYERS

    count = -(-len(layers) // -(-len(layers) // MAX_LAYERS))  # of launches that have equally many
    wholes = [_Whole(layer, x, i + number, context) for number, layer in enumerate(layers[:count])]
    reason = next((reason for whole in wholes if (reason := whole.unavailable(cache)) is not None), None)
    if reason is None and not all(wholes[0].attends_alike(whole, cache) for whole in wholes):
        reason = "layers of one launch attend alike"
    if reason is None:
        try:
            with jax.named_scope(f"layers_{i}_to_{i + count - 1}"):
                return *_run_wholes(wholes, cache), count
        except Unchained as error:
            reason = str(error)
    _log.info("products: layers %d to %d are not one launch: %s", i, i + count - 1, reason)
    return None


def _run_wholes(wholes: Sequence["_Whole"], cache: AnyCache) -> tuple[jax.Array, AnyCache]:
    """Returns the result of several layers, of one launch, and the cache.

    Raises:
      Unchained: one launch cannot do them.
    """
    from tree_attn.kernels.few_rows_layers_call import Layers

    launches = [whole.launch(cache, whole.x, *whole.arrays(cache)[0]) for whole in wholes]
    x, caches = Layers(launches).run()
    for whole, (key, value) in zip(wholes, caches, strict=True):
        cache = with_layer(cache, whole.number, key, value)
    return x, cache


def _run_whole(layer: Any, x: jax.Array, cache: AnyCache, i: int, context: Any):
    """Returns a layer's result and the cache, of one launch; or None: there is none for it."""
    from tree_attn.kernels.few_rows_chain_call import Unchained

    whole = _Whole(layer, x, i, context)
    if (reason := whole.unavailable(cache)) is None:
        try:
            with jax.named_scope("whole"):
                return whole.run(cache)
        except Unchained as error:
            reason = str(error)
    _log.info("products: layer %d is not one launch: %s", i, reason)
    return None


def _finish(layers: Sequence[Any], branch: Branch, attended: jax.Array, cache: AnyCache, i: int, context: Any):
    """Returns the first layer's result; the following one's heads, or None; and the cache."""
    links = [_Link(layers[0], branch.x, i, context, layer, attended) for layer in (*layers[1:], None)]
    for link in links:
        if (reason := link.unavailable(cache)) is None:
            with jax.named_scope("finish"):
                return link.run(cache)
        to = "" if link.following is None else f" to layer {i + 1}"
        _log.info("products: layer %d is not chained%s: %s", i, to, reason)
    return layers[0].after_attention(branch, attended, context), None, cache


@dataclasses.dataclass(frozen=True)
class _OneLaunch:
    """A launch of parts of a layer: the devices, and which layers there can be launches of.

    Attributes:
      layer: the layer; x: `[B, T, D]`, to which it adds; number: of the layer in the cache.
    """

    layer: Any
    x: jax.Array
    number: int
    context: Any

    @property
    def _axes(self) -> tuple[str, ...]:
        return as_tuple(self.context.sharding.sequence)

    @property
    def _num_devices(self) -> int:
        return self.context.sharding.mesh.size

    def _unavailable(self, layer: Any | None, number: int, cache: AnyCache) -> str | None:
        """Returns why there is no launch of this layer, which also makes the heads of another, if one is named."""
        from tree_attn.kernels.few_rows_layout import unsupported_cache

        if self.layer.attention_post_norm is not None or self.layer.mlp_post_norm is not None:
            return "a chain has no norms after its branches"
        if layer is not None:
            if not (self.context.appends and layer.attention.is_plain):
                return "a chain makes queries, keys and values of new tokens, without biases and norms"
            if (reason := unwritable(cache)) is not None:
                return reason
            head_dim, key = layer.attention.query_key_value[...].shape[2], cache.arrays.layers[number].key
            if (reason := unsupported_cache(head_dim, self.x.dtype, key.dtype)) is not None:
                return reason
            if (axes := cache.arrays.layers[number].axes) != self._axes:
                return f"a chain writes a cache that is cut over {self._axes}, not {axes}"
        if self._num_devices > 1:
            axes = ["heads", "mlp"] + ([] if layer is None else ["kv_heads"])
            if not all(map(self.context.joins, axes)):
                return f"over several devices a chain needs weights cut over {' and '.join(axes)}, as the sequence is"
            if not exchanges(self._num_exchanged(layer), self._axes, self.context.sharding.mesh):
                return "over several devices a chain needs the exchange kernel"
        return None

    def _num_exchanged(self, layer: Any | None) -> int:
        """Returns how many numbers a device sends at the most: a part of the sum, or its heads."""
        *tokens, features = self.x.shape
        num_heads = 0 if layer is None else math.prod(layer.attention.query_key_value[...].shape[:-1])
        return math.prod(tokens) * max(features, num_heads // self._num_devices)

    def _meeting(self, num_exchanged: int):
        return fused.meeting(self._axes, self.context.sharding.mesh, num_exchanged) if self._num_devices > 1 else None

    def _over_devices(self, on_device: Callable, specs: Sequence[P], out_specs: Any) -> Callable:
        if self._num_devices == 1:
            return on_device
        options = dict(axis_names=set(self._axes), in_specs=tuple(specs), out_specs=out_specs)
        return jax.shard_map(on_device, mesh=self.context.sharding.mesh, check_vma=False, **options)

    def _weights(self) -> list[tuple[jax.Array, P]]:
        """Returns the weights after attention, and how they are cut over devices."""
        mlp, axes = self.layer.mlp, self._axes
        return [
            (self.layer.attention.output[...], P(None, axes)), (mlp.gate_up[...], P(None, axes)),
            (mlp.down[...], P(None, axes)),
        ]  # fmt: skip

    def _heads(self, layer: Any, number: int, cache: AnyCache) -> list[tuple[jax.Array, P]]:
        """Returns the weights of a layer's heads, its cache and its lengths, and how they are cut over devices."""
        stored, axes = cache.arrays.layers[number], self._axes
        return [
            (layer.attention.query_key_value[...], P(axes)), (stored.key, P(None, axes)), (stored.value, P(None, axes)),
            (cache.lengths, P()),
        ]  # fmt: skip

    def _new_heads(self, layer: Any, number: int, kernel, key, value, slots):
        from tree_attn.kernels.few_rows_chain_call import NewHeads

        return NewHeads(
            norm=_norm_of(layer.attention_norm), weights=kernel, key=key, value=value, slots=slots,
            cosine_sine=self.context.cosine_sine(number),
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Whole(_OneLaunch):
    """A whole layer, where attention is one that a launch may compute."""

    def unavailable(self, cache: AnyCache) -> str | None:
        """Returns why one launch cannot do it, or None; `run` may find another reason."""
        if self.x.shape[1] > 1:
            return f"a launch attends with one query of each sequence, not {self.x.shape[1]}"
        if self.context.attention_options is None:
            return "attention is one that a launch does not replace"
        if "local_window_size" in self.context.attention_options(self.number):
            return "attention in a launch has not run with a window"
        if self._num_devices > 1 and (reason := fused.why_not(self._num_attended, self._axes, self._mesh)) is not None:
            return reason
        return self._unavailable(self.layer, self.number, cache)

    def run(self, cache: AnyCache) -> tuple[jax.Array, AnyCache]:
        """Returns the layer's result, and the cache.

        Raises:
          Unchained: one launch cannot do it.
        """
        arrays, specs = self.arrays(cache)
        on_device = lambda *arrays: self.launch(cache, *arrays).run()
        x, key, value = self._over_devices(on_device, (P(), *specs), (P(), *specs[-4:-2]))(self.x, *arrays)
        return x, with_layer(cache, self.number, key, value)

    def arrays(self, cache: AnyCache) -> tuple[tuple, tuple]:
        """Returns the arrays of `launch` after x, and how they are cut over devices."""
        arrays = [*self._weights(), *self._heads(self.layer, self.number, cache)]
        arrays.append((cache.operands(self.number, num_new=1)["key_value_seq_lengths"], P()))
        return tuple(zip(*arrays, strict=True))

    def attends_alike(self, other: "_Whole", cache: AnyCache) -> bool:
        """Returns whether two layers rotate, see and store alike, as those of one launch do."""
        numbers, context = (self.number, other.number), self.context
        angles = zip(*map(context.cosine_sine, numbers), strict=True)
        first, second = ((context.attention_options(i), cache.arrays.layers[i].block_size) for i in numbers)
        return first == second and all(one is another for one, another in angles)

    def launch(self, cache: AnyCache, x, output, gate_up, down, kernel, key, value, lengths, seen):
        """Returns the launch as the kernel takes it, of a device's parts of the arrays."""
        from tree_attn.kernels.few_rows_chain_call import WholeLayer

        stored = cache.arrays.layers[self.number]
        meeting = self._meeting(max(self._num_exchanged(self.layer), self._num_attended))
        part = dataclasses.replace(stored, key=key, value=value)
        heads = self._new_heads(self.layer, self.number, kernel, key, value, slots_or_beyond(part, lengths, 1))
        options = AttentionOptions(key_value_seq_lengths=seen, **self.context.attention_options(self.number))
        axes = stored.axes if self._num_devices > 1 else ()
        num_slots = heads.key.shape[1]
        visible = visibility(
            options, batch=x.shape[0], num_queries=1, num_slots=num_slots, shard=local_shard(axes, stored.block_size)
        )  # fmt: skip
        return WholeLayer(
            x=x, heads=heads, spans=visible.slot_ranges(), scale=default_scale(options.scale, heads.key.shape[-1]),
            logits_soft_cap=options.soft_cap, exchange=None if meeting is None else fused.Exchange(*meeting),
            output=output, gate_up=gate_up, down=down, norm=_norm_of(self.layer.mlp_norm),
            activation=self.layer.mlp.activation, meeting=meeting,
        )  # fmt: skip

    @property
    def _mesh(self):
        return self.context.sharding.mesh

    @property
    def _num_attended(self) -> int:
        """Numbers of a device's attention, with its lse."""
        _, *heads = self.layer.attention.output[...].shape
        return math.prod(self.x.shape[:-1]) * heads[0] * (heads[1] + 1)


@dataclasses.dataclass(frozen=True)
class _Link(_OneLaunch):
    """The end of a layer, and the beginning of the following one, if there is one; `attended` is `[B, T, N, H]`."""

    following: Any
    attended: jax.Array

    def unavailable(self, cache: AnyCache) -> str | None:
        """Returns why one launch cannot do it, or None."""
        if (reason := self._unavailable(self.following, self.number + 1, cache)) is not None:
            return reason
        planned = self._product(*map(self._part, *zip(*self._arrays(cache), strict=True))).plan()
        return planned if isinstance(planned, str) else None

    def run(self, cache: AnyCache):
        """Returns the layer's result; the following layer's heads, or None; and the cache."""
        arrays, specs = zip(*self._arrays(cache), strict=True)

        def on_device(*arrays):
            meeting = self._meeting(self._num_exchanged(self.following))
            if self.following is None:
                return self._product(*arrays, meeting=meeting).run()
            *arrays, key, value, lengths = arrays
            stored = dataclasses.replace(cache.arrays.layers[self.number + 1], key=key, value=value)
            slots = slots_or_beyond(stored, lengths, self.attended.shape[1])
            return self._product(*arrays, key, value, lengths, slots=slots, meeting=meeting).run()

        out_specs = P() if self.following is None else (P(), P(), *specs[-3:-1])
        on_device = self._over_devices(on_device, specs, out_specs)
        if self.following is None:
            return on_device(*arrays), None, cache
        y, query, key, value = on_device(*arrays)
        return y, (query, None, None), with_layer(cache, self.number + 1, key, value)

    def _arrays(self, cache: AnyCache) -> list[tuple[jax.Array, P]]:
        """Returns the arrays of `_product`, and how they are cut over devices."""
        arrays = [(self.x, P()), (self.attended, P()), *self._weights()]
        return arrays if self.following is None else arrays + self._heads(self.following, self.number + 1, cache)

    def _part(self, array: jax.Array, spec: P) -> jax.ShapeDtypeStruct:
        """Returns the shape of a device's part."""
        shape = list(array.shape)
        if len(spec) > 0:
            shape[len(spec) - 1] //= self._num_devices
        return jax.ShapeDtypeStruct(tuple(shape), array.dtype)

    def _product(self, x, attended, output, gate_up, down, *of_next, slots=None, meeting=None):
        from tree_attn.kernels.few_rows_chain_call import AfterAttention

        following = None
        if self.following is not None:
            kernel, key, value, _ = of_next
            following = self._new_heads(self.following, self.number + 1, kernel, key, value, slots)
        return AfterAttention(
            attended=attended, x=x, output=output, gate_up=gate_up, down=down, norm=_norm_of(self.layer.mlp_norm),
            activation=self.layer.mlp.activation, following=following, meeting=meeting,
        )  # fmt: skip


def _norm_of(norm: Any):
    from tree_attn.kernels.few_rows_chain_call import Norm

    return Norm(scale=norm.scale[...], eps=norm.eps, adds_one=norm.adds_one)
