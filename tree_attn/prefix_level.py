"""A level of a prefix tree: what it holds, and whether it fits a query."""

import contextlib
import dataclasses
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Integer, Num

from tree_attn.arguments import (
    AnyArray,
    AttentionOptions,
    as_leaf,
    check_arrays,
    check_head_scale,
    check_lengths,
    is_integer,
)
from tree_attn.array_axes import HEADS
from tree_attn.placement import UNNAMED, Placement, named_block_size
from tree_attn.sharded import num_held_shards, pad_keys


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["key", "value", "lengths", "key_scale", "value_scale"],
    meta_fields=["sequences", "block_size"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixLevel:
    """One level of a prefix tree: its nodes' keys and values, and the sequences that each node serves.

    Attributes:
      key: `[nodes, S, K, H]`.
      value: `[nodes, S, K, Hv]`.
      sequences: for each node the indices of the sequences that it serves (static); a sequence has one node of a level
        or none.
      lengths: int32 `[nodes]`, valid keys of each node; None: all.
      block_size: placement of the keys on shards (static), as in `tree_attn.tree_decode`; it must be named with
        lengths.
      key_scale, value_scale: float32 `[K]`, of this level's keys and values; None: those of the call.

    Example:
      >>> level = PrefixLevel(key=key, value=value, sequences=((0, 1, 2), (3,)))    # two nodes, a batch of four
    """

    key: Num[AnyArray, "nodes S K H"]
    value: Num[AnyArray, "nodes S K Hv"]
    sequences: tuple[tuple[int, ...], ...]
    lengths: Integer[AnyArray, " nodes"] | None = None
    block_size: Placement = UNNAMED
    key_scale: Float[AnyArray, " K"] | None = None
    value_scale: Float[AnyArray, " K"] | None = None

    def checked(self, name: str, query, axes: tuple[str, ...]) -> "PrefixLevel":
        """Returns the level, which fits `query [B, T, N, H]`, with its placement named.

        Args:
          name: of the level, for messages.
          axes: mesh axes; where they are bound, `key` is one of their shards.
        Raises:
          ValueError, TypeError: it does not fit, or its placement must be named; the message names the argument.
        """
        batch = query.shape[0]
        _check_sequences(f"{name}.sequences", self.sequences, batch)
        nodes = len(self.sequences)
        with _named(name):
            check_arrays(jax.ShapeDtypeStruct((nodes, *query.shape[1:]), query.dtype), self.key, self.value)
            if self.lengths is not None:
                check_lengths("lengths", self.lengths, nodes, self.key.shape[1] * num_held_shards(axes))
            for scale in ("key_scale", "value_scale"):
                check_head_scale(scale, getattr(self, scale), num_kv_heads=self.key.shape[2])
            has_lengths = self.lengths is not None
            block_size = named_block_size(self.block_size, axes=axes, depends_on_positions=has_lengths)
        return dataclasses.replace(self, lengths=as_leaf(self.lengths), block_size=block_size)

    def specs(self, axes: tuple[str, ...]) -> "PrefixLevel":
        """Returns the spec of each array, in its place, for keys sharded over `axes`."""
        specs = {"key": P(None, axes, HEADS), "value": P(None, axes, HEADS), "lengths": P()}
        specs |= {"key_scale": P(HEADS), "value_scale": P(HEADS)}
        return dataclasses.replace(
            self, **{name: spec for name, spec in specs.items() if getattr(self, name) is not None}
        )

    def padded(self, name: str, axes: tuple[str, ...], mesh: Mesh | None) -> "PrefixLevel":
        """Returns the level with its keys padded as `pad_keys` does; arguments as `checked`."""
        options = AttentionOptions(key_value_seq_lengths=self.lengths)
        with _named(name):
            key, value, options = pad_keys(
                self.key, self.value, options, axes=axes, mesh=mesh, block_size=self.block_size
            )
        return dataclasses.replace(self, key=key, value=value, lengths=options.key_value_seq_lengths)

    def node_tables(self, batch: int, parts: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns for each part of `batch` sequences those that each node serves, and the places of the sequences.

        They are int32 `[parts, nodes, share]` and `[parts, batch]`. Both count sequences from the part's first. A node
        with fewer sequences than another is filled up with `batch`, which is no sequence. A sequence without a node
        has a place beyond all.
        """
        by_part = [
            [[b - first for b in served if first <= b < first + batch] for served in self.sequences]
            for first in range(0, parts * batch, batch)
        ]
        share = max((len(served) for nodes in by_part for served in nodes), default=0)
        sequences = np.full((parts, len(self.sequences), share), batch, np.int32)
        places = np.full((parts, batch), len(self.sequences) * share, np.int32)
        for part, nodes in enumerate(by_part):
            for node, served in enumerate(nodes):
                sequences[part, node, : len(served)] = served
                places[part, served] = node * share + np.arange(len(served))
        return sequences, places


def check_levels(levels) -> None:
    """Raises TypeError unless `levels` is a list or tuple of prefix levels."""
    if not isinstance(levels, list | tuple):
        raise TypeError(f"levels must be a list or tuple of PrefixLevel, got {type(levels).__name__}")
    for i, level in enumerate(levels):
        if not isinstance(level, PrefixLevel):
            raise TypeError(f"levels[{i}] must be a PrefixLevel, got {type(level).__name__}")


def _check_sequences(name: str, sequences, batch: int) -> None:
    """Raises TypeError or ValueError unless `sequences` is a tuple of tuples of different indices of the batch."""
    if not isinstance(sequences, tuple) or not all(isinstance(served, tuple) for served in sequences):
        raise TypeError(f"{name} must be a tuple with a tuple of integers for each node, got {sequences!r}")
    served = [sequence for node in sequences for sequence in node]
    is_there = all(is_integer(sequence) and 0 <= sequence < batch for sequence in served)
    if not is_there or len(set(served)) != len(served):
        raise ValueError(f"{name} must name sequences of the batch of {batch}, none twice, got {sequences}")


@contextlib.contextmanager
def _named(name: str):
    """Puts a name before the message of a ValueError or TypeError."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise type(error)(f"{name}: {error}") from None
