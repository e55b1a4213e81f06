"""The oracle of the trials: attention and its gradient in numpy float64, from the definition alone.

    logits_s = cap tanh(scale q . k_s / cap) + zeta . v_s        (without cap: scale q . k_s; zeta: the energy's source)
    lse = log (sum over visible s of exp(logits_s) + exp(sink)),    out = sum over visible s of exp(logits_s - lse) v_s

Nothing of the package is imported. `tests/trials/test_oracle.py` holds the gradient against finite differences, and
the values against `tests/dense.py`.
"""

import dataclasses

import numpy as np

SLOPE_ROUNDING = 0.03  # in units of the tolerance, which is some hundred times float32's


def visible(num_keys, lengths, positions, *, is_causal=False, window=None) -> np.ndarray:
    """Returns which of the keys at positions 0, 1, ... each query sees, bool `[B, T, S]`.

    Python's integers have no end, so that windows and positions of any size are compared as they are.

    Args:
      lengths: `[B]`.
      positions: `[B, T]`, of the queries.
      window: None, an integer, or `(left, right)` of which each may be None.
    """
    left, right = window if isinstance(window, tuple) else (window, window)
    keys = np.arange(num_keys)
    sees = np.zeros((*np.shape(positions), num_keys), bool)
    for b, t in np.ndindex(*np.shape(positions)):
        at = int(positions[b][t])
        first = 0 if left is None else max(at - int(left), 0)
        ends = [num_keys, int(lengths[b])] + ([at + 1] if is_causal else [])
        ends += [] if right is None else [at + int(right) + 1]
        sees[b, t] = (keys >= min(first, num_keys)) & (keys < max(min(ends), 0))
    return sees


def last_positions(lengths, num_queries: int) -> np.ndarray:
    """Returns the positions `[B, T]` of queries that are the last of their sequences."""
    return np.asarray(lengths, np.int64)[:, None] - num_queries + np.arange(num_queries)


@dataclasses.dataclass(frozen=True)
class Attention:
    """The attention of some queries to some keys: `out [B, T, N, Hv]`, `lse [B, T, N]`, and what gradients need."""

    query: np.ndarray  # [B, T, N, H], float64 as all that follows
    key: np.ndarray  # [B, S, N, H]: a copy for each query head
    value: np.ndarray  # [B, S, N, Hv]
    source: np.ndarray | None  # [B, T, N, Hv]
    scale: float
    slope: np.ndarray  # [B, T, N, S], the derivative of the cap
    weights: np.ndarray  # [B, T, N, S]
    sink_weight: np.ndarray  # [B, T, N]
    largest_logit: float
    is_capped: bool
    out: np.ndarray
    lse: np.ndarray

    def gradient(self, of_out, of_lse, *, absolute: bool = False) -> dict[str, np.ndarray]:
        """Returns the gradient of `sum(of_out * out) + sum(of_lse * lse)` with respect to each array.

        Args:
          absolute: every term's size instead, which bounds what rounding can do to the sum.
        """
        size = np.abs if absolute else (lambda x: x)
        minus = -1.0 if not absolute else 1.0
        query, key, value, out = map(size, (self.query, self.key, self.value, self.out))
        of_out, of_lse = size(np.asarray(of_out, np.float64)), size(np.asarray(of_lse, np.float64))
        by_weight = np.einsum("btnv,bsnv->btns", of_out, value)
        along_out = (of_out * out).sum(-1)
        of_logits = self.weights * (by_weight + minus * along_out[..., None] + of_lse[..., None])
        # Float32 has the slope to within its rounding of 1, also where the cap is all but flat.
        slope = self.slope + (SLOPE_ROUNDING if absolute and self.is_capped else 0.0)
        of_products = size(self.scale) * slope * of_logits
        gradient = {
            "query": np.einsum("btns,bsnh->btnh", of_products, key),
            "key": np.einsum("btns,btnh->bsnh", of_products, query),
            "value": np.einsum("btns,btnv->bsnv", self.weights, of_out),
            "sinks": (self.sink_weight * (minus * along_out + of_lse)).sum((0, 1)),
        }
        if self.source is not None:
            gradient["source"] = np.einsum("btns,bsnv->btnv", of_logits, value)
            gradient["value"] = gradient["value"] + np.einsum("btns,btnv->bsnv", of_logits, size(self.source))
        return gradient


def attention(query, key, value, sees, *, scale: float, cap=None, sinks=None, source=None) -> Attention:
    """Returns the attention of `query [B, T, N, H]` to `key [B, S, K, H]` and `value [B, S, K, Hv]`.

    Args:
      sees: bool `[B, T, S]`. Keys that no query sees may hold anything, also NaN.
      sinks: `[N]`.
      source: zeta, `[B, T, N, Hv]`.
    """
    is_seen = sees.any(1)[:, :, None, None]
    group = query.shape[2] // key.shape[2]
    query = _wide(query)
    key, value = (np.repeat(np.where(is_seen, _wide(x), 0.0), group, axis=2) for x in (key, value))
    source = None if source is None else _wide(source)
    with np.errstate(invalid="ignore", over="ignore"):
        logits = scale * np.einsum("btnh,bsnh->btns", query, key)
        slope = np.ones_like(logits)
        if cap is not None:
            bent = np.tanh(logits / cap)
            logits, slope = cap * bent, 1 - bent**2
        if source is not None:
            logits = logits + np.einsum("btnv,bsnv->btns", source, value)
        is_nan = np.isnan(np.where(sees[:, :, None], logits, 0.0)).any(-1)
        logits = np.where(sees[:, :, None], logits, -np.inf)
        sink = np.full(logits.shape[:3], -np.inf) if sinks is None else np.broadcast_to(_wide(sinks), logits.shape[:3])
        top = np.maximum(logits.max(-1, initial=-np.inf), sink)
        top = np.where(np.isneginf(top), 0.0, top)
        terms, sink_term = np.exp(logits - top[..., None]), np.exp(sink - top)
        total = terms.sum(-1) + sink_term
        safe = np.where(total == 0, 1.0, total)
        weights = terms / safe[..., None]
        lse = np.where(total == 0, -np.inf, top + np.log(safe))
        out = np.einsum("btns,bsnv->btnv", weights, value)
    lse = np.where(is_nan, np.nan, lse)
    finite = logits[np.isfinite(logits)]
    return Attention(
        query, key, value, source, scale, slope, weights, sink_term / safe,
        float(np.abs(finite).max(initial=0.0)), cap is not None, np.where(is_nan[..., None], np.nan, out), lse,
    )  # fmt: skip


def plain(state: Attention, value, dtype) -> np.ndarray:
    """Returns `out` as a plain implementation has it that rounds weights and result to `dtype`, once each."""
    group = state.weights.shape[2] // value.shape[2]
    value = np.repeat(np.nan_to_num(_wide(value), posinf=0.0, neginf=0.0), group, axis=2)
    # Logits have float32's rounding: as large as the largest weight can be off by.
    weights = state.weights.astype(np.float32).astype(dtype)
    with np.errstate(over="ignore"):  # of slots that no query sees
        out = np.einsum("btns,bsnv->btnv", np.nan_to_num(weights.astype(np.float32)), value.astype(np.float32))
    return out.astype(dtype).astype(np.float64)


@dataclasses.dataclass(frozen=True)
class Sparq:
    """SparQ's result, and the least gap between a score that is kept and one that is not."""

    out: np.ndarray
    lse: np.ndarray
    gap: float


def sparq(
    query, key, value, lengths, *, num_components, num_keys, local_window=0, reallocate=True, scale=None,
    is_causal=False, score_temperature="coverage", num_shards=1, shard_of=None, value_mean=None,
) -> Sparq:  # fmt: skip
    """Returns SparQ Attention by its Algorithm 1, one group of query heads at a time, over one shard or several.

    Args:
      num_shards, shard_of: the shard of each position `[S]` where every shard chooses by itself; None: all together.
      value_mean: `[B, K, Hv]`; None: the mean of the values that the query may see.
    """
    query = _wide(query)
    (batch, num_queries, num_heads, head_dim), num_kv_heads = query.shape, key.shape[2]
    scale = head_dim**-0.5 if scale is None else scale
    out = np.zeros((batch, num_queries, num_heads, value.shape[-1]))
    lse, gap = np.full((batch, num_queries, num_heads), -np.inf), np.inf
    heads = np.arange(num_heads).reshape(num_kv_heads, -1)
    num_shards = 1 if shard_of is None else num_shards
    shard_of = np.zeros(key.shape[1], int) if shard_of is None else shard_of
    for b, t, head in np.ndindex(batch, num_queries, num_kv_heads):
        end = int(lengths[b]) - (num_queries - 1 - t if is_causal else 0)
        if end < 1:
            continue
        q, k, v = query[b, t, heads[head]], _wide(key[b, :end, head]), _wide(value[b, :end, head])
        mean = v.mean(0) if value_mean is None else _wide(value_mean[b, head])
        size = np.abs(q).sum(0)
        components = np.argsort(-size, kind="stable")[:num_components]
        if num_components < head_dim:
            ordered = np.sort(size)[::-1]
            gap = min(gap, (ordered[num_components - 1] - ordered[num_components]) / ordered[0])
        part, whole = np.abs(q[:, components]).sum(1), np.abs(q).sum(1)
        coverage = {"coverage": part / whole, "head_dim": 1.0, "num_components": num_components / head_dim}
        logits = scale / np.sqrt(coverage[score_temperature]).reshape(-1, 1) * (q[:, components] @ k[:, components].T)
        parts = []  # (out, lse) of each shard's kept keys and the rest
        for shard in range(num_shards):
            mine = np.flatnonzero(shard_of[:end] == shard)
            if not mine.size:
                continue
            log_scores = logits[:, mine] - np.logaddexp.reduce(logits[:, mine], axis=1, keepdims=True)
            scores = np.exp(log_scores).sum(0)
            recent = mine >= end - local_window
            scores[recent] = np.inf
            order = np.argsort(-scores, kind="stable")
            num_kept = -(-num_keys // num_shards)
            if num_kept < mine.size:
                last, next_one = scores[order[num_kept - 1]], scores[order[num_kept]]
                if last != np.inf or next_one != np.inf:
                    gap = min(gap, 1.0 if last == np.inf else (last - next_one) / last)
            chosen = order[:num_kept]
            exact = scale * (q @ k[mine[chosen]].T)
            kept_lse = np.logaddexp.reduce(exact, axis=1)
            kept_out = np.exp(exact - kept_lse[:, None]) @ v[mine[chosen]]
            log_alpha = np.logaddexp.reduce(log_scores[:, chosen], axis=1) if reallocate else np.zeros(len(q))
            alpha = np.minimum(np.exp(log_alpha), 1.0)[:, None]
            parts.append((alpha * kept_out + (1 - alpha) * mean, kept_lse - log_alpha))
        all_lse = np.stack([part_lse for _, part_lse in parts])
        total = np.logaddexp.reduce(all_lse, axis=0)
        share = np.exp(all_lse - total)
        out[b, t, heads[head]] = sum(x[:, None] * part_out for x, (part_out, _) in zip(share, parts))
        lse[b, t, heads[head]] = total
    return Sparq(out, lse, float(gap))


def _wide(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)
