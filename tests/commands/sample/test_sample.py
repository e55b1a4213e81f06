"""`tree-attn sample`: the best of many samples, the bytes that a shared prompt takes, and what is refused."""

import contextlib
import json
import types

import pytest

from tree_attn.cli import main
from tree_attn.commands import session
from tree_attn.commands.sample import samples
from tree_attn.models.llama import LlamaConfig, parameters
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
SAMPLE = ["--prompt", PROMPT, "--num-samples", "6", "--max-new-tokens", "4", "--temperature", "2", "--json"]
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
    status, lines, _ = run(capsys, *SAMPLE, "--top", "2", "--share-prefix", "--devices", "3")
    _, alone, _ = run(capsys, *SAMPLE, "--attention", "single", "--no-share-prefix")
    everything = ["--num-components", "8", "--num-keys", "64"]
    _, sparse, _ = run(capsys, *SAMPLE, "--attention", "sparq", *everything, "--devices", "3")
    assert status == 0
    assert [one["new_ids"] for one in json.loads(sparse[-1])["samples"]] == [
        one["new_ids"] for one in json.loads(lines[-1])["samples"]
    ]
    assert json.loads(sparse[-1])["sparq"]["local_window"] == 16
    document, other = json.loads(lines[-1]), json.loads(alone[-1])
    assert [sample["new_ids"] for sample in document["samples"]] == [sample["new_ids"] for sample in other["samples"]]
    samples = document["samples"]
    means = [sample["mean_log_probability"] for sample in samples]
    assert means == sorted(means, reverse=True) and means[0] < 0
    assert 2 < len(samples) == len({sample["text"] for sample in samples}) <= 6
    for i in range(2):
        header = f"--- {i + 1} of {len(samples)} different samples: mean log-probability {means[i]:.3f}"
        assert lines[2 * i : 2 * i + 2] == [header, samples[i]["text"]]
    assert lines[4].endswith("for each of 6 samples; held once here") and len(lines) == 6
    assert alone[-2].endswith("; held for each sample here")
    prefix = {name: document[name] for name in document if "prefix" in name}
    assert prefix == {
        "shares_prefix": True,
        "prefix_tokens": 10,
        "prefix_bytes_shared": PREFIX_BYTES,
        "prefix_bytes_unshared": 6 * PREFIX_BYTES,
    }
    assert other["shares_prefix"] is False
    assert document["prefill_s"] > 0 < document["per_token_s"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-samples", "0"], "--num-samples must be at least 1, got 0"),
        (["--top", "0"], "--top must be at least 1, got 0"),
        (["--attention", "ring", "--share-prefix"], "share_prefixes=True: attention='ring' has no form for shared"),
        (["--attention", "sparq"], "--attention sparq needs --num-components and --num-keys, got neither"),
        (
            ["--attention", "sparq", "--num-components", "3", "--num-keys", "8", "--cache-dtype", "int8"],
            "cache_dtype='int8': attention='sparq' takes no scales; float8_e4m3fn needs none",
        ),
        (["--num-keys", "8"], "--num-keys: --attention must name sparq, got tree"),
        (
            ["--attention", "sparq", "--num-components", "9", "--num-keys", "8"],
            "num_components must be an integer of at least 1 and at most 8, got 9",
        ),
        (["--temperature", "-1"], "temperature must be 0 (greedy) or a finite number above it, got -1.0"),
        (["--max-new-tokens", "60"], "max_new_tokens must be at most 53 with a prompt of 11 tokens, got 60"),
    ],
)
def test_wrong_arguments_are_one_line_on_stderr(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(session, "load_with_progress", None)  # would fail if it were called
    status, lines, error = run(capsys, "--prompt", PROMPT, *arguments)
    assert (status, lines) == (2, [])
    assert error.startswith(f"tree-attn sample: error: {message}")
    assert error.count("\n") == 1
