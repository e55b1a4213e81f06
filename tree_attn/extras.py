"""Extras of the package, with the command that installs one, and the user's cache folder."""

import importlib.util
import os
import pathlib
import shlex

# Modules that an extra brings, for those that any machine can use.
MODULES = {
    "demo": ("gguf", "tokenizers", "jinja2", "safetensors", "matplotlib"),
    "hub": ("huggingface_hub",),
    "plot": ("matplotlib",),
}


def missing(extra: str) -> tuple[str, ...]:
    """Returns the modules of an extra that are not installed; imports none.

    Example:
      >>> missing("plot")  # where matplotlib is installed
      ()
    """
    return tuple(name for name in MODULES[extra] if importlib.util.find_spec(name) is None)


def cache_dir() -> pathlib.Path:
    """Returns the folder of fetched models and compiled programs: `$XDG_CACHE_HOME/tree-attn`, or in `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(base) if base else pathlib.Path.home() / ".cache") / "tree-attn"


def how_to_install(extra: str) -> str:
    """Returns the command that installs an extra, for the checkout or the installed package that runs.

    A checkout is named by its path: it need not be installed, and the command works from any folder.

    Example:
      >>> print(f"plots need matplotlib: {how_to_install('plot')}")
    """
    root = pathlib.Path(__file__).parent.parent
    is_checkout = (root / "pyproject.toml").exists()
    package = f"-e {shlex.quote(f'{root}[{extra}]')}" if is_checkout else shlex.quote(f"tree-attn[{extra}]")
    return f"python3 -m pip install {package}"
