"""The public documents against reality: examples run, tables come from rows, the tree names every file."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from test_imports import ORDER

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SITE_FOLDERS = ("concepts", "how-to", "kernels", "reference")
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS += [ROOT / "SECURITY.md"]
DOCUMENTS += [path for folder in SITE_FOLDERS for path in sorted((ROOT / "docs" / folder).glob("*.md"))]
DECODING, CHECKPOINT = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)

# Runs after the README's loop, with its names: prompt and new tokens in their natural order, attended to all at once.
COMPARE_WITH_DENSE = """
import numpy as np
from dense import dense_attention

query, key, value = (jnp.concatenate(parts, axis=1) for parts in zip(draw(0, 1000), *(draw(i, 1) for i in (1, 2, 3))))
expected, _ = dense_attention(query, key, value, is_causal=True)
np.testing.assert_allclose(prompt_out, expected[:, :1000], atol=1e-5)
np.testing.assert_allclose(out, expected[:, -1:], atol=1e-5)
"""

# One process runs all scripts, each as `python3 SCRIPT ARGUMENTS` would: most of a script's time is the import of JAX.
RUN_SCRIPTS = """
import contextlib, io, json, os, runpy, sys

tests, root = os.path.abspath("tests"), os.getcwd()  # not on a script's path
printed, path = [], [place for place in sys.path if place and os.path.abspath(place) not in (tests, root)]
for command in {}:
    sys.argv, sys.path = command, [os.path.dirname(os.path.abspath(command[0])), *path]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            runpy.run_path(command[0], run_name="__main__")
        except SystemExit as ended:
            assert not ended.code, ended.code
    printed.append(out.getvalue())
print(json.dumps(printed))
"""


def run(source: str) -> str:
    """Runs Python source in an interpreter of its own, for it chooses its devices, and returns what it prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_decode_loop_equals_dense_attention():
    # The import of tree_attn comes first in it, so this also shows that the import touches no device.
    assert run(DECODING + COMPARE_WITH_DENSE) == "(1, 1, 8, 64) [1003]"


def test_the_checkpoint_answers():
    assert run(CHECKPOINT) == "The capital of France is Paris."


def test_the_readme_is_short_and_has_its_two_commands():
    assert len(README.encode()) <= 9_000
    assert re.search(r"^python3 -m pip install .* && tree-attn demo$", README, flags=re.MULTILINE)
    assert re.search(r"^python3 -m pip install .* && python3 -m pytest$", README, flags=re.MULTILINE)


def test_the_picture_is_made_by_the_command_beside_it(tmp_path):
    (script, picture) = re.search(r"`python3 (scripts/\S+) (docs/figures/\S+)`", README).groups()
    assert f"]({picture})" in README and (ROOT / picture).exists()
    subprocess.run([sys.executable, script, str(tmp_path / "picture.png")], check=True, cwd=ROOT)
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_the_tree_names_what_exists_and_all_of_it():
    (tree,) = re.findall(r"## The tree\n.*?```\n(.*?)```", (ROOT / "docs/architecture.md").read_text(), flags=re.DOTALL)
    named, folders = set(), [ROOT]
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        path = folders[depth] / line.split()[0]
        folders[depth + 1 :] = [path]
        named.add(path)
    assert [str(path) for path in named if not path.exists()] == []
    for folder in ("tree_attn", "ring_baseline", "models", "scripts"):
        modules = {path for path in (ROOT / folder).rglob("*.py") if path.name != "__init__.py"}
        assert sorted(str(path.relative_to(ROOT)) for path in modules - named) == []


def test_the_order_of_imports_is_the_one_that_is_tested():
    section = (ROOT / "docs/architecture.md").read_text().split("## Who imports whom")[1].split("\n## ")[0]
    lines = re.findall(r"^ {4}(.+)$", section, flags=re.MULTILINE)
    assert [set(line.split(", ")) for line in lines] == [set(names) for names in ORDER]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_documents_name_exist(document):
    folders = "tree_attn|models|ring_baseline|scripts|tests|docs|slurm"
    named = re.findall(rf"(?<![\w/-])((?:{folders})/[\w./-]*\w)", document.read_text())
    assert sorted({name for name in named if not (ROOT / name).exists()}) == []


@pytest.mark.parametrize("document, count", [("README.md", 1), ("docs/results.md", 18)])
def test_tables_are_made_from_the_raw_rows(document, count):
    text = (ROOT / document).read_text()
    tables = re.findall(r"<!-- made by: python3 (.*?) -->\n(.*?)<!-- end", text, flags=re.DOTALL)
    assert len(tables) == count
    printed = json.loads(run(RUN_SCRIPTS.format([command.split() for command, _ in tables])))
    assert printed == [table for _, table in tables]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document):
    links = re.findall(r"\]\(([^)#\s]+)", document.read_text())
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (document.parent / link).exists()] == []


def test_rows_name_no_path_of_the_machine_that_made_them():
    absolute = re.compile(r"(?<![\w.\]])/[A-Za-z]\w+/\w")
    found = [path.name for path in (ROOT / "docs" / "results").rglob("*.jsonl") if absolute.search(path.read_text())]
    assert found == []
