"""Cases of `tree-attn bench` that a model has no positions for, or that no memory here holds."""

import argparse
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from tree_attn.commands import phases, session, units
from tree_attn.commands.units import size
from tree_attn.measure.memory import device_memory_bytes
from tree_attn.models.llama import LlamaConfig
from tree_attn.models.llama.checkpoint.open import num_parameters
from tree_attn.models.llama.generation.memory import Memory


class NoRoom(ValueError):
    """A compiled case needs more memory than a device has."""


def check(args: argparse.Namespace, config: LlamaConfig, place: session.Place, contexts: Sequence[int]) -> None:
    """Says that a context goes beyond a model's positions, where weights are random; else refuses it.

    A published number of positions is that of the training, and times do not depend on it.

    Raises:
      ValueError: `--model` has too few positions; or weights, keys and values are more than all memory of the devices.
    """
    context, extra = max(contexts), args.problem_tokens + args.new_tokens
    if context + extra > config.max_position:
        if args.model is not None:
            raise ValueError(
                f"--context must be at most {config.max_position - extra} for {args.model}, which has "
                f"{config.max_position} positions for it and {extra} more tokens, got {context}"
            )
        phases.say(
            f"{args.config} was trained on {config.max_position:,} positions: {context:,} tokens are timed all the "
            "same, since times do not depend on it, but no such model would write sense there"
        )
    _check_memory(args, config, place, context)


def check_compiled(predicted: Memory, title: str, place: session.Place) -> None:
    """Refuses a case before it runs: XLA would try for minutes to allocate what there is not.

    Args:
      predicted: of the case's programs; a run takes this much, or a little more.
      title: of the case, as "32,768 tokens x 64".
      place: of the model.

    Raises:
      NoRoom: a device has less memory.
    """
    available = _bytes_of_a_device(place)
    if predicted.peak is not None and predicted.peak > available:
        raise NoRoom(
            f"{title} needs {size(predicted.peak)} on each device, which can hold {size(available)}: take fewer "
            "--samples, a shorter --context, a --prefill-chunk, a --cache-dtype or more --devices"
        )


def _bytes_of_a_device(place: session.Place) -> int:
    return device_memory_bytes(sum(device.process_index == jax.process_index() for device in place.devices))


def _check_memory(args: argparse.Namespace, config: LlamaConfig, place: session.Place, context: int) -> None:
    count = len(place.devices)
    weights = num_parameters(config) * jnp.dtype(place.dtype).itemsize * (count if args.replicate_weights else 1)
    itemsize = jnp.dtype(args.cache_dtype or place.dtype).itemsize
    tokens = sum(min(context, config.window_of(layer) or context) for layer in range(config.num_layers))
    cache = 2 * tokens * config.num_kv_heads * config.head_dim * itemsize
    memory = count * _bytes_of_a_device(place)
    if weights + cache > memory:
        raise ValueError(
            f"--context {context} needs {size(weights)} for weights and {size(cache)} for keys and values, and "
            f"{units.count(count, 'device')} can hold {size(memory)}: take a shorter one, a smaller --config or "
            "more devices"
        )
