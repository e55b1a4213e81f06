"""Facts hidden in a document: all are in it, between its lines, within the number of tokens."""

import itertools

import pytest

from tree_attn.commands.reproduce import needles, runs
from tree_attn.commands.reproduce.experiment import Steps


class Letters:
    """A tokenizer of one token for each letter."""

    def encode(self, text, add_special_tokens=True):
        return [ord(letter) for letter in text]

    def decode(self, ids):
        return "".join(map(chr, ids))


TEXT = "\n".join(f"line {i}" for i in range(1000))


def test_a_document_has_all_facts_among_its_words():
    hidden = needles.facts(8)
    text = Letters().decode(needles.document(TEXT, Letters(), hidden, 1200))
    assert 1000 < len(text) <= 1200
    places = [text.index(f"\n{needles.FACT.format(name=name, color=color)}\n") for name, color in hidden]
    assert places == sorted(places) and min(b - a for a, b in itertools.pairwise(places)) > 60
    words = [word for line in text.split("\n") if not line.startswith("The dog") for word in line.split()]
    assert words == TEXT.split()[: len(words)]


def test_facts_have_different_names_and_follow_from_the_seed():
    assert len(dict(needles.facts(256))) == 256 and needles.facts(5) == needles.facts(9)[:5]
    assert needles.facts(5, seed=1) != needles.facts(5)


def test_too_short_a_document_is_refused():
    with pytest.raises(ValueError, match="--text must have 16 words for 8 facts within 300 tokens, got"):
        needles.document(TEXT, Letters(), needles.facts(8), 300)


def test_a_case_without_memory_is_a_row_with_an_error_and_the_text_is_refused(monkeypatch):
    class Answering:
        def __init__(self, cases):
            if cases[0]["text"] == "short":
                raise ValueError("--text must have more words")

        def row(self, case):
            if case["questions"] > 64:
                raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
            return {"decode_s": 1.0}

    monkeypatch.setattr(needles, "_Answering", Answering)
    cases = [{"text": "long", "questions": count} for count in (64, 256)]
    measured = runs._measurements(Steps(kind="needles", cases=cases), 32)
    rows = [labels | measure() for labels, measure in measured]
    assert rows[0] == {"questions": 64, "decode_s": 1.0}
    assert rows[1] == {"questions": 256, "error": "RuntimeError: RESOURCE_EXHAUSTED: out of memory"}
    ((_, measure),) = runs._measurements(Steps(kind="needles", cases=[{"text": "short", "questions": 8}]), 32)
    with pytest.raises(ValueError, match="--text"):
        measure()
