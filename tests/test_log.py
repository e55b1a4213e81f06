"""The log: headings are unique, links lead somewhere, and what source cites is there."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
LOG = ROOT / "docs" / "log"
SOURCES = [
    path for folder in ("tree_attn", "models", "ring_baseline", "scripts") for path in (ROOT / folder).rglob("*.py")
]


def headings(path: pathlib.Path) -> list[str]:
    return [line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#")]


def anchor(heading: str) -> str:
    """Returns the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def citations() -> list[tuple[str, str]]:
    """Returns (file, heading) of every citation, of the form `docs/log/x.md: "heading", "heading"`."""
    found = []
    for path in SOURCES:
        text = re.sub(r"\n\s*#?\s*", " ", path.read_text())
        for file, quoted in re.findall(r'docs/log/(\w+\.md)[:,] ((?:"[^"]+"(?:, )?)+)', text):
            found += [(file, heading) for heading in re.findall(r'"([^"]+)"', quoted)]
    return found


def test_source_cites_headings_that_exist():
    cited = citations()
    assert len(cited) >= 8
    assert [(file, heading) for file, heading in cited if heading not in headings(LOG / file)] == []


def test_every_mention_of_the_log_in_source_names_a_file():
    mentions = [path for path in SOURCES if re.search(r"docs/log(?!/\w+\.md)", path.read_text())]
    assert mentions == []


@pytest.mark.parametrize("path", sorted(LOG.glob("*.md")), ids=lambda path: path.stem)
def test_headings_are_unique_and_links_resolve(path):
    assert len(set(headings(path))) == len(headings(path))
    for file, fragment in re.findall(r"\]\(([\w./]*)(?:#([^)]*))?\)", path.read_text()):
        target = path.parent / file if file else path
        assert target.exists(), file
        assert not fragment or fragment in map(anchor, headings(target)), fragment


def test_every_folder_of_results_has_a_readme():
    folders = [path for path in (ROOT / "docs" / "results").iterdir() if path.is_dir()]
    assert [path.name for path in folders if not (path / "README.md").is_file()] == []
