"""Llama, SmolLM2, Qwen, Mistral and Gemma in Flax NNX, decoding over a KV cache that is sharded along the sequence.

Each public name is imported on first use, as in `tree_attn`.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tree_attn.models.llama.attention import Attention as Attention
    from tree_attn.models.llama.attention import by_name as by_name
    from tree_attn.models.llama.attention_choice import ATTENTIONS as ATTENTIONS
    from tree_attn.models.llama.config import Llama3RopeScaling as Llama3RopeScaling
    from tree_attn.models.llama.config import LlamaConfig as LlamaConfig
    from tree_attn.models.llama.families import FAMILIES as FAMILIES
    from tree_attn.models.llama.families import from_huggingface as from_huggingface
    from tree_attn.models.llama.generation.conversation import Conversation as Conversation
    from tree_attn.models.llama.generation.generate import Generation as Generation
    from tree_attn.models.llama.generation.generate import generate as generate
    from tree_attn.models.llama.generation.generate import rank_samples as rank_samples
    from tree_attn.models.llama.generation.generator import Generator as Generator
    from tree_attn.models.llama.generation.memory import Memory as Memory
    from tree_attn.models.llama.generation.queue import stream_queue as stream_queue
    from tree_attn.models.llama.generation.sampling import Sampling as Sampling
    from tree_attn.models.llama.model import Llama as Llama
    from tree_attn.models.llama.presets import PRESETS as PRESETS
    from tree_attn.models.llama.presets import preset as preset
    from tree_attn.models.llama.sharding import LlamaSharding as LlamaSharding
    from tree_attn.models.llama.sharding import spread_over as spread_over

_MODULE_OF = {
    "ATTENTIONS": "attention_choice",
    "PRESETS": "presets",
    "FAMILIES": "families",
    "Attention": "attention",
    "Conversation": "generation.conversation",
    "Generation": "generation.generate",
    "Generator": "generation.generator",
    "Llama": "model",
    "Llama3RopeScaling": "config",
    "LlamaConfig": "config",
    "LlamaSharding": "sharding",
    "Memory": "generation.memory",
    "Sampling": "generation.sampling",
    "by_name": "attention",
    "from_huggingface": "families",
    "generate": "generation.generate",
    "preset": "presets",
    "rank_samples": "generation.generate",
    "spread_over": "sharding",
    "stream_queue": "generation.queue",
}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str):
    """Imports the module that defines `name`, on first use (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tree_attn.models.llama' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"tree_attn.models.llama.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
