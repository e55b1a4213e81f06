"""docs/papers.md against its rows and against the numbers in the code."""

import pathlib
import re

import papers_page
import pytest

from tree_attn.commands.reproduce import report
from tree_attn.commands.reproduce.experiments import ALL, EXPERIMENTS

PAGE = (pathlib.Path(__file__).parent.parent / "docs" / "papers.md").read_text()
SECTIONS = dict(re.findall(r"^### (\S+)\n(.*?)(?=^##|\Z)", PAGE, flags=re.DOTALL | re.MULTILINE))


def test_the_page_is_made_from_the_rows():
    assert papers_page.page() == PAGE  # else: python3 scripts/papers_page.py > docs/papers.md
    assert list(SECTIONS) == list(EXPERIMENTS)


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
def test_a_section_names_rows_that_exist_or_says_that_there_are_none(one):
    (line,) = re.findall(r"^- \*\*Rows:\*\* (.*)$", SECTIONS[one.name], flags=re.MULTILINE)
    files = re.findall(r"\((results/[^)]*)\)", line)
    assert all((papers_page.RESULTS.parent / file).stat().st_size for file in files)
    assert bool(files) != line.startswith(papers_page.NOT_YET)
    # Rows that are named make a number of the page.
    ours = [cells[1].strip() for cells in tables(SECTIONS[one.name])]
    assert bool(files) == any(ours)


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
def test_the_papers_numbers_on_the_page_are_those_of_the_code(one):
    on_page = {cells[0].strip(): cells[2].strip() for cells in tables(SECTIONS[one.name]) if cells[2].strip()}
    assert on_page == {line.setting: line.paper for line in report.lines(one, []) if line.paper}


@pytest.mark.parametrize(
    "name, words",
    [
        ("lean-figure-8", "64k keys, over fixed split: 1; paper: 2.53"),  # and not the bound before it
        ("tree-figure-3", "91.5; paper: 8 (5,120,000 keys, 128 GPUs, tree allreduce, ring public)"),
        ("hydragen-figure-4", "paper: drawn only"),
    ],
)
def test_the_overview_has_a_number_of_the_paper_where_it_prints_one(name, words):
    (line,) = [line for line in PAGE.splitlines() if line.startswith("|") and f"| `{name}` |" in line]
    assert words in line


def test_a_number_names_its_hardware_where_a_table_is_of_several():
    is_of_several = {
        one.name: not one.cpu_is_true and len(report.hardware(one, papers_page._rows(one))) > 1 for one in ALL
    }
    of_several = [name for name, several in is_of_several.items() if several]
    bifurcated = ["bifurcated-table-6", "bifurcated-table-7", "bifurcated-table-8"]
    assert of_several == ["tree-table-1", "tree-table-2", "tree-figure-4", *bifurcated]
    for name, section in SECTIONS.items():
        ours = [cells[1].strip() for cells in tables(section)]
        named = [re.search(r", [124] x H[12]00$", text) is not None for text in ours if text and text != "does not run"]
        assert all(named) if is_of_several[name] else not any(named)


def tables(section: str) -> list[list[str]]:
    """Returns the cells of the table of a section, without its two first lines."""
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [line.strip("|").split("|") for line in lines[2:]]
