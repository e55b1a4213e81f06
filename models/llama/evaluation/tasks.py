"""Tasks made of a text: samples of a context and its continuation, and the score of a continuation's logits.

Sources: SparQ Attention, section 5 and appendix G (tasks), Table 3 and Figure A4 (the needle by context and depth).
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from tree_attn.arguments import one_of
from tree_attn.models.llama.checkpoint.tokenizer import Tokenizer

MIN_PASSAGE = 128  # tokens of a context that must be text beside what a task adds to it
NEEDLE = "The best thing to do in San Francisco is", "eat a sandwich and sit in Dolores Park on a sunny day."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """A context, the tokens that should follow it, and the number of characters of each of those."""

    context: tuple[int, ...]
    tail: tuple[int, ...]
    tail_chars: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A kind of samples, and its score.

    Attributes:
      make: `(tokenizer, text_ids, index, sizes, rng) -> Sample`; and `depth`, if `has_depth`.
      score: `(sample, is_match [T], nats [T]) -> float`.
      unit: of the score.
      higher_is_better: whether a larger score is the better one.
      has_depth: whether `make` takes `depth`, the share of the text before the hidden sentence, from 0 to 1.
    """

    make: Callable[..., Sample]
    score: Callable[[Sample, np.ndarray, np.ndarray], float]
    unit: str
    higher_is_better: bool
    has_depth: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The number of tokens of each sample's context and tail, and of samples.

    Raises:
      ValueError: a context in which a sample has no room.
    """

    context: int
    tail: int
    samples: int

    def __post_init__(self) -> None:
        if self.context < self.tail + MIN_PASSAGE:
            minimum = self.tail + MIN_PASSAGE
            raise ValueError(f"context must be at least tail + {MIN_PASSAGE} = {minimum}, got {self.context}")


def _sample(tokenizer: Tokenizer, ids: Sequence[int], tail: Sequence[int]) -> Sample:
    chars = [len(tokenizer.decode(tail[: i + 1])) for i in range(len(tail))]
    return Sample(context=tuple(ids), tail=tuple(tail), tail_chars=tuple(np.diff([0, *chars]).tolist()))


def _passage(text_ids: np.ndarray, count: int, rng: np.random.Generator) -> list[int]:
    start = rng.integers(0, len(text_ids) - count + 1)
    return text_ids[start : start + count].tolist()


def language_modelling(tokenizer, text_ids, index, sizes: Sizes, rng) -> Sample:
    """Makes a passage of the text and its continuation."""
    ids = _passage(text_ids, sizes.context + sizes.tail, rng)
    return _sample(tokenizer, ids[: sizes.context], ids[sizes.context :])


def repetition(tokenizer, text_ids, index, sizes: Sizes, rng, cue: int = 32) -> Sample:
    """Makes a passage and the beginning of something in it, the rest of which should follow (the paper's section 5)."""
    gap = tokenizer.encode("\n...\n", add_special_tokens=False)
    passage = _passage(text_ids, sizes.context - cue - len(gap), rng)
    start = rng.integers(0, len(passage) - cue - sizes.tail + 1)
    again = passage[start : start + cue + sizes.tail]
    return _sample(tokenizer, [*passage, *gap, *again[:cue]], again[cue:])


def needle(tokenizer, text_ids, index, sizes: Sizes, rng) -> Sample:
    """Hides a sentence in the text, at a depth that grows with the index, and repeats its beginning at the end."""
    return needle_at_depth(tokenizer, text_ids, index, sizes, rng, depth=(index + 0.5) / sizes.samples)


def needle_at_depth(tokenizer, text_ids, index, sizes: Sizes, rng, depth: float) -> Sample:
    """Hides a sentence after `depth` of the text, and repeats its beginning at the end."""
    question, answer = (tokenizer.encode(text, add_special_tokens=False) for text in (NEEDLE[0], " " + NEEDLE[1]))
    before = tokenizer.encode("\n", add_special_tokens=False)
    hidden = [*before, *question, *answer, *before]
    passage = _passage(text_ids, sizes.context - len(hidden) - len(before) - len(question), rng)
    start = round(depth * len(passage))
    return _sample(tokenizer, [*passage[:start], *hidden, *passage[start:], *before, *question], answer)


def _bits_per_character(sample: Sample, is_match, nats) -> float:
    return float(nats.sum() / math.log(2) / sum(sample.tail_chars))


def _matched_characters(sample: Sample, is_match, nats) -> float:
    matched = int(np.argmin(is_match)) if not is_match.all() else len(is_match)
    return float(sum(sample.tail_chars[:matched]))


def _is_matched(sample: Sample, is_match, nats) -> float:
    return float(is_match.all())


def _matched_share(sample: Sample, is_match, nats) -> float:
    return float(np.mean(is_match))


TASKS = {
    "repetition": Task(make=repetition, score=_matched_characters, unit="characters matched", higher_is_better=True),
    "needle": Task(make=needle, score=_matched_share, unit="share of answer tokens", higher_is_better=True),
    "language_modelling": Task(
        make=language_modelling, score=_bits_per_character, unit="bits per character", higher_is_better=False
    ),
    "needle_at_depth": Task(
        make=needle_at_depth, score=_is_matched, unit="share of whole answers", higher_is_better=True, has_depth=True
    ),
}


def make_samples(
    task: str,
    tokenizer: Tokenizer,
    text_ids: Sequence[int],
    sizes: Sizes,
    seed: int,
    depth: float | None = None,
) -> list[Sample]:
    """Makes the samples of a task from the tokens of a text, the same for one seed.

    Args:
      depth: for a task that `has_depth`, and for no other. The passages are the same at every depth.

    Raises:
      ValueError: an unknown task, a text shorter than a sample, or a depth that is not in [0, 1], or not None where
        the task has none.
    """
    one_of("task", task, tuple(TASKS))
    text_ids = np.array(text_ids, np.int32)
    if len(text_ids) < sizes.context + sizes.tail:
        raise ValueError(f"text must have the {sizes.context} + {sizes.tail} tokens of one sample, got {len(text_ids)}")
    has_depth = TASKS[task].has_depth
    if has_depth != (depth is not None) or (has_depth and not 0 <= depth <= 1):
        raise ValueError(f"depth must be {'from 0 to 1' if has_depth else 'None'} for task={task!r}, got {depth}")
    rng = np.random.default_rng(seed)
    options = {"depth": depth} if has_depth else {}
    return [TASKS[task].make(tokenizer, text_ids, index, sizes, rng, **options) for index in range(sizes.samples)]


def score(task: str, samples: Sequence[Sample], logits: np.ndarray) -> list[float]:
    """Returns the score of each sample from the logits `[B, T, V]` of its tail."""
    tails = np.array([sample.tail for sample in samples])
    is_match = logits.argmax(axis=-1) == tails
    tail_logits = np.take_along_axis(logits, tails[:, :, None], axis=-1)[..., 0]
    top = logits.max(axis=-1)
    nats = top + np.log(np.exp(logits - top[..., None]).sum(axis=-1)) - tail_logits
    return [TASKS[task].score(*sample) for sample in zip(samples, is_match, nats, strict=True)]
