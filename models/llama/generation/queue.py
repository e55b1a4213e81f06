"""Continuous batching: a row whose sequence has stopped takes the next prompt while the other rows go on."""

import functools
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence

import jax
import numpy as np

from tree_attn.cache import KVCache
from tree_attn.models.llama.attention import BLOCK_SIZE
from tree_attn.models.llama.generation.generator import Generator, Rows, Step, check_request, shardings_of


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

    A row whose sequence has met a stop token, or has `max_new_tokens`, takes the next prompt: that is prefilled by
    itself, its keys and values go to the row's place in the cache, and the other rows go on. Its first token is a
    step of one row. Each sequence gets the tokens that `Generator.stream` would give it.

    Prompts are padded to a power of two times the shards (and whole chunks), and a program is compiled for each of
    the lengths that occur: at most one more than the binary logarithm of the longest. The cache holds `max_batch`
    of the longest sequence; a prefill holds its own keys and values besides.

    Raises:
      ValueError: as `Generator.stream`; `max_batch` is not a positive integer.
      NotImplementedError: the batch is cut over devices.
    """
    check_request(generator.config, prompts, max_new_tokens)
    check_max_batch(max_batch)
    if generator.sharding.num_shards("batch") > 1:
        raise NotImplementedError(f"{max_batch=}: the batch is cut over {generator.sharding.batch!r}")
    num_rows = min(max_batch, len(prompts))
    return _steps(generator, prompts, max_new_tokens, num_rows, frozenset(stop_ids), first_step)


def check_max_batch(max_batch: int) -> None:
    """Raises ValueError unless `max_batch` is a positive integer."""
    if not isinstance(max_batch, int | np.integer) or max_batch < 1:
        raise ValueError(f"{max_batch=}: must be an integer of at least 1")


def _steps(
    generator: Generator, prompts, max_new_tokens: int, num_rows: int, stop_ids, first_step: int
) -> Iterator[Step]:
    capacity = generator.capacity(prompts, max_new_tokens)
    rows, cache = generator.new_rows(num_rows), generator.empty_cache(num_rows, capacity)
    decode = generator.compiled_once(
        ("queue", cache.shape), functools.partial(generator.compile_decode, rows, (), cache)
    )
    waiting, counts = deque(range(len(prompts))), [0] * len(prompts)
    held: list[int | None] = [None] * num_rows
    longest = max(map(len, prompts))

    def goes_on(sequence: int, token: int) -> bool:
        counts[sequence] += 1
        return token not in stop_ids and counts[sequence] < max_new_tokens

    while True:
        for row in range(num_rows):
            while held[row] is None and waiting:
                sequence = waiting.popleft()
                new = generator.new_rows(1, first_sequence=sequence, step=first_step)
                padded = _bucket(generator, len(prompts[sequence]), longest)
                prompt = generator.lay_out_level([prompts[sequence]], padded)
                inputs = *prompt, new, generator.sharding.place(np.array(row, np.int32)), rows
                admit = _compile_admission(generator, *inputs, cache=cache)
                start = time.perf_counter()
                rows, tokens, log_p, logits, cache = admit(generator.parameters, *inputs, cache=cache)
                tokens = np.asarray(tokens)
                yield Step(tokens, np.asarray(log_p), logits, time.perf_counter() - start, (sequence,))
                held[row] = sequence if goes_on(sequence, int(tokens[0])) else None
        if all(sequence is None for sequence in held):
            return
        start = time.perf_counter()
        rows, tokens, log_p, logits, cache = decode(generator.parameters, rows, (), cache=cache)
        tokens, log_p = jax.device_get((tokens, log_p))
        each_s = (time.perf_counter() - start) / len(tokens)
        for made, *results in zip(tokens, log_p, logits, strict=True):
            yield Step(made, *results, each_s, tuple(held))
            held = [
                sequence if sequence is not None and goes_on(sequence, token) else None
                for sequence, token in zip(held, made.tolist(), strict=True)
            ]


def _bucket(generator: Generator, num_tokens: int, longest: int) -> int:
    """One of few lengths to which prompts of a queue are padded."""
    unit = generator.attention.num_shards * BLOCK_SIZE
    power = 1 << (-(-num_tokens // unit) - 1).bit_length()
    return min(generator.padded(unit * power), generator.padded(longest))


def _compile_admission(generator: Generator, tokens: jax.Array, *inputs, cache: KVCache) -> jax.stages.Compiled:
    def compile_it() -> jax.stages.Compiled:
        of_row, of_logits = generator.sharding.named("batch"), generator.sharding.named("batch", "vocab")
        admit = jax.jit(
            functools.partial(_admit, generator),
            donate_argnames="cache",
            out_shardings=(of_row, of_row, of_row, of_logits, shardings_of(cache)),
        )
        return admit.lower(generator.parameters, tokens, *inputs, cache=cache).compile()

    return generator.compiled_once(("admission", tokens.shape, cache.shape), compile_it)


def _admit(generator: Generator, parameters, tokens, lengths, new: Rows, row, rows: Rows, *, cache: KVCache):
    """Prefills one prompt into a cache of its own and puts that into `row` of the batch."""
    own = generator.empty_cache(1, tokens.shape[1], cache.scales())
    logits, own = generator.read(generator.model_of(parameters), tokens, lengths, own)
    new, log_p = generator.next_rows(logits, new)
    rows = jax.tree.map(lambda batch, one: jax.lax.dynamic_update_slice(batch, one, (row,)), rows, new)
    return rows, new.tokens, log_p, logits, cache.with_sequence(row, own)
