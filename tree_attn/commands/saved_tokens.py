"""The tokens of `tree-attn generate --out`: saved a few at a time, so that an interrupted run goes on after them."""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tree_attn.measure.rows import RowWriter

FILE = "tokens.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """New tokens so far, and whether they are all."""

    ids: list[int]
    is_complete: bool


class SavedTokens:
    """The file `tokens.jsonl` of a folder: a line per batch of tokens, `{"first": 16, "ids": [...], "is_last": false}`.

    Process 0 alone has it; the others get what it holds from `load`, and may call everything.
    """

    def __init__(self, args: argparse.Namespace, generation: Mapping[str, Any], *, is_first: bool):
        """Opens `args.out`, where another generation than this one is a ValueError; nothing without `--out`."""
        self._every, self._max_new_tokens, self._pending = args.save_every, args.max_new_tokens, []
        self._writer = RowWriter(args.out / FILE, generation) if args.out is not None and is_first else None
        self._count = sum(len(row["ids"]) for row in self._rows)

    def load(self) -> Saved:
        """What an earlier run saved, the same in every process."""
        from jax.experimental import multihost_utils

        rows = self._rows
        ids = [token for row in rows for token in row["ids"]]
        # A stop token is not saved, so what was not closed and yet is full ended at the limit.
        is_complete = len(ids) == self._max_new_tokens or (bool(rows) and rows[-1]["is_last"])
        # Other processes do not read the file: a network file system may still show them an older one.
        sent = np.zeros(self._max_new_tokens + 2, np.int32)
        sent[: 2 + len(ids)] = [len(ids), is_complete, *ids]
        count, is_complete, *padded = np.asarray(multihost_utils.broadcast_one_to_all(sent)).tolist()
        return Saved(ids=padded[:count], is_complete=bool(is_complete))

    def add(self, token: int) -> None:
        """Notes one more token; every so many are written."""
        self._pending.append(token)
        if len(self._pending) == self._every:
            self._write(is_last=False)

    def close(self) -> None:
        """Writes what is left: the generation is complete."""
        self._write(is_last=True)

    @property
    def _rows(self) -> Sequence[dict]:
        return [] if self._writer is None else self._writer.rows

    def _write(self, *, is_last: bool) -> None:
        if self._writer is not None:
            self._writer.append({"first": self._count, "ids": self._pending, "is_last": is_last})
        self._count += len(self._pending)
        self._pending = []
