"""`tree-attn figures`: what was measured stays apart from what is predicted, in numbers, tables and drawings."""

import dataclasses
import json
import pathlib
import re

import pytest
from fake_machine import make_machine

from tree_attn import cli
from tree_attn.commands.figures import paper, plots, report, rows
from tree_attn.commands.figures.paper import GPUS, LENGTHS
from tree_attn.cost import machine, predict
from tree_attn.extras import how_to_install

RESULTS = pathlib.Path(__file__).parents[3] / "docs" / "results" / "compare_4xh200_4processes"
H200 = machine.load("NVIDIA H200")
NAMES = {"3": "figure_3", "4": "figure_4", "equations": "equations"}


@pytest.fixture(scope="module")
def measured() -> list[dict]:
    return rows.read([RESULTS])


def values(figure, panel: str, series: str, is_measured: bool) -> dict[int, float]:
    chosen = (panel, series, is_measured)
    return {p.x: p.y for p in figure.points if (p.panel, p.series, p.is_measured) == chosen}


def test_figure_3_measures_where_there_are_rows_and_predicts_to_128(measured):
    figure = paper.figure_3(measured, H200)
    us = {row["strategy"]: row["latency_us_median"] for row in measured if row["num_keys"] == 640_000}
    assert values(figure, "640k keys", "ring overlapped", True) == {4: us["ring_overlapped"]}
    assert set(values(figure, "640k keys", "tree", False)) == set(GPUS)
    assert values(figure, "5.12M keys", "tree", True) == {}
    assert set(values(figure, "5.12M keys", "ring public", False)) == set(GPUS)


def test_figure_3_is_over_gpus_for_the_length_that_most_numbers_of_them_measured(measured):
    on_two = [row | {"n_devices": 2, "axis_sizes": [2]} for row in measured if row["num_keys"] == 81_920]
    figure = paper.figure_3([*measured, *on_two], H200)
    assert set(figure.axes) == {"over keys", "80k keys", "5.12M keys", paper.RATIOS}
    assert set(values(figure, "80k keys", "ring overlapped", True)) == {2, 4}


def test_figure_3_has_the_papers_ratio_beside_ours(measured):
    figure = paper.figure_3(measured, H200)
    here = [row for row in measured if row["num_keys"] == 640_000]
    us = {(row["strategy"], row["reduction"]): row["latency_us_median"] for row in here}
    ratio = us["ring_public", None] / us["tree", "allreduce"]
    assert values(figure, paper.RATIOS, "640k keys", True) == {4: pytest.approx(ratio)}
    assert values(figure, paper.RATIOS, "the paper, 5.12M keys", True) == {128: 8}
    assert set(values(figure, paper.RATIOS, "5.12M keys", False)) == set(GPUS) - {1}


def test_figure_3_takes_the_best_tree_and_keeps_the_papers(measured):
    figure = paper.figure_3(measured, H200)
    trees = {row["reduction"]: row["latency_us_median"] for row in measured if row["num_keys"] == 640_000}
    assert values(figure, "640k keys", "tree", True) == {4: trees["gather"]}
    assert values(figure, "640k keys", "tree allreduce", True) == {4: trees["allreduce"]}


def test_figure_3_is_relative_to_the_ring_with_the_fewest_keys_on_as_many_gpus(measured):
    figure = paper.figure_3(measured, H200)
    assert values(figure, "over keys", "ring overlapped, 4 GPUs", True)[81_920] == 1
    predicted = values(figure, "over keys", "ring overlapped, 128 GPUs", False)
    longer = {keys for keys in LENGTHS if keys > 640_000}
    assert predicted[81_920] == 1 and set(predicted) == {81_920, 640_000, *longer}
    us = {(row["strategy"], row["reduction"], row["num_keys"]): row["latency_us_median"] for row in measured}
    expected = us["tree", "gather", 640_000] / us["ring_overlapped", None, 81_920]
    assert values(figure, "over keys", "tree, 4 GPUs", True)[640_000] == expected


def test_figure_3_has_no_relative_series_where_the_ring_with_the_fewest_keys_was_not_measured(measured):
    longer = [row for row in measured if row["num_keys"] > 81_920 and len(row["axis_sizes"]) == 1]
    on_eight = [row | {"n_devices": 8, "axis_sizes": [8]} for row in longer]
    figure = paper.figure_3([*measured, *on_eight], H200)
    assert values(figure, "over keys", "ring overlapped, 4 GPUs", True)
    assert values(figure, "over keys", "ring overlapped, 8 GPUs", True) == {}
    assert values(figure, "over keys", "ring overlapped, 8 GPUs", False)[81_920] == 1
    assert set(values(figure, "640k keys", "ring overlapped", True)) == {4, 8}


def test_figure_3_predicts_two_axes_beyond_a_node(measured):
    """128 GPUs are 16 nodes of 8, so that the best tree is the best reduction over two axes."""
    predicted = values(paper.figure_3(measured, H200), "5.12M keys", "tree", False)
    step = dataclasses.replace(rows.step(measured[0]), num_keys=5_120_000, n_devices=128)
    best = predict.predict_step(step, "tree", ("fused", "gather"), machine=H200, axis_sizes=(8, 16))
    assert predicted[128] == best.latency_us


def test_every_row_is_compared_with_the_model(measured):
    compared = paper.figure_3(measured, H200).comparisons
    assert [one["error"] for one in compared] == [
        rows.predicted_us(row, H200) / row["latency_us_median"] - 1 for row in measured
    ]


def test_figure_4_doubles_with_the_hidden_size(measured):
    figure = paper.figure_4(measured)
    panel = "4 GPUs, 640k keys"
    predicted = values(figure, panel, "tree", False)
    assert predicted[4096] / predicted[2048] == pytest.approx(2, rel=1e-3)
    assert values(figure, panel, "tree", True)[2048] == pytest.approx(predicted[2048], rel=1e-3)
    ratio = values(figure, panel, "ring by equation 8", False)[2048] / predicted[2048]
    assert ratio == pytest.approx(2, rel=1e-3)


def test_equations_draw_every_number_of_gpus_that_was_measured(measured):
    """One number of GPUs may have a length that the others lack."""
    on_two = [row | {"n_devices": 2, "axis_sizes": [2]} for row in measured]
    longer = [row | {"num_keys": 1_280_000} for row in on_two if row["num_keys"] == 640_000]
    figure = paper.equations([*measured, *on_two, *longer])
    for panel in figure.axes:
        assert set(values(figure, panel, "ring public", True)) == {2, 4}


def test_equations_and_programs_send_the_same(measured):
    figure = paper.equations(measured)
    by = {one["by"]: one["error"] for one in figure.comparisons}
    for name in ("equation 9", "equation 10", "equation 10, less one hop", "equation 14", "program_memory_bytes"):
        assert by[name] == pytest.approx(0, abs=0.002)
    assert by["equation 8"] == pytest.approx(-1 / 3, abs=0.002)  # docs/peak_memory.md
    assert values(figure, "sent (equations 10 to 14)", "tree allreduce", True) == {4: 12_480}


def test_tiny_rows_of_one_gpu_and_a_machine_of_ones_own(tmp_path, measured, capsys):
    shape = dict(num_keys=64, num_heads=2, num_kv_heads=1, head_dim=16, n_devices=1, axis_sizes=[1])
    tiny = [row | shape | {"hardware": "1 x fake"} for row in measured[:5] if row["reduction"] != "hierarchical"]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tiny))
    machine.write(make_machine(), tmp_path / "machine.json")
    for figure in NAMES:
        options = ["--rows", str(tmp_path), "--machine", str(tmp_path / "machine.json"), "--out", str(tmp_path / "new")]
        assert cli.main(["figures", figure, *options, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        ours = [point for point in document["points"] if not point["series"].startswith("the paper")]
        assert {point["x"] for point in ours if point["is_measured"]} <= {1, 64, 32}
        assert pathlib.Path(document["files"]["drawing"]).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("figure", NAMES)
def test_tables_mark_what_was_measured(figure, tmp_path, capsys):
    assert cli.main(["figures", figure, "--rows", str(RESULTS), "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "PREDICTED" in text and "median error by" in text
    # Values in the units of the other commands, and words for names of functions and files.
    assert "e+0" not in text and not re.search(r",[0-9]{3},[0-9]{3},[0-9]{3}|[-+]0\.0%|hollow|program_memory", text)
    assert "measured; others PREDICTED" in " ".join(text.split()) and re.search(r"[0-9] (us|[kMG]B)\*", text)
    assert max(len(line) for line in text.splitlines() if line.startswith(" ")) <= 80
    assert (tmp_path / f"{NAMES[figure]}.png").is_file()


def test_what_is_predicted_is_drawn_hollow_and_dashed(measured, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda drawing, *_, **__: drawn.append(drawing))
    plots.draw(paper.figure_3(measured, H200), tmp_path / "x.png", [])
    lines = [line for plot in drawn[0].axes for line in plot.get_lines()]
    styles = {
        kind: {(line.get_linestyle(), line.get_fillstyle()) for line in lines if line.get_label().endswith(kind)}
        for kind in ("measured", "predicted")
    }
    assert styles == {"measured": {("-", "full")}, "predicted": {("--", "none")}}


@pytest.mark.parametrize("name", NAMES.values())
def test_curves_are_named_beside_them_and_limits_are_drawn(measured, tmp_path, monkeypatch, name):
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda drawing, *_, **__: drawn.append(drawing))
    figure = paper.figure_3(measured, H200) if name == "figure_3" else getattr(paper, name)(measured)
    plots.draw(figure, tmp_path / "x.png", [*rows.setting(measured), "a remark"])
    panels = dict(zip(figure.axes, drawn[0].axes))
    for panel, axes in panels.items():
        series = {point.series for point in figure.points if point.panel == panel}
        limit = [figure.limits[panel][0]] if panel in figure.limits else []
        assert sorted(text.get_text() for text in axes.texts) == sorted([*series, *limit])
        assert axes.get_legend() is None
        dotted = [line for line in axes.get_lines() if line.get_linestyle() == ":"]
        assert len(dotted) == len(limit)
        for line in dotted:  # no measured point is below it
            limits = dict(zip(map(int, line.get_xdata()), line.get_ydata(), strict=True))
            points = [point for point in figure.points if (point.panel, point.is_measured) == (panel, True)]
            assert all(point.y >= 0.999 * limits[point.x] for point in points if point.x in limits)
    assert "4 x NVIDIA H200; commit" in drawn[0].get_suptitle()
    assert set(figure.limits) == set(figure.axes) - {"over keys", paper.RATIOS}


def test_without_matplotlib_it_prints_the_numbers_and_says_how_to_install_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert cli.main(["figures", "3", "--rows", str(RESULTS), "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert how_to_install("plot") in text and "median error by" in text
    assert list(tmp_path.iterdir()) == []


def test_the_last_words_compare_ring_and_tree(measured):
    us = {
        row["reduction"] or row["strategy"]: row["latency_us_median"] for row in measured if row["num_keys"] == 640_000
    }
    ratio = us["ring_overlapped"] / us["gather"]
    first, second = report.conclusions(paper.figure_3(measured, H200))
    assert re.search(r"takes [0-9],[0-9]{3} times as long as tree\.$", second)
    assert first == f"640k keys, 4 GPUs, measured: ring overlapped takes {ratio:.0f} times as long as tree."
    assert second.startswith("5.12M keys, 128 GPUs, PREDICTED: ring overlapped takes ")
    memory = report.conclusions(paper.figure_4(measured))
    assert memory[0].endswith("640k keys, measured: ring public holds 3.0 times as much as tree.")
    assert len(memory) == 1  # over keys and over hidden sizes the largest rows are the same


def test_the_error_is_that_of_all_and_of_each_kind(tmp_path, capsys):
    assert cli.main(["figures", "3", "--rows", str(RESULTS), "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "median error by the cost model: 10.4% of 10 rows (tree 10.4% of 6, ring 23.8% of 4)" in text
    assert "links across nodes: assumed: InfiniBand" in text
    assert cli.main(["figures", "3", "--rows", str(RESULTS), "--out", __file__]) == 2
    assert f"--out must be a folder, got {__file__}" in capsys.readouterr().err


def test_emulated_devices_have_no_times_to_predict_and_bytes_as_any(tmp_path, measured, capsys):
    hardware = [f"{count} emulated CPU devices on 2 cores (x86_64)" for count in (4, 8)]
    rows = [measured[0] | {"hardware": hardware[i], "n_devices": count} for i, count in enumerate((4, 8))]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--rows", str(tmp_path), "--out", str(tmp_path / "out")]
    assert cli.main(["figures", "3", *options]) == 2
    error = capsys.readouterr().err
    assert "figure 3 needs rows of GPUs or TPUs, or --machine FILE; figure 4 and the equations need" in error
    for figure in ("4", "equations"):
        assert cli.main(["figures", figure, *options]) == 0
        assert "compiled for emulated CPU devices, not for GPUs." in capsys.readouterr().out


def test_rows_of_two_shapes_are_refused(tmp_path, measured, capsys):
    mixed = [measured[0], measured[0] | {"num_heads": 32, "num_kv_heads": 32}]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in mixed))
    assert cli.main(["figures", "4", "--rows", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "--rows must be of one kind of device and one shape of heads" in capsys.readouterr().err
