"""SLURM's shorthand for lists: node names such as `n[1-3,07],m2`, and tasks per node such as `2(x3),1`."""

import re

_MAX_NODES = 100_000  # a list longer than this is a typing error, and would fill the memory


def expand_hostlist(text: str) -> tuple[str, ...]:
    """Returns node names in order, as `scontrol show hostnames` prints them.

    Raises:
      ValueError: `text` is no host list; names the wrong part.

    Example:
      >>> expand_hostlist("n[1-3,07],m2")
      ('n1', 'n2', 'n3', 'n07', 'm2')
    """
    names = [name for word in _split(text) for name in _expand(word, text)]
    if len(names) > _MAX_NODES:
        raise ValueError(f"{text!r} names more than {_MAX_NODES} nodes")
    return tuple(names)


def expand_counts(text: str) -> tuple[int, ...]:
    """Returns the tasks on each node, in the order of the node list.

    Raises:
      ValueError: `text` is not of this form.

    Example:
      >>> expand_counts("2(x3),1")
      (2, 2, 2, 1)
    """
    counts: list[int] = []
    for word in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word.strip())
        if match is None or int(match[2] or 1) > _MAX_NODES:
            raise ValueError(f"{word!r} is no count such as 2 or 2(x3)")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def _split(text: str) -> list[str]:
    """Cuts at the commas outside brackets."""
    if not re.fullmatch(r"(?:[\w.,-]|\[[\w,-]+\])+", text):
        raise ValueError(f"{text!r} is no list of node names such as n[1-3,07],m2")
    words = re.split(r",(?![^\[]*\])", text)
    if not all(words):
        raise ValueError(f"{text!r} has an empty name")
    return words


def _expand(word: str, text: str) -> list[str]:
    """Returns all names of one word: the first bracket's numbers, each followed by every name of the rest."""
    before, bracket, rest = word.partition("[")
    if not bracket:
        return [word]
    ranges, _, after = rest.partition("]")
    endings = _expand(after, text) if after else [""]
    numbers = [number for part in ranges.split(",") for number in _numbers(part, text)]
    return [before + number + ending for number in numbers for ending in endings]


def _numbers(part: str, text: str) -> list[str]:
    """Returns the numbers of `7`, `07` or `08-11`, as wide as the first one is written."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
    if match is None:
        raise ValueError(f"{part!r} in {text!r} is neither a number nor a range such as 1-3")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first or last - first >= _MAX_NODES:
        raise ValueError(f"{part!r} in {text!r} counts backwards or too far")
    return [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]
