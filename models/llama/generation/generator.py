"""A generator: prompts are laid out and prefilled, then one compiled step makes each new token."""

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tree_attn.arguments import NARROW_DTYPES, one_of
from tree_attn.cache import KVCache
from tree_attn.models.llama.attention import (
    BLOCK_SIZE,
    Attention,
    Prefix,
    check_cache_dtype,
    check_prefill_chunk,
    check_sharing,
    empty_cache,
)
from tree_attn.models.llama.config import LlamaConfig
from tree_attn.models.llama.generation.int8_scales import cache_scales
from tree_attn.models.llama.generation.prefix_tree import PrefixTree, share, unshared
from tree_attn.models.llama.generation.sampling import Sampling, choose, log_probability
from tree_attn.models.llama.model import Llama

# As measured on an H200, docs/log/llama.md: "Weights stored as one are multiplied faster, and cuBLAS beats Triton above
# 16 sequences", "Independent kernels side by side gain up to 5 % below 256 sequences", "Eight tokens a call relieve the
# host on four GPUs".
MOST_ROWS_OF_TRITON_PRODUCTS = 16
MOST_ROWS_SIDE_BY_SIDE = 128
TOKENS_PER_DISPATCH_ON_GPUS = 8


class Programs(NamedTuple):
    """The two compiled programs of a generation; `as_text()` and `memory_analysis()` tell what they do and need."""

    prefill: jax.stages.Compiled
    decode: jax.stages.Compiled


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
    seconds:            the step's time: from when the one before was known, of several per dispatch their share
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
        What is asked for beyond a stop token is made in vain. Default: 8 on GPUs, where a call of an 8B model's
        program takes the host some 4 ms whatever it makes, else 1.
      cache_dtype: of keys and values as they are kept: the model's, by default, float8_e4m3fn, or int8 with a scale per
        layer and head. Prompts are read in the model's dtype (chunks and shared prefixes are read as they are kept).
      cache_scales: of an int8 cache; default: `calibration.cache_scales` of the model, when they are first needed.
      prefill_chunk: tokens that prefill reads at a time, a multiple of the shards; see `Llama.prefill`. Default: all.

    Raises:
      ValueError: `tokens_per_dispatch` is not a positive integer, `prefill_chunk` no multiple of the shards, or
        `cache_dtype` none of the three; `cache_scales` for another dtype than int8; or SparQ has more components than
        there are.
      NotImplementedError: `prefill_chunk` with `ring`, whose chunks would need what came before; int8 with `sparq`.

    What follows `prefix_tree` is for `continuous_batching` and `memory`, which are made of the same parts as `stream`.

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
        tokens_per_dispatch: int | None = None,
        cache_dtype: DTypeLike | None = None,
        cache_scales: Mapping[str, jax.Array] | None = None,
        prefill_chunk: int | None = None,
    ):
        if tokens_per_dispatch is None:
            tokens_per_dispatch = TOKENS_PER_DISPATCH_ON_GPUS if model.sharding.is_on_gpus else 1
        if not isinstance(tokens_per_dispatch, int | np.integer) or tokens_per_dispatch < 1:
            raise ValueError(f"{tokens_per_dispatch=}: must be an integer of at least 1")
        check_prefill_chunk(attention.name, prefill_chunk, attention.num_shards)
        if attention.sparq is not None:
            attention.sparq.check_head_dim(model.config.head_dim)
        self.tokens_per_dispatch, self.prefill_chunk = tokens_per_dispatch, prefill_chunk
        self.config, self.sharding, self.attention = model.config, model.sharding, attention
        self.sampling = Sampling() if sampling is None else sampling
        self._structure, state = nnx.split(model)
        # Programs are called with a list: flax's own containers take 0.6 ms of the host at each call of an 8B model.
        self.parameters, self._containers = jax.tree.flatten(state)
        self._unrolls_layers = model.unroll_layers
        own = model.embedding[...].dtype
        self.cache_dtype = jnp.dtype(own if cache_dtype is None else cache_dtype)
        one_of("cache_dtype", self.cache_dtype.name, (own.name, *NARROW_DTYPES))
        check_cache_dtype(attention.name, self.cache_dtype.name)
        if cache_scales is not None and self.cache_dtype != jnp.int8:
            raise ValueError(
                f"cache_scales: must be None for cache_dtype={self.cache_dtype.name!r}, only int8 has them"
            )
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
        return self.compile_programs(tree, self.lay_out(tree, max_new_tokens))

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

    def capacity(self, texts: Sequence[Sequence[int]], room: int = 0) -> int:
        """Slots for each of these texts in one cache, with `room` for as many tokens after it."""
        longest = max(map(len, texts))
        unit = self.attention.num_shards * self.attention.slot_multiple(longest + room)
        return max(-(-(longest + room) // unit) * unit, self.padded(longest))

    def padded(self, num_tokens: int) -> int:
        """As many tokens as prefill takes: whole shards, and whole chunks if it is more than one."""
        unit = self.attention.num_shards * BLOCK_SIZE
        if self.prefill_chunk is not None and num_tokens > self.prefill_chunk:
            unit = self.prefill_chunk
        return -(-num_tokens // unit) * unit

    def lay_out(self, tree: PrefixTree, max_new_tokens: int) -> tuple[Texts, ...]:
        """Each level of the tree on the devices, and an empty cache for it."""
        return tuple(
            Texts(
                *self.lay_out_level(texts, self.padded(max(map(len, texts)))),
                self.empty_cache(len(texts), self.capacity(texts, room)),
            )
            for texts, room in rooms(tree, max_new_tokens)
        )

    def lay_out_level(self, texts: Sequence[Sequence[int]], num_tokens: int) -> tuple[jax.Array, jax.Array]:
        """Tokens, padded to `num_tokens` and in storage order, and lengths; on the devices."""
        order = self.attention.storage_order(num_tokens)
        tokens = np.zeros((len(texts), len(order.positions)), np.int32)
        for row, text in zip(tokens, texts, strict=True):
            row[: len(text)] = text
        lengths = np.array([len(text) for text in texts], np.int32)
        placed = self.sharding.place(tokens[:, order.positions], "batch", "sequence")
        return placed, self.sharding.place(lengths, "batch")

    def empty_cache(self, batch: int, capacity: int, scales: Mapping[str, jax.Array | None] | None = None) -> KVCache:
        """As this generator keeps it; within a program the scales are given, for they are not constants of it."""
        scales = self._scales if scales is None else scales
        sizes = dict(batch=batch, capacity=capacity, dtype=self.cache_dtype)
        how = dict(stacks_layers=not self._unrolls_layers, **scales, **self.attention.cache_keeps)
        return empty_cache(self.config, self.sharding, **sizes, **how)

    @functools.cached_property
    def _scales(self) -> Mapping[str, jax.Array]:
        if self.cache_dtype != jnp.int8 or self._given_scales is not None:
            return self._given_scales or {}
        return cache_scales(self.model_of(self.parameters), self.attention)

    def compiled_once(
        self, shape: tuple, compile_it: Callable[[], Programs | jax.stages.Compiled]
    ) -> Programs | jax.stages.Compiled:
        """What was compiled for this shape, which `compile_it` is called for the first time."""
        if shape not in self._programs:
            self._programs[shape] = compile_it()
        return self._programs[shape]

    def compile_programs(self, tree: PrefixTree, levels: tuple[Texts, ...]) -> Programs:
        """The programs for a tree that was laid out as these levels; once for each shape."""
        shape = (tree.served, *((texts.tokens.shape, texts.cache.capacity) for texts in levels))
        return self.compiled_once(shape, lambda: self._compile(tree, levels))

    def _compile(self, tree: PrefixTree, levels: tuple[Texts, ...]) -> Programs:
        tokens, lengths, caches = zip(*levels, strict=True)
        rows = self.new_rows(len(tree.remainders))
        of_row, of_logits = self.sharding.named("batch"), self.sharding.named("batch", "vocab")
        prefill = jax.jit(
            functools.partial(self._prefill, tree.served),
            donate_argnames="caches",
            out_shardings=(of_row, of_row, of_logits, shardings_of(caches)),
        )
        prefixes = _prefixes(caches, tree.served[-1])
        return Programs(
            prefill=prefill.lower(self.parameters, tokens, lengths, rows, caches=caches).compile(),
            decode=self.compile_decode(rows, prefixes, caches[-1]),
        )

    def compile_decode(self, rows: Rows, prefixes: tuple[Prefix, ...], cache: KVCache) -> jax.stages.Compiled:
        """The program of `tokens_per_dispatch` steps; compiled anew."""
        of_row, of_steps = self.sharding.named("batch"), self.sharding.named(None, "batch")
        of_logits = self.sharding.named("batch", "vocab")
        decode = jax.jit(
            self._decode,
            donate_argnames="cache",
            out_shardings=(of_row, of_steps, of_steps, of_logits, shardings_of(cache)),
        )
        lowered = decode.lower(self.parameters, rows, prefixes, cache=cache)
        return lowered.compile(compiler_options=self._decode_options(len(rows.tokens)))

    def _decode_options(self, num_rows: int) -> dict[str, bool | str]:
        """What XLA is told of a decoding program.

        Where rows are many cuBLAS reads kernels faster than Triton, which XLA would still choose for some of them.
        Where they are few, kernels that do not wait for one another run beside each other: writing keys and values,
        and attention to what each sequence has of its own, beside attention to what they share. On one device only,
        for XLA does not see that kernels which exchange with other devices wait for these.
        """
        if not self.sharding.is_on_gpus:
            return {}
        # Else the product with the head is made twice where its result is also put into an array.
        options = {"xla_gpu_enable_dynamic_slice_fusion": False}
        if num_rows > MOST_ROWS_OF_TRITON_PRODUCTS:
            options["xla_gpu_enable_triton_gemm"] = False
        if num_rows <= MOST_ROWS_SIDE_BY_SIDE and self.sharding.mesh.size == 1:
            options["xla_gpu_command_buffer_scheduling_mode"] = "CONCURRENT"
        return options

    def _prefill(self, served, parameters, tokens, lengths, rows, *, caches):
        """Level by level, each over those before it: a node's keys depend on all that come before it."""
        model = self.model_of(parameters)
        filled = ()
        for depth, level in enumerate(zip(tokens, lengths, caches, strict=True)):
            before = _prefixes(filled, served[depth])
            logits, cache = self.read(model, *level, prefixes=before)
            filled = (*filled, cache)
        return *self.next_rows(logits, rows), logits, filled

    def model_of(self, parameters) -> Llama:
        """The model of what a program is given as `parameters`."""
        return nnx.merge(self._structure, jax.tree.unflatten(self._containers, parameters))

    def read(self, model: Llama, tokens, lengths, cache, **how) -> tuple[jax.Array, KVCache]:
        """A prefill within a program, in chunks if it is longer than one: logits and the filled cache."""
        is_cut = self.prefill_chunk is not None and tokens.shape[1] > self.prefill_chunk
        return model.prefill(
            tokens, lengths, cache, self.attention, chunk=self.prefill_chunk if is_cut else None, **how
        )

    def _decode(self, parameters, rows, prefixes, *, cache):
        """`tokens_per_dispatch` steps one after another: the rows after the last, and the results of all."""
        model = self.model_of(parameters)

        def step(carry, _):
            rows, cache = carry
            logits, cache = model.decode(rows.tokens[:, None], cache, self.attention, prefixes=prefixes)
            rows, log_p = self.next_rows(logits[:, 0], rows)
            return (rows, cache), (rows.tokens, log_p, logits[:, 0])

        count = self.tokens_per_dispatch
        (rows, cache), (made, log_p, logits) = jax.lax.scan(step, (rows, cache), length=count, unroll=count == 1)
        return rows, made, log_p, tuple(logits), cache

    def next_rows(self, logits: jax.Array, rows: Rows) -> tuple[Rows, jax.Array]:
        """The rows one token on, and what the model gives to those tokens."""
        with jax.named_scope("choose"):
            key_of = lambda sequence, step: jax.random.fold_in(
                jax.random.fold_in(jax.random.key(self.sampling.seed), sequence), step
            )
            keys = jax.vmap(key_of)(rows.sequences, rows.steps)
            tokens = choose(logits, self.sampling, keys, self.sharding.num_shards("vocab"))
            return Rows(tokens, rows.sequences, rows.steps + 1), log_probability(logits, tokens)

    def new_rows(self, batch: int, *, first_sequence: int = 0, step: int = 0) -> Rows:
        """Rows of consecutive sequences before the token of `step`."""
        sequences = np.arange(first_sequence, first_sequence + batch)
        numbers = np.zeros(batch), sequences, np.full(batch, step)
        return Rows(*(self.sharding.place(np.asarray(x, np.int32), "batch") for x in numbers))

    def _steps(self, tree: PrefixTree, max_new_tokens: int, first_step: int) -> Iterator[Step]:
        """One program call is on its way while the results of the one before are read, which hides the host's work.

        But not before the first token is read: a call with much to launch may hold the host until it is half done.
        """
        levels = self.lay_out(tree, max_new_tokens)
        programs = self.compile_programs(tree, levels)
        sequences, left = tuple(range(len(tree.remainders))), max_new_tokens
        since = time.perf_counter()
        calls = self._calls(programs, tree, levels, max_new_tokens, first_step)
        del levels
        pending, failure, is_first = next(calls), None, True
        while pending is not None:
            following = None
            try:
                following = None if is_first else next(calls, None)
            except Exception as error:  # what was made before it is not lost
                failure = error
            *made, logits = pending
            tokens, log_p = jax.device_get(made)
            now = time.perf_counter()
            for results in list(zip(tokens, log_p, logits, strict=True))[:left]:
                yield Step(*results, (now - since) / len(tokens), sequences)
            since, left = now, left - len(tokens)
            pending, is_first = next(calls, None) if is_first else following, False
        if failure is not None:
            raise failure

    def _calls(self, programs: Programs, tree: PrefixTree, levels, max_new_tokens: int, first_step: int):
        """Calls the programs one after another, and yields what the steps of each will have made, on the devices."""
        rows = self.new_rows(len(tree.remainders), step=first_step)
        inputs, lengths, caches = zip(*levels, strict=True)
        del levels
        rows, log_p, logits, caches = programs.prefill(self.parameters, inputs, lengths, rows, caches=caches)
        yield rows.tokens[None], log_p[None], (logits,)
        prefixes, cache = _prefixes(caches, tree.served[-1]), caches[-1]
        del caches, logits, log_p
        for _ in range(max_new_tokens - 1, 0, -self.tokens_per_dispatch):
            rows, *made, cache = programs.decode(self.parameters, rows, prefixes, cache=cache)
            yield made


def rooms(tree: PrefixTree, max_new_tokens: int) -> list[tuple[Sequence[Sequence[int]], int]]:
    """The texts of each level, and how many tokens may follow each of them: none follow a node."""
    return [*((texts, 0) for texts in tree.texts[:-1]), (tree.remainders, max_new_tokens)]


def _prefixes(caches: Sequence[KVCache], served) -> tuple[Prefix, ...]:
    """The levels above one, for it: `served` is that of its depth. Further caches are of that level and below."""
    return tuple(Prefix(cache=cache, sequences=sequences) for cache, sequences in zip(caches, served, strict=False))


def shardings_of(tree):
    """Those of the arrays of a tree, in its form."""
    return jax.tree.map(lambda array: array.sharding, tree)
