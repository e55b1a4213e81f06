"""The figures of docs/concepts show the numbers that committed rows have."""

import pathlib

import plot_concepts
import pytest
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
