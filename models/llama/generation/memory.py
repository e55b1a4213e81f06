"""Memory and reads of a generation, in bytes, known before it runs."""

import dataclasses
from collections.abc import Sequence

from tree_attn.measure.memory import bytes_per_device, compiled_memory
from tree_attn.models.llama.generation.generator import Generator
from tree_attn.models.llama.generation.request import check_request


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes that a generation holds on each device, known before it runs.

    Attributes:
      weights, cache, inputs: of the model, of all caches, and of the other inputs; exact, from shapes and shardings.
      prefill, decode: additional bytes of that program: its temporaries, and results that do not replace an argument.
        XLA's own figures; None where the backend does not say.
    """

    weights: int
    cache: int
    inputs: int
    prefill: int | None
    decode: int | None

    @property
    def arguments(self) -> int:
        """Bytes of the programs' arguments, allocated from beginning to end."""
        return self.weights + self.cache + self.inputs

    @property
    def peak(self) -> int | None:
        """The largest sum at any time: `arguments`, and the additional bytes of the larger program."""
        return None if self.prefill is None or self.decode is None else self.arguments + max(self.prefill, self.decode)


def predict(
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    share_prefixes: bool | None = None,
) -> Memory:
    """Predicts what `Generator.stream` holds on each device for these prompts; compiles its programs, runs nothing.

    Raises:
      ValueError, NotImplementedError: as `Generator.stream`.

    Example:
      >>> memory.predict(generator, [prompt], max_new_tokens=100).peak
    """
    check_request(generator.config, prompts, max_new_tokens)
    tree = generator.prefix_tree(prompts, share_prefixes)
    levels = generator.inputs.shapes_of_levels(tree, max_new_tokens)
    slots = generator.inputs.batch_slots(len(prompts))
    needs = map(compiled_memory, generator.programs.of_tree(tree, levels, slots))
    prefill, decode = (None if need is None else need.peak_bytes - need.argument_bytes for need in needs)
    return Memory(
        weights=bytes_per_device(generator.programs.parameters),
        cache=bytes_per_device([level.cache for level in levels]),
        inputs=bytes_per_device([[(level.tokens, level.lengths) for level in levels], slots]),
        prefill=prefill,
        decode=decode,
    )


def bytes_per_token(generator: Generator) -> int:
    """Returns the bytes of a token's keys and values, all layers; keys count twice if also stored by component."""
    copies = 3 if generator.attention.cache_options.get("keeps_key_by_component") else 2
    return copies * generator.config.head_dim * _bytes_per_component(generator)


def bytes_kept(generator: Generator, num_tokens: int) -> int:
    """Returns the bytes of keys and values of a sequence of `num_tokens`: of layers with a window those in it."""
    config, window = generator.config, generator.layout.window_slots(generator.config.window)
    keeps_all = lambda layer: window is None or config.window_of(layer) is None
    counts = (num_tokens if keeps_all(layer) else min(num_tokens, window) for layer in range(config.num_layers))
    return sum(counts) * bytes_per_token(generator) // config.num_layers


def bytes_read(generator: Generator, num_tokens: int) -> int:
    """Returns the bytes of keys and values that a step reads of one sequence of `num_tokens`, over all devices."""
    sparq, head_dim = generator.attention.sparq, generator.config.head_dim
    if sparq is None:
        return bytes_kept(generator, num_tokens)
    elements = num_tokens * sparq.num_components + 2 * min(sparq.num_keys, num_tokens) * head_dim
    return elements * _bytes_per_component(generator)


def _bytes_per_component(generator: Generator) -> int:
    return generator.config.num_layers * generator.config.num_kv_heads * generator.inputs.cache_dtype.itemsize
