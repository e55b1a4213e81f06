"""The compiled programs of a generation: prefill of a prefix tree, and steps of decoding."""

import concurrent.futures
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from tree_attn.devices import is_rocm
from tree_attn.models.llama.attention import Attention
from tree_attn.models.llama.generation.inputs import LevelInputs
from tree_attn.models.llama.generation.layout import BatchSlots, Layout
from tree_attn.models.llama.generation.prefix_tree import Descendants, PrefixTree
from tree_attn.models.llama.generation.sampling import Sampling, next_tokens
from tree_attn.models.llama.layer_caches import AnyCache
from tree_attn.models.llama.model import Llama, unrolls_steps
from tree_attn.models.llama.prefix import Prefix

# Limits in sequences, measured on an H200. docs/log/llama.md: "Weights stored as one are multiplied faster, and cuBLAS
# beats Triton above 16 sequences", "Independent kernels side by side gain up to 5 % below 256 sequences".
MAX_BATCH_FOR_TRITON_PRODUCTS = 16
MAX_BATCH_FOR_CONCURRENT_KERNELS = 128
UNROLLED_STEPS = 8  # of a loop's turn, where steps are unrolled

XlaOptions = Mapping[str, bool | int | str]


class StreamPrograms(NamedTuple):
    """The two compiled programs of a generation; `as_text()` and `memory_analysis()` describe them.

    `decode` is `(parameters, slots, prefixes, arrays=) -> (slots, tokens, log_p, logits, arrays)`. Its arrays are
    those of the cache, as `jax.tree.leaves` has them, and are donated. A call with the cache itself takes longer.
    """

    prefill: jax.stages.Compiled
    decode: jax.stages.Compiled


class Programs:
    """Compiles the programs of one model and one attention, once for each shape.

    Args:
      model: gives the structure and the parameters.
      attention: from `attention.by_name`, made with the model's sharding.
      sampling: how tokens are chosen.
      layout: gives the chunks in which prefill reads.
      tokens_per_dispatch: steps of one call of the decoding program.
      xla_options: XLA options of decoding programs, in addition to those of `xla_options`.

    Attributes:
      parameters: the first argument of each program.
    """

    def __init__(
        self,
        model: Llama,
        attention: Attention,
        sampling: Sampling,
        layout: Layout,
        *,
        tokens_per_dispatch: int,
        xla_options: XlaOptions | None = None,
    ):
        self.sharding, self.tokens_per_dispatch = model.sharding, tokens_per_dispatch
        self._attention, self._sampling, self._layout = attention, sampling, layout
        self._user_xla_options = dict(xla_options or {})
        if self._is_on_nvidia:
            _check_order(self._user_xla_options)
        self._structure, state = nnx.split(model)
        # Programs are called with a list: flax's own containers take 0.6 ms of the host at each call of an 8B model.
        self.parameters, self._containers = jax.tree.flatten(state)
        self._compiled: dict[tuple, StreamPrograms | jax.stages.Compiled] = {}

    def once(self, shape: tuple, compile_programs: Callable[[], Any]) -> Any:
        """Returns the programs of this shape; calls `compile_programs` for them the first time only."""
        if shape not in self._compiled:
            self._compiled[shape] = compile_programs()
        return self._compiled[shape]

    def of_tree(self, tree: PrefixTree, levels: tuple[LevelInputs, ...], slots: BatchSlots) -> StreamPrograms:
        """Returns the programs for a tree whose inputs have the shapes of these levels."""
        return self.lower(tree, levels, slots)()

    def lower(
        self, tree: PrefixTree, levels: tuple[LevelInputs, ...], slots: BatchSlots
    ) -> Callable[[], StreamPrograms]:
        """Traces the programs of `of_tree`; what it returns compiles them, in any thread, the first time only."""
        shape = (tree.descendants, *((level.tokens.shape, form_of(level.cache)) for level in levels))
        if shape in self._compiled:
            return lambda: self._compiled[shape]
        *_, caches = zip(*levels, strict=True)
        prefixes = prefixes_of(caches, tree.descendants[-1])
        calls = self._lower_prefill(tree, levels, slots), self._lower_decode(slots, prefixes, caches[-1])
        return lambda: self.once(shape, lambda: StreamPrograms(*_at_once(calls)))

    def compile_decode(self, slots: BatchSlots, prefixes: tuple[Prefix, ...], cache: AnyCache) -> jax.stages.Compiled:
        """Compiles the program of `tokens_per_dispatch` steps, as `StreamPrograms.decode` is."""
        return self._lower_decode(slots, prefixes, cache)()

    def _lower_decode(
        self, slots: BatchSlots, prefixes: tuple[Prefix, ...], cache: AnyCache
    ) -> Callable[[], jax.stages.Compiled]:
        named = self.sharding.named
        arrays, containers = jax.tree.flatten(cache)
        decode = jax.jit(
            functools.partial(self._decode, containers),
            donate_argnames="arrays",
            out_shardings=(
                named("batch"),
                named(None, "batch"),
                named(None, "batch"),
                named("batch", "vocab"),
                shardings_of(arrays),
            ),
        )
        lowered = decode.lower(self.parameters, slots, prefixes, arrays=arrays)
        return functools.partial(lowered.compile, compiler_options=self.xla_options(slots.tokens.shape[0]))

    def xla_options(self, batch: int) -> dict[str, bool | int | str]:
        """Returns XLA's options for a decoding program of `batch` sequences.

        For large batches cuBLAS reads kernels faster than Triton, which XLA would still choose for some of them.
        For small ones, kernels that do not depend on one another run concurrently: writes of keys and values, and
        attention to each sequence's own keys beside attention to shared ones. This holds on one device only: XLA does
        not see that kernels which exchange with other devices wait for one another. Nor does it hold with JAX 0.12,
        which records our kernels in CUDA graphs too: those that count arrivals share their counts, and must run in
        order (`kernels/arrivals.py`). All were measured on NVIDIA GPUs; other devices have XLA's defaults.
        """
        from tree_attn.kernels.launch_order import KERNELS_ARE_RECORDED, ORDER_OPTION

        options: dict[str, bool | int | str] = {}
        if self._is_on_nvidia:
            # Else the product with the head is made twice where its result is also put into an array.
            options["xla_gpu_enable_dynamic_slice_fusion"] = False
            if batch > MAX_BATCH_FOR_TRITON_PRODUCTS:
                options["xla_gpu_enable_triton_gemm"] = False
            are_recorded = jax.__version_info__ >= KERNELS_ARE_RECORDED
            if batch <= MAX_BATCH_FOR_CONCURRENT_KERNELS and self.sharding.mesh.size == 1 and not are_recorded:
                options[ORDER_OPTION] = "CONCURRENT"
        return options | self._user_xla_options

    @property
    def _is_on_nvidia(self) -> bool:
        return self.sharding.is_on_gpus and not is_rocm(self.sharding.mesh.devices.flat[0])

    def model_of(self, parameters) -> Llama:
        """Returns the model within a program, from the program's argument `parameters`."""
        return nnx.merge(self._structure, jax.tree.unflatten(self._containers, parameters))

    def read(self, model: Llama, tokens, lengths, cache, prefixes: Sequence[Prefix] = ()) -> tuple[jax.Array, AnyCache]:
        """Prefills within a program, in chunks if there is more than one: logits and the filled cache."""
        chunk = self._layout.chunk_of(tokens.shape[1])
        return model.prefill(tokens, lengths, cache, self._attention, prefixes=prefixes, chunk=chunk)

    def next_slots(self, logits: jax.Array, slots: BatchSlots) -> tuple[BatchSlots, jax.Array]:
        """Chooses the next token of each slot: the slots after it, and the tokens' log-probabilities."""
        with jax.named_scope("choose"):
            key_of = lambda sequence, step: jax.random.fold_in(
                jax.random.fold_in(jax.random.key(self._sampling.seed), sequence), step
            )
            keys = jax.vmap(key_of)(slots.sequences, slots.steps)
            tokens, log_p = next_tokens(logits, self._sampling, keys, self.sharding.num_shards("vocab"))
            return BatchSlots(tokens, slots.sequences, slots.steps + 1), log_p

    def _lower_prefill(
        self, tree: PrefixTree, levels: tuple[LevelInputs, ...], slots: BatchSlots
    ) -> Callable[[], jax.stages.Compiled]:
        tokens, lengths, caches = zip(*levels, strict=True)
        named = self.sharding.named
        prefill = jax.jit(
            functools.partial(self._prefill, tree.descendants),
            donate_argnames="caches",
            out_shardings=(named("batch"), named("batch"), named("batch", "vocab"), shardings_of(caches)),
        )
        return prefill.lower(self.parameters, tokens, lengths, slots, caches=caches).compile

    def _prefill(self, descendants: tuple[Descendants, ...], parameters, tokens, lengths, slots, *, caches):
        """Reads level by level, each over those above it: a node's keys depend on all tokens before it."""
        model = self.model_of(parameters)
        filled = ()
        for depth, level in enumerate(zip(tokens, lengths, caches, strict=True)):
            logits, cache = self.read(model, *level, prefixes=prefixes_of(filled, descendants[depth]))
            filled = (*filled, cache)
        return *self.next_slots(logits, slots), logits, filled

    def _decode(self, containers, parameters, slots, prefixes, *, arrays):
        """Runs `tokens_per_dispatch` steps: the slots after the last, the results of all, and the cache's arrays.

        Where a step is few launches, a turn of the loop has up to eight steps: one CUDA graph. What depends on lengths
        alone, such as the rotation and the attention's schedule, is made for all of them at first.
        """
        model, cache = self.model_of(parameters), jax.tree.unflatten(containers, arrays)

        def step(carry, _):
            slots, cache = carry
            logits, cache = model.decode(slots.tokens[:, None], cache, self._attention, prefixes=prefixes)
            slots, log_p = self.next_slots(logits[:, 0], slots)
            return (slots, cache), (slots.tokens, log_p, logits[:, 0])

        count, is_straight = self.tokens_per_dispatch, unrolls_steps(model, cache, self._attention, prefixes=prefixes)
        together = min(count, UNROLLED_STEPS) if is_straight else 1
        unroll = True if count == 1 else together  # True: there is no loop
        (slots, cache), results = jax.lax.scan(step, (slots, cache), length=count, unroll=unroll)
        tokens, log_p, logits = results
        return slots, tokens, log_p, tuple(logits), jax.tree.leaves(cache)


def decode_with(decode: jax.stages.Compiled, *arguments, cache: AnyCache) -> tuple:
    """Returns what a decoding program does, with the cache in the place of its arrays; the one passed is donated."""
    arrays, containers = jax.tree.flatten(cache)
    *results, arrays = decode(*arguments, arrays=arrays)
    return *results, jax.tree.unflatten(containers, arrays)


def prefixes_of(caches: Sequence[AnyCache], descendants: Descendants) -> tuple[Prefix, ...]:
    """Returns the prefix levels above one depth of a tree.

    Args:
      caches: of each level, from the root's; those from that depth on are ignored.
      descendants: `tree.descendants[depth]`.
    """
    return tuple(Prefix(cache=cache, sequences=nodes) for cache, nodes in zip(caches, descendants, strict=False))


def form_of(tree) -> tuple:
    """Returns what two trees of arrays have in common for which one program is compiled."""
    return jax.tree.structure(tree), *(array.shape for array in jax.tree.leaves(tree))


def shardings_of(tree):
    """Returns a tree of the same form that holds each array's sharding."""
    return jax.tree.map(lambda array: array.sharding, tree)


def _at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Returns the results of calls that compile, each in a thread; XLA lets one of them at a time use the GPU.

    In a run of several processes they are made in order: there XLA exchanges what it measures while it compiles.
    """
    if jax.process_count() > 1:
        return [call() for call in calls]
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(lambda call: call(), calls))


def _check_order(xla_options: XlaOptions) -> None:
    """Raises ValueError where kernels that must run in order would run at once: see `Programs.xla_options`."""
    from tree_attn.kernels.launch_order import KERNELS_ARE_RECORDED, MODES_IN_ORDER, ORDER_OPTION

    mode = xla_options.get(ORDER_OPTION, MODES_IN_ORDER[0])
    if mode not in MODES_IN_ORDER and jax.__version_info__ >= KERNELS_ARE_RECORDED:
        raise ValueError(
            f"xla_options must have {ORDER_OPTION} as one of {', '.join(MODES_IN_ORDER)} with JAX {jax.__version__}, "
            f"got {mode!r}: kernels that merge in their launch must run in order"
        )
