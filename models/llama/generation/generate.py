"""Generation until a stop token or a limit: the result of each prompt, and the best of several samples."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Collection, Iterator, Sequence

from tree_attn.arguments import check_integer, is_integer
from tree_attn.models.llama.generation.generator import Generator, Step
from tree_attn.models.llama.generation.queue import stream_queue
from tree_attn.models.llama.generation.request import (
    check_ids,
    check_max_batch,
    check_request,
    check_stop_ids,
    check_tokens,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """The result of one prompt.

    Attributes:
      prompt_ids: the prompt.
      new_ids: the tokens generated, without the stop token.
      stopped: whether a stop token ended it, rather than the limit.
      prefill_s: from prompts to first token, compilation excluded; shared by those that were prefilled together.
      per_token_s: median over its later tokens; None when there were none.
      log_probability: sum of `sampling.log_probability` over the tokens of this call, the stop token included.
      mean_log_probability: that sum divided by the number of those tokens.
    """

    prompt_ids: list[int]
    new_ids: list[int]
    stopped: bool
    prefill_s: float
    per_token_s: float | None
    log_probability: float
    mean_log_probability: float


def generate(
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    num_samples: int = 1,
    stop_ids: Collection[int] = (),
    on_token: Callable[[int, int], None] | None = None,
    done: Sequence[Sequence[int]] | None = None,
    share_prefixes: bool | None = None,
    max_batch: int | None = None,
) -> list[Generation]:
    """Generates until each sequence meets a stop token or has `max_new_tokens`.

    Sequences are decoded together; a stopped one is computed on, in vain, until all have stopped. Where there are more
    than `max_batch`, its batch slot goes to the next prompt instead (`stream_queue`). The tokens are the same.

    With `done`, an interrupted generation continues with the same tokens, greedy or drawn: a step's random key depends
    on its number alone. One prefill of prompts and new tokens makes the cache. Prefill and decoding round differently,
    so candidates closer than that may change places. SparQ makes the tokens of `done` again, for its keys and values
    depend on how they were made. `share_prefixes` too changes logits by rounding alone.

    Args:
      generator: the model, its attention and how tokens are chosen.
      prompts: token ids; a batch of any lengths.
      max_new_tokens: per sequence.
      num_samples: sequences for each prompt: sample `j` of prompt `i` is sequence `i * num_samples + j`.
      stop_ids: tokens that end a sequence.
      on_token: called with `(sequence, token)` for each new token, for streaming.
      done: for each sequence its new tokens so far, of one number below `max_new_tokens` and without a stop token.
      share_prefixes: as in `Generator.prefix_tree`.
      max_batch: sequences that are stored and decoded at a time; default: all.

    Raises:
      ValueError, NotImplementedError: as `Generator.stream` and `stream_queue`; `num_samples` is not positive;
        `share_prefixes` with more sequences than `max_batch`; or `done` cannot be continued, or differs from what SparQ
        makes of these prompts.

    Example:
      >>> samples = generate(generator, [prompt], max_new_tokens=100, num_samples=64)
      >>> rank_samples(samples, top=3)[0].new_ids
    """
    _check_call(generator, prompts, max_new_tokens, num_samples, stop_ids, on_token)
    prompts = [prompt for prompt in prompts for _ in range(num_samples)]
    done = [[]] * len(prompts) if done is None else done
    _check_done(done, prompts, max_new_tokens)
    check_ids("done", [ids for ids in done if len(ids)], generator.config.vocab_size)
    texts, first_step = generator.resume(prompts, done)
    num_replayed = len(done[0]) - first_step if done else 0
    steps = _stream(generator, texts, max_new_tokens - first_step, first_step, stop_ids, share_prefixes, max_batch)
    sequences = [
        GeneratedSequence(index, prompt, ids, num_replayed, stop_ids)
        for index, (prompt, ids) in enumerate(zip(prompts, done, strict=True))
    ]
    take_steps(steps, sequences, on_token)
    return [sequence.result() for sequence in sequences]


def rank_samples(samples: Sequence[Generation], top: int | None = None) -> list[Generation]:
    """Returns the different samples of a prompt, by mean log-probability, the best first; among equals the earlier.

    Args:
      samples: from `generate(..., num_samples=n)`; of samples with the same tokens the first is kept.
      top: the largest number to return; None: all.

    Raises:
      ValueError: `top` is less than 1.

    Source: Bifurcated Attention, section 5.4 (pass@top-k).
    """
    if top is not None and not (is_integer(top) and top >= 1):
        raise ValueError(f"top must be at least 1, got {top!r}")
    different: dict[tuple, Generation] = {}
    for sample in samples:
        different.setdefault((tuple(sample.new_ids), sample.stopped), sample)
    return sorted(different.values(), key=lambda sample: sample.mean_log_probability, reverse=True)[:top]


class GeneratedSequence:
    """A sequence while it is generated: its tokens, whether it has stopped, and its statistics."""

    def __init__(
        self, index: int, prompt: Sequence[int], done: Sequence[int], num_replayed: int, stop_ids: Collection[int]
    ):
        self.index, self.prompt, self.new_ids, self.stopped = index, prompt, list(done), False
        self._num_replayed, self._stop_ids = num_replayed, stop_ids
        self._log_probabilities: list[float] = []
        self._seconds: list[float] = []

    def add(self, token: int, log_probability: float, seconds: float) -> bool:
        """Takes the token of one step; returns whether it is new: neither replayed nor a stop token.

        Raises:
          ValueError: a replayed token differs from the one that `done` holds.
        """
        number = len(self._seconds)
        self._seconds.append(seconds)
        if number < self._num_replayed:
            if token != self.new_ids[number]:
                raise ValueError(
                    f"done: holds token {self.new_ids[number]} as number {number} of sequence {self.index}, "
                    f"and this generation makes {token}"
                )
            return False
        self._log_probabilities.append(log_probability)
        self.stopped = token in self._stop_ids
        if not self.stopped:
            self.new_ids.append(token)
        return not self.stopped

    def result(self) -> Generation:
        """Returns the finished sequence and its statistics."""
        return Generation(
            prompt_ids=list(self.prompt),
            new_ids=self.new_ids,
            stopped=self.stopped,
            prefill_s=self._seconds[0],
            per_token_s=statistics.median(self._seconds[1:]) if self._seconds[1:] else None,
            log_probability=math.fsum(self._log_probabilities),
            mean_log_probability=statistics.fmean(self._log_probabilities),
        )


def _stream(
    generator: Generator,
    texts: Sequence[Sequence[int]],
    max_new_tokens: int,
    first_step: int,
    stop_ids: Collection[int],
    share_prefixes: bool | None,
    max_batch: int | None,
) -> Iterator[Step]:
    """Streams all texts at once, or, where there are more than `max_batch`, as a queue."""
    if max_batch is not None:
        check_max_batch(max_batch)
    if max_batch is None or len(texts) <= max_batch:
        return generator.stream(texts, max_new_tokens, first_step=first_step, share_prefixes=share_prefixes)
    if share_prefixes:
        raise NotImplementedError(f"{share_prefixes=}: prompts that wait for others, {max_batch=}, share none")
    return stream_queue(generator, texts, max_new_tokens, max_batch=max_batch, stop_ids=stop_ids, first_step=first_step)


def take_steps(
    steps: Iterator[Step], sequences: Sequence[GeneratedSequence], on_token: Callable[[int, int], None] | None
) -> None:
    """Gives each step's tokens to their sequences, until all have stopped."""
    for step in steps:
        for index, token, log_p in zip(step.sequences, step.tokens.tolist(), step.log_probabilities, strict=True):
            if index is not None and not sequences[index].stopped:
                is_new = sequences[index].add(token, float(log_p), step.seconds)
                if is_new and on_token is not None:
                    on_token(index, token)
        if all(sequence.stopped for sequence in sequences):
            return


def _check_call(generator, prompts, max_new_tokens, num_samples, stop_ids, on_token) -> None:
    if not isinstance(generator, Generator):
        raise TypeError(f"generator must be a Generator, got {type(generator).__name__}")
    check_integer("num_samples", num_samples, minimum=1)
    check_request(generator.config, prompts, max_new_tokens)
    check_stop_ids(stop_ids)
    if on_token is not None and not callable(on_token):
        raise TypeError(f"on_token must be None or a function of a sequence and a token, got {on_token!r}")


def _check_done(done: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    check_tokens("done", done)
    counts = [len(ids) for ids in done]
    if len(counts) != len(prompts) or len(set(counts)) > 1 or (max(counts, default=0) >= max_new_tokens >= 1):
        raise ValueError(
            f"done must hold equally many new tokens for each of {len(prompts)} prompts, fewer than "
            f"{max_new_tokens=}, got {counts}"
        )
