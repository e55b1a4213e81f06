"""The baselines of SparQ's paper, for evaluation only: LM-Infinite, FlexGen's top-k, and H2O.

They show the effect of a method on a model's results, on one device; they save no time here. Arguments not described
are those of `tree_attn.sparq.sparq_decode`; `num_keys` is each method's budget k.

Source: SparQ Attention, section 5 (baselines) and appendix G, Table G1.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tree_attn.arguments import default_scale
from tree_attn.local import attend
from tree_attn.sparq import sparq_decode
from tree_attn.state import merge_state

QUERIES_AT_ONCE = 64  # of a prompt: their attention weights are held together


def lm_infinite_decode(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    *,
    num_keys: int,
    num_first: int = 16,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    is_causal: bool = False,
) -> Float[Array, "B T N Hv"]:
    """Attends to the first `num_first` keys and the last `num_keys - num_first`, the query's own among them.

    Raises:
      ValueError: `num_keys` is not more than `num_first`.

    Source: LM-Infinite, as in SparQ Attention, Table G1.
    """
    if num_keys <= num_first:
        raise ValueError(f"num_keys must be more than num_first={num_first}, got {num_keys}")
    batch, num_queries = query.shape[:2]
    lengths = jnp.full(batch, key.shape[1], jnp.int32) if key_value_seq_lengths is None else key_value_seq_lengths
    later = num_queries - 1 - jnp.arange(num_queries, dtype=jnp.int32)
    positions = lengths[:, None] - 1 - (later if is_causal else jnp.zeros_like(later))[None, :]
    options = dict(key_value_seq_lengths=lengths, is_causal=True)
    recent = attend(
        query, key, value, query_positions=positions, local_window_size=(num_keys - num_first - 1, 0), **options
    )
    # Only those first keys that the window does not reach: no query sees a key twice.
    before = jnp.minimum(positions - (num_keys - num_first), num_first - 1)
    first = attend(query, key, value, query_positions=before, **options)
    return merge_state(recent, first).out


def flexgen_decode(query, key, value, *, num_keys: int, **options) -> Float[Array, "B T N Hv"]:
    """Attends to the `num_keys` keys with the highest exact scores (summed over a group's heads).

    It is SparQ with all components, no window and no mean.

    Source: FlexGen, as in SparQ Attention, Table G1.
    """
    return sparq_decode(query, key, value, num_components=key.shape[-1], num_keys=num_keys, reallocate=False, **options)


def key_scores(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    *,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
) -> Float[Array, "B K S"]:
    """Returns H2O's scores of a prompt: each key's attention weights, summed over the T causal queries and a group.

      score[s] = sum_t sum_g softmax(q_t K^T)[s]

    The T queries are the last T positions.
    """
    batch, num_queries, _, head_dim = query.shape
    num_slots, num_kv_heads = key.shape[1:3]
    lengths = jnp.full(batch, num_slots, jnp.int32) if key_value_seq_lengths is None else key_value_seq_lengths
    padding = -num_queries % QUERIES_AT_ONCE
    ends = lengths[:, None] - num_queries + 1 + jnp.arange(num_queries, dtype=jnp.int32)[None, :]
    ends = jnp.pad(ends, ((0, 0), (0, padding)))  # padding sees nothing
    grouped = query.reshape(batch, num_queries, num_kv_heads, -1, head_dim)
    grouped = jnp.pad(grouped, ((0, 0), (0, padding), (0, 0), (0, 0), (0, 0)))
    blocks = lambda x: jnp.moveaxis(x.reshape(batch, -1, QUERIES_AT_ONCE, *x.shape[2:]), 1, 0)

    def add(total, block):
        grouped, ends = block
        is_live = jnp.arange(num_slots, dtype=jnp.int32)[None, None, None, :] < ends[:, :, None, None]
        return total + _weights(grouped, key, is_live).sum(axis=(1, 3)), None

    start = jnp.zeros((batch, num_kv_heads, num_slots), jnp.float32)
    return jax.lax.scan(add, start, (blocks(grouped), blocks(ends)))[0]


def h2o_decode(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    scores: Float[Array, "B K S"],
    *,
    num_keys: int,
    local_window: int | None = None,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B K S"]]:
    """Attends to the keys that are not dropped: the last l, and the k - l others with the highest scores.

    For each query in turn, keys beyond the budget with the lowest scores are dropped for good. The query attends to the
    others, and its weights are added to their scores.

    Args:
      query: `[B, T, N, H]`, the last T positions.
      scores: float32 `[B, K, S]` from `key_scores` or the last call; -inf: dropped.
      num_keys: k; local_window: l, by default k / 4 as in the paper.

    Returns:
      `out`, and the scores for the next call.

    Source: H2O, with a budget of fixed size as in SparQ Attention, appendix G.
    """
    batch, num_queries, num_heads, head_dim = query.shape
    num_slots, num_kv_heads = key.shape[1:3]
    local_window = num_keys // 4 if local_window is None else local_window
    if not 0 <= local_window <= num_keys:
        raise ValueError(f"local_window must lie in [0, num_keys={num_keys}], got {local_window}")
    lengths = jnp.full(batch, num_slots, jnp.int32) if key_value_seq_lengths is None else key_value_seq_lengths
    positions = lengths[:, None] - num_queries + jnp.arange(num_queries, dtype=jnp.int32)[None, :]
    grouped = query.reshape(batch, num_queries, num_kv_heads, -1, head_dim)
    slots = jnp.arange(num_slots, dtype=jnp.int32)[None, None, :]
    budget = min(num_keys, num_slots)

    def step(scores, query_and_position):
        grouped, position = query_and_position
        position = position[:, None, None]
        rank = jnp.where(slots > position - local_window, jnp.inf, scores)
        rank = jnp.where(slots > position, -jnp.inf, rank)
        top_ranks, top_slots = jax.lax.top_k(rank, budget)
        is_live = jnp.zeros(rank.shape, bool)
        is_live = jnp.put_along_axis(is_live, top_slots, top_ranks > -jnp.inf, axis=-1, inplace=False)
        scores = jnp.where(is_live | (slots > position), scores, -jnp.inf)
        weights = _weights(grouped[:, None], key, is_live[:, None])[:, 0]  # [B, K, G, S]
        out = jnp.einsum("bkgs,bskv->bkgv", weights, value.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
        return jnp.where(is_live, scores + weights.sum(axis=2), scores), out

    scores, out = jax.lax.scan(step, scores, (jnp.moveaxis(grouped, 1, 0), positions.T))
    out = jnp.moveaxis(out, 0, 1).reshape(batch, num_queries, num_heads, value.shape[-1])
    return out.astype(query.dtype), scores


def _weights(grouped: Float[Array, "B T K G H"], key, is_live) -> Float[Array, "B T K G S"]:
    """Returns attention weights over the live keys `[B, T, K or 1, S]`; zeros where there is none."""
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST)
    logits = dot("btkgh,bskh->btkgs", grouped, key.astype(grouped.dtype)) * default_scale(None, key.shape[-1])
    is_live = is_live[:, :, :, None, :]
    return jnp.where(is_live, jax.nn.softmax(logits, axis=-1, where=is_live), 0.0)
