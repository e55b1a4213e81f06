"""Options of every command: `-v`, `-q`, and compiled programs that are kept from one run to the next."""

import argparse
import hashlib
import logging
import os
import pathlib
import platform
import re
import sys

from tree_attn.extras import cache_dir

CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
LEAST_COMPILE_S = 0.2  # programs that compile faster are not kept
COMPILING = ("demo", "generate", "sample", "eval", "bench")  # `compare` measures compilation
NAMES = ("verbose", "quiet", "compilation_cache")


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Adds the options to a command."""
    group = parser.add_argument_group("output")
    group.add_argument(
        "-v", "--verbose", action="count", default=0, help="say on stderr what was picked by default; -vv: and why"
    )
    group.add_argument("-q", "--quiet", action="store_true", help="say nothing on stderr but errors")
    if command in COMPILING:
        group.add_argument(
            "--compilation-cache",
            action=argparse.BooleanOptionalAction,
            default=True,
            help=f"keep compiled programs in the user's cache folder (default), or where ${CACHE_VARIABLE} says",
        )


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
        # The library's words for an argument that was not given.
        text = re.sub(r"^(\w+)=None(:| )", r"\1: ", record.getMessage()).replace(":  ", ": ")
        if text not in self._seen:
            self._seen.add(text)
            print(f"tree_attn: {text}", file=sys.stderr, flush=True)


def cache_folder() -> pathlib.Path:
    """Returns the folder of compiled programs: `$XDG_CACHE_HOME/tree-attn/compiled-...`, or in `~/.cache`.

    Its name ends with a digest of the processor's features: hosts that share a home may have others.
    """
    return cache_dir() / f"compiled-{_processor()}"


def keep_compiled(args: argparse.Namespace) -> pathlib.Path | None:
    """Has JAX keep compiled programs, unless the user says where or that it must not; call it before JAX is imported.

    Returns:
      The folder if nothing is kept there yet, else None.
    """
    is_wanted = getattr(args, "compilation_cache", False) and CACHE_VARIABLE not in os.environ
    if not is_wanted or "jax" in sys.modules:
        return None
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_new = not any(folder.iterdir())
    except OSError:  # a home that cannot be written to: everything is compiled anew
        return None
    os.environ[CACHE_VARIABLE] = str(folder)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", str(LEAST_COMPILE_S))
    return folder if is_new else None


def _processor() -> str:
    features = platform.machine()
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(features.encode()).hexdigest()[:8]
