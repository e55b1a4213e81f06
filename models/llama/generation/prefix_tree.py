"""Which prompts begin alike: their longest common prefixes as a tree, in plain integers.

A prompt is the tokens of the nodes on its path, from the root, and then its own remainder. A node's keys and values are
computed, stored and, at every step, read once for all of its rows (`tree_attn.shared_prefix`).

Source: Hydragen, sections 3.1 and 3.3 (hierarchies of shared prefixes).
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

# Keys that a node must save, its tokens times its rows but one, to be worth one more kernel and merge in every layer of
# every step and one more pass over the weights in prefill. A step breaks even at about 1,000 on CPU, on an H200 with
# 8 heads of 128 in bf16 at 4,000 (two sequences) to 13,000 (16): with 2,048 a layer loses 2.5 to 9 us, 0.1
# to 0.3 ms a token of an 8B model, but as much prefill is some 50 ms, so that fewer pay too unless hundreds of tokens
# are generated. docs/log/prefix.md: "On an H200, sharing a prefix pays from 4,300 to 13,000 saved keys a step".
MIN_SHARED_KEYS = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class Node:
    """Tokens that some rows have in common, after those of the nodes above."""

    tokens: tuple[int, ...]
    rows: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixTree:
    """Prompts as levels of shared nodes, the root's first, and what each row has left.

    Attributes:
      levels: for each depth its nodes; the rows of a node are among those of one node of the level above.
      remainders: for each row the tokens after those of its nodes; one or more, so that a row's first logits are its
        own also where prompts are the same.
    """

    levels: tuple[tuple[Node, ...], ...]
    remainders: tuple[tuple[int, ...], ...]

    @property
    def texts(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The tokens of each level's nodes, and, last, the remainders."""
        return (*(tuple(node.tokens for node in level) for level in self.levels), self.remainders)

    @property
    def served(self) -> tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]:
        """Whom the nodes serve: `served[d][level][node]` are the nodes of depth `d` below a node of a level above it.

        The last `d` is that of the remainders, of which each is a row. Trees of equal `served` differ in tokens only.

        Example:
          >>> tree.served[-1]    # for each level, for each node, its rows
        """
        rows = [[node.rows for node in level] for level in self.levels]
        rows.append([(row,) for row in range(len(self.remainders))])
        below = lambda node, depth: tuple(i for i, deeper in enumerate(rows[depth]) if deeper[0] in node)
        return tuple(
            tuple(tuple(below(node, depth) for node in level) for level in rows[:depth]) for depth in range(len(rows))
        )

    @property
    def num_shared(self) -> int:
        """Tokens of all nodes: each is held once."""
        return sum(len(node.tokens) for level in self.levels for node in level)

    @property
    def num_saved(self) -> int:
        """How many more tokens there would be if each row held its own."""
        return sum(_saving(len(node.tokens), node.rows) for level in self.levels for node in level)

    @property
    def num_slots(self) -> int:
        """Tokens that are laid out for prefill: all texts of a level are as long as its longest."""
        return sum(len(texts) * max(map(len, texts)) for texts in self.texts)


def unshared(prompts: Sequence[Sequence[int]]) -> PrefixTree:
    """The tree without nodes: every prompt by itself."""
    return PrefixTree(levels=(), remainders=tuple(map(tuple, prompts)))


def share(prompts: Sequence[Sequence[int]], min_shared: int = MIN_SHARED_KEYS) -> PrefixTree:
    """Finds what prompts have in common, in as many levels as there are branches that pay.

    A node's tokens are the longest that all of its rows go on with. Where they save less than `min_shared`, they are
    left to the nodes below, as the first of theirs, or to the remainders.

    Args:
      prompts: token ids, one or more for each row.
      min_shared: keys that a node must save, tokens x (rows - 1); 1 shares whatever is common.

    Example:
      >>> share([[1, 2, 3, 4], [1, 2, 3, 5], [1, 7]], min_shared=1).levels
      ((Node(tokens=(1,), rows=(0, 1, 2)),), (Node(tokens=(2, 3), rows=(0, 1)),))
    """
    arrays = [np.asarray(prompt, np.int32) for prompt in prompts]
    levels: list[list[Node]] = []
    starts = [0] * len(prompts)
    for depth, node in _nodes(arrays, min_shared):
        if depth == len(levels):
            levels.append([])
        levels[depth].append(node)
        for row in node.rows:
            starts[row] += len(node.tokens)
    remainders = tuple(tuple(prompt[start:]) for prompt, start in zip(prompts, starts, strict=True))
    return PrefixTree(levels=tuple(map(tuple, levels)), remainders=remainders)


def _nodes(prompts: Sequence[np.ndarray], min_shared: int) -> Iterator[tuple[int, Node]]:
    """The nodes with their depths, each after the one above it."""
    # Rows that agree up to `end`, the depth that they have come to, and where the tokens that are in no node yet begin.
    # A list and no recursion: prompts may branch more often than Python recurses.
    pending = [([row for row, prompt in enumerate(prompts) if len(prompt) > 1], 0, 0, 0)]
    while pending:
        rows, depth, start, end = pending.pop()
        if len(rows) < 2:
            continue
        end += _num_common([prompts[row][end:-1] for row in rows])
        if end > start and _saving(end - start, rows) >= min_shared:
            yield depth, Node(tokens=tuple(prompts[rows[0]][start:end].tolist()), rows=tuple(rows))
            depth, start = depth + 1, end
        branches: dict[int, list[int]] = {}
        for row in rows:
            if len(prompts[row]) - 1 > end:
                branches.setdefault(int(prompts[row][end]), []).append(row)
        pending += [(branch, depth, start, end) for branch in reversed(branches.values())]


def _num_common(texts: Sequence[np.ndarray]) -> int:
    """Length of the longest common prefix."""
    shortest = min(map(len, texts))
    differs = np.any(np.stack([text[:shortest] for text in texts]) != texts[0][None, :shortest], axis=0)
    return int(np.argmax(differs)) if differs.any() else shortest


def _saving(num_tokens: int, rows: Sequence[int]) -> int:
    return num_tokens * (len(rows) - 1)
