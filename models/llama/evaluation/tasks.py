"""What sparse attentions do to a model: tasks made of text, scored token by token under each method.

Contexts are read densely, and the tokens after them under the method, as in SparQ's paper. Those tokens are given, not
generated: a greedy generation agrees with the text up to the first token whose logits have another maximum, so the
number of tokens before it is what a generation would have matched.

Sources: SparQ Attention, section 5 and appendix G (tasks, transfers, budgets), Table 3 and Figure A4 (the needle by
context and depth).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tree_attn import SparqOptions, attend
from tree_attn.cache import KVCache
from tree_attn.models.llama.attention import by_name, empty_cache
from tree_attn.models.llama.checkpoint.tokenizer import Tokenizer
from tree_attn.models.llama.evaluation.baselines import flexgen_decode, h2o_decode, key_scores, lm_infinite_decode
from tree_attn.models.llama.model import Llama
from tree_attn.models.llama.sharding import LlamaSharding
from tree_attn.sparq import SCORE_TEMPERATURES, transfers

MIN_PASSAGE = 128  # tokens of a context that must be text beside what a task adds to it
TOKENS_AT_ONCE = 32  # of a tail, so that the keys that SparQ gathers for each of them fit
NEEDLE = "The best thing to do in San Francisco is", "eat a sandwich and sit in Dolores Park on a sunny day."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """An attention for decoding, and its budget.

    Attributes:
      name: "dense", "sparq", "sparq_mean", "h2o", "lm_infinite" or "flexgen".
      num_keys: k, keys that each step attends to; None for dense.
      num_components: r, of SparQ.
      local_window: l, of SparQ; None: a quarter of its keys, as in the paper.
      score_temperature: of SparQ.
    """

    name: str
    num_keys: int | None = None
    num_components: int | None = None
    local_window: int | None = None
    score_temperature: str = "coverage"

    @property
    def is_sparq(self) -> bool:
        """Whether it is SparQ, without or with the mean value."""
        return self.name.startswith("sparq")

    def transfer_elements(self, num_keys: int, head_dim: int) -> int:
        """Elements moved per KV head and step at a length, by the paper's equations 3 and 11 and appendix G."""
        sizes = dict(num_keys=num_keys, head_dim=head_dim)
        if self.name == "dense":
            return transfers.dense_transfer_elements(**sizes)
        if self.is_sparq:
            return transfers.sparq_transfer_elements(
                num_components=self.num_components, num_kept=self.num_keys, **sizes
            )
        if self.name == "h2o":
            return transfers.h2o_transfer_elements(num_kept=self.num_keys, **sizes)
        if self.name == "flexgen":
            return transfers.flexgen_transfer_elements(num_kept=self.num_keys, **sizes)
        return transfers.lm_infinite_transfer_elements(head_dim=head_dim, num_kept=self.num_keys)

    def attend(self, query, cache: KVCache, layer, lengths, scores):
        """`(out, scores)` of the last T queries, causal, as `Attention.decode`; `scores` is what H2O keeps."""
        stored = cache.key[layer], cache.value[layer]
        if self.name == "h2o":
            return h2o_decode(query, *stored, scores, num_keys=self.num_keys, key_value_seq_lengths=lengths)
        how = dict(num_keys=self.num_keys, key_value_seq_lengths=lengths, is_causal=True)
        if self.name == "lm_infinite":
            return lm_infinite_decode(query, *stored, **how), scores
        if self.name == "flexgen":
            return flexgen_decode(query, *stored, **how), scores
        sharding = LlamaSharding(mesh=cache.mesh, sequence=cache.axis_name)
        sparq, name = self.sparq_options(), "single" if self.name == "dense" else "sparq"
        return by_name(name, sharding, sparq=sparq).decode(query, cache, layer, lengths), scores

    def sparq_options(self) -> SparqOptions | None:
        """Of SparQ; None of the others."""
        if not self.is_sparq:
            return None
        return SparqOptions(
            num_components=self.num_components, num_keys=self.num_keys, reallocate=self.name == "sparq_mean",
            local_window=self.num_keys // 4 if self.local_window is None else self.local_window,
            score_temperature=self.score_temperature,
        )  # fmt: skip

    def ablations(self) -> list["Method"]:
        """SparQ with another temperature, and with another local window; none of the others.

        Source: SparQ Attention, Figure 7b, for the temperature.
        """
        if not self.is_sparq:
            return []
        temperatures = [{"score_temperature": name} for name in SCORE_TEMPERATURES if name != self.score_temperature]
        windows = [{"local_window": count} for count in (0, self.num_keys // 2, self.num_keys)]
        return [dataclasses.replace(self, **change) for change in (*temperatures, *windows)]


def methods_for(ratio: float, num_keys: int, head_dim: int, num_kept: int) -> list[Method]:
    """Every method with the budget whose transfers are nearest to `ratio` of dense attention's at a length.

    SparQ keeps `num_kept` keys and is given components, as in the paper; FlexGen reads all of K, so it is left out
    where half is too much.

    Example:
      >>> [method.name for method in methods_for(1 / 4, num_keys=1024, head_dim=64, num_kept=64)]
      ['sparq', 'sparq_mean', 'h2o', 'lm_infinite']
    """
    target = ratio * transfers.dense_transfer_elements(num_keys=num_keys, head_dim=head_dim)
    nearest = lambda make, budgets: min(
        map(make, budgets), key=lambda method: abs(method.transfer_elements(num_keys, head_dim) - target)
    )
    sparq = lambda name: nearest(
        lambda r: Method(name=name, num_keys=num_kept, num_components=r), range(1, head_dim + 1)
    )
    budgets = range(20, num_keys + 1)
    found = [sparq("sparq"), sparq("sparq_mean")]
    found += [nearest(functools.partial(_keeping, name), budgets) for name in ("h2o", "lm_infinite")]
    if ratio >= 0.5:
        found.append(nearest(functools.partial(_keeping, "flexgen"), range(2, num_keys + 1)))
    return found


def _keeping(name: str, num_keys: int) -> Method:
    return Method(name=name, num_keys=num_keys)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """A context, the tokens that should follow it, and how many characters each of those stands for."""

    context: tuple[int, ...]
    tail: tuple[int, ...]
    tail_chars: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """How samples are made and scored.

    Attributes:
      make: `(tokenizer, text_ids, index, sizes, rng) -> Sample`; and `depth`, if `has_depth`.
      score: `(sample, is_match [T], nats [T]) -> float`.
      unit: of the score.
      higher_is_better: whether a larger score is the better one.
      has_depth: whether it is told how much of the text comes before what is asked for, from 0 to 1.
    """

    make: Callable[..., Sample]
    score: Callable[[Sample, np.ndarray, np.ndarray], float]
    unit: str
    higher_is_better: bool
    has_depth: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Tokens of each sample's context and of what follows it; samples.

    Raises:
      ValueError: a context in which a sample has no room.
    """

    context: int
    tail: int
    samples: int

    def __post_init__(self) -> None:
        if self.context < self.tail + MIN_PASSAGE:
            least = self.tail + MIN_PASSAGE
            raise ValueError(f"context={self.context}: must be at least tail + {MIN_PASSAGE} = {least}")


def _sample(tokenizer: Tokenizer, ids: Sequence[int], tail: Sequence[int]) -> Sample:
    chars = [len(tokenizer.decode(tail[: i + 1])) for i in range(len(tail))]
    return Sample(context=tuple(ids), tail=tuple(tail), tail_chars=tuple(np.diff([0, *chars]).tolist()))


def _passage(text_ids: np.ndarray, count: int, rng: np.random.Generator) -> list[int]:
    start = rng.integers(0, len(text_ids) - count + 1)
    return text_ids[start : start + count].tolist()


def language_modelling(tokenizer, text_ids, index, sizes: Sizes, rng) -> Sample:
    """A passage of the text and how it goes on."""
    ids = _passage(text_ids, sizes.context + sizes.tail, rng)
    return _sample(tokenizer, ids[: sizes.context], ids[sizes.context :])


def repetition(tokenizer, text_ids, index, sizes: Sizes, rng, cue: int = 32) -> Sample:
    """A passage, then the beginning of something in it: the rest of that should follow (the paper's section 5)."""
    gap = tokenizer.encode("\n...\n", add_special_tokens=False)
    passage = _passage(text_ids, sizes.context - cue - len(gap), rng)
    start = rng.integers(0, len(passage) - cue - sizes.tail + 1)
    again = passage[start : start + cue + sizes.tail]
    return _sample(tokenizer, [*passage, *gap, *again[:cue]], again[cue:])


def needle(tokenizer, text_ids, index, sizes: Sizes, rng) -> Sample:
    """A sentence hidden in the text, at a depth that grows with the index, and its beginning again at the end."""
    return needle_at_depth(tokenizer, text_ids, index, sizes, rng, depth=(index + 0.5) / sizes.samples)


def needle_at_depth(tokenizer, text_ids, index, sizes: Sizes, rng, depth: float) -> Sample:
    """A sentence hidden after `depth` of the text, and its beginning again at the end."""
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
    """The samples of a task from the tokens of a text, the same for one seed.

    Args:
      depth: for a task that `has_depth`, and for no other. The passages are the same at every depth.

    Raises:
      ValueError: an unknown task, a text shorter than a sample, or a depth that is not in [0, 1], or not None where
        the task has none.
    """
    if task not in TASKS:
        raise ValueError(f"task={task!r}: must be one of {', '.join(TASKS)}")
    text_ids = np.array(text_ids, np.int32)
    if len(text_ids) < sizes.context + sizes.tail:
        raise ValueError(
            f"text: has {len(text_ids)} tokens, fewer than the {sizes.context} + {sizes.tail} of one sample"
        )
    has_depth = TASKS[task].has_depth
    if has_depth != (depth is not None) or (has_depth and not 0 <= depth <= 1):
        raise ValueError(f"{depth=}: must be {'from 0 to 1' if has_depth else 'None'} for task={task!r}")
    rng = np.random.default_rng(seed)
    how = {"depth": depth} if has_depth else {}
    return [TASKS[task].make(tokenizer, text_ids, index, sizes, rng, **how) for index in range(sizes.samples)]


class Scorer:
    """Scores samples under methods, on one device. Programs are compiled once per method and shape.

    Keys and values are kept in `cache_dtype`, by default the model's.

    Example:
      >>> scorer = Scorer(model)
      >>> read = scorer.read([sample.context for sample in samples], room=len(samples[0].tail))
      >>> logits = scorer.follow(read, [sample.tail for sample in samples], Method(name="dense"))
    """

    def __init__(self, model: Llama, cache_dtype: DTypeLike | None = None):
        self._config, self._sharding = model.config, model.sharding
        self._dtype = model.embedding[...].dtype if cache_dtype is None else cache_dtype
        self._structure, self._parameters = nnx.split(model)
        self._read = jax.jit(self._read_context, donate_argnames="cache")
        self._follow = jax.jit(self._follow_tail, static_argnames="method")

    def read(self, contexts: Sequence[Sequence[int]], room: int):
        """All but the last token of contexts of one length, read densely, with room for `room` more.

        Returns what `follow` takes: the cache, H2O's scores `[L, B, K, S]`, and the last tokens.
        """
        tokens = np.array(contexts, np.int32)
        sizes = dict(batch=len(tokens), capacity=tokens.shape[1] - 1 + room, dtype=self._dtype)
        cache = empty_cache(self._config, self._sharding, **sizes)
        return *self._read(self._parameters, jnp.asarray(tokens[:, :-1]), cache=cache), tokens[:, -1:]

    def follow(self, read, tails: Sequence[Sequence[int]], method: Method) -> np.ndarray:
        """Logits of each token of the tails before it is read, float32 `[B, T, V]`."""
        cache, scores, last = read
        tails = np.array(tails, np.int32)
        tokens = np.concatenate([last, tails[:, :-1]], axis=1)
        logits = []
        for start in range(0, tokens.shape[1], TOKENS_AT_ONCE):
            part = jnp.asarray(tokens[:, start : start + TOKENS_AT_ONCE])
            of_part, (cache, scores) = self._follow(self._parameters, part, (cache, scores), method=method)
            logits.append(np.asarray(of_part))
        return np.concatenate(logits, axis=1)

    def _read_context(self, parameters, tokens, *, cache: KVCache):
        model = nnx.merge(self._structure, parameters)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :], tokens.shape)
        shape = (cache.key.shape[0], tokens.shape[0], cache.key.shape[3], cache.capacity)

        def dense(query, key, value, carry, layer):
            cache, scores = carry
            own = jnp.pad(key_scores(query, key), ((0, 0), (0, 0), (0, cache.capacity - tokens.shape[1])))
            out = attend(query, key, value, is_causal=True).out
            return out, (cache.write(key, value, layer=layer), scores.at[layer].set(own))

        _, (cache, scores) = model.apply(tokens, positions, (cache, jnp.zeros(shape, jnp.float32)), dense)
        return cache.advance(tokens.shape[1]), scores

    def _follow_tail(self, parameters, tokens, carry, *, method: Method):
        model = nnx.merge(self._structure, parameters)
        count = tokens.shape[1]
        positions = carry[0].lengths[:, None] + jnp.arange(count, dtype=jnp.int32)[None, :]

        def sparse(query, key, value, carry, layer):
            cache, scores = carry
            cache = cache.write(key, value, layer=layer)
            out, own = method.attend(query, cache, layer, cache.lengths + count, scores[layer])
            return out, (cache, scores.at[layer].set(own))

        logits, (cache, scores) = model.apply(tokens, positions, carry, sparse)
        return logits, (cache.advance(count), scores)


def score(task: str, samples: Sequence[Sample], logits: np.ndarray) -> list[float]:
    """The score of each sample from the logits `[B, T, V]` of its tail."""
    tails = np.array([sample.tail for sample in samples])
    is_match = logits.argmax(axis=-1) == tails
    of_tail = np.take_along_axis(logits, tails[:, :, None], axis=-1)[..., 0]
    top = logits.max(axis=-1)
    nats = top + np.log(np.exp(logits - top[..., None]).sum(axis=-1)) - of_tail
    return [TASKS[task].score(*one) for one in zip(samples, is_match, nats, strict=True)]
