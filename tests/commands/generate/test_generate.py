"""`tree-attn generate`: what it prints under each attention, and what it refuses before it reads a model."""

import functools
import json

import pytest

from tree_attn.cli import main
from tree_attn.commands import session

pytestmark = pytest.mark.usefixtures("optimized")
PROMPT = "What is the capital of France? Answer in one sentence."
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module", autouse=True)
def opened_once():
    """Opens each file once: opening it again would be half of a refused run, and much of any other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "open_checkpoint", functools.cache(session.open_checkpoint))
        yield


def run(capsys, *arguments: str) -> tuple[int, list[str], str]:
    """Returns exit status, lines of stdout, and stderr."""
    status = main(["generate", *arguments])
    captured = capsys.readouterr()
    return status, captured.out.splitlines(), captured.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "described"),
    [
        (["--reduction", "hierarchical"], {"attention": "tree", "reduction": "hierarchical", "n_devices": 8}),
        (["--attention", "ring", "--devices", "3"], {"attention": "ring", "reduction": None, "n_devices": 3}),
    ],
)
def test_smollm2_answers_and_the_last_line_is_json(capsys, arguments, described):
    status, lines, _ = run(capsys, "--prompt", PROMPT, "--max-new-tokens", "12", "--json", *arguments)
    assert status == 0
    assert lines[0] == ANSWER
    document = json.loads(lines[-1])
    assert list(document) == [
        "prompt_ids",
        "new_ids",
        "text",
        "prefill_s",
        "per_token_s",
        "attention",
        "reduction",
        "n_devices",
    ]
    assert document["text"] == ANSWER
    assert document["new_ids"] == [504, 3575, 282, 4649, 314, 7042, 30]
    assert document["prompt_ids"][:3] == [1, 9690, 198]
    assert document["prefill_s"] > 0 < document["per_token_s"]
    assert {name: document[name] for name in described} == described


def test_raw_prompts_are_continued_and_streamed(capsys):
    arguments = ["--raw", "--prompt", "One, two, three,", "--max-new-tokens", "6", "--attention", "single", "--json"]
    status, lines, _ = run(capsys, *arguments)
    assert status == 0
    document = json.loads(lines[-1])
    assert "".join(lines[:-1]) == document["text"] == " four, five, six,"
    assert len(document["prompt_ids"]) == 6


@pytest.mark.slow
def test_several_prompts_through_fewer_rows(capsys):
    """The prompt is read in chunks and cached in int8, which gives the tokens of float32 here."""
    questions = [PROMPT, "What is 2 + 2? Answer with a number.", PROMPT]
    arguments = [part for question in questions for part in ("--prompt", question)]
    arguments += ["--max-batch", "2", "--prefill-chunk", "24", "--cache-dtype", "int8", "--attention", "single"]
    status, lines, _ = run(capsys, *arguments, "--max-new-tokens", "12", "--json")
    assert status == 0
    assert lines[:2] == ["--- prompt 1 of 3", ANSWER] and lines[-3:-1] == ["--- prompt 3 of 3", ANSWER]
    document = json.loads(lines[-1])
    assert [one["text"] for one in document["generations"]][::2] == [ANSWER] * 2
    assert document["generations"][0]["new_ids"] == [504, 3575, 282, 4649, 314, 7042, 30]
    assert (document["attention"], document["reduction"], document["n_devices"]) == ("single", None, 1)


@pytest.mark.slow
def test_saved_tokens_are_gone_on_from_and_another_generation_is_refused(capsys, tmp_path, monkeypatch):
    arguments = ["--prompt", PROMPT, "--attention", "single", "--out", str(tmp_path), "--save-every", "3", "--json"]
    arguments += ["--temperature", "1.5", "--seed", "4", "--max-new-tokens"]
    _, whole, _ = run(capsys, *arguments, "10")
    path = tmp_path / "tokens.jsonl"
    content = path.read_text()
    rows = [json.loads(line) for line in content.splitlines()]
    new_ids = json.loads(whole[-1])["new_ids"]
    assert [row["first"] for row in rows] == list(range(0, len(new_ids) + 1, 3))
    assert [token for row in rows for token in row["ids"]] == new_ids
    assert [row["is_last"] for row in rows] == [False] * (len(rows) - 1) + [True]

    path.write_text(content[: content.index("\n") + 20])  # killed while it wrote the second batch
    _, again, _ = run(capsys, *arguments, "10")
    assert again[:-1] == whole[:-1]
    assert json.loads(again[-1])["new_ids"] == new_ids
    assert path.read_text() == content

    status, _, error = run(capsys, *arguments, "11")
    assert status == 2
    assert f"{tmp_path} holds the results of another sweep: max_new_tokens is 10 there and 11 here" in error
    monkeypatch.setattr("tree_attn.commands.session.load_with_progress", None)  # would fail if it were called
    _, complete, _ = run(capsys, *arguments, "10")
    assert complete[:-1] == whole[:-1]
    assert path.read_text() == content


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attention", "flash"], "attention must be one of 'tree', 'ring', 'single', 'sparq', got 'flash'"),
        (
            ["--attention", "ring", "--reduction", "gather"],
            "got 'gather': attention='ring' does not reduce",
        ),
        (["--attention", "single", "--devices", "2"], "attention='single' keeps all keys on one device"),
        (["--reduction", "star"], "reduction must be one of"),
        (["--reduction", "hierarchical", "--devices", "7"], "--devices must be a product of two numbers"),
        (["--save-every", "0"], "--save-every must be at least 1, got 0"),
        (["--max-batch", "0"], "--max-batch must be at least 1, got 0"),
        (["--prompt", "y", "--out", "absent"], "--out saves the tokens of one --prompt, got 2"),
        (["--prefill-chunk", "9", "--devices", "2"], "prefill_chunk must be a multiple of 2 shards, got 9"),
        (["--prefill-chunk", "8", "--attention", "ring"], "prefill_chunk=8: attention='ring' reads prompts whole"),
        (["--cache-dtype", "int4"], "--cache-dtype must be one of 'float8_e4m3fn', 'int8', got 'int4'"),
        (["--devices", "0"], "n_devices must be an integer of at least 1, got 0"),
        (["--temperature", "-1"], "temperature must be 0 (greedy) or a finite number above it, got -1.0"),
        (["--top-k", "0"], "top_k must be 1 or more, got 0"),
        (["--top-p", "2"], "top_p must be above 0 and at most 1, got 2.0"),
        (["--seed", "-3"], "seed must be in"),
        (["--model", "absent.gguf"], "model must be 'smollm2', a folder"),
        (["--max-new-tokens", "0"], "max_new_tokens must be 1 or more, got 0"),
        (["--max-new-tokens", "9000"], "max_new_tokens must be at most 8161 with a prompt of 31 tokens, got 9000"),
        (["--raw", "--prompt", ""], "prompts must be one or more, of one or more tokens each, got [1, 0]"),
    ],
)
def test_wrong_arguments_are_one_line_on_stderr(capsys, arguments, message):
    status, lines, error = run(capsys, "--prompt", "x", *arguments)
    assert status == 2
    assert lines == []
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["--prompt", "x", "--raw", "--chat"], ["--prompt", "x", "--top-k", "few"]])
def test_arguments_that_do_not_parse_show_the_usage(capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        run(capsys, *arguments)
    assert stop.value.code == 2
    assert "usage: tree-attn generate" in capsys.readouterr().err
