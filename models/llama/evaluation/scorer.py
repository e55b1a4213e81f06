"""The scorer: logits of given continuations under each decoding method, after contexts that are read densely.

Continuations are given, not generated. A greedy generation agrees with the text up to the first token whose logits have
another maximum. So the tokens before that one are those that a generation would have matched.

Source: SparQ Attention, section 5.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tree_attn.cache import KVCache
from tree_attn.local import attend
from tree_attn.models.llama.evaluation.baselines import key_scores
from tree_attn.models.llama.evaluation.methods import Method
from tree_attn.models.llama.model import Llama
from tree_attn.models.llama.storage import empty_cache

TOKENS_AT_ONCE = 32  # of a continuation, so that the keys that SparQ gathers for each of them fit


class Contexts(NamedTuple):
    """Contexts that were read, all but their last token.

    cache:        keys and values
    scores:       H2O's, float32 `[L, B, K, S]`
    last_tokens:  int32 `[B, 1]`
    """

    cache: KVCache
    scores: jax.Array
    last_tokens: np.ndarray


class Scorer:
    """Scores samples under methods, on one device. Programs are compiled once per method and shape.

    Keys and values are stored in `cache_dtype`, by default the model's.

    Example:
      >>> scorer = Scorer(model)
      >>> contexts = scorer.read([sample.context for sample in samples], room=len(samples[0].tail))
      >>> logits = scorer.follow(contexts, [sample.tail for sample in samples], Method(name="dense"))
    """

    def __init__(self, model: Llama, cache_dtype: DTypeLike | None = None):
        if model.config.attention_options(0) or model.config.has_layer_kinds:
            raise NotImplementedError(
                "model: methods are compared on models whose layers see all keys, without a cap or scale of their own"
            )
        self._config, self._sharding = model.config, model.sharding
        self._dtype = model.embedding[...].dtype if cache_dtype is None else cache_dtype
        self._structure, self._parameters = nnx.split(model)
        self._read = jax.jit(self._read_context, donate_argnames="cache")
        self._follow = jax.jit(self._follow_tail, static_argnames="method")

    def read(self, contexts: Sequence[Sequence[int]], room: int) -> Contexts:
        """Reads contexts of one length densely, all but their last token, with room for `room` more tokens."""
        tokens = np.array(contexts, np.int32)
        cache = empty_cache(
            self._config,
            self._sharding,
            batch=len(tokens),
            capacity=tokens.shape[1] - 1 + room,
            dtype=self._dtype,
        )
        return Contexts(*self._read(self._parameters, jnp.asarray(tokens[:, :-1]), cache=cache), tokens[:, -1:])

    def follow(self, contexts: Contexts, tails: Sequence[Sequence[int]], method: Method) -> np.ndarray:
        """Returns the logits of each token of the tails before it is read, float32 `[B, T, V]`."""
        cache, scores, last_tokens = contexts
        tails = np.array(tails, np.int32)
        tokens = np.concatenate([last_tokens, tails[:, :-1]], axis=1)
        logits = []
        for start in range(0, tokens.shape[1], TOKENS_AT_ONCE):
            part = jnp.asarray(tokens[:, start : start + TOKENS_AT_ONCE])
            part_logits, (cache, scores) = self._follow(self._parameters, part, (cache, scores), method=method)
            logits.append(np.asarray(part_logits))
        return np.concatenate(logits, axis=1)

    def _read_context(self, parameters, tokens, *, cache: KVCache):
        model = nnx.merge(self._structure, parameters)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :], tokens.shape)
        shape = (model.config.num_layers, tokens.shape[0], model.config.num_kv_heads, cache.capacity)

        def dense(query, key, value, carry, layer):
            cache, scores = carry
            layer_scores = jnp.pad(key_scores(query, key), ((0, 0), (0, 0), (0, cache.capacity - tokens.shape[1])))
            out = attend(query, key, value, is_causal=True).out
            return out, (cache.write(key, value, layer=layer), scores.at[layer].set(layer_scores))

        _, (cache, scores) = model.apply(tokens, positions, (cache, jnp.zeros(shape, jnp.float32)), dense)
        return cache.advance(tokens.shape[1]), scores

    def _follow_tail(self, parameters, tokens, carry, *, method: Method):
        model = nnx.merge(self._structure, parameters)
        count = tokens.shape[1]
        positions = carry[0].lengths[:, None] + jnp.arange(count, dtype=jnp.int32)[None, :]

        def sparse(query, key, value, carry, layer):
            cache, scores = carry
            cache = cache.write(key, value, layer=layer)
            out, layer_scores = method.attend(query, cache, layer, scores[layer])
            return out, (cache, scores.at[layer].set(layer_scores))

        logits, (cache, scores) = model.apply(tokens, positions, carry, sparse)
        return logits, (cache.advance(count), scores)
