"""The published sizes of Llama, SmolLM2, Qwen, Mistral and Gemma by name."""

import dataclasses
import functools

from tree_attn.arguments import one_of
from tree_attn.models.llama.config import Llama3RopeScaling, LlamaConfig


def _llama_2(num_layers: int, hidden_size: int, intermediate_size: int, num_heads: int, num_kv_heads: int):
    return LlamaConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        vocab_size=32000,
        max_position=4096,
    )


_llama_3 = functools.partial(
    LlamaConfig,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_position=8192,
    rope_theta=500000.0,
    bos_token_id=128000,
    eos_token_ids=(128001, 128009),
)

_llama_3_1 = functools.partial(
    _llama_3,
    max_position=131072,
    rope_scaling=Llama3RopeScaling(factor=8.0),
    eos_token_ids=(128001, 128008, 128009),
)

_llama_3_2 = functools.partial(_llama_3_1, rope_scaling=Llama3RopeScaling(factor=32.0), tie_embeddings=True)

_smollm2 = functools.partial(
    LlamaConfig,
    head_dim=64,
    vocab_size=49152,
    max_position=8192,
    rope_theta=100000.0,
    tie_embeddings=True,
)

_qwen2_5 = functools.partial(
    LlamaConfig,
    head_dim=128,
    vocab_size=152064,
    max_position=32768,
    rope_theta=1000000.0,
    rms_norm_eps=1e-6,
    bos_token_id=151643,
    eos_token_ids=(151643, 151645),
    query_key_value_bias=True,
)

_qwen3 = functools.partial(
    _qwen2_5,
    num_kv_heads=8,
    vocab_size=151936,
    max_position=40960,
    query_key_value_bias=False,
    query_key_norm=True,
)

_mistral_7b = functools.partial(
    LlamaConfig,
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position=32768,
)


def _gemma_2(
    num_layers: int, query_pre_attn_scalar: float = 256.0, max_position: int = 8192, **sizes: int
) -> LlamaConfig:
    return LlamaConfig(
        num_layers=num_layers,
        vocab_size=256000,
        max_position=max_position,
        rms_norm_eps=1e-6,
        tie_embeddings=True,
        bos_token_id=2,
        eos_token_ids=(1, 107),
        window=4096,
        global_layers=tuple(range(1, num_layers, 2)),
        activation="gelu_tanh",
        norms_add_one=True,
        post_norms=True,
        scales_embedding=True,
        attention_scale=query_pre_attn_scalar**-0.5,
        attention_soft_cap=50.0,
        logit_soft_cap=30.0,
        **sizes,
    )


def _gemma_3(
    num_layers: int, query_pre_attn_scalar: float = 256.0, *, window: int = 512, max_position: int = 32768, **sizes: int
) -> LlamaConfig:
    return dataclasses.replace(
        _gemma_2(num_layers, query_pre_attn_scalar, max_position=max_position, **sizes),
        vocab_size=262144,
        eos_token_ids=(1, 106),
        window=window,
        global_layers=tuple(range(5, num_layers, 6)),
        attention_soft_cap=None,
        logit_soft_cap=None,
        query_key_norm=True,
        rope_theta=1000000.0,
        local_rope_theta=10000.0,
    )


def _large_gemma_3(num_layers: int, query_pre_attn_scalar: float = 256.0, **sizes: int) -> LlamaConfig:
    """Returns the text part of a model that reads images too."""
    small = _gemma_3(num_layers, query_pre_attn_scalar, window=1024, max_position=131072, **sizes)
    return dataclasses.replace(small, vocab_size=262208, rope_linear_factor=8.0)


_8B = dict(num_layers=32, hidden_size=4096, intermediate_size=14336, num_heads=32)
_70B = dict(num_layers=80, hidden_size=8192, intermediate_size=28672, num_heads=64)

#: Configurations by the names of published models; `preset` gives one.
PRESETS: dict[str, LlamaConfig] = {
    "llama-2-7b": _llama_2(32, 4096, 11008, 32, 32),
    "llama-2-13b": _llama_2(40, 5120, 13824, 40, 40),
    "llama-2-70b": _llama_2(80, 8192, 28672, 64, 8),
    "llama-3-8b": _llama_3(**_8B),
    "llama-3-70b": _llama_3(**_70B),
    "llama-3.1-8b": _llama_3_1(**_8B),
    "llama-3.1-70b": _llama_3_1(**_70B),
    "llama-3.1-405b": _llama_3_1(num_layers=126, hidden_size=16384, intermediate_size=53248, num_heads=128),
    "llama-3.2-1b": _llama_3_2(num_layers=16, hidden_size=2048, intermediate_size=8192, num_heads=32, head_dim=64),
    "llama-3.2-3b": _llama_3_2(num_layers=28, hidden_size=3072, intermediate_size=8192, num_heads=24),
    "smollm2-135m": _smollm2(num_layers=30, hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3),
    "smollm2-360m": _smollm2(num_layers=32, hidden_size=960, intermediate_size=2560, num_heads=15, num_kv_heads=5),
    "smollm2-1.7b": _smollm2(
        num_layers=24, hidden_size=2048, intermediate_size=8192, num_heads=32, num_kv_heads=32, rope_theta=130000.0
    ),
    "qwen2.5-0.5b": _qwen2_5(
        num_layers=24,
        hidden_size=896,
        intermediate_size=4864,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        vocab_size=151936,
        tie_embeddings=True,
    ),
    "qwen2.5-1.5b": _qwen2_5(
        num_layers=28,
        hidden_size=1536,
        intermediate_size=8960,
        num_heads=12,
        num_kv_heads=2,
        vocab_size=151936,
        tie_embeddings=True,
    ),
    "qwen2.5-7b": _qwen2_5(num_layers=28, hidden_size=3584, intermediate_size=18944, num_heads=28, num_kv_heads=4),
    "qwen2.5-72b": _qwen2_5(num_layers=80, hidden_size=8192, intermediate_size=29568, num_heads=64, num_kv_heads=8),
    "qwen3-0.6b": _qwen3(num_layers=28, hidden_size=1024, intermediate_size=3072, num_heads=16, tie_embeddings=True),
    "qwen3-8b": _qwen3(num_layers=36, hidden_size=4096, intermediate_size=12288, num_heads=32),
    "qwen3-32b": _qwen3(num_layers=64, hidden_size=5120, intermediate_size=25600, num_heads=64),
    "mistral-7b-v0.1": _mistral_7b(vocab_size=32000, window=4096),
    "mistral-7b-v0.3": _mistral_7b(vocab_size=32768, rope_theta=1000000.0),
    "gemma-2-2b": _gemma_2(26, hidden_size=2304, intermediate_size=9216, num_heads=8, num_kv_heads=4, head_dim=256),
    "gemma-2-9b": _gemma_2(42, hidden_size=3584, intermediate_size=14336, num_heads=16, num_kv_heads=8, head_dim=256),
    "gemma-2-27b": _gemma_2(
        46, 144.0, hidden_size=4608, intermediate_size=36864, num_heads=32, num_kv_heads=16, head_dim=128
    ),
    "gemma-3-270m": _gemma_3(18, hidden_size=640, intermediate_size=2048, num_heads=4, num_kv_heads=1, head_dim=256),
    "gemma-3-1b": _gemma_3(26, hidden_size=1152, intermediate_size=6912, num_heads=4, num_kv_heads=1, head_dim=256),
    "gemma-3-4b": _large_gemma_3(
        34, hidden_size=2560, intermediate_size=10240, num_heads=8, num_kv_heads=4, head_dim=256
    ),
    "gemma-3-12b": _large_gemma_3(
        48, hidden_size=3840, intermediate_size=15360, num_heads=16, num_kv_heads=8, head_dim=256
    ),
    "gemma-3-27b": _large_gemma_3(
        62, 168.0, hidden_size=5376, intermediate_size=21504, num_heads=32, num_kv_heads=16, head_dim=128
    ),
}


def preset(name: str) -> LlamaConfig:
    """Returns the configuration of a published model.

    Raises:
      ValueError: no such name; the message lists them.

    Example:
      >>> preset("llama-3.1-8b").num_kv_heads
      8
    """
    one_of("name", name, tuple(PRESETS))
    return PRESETS[name]
