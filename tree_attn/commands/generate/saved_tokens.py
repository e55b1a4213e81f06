"""The tokens of `tree-attn generate --out`: saved a few at a time, so that an interrupted run continues after them."""

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from tree_attn.commands.processes import broadcast
from tree_attn.measure.rows import RowWriter
from tree_attn.topology import is_first_process

FILE = "tokens.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """New tokens of an earlier run; `is_complete` where no more are to come."""

    ids: list[int]
    is_complete: bool


class SavedTokens:
    """The file `tokens.jsonl` of a folder: a line per batch of tokens, `{"first": 16, "ids": [...], "is_last": false}`.

    Process 0 alone reads and writes it. The others get its tokens from `load`, and call the same methods.
    """

    def __init__(self, args: argparse.Namespace, generation: Mapping[str, Any]):
        """Opens the file in `args.out`; without `--out` there is none.

        Raises:
          ValueError: the folder holds the tokens of another generation than `generation`.
        """
        self._every, self._max_new_tokens, self._pending = args.save_every, args.max_new_tokens, []
        is_writer = is_first_process()
        self._writer = None if args.out is None else RowWriter(args.out / FILE, generation, is_writer=is_writer)
        self._count = 0 if self._writer is None else sum(len(row["ids"]) for row in self._writer.rows)

    def load(self) -> Saved:
        """Returns the tokens that an earlier run saved, the same in every process."""
        rows = [] if self._writer is None else self._writer.rows
        ids = [token for row in rows for token in row["ids"]]
        # A stop token is not saved, so a full file without a last batch ended at the limit.
        is_complete = len(ids) == self._max_new_tokens or (bool(rows) and rows[-1]["is_last"])
        # Other processes do not read the file: a network file system may still show them an older one.
        sent = np.zeros(self._max_new_tokens + 2, np.int32)
        sent[: 2 + len(ids)] = [len(ids), is_complete, *ids]
        count, is_complete, *padded = broadcast(sent).tolist()
        return Saved(ids=padded[:count], is_complete=bool(is_complete))

    def add(self, token: int) -> None:
        """Takes one more token; writes a batch when it is full."""
        self._pending.append(token)
        if len(self._pending) == self._every:
            self._write(is_last=False)

    def close(self) -> None:
        """Writes the last batch: the generation is complete."""
        self._write(is_last=True)

    def _write(self, *, is_last: bool) -> None:
        if self._writer is not None:
            self._writer.append({"first": self._count, "ids": self._pending, "is_last": is_last})
        self._count += len(self._pending)
        self._pending = []
