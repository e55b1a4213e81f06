"""The pictures of `tree-attn compare`, from committed rows: every curve named, the limit drawn, nothing covered."""

import itertools
import json
import pathlib

import pytest
from matplotlib.text import Text  # without the stroke of an annotation

from tree_attn.commands.compare import plots, report


@pytest.fixture(scope="module")
def drawn_h200(tmp_path_factory):
    """The pictures of committed rows, laid out."""
    folder = pathlib.Path(__file__).parents[3] / "docs" / "results" / "compare_8xh200_8processes"
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    drawn = {}
    with pytest.MonkeyPatch.context() as patched:
        keep = lambda drawing, path, **_: drawn.update({pathlib.Path(path).stem: drawing})
        patched.setattr("matplotlib.figure.Figure.savefig", keep)
        plots.draw(rows, tmp_path_factory.mktemp("drawn"))
    for drawing in drawn.values():
        drawing.draw_without_rendering()
    return rows, drawn


@pytest.mark.parametrize("name", ["latency", "peak_memory", "communication"])
def test_each_curve_is_named_beside_it_and_no_name_covers_another(drawn_h200, name):
    rows, drawn = drawn_h200
    (axes,) = drawn[name].axes
    labels = {report.label(row) for row in rows} | {plots.PLOTS[name].limit_name}
    assert {text.get_text() for text in axes.texts} == labels
    assert axes.get_legend() is None and not drawn[name].legends
    boxes = sorted((Text.get_window_extent(text) for text in axes.texts), key=lambda box: box.y0)
    assert all(lower.y1 <= upper.y0 + 2 for lower, upper in itertools.pairwise(boxes))
    inside = axes.get_window_extent()
    assert all(box.x0 > inside.x1 and box.x1 <= drawn[name].bbox.x1 for box in boxes)
    assert "8 x NVIDIA H200; commit d6a7619" in axes.get_title(loc="left")
    assert [label.get_text() for label in axes.get_xticklabels()] == ["80k", "640k"]


def test_pictures_show_the_limit(drawn_h200):
    rows, drawn = drawn_h200
    limits = {}
    for name, drawing in drawn.items():
        (line,) = (line for line in drawing.axes[0].get_lines() if line.get_linestyle() == ":")
        limits[name] = [float(y) for y in line.get_ydata()]
    assert limits["latency"] == pytest.approx([4 * n * 16 * 128 / 8 / 4.8e6 for n in (81_920, 640_000)])
    assert limits["peak_memory"] == [4 * n * 16 * 128 / 8 for n in (81_920, 640_000)]
    assert limits["communication"] == [7 / 8 * 4 * 16 * 129] * 2
    for plot in plots.PLOTS.values():  # nothing is below it
        values = [(row[plot.measured], plot.limit(row)) for row in rows if row.get(plot.measured)]
        assert values and all(value >= limit for value, limit in values)


def test_one_length_and_long_hardware_fit_a_picture(drawn_h200, tmp_path):
    hardware = "8 emulated CPU devices (AMD EPYC 9654 96-Core Processor)"
    rows = [row | {"hardware": hardware} for row in drawn_h200[0] if row["num_keys"] == 81_920]
    figures = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("matplotlib.figure.Figure.savefig", lambda drawing, *_, **__: figures.append(drawing))
        plots.draw(rows, tmp_path)
    for drawing in figures:
        drawing.draw_without_rendering()
        (axes,) = drawing.axes
        assert axes.get_xlim() == (40_960, 163_840) and axes._left_title.get_window_extent().x1 <= drawing.bbox.x1
    assert not any(line.get_linestyle() == ":" for line in figures[0].axes[0].get_lines())  # it has no datasheet
