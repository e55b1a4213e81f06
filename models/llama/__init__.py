"""Llama 2, 3, 3.1, 3.2 and SmolLM2 in Flax NNX, decoding over a KV cache that is sharded along the sequence."""

from models.llama.attention import ATTENTIONS, Attention, by_name
from models.llama.config import Llama3RopeScaling, LlamaConfig, from_huggingface
from models.llama.continuous_batching import stream_queue
from models.llama.generate import Generation, generate, rank_samples
from models.llama.generator import Generator
from models.llama.memory import Memory
from models.llama.model import Llama
from models.llama.presets import PRESETS, preset
from models.llama.sampling import Sampling
from models.llama.sharding import LlamaSharding, spread_over

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
