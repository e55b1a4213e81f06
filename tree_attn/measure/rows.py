"""The one writer of result files (JSON Lines, one row a line), for commands and scripts; and how tables name a row."""

import errno
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from tree_attn.topology import is_first_process


class RowWriter:
    """Rows in a file, one JSON object a line; each is on disk before `append` returns.

    A row is in the file whole or not at all. A process that dies while writing leaves a torn last line: the next writer
    drops it, and the run can be continued. The options that all rows share (`sweep`) lie in a file beside them, for
    `results.jsonl` in `results.sweep.json`, so that rows of two sweeps never mix. One writer at a time.

    In a run of several processes the first one writes. The others keep their own rows in memory, touch no file, and
    call the same methods.

    Attributes:
      path: the file.
      rows: the rows in it, those of earlier runs first; in a process that does not write, those of this process.
      is_writer: whether this process writes.

    Example:
      >>> writer = RowWriter("results.jsonl", sweep={"seed": 0})
      >>> writer.append({"latency_us_median": 35.2})
      >>> writer.rows
      [{'latency_us_median': 35.2}]
    """

    def __init__(
        self,
        path: str | os.PathLike,
        sweep: Mapping[str, Any] | None = None,
        *,
        is_writer: bool | None = None,
        kind: str = "sweep",
    ):
        """Opens `path`, created with its folder if it does not exist, and reads its rows.

        Args:
          path: the file of rows, by convention `*.jsonl`.
          sweep: what all rows of the file have in common; None writes and checks nothing.
          is_writer: whether this process writes; default: `tree_attn.topology.is_first_process()`.
          kind: word for what `sweep` describes, in errors.

        Raises:
          ValueError: a line other than a torn last one is not a JSON object (names the file and the line); or the
            rows in the file belong to another sweep (names the differences).
        """
        self.path = pathlib.Path(path)
        self.is_writer = is_first_process() if is_writer is None else is_writer
        self.rows: list[dict] = []
        self._size = 0
        if not self.is_writer:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if sweep is not None:
            _check_sweep(self.path.with_suffix(".sweep.json"), json.loads(json.dumps(sweep)), kind)
        self._size = _drop_torn_line(self.path)
        self.rows = read(self.path) if self._size else []

    def append(self, row: Mapping[str, Any]) -> None:
        """Writes one row and waits until it is on disk.

        Raises:
          OSError: the row could not be written whole (a full disk, say); the file then ends after the row before it.
            Or another process has written to the file.
        """
        if self.is_writer:
            self._write(_line(row))
        self.rows.append(dict(row))

    def replace(self, index: int, row: Mapping[str, Any]) -> None:
        """Writes `row` in the place of `rows[index]`; at every moment the file holds one of the two."""
        rows = [*self.rows[:index], dict(row), *self.rows[index + 1 :]]
        if self.is_writer:
            content = b"".join(_line(one) for one in rows)
            write_atomically(self.path, content)
            self._size = len(content)
        self.rows = rows

    def _write(self, line: bytes) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            size = os.fstat(descriptor).st_size
            if size != self._size:
                raise OSError(f"{self.path} has {size} bytes and not {self._size}: another process writes to it")
            self._write_whole(descriptor, line)
        finally:
            os.close(descriptor)
        if not self._size:
            _sync_folder(self.path.parent)  # a new file's name has to reach the disk too
        self._size += len(line)

    def _write_whole(self, descriptor: int, line: bytes) -> None:
        try:
            # One call: other programs then see all of the line or nothing of it, unless the disk fills within it.
            if os.write(descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(descriptor)
        except OSError as error:
            os.ftruncate(descriptor, self._size)
            raise OSError(
                error.errno,
                f"{error.strerror}: row {len(self.rows) + 1} of {self.path} could not be written; the "
                f"{len(self.rows)} rows before it are whole, and a rerun continues after them",
            ) from error


class MeasuredRows(RowWriter):
    """Rows of measurements and checks: what one does not say of its origin is added as it is written.

    That is `tree_attn.measure.provenance.ORIGIN`: date, host, driver, clocks and commit.

    Example:
      >>> MeasuredRows("results.jsonl").append({"latency_us_median": 35.2})
    """

    def append(self, row: Mapping[str, Any]) -> None:
        """Writes one row, as `RowWriter.append` does, with its origin."""
        super().append(self._completed(row))

    def replace(self, index: int, row: Mapping[str, Any]) -> None:
        """Writes `row` in the place of `rows[index]`, with its origin."""
        super().replace(index, self._completed(row))

    def _completed(self, row: Mapping[str, Any]) -> dict[str, Any]:
        from tree_attn.measure import provenance  # loads JAX

        return provenance.completed(row) if self.is_writer else dict(row)


def read(path: str | os.PathLike) -> list[dict]:
    """Reads the rows of a file.

    Raises:
      ValueError: a line is not a JSON object; names the file and the line.
    """
    rows = []
    for number, line in enumerate(pathlib.Path(path).read_bytes().splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}, is not JSON ({error}): {line[:80]!r}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}, is not a JSON object: {line[:80]!r}")
        rows.append(row)
    return rows


def write_atomically(path: pathlib.Path, content: bytes) -> None:
    """Replaces a file by one with this content, on disk; after a crash the old file or the new one exists, whole."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise OSError(error.errno, f"{error.strerror}: {path} could not be written, and is as it was") from error
    _sync_folder(path.parent)


def strategy_label(strategy: str, reduction: str | list[str] | tuple[str, ...] | None) -> str:
    """Returns the name of a strategy in tables and figures: "tree gather", "tree fused + gather", "ring overlapped".

    Example:
      >>> strategy_label("tree", ("fused", "gather"))
      'tree fused + gather'
    """
    if not reduction:
        return strategy.replace("_", " ")
    return f"tree {reduction if isinstance(reduction, str) else ' + '.join(reduction)}"


def _drop_torn_line(path: pathlib.Path) -> int:
    """Cuts the last line off if it has no newline; returns the size of the file, 0 if there is none."""
    if not path.exists():
        return 0
    content = path.read_bytes()
    complete = content.rfind(b"\n") + 1
    if complete < len(content):
        with path.open("r+b") as file:
            file.truncate(complete)
            os.fsync(file.fileno())
    return complete


def _check_sweep(path: pathlib.Path, sweep: dict[str, Any], kind: str) -> None:
    """Writes `sweep` to `path`, or raises ValueError if the file holds another one."""
    if not path.exists():
        write_atomically(path, json.dumps(sweep, indent=1).encode() + b"\n")
        return
    try:
        there = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} should say which {kind} lies here, and is not a JSON object: {error}") from error
    differences = [
        f"{name} is {_words(there.get(name))} there and {_words(sweep.get(name))} here"
        for name in dict.fromkeys([*there, *sweep])
        if there.get(name) != sweep.get(name)
    ]
    if differences:
        raise ValueError(
            f"{path.parent} holds the results of another {kind}: {'; '.join(differences)}. Give the same options to "
            f"continue that {kind}, or another folder to begin this one"
        )


def _words(value: Any) -> str:
    return "left out" if value is None else repr(value)


def _line(row: Mapping[str, Any]) -> bytes:
    # allow_nan=False: NaN is not JSON, and a row that other tools cannot read is worse than an error here.
    return (json.dumps(row, allow_nan=False) + "\n").encode()


def _sync_folder(folder: pathlib.Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems have no such call
            raise
    finally:
        os.close(descriptor)
