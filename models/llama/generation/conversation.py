"""Turns of one conversation: what the cache holds of a prompt already is not read again."""

import functools
import time
from collections.abc import Callable, Collection, Iterator, Sequence

import jax
import numpy as np

from tree_attn.arguments import check_integer
from tree_attn.cache import KVCache
from tree_attn.models.llama.generation.generate import GeneratedSequence, Generation, take_steps
from tree_attn.models.llama.generation.generator import Generator, Step
from tree_attn.models.llama.generation.layout import BatchSlots
from tree_attn.models.llama.generation.prefix_tree import unshared
from tree_attn.models.llama.generation.programs import StreamPrograms, decode_with, shardings_of
from tree_attn.models.llama.generation.request import check_request, check_stop_ids


class Conversation:
    """Answers prompts of which each begins with the prompts and answers before it.

    The cache stays between answers. Of a prompt only the tokens after the common beginning are read, `chunk` at a time.
    A cache that is too short is replaced by one of twice the slots, into which the whole prompt is read. SparQ reads
    every prompt whole: its keys and values of new tokens differ from those of a prompt. Layers with a window keep all
    tokens here: each token of a chunk sees a window of its own.

    Draws depend on the seed and on the number of tokens chosen in the conversation. Greedy answers are those of
    `generate`, up to rounding, that of a narrow cache too: a later turn attends to what is stored.

    Args:
      generator: the model, its attention and how tokens are chosen; its batch is not cut over devices.
      capacity: slots of the first cache, at least; 1 or more.
      chunk: tokens of a later prompt that are read at a time; 1 or more.

    Raises:
      ValueError: `capacity` or `chunk` is less than 1.
      NotImplementedError: the batch is cut over devices.

    Attributes:
      num_reused: tokens of the newest prompt that the cache held already.

    Example:
      >>> conversation = Conversation(generator)
      >>> first = conversation.answer(tokenizer.encode_chat(messages), max_new_tokens=50)
    """

    def __init__(self, generator: Generator, *, capacity: int = 1024, chunk: int = 32):
        check_integer("capacity", capacity, minimum=1)
        check_integer("chunk", chunk, minimum=1)
        if generator.sharding.num_shards("batch") > 1:
            raise NotImplementedError(f"a conversation: the batch is cut over {generator.sharding.batch!r}")
        self.generator, self.num_reused = generator, 0
        self._capacity, self._chunk = capacity, chunk
        self._held: list[int] = []  # the tokens whose keys and values the cache has
        self._num_chosen = 0
        self._cache: KVCache | None = None
        self._decode: jax.stages.Compiled | None = None

    def answer(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        stop_ids: Collection[int] = (),
        on_token: Callable[[int, int], None] | None = None,
    ) -> Generation:
        """Generates after a prompt until a stop token or the limit; arguments and errors are those of `generate`."""
        check_request(self.generator.config, [prompt], max_new_tokens)
        check_stop_ids(stop_ids)
        sequence = GeneratedSequence(0, prompt, [], 0, stop_ids)
        take_steps(self._steps(list(prompt), max_new_tokens), [sequence], on_token)
        return sequence.result()

    def compile(self, prompt: Sequence[int], max_new_tokens: int) -> None:
        """Compiles the programs that `answer` runs on this prompt."""
        check_request(self.generator.config, [prompt], max_new_tokens)
        num_slots = self._num_slots(prompt, max_new_tokens)
        if self._num_common(prompt, num_slots):
            self._extension(self._cache)
        else:
            self._prefill_inputs(prompt, num_slots)

    def _steps(self, prompt: list[int], max_new_tokens: int) -> Iterator[Step]:
        """Yields steps; what the cache holds is right at each of them, whenever the caller stops."""
        num_slots = self._num_slots(prompt, max_new_tokens)
        self.num_reused = self._num_common(prompt, num_slots)
        since = time.perf_counter()
        slots, log_p, logits = self._extend(prompt) if self.num_reused else self._read(prompt, num_slots)
        chosen, results = [], (slots.tokens[None], log_p[None], (logits,))
        while True:
            tokens, log_p, logits = (*jax.device_get(results[:2]), results[2])
            now = time.perf_counter()
            # A token's keys are written by the step after the one that chose it.
            chosen += tokens[:, 0].tolist()
            self._held, self._num_chosen = prompt + chosen[:-1], self._num_chosen + len(tokens)
            for of_step in zip(tokens, log_p, logits, strict=True):
                if max_new_tokens:
                    max_new_tokens -= 1
                    yield Step(*of_step, (now - since) / len(tokens), (0,))
            if not max_new_tokens:
                return
            since, cache, self._cache = now, self._cache, None  # donated
            arguments = self._decode, self.generator.programs.parameters, slots, ()
            slots, *results, self._cache = decode_with(*arguments, cache=cache)

    def _num_slots(self, prompt: Sequence[int], max_new_tokens: int) -> int:
        """Returns the slots that an answer needs: the last dispatch and the last chunk are written whole."""
        return len(prompt) + max_new_tokens + self.generator.tokens_per_dispatch + self._chunk

    def _num_common(self, prompt: Sequence[int], num_slots: int) -> int:
        """Returns how many of the prompt's tokens are reused; the last one is always read, for its logits."""
        if self._cache is None or self._cache.capacity < num_slots or self.generator.attention.sparq is not None:
            return 0
        pairs = zip(self._held, prompt[:-1], strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self._held), len(prompt) - 1))

    def _read(self, prompt: list[int], num_slots: int) -> tuple[BatchSlots, jax.Array, jax.Array]:
        """Reads a whole prompt into a new cache."""
        self._cache = None  # before there is another
        programs, (level,), slots = self._prefill_inputs(prompt, num_slots)
        arguments = self.generator.programs.parameters, (level.tokens,), (level.lengths,), slots
        slots, log_p, logits, (self._cache,) = programs.prefill(*arguments, caches=(level.cache,))
        self._decode = programs.decode
        return slots, log_p, logits

    def _prefill_inputs(self, prompt: Sequence[int], num_slots: int) -> tuple[StreamPrograms, tuple, BatchSlots]:
        max_slots = self.generator.config.max_position + self.generator.tokens_per_dispatch + self._chunk
        while self._capacity < num_slots:
            self._capacity *= 2
        tree = unshared([list(prompt)])
        levels = self.generator.inputs.levels(tree, min(self._capacity, max_slots) - len(prompt), keeps_all=True)
        slots = self.generator.inputs.batch_slots(1, step=self._num_chosen)
        return self.generator.programs.of_tree(tree, levels, slots), levels, slots

    def _extend(self, prompt: list[int]) -> tuple[BatchSlots, jax.Array, jax.Array]:
        """Reads the prompt after its common beginning, a chunk at a time, over what the cache holds of it."""
        run, place = self._extension(self._cache), self.generator.sharding.place
        slots = self.generator.inputs.batch_slots(1, step=self._num_chosen)
        for start in range(self.num_reused, len(prompt), self._chunk):
            part = prompt[start : start + self._chunk]
            tokens = np.array([part + [0] * (self._chunk - len(part))], np.int32)
            numbers = (place(np.array([number], np.int32), "batch") for number in (start, len(part)))
            cache, self._cache = self._cache, None  # donated
            arguments = self.generator.programs.parameters, place(tokens, "batch", None), *numbers, slots
            following, log_p, logits, self._cache = run(*arguments, cache=cache)
        return following, log_p, logits

    def _extension(self, cache: KVCache) -> jax.stages.Compiled:
        """Returns the program that reads a chunk after what the cache holds."""
        return self.generator.programs.once(
            ("extension", self._chunk, cache.shape), functools.partial(self._compile_extension, cache)
        )

    def _compile_extension(self, cache: KVCache) -> jax.stages.Compiled:
        sharding, programs = self.generator.sharding, self.generator.programs

        def extend(parameters, tokens, start, count, slots, *, cache):
            model = programs.model_of(parameters)
            logits, cache = model.decode(tokens, cache.with_lengths(start), self.generator.attention)
            # What padding wrote lies beyond the lengths, and the next tokens overwrite it.
            cache = cache.with_lengths(start + count)
            logits = jax.lax.dynamic_index_in_dim(logits, count[0] - 1, axis=1, keepdims=False)
            return *programs.next_slots(logits, slots), logits, cache

        one, of_logits = sharding.named("batch"), sharding.named("batch", "vocab")
        compiled = jax.jit(extend, donate_argnames="cache", out_shardings=(one, one, of_logits, shardings_of(cache)))
        numbers = [sharding.place(np.array([1], np.int32), "batch") for _ in range(2)]
        tokens = sharding.place(np.zeros((1, self._chunk), np.int32), "batch", None)
        slots = self.generator.inputs.batch_slots(1)
        return compiled.lower(programs.parameters, tokens, *numbers, slots, cache=cache).compile()
