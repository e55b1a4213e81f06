"""Continuous batching: a batch slot whose sequence has stopped takes the next prompt while the others continue."""

import functools
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence

import jax
import numpy as np

from tree_attn.arguments import check_integer
from tree_attn.models.llama.generation.generator import Generator, Step
from tree_attn.models.llama.generation.inputs import Inputs
from tree_attn.models.llama.generation.layout import BatchSlots
from tree_attn.models.llama.generation.programs import Programs, decode_with, form_of, shardings_of
from tree_attn.models.llama.generation.request import check_max_batch, check_request, check_stop_ids
from tree_attn.models.llama.layer_caches import AnyCache


def stream_queue(
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    max_batch: int,
    stop_ids: Collection[int] = (),
    first_step: int = 0,
) -> Iterator[Step]:
    """Yields steps of at most `max_batch` sequences at a time, until all have stopped.

    A batch slot whose sequence has met a stop token, or has `max_new_tokens`, takes the next prompt. That is prefilled
    by itself, its keys and values go to the slot's place in the cache, and the other slots continue. Its first token is
    a step of one slot. Each sequence gets the tokens that `Generator.stream` would give it.

    Prompts are padded to a power of two times the shards, and to whole chunks. A program is compiled for each padded
    length: at most one more than the binary logarithm of the longest. The cache holds `max_batch` of the longest
    sequence; a prefill holds its own keys and values besides.

    Raises:
      ValueError: as `Generator.stream`; `max_batch` is not a positive integer.
      NotImplementedError: the batch is cut over devices.
    """
    check_request(generator.config, prompts, max_new_tokens)
    check_max_batch(max_batch)
    check_stop_ids(stop_ids)
    check_integer("first_step", first_step, minimum=0)
    if generator.sharding.num_shards("batch") > 1:
        raise NotImplementedError(f"{max_batch=}: the batch is cut over {generator.sharding.batch!r}")
    queue = _Queue(
        generator.inputs,
        generator.programs,
        prompts,
        max_new_tokens,
        batch=min(max_batch, len(prompts)),
        stop_ids=frozenset(stop_ids),
        first_step=first_step,
    )
    return queue.steps()


class _Queue:
    """A queue of prompts and the batch that they pass through.

    Attributes:
      sequences: the sequence in each batch slot; None for an idle one.
      waiting: sequences that have no slot yet.
      counts: new tokens of each sequence.
    """

    def __init__(
        self,
        inputs: Inputs,
        programs: Programs,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        batch: int,
        stop_ids: Collection[int],
        first_step: int,
    ):
        self.inputs, self.programs, self.prompts = inputs, programs, prompts
        self.max_new_tokens, self.stop_ids, self.first_step = max_new_tokens, stop_ids, first_step
        self.longest = max(map(len, prompts))
        self.waiting, self.counts = deque(range(len(prompts))), [0] * len(prompts)
        self.sequences: list[int | None] = [None] * batch

    def steps(self) -> Iterator[Step]:
        """Fills idle slots and decodes, until no sequence is left."""
        slots = self.inputs.batch_slots(len(self.sequences))
        capacity = self.inputs.layout.capacity(self.prompts, self.max_new_tokens)
        cache = self.inputs.empty_cache(len(self.sequences), capacity)
        decode = self.programs.once(
            ("queue", form_of(cache)), functools.partial(self.programs.compile_decode, slots, (), cache)
        )
        while True:
            for index in range(len(self.sequences)):
                while self.sequences[index] is None and self.waiting:
                    step, slots, cache = self._admit_next(index, slots, cache)
                    yield step
                    self._advance(index, step.sequences[0], int(step.tokens[0]))
            if all(sequence is None for sequence in self.sequences):
                return
            start = time.perf_counter()
            slots, tokens, log_p, logits, cache = decode_with(decode, self.programs.parameters, slots, (), cache=cache)
            tokens, log_p = jax.device_get((tokens, log_p))
            seconds = (time.perf_counter() - start) / len(tokens)
            for of_step in zip(tokens, log_p, logits, strict=True):
                yield Step(*of_step, seconds, tuple(self.sequences))
                for index, token in enumerate(of_step[0].tolist()):
                    self._advance(index, self.sequences[index], token)

    def _advance(self, index: int, sequence: int | None, token: int) -> None:
        """Counts a new token of the sequence in a slot; the slot is idle after the sequence's last."""
        if sequence is not None:
            self.counts[sequence] += 1
            is_last = token in self.stop_ids or self.counts[sequence] >= self.max_new_tokens
            self.sequences[index] = None if is_last else sequence

    def _admit_next(self, index: int, slots: BatchSlots, cache: AnyCache) -> tuple[Step, BatchSlots, AnyCache]:
        """Prefills the next waiting prompt into slot `index`: its first token as a step, and the batch with it."""
        sequence = self.waiting.popleft()
        prompt = self.prompts[sequence]
        new = self.inputs.batch_slots(1, first_sequence=sequence, step=self.first_step)
        texts = self.inputs.texts([prompt], self.inputs.layout.bucket_length(len(prompt), self.longest))
        arguments = *texts, new, self.inputs.sharding.place(np.array(index, np.int32)), slots
        admit = self._compile_admission(*arguments, cache=cache)
        start = time.perf_counter()
        slots, tokens, log_p, logits, cache = admit(self.programs.parameters, *arguments, cache=cache)
        tokens = np.asarray(tokens)
        step = Step(tokens, np.asarray(log_p), logits, time.perf_counter() - start, (sequence,))
        return step, slots, cache

    def _compile_admission(self, tokens: jax.Array, *arguments, cache: AnyCache) -> jax.stages.Compiled:
        def compile_admission() -> jax.stages.Compiled:
            of_slot, of_logits = self.inputs.sharding.named("batch"), self.inputs.sharding.named("batch", "vocab")
            admit = jax.jit(
                self._admit,
                donate_argnames="cache",
                out_shardings=(of_slot, of_slot, of_slot, of_logits, shardings_of(cache)),
            )
            return admit.lower(self.programs.parameters, tokens, *arguments, cache=cache).compile()

        return self.programs.once(("admission", tokens.shape, form_of(cache)), compile_admission)

    def _admit(self, parameters, tokens, lengths, new: BatchSlots, index, slots: BatchSlots, *, cache: AnyCache):
        """Prefills one prompt into a cache of its own and puts that into batch slot `index`."""
        prompt_cache = self.inputs.empty_cache(1, tokens.shape[1], cache.scales())
        model = self.programs.model_of(parameters)
        logits, prompt_cache = self.programs.read(model, tokens, lengths, prompt_cache)
        new, log_p = self.programs.next_slots(logits, new)
        slots = jax.tree.map(lambda batch, one: jax.lax.dynamic_update_slice(batch, one, (index,)), slots, new)
        return slots, new.tokens, log_p, logits, cache.with_sequence(index, prompt_cache)
