"""Generation until a stop token or a limit: what came of each prompt, and the best of several samples."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Collection, Sequence

import numpy as np

from tree_attn.models.llama.generation.generator import Generator
from tree_attn.models.llama.generation.queue import check_max_batch, stream_queue


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """What came of one prompt.

    Attributes:
      prompt_ids: the prompt.
      new_ids: the tokens generated, the stop token not among them.
      stopped: whether a stop token ended it, rather than the limit.
      prefill_s: from prompts to first token, compilation excluded; shared by those that were prefilled together.
      per_token_s: median over its later tokens; None when there were none.
      log_probability: what the model itself gives to the tokens of this call, the stop token among them: the sum of
        their `sampling.log_probability`.
      mean_log_probability: that sum over the number of those tokens.
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

    Sequences are decoded together. One that has stopped is computed on, in vain, until all have, unless there are more
    than `max_batch`: its place then goes to the next (`stream_queue`). The tokens are the same either way.

    With `done`, an interrupted generation goes on: its cache is made by one prefill of prompts and new tokens, and the
    same tokens follow, greedy or drawn, for a step's random key depends on its number alone. (Prefill and decoding
    round differently: candidates closer than that may change places, in bfloat16 more easily than in float32.) SparQ
    makes those of `done` again, for their keys and values depend on how they were made.

    The same holds for `share_prefixes`: it changes how much is computed, held and read, and by rounding alone the
    logits.

    Args:
      generator: the model, its attention and how tokens are chosen.
      prompts: token ids; a batch of any lengths.
      max_new_tokens: per sequence.
      num_samples: sequences for each prompt: sample `j` of prompt `i` is sequence `i * num_samples + j`.
      stop_ids: tokens that end a sequence.
      on_token: told `(sequence, token)` as each is made, for streaming.
      done: for each sequence its new tokens so far, of one number below `max_new_tokens` and without a stop token.
      share_prefixes: as in `Generator.prefix_tree`.
      max_batch: sequences that are held and decoded at a time; default: all.

    Raises:
      ValueError, NotImplementedError: as `Generator.stream` and `stream_queue`; no positive number of samples;
        `share_prefixes` with more sequences than `max_batch`; or `done` is none that can go on, or not what SparQ makes
        of these prompts.

    Example:
      >>> samples = generate(generator, [prompt], max_new_tokens=100, num_samples=64)
      >>> rank_samples(samples, top=3)[0].new_ids
    """
    if not isinstance(num_samples, int | np.integer) or num_samples < 1:
        raise ValueError(f"{num_samples=}: must be an integer of at least 1")
    prompts = [prompt for prompt in prompts for _ in range(num_samples)]
    new_ids = [list(ids) for ids in ([[]] * len(prompts) if done is None else done)]
    _check_done(new_ids, prompts, max_new_tokens)
    read, first_step = generator.going_on(prompts, new_ids)
    again = len(new_ids[0]) - first_step if new_ids else 0
    how = dict(max_new_tokens=max_new_tokens - first_step, first_step=first_step)
    if max_batch is not None:
        check_max_batch(max_batch)
    if max_batch is None or len(prompts) <= max_batch:
        steps = generator.stream(read, share_prefixes=share_prefixes, **how)
    else:
        if share_prefixes:
            raise NotImplementedError(f"{share_prefixes=}: prompts that wait for others, {max_batch=}, share none")
        steps = stream_queue(generator, read, max_batch=max_batch, stop_ids=stop_ids, **how)
    stopped = [False] * len(prompts)
    log_probabilities: list[list[float]] = [[] for _ in prompts]
    seconds: list[list[float]] = [[] for _ in prompts]
    for step in steps:
        for row, (sequence, token) in enumerate(zip(step.sequences, step.tokens.tolist(), strict=True)):
            if sequence is None or stopped[sequence]:
                continue
            seconds[sequence].append(step.seconds)
            number = len(seconds[sequence]) - 1
            if number < again:
                _check_again(sequence, number, token, new_ids[sequence][number])
                continue
            log_probabilities[sequence].append(float(step.log_probabilities[row]))
            stopped[sequence] = token in stop_ids
            if not stopped[sequence]:
                new_ids[sequence].append(token)
                if on_token is not None:
                    on_token(sequence, token)
        if all(stopped):
            break
    return [
        Generation(
            prompt_ids=list(prompt),
            new_ids=ids,
            stopped=stop,
            prefill_s=took[0],
            per_token_s=statistics.median(took[1:]) if took[1:] else None,
            log_probability=math.fsum(log_p),
            mean_log_probability=statistics.fmean(log_p),
        )
        for prompt, ids, stop, log_p, took in zip(prompts, new_ids, stopped, log_probabilities, seconds, strict=True)
    ]


def rank_samples(samples: Sequence[Generation], top: int | None = None) -> list[Generation]:
    """The different samples of a prompt, by mean log-probability, the best first; of equal ones, the earlier first.

    Args:
      samples: from `generate(..., num_samples=n)`; of samples with the same tokens the first is kept.
      top: how many to return at the most; None: all.

    Raises:
      ValueError: `top` is less than 1.

    Source: Bifurcated Attention, section 5.4 (pass@top-k).
    """
    if top is not None and top < 1:
        raise ValueError(f"{top=}: must be at least 1")
    different: dict[tuple, Generation] = {}
    for sample in samples:
        different.setdefault((tuple(sample.new_ids), sample.stopped), sample)
    return sorted(different.values(), key=lambda sample: sample.mean_log_probability, reverse=True)[:top]


def _check_again(sequence: int, number: int, made: int, done: int) -> None:
    if made != done:
        raise ValueError(
            f"done: holds token {done} as number {number} of sequence {sequence}, and this generation makes {made}"
        )


def _check_done(done: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    counts = [len(ids) for ids in done]
    if len(counts) != len(prompts) or len(set(counts)) > 1 or (max(counts, default=0) >= max_new_tokens >= 1):
        raise ValueError(
            f"done: must hold equally many new tokens for each of {len(prompts)} prompts, fewer than "
            f"{max_new_tokens=}; got {counts}"
        )
