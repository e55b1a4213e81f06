"""The site of the documents: its programs print what they say, and the reference has every public name.

CI builds it: `sphinx-build -W --keep-going -q docs site`.
"""

import functools
import re
import subprocess
import sys

import pytest
from pages import DOCS, assert_prints_what_it_says, name_of, pages

import tree_attn
from tree_attn import cli, ring_baseline
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


def test_the_reference_has_the_functions_that_pages_tell_to_call():
    text = (DOCS / "reference" / "cost.md").read_text()
    for name in ("spread_transfers", "join_transfers"):
        assert f".. autofunction:: tree_attn.measure.links.{name}\n" in text


@pytest.mark.filterwarnings("ignore:The mapping interface for autodoc options")
def test_properties_have_their_types_in_the_reference(tmp_path):
    application = pytest.importorskip("sphinx.application")
    pytest.importorskip("myst_parser")
    directive = "```{eval-rst}\n.. autoclass:: %s\n   :members:\n```\n"
    shown = {
        "tree_attn.cost.step.DecodeStep": "property hidden_size: int",
        "tree_attn.cost.predict.Prediction": "property latency_us: float",
        "tree_attn.PromptLayout": "property positions: ndarray",
        "tree_attn.Shard": "property runs: tuple[Int[Array, ''] | int, Int[Array, ''] | int]",
    }
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "index.md").write_text("# Types\n\n" + "\n".join(directive % name for name in shown))
    folders = (str(tmp_path / name) for name in ("out", "doctrees"))
    application.Sphinx(str(tmp_path / "pages"), str(DOCS), *folders, "text", status=None, warning=None).build()
    text = (tmp_path / "out" / "index.txt").read_text()
    assert {name for name, line in shown.items() if line not in text} == set()


def test_commands_of_pages_have_the_options_that_they_are_called_with(capsys):
    @functools.cache
    def options_of(*words: str) -> set[str]:
        with pytest.raises(SystemExit, match=r"^0$"):
            cli.main([*words, "--help"])
        lines = re.findall(r"^  (?:-\w.*, )?--.*", capsys.readouterr().out, flags=re.MULTILINE)
        return set(re.findall(r"--[a-z][a-z0-9-]*", "\n".join(lines)))

    calls = re.compile(r"`tree-attn ([a-z][^`]*)`|^tree-attn ((?:.*\\\n)*.*)$", flags=re.MULTILINE)
    found = 0  # in what states the present: the log and the folders of rows have old commands too
    current = [page for page in DOCS.rglob("*.md") if not {"log", "results"} & set(page.relative_to(DOCS).parts)]
    for page in [*current, DOCS.parent / "README.md"]:
        for call in map("".join, calls.findall(page.read_text())):
            words = call.replace("\\\n", " ").split()
            command = words[:2] if words[:2] == ["bench", "llama"] else words[:1]
            options = {word.partition("=")[0] for word in words if word.startswith("--")}
            assert options <= options_of(*command), f"{page.name}: tree-attn {call}"
            found += 1
    assert found > 20


def test_tables_of_posts_are_made_from_the_raw_rows():
    """tests/test_readme.py has README's and those of docs/results.md."""
    tables = re.compile(r"<!-- made by: python3 (.*?) -->\n(.*?)<!-- end", flags=re.DOTALL)
    for page in (DOCS / "kernels").glob("*.md"):
        for command, table in tables.findall(page.read_text()):
            script = [sys.executable, *command.split()]
            assert subprocess.run(script, capture_output=True, text=True, check=True, cwd=DOCS.parent).stdout == table
