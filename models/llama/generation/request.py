"""Requests for a generation, checked before anything is compiled."""

from collections.abc import Collection, Sequence

import numpy as np

from tree_attn.arguments import check_integer, is_integer
from tree_attn.models.llama.config import LlamaConfig


def check_request(config: LlamaConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Raises ValueError or TypeError for what `Generator.stream` refuses; needs only the configuration."""
    check_tokens("prompts", prompts)
    if not len(prompts) or not all(len(prompt) for prompt in prompts):
        raise ValueError(f"prompts must be one or more, of one or more tokens each, got {[len(p) for p in prompts]}")
    if not is_integer(max_new_tokens) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be 1 or more, got {max_new_tokens!r}")
    longest = max(len(prompt) for prompt in prompts)
    if longest >= config.max_position:
        raise ValueError(
            f"prompts must leave room for a new token: the model has {config.max_position} positions, "
            f"got {longest} tokens"
        )
    if longest + max_new_tokens > config.max_position:
        raise ValueError(
            f"max_new_tokens must be at most {config.max_position - longest} with a prompt of {longest} tokens, "
            f"got {max_new_tokens}; the model has {config.max_position} positions"
        )
    check_ids("prompts", prompts, config.vocab_size)


def check_tokens(name: str, texts: Sequence[Sequence[int]]) -> None:
    """Raises TypeError unless `texts` is a sequence of sequences of integers; arrays of integers serve too."""
    for text in texts if _is_sequence(texts) else (texts,):
        if not _is_sequence(text) or not all(map(_is_token_type, set(map(type, text)))):
            raise TypeError(f"{name} must be sequences of integers, the token ids of each text, got {text!r}")


def check_ids(name: str, texts: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Raises ValueError unless all tokens of texts that are not empty are in the vocabulary."""
    for text in texts:
        if not 0 <= min(text) <= max(text) < vocab_size:
            raise ValueError(f"{name}: token ids must be in [0, {vocab_size}), got {min(text)} to {max(text)}")


def check_stop_ids(stop_ids: Collection[int]) -> None:
    """Raises TypeError unless `stop_ids` is a collection of integers."""
    is_collection = isinstance(stop_ids, Collection) and not isinstance(stop_ids, str | bytes)
    if not is_collection or not all(map(_is_token_type, set(map(type, stop_ids)))):
        raise TypeError(f"stop_ids must be a collection of integers, got {stop_ids!r}")


def check_max_batch(max_batch: int) -> None:
    """Raises ValueError unless `max_batch` is a positive integer."""
    check_integer("max_batch", max_batch, minimum=1)


def _is_sequence(x) -> bool:
    is_array = isinstance(x, np.ndarray) and x.ndim > 0
    return is_array or (isinstance(x, Sequence) and not isinstance(x, str | bytes))


def _is_token_type(kind: type) -> bool:
    return issubclass(kind, int | np.integer) and kind is not bool
