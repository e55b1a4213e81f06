"""Sampling of the next token from logits: greedy, or drawn with temperature, top-k and top-p."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from tree_attn.arguments import is_integer, is_real

LEAST_TEMPERATURE, LARGEST_TEMPERATURE = 1e-30, 1e30  # quotients of logits are finite in float32, and not all 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Options by which the next token is chosen.

    Attributes:
      temperature: 0 is greedy; otherwise divides the logits, which float32 must hold: from 1e-30 to 1e30.
      top_k: draw among the k most likely tokens only; None is all tokens.
      top_p: draw among the fewest most likely tokens whose probabilities sum to p or more; None is all tokens.
      seed: the same seed draws the same tokens.

    Raises:
      ValueError: a field is out of range.

    Example:
      >>> Sampling(temperature=0.7, top_p=0.9, seed=1)
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not (is_real(self.temperature) and 0 <= self.temperature < math.inf):
            raise ValueError(f"temperature must be 0 (greedy) or a finite number above it, got {self.temperature!r}")
        if 0 < self.temperature < LEAST_TEMPERATURE or self.temperature > LARGEST_TEMPERATURE:
            raise ValueError(
                f"temperature must be 0 (greedy) or from {LEAST_TEMPERATURE:g} to {LARGEST_TEMPERATURE:g}, "
                f"got {self.temperature!r}"
            )
        if self.top_k is not None and not (is_integer(self.top_k) and self.top_k >= 1):
            raise ValueError(f"top_k must be 1 or more, got {self.top_k!r}")
        if self.top_p is not None and not (is_real(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p!r}")
        if not (is_integer(self.seed) and 0 <= self.seed < 2**32):
            raise ValueError(f"seed must be in [0, 2**32), got {self.seed!r}")


def next_tokens(
    logits: jax.Array, sampling: Sampling, keys: jax.Array, num_shards: int = 1
) -> tuple[jax.Array, jax.Array]:
    """Chooses the next token of each sequence, and says how likely the model finds it.

    Args:
      logits: float32 `[B, V]`.
      sampling: the options; its seed is replaced by `keys`.
      keys: JAX random keys `[B]`, for this step of each sequence, so that no draw depends on the rest of the batch.
      num_shards: pieces into which the vocabulary is cut. A greedy choice then moves one candidate of each piece
        between devices, where a plain argmax would move all logits.

    Returns:
      int32 `[B]`: among equal logits, greedy takes the lowest token. And their log-probabilities, float32 `[B]`, NaN
      where the largest logit is not finite.
    """
    if sampling.temperature == 0:
        return _greedy(logits, num_shards)
    scaled = logits / sampling.temperature
    if sampling.top_k is not None:
        scaled = _keep_top_k(scaled, min(sampling.top_k, logits.shape[-1]))
    if sampling.top_p is not None:
        scaled = _keep_top_p(scaled, sampling.top_p)
    tokens = jax.vmap(jax.random.categorical)(keys, scaled).astype(jnp.int32)
    return tokens, log_probability(logits, tokens)


def log_probability(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the model's log-probability of these tokens, at temperature 1 and among all tokens.

      log p[b] = logits[b, tokens[b]] - log sum_v exp(logits[b, v])

    Args:
      logits: float32 `[B, V]`.
      tokens: int32 `[B]`.

    Returns:
      float32 `[B]`.
    """
    # A sum with one term: for a look-up by index XLA would gather a vocabulary that is cut.
    is_token = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, :] == tokens[:, None]
    return jnp.sum(jnp.where(is_token, logits, 0), axis=-1) - jax.nn.logsumexp(logits, axis=-1)


def _greedy(logits: jax.Array, num_shards: int) -> tuple[jax.Array, jax.Array]:
    """Returns the most likely tokens and their log-probabilities, from one pass over the logits.

    For a maximum and a sum after it XLA would make seven small kernels on a GPU, and as many gaps between them.
    """
    batch, vocab_size = logits.shape
    pieces = logits.reshape(batch, num_shards, vocab_size // num_shards)
    places = jax.lax.broadcasted_iota(jnp.int32, pieces.shape, 2)
    nothing = (jnp.float32(-jnp.inf), jnp.float32(0), jnp.int32(0))
    largest, sums, places = jax.lax.reduce((pieces, jnp.ones_like(pieces), places), nothing, _more_likely, (2,))
    shards = jax.lax.broadcasted_iota(jnp.int32, places.shape, 1)
    largest, sums, tokens = jax.lax.reduce(
        (largest, sums, shards * pieces.shape[-1] + places), nothing, _more_likely, (1,)
    )
    return tokens, jnp.where(jnp.isfinite(largest), 0 - jnp.log(sums), jnp.nan)


def _more_likely(a: tuple, b: tuple) -> tuple:
    """Joins two groups of tokens: the largest logit, the sum of exp(logit - largest), and the first token with it."""
    (a_largest, a_sum, a_token), (b_largest, b_sum, b_token) = a, b
    is_first = a_token < b_token
    is_nan = jnp.isnan(a_largest) & (is_first | ~jnp.isnan(b_largest))  # as in `jnp.argmax`, NaN is the largest
    is_a = (a_largest > b_largest) | is_nan | (a_largest == b_largest) & is_first
    largest = jnp.where(is_a, a_largest, b_largest)
    weight = lambda of_group: jnp.where(of_group == largest, 1.0, jnp.exp(of_group - largest))  # -inf less -inf is NaN
    return largest, weight(a_largest) * a_sum + weight(b_largest) * b_sum, jnp.where(is_a, a_token, b_token)


def _keep_top_k(logits: jax.Array, top_k: int) -> jax.Array:
    threshold = jax.lax.top_k(logits, top_k)[0][:, -1:]
    return jnp.where(logits < threshold, -jnp.inf, logits)


def _keep_top_p(logits: jax.Array, top_p: float) -> jax.Array:
    descending = jnp.sort(logits, axis=-1, descending=True)
    probabilities = jax.nn.softmax(descending, axis=-1)
    # A token stays while those before it have not reached p, so the most likely one always does.
    stays = jnp.cumsum(probabilities, axis=-1) - probabilities < top_p
    threshold = jnp.min(jnp.where(stays, descending, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits < threshold, -jnp.inf, logits)
