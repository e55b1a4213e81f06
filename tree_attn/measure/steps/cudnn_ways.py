"""cuDNN's ways of a decode step through JAX, and the arrays that they take."""

import jax
import jax.numpy as jnp
import numpy as np

from tree_attn import attend, merge_states
from tree_attn.measure.steps.step import MAX_BYTES, Step

CHUNKS = (1, 4, 8, 16)  # parts of a shared prefix along the batch axis


def by_jax(query, key, value, lengths=None):
    """Runs cuDNN as `jax.nn` offers it: without the lse, which this library's backend returns too."""
    return jax.nn.dot_product_attention(query, key, value, key_value_seq_lengths=lengths, implementation="cudnn")


def padded_pages(step: Step, arrays: dict) -> tuple:
    """Returns the pages with others after them: cuDNN through JAX takes as many as its table has entries."""
    count = step.batch * max(step.pages)
    if count * step.page * step.key_value_bytes > 2 * MAX_BYTES:
        raise NotImplementedError("cuDNN through JAX needs as many pages as its table has entries: too much memory")
    return tuple(jnp.pad(x, [(0, count - len(x)), *[(0, 0)] * 3]) for x in arrays.values())


def paged(step: Step, query, key_pages, value_pages, table, lengths):
    """Runs cuDNN's paged attention, which `jax.nn` does not offer."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    if step.num_queries > 1:
        raise NotImplementedError("cuDNN's causal mask of several queries begins at the first key")
    table = table[:, None, :, None]
    queries = jnp.full(lengths.shape, step.num_queries, jnp.int32)
    return fused.paged_attention(
        query, key_pages, value_pages, queries, lengths, table, table, scale=step.head_dim**-0.5,
        mask_type=fused.MaskType.PADDING,
    )  # fmt: skip


def chunked(step: Step, chunks: int, arrays: dict) -> tuple:
    """Returns the arrays with the prefix as `[chunks, S, K, H]`; zeros fill the last chunk up."""
    size = -(-step.prefix // chunks)
    padding = [(0, size * chunks - step.prefix), (0, 0), (0, 0)]
    cut = lambda x: jnp.pad(x, padding).reshape(chunks, size, *x.shape[1:])
    return cut(arrays["prefix_key"]), cut(arrays["prefix_value"]), arrays["key"], arrays["value"]


def with_prefix(step: Step, chunks: int, query, prefix_key, prefix_value, key, value, lengths=None):
    """Attends to a prefix cut along the batch axis and to the suffixes, both by cuDNN, and merges the states."""
    size = prefix_key.shape[1]
    ends = np.minimum(size, step.prefix - size * np.arange(chunks)).astype(np.int32)
    part_lengths = None if (ends == size).all() else jnp.asarray(ends)
    queries = jnp.broadcast_to(query.reshape(1, -1, *query.shape[2:]), (chunks, step.batch, *query.shape[2:]))
    parts = attend(queries, prefix_key, prefix_value, key_value_seq_lengths=part_lengths, implementation="cudnn")
    suffix = attend(query, key, value, key_value_seq_lengths=lengths, implementation="cudnn")
    stacked = jax.tree.map(
        lambda part, alone: jnp.concatenate([part[:, :, None], alone[None]]).astype(alone.dtype), parts, suffix
    )
    return merge_states(stacked, axis=0).out
