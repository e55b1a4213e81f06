"""`tree-attn reproduce`: its names, the rows it writes and goes on from, and numbers that follow from rows."""

import json
import math

import pytest

from tree_attn import cli
from tree_attn.commands.bench.room import NoRoom
from tree_attn.commands.reproduce import plots, report, runs, tree
from tree_attn.commands.reproduce.experiment import Command, Number, Place, Point, Steps, mean_of, thousands
from tree_attn.commands.reproduce.experiments import EXPERIMENTS
from tree_attn.commands.reproduce.sparq import METHODS
from tree_attn.measure import provenance
from tree_attn.measure.rows import read
from tree_attn.measure.steps import lean

GPUS = Place(gpus=8, text="text", samples=100)
# Settings that no command here can measure: more GPUs, or more memory than one H200 has.
BEYOND = {
    "tree-figure-3": ["128 GPUs"],
    "bifurcated-table-6": ["batch 16, not", "batch 32, not", "batch 64, not"],
    "hydragen-figure-3": [f"batch {batch}, not" for batch in ("256", "512", "1,024")],
}


def names_of(point: Point) -> list[dict]:
    return [fields for fields in (point.where, point.over) if fields is not None]


def planned(name: str) -> list[dict]:
    """Returns the fields that name each row which an experiment's runs make on GPUs."""
    found = []
    for one in EXPERIMENTS[name].plan(GPUS):
        if isinstance(one, Steps):
            found += [dict(case) for case in one.cases] if one.kind == "needles" else []
            found += [labels for labels, _ in runs._measurements(one, 32)] if one.kind != "needles" else []
        else:
            found += rows_of_command(one)
    return found


def rows_of_command(one: Command) -> list[dict]:
    kind, *options = one.arguments
    args = dict(zip(options, [*options[1:], ""])) if kind != "bench" else dict(zip(options[1:], [*options[2:], ""]))
    listed = lambda option, default: args.get(option, default).split(",")
    if kind == "compare":
        strategies = [("tree", name) for name in listed("--reduction", "")]
        strategies += [("ring_overlapped", None), ("ring_public", None)]
        return [
            {"num_keys": int(keys), "n_devices": int(args["--devices"]), "num_heads": int(args.get("--heads", 16))}
            | {"strategy": strategy, "reduction": reduction}
            for keys in listed("--keys", "")
            for strategy, reduction in strategies
        ]
    if kind == "eval":
        sparse = [(method, int(ratio)) for ratio in listed("--ratios", "") for method in METHODS]
        return [
            {"task": task, "context": int(context), "method": method, "asked_ratio": ratio, "num_keys": num_keys}
            for task in listed("--tasks", "")
            for context in listed("--context", "")
            for method, ratio in [("dense", 1), *sparse]
            for num_keys in [None, *map(int, listed("--kept", "0"))]
        ]
    common = {"config": args["--config"], "n_devices": int(args["--devices"])}
    common |= {"problem_tokens": int(args.get("--problem-tokens", 0))}
    common |= {"weights": "replicated" if "--replicate-weights" in options else "spread"}
    common |= {"share_prefix": False if "--no-share-prefix" in options else None}
    return [
        common | {"context": int(context), "batch": int(batch) * int(args.get("--problems", 1))}
        | {"attention": attention, "levels": int(levels)}
        for context in listed("--context", "")
        for batch in listed("--samples", "1")
        for attention in listed("--attention", "tree,ring")
        for levels in listed("--levels", "2")
    ]  # fmt: skip


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_runs_make_the_rows_of_every_number(name):
    """Each number's rows are among those that the runs make on eight GPUs, but for what no machine here can."""
    found = planned(name)
    agrees = lambda want, got: got in want if isinstance(want, tuple) else want == got
    is_made = lambda fields: any(
        all(agrees(value, row[key]) for key, value in fields.items() if key in row) for row in found
    )
    missing = [point.setting for point in EXPERIMENTS[name].points if not all(map(is_made, names_of(point)))]
    beyond = BEYOND.get(name, [])
    assert [setting for setting in missing if not any(part in setting for part in beyond)] == []
    assert len({point.setting for point in EXPERIMENTS[name].points}) == len(EXPERIMENTS[name].points)


@pytest.mark.parametrize("gpus, devices, batches", [(1, "1", "512"), (3, "2", "512,1024"), (16, "8", "512,1024")])
def test_several_gpus_have_the_larger_batches(gpus, devices, batches):
    for one in EXPERIMENTS["hydragen-figure-3"].plan(Place(gpus=gpus)):
        assert one.arguments[one.arguments.index("--devices") + 1] == devices
        assert one.arguments[one.arguments.index("--samples") + 1].endswith(batches) or "not" in one.folder


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_small_form_is_small_and_says_what_it_leaves_out(name):
    experiment = EXPERIMENTS[name]
    assert experiment.plan(Place(gpus=0, text="text"))
    assert experiment.cpu_is_true == ("all of it" in experiment.cpu)
    assert experiment.cpu_is_true or "Not run: " in experiment.cpu
    assert experiment.paper_hardware and experiment.differs.strip().endswith(".")


def test_the_list_needs_no_name(capsys):
    assert cli.main(["reproduce", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["experiments"]
    assert [one["name"] for one in listed] == list(EXPERIMENTS)
    assert cli.main(["reproduce", "--list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in EXPERIMENTS) and max(map(len, printed.splitlines())) <= 80


@pytest.mark.parametrize(
    "options, message",
    [
        ([], "NAME must be a figure or table; --list prints all"),
        (["lean-figure-9"], "such as lean-figure-8"),
        (["lean-figure-8", "--iters", "0"], "--iters must be at least 1, got 0"),
        (["sparq-table-2"], "--text must be a file of plain text for sparq-table-2"),
        (["sparq-table-2", "--text", "/none"], "--text must be a file that can be read, got /none"),
        (["lean-figure-8", "--out", __file__], "--out must be a folder"),
    ],
)
def test_wrong_calls_are_refused_before_any_work(options, message, capsys):
    assert cli.main(["reproduce", *options]) == 2
    assert message in capsys.readouterr().err


def test_too_few_gpus_are_refused(monkeypatch, capsys):
    monkeypatch.setattr("tree_attn.commands.reproduce.reproduction.visible_gpus", lambda: ("0000:1B:00.0",))
    assert cli.main(["reproduce", "tree-table-1"]) == 2
    assert "tree-table-1 needs at least 2 GPUs, got 1; JAX_PLATFORMS=cpu runs its" in capsys.readouterr().err


def test_each_step_is_a_row_and_a_rerun_goes_on(tmp_path, monkeypatch, capsys):
    calls = []

    def time_way(case, name, n_iters, *, with_energy):
        calls.append((max(case.lengths), name))
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return {"chain_us_median": 3.0}

    monkeypatch.setattr(lean, "time_way", time_way)
    arguments = ["reproduce", "lean-figure-8", "--out", str(tmp_path)]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "1 row of the small form; none is a number of the paper" in printed and "out of memory" in printed
    assert "Not run: all kernels, and all lengths." in printed
    first = read(tmp_path / "results.jsonl")
    assert [row.get("error") for row in first] == [None, "RuntimeError: out of memory"]
    assert all(set(provenance.ORIGIN) <= row.keys() and row["command"].startswith("tree-attn repro") for row in first)
    assert cli.main([*arguments, "--json"]) == 0  # what had an error is tried again
    document = json.loads(capsys.readouterr().out)
    assert calls == [(256, "xla"), (512, "xla"), (512, "xla")]
    assert [row["chain_us_median"] for row in document["rows"]] == [3.0, 3.0]
    assert document["small_form"] and document["points"][0]["ours"] is None
    assert cli.main([*arguments, "--quiet"]) == 0 and len(calls) == 3


def test_a_command_runs_in_a_folder_of_its_own(tmp_path, monkeypatch, capsys):
    """Its table is not printed, and its rows name the command by which it can be run alone."""
    seen = []

    def run(args):
        seen.append(args)
        print("WRONG: its table" if seen[1:] else "its table")
        provenance_row = {"latency_us_median": 2.0, "command": args.command_line}
        runs.MeasuredRows(args.out / "results.jsonl").append(provenance_row)
        return len(seen) - 1

    monkeypatch.setattr("tree_attn.commands.compare.run", run)
    out = tmp_path / "out"
    assert cli.main(["reproduce", "tree-figure-3", "--out", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (row,) = document["rows"]
    assert row["command"].startswith("tree-attn compare --devices 2 --keys 8000,16000")
    assert document["files"]["rows"] == [str(out / "small" / "results.jsonl")] and seen[0].iters == 8
    assert cli.main(["reproduce", "tree-figure-3", "--out", str(out)]) == 1  # a wrong result
    assert capsys.readouterr().out == "WRONG: its table\n"
    assert cli.main(["reproduce", "tree-figure-3", "--out", str(out), "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"error": "WRONG: its table", "rows": [], "files": {}}


@pytest.mark.parametrize("found", [RuntimeError("RESOURCE_EXHAUSTED: out of memory"), NoRoom("needs 90 GB")])
def test_where_the_memory_ends_the_next_run_begins(tmp_path, monkeypatch, found):
    folders = []

    def run(args):
        folders.append(args.out.name)
        raise found if folders[1:] == [] else RuntimeError("another")

    monkeypatch.setattr("tree_attn.commands.bench.run", run)
    with pytest.raises(RuntimeError, match="another"):
        cli.main(["reproduce", "bifurcated-table-6", "--out", str(tmp_path)])
    assert folders == ["small_shared", "small_not_shared"]


def test_on_gpus_our_numbers_stand_beside_the_papers(capsys):
    one = EXPERIMENTS["lean-figure-8"]
    shared = {"hardware": "1 x NVIDIA H200"}
    rows = [one.points[6].where | shared | {"device_us_median": 2.0}]
    rows += [one.points[6].over | shared | {"device_us_median": 5.0}]
    rows += [one.points[2].where | shared | {"error": "RuntimeError: none"}]
    report.print_experiment(one, GPUS, rows)
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    assert ["64k", "keys,", "over", "fixed", "split", "2.50", "2.53"] in lines
    assert ["4k", "keys,", "over", "fixed", "split", "does", "not", "run", ">2"] in lines
    assert "Hardware: ours 1 x NVIDIA H200; the paper's 1 x H100, FlashDecoding 2.5.6." in printed
    assert "What differs: The fixed split is" in printed
    table = [line for line in printed.splitlines() if line.startswith(" ")]
    assert max(map(len, table)) <= 80
    found = report.document(one, GPUS, rows)
    assert found["small_form"] is None and found["points"][6]["ours"]["value"] == 2.5


def test_a_ratio_is_of_one_kind_of_hardware():
    one = EXPERIMENTS["hydragen-figure-6"]
    _, point, *_ = one.points
    row = lambda fields, hardware, rate: fields | {"hardware": hardware, "tokens_per_s": rate}
    rows = [row(point.over, "old", 10.0), row(point.where, "old", 40.0), row(point.where, "new", 100.0)]
    assert one.ours(point, rows).value == 10 / 40 and {row["hardware"] for row in one.rows_of(point, rows)} == {"old"}
    rows.append(row(point.over, "new", 80.0))
    assert one.ours(point, rows).value == 80 / 100
    assert one.ours(point, [rows[0], rows[2]]) is None and one.rows_of(point, [rows[0], rows[2]]) == []
    rows.append(row(point.where, "old", None) | {"error": "RuntimeError: none"})
    rows.append({"hardware": "old", "batch": 1})  # newer, and of another point
    assert report.document(one, GPUS, rows)["points"][1]["hardware"] == "new"
    assert report.hardware(one, rows) == ["new"] and [line.ours for line in report.lines(one, rows)][1] == "0.800"


@pytest.mark.parametrize(
    "value, text", [(1.0, "1.00"), (0.0415, "0.0415"), (99.94, "99.9"), (99.96, "100"), (1047.2, "1,047")]
)
def test_a_number_has_three_figures_or_all_before_the_point(value, text):
    one = EXPERIMENTS["bifurcated-table-6"]
    first, *_ = report.lines(one, [one.points[0].where | {"per_token_ms_median": value}])
    assert first.ours == text


def test_numbers_follow_from_the_newest_rows():
    one = EXPERIMENTS["tree-table-1"]
    tokens = {"config": "llama-3.1-8b", "context": 32768, "n_devices": 8, "weights": "replicated"}
    rows = [tokens | {"attention": "tree", "prefill_plus_10_tokens_s": 9.0}]
    rows += [tokens | {"attention": "ring", "error": "out of memory", "hardware": "8 x GPU"}]
    rows += [tokens | {"attention": "tree", "prefill_plus_10_tokens_trials_s": [1.0, 2.0, 3.0], "hardware": "8 x GPU"}]
    first, second, third, *_ = report.lines(one, rows)
    assert first == ("32k tokens, tree, weights replicated", "2.00 ± 0.58", "0.6 ± 0.15")
    assert second == ("32k tokens, ring, weights replicated", "does not run", "2.57 ± 0.35") and third.ours == ""
    assert one.error(one.points[1], rows) == "out of memory" and report.hardware(one, rows) == ["8 x GPU"]


def test_a_step_takes_what_it_costs_in_a_chain():
    one = EXPERIMENTS["lean-figure-8"]
    point = one.points[0]
    rows = [point.where | {"device_us_median": 2.0, "chain_us_median": 3.0}, point.over | {"device_us_median": 6.0}]
    assert one.ours(point, rows) == Number(value=2.0)


def test_ratios_and_differences():
    speed_up = EXPERIMENTS["lean-figure-8"]
    point = next(point for point in speed_up.points if isinstance(point.paper, Number) and point.paper.value == 2.53)
    rows = [point.where | {"device_us_median": 2.0}, point.over | {"device_us_median": 5.0}]
    assert speed_up.ours(point, rows) == Number(value=2.5) and speed_up.ours(point, rows[:1]) is None
    gap = EXPERIMENTS["tree-figure-4"]
    point = gap.points[1]
    rows = [point.where | {"peak_memory_bytes_compiled": 5e8}, point.over | {"peak_memory_bytes_compiled": 1.5e9}]
    assert gap.ours(point, rows) == Number(value=1000.0) and point.paper.value == 524
    assert mean_of([1.0, 3.0]) == Number(value=2.0, error=1.0) and mean_of([2.0]) == Number(value=2.0)
    assert [thousands(count) for count in (8192, 8000, 32640)] == ["8k", "8k", "32,640"]


def test_depths_count_together():
    one = EXPERIMENTS["sparq-table-3"]
    point = one.points[0]
    rows = [point.where | {"depth_percent": depth, "scores": [1.0, 0.0]} for depth in (0, 50)]
    number = one.ours(point, rows)
    assert number.value == 50 and math.isclose(number.error, 100 * (1 / 3) ** 0.5 / 2)


def test_the_numbers_are_those_of_the_papers():
    """Some of each paper, read from its text again."""
    printed = {name: dict(line[::2] for line in report.lines(one, [])) for name, one in EXPERIMENTS.items()}
    assert printed["tree-table-1"]["256k tokens, ring, weights spread"] == "8.19 ± 1.07"
    assert printed["tree-table-2"]["20k tokens, tree, weights replicated"] == "0.74 ± 0.01"
    assert printed["lean-figure-8"]["64k keys, over fixed split"] == "2.53"
    assert printed["bifurcated-table-6"]["8k tokens, batch 16, not shared"] == "109.64"
    assert printed["bifurcated-table-7"]["32k tokens, batch 256, shared"] == "52.06"
    assert printed["bifurcated-table-8"]["32,640 tokens, batch 32, not shared"] == "OOM"
    assert printed["hydragen-figure-3"]["2k tokens shared, batch 512, no attention"] == "16.1"
    assert printed["sparq-table-2"]["repetition, 1,024 tokens, H2O, 1/8"] == "26"
    assert tree.TABLE_1[65536][0] == Number(value=1.08, error=0.10)


@pytest.mark.parametrize("hardware, limit", [("1 x NVIDIA H200", 30.0), ("1 x NVIDIA H100 80GB HBM3", 30 * 3.35 / 4.8)])
def test_a_limit_is_what_the_datasheet_of_the_gpu_allows(hardware, limit):
    """`limit_us` is an H200's, on every GPU."""
    one = EXPERIMENTS["lean-figure-8"]
    mine, other = (fields | {"hardware": hardware} for fields in names_of(one.points[0]))
    rows = [mine | {"device_us_median": 3.0, "limit_us": 2.0}, other | {"device_us_median": 60.0}]
    assert one.limit_of(one.points[0], rows) == pytest.approx(limit)
    assert one.limit_of(one.points[0], rows[:1]) is None
    unknown = [row | {"hardware": "1 x GPU"} for row in rows]
    assert one.limit_of(one.points[0], unknown) is None, "there is no datasheet"
    assert EXPERIMENTS["tree-figure-4"].limit_of(EXPERIMENTS["tree-figure-4"].points[0], rows) is None


def test_equal_limits_are_drawn_once(tmp_path, monkeypatch):
    figures, new_figure = [], plots.drawing.new_figure
    monkeypatch.setattr(plots.drawing, "new_figure", lambda *size: figures.append(new_figure(*size)) or figures[-1])
    one = EXPERIMENTS["sparq-figure-8"]  # two series, over the same peer, which may read as little
    rows = [
        fields | {"chain_us_median": 9.0, "limit_us": 2.0, "hardware": "1 x NVIDIA H200", "git_commit": "0123456"}
        | {"num_kv_heads": 32}
        for point in one.points
        for fields in names_of(point)
    ]  # fmt: skip
    plots.draw(one, rows, tmp_path / "with.png")
    plots.draw(one, [row | {"hardware": "1 x GPU"} for row in rows], tmp_path / "without.png")
    dashed = [[line for line in figure.axes[0].lines if line.get_linestyle() == "--"] for figure in figures]
    assert [len(lines) for lines in dashed] == [1, 0]
    assert set(dashed[0][0].get_ydata()) == {4.5}
    texts = [
        " ".join(text.get_text() for text in figure.findobj(lambda a: hasattr(a, "get_text"))) for figure in figures
    ]
    assert ["limit: SparQ" in text and "Dashed" in text for text in texts] == [True, False]
    # Beside ours in XLA stands the paper's in PyTorch, and a drawing says so.
    assert all("paper: SparQ in PyTorch" in text and "paper: SparQ in XLA" not in text for text in texts)
    assert {point.setting: point.paper.value for point in one.points if point.paper} == {
        "4k keys, SparQ": 3.02, "4k keys, SparQ in XLA": 1.33,
    }  # fmt: skip


def test_a_limit_of_a_shared_prefix_is_that_of_the_row():
    one = EXPERIMENTS["hydragen-figure-4"]
    point = one.points[0]  # 1,024 sequences, 2,048 tokens shared
    mine, other = (fields | {"hardware": "1 x NVIDIA H200", "head_dim": 128} for fields in names_of(point))
    rows = [mine | {"chain_us_median": 50.0, "limit_us": 14.1995}, other | {"chain_us_median": 284.0}]
    assert one.limit_of(point, rows) == pytest.approx(284 / 14.1995, rel=1e-4)  # as the bench has it


def test_the_drawing_has_the_speed_up_on_its_axis(tmp_path):
    one = EXPERIMENTS["lean-figure-8"]
    rows = [
        fields | {"device_us_median": 1.0 + i, "hardware": "1 x GPU", "git_commit": "0123456789"}
        for point in one.points[3:5]
        for i, fields in enumerate(names_of(point))
    ]
    path = plots.draw(one, rows, tmp_path / "figure.png")
    assert path.stat().st_size > 10_000
