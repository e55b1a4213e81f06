"""Options of every command: `-v` and `-q`."""

import argparse
import logging
import sys

NAMES = ("verbose", "quiet")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options to a command."""
    group = parser.add_argument_group("output")
    group.add_argument(
        "-v", "--verbose", action="count", default=0, help="say on stderr what was picked by default; -vv: and why"
    )
    group.add_argument("-q", "--quiet", action="store_true", help="say nothing on stderr but errors")


def show_choices(verbose: int) -> None:
    """Sends the logger `tree_attn` to stderr: choices with `-v`, reasons too with `-vv`, each once."""
    logger = logging.getLogger("tree_attn")
    for handler in [one for one in logger.handlers if isinstance(one, _Once)]:
        logger.removeHandler(handler)
    if verbose:
        logger.addHandler(_Once())
        logger.setLevel(logging.INFO if verbose == 1 else logging.DEBUG)


class _Once(logging.Handler):
    """Prints each message once: a choice is made anew for every program that is traced."""

    def __init__(self):
        super().__init__()
        self._seen: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text not in self._seen:
            self._seen.add(text)
            print(f"tree_attn: {text}", file=sys.stderr, flush=True)
