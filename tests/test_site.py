"""The site of the documents: its programs print what they say, and the reference has every public name.

CI builds it: `sphinx-build -W --keep-going -q docs site`.
"""

import re
import subprocess
import sys

import pytest
from pages import DOCS, assert_prints_what_it_says, name_of, pages

import tree_attn
from tree_attn import ring_baseline
from tree_attn.models import llama

OF_KERNELS = pages("kernels")  # tests/kernels/test_pages.py has them


@pytest.mark.parametrize("page", sorted(set(pages()) - set(OF_KERNELS)), ids=name_of)
def test_a_page_prints_what_it_says(page):
    assert_prints_what_it_says(page)


@pytest.mark.parametrize("package", [tree_attn, ring_baseline, llama], ids=lambda package: package.__name__)
def test_the_reference_has_every_public_name(package):
    text = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    documented = {name.split(".")[-1] for name in re.findall(r"^\.\. auto\w+:: (\S+)", text, flags=re.MULTILINE)}
    assert set(package.__all__) - documented == set()


def test_tables_of_posts_are_made_from_the_raw_rows():
    """tests/test_readme.py has README's and those of docs/results.md."""
    tables = re.compile(r"<!-- made by: python3 (.*?) -->\n(.*?)<!-- end", flags=re.DOTALL)
    for page in (DOCS / "kernels").glob("*.md"):
        for command, table in tables.findall(page.read_text()):
            script = [sys.executable, *command.split()]
            assert subprocess.run(script, capture_output=True, text=True, check=True, cwd=DOCS.parent).stdout == table
