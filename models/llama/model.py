"""The Llama: embedding, a scan over its layers, and a head. Attention is an argument; the cache is carried along."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from tree_attn.models.llama.attention import Attention
from tree_attn.models.llama.attention_choice import NO_WINDOWED_PREFIXES
from tree_attn.models.llama.config import LlamaConfig
from tree_attn.models.llama.layer_caches import AnyCache, of_kind
from tree_attn.models.llama.layer_kinds import in_layer, is_later, rotations
from tree_attn.models.llama.layers import LlamaLayer, RMSNorm
from tree_attn.models.llama.parameters import Create, Parameter, of_layer
from tree_attn.models.llama.prefix import Prefix, num_tokens_before
from tree_attn.models.llama.product_choice import by_name
from tree_attn.models.llama.products import Branch, XlaProducts
from tree_attn.models.llama.projections import Attend, ForwardContext
from tree_attn.models.llama.sharding import LlamaSharding, as_tuple
from tree_attn.reduce.activations import sum_activations


class Llama(nnx.Module):
    """A Llama whose keys and values are sharded along the sequence.

    By default on CPUs, the layers are one module with its parameters stacked, run by `lax.scan`: the program, and so
    the time to compile it, does not grow with the depth. Unrolled, they are as many modules, one after another. That
    takes longer to compile. But in a loop XLA's compilers for GPUs and TPUs copy a layer's keys and values out of the
    stack before they are read. On GPUs they copy most weights too, in all for half of a token's time. See
    docs/log/llama.md: "A loop over layers copies weights and caches on GPUs", and docs/log/tpu.md.

    Args:
      config: the model's shape.
      sharding: maps parameters and intermediate arrays to devices.
      create: makes each declared parameter; see `parameters.py`.
      unroll_layers: whether the layers are unrolled; default: but on CPUs.
      products: how new tokens are multiplied with weights, one of `product_choice.PRODUCTS`, or None:
        `product_choice.by_name` chooses, as the commands do. Prompts are XLA's. The kernel has no gradient. With None
        or `mosaic_gpu_chain` a program must take the weights as arguments, and no kernel of it may write them.

    Raises:
      ValueError, NotImplementedError: as `product_choice.by_name`.

    Example:
      >>> model = Llama(config, sharding, parameters.random(sharding, jnp.float32))
    """

    def __init__(
        self, config: LlamaConfig, sharding: LlamaSharding, create: Create, *, unroll_layers: bool | None = None,
        products: str | None = "xla",
    ):  # fmt: skip
        def table(name: str) -> nnx.Param:
            shape = (config.vocab_size, config.hidden_size)
            return nnx.Param(
                create(Parameter(name=name, shape=shape, axes=("vocab", "embed"), fan_in=config.hidden_size))
            )

        self.config = config
        self.sharding = sharding
        self.unroll_layers = not sharding.is_on_cpus if unroll_layers is None else unroll_layers
        self.products = by_name(products, sharding, unrolls_layers=self.unroll_layers)
        self.embedding = table("embedding")
        if self.unroll_layers:
            self.layers = nnx.List(LlamaLayer(config, of_layer(create, i)) for i in range(config.num_layers))
        else:
            self.layers = LlamaLayer(config, create)
        norm = Parameter(name="final_norm.scale", shape=(config.hidden_size,), axes=("embed",))
        self.final_norm = RMSNorm(norm, config.rms_norm_eps, create, adds_one=config.norms_add_one)
        if not config.tie_embeddings:
            self.head = table("head")

    def prefill(
        self,
        tokens: jax.Array,
        lengths: jax.Array,
        cache: AnyCache,
        attention: Attention,
        *,
        prefixes: Sequence[Prefix] = (),
        all_logits: bool = False,
        chunk: int | None = None,
    ) -> tuple[jax.Array, AnyCache]:
        """Reads whole prompts into an empty cache, or `chunk` tokens at a time.

        Args:
          tokens: int32 `[B, S]` in storage order (`attention.prompt_layout`), padded on the right with any token; `S`
            is a multiple of the shards.
          lengths: int32 `[B]`, tokens of each prompt; 1 or more.
          cache: an empty cache with room for `S`.
          attention: from `attention.by_name`.
          prefixes: levels of nodes that precede these prompts, read already, the root's first.
          all_logits: whether to apply the head to every token rather than to each prompt's last one.
          chunk: a multiple of the shards that divides `S`. A chunk's tokens attend to one another as whole prompts do,
            and to earlier chunks, which stay in place, as to a prefix. Besides the cache only one chunk's arrays are
            held, and each layer moves the chunk's merged states but no keys. None: all at once.

        Raises:
          ValueError: `chunk` does not divide `S`, or `all_logits` with it.
          NotImplementedError: `chunk`, for a model with a window.

        Returns:
          Logits, float32: `[B, V]`, or `[B, S, V]` in storage order if `all_logits`. And the cache.
        """
        if chunk is not None:
            _check_chunk(chunk, tokens.shape[1], all_logits, self.config)
            return self._prefill_in_chunks(tokens, lengths, cache, attention, prefixes, chunk)
        layout = attention.prompt_layout(tokens.shape[1])
        before = num_tokens_before(prefixes, tokens.shape[0])
        positions = before[:, None] + jnp.asarray(layout.positions)[None, :]

        def attend(query, key, value, cache, layer):
            levels = [prefix.level(layer) for prefix in prefixes]
            read = lambda _, **options: attention.prefill(query, key, value, lengths, levels, **options)
            out = in_layer(self.config, layer, read)
            return _write_first(out, cache.write_prefix(key, value, layer=layer, lengths=lengths))

        x, cache = self._run_layers(tokens, positions, cache, attend, token_axis="sequence")
        cache = cache.with_lengths(lengths)
        if all_logits:
            return _logits(self, x, XlaProducts()), cache
        return _logits(self, _take(x, layout.last(lengths)), XlaProducts())[:, 0], cache

    def _prefill_in_chunks(self, tokens, lengths, cache, attention, prefixes, chunk: int):
        batch, num_shards = tokens.shape[0], attention.num_shards
        layout = attention.prompt_layout(chunk)
        before = num_tokens_before(prefixes, batch)
        each_by_itself = tuple((sequence,) for sequence in range(batch))
        # A shard's tokens ascend, so each chunk consists of the next few tokens of every shard: no token moves.
        chunks = tokens.reshape(batch, num_shards, -1, chunk // num_shards).transpose(2, 0, 1, 3)
        chunks = self.sharding.constrain(chunks.reshape(-1, batch, chunk), None, "batch", "sequence")

        def step(carry, index_and_tokens):
            cache, last = carry
            index, tokens = index_and_tokens
            start = index * chunk
            chunk_lengths, earlier_lengths = jnp.clip(lengths - start, 0, chunk), jnp.minimum(lengths, start)
            positions = (before + start)[:, None] + jnp.asarray(layout.positions)[None, :]

            def attend(query, key, value, cache, layer):
                earlier = Prefix(cache=dataclasses.replace(cache, lengths=earlier_lengths), sequences=each_by_itself)
                levels = [prefix.level(layer) for prefix in (*prefixes, earlier)]
                read = lambda _, **options: attention.prefill(query, key, value, chunk_lengths, levels, **options)
                out = in_layer(self.config, layer, read)
                return _write_first(out, cache.write_prefix(key, value, layer=layer, start=start))

            x, cache = self._run_layers(tokens, positions, cache, attend, token_axis="sequence")
            is_here = (lengths > start) & (lengths <= start + chunk)
            return (cache, jnp.where(is_here[:, None, None], _take(x, layout.last(chunk_lengths)), last)), None

        last = jnp.zeros((batch, 1, self.config.hidden_size), self.embedding[...].dtype)
        indices = jnp.arange(len(chunks), dtype=jnp.int32)
        (cache, last), _ = jax.lax.scan(step, (cache, last), (indices, chunks))
        return _logits(self, last, XlaProducts())[:, 0], cache.with_lengths(lengths)

    def decode(
        self, tokens: jax.Array, cache: AnyCache, attention: Attention, *, prefixes: Sequence[Prefix] = ()
    ) -> tuple[jax.Array, AnyCache]:
        """Appends `T` tokens to each sequence.

        Args:
          tokens: int32 `[B, T]`; `T` is 1, or more for tokens that are to be verified together.
          cache: with room for `T` more. Where it keeps windows only, `T` is 1.
          attention: from `attention.by_name`.
          prefixes: levels of nodes that precede the sequences in the cache.

        Returns:
          Logits, float32 `[B, T, V]`, and the cache, `T` longer.
        """
        num_tokens = tokens.shape[1]
        first = num_tokens_before(prefixes, tokens.shape[0]) + cache.lengths
        positions = first[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)[None, :]

        def attend(query, key, value, cache, layer):
            cache = cache if key is None else cache.write(key, value, layer=layer)
            levels = [prefix.level(layer) for prefix in prefixes]
            read = lambda kind, **options: attention.decode(
                query, *of_kind(cache, layer, kind), levels, is_later=is_later(self.config, layer), **options
            )
            return in_layer(self.config, layer, read), cache

        more = _decoding_options(self, attention, prefixes)
        x, cache = self._run_layers(tokens, positions, cache, attend, token_axis=None, **more)
        return _logits(self, x, self.products), cache.advance(num_tokens)

    def apply(self, tokens: jax.Array, positions: jax.Array, cache, attend: Attend) -> tuple[jax.Array, AnyCache]:
        """Applies the model with the caller's own attention, e.g. one that stores more than keys and values.

        Args:
          tokens, positions: int32 `[B, T]`.
          cache: any pytree; it goes through the layers.
          attend: `(query, key, value, cache, layer) -> (out, cache)`, called for the new tokens of each layer.

        Returns:
          Logits, float32 `[B, T, V]`, and the cache.
        """
        x, cache = self._run_layers(tokens, positions, cache, attend, token_axis=None)
        return _logits(self, x, self.products), cache

    def _run_layers(
        self, tokens: jax.Array, positions: jax.Array, cache: AnyCache, attend: Attend, token_axis: str | None,
        **options: Any,
    ) -> tuple[jax.Array, AnyCache]:  # fmt: skip
        with jax.named_scope("embed"):
            x = _look_up(self.embedding[...], tokens, self.sharding, token_axis)
            x = self.sharding.constrain(scaled_embedding(x, self.config), "batch", token_axis, "embed")
        context = ForwardContext(
            cosine_sine=rotations(self.config, positions), attend=attend, sharding=self.sharding,
            token_axis=token_axis, products=self.products if token_axis is None else XlaProducts(), **options,
        )  # fmt: skip
        if self.unroll_layers:
            return context.products.run_layers(self.layers, x, cache, context)
        structure, stacked = nnx.split(self.layers)

        def step(carry, index_and_parameters):
            x, cache = carry
            index, parameters = index_and_parameters
            return nnx.merge(structure, parameters)(x, cache, index, context), None

        with jax.named_scope("layers"):
            indices = jnp.arange(self.config.num_layers, dtype=jnp.int32)
            (x, cache), _ = jax.lax.scan(step, (x, cache), (indices, stacked))
        return x, cache


def unrolls_steps(model: Llama, cache: AnyCache, attention: Attention, *, prefixes: Sequence[Prefix] = ()) -> bool:
    """Returns whether a program has several steps without a loop over them, each of one token for each sequence.

    Args:
      cache, attention, prefixes: as `Llama.decode` takes them.
    """
    x = jax.ShapeDtypeStruct((cache.lengths.shape[0], 1, model.config.hidden_size), model.embedding[...].dtype)
    context = ForwardContext(
        cosine_sine=None, attend=None, sharding=model.sharding, token_axis=None, products=model.products,
        **_decoding_options(model, attention, prefixes),
    )  # fmt: skip
    return model.unroll_layers and model.products.unrolls_steps(model.layers, x, cache, context)


def _decoding_options(model: Llama, attention: Attention, prefixes: Sequence[Prefix]) -> dict[str, Any]:
    """Returns fields of the context of new tokens."""
    options = model.config.attention_options if attention.is_replaceable and not prefixes else None
    return dict(appends=True, attention_options=options)


def _logits(model: Llama, x: jax.Array, products: XlaProducts) -> jax.Array:
    """Maps `[B, T, D]` to float32 `[B, T, V]`."""
    with jax.named_scope("head"):
        table = model.embedding if model.config.tie_embeddings else model.head
        logits = products.logits(Branch(x=x, norm=model.final_norm), table[...])
        return _capped(logits, model.config.logit_soft_cap)


def _check_chunk(chunk: int, num_tokens: int, all_logits: bool, config: LlamaConfig) -> None:
    if num_tokens % chunk or all_logits:
        raise ValueError(f"chunk must divide {num_tokens} tokens, with all_logits=False, got {chunk} and {all_logits=}")
    if config.window is not None:
        raise NotImplementedError(f"{chunk=}: {NO_WINDOWED_PREFIXES}")


def _look_up(table: jax.Array, tokens: jax.Array, sharding: LlamaSharding, token_axis: str | None) -> jax.Array:
    """Looks up rows of the embedding, `[B, T]` to `[B, T, D]`.

    In decoding the tokens are few. Where the table is cut over the vocabulary, each device then looks up the rows that
    it has, and a sum joins them. Left to itself, XLA on GPU gathers the whole table for every token.
    """
    axes = as_tuple(sharding.vocab)
    if sharding.num_shards("vocab") == 1 or token_axis is not None:
        return table.at[tokens].get(mode="clip")

    def on_shard(table, tokens):
        row = tokens - jax.lax.axis_index(axes) * table.shape[0]
        is_here = (row >= 0) & (row < table.shape[0])
        rows = table.at[jnp.where(is_here, row, 0)].get(mode="clip")
        rows = jnp.where(is_here[..., None], rows, jnp.zeros_like(rows))
        return sum_activations(rows, axes, sharding.mesh)

    return jax.shard_map(
        on_shard,
        mesh=sharding.mesh,
        axis_names=set(axes),
        in_specs=(P(axes), P()),
        out_specs=P(),
        check_vma=False,
    )(table, tokens)


def scaled_embedding(x: jax.Array, config: LlamaConfig) -> jax.Array:
    """Multiplies embeddings where the model does so; the factor is rounded to their dtype, as in training."""
    return x * jnp.asarray(config.hidden_size**0.5, x.dtype) if config.scales_embedding else x


def _capped(logits: jax.Array, cap: float | None) -> jax.Array:
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def _write_first(out: jax.Array, cache: AnyCache) -> tuple[jax.Array, AnyCache]:
    """Returns its arguments; nothing that depends on `out` begins before the cache is written.

    XLA delays work on which nothing depends, and would hold every layer's keys and values beside the cache to the end.
    """
    return jax.lax.optimization_barrier((out, cache))


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Takes token `index[b]` of each `[T, D]`, as `[B, 1, D]`.

    It is a sum with one term: for a look-up XLA would gather the tokens of all devices.
    """
    is_it = jnp.arange(x.shape[1])[None, :] == index[:, None]
    return jnp.where(is_it[:, :, None], x, 0).sum(axis=1, keepdims=True)
