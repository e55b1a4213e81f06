"""The extras of the package: the command that installs one, for errors about packages that are missing."""

import pathlib
import shlex


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
