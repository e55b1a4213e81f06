"""Inputs of the compiled programs, on the devices: tokens in storage order, batch slots, and empty caches."""

import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from tree_attn.arguments import NARROW_DTYPES, one_of
from tree_attn.models.llama.attention import Attention
from tree_attn.models.llama.attention_choice import check_cache_dtype
from tree_attn.models.llama.generation import layout as layouts
from tree_attn.models.llama.generation.int8_scales import cache_scales
from tree_attn.models.llama.generation.layout import BatchSlots, Layout, Texts
from tree_attn.models.llama.generation.prefix_tree import PrefixTree
from tree_attn.models.llama.layer_caches import AnyCache
from tree_attn.models.llama.model import Llama
from tree_attn.models.llama.storage import empty_cache


class LevelInputs(NamedTuple):
    """The texts of one level of a prefix tree as prefill takes them, and the cache that it fills.

    tokens:   int32 `[texts, S]`, padded on the right and in storage order
    lengths:  int32 `[texts]`
    cache:    empty

    Each may be a shape with a sharding in place of an array.
    """

    tokens: jax.Array
    lengths: jax.Array
    cache: AnyCache


class Inputs:
    """Makes the inputs of a generation for one model.

    Args:
      model: gives the sharding and the shape of caches.
      attention: from `attention.by_name`, made with the same sharding.
      layout: rules by which texts are padded and stored.
      cache_dtype: of stored keys and values: the model's, by default, float8_e4m3fn, or int8.
      cache_scales: of an int8 cache; default: `int8_scales.cache_scales` of the model, measured on first use.

    Raises:
      ValueError: `cache_dtype` is none of the three, or `cache_scales` belong to another dtype than int8.
      NotImplementedError: int8 with `sparq`.
    """

    def __init__(
        self,
        model: Llama,
        attention: Attention,
        layout: Layout,
        *,
        cache_dtype: DTypeLike | None = None,
        cache_scales: Mapping[str, jax.Array] | None = None,
    ):
        model_dtype = model.embedding[...].dtype
        self.layout, self.sharding = layout, model.sharding
        try:
            self.cache_dtype = jnp.dtype(model_dtype if cache_dtype is None else cache_dtype)
        except TypeError:
            raise TypeError(f"cache_dtype must be a dtype, got {cache_dtype!r}") from None
        one_of("cache_dtype", self.cache_dtype.name, (model_dtype.name, *NARROW_DTYPES))
        check_cache_dtype(attention.name, self.cache_dtype.name)
        if cache_scales is not None and self.cache_dtype != jnp.int8:
            raise ValueError(
                f"cache_scales must be None for cache_dtype={self.cache_dtype.name!r}: only int8 has them, "
                f"got {sorted(cache_scales)}"
            )
        self._model, self._attention, self._user_scales = model, attention, cache_scales

    def levels(self, tree: PrefixTree, max_new_tokens: int, *, keeps_all: bool = False) -> tuple[LevelInputs, ...]:
        """Places each level of a tree on the devices, with an empty cache for it, as `empty_cache` makes it."""
        return tuple(
            LevelInputs(
                *self.texts(level.texts, level.num_tokens),
                self.empty_cache(len(level.texts), level.capacity, keeps_all=keeps_all),
            )
            for level in self.layout.levels(tree, max_new_tokens)
        )

    def shapes_of_levels(self, tree: PrefixTree, max_new_tokens: int) -> tuple[LevelInputs, ...]:
        """Returns shapes with shardings in place of the arrays of `levels`; it allocates none of them."""
        shape = lambda sizes, *axes: jax.ShapeDtypeStruct(sizes, jnp.int32, sharding=self.sharding.named(*axes))
        return tuple(
            LevelInputs(
                shape((len(level.texts), level.num_tokens), "batch", "sequence"),
                shape((len(level.texts),), "batch"),
                self._shape_of_cache(len(level.texts), level.capacity),
            )
            for level in self.layout.levels(tree, max_new_tokens)
        )

    def texts(self, texts: Texts, num_tokens: int) -> tuple[jax.Array, jax.Array]:
        """Places texts, padded to `num_tokens` and in storage order, and their lengths."""
        tokens, lengths = self.layout.stored(texts, num_tokens)
        return self.sharding.place(tokens, "batch", "sequence"), self.sharding.place(lengths, "batch")

    def batch_slots(self, batch: int, *, first_sequence: int = 0, step: int = 0) -> BatchSlots:
        """Places the slots of `batch` consecutive sequences, before the token of `step`."""
        slots = layouts.batch_slots(batch, first_sequence=first_sequence, step=step)
        return BatchSlots(*(self.sharding.place(x, "batch") for x in slots))

    def empty_cache(
        self,
        batch: int,
        capacity: int,
        scales: Mapping[str, jax.Array | None] | None = None,
        *,
        keeps_all: bool = False,
    ) -> AnyCache:
        """Returns an empty cache.

        Args:
          batch, capacity: sequences, and slots of each.
          scales: of the layers; default: those of the generation. Within a program they must be its inputs, for they
            are no constants of it.
          keeps_all: whether layers with a window keep what lies before it too, for new tokens of several at a time.
        """
        return empty_cache(
            self._model.config,
            self.sharding,
            batch=batch,
            capacity=capacity,
            dtype=self.cache_dtype,
            window=None if keeps_all else self.layout.window_slots(self._model.config.window),
            stacks_layers=not self._model.unroll_layers,
            **(self._scales if scales is None else scales),
            **self._attention.cache_options,
        )

    def _shape_of_cache(self, batch: int, capacity: int) -> AnyCache:
        scales = self._scales  # measured before tracing begins
        cache = jax.eval_shape(lambda: self.empty_cache(batch, capacity, scales))
        with_sharding = lambda x, spec: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(self.sharding.mesh, spec)
        )
        return jax.tree.map(with_sharding, cache, cache.specs())

    @functools.cached_property
    def _scales(self) -> Mapping[str, jax.Array]:
        if self.cache_dtype != jnp.int8 or self._user_scales is not None:
            return self._user_scales or {}
        return cache_scales(self._model, self._attention)
