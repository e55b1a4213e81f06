"""Generation: prompts are laid out and prefilled, then one compiled step makes each new token."""

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from models.llama.attention import BLOCK_SIZE, Attention, Prefix, check_sharing
from models.llama.config import LlamaConfig
from models.llama.model import Llama
from models.llama.prefix_tree import PrefixTree, share, unshared
from models.llama.sampling import Sampling, choose, log_probability
from tree_attn.arguments import NARROW_DTYPES, one_of
from tree_attn.cache import KVCache


class Programs(NamedTuple):
    """The two compiled programs of a generation; `as_text()` and `memory_analysis()` tell what they do and need."""

    prefill: jax.stages.Compiled
    decode: jax.stages.Compiled


class Step(NamedTuple):
    """One new token of each sequence.

    tokens:             int32 `[B]`
    log_probabilities:  float32 `[B]`, of these tokens, see `sampling.log_probability`
    logits:             float32 `[B, V]` that they were chosen from
    seconds:            the step's time
    """

    tokens: np.ndarray
    log_probabilities: np.ndarray
    logits: jax.Array
    seconds: float


class Texts(NamedTuple):
    """The texts of one level laid out for prefill, int32 `[texts, S]` and `[texts]`, and the cache they are read into.

    Padded on the right and in storage order.
    """

    tokens: jax.Array
    lengths: jax.Array
    cache: KVCache


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """What came of one prompt.

    Attributes:
      prompt_ids: the prompt.
      new_ids: the tokens generated, the stop token not among them.
      stopped: whether a stop token ended it, rather than the limit.
      prefill_s: from prompts to first token, compilation excluded; shared by the batch.
      per_token_s: median over the later tokens; None when there were none.
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
      tokens_per_dispatch: how many steps one call of the decoding program makes, so that the host is asked less often.
        What is asked for beyond a stop token is made in vain.
      cache_dtype: of keys and values as they are kept: the model's, by default, or float8_e4m3fn.
      prefill_chunk: tokens that prefill reads at a time, a multiple of the shards; see `Llama.prefill`. Default: all.

    Raises:
      ValueError: `tokens_per_dispatch` is not a positive integer, `prefill_chunk` no multiple of the shards,
        `cache_dtype` none of the two, or SparQ has more components than there are.
      NotImplementedError: `prefill_chunk` with `ring`, whose chunks would need what came before.

    Example:
      >>> generator = Generator(model, by_name("tree", model.sharding))
      >>> generate(generator, [tokenizer.encode("Once upon a time")], max_new_tokens=20)[0].new_ids
    """

    def __init__(
        self,
        model: Llama,
        attention: Attention,
        sampling: Sampling | None = None,
        *,
        tokens_per_dispatch: int = 1,
        cache_dtype: DTypeLike | None = None,
        prefill_chunk: int | None = None,
    ):
        if not isinstance(tokens_per_dispatch, int | np.integer) or tokens_per_dispatch < 1:
            raise ValueError(f"{tokens_per_dispatch=}: must be an integer of at least 1")
        if prefill_chunk is not None:
            if prefill_chunk < 1 or prefill_chunk % (attention.num_shards * BLOCK_SIZE):
                raise ValueError(f"{prefill_chunk=}: must be a multiple of {attention.num_shards * BLOCK_SIZE} shards")
            if not attention.prefills_in_chunks:
                raise NotImplementedError(f"{prefill_chunk=}: attention={attention.name!r} reads prompts whole")
        if attention.sparq is not None:
            attention.sparq.check_head_dim(model.config.head_dim)
        self.tokens_per_dispatch, self.prefill_chunk = tokens_per_dispatch, prefill_chunk
        self.config, self.sharding, self.attention = model.config, model.sharding, attention
        self.sampling = Sampling() if sampling is None else sampling
        self._structure, self._parameters = nnx.split(model)
        own = model.embedding[...].dtype
        self._dtype = jnp.dtype(own if cache_dtype is None else cache_dtype)
        one_of("cache_dtype", self._dtype.name, (own.name, *NARROW_DTYPES))
        self._programs: dict[tuple, Programs] = {}

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        first_step: int = 0,
        share_prefixes: bool | None = None,
    ) -> Iterator[Step]:
        """Yields `max_new_tokens` steps for a batch of prompts, which may differ in length.

        To go on with a generation that was interrupted, give the prompts with their new tokens and, as `first_step`,
        how many those are: step `i` draws with the key of `first_step + i`.

        What prompts begin with in common is by default computed, held and read once where that pays; see `prefix_tree`.

        Raises:
          ValueError: before anything is compiled: no prompt, an empty one, a token that the vocabulary lacks, or more
            tokens than the model has positions.
          NotImplementedError: as `prefix_tree`.
        """
        check_request(self.config, prompts, max_new_tokens)
        return self._steps(self.prefix_tree(prompts, share_prefixes), max_new_tokens, first_step)

    def going_on(self, prompts: Sequence[Sequence[int]], done: Sequence[Sequence[int]]) -> tuple[list[list[int]], int]:
        """What `stream` is given, prompts and `first_step`, so that the steps after those `done` are the same again.

        Prompts with their new tokens where decoding attends as prefill does. SparQ's keys and values of new tokens are
        not what a prefill would make of them: it starts anew, and its first steps make the tokens done once more.
        """
        if self.attention.sparq is not None:
            return [list(prompt) for prompt in prompts], 0
        return [[*prompt, *ids] for prompt, ids in zip(prompts, done, strict=True)], len(done[0]) if done else 0

    def programs(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, share_prefixes: bool | None = None
    ) -> Programs:
        """The programs that `stream` would run on these prompts."""
        check_request(self.config, prompts, max_new_tokens)
        tree = self.prefix_tree(prompts, share_prefixes)
        return self._compile(tree, self._lay_out(tree, max_new_tokens))

    def prefix_tree(self, prompts: Sequence[Sequence[int]], share_prefixes: bool | None = None) -> PrefixTree:
        """What `stream` shares of these prompts.

        Args:
          share_prefixes: None: what saves `MIN_SHARED_KEYS` keys a node, unless caches would be larger for the padding
            of nodes to one length. True: whatever is common. False: nothing.

        Raises:
          ValueError: `share_prefixes` is none of these.
          NotImplementedError: `share_prefixes=True` with `ring`, or where the batch is cut over devices.
        """
        check_sharing(self.attention.name, share_prefixes)
        is_cut = self.sharding.num_shards("batch") > 1
        if share_prefixes and is_cut:
            raise NotImplementedError(f"{share_prefixes=}: the batch is cut over {self.sharding.batch!r}")
        alone = unshared(prompts)
        if share_prefixes is False or is_cut or not self.attention.shares_prefixes:
            return alone
        if share_prefixes:
            return share(prompts, min_shared=1)
        tree = share(prompts)
        return tree if tree.num_slots < alone.num_slots else alone

    @property
    def bytes_per_token(self) -> int:
        """Of keys and values, all layers; of the keys twice where they are kept by component too."""
        copies = 3 if self.attention.cache_keeps.get("keeps_key_by_component") else 2
        return copies * self.config.head_dim * self._bytes_per_component

    def bytes_read(self, num_tokens: int) -> int:
        """Of keys and values, that a step reads of one sequence of so many tokens, on all devices together."""
        sparq, head_dim = self.attention.sparq, self.config.head_dim
        elements = 2 * num_tokens * head_dim
        if sparq is not None:
            elements = num_tokens * sparq.num_components + 2 * min(sparq.num_keys, num_tokens) * head_dim
        return elements * self._bytes_per_component

    @property
    def _bytes_per_component(self) -> int:
        return self.config.num_layers * self.config.num_kv_heads * self._dtype.itemsize

    def cache_bytes(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, share_prefixes: bool | None = None
    ) -> int:
        """Keys and values that `stream` holds for these prompts, on all devices together, padding included."""
        tree = self.prefix_tree(prompts, share_prefixes)
        slots = sum(len(texts) * self._capacity(texts, room) for texts, room in _rooms(tree, max_new_tokens))
        return slots * self.bytes_per_token

    def _capacity(self, texts: Sequence[Sequence[int]], room: int = 0) -> int:
        unit, longest = self.attention.num_shards * BLOCK_SIZE, max(map(len, texts))
        return max(-(-(longest + room) // unit) * unit, self._padded(longest))

    def _padded(self, num_tokens: int) -> int:
        """As many tokens as prefill takes: whole shards, and whole chunks if it is more than one."""
        unit = self.attention.num_shards * BLOCK_SIZE
        if self.prefill_chunk is not None and num_tokens > self.prefill_chunk:
            unit = self.prefill_chunk
        return -(-num_tokens // unit) * unit

    def _lay_out(self, tree: PrefixTree, max_new_tokens: int) -> tuple[Texts, ...]:
        return tuple(self._lay_out_level(texts, room) for texts, room in _rooms(tree, max_new_tokens))

    def _lay_out_level(self, texts: Sequence[Sequence[int]], room: int) -> Texts:
        order = self.attention.storage_order(self._padded(max(map(len, texts))))
        tokens = np.zeros((len(texts), len(order.positions)), np.int32)
        for row, text in zip(tokens, texts, strict=True):
            row[: len(text)] = text
        lengths = np.array([len(text) for text in texts], np.int32)
        cache = KVCache.create(
            batch=len(texts),
            capacity=self._capacity(texts, room),
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            dtype=self._dtype,
            mesh=self.sharding.mesh,
            axis_name=self.sharding.sequence,
            block_size=BLOCK_SIZE,
            num_layers=self.config.num_layers,
            **self.attention.cache_keeps,
        )
        placed = self._place(tokens[:, order.positions], "batch", "sequence")
        return Texts(placed, self._place(lengths, "batch"), cache)

    def _place(self, array: np.ndarray, *logical_axes: str) -> jax.Array:
        """The same array of every process, each placing the part of its own devices."""
        return jax.make_array_from_callback(array.shape, self.sharding.named(*logical_axes), lambda index: array[index])

    def _compile(self, tree: PrefixTree, levels: tuple[Texts, ...]) -> Programs:
        shape = (tree.served, *((texts.tokens.shape, texts.cache.capacity) for texts in levels))
        if shape not in self._programs:
            tokens, lengths, caches = zip(*levels, strict=True)
            last = self._place(np.zeros(len(tree.remainders), np.int32), "batch")
            key, keys = self._key(0), self._keys(range(self.tokens_per_dispatch))
            of_row, of_logits = self.sharding.named("batch"), self.sharding.named("batch", "vocab")
            of_caches = jax.tree.map(lambda array: array.sharding, caches)
            prefill = jax.jit(
                functools.partial(self._prefill, tree.served),
                donate_argnames="caches",
                out_shardings=(of_row, of_row, of_logits, of_caches),
            )
            of_steps = self.sharding.named(None, "batch")
            decode = jax.jit(
                self._decode,
                donate_argnames="cache",
                out_shardings=(of_row, of_steps, of_steps, of_logits, of_caches[-1]),
            )
            prefixes = _prefixes(caches, tree.served[-1])
            self._programs[shape] = Programs(
                prefill=prefill.lower(self._parameters, tokens, lengths, key, caches=caches).compile(),
                decode=decode.lower(self._parameters, last, keys, prefixes, cache=caches[-1]).compile(),
            )
        return self._programs[shape]

    def _prefill(self, served, parameters, tokens, lengths, key, *, caches):
        """Level by level, each over those before it: a node's keys depend on all that come before it."""
        model = nnx.merge(self._structure, parameters)
        filled = ()
        for depth, level in enumerate(zip(tokens, lengths, caches, strict=True)):
            num_tokens, before = level[0].shape[1], _prefixes(filled, served[depth])
            is_cut = self.prefill_chunk is not None and num_tokens > self.prefill_chunk
            chunk = self.prefill_chunk if is_cut else None
            logits, cache = model.prefill(*level, self.attention, prefixes=before, chunk=chunk)
            filled = (*filled, cache)
        return *self._choose(logits, key), logits, filled

    def _decode(self, parameters, tokens, keys, prefixes, *, cache):
        """Steps one after another, as many as there are keys: the last tokens, and the results of all."""
        model = nnx.merge(self._structure, parameters)

        def step(carry, key):
            tokens, cache = carry
            logits, cache = model.decode(tokens[:, None], cache, self.attention, prefixes=prefixes)
            tokens, log_p = self._choose(logits[:, 0], key)
            return (tokens, cache), (tokens, log_p, logits[:, 0])

        (tokens, cache), (made, log_p, logits) = jax.lax.scan(step, (tokens, cache), keys, unroll=len(keys) == 1)
        return tokens, made, log_p, tuple(logits), cache

    def _choose(self, logits: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The tokens, and their log-probabilities."""
        with jax.named_scope("choose"):
            key = jax.random.wrap_key_data(key)
            tokens = choose(logits, self.sampling, key, self.sharding.num_shards("vocab"))
            return tokens, log_probability(logits, tokens)

    def _key(self, step: int) -> jax.Array:
        # As numbers, for those can be placed on devices of other processes.
        key = jax.random.key_data(jax.random.fold_in(jax.random.key(self.sampling.seed), step))
        return self._place(np.asarray(key))

    def _keys(self, steps: Sequence[int]) -> jax.Array:
        return self._place(np.stack([np.asarray(self._key(step)) for step in steps]))

    def _steps(self, tree: PrefixTree, max_new_tokens: int, first_step: int) -> Iterator[Step]:
        levels = self._lay_out(tree, max_new_tokens)
        programs = self._compile(tree, levels)
        # Keys are drawn beforehand, so that a step's time holds the step alone.
        first, at_once = self._key(first_step), self.tokens_per_dispatch
        starts = range(first_step + 1, first_step + max_new_tokens, at_once)
        keys = [self._keys(range(start, start + at_once)) for start in starts]
        inputs, lengths, caches = zip(*levels, strict=True)
        del levels
        start = time.perf_counter()
        tokens, log_p, logits, caches = programs.prefill(self._parameters, inputs, lengths, first, caches=caches)
        yield Step(np.asarray(tokens), np.asarray(log_p), logits, time.perf_counter() - start)
        prefixes, cache = _prefixes(caches, tree.served[-1]), caches[-1]
        del caches
        left = max_new_tokens - 1
        for some in keys:
            start = time.perf_counter()
            tokens, made, log_p, logits, cache = programs.decode(self._parameters, tokens, some, prefixes, cache=cache)
            made, log_p = np.asarray(made), np.asarray(log_p)
            seconds = (time.perf_counter() - start) / at_once
            for results in list(zip(made, log_p, logits, strict=True))[:left]:
                yield Step(*results, seconds)
            left -= at_once


def _rooms(tree: PrefixTree, max_new_tokens: int) -> list[tuple[Sequence[Sequence[int]], int]]:
    """The texts of each level, and how many tokens may follow each of them: none follow a node."""
    return [*((texts, 0) for texts in tree.texts[:-1]), (tree.remainders, max_new_tokens)]


def _prefixes(caches: Sequence[KVCache], served) -> tuple[Prefix, ...]:
    """The levels above one, for it: `served` is that of its depth. Further caches are of that level and below."""
    return tuple(Prefix(cache=cache, sequences=sequences) for cache, sequences in zip(caches, served, strict=False))


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
) -> list[Generation]:
    """Generates until each sequence meets a stop token or has `max_new_tokens`.

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

    Raises:
      ValueError, NotImplementedError: as `Generator.stream`; no positive number of samples; `done` is none that can
        go on, or not what SparQ makes of these prompts.

    Example:
      >>> samples = generate(generator, [prompt], max_new_tokens=100, num_samples=64)
      >>> rank_samples(samples, top=3)[0].new_ids
    """
    if not isinstance(num_samples, int | np.integer) or num_samples < 1:
        raise ValueError(f"{num_samples=}: must be an integer of at least 1")
    prompts = [prompt for prompt in prompts for _ in range(num_samples)]
    new_ids = [list(ids) for ids in ([[]] * len(prompts) if done is None else done)]
    _check_done(new_ids, prompts, max_new_tokens)
    num_done = len(new_ids[0]) if new_ids else 0
    read, first_step = generator.going_on(prompts, new_ids)
    again = num_done - first_step
    stopped = [False] * len(prompts)
    log_probabilities: list[list[float]] = [[] for _ in prompts]
    seconds = []
    steps = generator.stream(read, max_new_tokens - first_step, first_step=first_step, share_prefixes=share_prefixes)
    for number, step in enumerate(steps):
        seconds.append(step.seconds)
        if number < again:
            _check_again(step.tokens.tolist(), [ids[number] for ids in new_ids], number)
            continue
        for sequence, token in enumerate(step.tokens.tolist()):
            if stopped[sequence]:
                continue
            log_probabilities[sequence].append(float(step.log_probabilities[sequence]))
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
            prefill_s=seconds[0],
            per_token_s=statistics.median(seconds[1:]) if seconds[1:] else None,
            log_probability=math.fsum(log_p),
            mean_log_probability=statistics.fmean(log_p),
        )
        for prompt, ids, stop, log_p in zip(prompts, new_ids, stopped, log_probabilities, strict=True)
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


def _check_again(made: Sequence[int], done: Sequence[int], number: int) -> None:
    if list(made) != list(done):
        raise ValueError(f"done: holds tokens {list(done)} as number {number}, and this generation makes {list(made)}")


def _check_done(done: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    counts = [len(ids) for ids in done]
    if len(counts) != len(prompts) or len(set(counts)) > 1 or (max(counts, default=0) >= max_new_tokens >= 1):
        raise ValueError(
            f"done: must hold equally many new tokens for each of {len(prompts)} prompts, fewer than "
            f"{max_new_tokens=}; got {counts}"
        )
