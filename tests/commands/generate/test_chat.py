"""`tree-attn generate --chat`: turns from options or lines, each after those before it, and what it refuses."""

import contextlib
import io
import json
import sys

import pytest

from tree_attn.cli import main
from tree_attn.commands import phases, session
from tree_attn.commands.generate import chat
from tree_attn.models.llama import Generation


class FakeConversation:
    """Answers "ok" in place of a model."""

    def __init__(self, generator):
        self.num_reused = 0

    def compile(self, prompt, limit):
        """Compiles nothing."""

    def answer(self, prompt, limit, *, stop_ids, on_token):
        """Returns the tokens of "ok", and counts all earlier tokens as reused."""
        ids = [15, 11]
        for token in ids:
            on_token(0, token)
        self.num_reused = max(0, len(prompt) - 20)
        means = dict(log_probability=-1.0, mean_log_probability=-1.0)
        return Generation(prompt_ids=prompt, new_ids=ids, stopped=False, prefill_s=0.5, per_token_s=0.25, **means)


@pytest.fixture
def no_model(monkeypatch, tiny_checkpoint):
    """Puts `FakeConversation` in the place of the model; returns the tokenizer."""
    monkeypatch.setattr(chat, "load_generator", lambda args, request: None)
    monkeypatch.setattr(chat, "Conversation", FakeConversation)
    return tiny_checkpoint.tokenizer


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    """Returns exit status, stdout and stderr."""
    status = main(["generate", "--chat", "--attention", "single", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_turns_follow_each_other(capsys, no_model):
    turns = ["--system", "be brief", "--prompt", "a", "--prompt", "b", "--json"]
    status, out, _ = run(capsys, *turns)
    first, second = json.loads(out)["turns"]
    texts = [no_model.decode(turn["prompt_ids"]) for turn in (first, second)]
    assert (status, texts) == (0, ["<s>be brief<u>a<a>", "<s>be brief<u>a<a>ok<u>b<a>"])
    assert [first["text"], first["finish_reason"], first["tokens_per_s"]] == ["ok", "length", 4.0]
    assert second["reused_tokens"] == len(second["prompt_ids"]) - 20

    _, out, error = run(capsys, *turns[:-1])
    assert out == "> a\nok\n> b\nok\n"
    assert error.startswith("2 turns, 4 new tokens; 4.0 tokens a second in the last turn on 1 device by single\n")


def test_lines_of_standard_input_are_turns(capsys, monkeypatch, no_model):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\n\n  b \n\xff\n")))
    status, out, error = run(capsys)
    assert (status, out) == (2, "ok\nok\n")
    assert error == "tree-attn generate: error: standard input must be UTF-8, got byte 0xff at 0\n"


def test_on_a_terminal_a_line_that_is_no_text_ends_nothing(capsys, monkeypatch, no_model):
    stdin = io.TextIOWrapper(io.BytesIO(b"a\n\xff\nb\n"))
    monkeypatch.setattr(stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdin", stdin)
    status, out, error = run(capsys)
    assert (status, out) == (0, "ok\nok\n")
    assert "standard input must be UTF-8, got byte 0xff at 0: type the line again\n> " in error
    assert "2 turns, 4 new tokens" in error


def test_without_text_on_stdout_it_is_said_that_tokens_are_generated(capsys, monkeypatch, no_model):
    shown = []

    def record(*options):
        shown.append(phases.Phase(*options))
        return contextlib.nullcontext(shown[-1])

    monkeypatch.setattr(session, "phase", record)
    run(capsys, "--prompt", "a", "--json", "--max-new-tokens", "9")
    assert [phase.text for phase in shown[-2:]] == ["reading 7 tokens", "generating, 3 of 9"]  # 2 are done


@pytest.mark.slow
def test_a_turn_is_answered_over_the_cache_of_the_one_before(capsys, tiny_checkpoint):
    turns = ["--prompt", "ab", "--prompt", "cd"]
    status, out, _ = run(capsys, *turns, "--max-new-tokens", "4", "--json")
    first, second = json.loads(out)["turns"]
    assert (status, first["reused_tokens"]) == (0, 0)
    assert second["reused_tokens"] == len(first["prompt_ids"]) + 3
    prompt = tiny_checkpoint.tokenizer.decode(second["prompt_ids"])
    main(["generate", "--raw", "--prompt", prompt, "--attention", "single", "--max-new-tokens", "4", "--json"])
    assert json.loads(capsys.readouterr().out)["new_ids"] == second["new_ids"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--raw"], "--raw must be left out with --chat, which keeps one conversation, got True"),
        (["--out", "x"], "--out must be left out with --chat, which keeps one conversation, got x"),
        (["--max-batch", "2"], "--max-batch must be left out with --chat, which keeps one conversation, got 2"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
    ],
)
def test_options_of_other_forms_are_refused_before_a_model_is_opened(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(session, "open_with_progress", None)  # would fail if it were called
    assert run(capsys, *arguments) == (2, "", f"tree-attn generate: error: {message}\n")


def test_a_turn_too_long_says_so_after_what_was_answered(capsys, no_model):
    status, out, error = run(capsys, "--prompt", "a", "--prompt", "x" * 70, "--json")
    assert (status, out) == (2, "")
    assert "a prompt has 85 tokens, and the model 64 positions: shorten the prompt to 63 tokens or fewer" in error
