"""Generation: prompts are laid out and prefilled, then one compiled step makes each new token."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx

from models.llama.attention import BLOCK_SIZE, Attention
from models.llama.config import LlamaConfig
from models.llama.model import Llama
from models.llama.sampling import Sampling, choose
from tree_attn.cache import KVCache


class Programs(NamedTuple):
    """The two compiled programs of a generation; `as_text()` and `memory_analysis()` tell what they do and need."""

    prefill: jax.stages.Compiled
    decode: jax.stages.Compiled


class Step(NamedTuple):
    """One new token of each sequence, int32 `[B]`, the float32 logits `[B, V]` it was chosen from, and its time."""

    tokens: np.ndarray
    logits: jax.Array
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """What came of one prompt.

    Attributes:
      prompt_ids: the prompt.
      new_ids: the tokens generated, the stop token not among them.
      stopped: whether a stop token ended it, rather than the limit.
      prefill_s: from prompts to first token, compilation excluded; shared by the batch.
      per_token_s: median over the later tokens; None when there were none.
    """

    prompt_ids: list[int]
    new_ids: list[int]
    stopped: bool
    prefill_s: float
    per_token_s: float | None


def check_request(config: LlamaConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Raises ValueError for what `Generator.stream` refuses; it needs only the configuration."""
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise ValueError(f"prompts: must be one or more, of one or more tokens each; got {[len(p) for p in prompts]}")
    if max_new_tokens < 1:
        raise ValueError(f"{max_new_tokens=}: must be 1 or more")
    longest = max(len(prompt) for prompt in prompts)
    if longest + max_new_tokens > config.max_position:
        raise ValueError(
            f"{max_new_tokens=}: with a prompt of {longest} tokens it must be at most "
            f"{config.max_position - longest}; the model has {config.max_position} positions"
        )
    for prompt in prompts:
        if not 0 <= min(prompt) <= max(prompt) < config.vocab_size:
            raise ValueError(
                f"prompts: token ids span {min(prompt)} to {max(prompt)}; must be in [0, {config.vocab_size})"
            )


class Generator:
    """Generates with one model and one attention. Programs are compiled once per shape and kept.

    Args:
      model: whose sharding the cache follows.
      attention: from `attention.by_name`, made with the same sharding.
      sampling: how tokens are chosen; default greedy.

    Example:
      >>> generator = Generator(model, by_name("tree", model.sharding))
      >>> generate(generator, [tokenizer.encode("Once upon a time")], max_new_tokens=20)[0].new_ids
    """

    def __init__(self, model: Llama, attention: Attention, sampling: Sampling | None = None):
        self.config, self.sharding, self.attention = model.config, model.sharding, attention
        self.sampling = Sampling() if sampling is None else sampling
        self._structure, self._parameters = nnx.split(model)
        self._dtype = model.embedding[...].dtype
        self._programs: dict[tuple[int, int, int], Programs] = {}

    def stream(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, first_step: int = 0) -> Iterator[Step]:
        """Yields `max_new_tokens` steps for a batch of prompts, which may differ in length.

        To go on with a generation that was interrupted, give the prompts with their new tokens and, as `first_step`,
        how many those are: step `i` draws with the key of `first_step + i`.

        Raises:
          ValueError: before anything is compiled: no prompt, an empty one, a token that the vocabulary lacks, or more
            tokens than the model has positions.
        """
        check_request(self.config, prompts, max_new_tokens)
        return self._steps(prompts, max_new_tokens, first_step)

    def programs(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Programs:
        """The programs that `stream` would run on these prompts."""
        check_request(self.config, prompts, max_new_tokens)
        tokens, lengths = self._lay_out(prompts)
        return self._compile(tokens, lengths, self._empty_cache(prompts, max_new_tokens))

    def _padded_length(self, prompts: Sequence[Sequence[int]]) -> int:
        unit = self.attention.num_shards * BLOCK_SIZE
        return -(-max(len(prompt) for prompt in prompts) // unit) * unit

    def _lay_out(self, prompts: Sequence[Sequence[int]]) -> tuple[jax.Array, jax.Array]:
        """Prompts as int32 `[B, S]`, padded on the right and in storage order, and their lengths `[B]`."""
        order = self.attention.storage_order(self._padded_length(prompts))
        tokens = np.zeros((len(prompts), len(order.positions)), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        return self._place(tokens[:, order.positions], "batch", "sequence"), self._place(lengths, "batch")

    def _place(self, array: np.ndarray, *logical_axes: str) -> jax.Array:
        """The same array of every process, each placing the part of its own devices."""
        return jax.make_array_from_callback(array.shape, self.sharding.named(*logical_axes), lambda index: array[index])

    def _empty_cache(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> KVCache:
        longest = max(len(prompt) for prompt in prompts)
        return KVCache.create(
            batch=len(prompts),
            capacity=max(longest + max_new_tokens, self._padded_length(prompts)),
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            dtype=self._dtype,
            mesh=self.sharding.mesh,
            axis_name=self.sharding.sequence,
            block_size=BLOCK_SIZE,
            num_layers=self.config.num_layers,
        )

    def _compile(self, tokens: jax.Array, lengths: jax.Array, cache: KVCache) -> Programs:
        shape = (*tokens.shape, cache.capacity)
        if shape not in self._programs:
            last = self._place(np.zeros(len(lengths), np.int32), "batch")
            key = self._key(0)
            shardings = (
                self.sharding.named("batch"),
                self.sharding.named("batch", "vocab"),
                jax.tree.map(lambda array: array.sharding, cache),
            )
            prefill = jax.jit(self._prefill, donate_argnames="cache", out_shardings=shardings)
            decode = jax.jit(self._decode, donate_argnames="cache", out_shardings=shardings)
            self._programs[shape] = Programs(
                prefill=prefill.lower(self._parameters, tokens, lengths, key, cache=cache).compile(),
                decode=decode.lower(self._parameters, last, key, cache=cache).compile(),
            )
        return self._programs[shape]

    def _prefill(self, parameters, tokens, lengths, key, *, cache):
        model = nnx.merge(self._structure, parameters)
        logits, cache = model.prefill(tokens, lengths, cache, self.attention)
        return self._choose(logits, key), logits, cache

    def _decode(self, parameters, tokens, key, *, cache):
        model = nnx.merge(self._structure, parameters)
        logits, cache = model.decode(tokens[:, None], cache, self.attention)
        return self._choose(logits[:, 0], key), logits[:, 0], cache

    def _choose(self, logits: jax.Array, key: jax.Array) -> jax.Array:
        with jax.named_scope("choose"):
            return choose(logits, self.sampling, jax.random.wrap_key_data(key), self.sharding.num_shards("vocab"))

    def _key(self, step: int) -> jax.Array:
        # As numbers, for those can be placed on devices of other processes.
        key = jax.random.key_data(jax.random.fold_in(jax.random.key(self.sampling.seed), step))
        return self._place(np.asarray(key))

    def _steps(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, first_step: int) -> Iterator[Step]:
        cache = self._empty_cache(prompts, max_new_tokens)
        tokens, lengths = self._lay_out(prompts)
        programs = self._compile(tokens, lengths, cache)
        # Keys are drawn beforehand, so that a step's time holds the step alone.
        keys = [self._key(first_step + step) for step in range(max_new_tokens)]
        start = time.perf_counter()
        tokens, logits, cache = programs.prefill(self._parameters, tokens, lengths, keys[0], cache=cache)
        yield Step(np.asarray(tokens), logits, time.perf_counter() - start)
        for key in keys[1:]:
            start = time.perf_counter()
            tokens, logits, cache = programs.decode(self._parameters, tokens, key, cache=cache)
            yield Step(np.asarray(tokens), logits, time.perf_counter() - start)


def generate(
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    stop_ids: Collection[int] = (),
    on_token: Callable[[int, int], None] | None = None,
    done: Sequence[Sequence[int]] | None = None,
) -> list[Generation]:
    """Generates until each sequence meets a stop token or has `max_new_tokens`.

    With `done`, an interrupted generation goes on: its cache is made by one prefill of prompts and new tokens, and the
    same tokens follow, greedy or drawn, for a step's random key depends on its number alone. (Prefill and decoding
    round differently: candidates closer than that may change places, in bfloat16 more easily than in float32.)

    Args:
      generator: the model, its attention and how tokens are chosen.
      prompts: token ids; a batch of any lengths.
      max_new_tokens: per sequence.
      stop_ids: tokens that end a sequence.
      on_token: told `(sequence, token)` as each is made, for streaming.
      done: for each prompt its new tokens so far, of one number below `max_new_tokens` and without a stop token.

    Raises:
      ValueError: as `Generator.stream`; or `done` is none that can go on.
    """
    new_ids = [list(ids) for ids in ([[]] * len(prompts) if done is None else done)]
    _check_done(new_ids, prompts, max_new_tokens)
    num_done = len(new_ids[0]) if new_ids else 0
    longer = [[*prompt, *ids] for prompt, ids in zip(prompts, new_ids, strict=True)]
    stopped = [False] * len(prompts)
    seconds = []
    for step in generator.stream(longer, max_new_tokens - num_done, first_step=num_done):
        seconds.append(step.seconds)
        for sequence, token in enumerate(step.tokens.tolist()):
            stopped[sequence] = stopped[sequence] or token in stop_ids
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
            prefill_s=seconds[0],
            per_token_s=statistics.median(seconds[1:]) if seconds[1:] else None,
        )
        for prompt, ids, stop in zip(prompts, new_ids, stopped, strict=True)
    ]


def _check_done(done: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    counts = [len(ids) for ids in done]
    if len(counts) != len(prompts) or len(set(counts)) > 1 or (max(counts, default=0) >= max_new_tokens >= 1):
        raise ValueError(
            f"done: must hold equally many new tokens for each of {len(prompts)} prompts, fewer than "
            f"{max_new_tokens=}; got {counts}"
        )
