"""The checker of annotations in tests: `tests/conftest.py` installs it over the modules of attention."""

from beartype import beartype


def checked(function):
    """Checks a function's annotations in each call; a class may be constructed of anything.

    JAX rebuilds pytrees around placeholders, so the fields of a dataclass are not always arrays.
    """
    return function if function.__qualname__.endswith(".__init__") else beartype(function)
