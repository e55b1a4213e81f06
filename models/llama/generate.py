"""Generation: prompts are laid out and prefilled, then one compiled step makes each new token."""

import dataclasses
import functools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from models.llama.attention import (
    BLOCK_SIZE,
    Attention,
    Prefix,
    check_cache_dtype,
    check_prefill_chunk,
    check_sharing,
    empty_cache,
)
from models.llama.calibration import cache_scales
from models.llama.config import LlamaConfig
from models.llama.model import Llama
from models.llama.prefix_tree import PrefixTree, share, unshared
from models.llama.sampling import Sampling, choose, log_probability
from tree_attn import measure
from tree_attn.arguments import NARROW_DTYPES, one_of
from tree_attn.cache import KVCache


class Programs(NamedTuple):
    """The two compiled programs of a generation; `as_text()` and `memory_analysis()` tell what they do and need."""

    prefill: jax.stages.Compiled
    decode: jax.stages.Compiled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes that a generation holds on each device, known before it runs.

    Attributes:
      weights, cache, inputs: of the model, of all caches, and of what is laid out beside them; exact, from shapes and
        shardings.
      prefill, decode: what the program needs besides: its temporaries, and those of its results that do not take the
        place of an argument. XLA's own figures; None where the backend does not say.
    """

    weights: int
    cache: int
    inputs: int
    prefill: int | None
    decode: int | None

    @property
    def held(self) -> int:
        """What the programs are given: it is held from beginning to end."""
        return self.weights + self.cache + self.inputs

    @property
    def peak(self) -> int | None:
        """The most at any time: `held`, and what the hungrier program needs."""
        return None if self.prefill is None or self.decode is None else self.held + max(self.prefill, self.decode)


class Rows(NamedTuple):
    """Where each row of a batch is, int32 `[B]` each: what the next step needs besides the cache.

    tokens:     the newest
    sequences:  which sequence the row is; its draws depend on this and on their number, not on its place in a batch
    steps:      how many tokens have been chosen
    """

    tokens: jax.Array
    sequences: jax.Array
    steps: jax.Array


class Step(NamedTuple):
    """One new token of each row.

    tokens:             int32 `[B]`
    log_probabilities:  float32 `[B]`, of these tokens, see `sampling.log_probability`
    logits:             float32 `[B, V]` that they were chosen from
    seconds:            the step's time
    sequences:          `[B]`, whose each row's token is; None where it is nobody's
    """

    tokens: np.ndarray
    log_probabilities: np.ndarray
    logits: jax.Array
    seconds: float
    sequences: Sequence[int | None]


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


def check_max_batch(max_batch: int) -> None:
    """Raises ValueError unless `max_batch` is a positive integer."""
    if not isinstance(max_batch, int | np.integer) or max_batch < 1:
        raise ValueError(f"{max_batch=}: must be an integer of at least 1")


class Generator:
    """Generates with one model and one attention. Programs are compiled once per shape and kept.

    Args:
      model: whose sharding the cache follows.
      attention: from `attention.by_name`, made with the same sharding.
      sampling: how tokens are chosen; default greedy.
      tokens_per_dispatch: how many steps one call of the decoding program makes, so that the host is asked less often.
        What is asked for beyond a stop token is made in vain.
      cache_dtype: of keys and values as they are kept: the model's, by default, float8_e4m3fn, or int8 with a scale per
        layer and head. Prompts are read in the model's dtype (chunks and shared prefixes are read as they are kept).
      cache_scales: of an int8 cache; default: `calibration.cache_scales` of the model, when they are first needed.
      prefill_chunk: tokens that prefill reads at a time, a multiple of the shards; see `Llama.prefill`. Default: all.

    Raises:
      ValueError: `tokens_per_dispatch` is not a positive integer, `prefill_chunk` no multiple of the shards, or
        `cache_dtype` none of the three; `cache_scales` for another dtype than int8; or SparQ has more components than
        there are.
      NotImplementedError: `prefill_chunk` with `ring`, whose chunks would need what came before; int8 with `sparq`.

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
        cache_scales: Mapping[str, jax.Array] | None = None,
        prefill_chunk: int | None = None,
    ):
        if not isinstance(tokens_per_dispatch, int | np.integer) or tokens_per_dispatch < 1:
            raise ValueError(f"{tokens_per_dispatch=}: must be an integer of at least 1")
        check_prefill_chunk(attention.name, prefill_chunk, attention.num_shards)
        if attention.sparq is not None:
            attention.sparq.check_head_dim(model.config.head_dim)
        self.tokens_per_dispatch, self.prefill_chunk = tokens_per_dispatch, prefill_chunk
        self.config, self.sharding, self.attention = model.config, model.sharding, attention
        self.sampling = Sampling() if sampling is None else sampling
        self._structure, self._parameters = nnx.split(model)
        self._unrolls_layers = model.unroll_layers
        own = model.embedding[...].dtype
        self._dtype = jnp.dtype(own if cache_dtype is None else cache_dtype)
        one_of("cache_dtype", self._dtype.name, (own.name, *NARROW_DTYPES))
        check_cache_dtype(attention.name, self._dtype.name)
        if cache_scales is not None and self._dtype != jnp.int8:
            raise ValueError(f"cache_scales: must be None for cache_dtype={self._dtype.name!r}, only int8 has them")
        self._given_scales = cache_scales
        self._programs: dict[tuple, Programs | jax.stages.Compiled] = {}

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
        how many those are: step `i` of sequence `b` draws with the key of the seed, `b` and `first_step + i`.

        What prompts begin with in common is by default computed, held and read once where that pays; see `prefix_tree`.

        Raises:
          ValueError: before anything is compiled: no prompt, an empty one, a token that the vocabulary lacks, or more
            tokens than the model has positions.
          NotImplementedError: as `prefix_tree`.
        """
        check_request(self.config, prompts, max_new_tokens)
        return self._steps(self.prefix_tree(prompts, share_prefixes), max_new_tokens, first_step)

    def stream_queue(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        max_batch: int,
        stop_ids: Collection[int] = (),
        first_step: int = 0,
    ) -> Iterator[Step]:
        """Yields steps of at most `max_batch` sequences at a time, until all have stopped: continuous batching.

        A row whose sequence has met a stop token, or has `max_new_tokens`, takes the next prompt: that is prefilled by
        itself, its keys and values go to the row's place in the cache, and the other rows go on. Its first token is a
        step of one row. Each sequence gets the tokens that `stream` would give it.

        Prompts are padded to a power of two times the shards (and whole chunks), and a program is compiled for each of
        the lengths that occur: at most one more than the binary logarithm of the longest. The cache holds `max_batch`
        of the longest sequence; a prefill holds its own keys and values besides.

        Raises:
          ValueError: as `stream`; `max_batch` is not a positive integer.
          NotImplementedError: the batch is cut over devices.
        """
        check_request(self.config, prompts, max_new_tokens)
        check_max_batch(max_batch)
        if self.sharding.num_shards("batch") > 1:
            raise NotImplementedError(f"{max_batch=}: the batch is cut over {self.sharding.batch!r}")
        return self._queue_steps(prompts, max_new_tokens, min(max_batch, len(prompts)), frozenset(stop_ids), first_step)

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

    def memory(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, share_prefixes: bool | None = None
    ) -> Memory:
        """What `stream` will hold on each device for these prompts; compiles its programs and runs nothing.

        Example:
          >>> generator.memory([prompt], max_new_tokens=100).peak
        """
        check_request(self.config, prompts, max_new_tokens)
        tree = self.prefix_tree(prompts, share_prefixes)
        levels = self._lay_out(tree, max_new_tokens)
        inputs = *((texts.tokens, texts.lengths) for texts in levels), self._new_rows(len(prompts))
        needs = map(measure.compiled_memory, self._compile(tree, levels))
        prefill, decode = (None if need is None else need.peak_bytes - need.argument_bytes for need in needs)
        return Memory(
            weights=measure.bytes_per_device(self._parameters),
            cache=measure.bytes_per_device([texts.cache for texts in levels]),
            inputs=measure.bytes_per_device(inputs),
            prefill=prefill,
            decode=decode,
        )

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
        longest = max(map(len, texts))
        unit = self.attention.num_shards * self.attention.slot_multiple(longest + room)
        return max(-(-(longest + room) // unit) * unit, self._padded(longest))

    def _padded(self, num_tokens: int) -> int:
        """As many tokens as prefill takes: whole shards, and whole chunks if it is more than one."""
        unit = self.attention.num_shards * BLOCK_SIZE
        if self.prefill_chunk is not None and num_tokens > self.prefill_chunk:
            unit = self.prefill_chunk
        return -(-num_tokens // unit) * unit

    def _lay_out(self, tree: PrefixTree, max_new_tokens: int) -> tuple[Texts, ...]:
        return tuple(
            Texts(
                *self._lay_out_level(texts, self._padded(max(map(len, texts)))),
                self._empty_cache(len(texts), self._capacity(texts, room), self._scales),
            )
            for texts, room in _rooms(tree, max_new_tokens)
        )

    def _lay_out_level(self, texts: Sequence[Sequence[int]], num_tokens: int) -> tuple[jax.Array, jax.Array]:
        order = self.attention.storage_order(num_tokens)
        tokens = np.zeros((len(texts), len(order.positions)), np.int32)
        for row, text in zip(tokens, texts, strict=True):
            row[: len(text)] = text
        lengths = np.array([len(text) for text in texts], np.int32)
        placed = self.sharding.place(tokens[:, order.positions], "batch", "sequence")
        return placed, self.sharding.place(lengths, "batch")

    def _empty_cache(self, batch: int, capacity: int, scales: Mapping[str, jax.Array | None]) -> KVCache:
        sizes = dict(batch=batch, capacity=capacity, dtype=self._dtype)
        how = dict(stacks_layers=not self._unrolls_layers, **scales, **self.attention.cache_keeps)
        return empty_cache(self.config, self.sharding, **sizes, **how)

    @functools.cached_property
    def _scales(self) -> Mapping[str, jax.Array]:
        if self._dtype != jnp.int8 or self._given_scales is not None:
            return self._given_scales or {}
        return cache_scales(nnx.merge(self._structure, self._parameters), self.attention)

    def _compile(self, tree: PrefixTree, levels: tuple[Texts, ...]) -> Programs:
        shape = (tree.served, *((texts.tokens.shape, texts.cache.capacity) for texts in levels))
        if shape not in self._programs:
            tokens, lengths, caches = zip(*levels, strict=True)
            rows = self._new_rows(len(tree.remainders))
            of_row, of_logits = self.sharding.named("batch"), self.sharding.named("batch", "vocab")
            prefill = jax.jit(
                functools.partial(self._prefill, tree.served),
                donate_argnames="caches",
                out_shardings=(of_row, of_row, of_logits, _shardings(caches)),
            )
            prefixes = _prefixes(caches, tree.served[-1])
            self._programs[shape] = Programs(
                prefill=prefill.lower(self._parameters, tokens, lengths, rows, caches=caches).compile(),
                decode=self._compile_decode(rows, prefixes, caches[-1]),
            )
        return self._programs[shape]

    def _compile_decode(self, rows: Rows, prefixes: tuple[Prefix, ...], cache: KVCache) -> jax.stages.Compiled:
        of_row, of_steps = self.sharding.named("batch"), self.sharding.named(None, "batch")
        of_logits = self.sharding.named("batch", "vocab")
        decode = jax.jit(
            self._decode,
            donate_argnames="cache",
            out_shardings=(of_row, of_steps, of_steps, of_logits, _shardings(cache)),
        )
        return decode.lower(self._parameters, rows, prefixes, cache=cache).compile()

    def _compile_admission(self, tokens: jax.Array, *inputs, cache: KVCache) -> jax.stages.Compiled:
        shape = ("admission", tokens.shape, cache.shape)
        if shape not in self._programs:
            of_row, of_logits = self.sharding.named("batch"), self.sharding.named("batch", "vocab")
            admit = jax.jit(
                self._admit,
                donate_argnames="cache",
                out_shardings=(of_row, of_row, of_row, of_logits, _shardings(cache)),
            )
            self._programs[shape] = admit.lower(self._parameters, tokens, *inputs, cache=cache).compile()
        return self._programs[shape]

    def _prefill(self, served, parameters, tokens, lengths, rows, *, caches):
        """Level by level, each over those before it: a node's keys depend on all that come before it."""
        model = nnx.merge(self._structure, parameters)
        filled = ()
        for depth, level in enumerate(zip(tokens, lengths, caches, strict=True)):
            before = _prefixes(filled, served[depth])
            logits, cache = self._read(model, *level, prefixes=before)
            filled = (*filled, cache)
        return *self._choose(logits, rows), logits, filled

    def _read(self, model: Llama, tokens, lengths, cache, **how) -> tuple[jax.Array, KVCache]:
        is_cut = self.prefill_chunk is not None and tokens.shape[1] > self.prefill_chunk
        return model.prefill(
            tokens, lengths, cache, self.attention, chunk=self.prefill_chunk if is_cut else None, **how
        )

    def _admit(self, parameters, tokens, lengths, new: Rows, row, rows: Rows, *, cache: KVCache):
        """Prefills one prompt into a cache of its own and puts that into `row` of the batch."""
        own = self._empty_cache(1, tokens.shape[1], cache.scales())
        logits, own = self._read(nnx.merge(self._structure, parameters), tokens, lengths, own)
        new, log_p = self._choose(logits, new)
        rows = jax.tree.map(lambda batch, one: jax.lax.dynamic_update_slice(batch, one, (row,)), rows, new)
        return rows, new.tokens, log_p, logits, cache.with_sequence(row, own)

    def _decode(self, parameters, rows, prefixes, *, cache):
        """`tokens_per_dispatch` steps one after another: the rows after the last, and the results of all."""
        model = nnx.merge(self._structure, parameters)

        def step(carry, _):
            rows, cache = carry
            logits, cache = model.decode(rows.tokens[:, None], cache, self.attention, prefixes=prefixes)
            rows, log_p = self._choose(logits[:, 0], rows)
            return (rows, cache), (rows.tokens, log_p, logits[:, 0])

        count = self.tokens_per_dispatch
        (rows, cache), (made, log_p, logits) = jax.lax.scan(step, (rows, cache), length=count, unroll=count == 1)
        return rows, made, log_p, tuple(logits), cache

    def _choose(self, logits: jax.Array, rows: Rows) -> tuple[Rows, jax.Array]:
        """The rows one token on, and what the model gives to those tokens."""
        with jax.named_scope("choose"):
            key_of = lambda sequence, step: jax.random.fold_in(
                jax.random.fold_in(jax.random.key(self.sampling.seed), sequence), step
            )
            keys = jax.vmap(key_of)(rows.sequences, rows.steps)
            tokens = choose(logits, self.sampling, keys, self.sharding.num_shards("vocab"))
            return Rows(tokens, rows.sequences, rows.steps + 1), log_probability(logits, tokens)

    def _new_rows(self, batch: int, *, first_sequence: int = 0, step: int = 0) -> Rows:
        sequences = np.arange(first_sequence, first_sequence + batch)
        numbers = np.zeros(batch), sequences, np.full(batch, step)
        return Rows(*(self.sharding.place(np.asarray(x, np.int32), "batch") for x in numbers))

    def _steps(self, tree: PrefixTree, max_new_tokens: int, first_step: int) -> Iterator[Step]:
        levels = self._lay_out(tree, max_new_tokens)
        programs = self._compile(tree, levels)
        sequences = tuple(range(len(tree.remainders)))
        rows = self._new_rows(len(sequences), step=first_step)
        inputs, lengths, caches = zip(*levels, strict=True)
        del levels
        start = time.perf_counter()
        rows, log_p, logits, caches = programs.prefill(self._parameters, inputs, lengths, rows, caches=caches)
        tokens = np.asarray(rows.tokens)
        yield Step(tokens, np.asarray(log_p), logits, time.perf_counter() - start, sequences)
        prefixes, cache = _prefixes(caches, tree.served[-1]), caches[-1]
        del caches
        for left in range(max_new_tokens - 1, 0, -self.tokens_per_dispatch):
            rows, cache, steps = self._dispatch(programs.decode, rows, prefixes, cache)
            for results in steps[:left]:
                yield Step(*results, sequences)

    def _dispatch(self, decode: jax.stages.Compiled, rows: Rows, prefixes, cache: KVCache):
        """One call of the decoding program: rows and cache, and of each of its steps what a `Step` says."""
        start = time.perf_counter()
        rows, made, log_p, logits, cache = decode(self._parameters, rows, prefixes, cache=cache)
        made, log_p = np.asarray(made), np.asarray(log_p)
        seconds = [(time.perf_counter() - start) / len(made)] * len(made)
        return rows, cache, list(zip(made, log_p, logits, seconds, strict=True))

    def _queue_steps(self, prompts, max_new_tokens: int, max_batch: int, stop_ids, first_step: int) -> Iterator[Step]:
        capacity = self._capacity(prompts, max_new_tokens)
        rows, cache = self._new_rows(max_batch), self._empty_cache(max_batch, capacity, self._scales)
        shape = ("queue", cache.shape)
        if shape not in self._programs:
            self._programs[shape] = self._compile_decode(rows, (), cache)
        decode, waiting, counts = self._programs[shape], deque(range(len(prompts))), [0] * len(prompts)
        held: list[int | None] = [None] * max_batch
        longest = max(map(len, prompts))

        def goes_on(sequence: int, token: int) -> bool:
            counts[sequence] += 1
            return token not in stop_ids and counts[sequence] < max_new_tokens

        while True:
            for row in range(max_batch):
                while held[row] is None and waiting:
                    sequence = waiting.popleft()
                    new = self._new_rows(1, first_sequence=sequence, step=first_step)
                    prompt = self._lay_out_level([prompts[sequence]], self._bucket(len(prompts[sequence]), longest))
                    inputs = *prompt, new, self.sharding.place(np.array(row, np.int32)), rows
                    admit = self._compile_admission(*inputs, cache=cache)
                    start = time.perf_counter()
                    rows, tokens, log_p, logits, cache = admit(self._parameters, *inputs, cache=cache)
                    tokens = np.asarray(tokens)
                    yield Step(tokens, np.asarray(log_p), logits, time.perf_counter() - start, (sequence,))
                    held[row] = sequence if goes_on(sequence, int(tokens[0])) else None
            if all(sequence is None for sequence in held):
                return
            rows, cache, steps = self._dispatch(decode, rows, (), cache)
            for made, *results in steps:
                yield Step(made, *results, tuple(held))
                held = [
                    sequence if sequence is not None and goes_on(sequence, token) else None
                    for sequence, token in zip(held, made.tolist(), strict=True)
                ]

    def _bucket(self, num_tokens: int, longest: int) -> int:
        """One of few lengths to which prompts of a queue are padded."""
        unit = self.attention.num_shards * BLOCK_SIZE
        power = 1 << (-(-num_tokens // unit) - 1).bit_length()
        return min(self._padded(unit * power), self._padded(longest))


def _rooms(tree: PrefixTree, max_new_tokens: int) -> list[tuple[Sequence[Sequence[int]], int]]:
    """The texts of each level, and how many tokens may follow each of them: none follow a node."""
    return [*((texts, 0) for texts in tree.texts[:-1]), (tree.remainders, max_new_tokens)]


def _prefixes(caches: Sequence[KVCache], served) -> tuple[Prefix, ...]:
    """The levels above one, for it: `served` is that of its depth. Further caches are of that level and below."""
    return tuple(Prefix(cache=cache, sequences=sequences) for cache, sequences in zip(caches, served, strict=False))


def _shardings(tree):
    return jax.tree.map(lambda array: array.sharding, tree)


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
    than `max_batch`: its place then goes to the next (`Generator.stream_queue`). The tokens are the same either way.

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
        steps = generator.stream_queue(read, max_batch=max_batch, stop_ids=stop_ids, **how)
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
