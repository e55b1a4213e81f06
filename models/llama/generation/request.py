"""Requests for a generation, checked before anything is compiled."""

from collections.abc import Sequence

from tree_attn.arguments import check_integer
from tree_attn.models.llama.config import LlamaConfig


def check_request(config: LlamaConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Raises ValueError for prompts or limits that `Generator.stream` refuses; needs only the configuration."""
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise ValueError(f"prompts must be one or more, of one or more tokens each, got {[len(p) for p in prompts]}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be 1 or more, got {max_new_tokens}")
    longest = max(len(prompt) for prompt in prompts)
    if longest + max_new_tokens > config.max_position:
        raise ValueError(
            f"max_new_tokens must be at most {config.max_position - longest} with a prompt of {longest} tokens, "
            f"got {max_new_tokens}; the model has {config.max_position} positions"
        )
    for prompt in prompts:
        if not 0 <= min(prompt) <= max(prompt) < config.vocab_size:
            raise ValueError(
                f"prompts: token ids must be in [0, {config.vocab_size}), got {min(prompt)} to {max(prompt)}"
            )


def check_max_batch(max_batch: int) -> None:
    """Raises ValueError unless `max_batch` is a positive integer."""
    check_integer("max_batch", max_batch, minimum=1)
