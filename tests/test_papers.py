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
    ours = [cell.strip() for cells in tables(SECTIONS[one.name]) for cell in cells[1:-1]]
    assert bool(files) == any(ours)


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
def test_the_papers_numbers_on_the_page_are_those_of_the_code(one):
    on_page = {cells[0].strip(): cells[-1].strip() for cells in tables(SECTIONS[one.name]) if cells[-1].strip()}
    assert on_page == {line.setting: line.paper for line in report.lines(one, []) if line.paper}


@pytest.mark.parametrize(
    "name, words",
    [
        ("lean-figure-8", "64k keys, over fixed split: 1.00, 1 x H100; paper: 2.53"),  # and not the bound before it
        ("tree-figure-3", "91.5; paper: 8 (5,120,000 keys, 128 GPUs, tree allreduce, ring public)"),
        ("hydragen-figure-4", "paper: drawn only"),
        ("hydragen-figure-6", "128 sequences): 0.464, 1 x H100; paper: 0.82"),
        ("bifurcated-table-7", "8k tokens, batch 16, shared: "),  # of one sequence nothing is shared
    ],
)
def test_the_overview_has_a_number_of_the_paper_where_it_prints_one(name, words):
    (line,) = [line for line in PAGE.splitlines() if line.startswith("|") and f"| `{name}` |" in line]
    assert words in line


def test_a_table_has_a_column_for_each_hardware():
    titles = {name: re.findall(r"ours(?:, [124] x H[12]00)?(?= \|)", section) for name, section in SECTIONS.items()}
    pairs = ["ours, 1 x H100", "ours, 1 x H200"], ["ours, 2 x H100", "ours, 2 x H200"]
    several = {
        "tree-table-1": ["ours, 2 x H100", "ours, 4 x H100", "ours, 2 x H200", "ours, 4 x H200"],
        "tree-table-2": pairs[1],
        "tree-figure-4": pairs[1],
        "lean-figure-8": pairs[0],
        "lean-figure-7": pairs[0],
        "bifurcated-table-6": pairs[0],
        "bifurcated-table-7": pairs[0],
        "bifurcated-table-8": pairs[1],
        "hydragen-figure-3": ["ours, 1 x H200", "ours, 4 x H200"],
        "hydragen-figure-5": pairs[0],
        "hydragen-figure-6": pairs[0],
    }
    assert titles == {name: several.get(name, ["ours"]) for name in EXPERIMENTS}


@pytest.mark.parametrize(
    "name, setting, numbers",
    [
        ("tree-table-1", "256k tokens, tree, weights replicated", ["20.9 ± 0.54", "", "", "9.89 ± 0.0042"]),
        ("lean-figure-8", "512k keys, over fixed split", ["does not run", "0.984"]),
        ("bifurcated-table-8", "32,640 tokens, batch 128, shared", ["", "10.1"]),
        ("hydragen-figure-3", "2k tokens shared, batch 1,024, shared", ["", "22.1"]),
        ("sparq-figure-8", "4k keys, SparQ in XLA", ["0.712"]),
    ],
)
def test_a_column_has_the_numbers_of_its_hardware(name, setting, numbers):
    (cells,) = [cells for cells in tables(SECTIONS[name]) if cells[0].strip() == setting]
    assert [cell.strip() for cell in cells[1:-1]] == numbers


def tables(section: str) -> list[list[str]]:
    """Returns the cells of the table of a section, without its two first lines."""
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [line.strip("|").split("|") for line in lines[2:]]
