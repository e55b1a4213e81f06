"""What a generation holds and reads, in bytes, known before it runs."""

import dataclasses
from collections.abc import Sequence

from tree_attn.measure.memory import bytes_per_device, compiled_memory
from tree_attn.models.llama.generation.generator import Generator, check_request, rooms


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


def predict(
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    share_prefixes: bool | None = None,
) -> Memory:
    """What `Generator.stream` will hold on each device for these prompts; compiles its programs and runs nothing.

    Raises:
      ValueError, NotImplementedError: as `Generator.stream`.

    Example:
      >>> memory.predict(generator, [prompt], max_new_tokens=100).peak
    """
    check_request(generator.config, prompts, max_new_tokens)
    tree = generator.prefix_tree(prompts, share_prefixes)
    levels = generator.lay_out(tree, max_new_tokens)
    inputs = *((texts.tokens, texts.lengths) for texts in levels), generator.new_rows(len(prompts))
    needs = map(compiled_memory, generator.compile_programs(tree, levels))
    prefill, decode = (None if need is None else need.peak_bytes - need.argument_bytes for need in needs)
    return Memory(
        weights=bytes_per_device(generator.parameters),
        cache=bytes_per_device([texts.cache for texts in levels]),
        inputs=bytes_per_device(inputs),
        prefill=prefill,
        decode=decode,
    )


def cache_bytes(
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    share_prefixes: bool | None = None,
) -> int:
    """Keys and values that `Generator.stream` holds for these prompts, on all devices together, padding included."""
    tree = generator.prefix_tree(prompts, share_prefixes)
    slots = sum(len(texts) * generator.capacity(texts, room) for texts, room in rooms(tree, max_new_tokens))
    return slots * bytes_per_token(generator)


def bytes_per_token(generator: Generator) -> int:
    """Of keys and values, all layers; of the keys twice where they are kept by component too."""
    copies = 3 if generator.attention.cache_keeps.get("keeps_key_by_component") else 2
    return copies * generator.config.head_dim * _bytes_per_component(generator)


def bytes_read(generator: Generator, num_tokens: int) -> int:
    """Of keys and values, that a step reads of one sequence of so many tokens, on all devices together."""
    sparq, head_dim = generator.attention.sparq, generator.config.head_dim
    elements = 2 * num_tokens * head_dim
    if sparq is not None:
        elements = num_tokens * sparq.num_components + 2 * min(sparq.num_keys, num_tokens) * head_dim
    return elements * _bytes_per_component(generator)


def _bytes_per_component(generator: Generator) -> int:
    return generator.config.num_layers * generator.config.num_kv_heads * generator.cache_dtype.itemsize
