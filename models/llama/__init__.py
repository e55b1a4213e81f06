"""Llama 2, 3, 3.1, 3.2 and SmolLM2 in Flax NNX, decoding over a KV cache that is sharded along the sequence."""

from tree_attn.models.llama.attention import ATTENTIONS, Attention, by_name
from tree_attn.models.llama.config import Llama3RopeScaling, LlamaConfig, from_huggingface
from tree_attn.models.llama.generation.generate import Generation, generate, rank_samples
from tree_attn.models.llama.generation.generator import Generator
from tree_attn.models.llama.generation.memory import Memory
from tree_attn.models.llama.generation.queue import stream_queue
from tree_attn.models.llama.generation.sampling import Sampling
from tree_attn.models.llama.model import Llama
from tree_attn.models.llama.presets import PRESETS, preset
from tree_attn.models.llama.sharding import LlamaSharding, spread_over

__all__ = [
    "ATTENTIONS",
    "PRESETS",
    "Attention",
    "Generation",
    "Generator",
    "Llama",
    "Llama3RopeScaling",
    "LlamaConfig",
    "LlamaSharding",
    "Memory",
    "Sampling",
    "by_name",
    "from_huggingface",
    "generate",
    "preset",
    "rank_samples",
    "spread_over",
    "stream_queue",
]
