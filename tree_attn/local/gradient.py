"""The backward pass over one shard's keys, given the lse over all: shards and blocks are then independent.

With `P = exp(logits - lse)` the output over all keys is the sum over shards of `P value`. So a shard's derivative needs
nothing of the others but `lse` and, of each query, one number of `out` and the cotangents. The pass goes over pairs of
a tile of queries and a chunk of keys, and holds the logits of one pair.

Source: FlashAttention-2 (Dao 2023), section 3.1.2; Ring Attention (Liu et al. 2023), section 3.
"""

import functools
import logging
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tree_attn.arguments import AttentionOptions, default_scale
from tree_attn.local import cudnn, xla
from tree_attn.local.garbage import zeroed
from tree_attn.masking import Visibility, visibility
from tree_attn.mesh import vary_as
from tree_attn.placement import Shard

_log = logging.getLogger("tree_attn")
MAX_TILE_QUERIES, MIN_CHUNK_KEYS = 256, 32

_dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST)


class Gradient(NamedTuple):
    """The derivatives of one shard, float32; `scales` is None where there are none."""

    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K Hv"]
    scales: Float[Array, "2 K"] | None


@jax.custom_jvp
def first_derivative_only(tree):
    """Returns `tree`, and raises NotImplementedError where it is differentiated.

    To be applied to what a rule for derivatives returns: autodiff would keep the logits of all of its blocks.
    """
    return tree


@first_derivative_only.defjvp
def _refuse(primals, tangents):
    raise NotImplementedError(
        "ring_attention and ulysses_attention have a first derivative only, got a derivative of their gradient; "
        "tree_attn.attend with implementation='xla' has derivatives of any order"
    )


def shard_gradient(
    query,
    key,
    value,
    options: AttentionOptions,
    shard: Shard,
    *,
    query_shard: Shard | None = None,
    lse: Float[Array, "B T N"],
    of_out: Float[Array, "B T N Hv"],
    of_sum: Float[Array, "B T N"],
    out: Float[Array, "B T N Hv"] | None = None,
) -> Gradient:
    """Returns the derivative of `sum <of_out, O> + of_sum Z` over one shard's keys, where lse is held constant.

    P = exp(logits - lse),    O = P value,    Z = sum P

    Let lse be over all keys, `of_out` the cotangent of `out`, and `of_sum` that of lse less `<of_out, out>`. Then the
    sum over shards is the derivative of attention.

    Args:
      query, key, value, options, shard, query_shard: as of `attend_shard`; queries are finite.
      lse: over the keys of all shards, and sinks; -inf where a query sees none.
      out: the result over the same, where lse itself has no cotangent: then cuDNN's backward pass may run, on GPUs,
        unless `options.implementation` names another backend. None: blocks by XLA.
    """
    num_kv_heads = key.shape[2]
    visible = visibility(
        options, batch=query.shape[0], num_queries=query.shape[1], num_slots=key.shape[1], shard=shard,
        query_shard=query_shard,
    )  # fmt: skip
    scales = options.head_scales(num_kv_heads)
    scale, soft_cap = default_scale(options.scale, query.shape[-1]), options.soft_cap
    if out is not None and options.implementation in (None, "cudnn"):
        masking = {"logits_soft_cap": soft_cap, "visible": visible, "scales": scales}
        reason = cudnn.unavailable() or cudnn.gradient_unsupported(query, key, value, **masking)
        if reason is None:
            rows = vary_as((query, key, value, visible, out, lse, of_out))
            *arrays, visible, out, lse, of_out = rows
            found = cudnn.gradient(*arrays, scale=scale, visible=visible, out=out, lse=lse, of_out=of_out)
            return Gradient(*(x.astype(jnp.float32) for x in found), None)
        _log.debug("the gradient of a shard passed over 'cudnn': %s", reason)
    # A query that sees nothing has no weights, whatever is subtracted.
    lse = jnp.where(jnp.isneginf(lse), 0.0, lse)
    arrays = vary_as((query, key, value, scales, lse, of_out.astype(jnp.float32), of_sum, visible))
    *arrays, visible = arrays
    return _over_blocks(*arrays, visible, scale=scale, soft_cap=soft_cap)


def zero_gradient(query, key, value, options: AttentionOptions) -> Gradient:
    """Returns the derivative over no keys."""
    return _zeros(query, key, value, options.head_scales(key.shape[2]))


def _zeros(query, key, value, scales) -> Gradient:
    return Gradient(*(None if x is None else jnp.zeros(x.shape, jnp.float32) for x in (query, key, value, scales)))


def _over_blocks(query, key, value, scales, lse, of_out, of_sum, visible: Visibility, *, scale, soft_cap) -> Gradient:
    num_queries, num_keys = query.shape[1], key.shape[1]
    total = vary_as(_zeros(query, key, value, scales), query)
    if num_queries == 0 or num_keys == 0:
        return total
    tile, chunk = _block_size(query, num_keys)
    num_tiles, num_chunks = -(-num_queries // tile), -(-num_keys // chunk)

    def step(total: Gradient, block):
        # The last tile and the last chunk start early rather than read past the end; their overlap is masked.
        first_query, first_key = block // num_chunks * tile, block % num_chunks * chunk
        start, key_start = jnp.minimum(first_query, num_queries - tile), jnp.minimum(first_key, num_keys - chunk)
        of_tile = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=tile, axis=1)
        of_chunk = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=key_start, slice_size=chunk, axis=1)
        positions = visible.query_positions
        seen = visible if positions is None else visible.at_positions(of_tile(positions))
        mask = (
            seen.mask(key_start, chunk) & (key_start + jnp.arange(chunk, dtype=jnp.int32) >= first_key)[None, None, :]
        )
        mask = mask & (start + jnp.arange(tile, dtype=jnp.int32) >= first_query)[None, :, None]

        def add(total: Gradient) -> Gradient:
            is_valid = visible.is_valid(key_start, chunk)
            keys, values = (zeroed(of_chunk(x), is_valid).astype(query.dtype) for x in (key, value))
            part = _block(
                *map(of_tile, (query, lse, of_out, of_sum)), keys, values, scales, mask, scale=scale, soft_cap=soft_cap
            )
            return Gradient(
                query=_added(total.query, part.query, start),
                key=_added(total.key, part.key, key_start),
                value=_added(total.value, part.value, key_start),
                scales=None if scales is None else total.scales + part.scales,
            )

        return jax.lax.cond(jnp.any(mask), add, lambda total: total, total), None

    return jax.lax.scan(step, total, jnp.arange(num_tiles * num_chunks, dtype=jnp.int32))[0]


def _block_size(query, num_keys: int) -> tuple[int, int]:
    """Returns the queries and the keys of a pair: its logits take a quarter of the query's memory, or 32 keys."""
    batch, num_queries, num_heads, head_dim = query.shape
    tile = min(num_queries, MAX_TILE_QUERIES)
    at_most = min(num_queries * head_dim // (4 * tile), xla.keys_per_chunk(batch * tile * num_heads))
    return tile, min(num_keys, max(at_most, MIN_CHUNK_KEYS))


def _block(query, lse, of_out, of_sum, key, value, scales, mask, *, scale: float, soft_cap: float | None) -> Gradient:
    """Returns the derivative over one chunk of keys, of one tile of queries.

    The products take P and the logits' derivative in the dtype of the arrays, as every flash kernel does.
    """
    num_kv_heads, dtype = key.shape[2], query.dtype
    by_group = lambda x: x.reshape(*x.shape[:2], num_kv_heads, -1, *x.shape[3:])  # [B, T, N, ...] -> [B, T, K, G, ...]
    query, lse, of_out, of_sum = map(by_group, (query, lse, of_out, of_sum))
    key_scale, value_scale = (1.0, 1.0) if scales is None else (x[None, None, :, None, None] for x in scales)
    products = _dot("btkgh,bskh->btkgs", query, key)
    logits = products * (scale * key_scale)
    bend = 1.0
    if soft_cap is not None:
        bent = jnp.tanh(logits / soft_cap)
        logits, bend = soft_cap * bent, 1.0 - bent**2
    weights = jnp.exp(jnp.where(mask[:, :, None, None, :], logits, -jnp.inf) - lse[..., None])
    of_weights = _dot("btkgv,bskv->btkgs", of_out.astype(dtype), value)
    # Where a query sees nothing its weights are 0, and cotangents that are not finite must not make them NaN.
    of_logits = jnp.where(weights == 0, 0.0, weights * (of_weights * value_scale + of_sum[..., None])) * bend
    of_products = (of_logits * (scale * key_scale)).astype(dtype)
    of_query = _dot("btkgs,bskh->btkgh", of_products, key)
    of_key = _dot("btkgs,btkgh->bskh", of_products, query)
    of_value = _dot("btkgs,btkgv->bskv", weights.astype(dtype), (of_out * value_scale).astype(dtype))
    of_scales = None
    if scales is not None:
        by_head = lambda x: x.sum(axis=(0, 1, 3, 4))
        of_scales = jnp.stack([by_head(of_logits * products) * scale, by_head(weights * of_weights)])
    return Gradient(of_query.reshape(*query.shape[:2], -1, query.shape[-1]), of_key, of_value, of_scales)


def _added(total, part, start):
    before = jax.lax.dynamic_slice_in_dim(total, start, part.shape[1], axis=1)
    return jax.lax.dynamic_update_slice_in_dim(total, before + part, start, axis=1)
