"""Hydragen's Figure 5: facts in a long document, and questions about them that share it, or do not."""

import functools
import pathlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tree_attn.commands import session
from tree_attn.devices import started_devices
from tree_attn.measure import provenance
from tree_attn.models.llama import Generator, Llama, by_name
from tree_attn.models.llama.checkpoint.tokenizer import Tokenizer

COLORS = ("black", "white", "brown", "red", "grey", "golden", "blue", "green")
SYLLABLES = ("ba", "do", "fi", "ka", "lu", "mo", "ne", "ri", "su", "to", "va", "zo")
FACT = "The dog named {name} has fur that is {color}."
QUESTION = "\n\nQuestion: What color is the fur of the dog named {name}?\nAnswer: The dog named {name} has fur that is"
NEW_TOKENS = 9  # the first is the prefill's; a color has one or two
TRIALS = 3


def facts(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Returns so many different names, each with a color.

    Example:
      >>> len(dict(facts(256)))
      256
    """
    rng, found = np.random.default_rng(seed), {}
    while len(found) < count:
        name = "".join(rng.choice(SYLLABLES, size=3)).capitalize()
        found.setdefault(name, str(rng.choice(COLORS)))
    return list(found.items())


def document(text: str, tokenizer: Tokenizer, hidden: Sequence[tuple[str, str]], num_tokens: int) -> list[int]:
    """Returns the tokens of the beginning of a text with the facts between its lines, evenly: `num_tokens` or fewer.

    Raises:
      ValueError: the facts alone have more tokens, or the text is too short.
    """
    sentences = [FACT.format(name=name, color=color) for name, color in hidden]
    room = num_tokens - len(tokenizer.encode("\n".join(sentences) + "\n" * len(sentences)))
    lines = text[: max(room, 0) * 4].splitlines()
    while lines and len(tokenizer.encode("\n".join(lines))) > room:
        lines = lines[: int(len(lines) * 0.95)]
    if len(lines) < len(sentences):
        raise ValueError(
            f"--text must have a line for each of {len(sentences)} facts within {num_tokens} tokens, got {len(lines)}"
        )
    for index in reversed(range(len(sentences))):
        lines.insert(index * len(lines) // len(sentences), sentences[index])
    return tokenizer.encode("\n".join(lines))[:num_tokens]


def measurements(cases: Sequence[Mapping[str, Any]]) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yields the fields that name each row, and what measures it; the model is read once, with the first."""
    loaded: dict[str, tuple[Llama, Tokenizer]] = {}
    for case in cases:
        labels = {name: value for name, value in case.items() if name != "text"}
        yield labels, functools.partial(_measure, case, loaded)


def _measure(case: Mapping[str, Any], loaded: dict[str, tuple[Llama, Tokenizer]]) -> dict[str, Any]:
    """Answers all questions together, and returns the fields of the row."""
    model, tokenizer = loaded.get(case["model"]) or loaded.setdefault(case["model"], _load(case["model"]))
    hidden, is_shared = facts(case["questions"]), case["is_shared"]
    text = pathlib.Path(case["text"]).read_text(encoding="utf-8")
    before = document(text, tokenizer, hidden, case["document_tokens"])
    prompts = [before + tokenizer.encode(QUESTION.format(name=name), add_special_tokens=False) for name, _ in hidden]
    generator = Generator(model, by_name("single", model.sharding))
    with session.phase("compiling"):
        generator.compile(prompts, NEW_TOKENS, share_prefixes=is_shared)
    prefill_s, decode_s = [], []
    with session.phase("answering", TRIALS) as answering:
        for _ in range(TRIALS + 1):  # the first is not timed
            steps = list(generator.stream(prompts, NEW_TOKENS, share_prefixes=is_shared))
            prefill_s.append(steps[0].seconds)
            decode_s.append(sum(step.seconds for step in steps[1:]))
            answering.advance()
    answers = [tokenizer.decode([int(step.tokens[i]) for step in steps]) for i in range(len(prompts))]
    is_right = [answer.strip().lower().startswith(color) for answer, (_, color) in zip(answers, hidden, strict=True)]
    return {
        "tokens_read": len(before), "new_tokens": NEW_TOKENS - 1, "trials": TRIALS,
        "prefill_s": statistics.median(prefill_s[1:]), "decode_s": statistics.median(decode_s[1:]),
        "decode_trials_s": decode_s[1:], "right": sum(is_right) / len(is_right), **provenance.clocks(),
    }  # fmt: skip


def _load(model: str) -> tuple[Llama, Tokenizer]:
    checkpoint = session.open_with_progress(model)
    place = session.Place(devices=(started_devices()[0],))
    return session.load_with_progress(checkpoint, place.sharding(checkpoint.config), place.dtype), checkpoint.tokenizer
