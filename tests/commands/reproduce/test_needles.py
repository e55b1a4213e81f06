"""Facts hidden in a document: all are in it, between its lines, within the number of tokens."""

import itertools

import pytest

from tree_attn.commands.reproduce import needles


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
