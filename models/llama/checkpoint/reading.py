"""One kind of error for all files of a checkpoint, whatever their bytes, and the reading of JSON and text."""

import collections
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class CheckpointError(ValueError):
    """A file of a checkpoint is damaged, or is not what the model needs; the message names the file."""


@contextlib.contextmanager
def blaming(name: str, doing: str = "") -> Iterator[None]:
    """Raises CheckpointError, which names the file `name`, for any error within; `doing` begins the reason.

    Errors of a missing package pass, and so does an interruption. The tokenizers package raises bare `Exception`.
    Its panics derive from `BaseException` and have a class that cannot be imported.
    """
    try:
        yield
    except (CheckpointError, ImportError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        text = " ".join((reason or type(error).__name__).split())
        raise CheckpointError(f"{shortened(name)}: {doing}{shortened(text, 500)}") from None


def shortened(text: str, max_length: int = 200) -> str:
    """Returns a text of a file for a message of one line: cut if it is long, and what cannot be printed escaped."""
    text = text if len(text) <= max_length else text[:max_length] + "..."
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def read_text(path: Path) -> str:
    """Reads a file of UTF-8; raises CheckpointError that names the file."""
    with blaming(path.name):
        if not path.exists():
            raise CheckpointError(f"{shortened(path.name)} is missing from {path.parent}")
        if not path.is_file():  # a pipe would be waited for
            raise CheckpointError(f"{shortened(path.name)}: must be a file")
        return path.read_text(encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file; raises CheckpointError that names the file."""
    text = read_text(path)
    with blaming(path.name, "not JSON: "):
        try:
            content = json.loads(text, object_pairs_hook=unique)
            if "\\ud" in text.lower():  # escapes may be halves of characters, which no text can hold
                json.dumps(content, ensure_ascii=False).encode()
        except RecursionError:
            raise CheckpointError(f"{path.name}: not JSON that can be read: it is nested too deeply") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path.name}: must hold a JSON object")
    return content


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object's members as a dictionary; raises ValueError if a name occurs twice."""
    members = dict(pairs)
    if len(members) < len(pairs):
        twice = collections.Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{twice!r:.200} occurs twice in one object")
    return members
