"""Attention as a newcomer writes it, `[B, T, N, S]` at once: what gradients are compared with. Shares nothing with us.

`tests/test_reference.py` holds it against the oracle.
"""

from functools import partial

import jax
import jax.numpy as jnp

exact_einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)  # a GPU's default is tf32


def dense_attention(
    query,
    key,
    value,
    *,
    scale=None,
    key_value_seq_lengths=None,
    is_causal=False,
    query_positions=None,
    local_window_size=None,
    logits_soft_cap=None,
    sinks=None,
    key_scale=None,
    value_scale=None,
):
    """Returns `(out, lse)`, differentiable by JAX, whatever the number of keys visible."""
    (batch, num_queries, num_heads, head_dim), num_keys = query.shape, key.shape[1]
    lengths = jnp.full(batch, num_keys) if key_value_seq_lengths is None else jnp.asarray(key_value_seq_lengths)
    last = lengths[:, None] - num_queries + jnp.arange(num_queries)[None]
    positions = last if query_positions is None else jnp.broadcast_to(query_positions, last.shape)
    q_at, k_at = positions[:, :, None], jnp.arange(num_keys)[None, None]
    left, right = local_window_size if isinstance(local_window_size, tuple) else 2 * (local_window_size,)
    sees = k_at < lengths[:, None, None]
    sees = sees & (k_at <= q_at) if is_causal else sees
    sees = sees & (k_at >= q_at - left) if left is not None else sees
    sees = sees & (k_at <= q_at + right) if right is not None else sees
    key = key if key_scale is None else key * key_scale[None, None, :, None]
    value = value if value_scale is None else value * value_scale[None, None, :, None]
    key, value = (jnp.repeat(x, num_heads // key.shape[2], axis=2) for x in (key, value))
    logits = exact_einsum("btnh,bsnh->btns", query, key) * (head_dim**-0.5 if scale is None else scale)
    if logits_soft_cap is not None:
        logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
    logits = jnp.where(sees[:, :, None], logits, -jnp.inf)
    if sinks is not None:
        extra = jnp.broadcast_to(jnp.asarray(sinks)[None, None, :, None], (batch, num_queries, num_heads, 1))
        logits = jnp.concatenate([logits, extra], axis=-1)
    sees_nothing = jnp.all(logits == -jnp.inf, axis=-1)
    safe = jnp.where(sees_nothing[..., None], 0.0, logits)
    weights = jnp.where(sees_nothing[..., None], 0.0, jax.nn.softmax(safe, axis=-1))[..., :num_keys]
    lse = jnp.where(sees_nothing, -jnp.inf, jax.nn.logsumexp(safe, axis=-1))
    return exact_einsum("btns,bsnv->btnv", weights, value), lse


def without_padding(query, lengths):
    """Returns the query `[B, S, N, H]` as functions over prompts read it: 0 takes the place of padding."""
    if lengths is None:
        return query
    return jnp.where((jnp.arange(query.shape[1])[None, :] < lengths[:, None])[:, :, None, None], query, 0)
