"""The programs of documents: the Python of a page is one program, and a comment behind a `print` is what it prints."""

import contextlib
import io
import pathlib
import re

DOCS = pathlib.Path(__file__).parent.parent / "docs"
PROGRAM = re.compile(r"^```python\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
PRINTED = re.compile(r"^ *print\(.*\)  # (.*)$", flags=re.MULTILINE)


def pages(*folders: str) -> list[pathlib.Path]:
    """Returns the pages of these folders of docs, or of all, that have a program."""
    paths = [path for folder in folders or [""] for path in (DOCS / folder).rglob("*.md")]
    return sorted(path for path in paths if PROGRAM.search(path.read_text()))


def assert_prints_what_it_says(page: pathlib.Path) -> None:
    """Runs a page's program."""
    source = "\n".join(PROGRAM.findall(page.read_text()))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(source, page, "exec"), {"__name__": page.stem})
    assert printed.getvalue().splitlines() == PRINTED.findall(source)


def name_of(page: pathlib.Path) -> str:
    """Returns the page's name, as tests show it."""
    return str(page.relative_to(DOCS))
