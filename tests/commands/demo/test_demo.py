"""`tree-attn demo`: the answer, the table, and the exit status when tokens differ."""

import contextlib
import dataclasses
import io
import json
import pathlib
import re

import pytest

from tree_attn.cli import main
from tree_attn.commands import drawing, session
from tree_attn.commands.demo import measured, picture, report
from tree_attn.commands.demo.answers import Outcome
from tree_attn.commands.figures.rows import step
from tree_attn.cost.limits import read_limit_us

OUTCOME = Outcome(
    attention="tree",
    n_devices=8,
    new_ids=[5, 6, 7],
    per_token_s=0.1,
    peak_memory_bytes=2**20,
    collectives=31,
    collectives_attention=30,
    bytes_sent=2048.0,
    bytes_sent_attention=1024.0,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    """Returns where the demo runs."""
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def shown(optimized_module, folder) -> tuple[int, str]:
    """Returns exit status and output of the demo, without options."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.chdir(folder):
        status = main(["demo"])
    return status, output.getvalue()


def cells(output: str, attention: str) -> list[str]:
    """Returns the cells of an attention's line in the table; a number and its unit are one."""
    (found,) = [line for line in output.splitlines() if line.startswith(f" {attention} ")]
    return [cell.strip() for cell in re.split(r"  +", found.strip())]


def test_an_empty_prompt_is_refused_before_a_model_is_opened(capsys, monkeypatch):
    monkeypatch.setattr(session, "open_with_progress", None)
    assert main(["demo", "--prompt", ""]) == 2
    assert capsys.readouterr().err == "tree-attn demo: error: --prompt must be a text, got ''\n"


@pytest.mark.slow
def test_the_three_attentions_give_one_answer(shown):
    status, output = shown
    assert status == 0
    assert "The capital of France is Paris." in output
    assert "tree, ring, single: the same 7 tokens." in output
    assert all(len(line) <= 80 for line in output.splitlines() if line.startswith((" ", "│")))


@pytest.mark.slow
def test_the_table_compares_what_one_token_costs(shown):
    _, output = shown
    name, devices, time, memory, collectives, _, sent = cells(output, "tree")
    assert (name, devices) == ("tree", "8")
    assert time.endswith(" ms")
    assert memory.endswith(" MB") and cells(output, "single")[3].endswith(" MB")
    assert 0 < float(memory.removesuffix(" MB")) < float(cells(output, "single")[3].removesuffix(" MB"))
    # Of 30 layers: by tree one gather each beside those of the weights, by ring two tensors over seven hops each.
    assert int(cells(output, "ring")[4]) - int(collectives) == 30 * (14 - 1)
    assert cells(output, "single")[4:] == ["0", "0 B", "0 B"]
    # The gather moves, to each of 8 devices, 7 others' 9 heads of 64 + 1 float32 per layer.
    assert sent == f"{30 * 7 * 9 * 65 * 4 / 1000:.3g} kB"


def test_what_the_two_columns_of_bytes_count_is_said(capsys, tiny_checkpoint):
    report.print_outcomes("a", tiny_checkpoint.tokenizer, [OUTCOME], is_emulated=True)
    text = " ".join(capsys.readouterr().out.split())
    assert '"sent by attention" is the part of "sent" that attention needs; the rest is what the layers' in text


@pytest.mark.slow
def test_it_ends_with_gpus_a_picture_and_the_next_command(shown, folder):
    _, output = shown
    last = output.splitlines()[-3:]
    tree, ring = "311.8 us by tree (with gather 323.7 us, in another run)", "12.1 ms by the best ring on four H200s"
    assert f"took {tree} and {ring}" in last[0]
    assert last[0].endswith("Tree was 39 times as fast.")
    assert last[1:] == ["Picture: tree-attn-demo.png.", f"Next: {report.NEXT}"]
    assert (folder / "tree-attn-demo.png").read_bytes().startswith(b"\x89PNG")


def test_what_gpus_take_is_what_the_rows_say():
    path = pathlib.Path(__file__).parents[3] / measured.FOLDER / "results.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {row["git_commit"] for row in rows} == {measured.COMMIT}
    assert {(row["batch"], row["num_heads"], row["head_dim"], row["dtype"]) for row in rows} == {
        (1, 16, 128, "bfloat16")
    }
    assert {row["hardware"] for row in rows} == {"4 x NVIDIA H200"}
    limits_us = {row["num_keys"]: read_limit_us(step(row), measured.DEVICE_KIND) for row in rows}
    assert {keys: measured.limit_us(keys) for keys in limits_us} == limits_us
    of = lambda strategy, keys: min(
        row["latency_us_median"] for row in rows if row["strategy"].startswith(strategy) and row["num_keys"] == keys
    )
    for row in measured.ROWS:
        assert (row.tree_us, row.ring_us) == (round(of("tree", row.num_keys), 1), round(of("ring", row.num_keys), 1))
    assert [row.num_keys for row in measured.ROWS] == sorted({row["num_keys"] for row in rows})
    other = path.parents[1] / pathlib.Path(measured.GATHER_FOLDER).name / "results.jsonl"
    (gathered,) = (
        row["latency_us_median"]
        for row in map(json.loads, other.read_text().splitlines())
        if row["reduction"] == "gather" and row["num_keys"] == measured.ROWS[-1].num_keys
    )
    assert round(gathered, 1) == measured.GATHER_US


def test_the_picture_names_curves_limit_and_commit(tmp_path, monkeypatch):
    figures, new_figure = [], drawing.new_figure
    monkeypatch.setattr(drawing, "new_figure", lambda *size: figures.append(new_figure(*size)) or figures[-1])
    picture.draw([OUTCOME, dataclasses.replace(OUTCOME, attention="ring")], tmp_path / "drawn.png")
    _, on_gpus = figures[0].axes
    assert [text.get_text() for text in on_gpus.texts] == ["limit: reading K and V", "tree, fused", "ring, overlapped"]
    assert [label.get_text() for label in on_gpus.get_xticklabels()] == ["40k", "80k", "640k"]
    assert f"commit {measured.COMMIT}" in on_gpus.get_title() and on_gpus.get_legend() is None


def test_an_answer_stands_without_its_picture(tmp_path, monkeypatch, capsys):
    ring = dataclasses.replace(OUTCOME, attention="ring", bytes_sent_attention=70000.0)
    picture.draw([OUTCOME, ring], tmp_path / "drawn.png")
    report.conclude([OUTCOME, ring], tmp_path / "absent" / "picture.png")
    assert f"No picture: No such file or directory: {tmp_path / 'absent' / 'picture.png'}." in capsys.readouterr().out
    monkeypatch.setattr(drawing, "has_matplotlib", lambda: False)
    report.conclude([OUTCOME, ring], tmp_path / "picture.png")
    text = capsys.readouterr().out
    assert "No picture: plots need matplotlib: python3 -m pip install" in text
    assert text.splitlines()[-1] == f"Next: {report.NEXT}" and len(text.splitlines()[-1]) <= 80


def test_tokens_that_differ_are_reported_and_fail(capsys):
    other = dataclasses.replace(OUTCOME, attention="ring", new_ids=[5, 9, 7])
    assert report.compare([OUTCOME, other]) == 1
    assert "ring differs from tree from new token 1 on" in capsys.readouterr().err
    shorter = dataclasses.replace(OUTCOME, attention="single", new_ids=[5, 6])
    assert report.compare([OUTCOME, shorter]) == 1
    assert "single differs from tree from new token 2 on" in capsys.readouterr().err
    assert report.compare([OUTCOME, OUTCOME]) == 0


def test_a_wrong_request_is_one_line_on_stderr(capsys):
    assert main(["demo", "--max-new-tokens", "9000"]) == 2
    assert "--max-new-tokens must be at most 8150 with a prompt of 42 tokens, got 9000" in capsys.readouterr().err
