"""A tree of the prefixes that prompts have in common, in plain integers.

A prompt is the tokens of the nodes on its path, from the root, and then its own remainder. A node's keys and values are
computed, stored and, at every step, read once for all of its sequences (`tree_attn.shared_prefix`).

Source: Hydragen, sections 3.1 and 3.3 (hierarchies of shared prefixes).
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

# Keys that a node must save, its tokens times its sequences but one. It costs one more kernel and merge in every layer
# of every step, and one more pass over the weights in prefill. A step breaks even at about 1,000 on CPU, and on an H200
# with 8 heads of 128 in bf16 at 4,000 (two sequences) to 13,000 (16). With 2,048 a layer loses 2.5 to 9 us, 0.1 to
# 0.3 ms a token of an 8B model. As much prefill is some 50 ms, so fewer keys pay too, unless hundreds of tokens are
# generated. docs/log/prefix.md: "On an H200, sharing a prefix pays from 4,300 to 13,000 saved keys a step".
MIN_SHARED_KEYS = 2048

# For each level above some depth, for each of its nodes, the indices of the nodes at that depth below it.
Descendants = tuple[tuple[tuple[int, ...], ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Node:
    """Tokens that some sequences have in common, after those of the nodes above."""

    tokens: tuple[int, ...]
    sequences: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixTree:
    """Prompts as levels of shared nodes, the root's first, and a remainder for each sequence.

    Attributes:
      levels: for each depth its nodes; the sequences of a node are among those of one node of the level above.
      remainders: for each sequence the tokens after those of its nodes; one or more, so that a sequence's first logits
        are its own also where prompts are the same.
    """

    levels: tuple[tuple[Node, ...], ...]
    remainders: tuple[tuple[int, ...], ...]

    @property
    def texts(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The tokens of each level's nodes, and, last, the remainders."""
        return (*(tuple(node.tokens for node in level) for level in self.levels), self.remainders)

    @property
    def descendants(self) -> tuple[Descendants, ...]:
        """The nodes below each node: `descendants[depth][level][node]` are indices of nodes at `depth`.

        The last depth is that of the remainders, one for each sequence. Trees with equal `descendants` differ in tokens
        only.

        Example:
          >>> tree.descendants[-1]    # for each level, for each node, its sequences
        """
        sequences = [[node.sequences for node in level] for level in self.levels]
        sequences.append([(sequence,) for sequence in range(len(self.remainders))])
        below = lambda node, depth: tuple(i for i, deeper in enumerate(sequences[depth]) if deeper[0] in node)
        return tuple(
            tuple(tuple(below(node, depth) for node in level) for level in sequences[:depth])
            for depth in range(len(sequences))
        )

    @property
    def num_shared(self) -> int:
        """Tokens of all nodes: each is stored once."""
        return sum(len(node.tokens) for level in self.levels for node in level)

    @property
    def num_slots(self) -> int:
        """Tokens that are laid out for prefill: all texts of a level are as long as its longest."""
        return sum(len(texts) * max(map(len, texts)) for texts in self.texts)


def unshared(prompts: Sequence[Sequence[int]]) -> PrefixTree:
    """Returns the tree without nodes: every prompt by itself."""
    return PrefixTree(levels=(), remainders=tuple(map(tuple, prompts)))


def share(prompts: Sequence[Sequence[int]], min_shared: int = MIN_SHARED_KEYS) -> PrefixTree:
    """Finds common prefixes of prompts, in as many levels as there are branches that pay.

    A node's tokens are the longest continuation that all of its sequences have in common. Where they save less than
    `min_shared`, they go to the nodes below, as the first of theirs, or to the remainders.

    Args:
      prompts: token ids, one or more for each sequence.
      min_shared: keys that a node must save, tokens x (sequences - 1); 1 shares whatever is common.

    Example:
      >>> share([[1, 2, 3, 4], [1, 2, 3, 5], [1, 7]], min_shared=1).levels
      ((Node(tokens=(1,), sequences=(0, 1, 2)),), (Node(tokens=(2, 3), sequences=(0, 1)),))
    """
    arrays = [np.asarray(prompt, np.int32) for prompt in prompts]
    levels: list[list[Node]] = []
    starts = [0] * len(prompts)
    for depth, node in _nodes(arrays, min_shared):
        if depth == len(levels):
            levels.append([])
        levels[depth].append(node)
        for sequence in node.sequences:
            starts[sequence] += len(node.tokens)
    remainders = tuple(tuple(prompt[start:]) for prompt, start in zip(prompts, starts, strict=True))
    return PrefixTree(levels=tuple(map(tuple, levels)), remainders=remainders)


def _nodes(prompts: Sequence[np.ndarray], min_shared: int) -> Iterator[tuple[int, Node]]:
    """Yields the nodes with their depths, each after the one above it."""
    # Sequences that agree up to `end`, their depth so far, and the start of the tokens that are in no node yet. A list
    # and no recursion: prompts may branch more often than Python recurses.
    pending = [([i for i, prompt in enumerate(prompts) if len(prompt) > 1], 0, 0, 0)]
    while pending:
        sequences, depth, start, end = pending.pop()
        if len(sequences) < 2:
            continue
        end += _num_common([prompts[i][end:-1] for i in sequences])
        if end > start and _num_saved(end - start, sequences) >= min_shared:
            yield depth, Node(tokens=tuple(prompts[sequences[0]][start:end].tolist()), sequences=tuple(sequences))
            depth, start = depth + 1, end
        branches: dict[int, list[int]] = {}
        for i in sequences:
            if len(prompts[i]) - 1 > end:
                branches.setdefault(int(prompts[i][end]), []).append(i)
        pending += [(branch, depth, start, end) for branch in reversed(branches.values())]


def _num_common(texts: Sequence[np.ndarray]) -> int:
    """Returns the length of the longest common prefix."""
    shortest = min(map(len, texts))
    differs = np.any(np.stack([text[:shortest] for text in texts]) != texts[0][None, :shortest], axis=0)
    return int(np.argmax(differs)) if differs.any() else shortest


def _num_saved(num_tokens: int, sequences: Sequence[int]) -> int:
    return num_tokens * (len(sequences) - 1)
