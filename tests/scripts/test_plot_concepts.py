"""The figures of docs/concepts show the numbers that committed rows have."""

import json
import pathlib

import concept_numbers
import headline_numbers
import plot_concepts
import pytest
import sweep_cases
from concept_numbers import NUMBERS
from PIL import Image


@pytest.mark.parametrize("name", NUMBERS)
def test_a_picture_shows_the_rows_as_they_are(name):
    """Otherwise: `python3 scripts/plot_concepts.py NAME`, and look at it."""
    with Image.open(plot_concepts.FOLDER / f"{name}.png") as picture:
        assert picture.text["Description"] == plot_concepts.digest(NUMBERS[name]())


def test_a_figure_is_drawn(tmp_path: pathlib.Path):
    plot_concepts.draw("links", tmp_path / "links.png")
    assert (tmp_path / "links.png").stat().st_size > 10_000


@pytest.mark.parametrize("name, limit", [("placement", 1.0), ("runs", 28 / 6)])
def test_a_figure_by_formula_has_its_limit(name, limit):
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    plot_concepts.DRAWINGS[name](axes, NUMBERS[name]())
    lines = [line.get_ydata() for line in axes.lines if line.get_linestyle() == ":"]
    lines += [segment[:, 0] for lines in axes.collections for segment in lines.get_segments()]
    assert lines and all(list(line) == pytest.approx([limit] * 2) for line in lines)
    assert any(text.get_text().startswith("limit: ") for text in axes.texts)


def sweep_rows() -> list[dict]:
    """Returns rows as `bench_sweep.py --table` writes them, each way's time a known multiple of reading."""
    ways = {"None": 1.25, "mosaic_gpu": 1.3, "cudnn": 2.0, "cudnn, jax.nn": 1.6, "flashinfer paged": 4.0}
    common = {"git_commit": "abcdef0123", "hardware": "1 x NVIDIA H200", "command": "c", "date": "2026-11-24 01:02:03"}
    rows = []
    for step in sweep_cases.table():
        labels = step.row() | {"title": step.title()} | common
        rows += [labels | {"way": way, "chain_us_median": step.bytes_us * over} for way, over in ways.items()]
    return [*rows, rows[0] | {"way": "flashinfer dense", "chain_us_median": None, "error": "it has none"}]


def test_rows_of_the_sweep_take_the_place_of_older_ones(tmp_path, monkeypatch):
    numbers = concept_numbers.shares_of_the_limit(sweep_rows())
    reads = [step for step in sweep_cases.table() if step.bytes_us >= step.products_us]
    assert 10 < len(reads) == len(numbers["steps"]) < 16
    for way, share in (("cuDNN", 1 / 1.6), ("FlashInfer", 1 / 4), ("mosaic_gpu", 1 / 1.3), ("default", 1 / 1.25)):
        assert numbers["curves"][way] == pytest.approx([share] * len(reads))
    assert "8 x 16k, 32/8 of 128, 4 queries" in numbers["steps"] and "abcdef0" in numbers["source"]
    monkeypatch.setattr(concept_numbers, "RESULTS", tmp_path)
    (tmp_path / "sweep_h200").mkdir()
    (tmp_path / "sweep_h200" / "fixed.jsonl").write_text("\n".join(map(json.dumps, sweep_rows())))
    plot_concepts.draw("shares", tmp_path / "shares.png")
    with Image.open(tmp_path / "shares.png") as picture:
        assert picture.text["Description"] == plot_concepts.digest(numbers)
    monkeypatch.setattr(headline_numbers, "RESULTS", tmp_path)
    (tmp_path / "sweep_h200" / "README.md").write_text("no date")
    number, what, *_, commit, date, _ = headline_numbers.share()
    assert (number, commit, date) == ("80%", "abcdef0", "2026-11-24") and f"{len(reads)} steps" in what


@pytest.mark.parametrize("name", NUMBERS)
def test_a_picture_is_small(name):
    assert (plot_concepts.FOLDER / f"{name}.png").stat().st_size < 60_000
