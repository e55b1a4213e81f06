"""SentencePiece's byte-pair tokenizers in GGUF, as Llama 2 and Mistral have: pieces with scores in place of merges."""

import math
from collections.abc import Sequence
from typing import Any

from tree_attn.models.llama.checkpoint.reading import CheckpointError

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
# Every cut of a piece is tried; published pieces have at most 48 characters.
MAX_PIECE_LENGTH = 1000
_NORMAL, _UNKNOWN, _USER_DEFINED = 1, 2, 4


def sentencepiece_core(
    tokenizers: Any,
    file_name: str,
    vocabulary: dict[str, int],
    scores: Sequence[float],
    types: Sequence[int],
    has_space_prefix: bool,
) -> Any:
    """Returns the `tokenizers.Tokenizer` of a vocabulary of pieces, without special tokens.

    SentencePiece joins the two neighbours that make the piece of the highest score, and so on. That is byte-pair
    encoding whose merges are all cuts of all pieces, ordered by the scores of what they make.

    Args:
      tokenizers: the package.
      file_name: the file, which errors name.
      vocabulary: index of each piece.
      scores, types: of each piece.
      has_space_prefix: whether a space is put before a text, and before what follows a special token.

    Raises:
      CheckpointError: scores that are not finite, or a piece of more than `MAX_PIECE_LENGTH` characters.

    Source: https://github.com/google/sentencepiece/blob/master/src/bpe_model.cc
    """
    if len(scores) != len(vocabulary) or not all(map(math.isfinite, scores)):
        raise CheckpointError(
            f"{file_name}: tokenizer.ggml.scores must be a finite number for each of {len(vocabulary)} tokens"
        )
    if max(map(len, vocabulary), default=0) > MAX_PIECE_LENGTH:
        raise CheckpointError(f"{file_name}: tokenizer.ggml.tokens has one of more than {MAX_PIECE_LENGTH} characters")
    unknown = next((piece for piece, kind in zip(vocabulary, types, strict=True) if kind == _UNKNOWN), None)
    bpe = tokenizers.models.BPE(
        vocabulary, _merges(vocabulary, scores, types), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    core = tokenizers.Tokenizer(bpe)
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    prefix = [normalizers.Prepend(_SPACE)] if has_space_prefix else []
    core.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    without_prefix = [decoders.Strip(" ", 1, 0)] if has_space_prefix else []
    core.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *without_prefix]
    )
    return core


def _merges(vocabulary: dict[str, int], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Returns the cuts of all pieces into two others, in the order in which neighbours are joined."""
    pieces = {piece for piece, kind in zip(vocabulary, types, strict=True) if kind in (_NORMAL, _USER_DEFINED)}
    ordered = sorted(pieces, key=lambda piece: (-scores[vocabulary[piece]], vocabulary[piece]))
    cuts = ((piece[:at], piece[at:]) for piece in ordered for at in range(1, len(piece)))
    return [(left, right) for left, right in cuts if left in pieces and right in pieces]
