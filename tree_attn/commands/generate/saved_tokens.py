"""The tokens of `tree-attn generate --out`: saved a few at a time, so that an interrupted run continues after them."""

import argparse
import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from tree_attn.commands import interrupts
from tree_attn.commands.processes import broadcast
from tree_attn.measure.rows import RowWriter
from tree_attn.topology import is_first_process

FILE = "tokens.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """New tokens of earlier runs; `stopped` where a stop token came after them."""

    ids: list[int]
    stopped: bool


class SavedTokens:
    """The file `tokens.jsonl` of a folder: a line per batch of tokens, `{"first": 16, "ids": [...], "is_last": false}`.

    `first` is the number of tokens before the line. The last line of a generation that met a stop token has `is_last`;
    it may have no tokens. One that ended at its limit has no such line, and goes on under a higher limit. Process 0
    alone reads and writes the file. The others get its tokens from `load`, and call the same methods.
    """

    def __init__(self, args: argparse.Namespace, generation: Mapping[str, Any], vocab_size: int):
        """Opens the file in `args.out`; without `--out` there is none.

        Args:
          args: the options.
          generation: the facts that a later run must have in common with this one to continue it.
          vocab_size: of the model; every saved token must be below it.

        Raises:
          ValueError: the folder holds the tokens of another generation than `generation`, or more than
            `args.max_new_tokens`; or a line of the file does
            not follow the lines before it: names the file and the line.
        """
        self._every, self._max_new_tokens, self._pending = args.save_every, args.max_new_tokens, []
        is_writer = is_first_process()
        options = dict(is_writer=is_writer, kind="generation")
        if args.out is not None and is_writer:
            _check_prompt((args.out / FILE).with_suffix(".sweep.json"), generation)
        self._writer = None if args.out is None else RowWriter(args.out / FILE, generation, **options)
        self._count = 0
        for number, row in enumerate([] if self._writer is None else self._writer.rows, start=1):
            is_end = number == len(self._writer.rows)
            problem = _problem(row, self._count, vocab_size, is_end=is_end)
            if problem:
                raise ValueError(
                    f"{self._writer.path}, line {number}: {problem}. Cut the file before that line to go on from "
                    "there, or take another folder"
                )
            self._count += len(row["ids"])
        if self._count > self._max_new_tokens:
            raise ValueError(
                f"--max-new-tokens must be at least {self._count}, got {self._max_new_tokens}: {args.out} has "
                f"{self._count} tokens already"
            )

    def load(self) -> Saved:
        """Returns the tokens that an earlier run saved, the same in every process."""
        rows = [] if self._writer is None else self._writer.rows
        ids = [token for row in rows for token in row["ids"]]
        # Other processes do not read the file: a network file system may still show them an older one.
        sent = np.zeros(self._max_new_tokens + 2, np.int32)
        sent[: 2 + len(ids)] = [len(ids), bool(rows) and rows[-1]["is_last"], *ids]
        count, stopped, *padded = broadcast(sent).tolist()
        return Saved(ids=padded[:count], stopped=bool(stopped))

    def add(self, token: int) -> None:
        """Takes one more token; writes a batch when it is full."""
        with interrupts.lock:
            self._pending.append(token)
            if len(self._pending) == self._every:
                self._write(is_last=False)

    def save(self) -> None:
        """Writes the tokens that have come since the last batch; an interrupted command calls it."""
        if self._pending:
            self._write(is_last=False)

    def close(self, *, stopped: bool) -> None:
        """Writes the last batch; `stopped` where a stop token came after it."""
        if self._pending or stopped:
            self._write(is_last=stopped)

    def _write(self, *, is_last: bool) -> None:
        with interrupts.lock:
            if self._writer is not None:
                self._writer.append({"first": self._count, "ids": self._pending, "is_last": is_last})
            self._count += len(self._pending)
            self._pending = []


def _check_prompt(path: pathlib.Path, generation: Mapping[str, Any]) -> None:
    """Raises ValueError where the folder holds the tokens of another prompt, in words: ids of tokens say nothing."""
    is_prompt = False
    with contextlib.suppress(OSError, ValueError, TypeError):  # `RowWriter` says what is wrong
        there = dict(json.loads(path.read_bytes()))
        others = [name for name in generation if there.get(name) != generation[name]]
        is_prompt = others == ["prompt_ids"]
    if is_prompt:
        raise ValueError(f"{path.parent} holds the tokens of another prompt: give that --prompt, or another --out")


def _problem(row: Mapping[str, Any], count: int, vocab_size: int, *, is_end: bool) -> str | None:
    """Returns the reason why a line cannot follow `count` tokens; None where it can.

    Args:
      is_end: no line follows it.
    """
    missing = [name for name in ("first", "ids", "is_last") if name not in row]
    if missing:
        return f"{', '.join(missing)} must be there, got {', '.join(row) or 'nothing'}"
    first, ids, is_last = row["first"], row["ids"], row["is_last"]
    if not isinstance(is_last, bool):
        return f"is_last must be true or false, got {is_last!r}"
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        return f"ids must be a list of integers from 0 to {vocab_size - 1}, got {str(ids)[:80]}"
    if type(first) is not int or first != count:
        return f"first must be {count}, the number of tokens before it, got {first!r}: a line is missing or doubled"
    if is_last and not is_end:
        return "is_last must be false where lines follow, got true"
    if not ids and not is_last:
        return "ids must hold a token or more unless is_last is true, got none"
    return None
