"""SentencePiece vocabularies in GGUF, against SentencePiece's own rule of joining neighbours."""

import itertools
import pathlib
import random

import pytest

from tree_attn.models.llama.checkpoint import gguf_tokenizer
from tree_attn.models.llama.checkpoint.reading import CheckpointError
from tree_attn.models.llama.checkpoint.tokenizer import TextStream, Tokenizer

pytest.importorskip("tokenizers", reason="needs tokenizers: pip install 'tree-attn[demo]'")

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# Pieces from the highest score to the lowest: joined first, joined last.
JOINED = "ab bc abc ca bca cab aa aaaa _a _ab ab_ _b bb __ ____ abcab bcabc c_ c_a".replace("_", SPACE).split(" ")
PIECES = [*JOINED, *"abc", SPACE]
TOKENS = ["<unk>", "<s>", "</s>", *BYTES, *PIECES, "[INST]", "<tag>"]
TYPES = [2, 3, 3, *[6] * 256, *[1] * len(PIECES), 3, 4]
SCORES = [0.0] * 259 + [-float(i) for i in range(len(PIECES))] + [0.0, 0.0]
METADATA = {
    "model": "llama",
    "tokens": TOKENS,
    "token_type": TYPES,
    "scores": SCORES,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class FakeGGUF:
    """Metadata as `GGUFFile` gives them."""

    def __init__(self, path, **changes):
        self.path, self.metadata = path, {**METADATA, **changes}

    def get(self, key, default=None):
        return self.metadata.get(key.removeprefix("tokenizer.ggml."), default)

    require = get


def tokenizer_of(**changes) -> Tokenizer:
    return gguf_tokenizer.from_gguf(FakeGGUF(pathlib.Path("fake.gguf"), **changes))


def joined_by_score(text: str) -> list[int]:
    """Joins, while it can, the leftmost two neighbours that make the piece of the highest score."""
    symbols = list(SPACE + text.replace(" ", SPACE)) if text else []
    index = {token: i for i, token in enumerate(TOKENS) if TYPES[i] == 1}
    while True:
        pairs = [(SCORES[index[a + b]], -at) for at, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in index]
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
    as_bytes = lambda symbol: [3 + byte for byte in symbol.encode()]
    return [i for symbol in symbols for i in ([index[symbol]] if symbol in index else as_bytes(symbol))]


def test_token_ids_are_those_of_sentencepieces_rule():
    tokenizer, draw = tokenizer_of(), random.Random(0)
    for _ in range(300):
        text = "".join(
            draw.choices("abc \N{SLIGHTLY SMILING FACE}x\n", [4, 4, 4, 3, 0.3, 0.3, 0.2], k=draw.randrange(30))
        )
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == joined_by_score(text)
        assert tokenizer.decode(ids) == text


def test_the_prefix_comes_first_and_special_tokens_are_cut_out():
    tokenizer = tokenizer_of()
    plain = lambda text: tokenizer.encode(text, add_special_tokens=False)
    inst = TOKENS.index("[INST]")
    assert tokenizer.encode("ab") == [1, *plain("ab")]
    # A space is put before what follows a special token too, as the published tokenizers of Llama 2 do.
    assert tokenizer.encode("[INST]ab<tag>") == [1, inst, *plain("ab"), inst + 1]
    assert tokenizer.decode([1, inst, *plain("ab"), 2]) == "ab"
    assert tokenizer.stop_ids == (2,)
    bare = tokenizer_of(add_space_prefix=False, add_bos_token=False)
    assert bare.encode("ab") == [TOKENS.index("ab")]
    assert bare.decode(bare.encode(" ab")) == " ab"


def test_a_stream_gives_the_text_of_all_tokens():
    tokenizer = tokenizer_of()
    text = "abc \N{SLIGHTLY SMILING FACE} ab  \nc"
    stream, ids = TextStream(tokenizer), tokenizer.encode(text)
    assert "".join([*map(stream.push, ids), stream.flush()]) == text == tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": [0.0]}, r"tokenizer.ggml.scores must be a finite number for each of \d+ tokens"),
        ({"scores": [float("nan")] * len(TOKENS)}, "tokenizer.ggml.scores must be a finite number"),
        ({"scores": [0] * len(TOKENS)}, "tokenizer.ggml.scores must be an array of numbers"),
        ({"tokens": ["x" * 1001, *TOKENS[1:]]}, "tokenizer.ggml.tokens has one of more than 1000 characters"),
        ({"token_type": TYPES[1:]}, "tokenizer.ggml.token_type has"),
        ({"add_space_prefix": 1}, "tokenizer.ggml.add_space_prefix must be true or false"),
    ],
)
def test_wrong_metadata_are_refused(changes, message):
    with pytest.raises(CheckpointError, match=f"fake.gguf: {message}"):
        tokenizer_of(**changes)
