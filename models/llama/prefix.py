"""Prefixes that sequences share: the nodes of one level of a prefix tree, and the keys and values of their tokens."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from tree_attn.cache import KVCache
from tree_attn.prefix_level import PrefixLevel


@functools.partial(jax.tree_util.register_dataclass, data_fields=["cache"], meta_fields=["sequences"])
@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefix:
    """One level of a prefix tree, whose nodes precede deeper nodes or the sequences of a batch.

    Attributes:
      cache: keys and values of all layers, one entry of its batch for each node.
      sequences: for each node, the sequences that it precedes (static).
    """

    cache: KVCache
    sequences: tuple[tuple[int, ...], ...]

    def level(self, layer: jax.Array) -> PrefixLevel:
        """Returns the operands of attention to this level in one layer."""
        return PrefixLevel(
            key=self.cache.key[layer],
            value=self.cache.value[layer],
            lengths=self.cache.lengths,
            sequences=self.sequences,
            block_size=self.cache.block_size,
            **self.cache.scales(layer),
        )


def num_tokens_before(prefixes: Sequence[Prefix], batch: int) -> jax.Array:
    """Returns the tokens of all nodes that precede each sequence, int32 `[B]`: the first position of its own tokens."""
    total = jnp.zeros(batch, jnp.int32)
    for prefix in prefixes:
        node_of = {sequence: node for node, sequences in enumerate(prefix.sequences) for sequence in sequences}
        sequences, nodes = (np.array(list(ids), np.int32) for ids in (node_of.keys(), node_of.values()))
        total = total.at[sequences].add(prefix.cache.lengths[nodes])
    return total
