"""Values of options that several commands read: lists of integers, lower bounds, files and folders."""

import argparse
import contextlib
import pathlib
from collections.abc import Callable, Iterator


def integers(text: str) -> list[int]:
    """Reads integers separated by commas, e.g. "8192,65536".

    Raises:
      ValueError: a part is no integer.
    """
    return [int(part) for part in text.split(",") if part]


def integers_like(example: str) -> Callable[[str], list[int]]:
    """Returns `integers` as the type of an option; its error shows `example`."""

    def read(text: str) -> list[int]:
        try:
            return integers(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be integers such as {example}, got {text!r}") from None

    return read


def words(text: str) -> list[str]:
    """Reads words separated by commas, e.g. "tree,ring"."""
    return [word.strip() for word in text.split(",") if word]


def integers_in(option: str, text: str, *, minimum: int = 1, maximum: int | None = None) -> list[int]:
    """Returns the integers in the value of an option, one or more, each from `minimum` to `maximum`.

    Raises:
      ValueError: anything else; names the option, e.g. "--context".
    """
    try:
        found = integers(text)
    except ValueError:
        found = []
    if not found or min(found) < minimum or (maximum is not None and max(found) > maximum):
        upper = "" if maximum is None else f" and at most {maximum}"
        raise ValueError(f"{option} must be integers of at least {minimum}{upper}, separated by commas, got {text!r}")
    return found


def check_at_least(args: argparse.Namespace, **bounds: int) -> None:
    """Raises ValueError, naming the option, where `args` has a number below its bound; None is no number.

    Example:
      >>> check_at_least(args, devices=1, new_tokens=2)
    """
    for name, bound in bounds.items():
        value = getattr(args, name)
        if value is not None and value < bound:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {bound}, got {value}")


def check_folder(option: str, path: pathlib.Path | None) -> None:
    """Raises ValueError, naming the option, where a path is neither a folder nor may become one; None is no path."""
    if path is not None:
        nearest = next(one for one in (path, *path.absolute().parents) if one.exists())
        if not nearest.is_dir():
            raise ValueError(f"{option} must be a folder, got {path}: {nearest} is a file")


@contextlib.contextmanager
def reading(option: str, path: pathlib.Path) -> Iterator[None]:
    """Names the option and the file in errors of the block, which reads it.

    Raises:
      ValueError: the file cannot be read, or is no UTF-8 text.
    """
    try:
        yield
    except OSError as error:
        raise ValueError(f"{option} must be a file that can be read, got {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        wrong = f"byte {error.object[error.start]:#04x} at {error.start}"
        raise ValueError(f"{option} must be UTF-8 text, got {path}: {wrong} is none") from error
