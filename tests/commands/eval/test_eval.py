"""`tree-attn eval`: its rows, which a rerun goes on from, its table and drawing, and its errors."""

import json
import pathlib
import types

import jax.numpy as jnp
import numpy as np
import pytest

from tree_attn import cli
from tree_attn.commands import session
from tree_attn.commands.eval import evaluation
from tree_attn.commands.eval.plan import make_plan
from tree_attn.extras import how_to_install
from tree_attn.models.llama import Llama, LlamaConfig, parameters


class Letters:
    def encode(self, text, *, add_special_tokens=True):
        return [ord(letter) % 64 for letter in text]

    def decode(self, ids):
        return "".join(chr(64 + i) for i in ids)


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """Puts a random model in the place of any that is named; returns arguments with a text."""
    config = LlamaConfig(
        num_layers=1, hidden_size=16, intermediate_size=32, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=64,
        max_position=512,
    )  # fmt: skip
    load = lambda sharding, dtype, *_: Llama(config, sharding, parameters.random(sharding, jnp.float32))
    checkpoint = types.SimpleNamespace(config=config, tokenizer=Letters(), load=load)
    monkeypatch.setattr(session, "open_with_progress", lambda model: checkpoint)
    monkeypatch.setattr(session, "load_with_progress", lambda checkpoint, *options: checkpoint.load(*options))
    text = tmp_path / "text.txt"
    text.write_text("The rain it raineth every day. " * 40)
    sizes = ["--context", "192", "--tail", "8", "--samples", "3", "--batch", "2", "--kept", "8", "--ratios", "4"]
    return ["eval", "--text", str(text), "--out", str(tmp_path / "out"), *sizes]


@pytest.mark.slow
def test_rows_table_and_drawing_and_a_rerun_that_makes_only_what_is_missing(tiny, tmp_path, capsys):
    arguments = [*tiny, "--tasks", "repetition"]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "repetition: characters matched, mean and standard error of 3" in printed and "sparq, k 8" in printed
    results = tmp_path / "out" / "results.jsonl"
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [row["method"] for row in rows] == ["dense", "sparq", "sparq_mean", "h2o", "lm_infinite"]
    for row in rows:
        assert len(row["scores"]) == row["samples"] == 3
        assert row["compression"] == (1 if row["method"] == "dense" else pytest.approx(0.25, rel=0.2))
    assert (tmp_path / "out" / "evaluation.png").stat().st_size > 1000

    results.write_text("".join(json.dumps(row) + "\n" for row in rows[:4]))
    assert cli.main([*arguments, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)["rows"]
    assert [row["scores"] for row in again] == [row["scores"] for row in rows]


@pytest.fixture
def guesses(monkeypatch):
    """Replaces the scorer by one that compiles nothing; under LM-Infinite it gets the first sample wrong."""

    class Guesses:
        def __init__(self, model, cache_dtype):
            pass

        def read(self, contexts, room):
            return len(contexts)

        def follow(self, count, tails, method):
            logits = np.eye(64, dtype=np.float32)[np.array(tails)]
            assert len(logits) == count
            logits[0] *= -1 if method.name == "lm_infinite" else 1
            return logits

    monkeypatch.setattr(evaluation, "Scorer", Guesses)


def rows_of(tmp_path):
    return [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("guesses")
def test_the_needle_by_context_and_depth(tiny, tmp_path, capsys, monkeypatch):
    arguments = [*tiny, "--tasks", "needle_at_depth", "--context", "208,224", "--depths", "0,100", "--samples", "2"]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "needle_at_depth: share of whole answers, mean and standard error of 4, context 224" in printed
    rows = rows_of(tmp_path)
    cells = [(row["context"], row["depth_percent"]) for row in rows]
    assert cells == [cell for cell in ((208, 0), (208, 100), (224, 0), (224, 100)) for _ in range(5)]
    assert {(row["method"] == "lm_infinite", row["mean"]) for row in rows} == {(True, 0.5), (False, 1.0)}
    assert {row["compression"] for row in rows if row["method"] == "dense"} == {1.0}
    assert len({row["num_keys"] for row in rows if row["method"] == "h2o"}) == 2, "a budget for each context"
    assert [path.name for path in (tmp_path / "out").glob("*.png")] == ["needle.png"]

    lines = (tmp_path / "out" / "results.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "out" / "results.jsonl").write_text("".join(lines[:7] + lines[8:]))
    assert cli.main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == {"needle": str(tmp_path / "out" / "needle.png")}
    again = rows_of(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert cli.main(arguments) == 0
    assert how_to_install("plot") in capsys.readouterr().out
    assert again[:-1] == rows[:7] + rows[8:] and again[-1]["scores"] == rows[7]["scores"]


@pytest.mark.usefixtures("guesses")
def test_ablations_change_one_thing_at_a_time(tiny, tmp_path, capsys):
    assert cli.main([*tiny, "--tasks", "repetition", "--ablations"]) == 0
    printed = capsys.readouterr().out
    assert "sparq_mean, k 8, temperature head_dim" in printed
    assert "dense attention, which reads all keys and values: 8 ± 0" in printed  # no column for one row
    assert not any("dense" in line and "1/4" in line for line in printed.splitlines()[:4])
    # Lines on stdout, whole values, and the comparison at the end.
    assert max(map(len, printed.splitlines()[:18])) <= 80 and "\u2026" not in printed
    ends = " characters matched, dense attention 8, next sparq, k 8, temperature head_dim with 8."
    assert f"repetition, 192 tokens: at 1/4 of the bytes of dense attention sparq, k 8 is the best: 8{ends}" in printed
    assert f"Rows: {tmp_path / 'out' / 'results.jsonl'}; plots: {tmp_path / 'out' / 'evaluation.png'}" in printed
    rows = rows_of(tmp_path)
    changes = [{name: row[name] for name in ("local_window", "score_temperature") if name in row} for row in rows]
    of_one = [{}, {"score_temperature": "head_dim"}, {"score_temperature": "num_components"}]
    of_one += [{"local_window": count} for count in (0, 4, 8)]
    assert changes == [{}, *of_one, *of_one]
    assert [row["method"] for row in rows] == ["dense"] + 6 * ["sparq"] + 6 * ["sparq_mean"]
    assert cli.main([*tiny, "--tasks", "repetition", "--ablations"]) == 0
    assert rows_of(tmp_path) == rows, "nothing was missing"


def test_rows_from_before_depths_belong_to_the_same_sweep():
    path = pathlib.Path(__file__).parents[3] / "docs" / "results" / "eval_smollm2" / "results.sweep.json"
    args = cli._parser(["eval"]).parse_args(["eval", "--text", "kjv.txt", "--samples", "16", "--out", "out"])
    sweep = json.loads(path.read_text())
    assert make_plan(args).sweep() == {
        name: value for name, value in sweep.items() if name not in ("model", "seed", "text_sha256")
    }


@pytest.mark.parametrize(
    "options, said",
    [
        (
            ["--tasks", "poetry"],
            "--tasks must be one of 'repetition', 'needle', 'language_modelling', 'needle_at_depth'",
        ),
        (["--tasks", "needle_at_depth", "--ablations"], "--tasks must not have needle_at_depth with --ablations"),
        (["--depths", "0,101"], "--depths must be integers of at least 0 and at most 100, separated by commas, got"),
        (["--tasks", "needle_at_depth", "--kept", "8,9"], "--kept must be one number for needle_at_depth, got '8,9'"),
        (["--ratios", "2,x"], "--ratios must be integers of at least 1, separated by commas, got '2,x'"),
        (["--cache-dtype", "int8"], "--cache-dtype must be one of 'float8_e4m3fn', got 'int8'"),
        (["--context", "200,100"], "--context must be at least --tail + 128 = 136, got 100"),
        (["--batch", "0"], "--batch must be at least 1, got 0"),
        (["--text", "nowhere.txt"], "--text must be a file that can be read, got nowhere.txt: No such file"),
        (["--text", "latin"], "--text must be UTF-8 text, got latin: byte 0xff at 3 is none"),
        (["--out", __file__], f"--out must be a folder, got {__file__}"),
    ],
)
def test_a_wrong_request_is_one_line(tiny, capsys, options, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin").write_bytes(b"abc\xff")
    assert cli.main([*tiny, *options]) == 2
    assert said in capsys.readouterr().err
