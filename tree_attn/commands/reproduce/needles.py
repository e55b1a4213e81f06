"""Hydragen's Figure 5: facts in a long document, and questions about them that share it, or do not."""

import functools
import pathlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tree_attn.commands import session
from tree_attn.devices import started_devices
from tree_attn.measure import provenance
from tree_attn.models.llama import Generator, by_name
from tree_attn.models.llama.checkpoint.tokenizer import Tokenizer

COLORS = ("black", "white", "brown", "red", "grey", "golden", "blue", "green")
SYLLABLES = ("ba", "do", "fi", "ka", "lu", "mo", "ne", "ri", "su", "to", "va", "zo")
FACT = "The dog named {name} has fur that is {color}."
QUESTION = "\n\nQuestion: What color is the fur of the dog named {name}?\nAnswer: The dog named {name} has fur that is"
NEW_TOKENS = 9  # the first is the prefill's; a color has one or two


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
    """Returns the tokens of the beginning of a text with the facts among its words, evenly: `num_tokens` or fewer.

    Raises:
      ValueError: with the facts there is room for fewer words than twice the facts, or the text has fewer.
    """
    sentences = ["\n" + FACT.format(name=name, color=color) + "\n" for name, color in hidden]
    room = num_tokens - len(tokenizer.encode("".join(sentences)))
    words = text.split()[: max(room, 0)]
    while words and len(tokenizer.encode(" ".join(words))) > room:
        words = words[: int(len(words) * 0.95)]
    if len(words) < 2 * len(sentences):
        raise ValueError(
            f"--text must have {2 * len(sentences)} words for {len(sentences)} facts within {num_tokens} tokens, got "
            f"{len(words)}"
        )
    count = len(words)
    for index in reversed(range(len(sentences))):
        words.insert(index * count // len(sentences), sentences[index])
    return tokenizer.encode(" ".join(words))[:num_tokens]


def measurements(
    cases: Sequence[Mapping[str, Any]], attempt: Callable[..., dict[str, Any]]
) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    """Yields the fields that name each row, and what measures it; the model is read with the first that is measured.

    Args:
      attempt: calls its first argument with the others, and makes a field of an error, such as too little memory. An
        error before that, when the model or the text is read, is raised.
    """
    answering = functools.cache(functools.partial(_Answering, cases))
    for case in cases:
        labels = {name: value for name, value in case.items() if name != "text"}
        yield labels, lambda case=case: attempt(answering().row, case)


class _Answering:
    """A model that answers the questions of several cases, whose documents are made first: each must have room."""

    def __init__(self, cases: Sequence[Mapping[str, Any]]):
        name, text = cases[0]["model"], pathlib.Path(cases[0]["text"]).read_text(encoding="utf-8")
        checkpoint = session.open_with_progress(name)
        self._tokenizer = checkpoint.tokenizer
        self._documents = {
            case["questions"]: document(text, self._tokenizer, facts(case["questions"]), case["document_tokens"])
            for case in cases
        }
        place = session.Place(devices=(started_devices()[0],))
        self._model = session.load_with_progress(checkpoint, place.sharding(checkpoint.config), place.dtype)

    def row(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """Answers all questions of a case together, and returns the fields of its row."""
        hidden, before, is_shared = facts(case["questions"]), self._documents[case["questions"]], case["is_shared"]
        encode = functools.partial(self._tokenizer.encode, add_special_tokens=False)
        prompts = [before + encode(QUESTION.format(name=name)) for name, _ in hidden]
        generator = Generator(self._model, by_name("single", self._model.sharding))
        with session.phase("compiling"):
            generator.compile(prompts, NEW_TOKENS, share_prefixes=is_shared)
        prefill_s, decode_s = [], []
        num_warm = 1 if case["trials"] > 1 else 0  # runs that are not timed
        with session.phase("answering", num_warm + case["trials"]) as answering:
            for _ in range(num_warm + case["trials"]):
                steps = list(generator.stream(prompts, NEW_TOKENS, share_prefixes=is_shared))
                prefill_s.append(steps[0].seconds)
                decode_s.append(sum(step.seconds for step in steps[1:]))
                answering.advance()
        answers = [self._tokenizer.decode([int(step.tokens[i]) for step in steps]) for i in range(len(prompts))]
        pairs = zip(answers, hidden, strict=True)
        right = [answer.strip().lower().startswith(color) for answer, (_, color) in pairs]
        return {
            "tokens_read": len(before), "new_tokens": NEW_TOKENS - 1,
            "prefill_s": statistics.median(prefill_s[num_warm:]),
            "decode_s": statistics.median(decode_s[num_warm:]), "decode_trials_s": decode_s[num_warm:],
            "right": sum(right) / len(right), **provenance.clocks(),
        }  # fmt: skip
