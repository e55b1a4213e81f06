"""The oracle: attention in float64 on the host, one query at a time. Shares nothing with what it checks."""

import numpy as np


def attention(
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
):
    """Computes attention by the textbook, in float64: `out = softmax(mask(cap(scale q k))) v`, and its lse.

    lse is the natural logarithm of the softmax's denominator.

    Args:
      query: `[B, T, N, H]`; key, value: `[B, S, K, H]` with `N = K * G`. Anything numpy can turn into float64.
      scale: multiplies the logits, default `H ** -0.5`.
      key_value_seq_lengths: `[B]` valid keys, default S.
      is_causal: query t sees keys at positions up to its own.
      query_positions: `[B, T]` or `[T]`; default: the T queries are the last T positions of each sequence.
      local_window_size: int w (the same as (w, w)) or (left, right), inclusive; None in the pair is unlimited.
      logits_soft_cap: `cap * tanh(logits / cap)`.
      sinks: `[N]`, one extra logit per head, in the denominator only.
    Returns:
      `(out [B, T, N, H], lse [B, T, N])`, float64. A query that sees nothing has `out = 0, lse = -inf`.
    """
    query, key, value = (np.asarray(x).astype(np.float64) for x in (query, key, value))
    batch, num_queries, num_heads, head_dim = query.shape
    num_keys, num_kv_heads = key.shape[1:3]
    group = num_heads // num_kv_heads
    scale = head_dim**-0.5 if scale is None else scale
    lengths = np.full(batch, num_keys) if key_value_seq_lengths is None else np.asarray(key_value_seq_lengths)
    if query_positions is None:
        positions = lengths[:, None] - num_queries + np.arange(num_queries)[None]
    else:
        positions = np.broadcast_to(np.asarray(query_positions), (batch, num_queries))
    left, right = local_window_size if isinstance(local_window_size, tuple) else (local_window_size, local_window_size)
    out = np.zeros((batch, num_queries, num_heads, value.shape[-1]))
    lse = np.full((batch, num_queries, num_heads), -np.inf)
    where = np.arange(num_keys)
    for b in range(batch):
        for t in range(num_queries):
            sees = where < lengths[b]
            if is_causal:
                sees = sees & (where <= positions[b, t])
            if left is not None:
                sees = sees & (where >= positions[b, t] - left)
            if right is not None:
                sees = sees & (where <= positions[b, t] + right)
            for n in range(num_heads):
                logits = scale * (key[b, sees, n // group] @ query[b, t, n])
                if logits_soft_cap is not None:
                    logits = logits_soft_cap * np.tanh(logits / logits_soft_cap)
                all_logits = logits if sinks is None else np.append(logits, np.float64(sinks[n]))
                if all_logits.size == 0 or all_logits.max() == -np.inf:
                    continue
                top = all_logits.max()
                denominator = np.exp(all_logits - top).sum()
                out[b, t, n] = (np.exp(logits - top) / denominator) @ value[b, sees, n // group]
                lse[b, t, n] = top + np.log(denominator)
    return out, lse


def sparq(
    query,
    key,
    value,
    *,
    num_components,
    num_keys,
    local_window=0,
    reallocate=True,
    scale=None,
    key_value_seq_lengths=None,
    is_causal=False,
    score_temperature="coverage",
):
    """Computes SparQ Attention by its Algorithm 1, in float64, one group of query heads at a time.

    Args are those of `tree_attn.sparq_decode`. Of equal scores the earlier key is kept.

    Returns:
      `(out, lse)` as `attention`; lse is that of the kept keys, less `log alpha` with `reallocate`.
    """
    query, key, value = (np.asarray(x).astype(np.float64) for x in (query, key, value))
    batch, num_queries, num_heads, head_dim = query.shape
    num_slots, num_kv_heads = key.shape[1:3]
    scale = head_dim**-0.5 if scale is None else scale
    lengths = np.full(batch, num_slots) if key_value_seq_lengths is None else np.asarray(key_value_seq_lengths)
    out = np.zeros((batch, num_queries, num_heads, value.shape[-1]))
    lse = np.full((batch, num_queries, num_heads), -np.inf)
    heads = np.arange(num_heads).reshape(num_kv_heads, -1)
    for b, t, head in np.ndindex(batch, num_queries, num_kv_heads):
        end = int(lengths[b]) - (num_queries - 1 - t if is_causal else 0)
        if end < 1:
            continue
        q, k, v = query[b, t, heads[head]], key[b, :end, head], value[b, :end, head]
        components = np.argsort(-np.abs(q).sum(axis=0), kind="stable")[:num_components]
        whole = np.abs(q).sum(axis=1, keepdims=True)
        part = np.abs(q[:, components]).sum(axis=1, keepdims=True)
        coverage = np.divide(part, whole, np.ones_like(whole), where=whole > 0)
        squared = {"coverage": coverage, "head_dim": 1, "num_components": num_components / head_dim}[score_temperature]
        logits = scale / np.sqrt(squared) * (q[:, components] @ k[:, components].T)
        log_scores = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
        scores = np.exp(log_scores).sum(axis=0)
        scores[max(end - local_window, 0) :] = np.inf
        kept_keys = np.argsort(-scores, kind="stable")[:num_keys]
        exact = scale * (q @ k[kept_keys].T)
        top = exact.max(axis=1, keepdims=True)
        weights = np.exp(exact - top)
        denominator = weights.sum(axis=1, keepdims=True)
        log_alpha = np.logaddexp.reduce(log_scores[:, kept_keys], axis=1) if reallocate else np.zeros(len(q))
        alpha = np.exp(log_alpha)
        mean = value[b, :end, head].mean(axis=0)
        out[b, t, heads[head]] = alpha[:, None] * (weights / denominator @ v[kept_keys]) + (1 - alpha)[:, None] * mean
        lse[b, t, heads[head]] = top[:, 0] + np.log(denominator[:, 0]) - log_alpha
    return out, lse
