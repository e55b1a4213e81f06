"""A generator: prompts are laid out and prefilled, then one compiled step makes each new token."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import UnionType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import DTypeLike

from tree_attn.arguments import check_integer
from tree_attn.models.llama.attention import Attention
from tree_attn.models.llama.attention_choice import (
    NO_WINDOWED_PREFIXES,
    check_model_options,
    check_prefill_chunk,
    check_sharing,
)
from tree_attn.models.llama.generation.inputs import Inputs, LevelInputs
from tree_attn.models.llama.generation.layout import Layout
from tree_attn.models.llama.generation.prefix_tree import PrefixTree, share, unshared
from tree_attn.models.llama.generation.programs import Programs, StreamPrograms, XlaOptions, prefixes_of
from tree_attn.models.llama.generation.request import check_request
from tree_attn.models.llama.generation.sampling import Sampling
from tree_attn.models.llama.model import Llama

# Each call takes the host time. docs/log/llama.md: "Eight tokens a call relieve the host on four GPUs", "A call of one
# token takes 0.01 to 0.5 ms less where copies begin with it and the cache is a list".
TOKENS_PER_DISPATCH_ON_GPUS = 8


class Step(NamedTuple):
    """One new token of each batch slot.

    tokens:             int32 `[B]`
    log_probabilities:  float32 `[B]`, of these tokens, see `sampling.next_tokens`
    logits:             float32 `[B, V]`, from which they were chosen
    seconds:            time since the step before was known; steps of one dispatch have equal shares of its time
    sequences:          `[B]`, the sequence of each token; None for a slot without one
    """

    tokens: np.ndarray
    log_probabilities: np.ndarray
    logits: jax.Array
    seconds: float
    sequences: Sequence[int | None]


class Generator:
    """Generates with one model and one attention. Programs are compiled once per shape and kept.

    Args:
      model: the cache follows its sharding.
      attention: from `attention.by_name`, made with the same sharding.
      sampling: how tokens are chosen; default greedy.
      tokens_per_dispatch: steps of one call of the decoding program, so that the host waits less often. Steps beyond a
        stop token are wasted. Default: 8 on GPUs, else 1.
      cache_dtype: of stored keys and values: the model's, by default, float8_e4m3fn, or int8 with a scale per layer and
        head. Prefill attends in the model's dtype, but to chunks and shared prefixes as they are stored.
      cache_scales: of an int8 cache; default: `int8_scales.cache_scales` of the model, measured on first use.
      prefill_chunk: tokens that prefill reads at a time, a multiple of the shards; see `Llama.prefill`. Default: all.
      xla_options: XLA options of the decoding programs, in addition to those of `Programs.xla_options`.

    Raises:
      ValueError: `tokens_per_dispatch` is not a positive integer, `prefill_chunk` no multiple of the shards, or
        `cache_dtype` none of the three; `cache_scales` for another dtype than int8; or SparQ has more components than
        there are; or `xla_options` would run kernels at once that must run in order (JAX 0.12, GPUs).
      NotImplementedError: `prefill_chunk` with `ring`, whose chunks would need earlier keys; int8 with `sparq`; a
        model with a window, with `sparq` or `prefill_chunk`.

    Attributes:
      layout, inputs, programs: the parts of which `stream` is made; `stream_queue` and `memory` use them too.

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
        xla_options: XlaOptions | None = None,
    ):
        _check_parts(model=(model, Llama), attention=(attention, Attention), sampling=(sampling, Sampling | None))
        if tokens_per_dispatch is None:
            tokens_per_dispatch = TOKENS_PER_DISPATCH_ON_GPUS if model.sharding.is_on_gpus else 1
        check_integer("tokens_per_dispatch", tokens_per_dispatch, minimum=1)
        check_prefill_chunk(attention.name, prefill_chunk, attention.num_shards)
        check_model_options(attention.name, model.config, prefill_chunk)
        if attention.sparq is not None:
            attention.sparq.check_head_dim(model.config.head_dim)
        self.config, self.sharding, self.attention = model.config, model.sharding, attention
        self.tokens_per_dispatch = tokens_per_dispatch
        self.layout = Layout(
            num_shards=attention.num_shards, slot_multiple=attention.slot_multiple, prefill_chunk=prefill_chunk
        )
        self.inputs = Inputs(model, attention, self.layout, cache_dtype=cache_dtype, cache_scales=cache_scales)
        self.programs = Programs(
            model,
            attention,
            Sampling() if sampling is None else sampling,
            self.layout,
            tokens_per_dispatch=tokens_per_dispatch,
            xla_options=xla_options,
        )

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        first_step: int = 0,
        share_prefixes: bool | None = None,
    ) -> Iterator[Step]:
        """Yields `max_new_tokens` steps for a batch of prompts, which may differ in length.

        To resume an interrupted generation, give the prompts with their new tokens and, as `first_step`, the number of
        those (see `resume`): step `i` of sequence `b` draws with the key of the seed, `b` and `first_step + i`.

        Common beginnings of prompts are by default computed, stored and read once where that pays; see `prefix_tree`.

        Raises:
          ValueError: before anything is compiled: no prompt, an empty one, a token that the vocabulary lacks, or more
            tokens than the model has positions.
          NotImplementedError: as `prefix_tree`.
        """
        check_request(self.config, prompts, max_new_tokens)
        check_integer("first_step", first_step, minimum=0)
        return self._steps(self.prefix_tree(prompts, share_prefixes), max_new_tokens, first_step)

    def resume(self, prompts: Sequence[Sequence[int]], new_ids: Sequence[Sequence[int]]) -> tuple[list[list[int]], int]:
        """Returns the prompts and the `first_step` with which `stream` continues after `new_ids`.

        These are prompts with their new tokens where decoding attends as prefill does. SparQ's keys and values of new
        tokens differ from a prefill's: it starts anew, and its first steps make `new_ids` once more.
        """
        if self.attention.sparq is not None:
            return [list(prompt) for prompt in prompts], 0
        first_step = len(new_ids[0]) if new_ids else 0
        return [[*prompt, *ids] for prompt, ids in zip(prompts, new_ids, strict=True)], first_step

    def compile(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, share_prefixes: bool | None = None
    ) -> StreamPrograms:
        """Compiles and returns the programs that `stream` runs on these prompts; it allocates no cache."""
        return self.lower(prompts, max_new_tokens, share_prefixes=share_prefixes)()

    def lower(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, share_prefixes: bool | None = None
    ) -> Callable[[], StreamPrograms]:
        """Traces the programs that `compile` returns; what it returns compiles them, in any thread.

        Raises:
          ValueError, NotImplementedError: as `stream`.

        Example:
          >>> from concurrent.futures import ThreadPoolExecutor
          >>> lowered = [generator.lower([prompt] * batch, 10) for batch in (1, 3)]
          >>> with ThreadPoolExecutor() as threads:
          ...     of_one, of_three = threads.map(lambda compile_programs: compile_programs(), lowered)
        """
        check_request(self.config, prompts, max_new_tokens)
        tree = self.prefix_tree(prompts, share_prefixes)
        levels = self.inputs.shapes_of_levels(tree, max_new_tokens)
        return self.programs.lower(tree, levels, self.inputs.batch_slots(len(prompts)))

    def prefix_tree(self, prompts: Sequence[Sequence[int]], share_prefixes: bool | None = None) -> PrefixTree:
        """Returns the common beginnings of these prompts that `stream` shares.

        Args:
          share_prefixes: None: nodes that save `MIN_SHARED_KEYS` keys each, unless caches would be larger for the
            padding of nodes to one length. True: whatever is common. False: nothing.

        Raises:
          ValueError: `share_prefixes` is none of these.
          NotImplementedError: `share_prefixes=True` with `ring`, or where the batch is cut over devices.
        """
        check_sharing(self.attention.name, share_prefixes)
        is_cut = self.sharding.num_shards("batch") > 1
        if share_prefixes and is_cut:
            raise NotImplementedError(f"{share_prefixes=}: the batch is cut over {self.sharding.batch!r}")
        if share_prefixes and self.config.window is not None:
            raise NotImplementedError(f"{share_prefixes=}: {NO_WINDOWED_PREFIXES}")
        alone = unshared(prompts)
        cannot_share = is_cut or self.config.window is not None or not self.attention.shares_prefixes
        if share_prefixes is False or cannot_share:
            return alone
        if share_prefixes:
            return share(prompts, min_shared=1)
        tree = share(prompts)
        return tree if tree.num_slots < alone.num_slots else alone

    def _steps(self, tree: PrefixTree, max_new_tokens: int, first_step: int) -> Iterator[Step]:
        """Yields steps. One program call runs while the host reads the results of the call before.

        The first token is read before more is launched: a call with much to launch may hold the host until it is half
        done.
        """
        levels = self.inputs.levels(tree, max_new_tokens)
        slots = self.inputs.batch_slots(len(tree.remainders), step=first_step)
        programs = self.programs.of_tree(tree, levels, slots)
        sequences, num_missing = tuple(range(len(tree.remainders))), max_new_tokens
        since = time.perf_counter()
        calls = self._calls(programs, tree, levels, slots, max_new_tokens)
        del levels, slots
        pending, failure, is_first = next(calls), None, True
        while pending is not None:
            following = None
            try:
                following = None if is_first else next(calls, None)
            except Exception as error:  # the results of the call before are not lost
                failure = error
            *results, logits = pending
            tokens, log_p = jax.device_get(results)
            now = time.perf_counter()
            for of_step in list(zip(tokens, log_p, logits, strict=True))[:num_missing]:
                yield Step(*of_step, (now - since) / len(tokens), sequences)
            since, num_missing = now, num_missing - len(tokens)
            pending, is_first = next(calls, None) if is_first else following, False
        if failure is not None:
            raise failure

    def _calls(
        self, programs: StreamPrograms, tree: PrefixTree, levels: Sequence[LevelInputs], slots, max_new_tokens: int
    ) -> Iterator[Sequence]:
        """Calls the programs one after another, and yields the results of each call's steps, on the way to the host."""
        parameters = self.programs.parameters
        tokens, lengths, caches = zip(*levels, strict=True)
        del levels
        slots, log_p, logits, caches = programs.prefill(parameters, tokens, lengths, slots, caches=caches)
        yield slots.tokens[None], log_p[None], (logits,)
        prefixes, arrays = prefixes_of(caches, tree.descendants[-1]), jax.tree.leaves(caches[-1])
        del caches, logits, log_p
        for _ in range(max_new_tokens - 1, 0, -self.tokens_per_dispatch):
            slots, chosen, log_p, logits, arrays = programs.decode(parameters, slots, prefixes, arrays=arrays)
            # Else these copies begin only when the host waits for them, and it waits longer.
            chosen.copy_to_host_async()
            log_p.copy_to_host_async()
            yield chosen, log_p, logits


def _check_parts(**parts: tuple[Any, Any]) -> None:
    """Raises TypeError unless each part, by its name, is an instance of the type beside it."""
    for name, (part, kind) in parts.items():
        if not isinstance(part, kind):
            raise TypeError(f"{name} must be {kind if isinstance(kind, UnionType) else kind.__name__}, got {part!r}")
