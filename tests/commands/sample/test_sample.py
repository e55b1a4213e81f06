"""`tree-attn sample`: the best of many samples, the bytes that a shared prompt takes, and what is refused."""

import contextlib
import itertools
import json
import types

import pytest

from tree_attn.cli import main
from tree_attn.commands import session
from tree_attn.commands.sample import samples
from tree_attn.models.llama import Generation, LlamaConfig, parameters
from tree_attn.models.llama.checkpoint.open import Checkpoint

CONFIG = LlamaConfig(
    num_layers=1,
    hidden_size=16,
    intermediate_size=32,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    vocab_size=32,
    max_position=64,
)
PROMPT = "abcdefghijk"
SAMPLE = ["--prompt", PROMPT, "--num-samples", "6", "--max-new-tokens", "4", "--temperature", "2"]
# Keys and values of one layer, head dim 8, float32, for the ten tokens before the last.
PREFIX_BYTES = 2 * 8 * 4 * 10


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Puts a random model whose tokens are letters in the place of any that is named."""
    tokenizer = types.SimpleNamespace(
        chat_template=None,
        stop_ids=(),
        encode=lambda text: [ord(letter) % 32 for letter in text],
        decode=lambda ids: "".join(chr(96 + token) for token in ids),
    )
    make_create = lambda sharding, dtype, on_bytes: parameters.random(sharding, dtype)
    opened = Checkpoint(config=CONFIG, tokenizer=tokenizer, make_create=make_create)
    monkeypatch.setattr(session, "open_with_progress", lambda model: opened)


def run(capsys, *arguments: str) -> tuple[int, list[str], str]:
    """Returns exit status, lines of stdout, and stderr."""
    status = main(["sample", *arguments])
    captured = capsys.readouterr()
    return status, captured.out.splitlines(), captured.err


def test_other_ranks_see_every_step_end(monkeypatch, capsys):
    ended = []
    monkeypatch.setattr(samples, "steps", lambda: contextlib.nullcontext(lambda: ended.append(True)))
    status, _, _ = run(capsys, *SAMPLE, "--attention", "single")
    assert (status, len(ended)) == (0, 6 * 4)


@pytest.mark.slow
def test_the_best_samples_are_printed_and_the_prompt_is_held_once(capsys):
    several = ["--share-prefix", "--devices", "3"]
    status, lines, _ = run(capsys, *SAMPLE, "--top", "2", *several)
    _, (line,), _ = run(capsys, *SAMPLE, *several, "--json")
    _, (alone,), _ = run(capsys, *SAMPLE, "--attention", "single", "--no-share-prefix", "--json")
    everything = ["--num-components", "8", "--num-keys", "64"]
    _, (sparse,), _ = run(capsys, *SAMPLE, "--attention", "sparq", *everything, "--devices", "3", "--json")
    assert status == 0
    document, other, sparse = json.loads(line), json.loads(alone), json.loads(sparse)
    assert sparse["sparq"]["local_window"] == 16
    for one in (other, sparse):
        assert [sample["new_ids"] for sample in document["samples"]] == [sample["new_ids"] for sample in one["samples"]]
    samples = document["samples"]
    means = [sample["mean_log_probability"] for sample in samples]
    assert means == sorted(means, reverse=True) and means[0] < 0
    assert {sample["finish_reason"] for sample in samples} == {"length"}
    assert 2 < len(samples) == len({sample["text"] for sample in samples}) <= 6
    for i in range(2):
        header = f"--- {i + 1} of {len(samples)} different samples: mean log-probability {means[i]:.3f}"
        assert lines[2 * i : 2 * i + 2] == [header, samples[i]["text"]]
    assert lines[5] == "    640 B in all if held once (as here),"
    assert lines[6] == "    3.84 kB in all if each of 6 samples held them"
    assert lines[7].startswith("--- 6 samples, 24 new tokens, ")
    assert lines[7].endswith(" tokens a second together on 3 devices by tree (gather)") and len(lines) == 8
    prefix = {name: document[name] for name in document if "prefix" in name}
    assert prefix == {
        "shares_prefix": True,
        "prefix_tokens": 10,
        "prefix_bytes_shared": PREFIX_BYTES,
        "prefix_bytes_unshared": 6 * PREFIX_BYTES,
    }
    assert other["shares_prefix"] is False
    assert document["prefill_s"] > 0 < document["per_token_s"]


def test_each_prompt_has_its_own_samples(capsys, monkeypatch):
    """The samples are those of the library's call, in its order; the model itself does not run."""
    monkeypatch.setattr(samples, "load_generator", lambda args, request: FakeGenerator())
    monkeypatch.setattr(samples.memory, "bytes_kept", lambda generator, num_tokens: 64 * num_tokens)
    calls, phases = [], []
    real, ticks = session.phase, itertools.count()
    record = lambda title, *options, **named: phases.append((title, *options)) or real(title, *options, **named)
    monkeypatch.setattr(session, "phase", record)
    monkeypatch.setattr(samples, "time", types.SimpleNamespace(perf_counter=lambda: 2 * next(ticks)))

    def draw(generator, prompts, max_new_tokens, *, num_samples, **options):
        calls.append((prompts, num_samples))
        for _ in range(num_samples * len(prompts)):
            options["on_token"](0, 1)
        return [sampled(prompt, token) for prompt in prompts for token in range(1, num_samples + 1)]

    monkeypatch.setattr(samples, "generate", draw)
    arguments = ["--prompt", "ab", "--prompt", "cde", "--num-samples", "2", "--top", "1", "--attention", "single"]
    arguments += ["--max-new-tokens", "8"]
    status, lines, _ = run(capsys, *arguments)
    assert (status, calls) == (0, [([[1, 2], [3, 4, 5]], 2)])
    assert lines[:4] == [
        "--- prompt 1 of 2, 1 of 2 different samples: mean log-probability -1.000",
        "a",
        "--- prompt 2 of 2, 1 of 2 different samples: mean log-probability -1.000",
        "a",
    ]
    assert lines[-3:] == [
        "    192 B in all if held once,",
        "    384 B in all if each of 2 samples held them (as here)",
        "--- 4 samples, 4 new tokens, 2.0 tokens a second together on 1 device by single",
    ]
    assert ("drawing tokens of 4 samples", 4 * 8) in phases
    _, (line,), _ = run(capsys, *arguments, "--json")
    document = json.loads(line)
    assert [one["prompt_ids"] for one in document["prompts"]] == [[1, 2], [3, 4, 5]]
    assert [[sample["text"] for sample in one["samples"]] for one in document["prompts"]] == [["a", "b"]] * 2
    assert document["prefix_bytes_unshared"] == 2 * document["prefix_bytes_shared"] == 2 * 3 * 64


def test_one_sample_is_one(capsys, monkeypatch):
    monkeypatch.setattr(samples, "load_generator", lambda args, request: FakeGenerator())
    monkeypatch.setattr(samples.memory, "bytes_kept", lambda generator, num_tokens: 64 * num_tokens)
    monkeypatch.setattr(samples, "generate", lambda generator, prompts, *_, **__: [sampled(prompts[0], 1)])
    status, lines, _ = run(capsys, "--prompt", "ab", "--num-samples", "1", "--attention", "single")
    assert (status, lines[:2]) == (0, ["--- 1 of 1 different sample: mean log-probability -1.000", "a"])
    assert lines[2] == "--- keys and values of 1 prompt token: 64 B" and lines[3].startswith("--- 1 sample, ")


def sampled(prompt: list[int], token: int) -> Generation:
    """A sample of one token; the lower the token, the more likely."""
    times = dict(prefill_s=1.0, per_token_s=None)
    means = dict(log_probability=-token, mean_log_probability=-token)
    return Generation(prompt_ids=prompt, new_ids=[token], stopped=True, **times, **means)


class FakeGenerator:
    """The parts of a generator that the command itself calls."""

    def compile(self, prompts, max_new_tokens, **_):
        """Compiles nothing."""

    def prefix_tree(self, prompts, share_prefixes):
        """Returns a tree that shares nothing."""
        return types.SimpleNamespace(num_shared=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-samples", "0"], "--num-samples must be at least 1, got 0"),
        (["--top", "0"], "--top must be at least 1, got 0"),
        (["--attention", "ring", "--share-prefix"], "--share-prefix=True: --attention='ring' has no form for shared"),
        (["--attention", "sparq"], "--attention sparq needs --num-components and --num-keys, got neither"),
        (
            ["--attention", "sparq", "--num-components", "3", "--num-keys", "8", "--cache-dtype", "int8"],
            "--cache-dtype='int8': --attention='sparq' takes no scales; float8_e4m3fn needs none",
        ),
        (["--num-keys", "8"], "--num-keys: --attention must name sparq, got tree"),
        (
            ["--attention", "sparq", "--num-components", "9", "--num-keys", "8"],
            "--num-components must be an integer of at least 1 and at most 8, got 9",
        ),
        (["--temperature", "-1"], "--temperature must be 0 (greedy) or a finite number above it, got -1.0"),
        (["--max-new-tokens", "60"], "--max-new-tokens must be at most 53 after a prompt of 11 tokens, got 60"),
    ],
)
def test_wrong_arguments_are_one_line_on_stderr(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(session, "load_with_progress", None)  # would fail if it were called
    status, lines, error = run(capsys, "--prompt", PROMPT, *arguments)
    assert (status, lines) == (2, [])
    assert error.startswith(f"tree-attn sample: error: {message}")
    assert error.count("\n") == 1
