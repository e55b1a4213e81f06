"""Layout of texts for prefill and decoding, in plain numpy: padding, capacity, storage order, and batch slots.

Nothing here touches a device; `inputs.py` puts the arrays on them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from tree_attn.models.llama.generation.prefix_tree import PrefixTree
from tree_attn.models.llama.storage import BLOCK_SIZE, prompt_layout

Texts = Sequence[Sequence[int]]


class BatchSlots(NamedTuple):
    """The state of each batch slot between steps, int32 `[B]` each: all that a step needs besides the cache.

    tokens:     the newest token
    sequences:  index of the sequence; draws depend on it and on the step, not on the place in the batch
    steps:      number of tokens chosen so far
    """

    tokens: np.ndarray | jax.Array
    sequences: np.ndarray | jax.Array
    steps: np.ndarray | jax.Array


class LevelLayout(NamedTuple):
    """The texts of one level of a prefix tree, and the room that they take.

    texts:       tokens of each node, or the remainders
    num_tokens:  length to which prefill pads each text
    capacity:    slots of each text in the level's cache
    """

    texts: Texts
    num_tokens: int
    capacity: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Rules by which texts are padded and stored over the shards of a sequence.

    Attributes:
      num_shards: shards of the sequence.
      slot_multiple: `num_tokens -> int`: a shard's slots are a multiple of it, see `Attention.slot_multiple`.
      prefill_chunk: tokens that prefill reads at a time, a multiple of the shards; None: all.

    Example:
      >>> Layout(num_shards=8, slot_multiple=lambda num_tokens: 1).padded_length(17)
      24
    """

    num_shards: int
    slot_multiple: Callable[[int], int]
    prefill_chunk: int | None = None

    def padded_length(self, num_tokens: int) -> int:
        """Returns the tokens that prefill takes for a text: whole shards, and whole chunks if it has more than one."""
        return _round_up(num_tokens, self.chunk_of(num_tokens) or self.num_shards * BLOCK_SIZE)

    def chunk_of(self, num_tokens: int) -> int | None:
        """Returns the chunk in which prefill reads a text of so many tokens; None: all at once."""
        is_chunked = self.prefill_chunk is not None and num_tokens > self.prefill_chunk
        return self.prefill_chunk if is_chunked else None

    def bucket_length(self, num_tokens: int, longest: int) -> int:
        """Returns one of few padded lengths: a power of two times the shards, at most that of the `longest` text."""
        unit = self.num_shards * BLOCK_SIZE
        power = 1 << (-(-num_tokens // unit) - 1).bit_length()
        return min(self.padded_length(unit * power), self.padded_length(longest))

    def window_slots(self, window: int | None) -> int | None:
        """Returns the slots in which layers with a window keep it; None: they keep all tokens.

        A window is kept by itself where its shards are of whole multiples of slots: the next token sees all of them.
        """
        if window is None or window % (self.num_shards * BLOCK_SIZE * self.slot_multiple(window)):
            return None
        return window

    def capacity(self, texts: Texts, num_following: int = 0) -> int:
        """Returns the slots for each of these texts in one cache, with room for `num_following` tokens after it."""
        longest = max(map(len, texts))
        num_tokens = longest + num_following
        return max(_round_up(num_tokens, self.num_shards * self.slot_multiple(num_tokens)), self.padded_length(longest))

    def levels(self, tree: PrefixTree, max_new_tokens: int) -> tuple[LevelLayout, ...]:
        """Returns the layout of each level of a tree; new tokens follow the remainders only."""
        num_following = [0] * len(tree.levels) + [max_new_tokens]
        return tuple(
            LevelLayout(texts, self.padded_length(max(map(len, texts))), self.capacity(texts, count))
            for texts, count in zip(tree.texts, num_following, strict=True)
        )

    def stored(self, texts: Texts, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Pads texts on the right to `num_tokens` and puts them into storage order.

        Returns:
          Tokens, int32 `[texts, num_tokens]`, and lengths, int32 `[texts]`.
        """
        tokens = np.zeros((len(texts), num_tokens), np.int32)
        for padded, text in zip(tokens, texts, strict=True):
            padded[: len(text)] = text
        return prompt_layout(num_tokens, self.num_shards).store(tokens), np.array(
            [len(text) for text in texts], np.int32
        )


def batch_slots(batch: int, *, first_sequence: int = 0, step: int = 0) -> BatchSlots:
    """Returns the slots of `batch` consecutive sequences, before the token of `step`."""
    sequences = np.arange(first_sequence, first_sequence + batch)
    return BatchSlots(*(np.asarray(x, np.int32) for x in (np.zeros(batch), sequences, np.full(batch, step))))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
