"""The roofline of a token by hand: prompts, continuations, and the products with weights and of attention."""

import dataclasses

import pytest

from tree_attn.commands.bench.roofline import roofline_ms
from tree_attn.models.llama import LlamaConfig

CONFIG = LlamaConfig(
    num_layers=2, max_position=32, hidden_size=16, intermediate_size=32, num_heads=4, num_kv_heads=2, head_dim=8,
    vocab_size=64,
)  # fmt: skip
ROW = dict(
    weights_bytes_per_device=10**9, cache_bytes_per_device=10**8, batch=1, context=1000, new_tokens=40, n_devices=1,
    dtype="bfloat16",
)  # fmt: skip
KEY_VALUE = 2 * 2 * 2 * 8 * 2  # bytes of a token: K and V, layers, heads, head dim, bfloat16


def test_bytes_are_the_weights_the_prompts_and_half_the_continuations():
    num_bytes = 1.1e9 + 20 * KEY_VALUE
    assert roofline_ms(ROW, CONFIG, "NVIDIA H200") == pytest.approx(num_bytes / 4.8e12 * 1e3)
    halves = ROW | dict(n_devices=2, cache_dtype="float8_e4m3fn")
    assert roofline_ms(halves, CONFIG, "NVIDIA H200") == pytest.approx((1.1e9 + 20 * KEY_VALUE / 4) / 4.8e12 * 1e3)
    assert roofline_ms(ROW, CONFIG, "cpu") is None


def test_products_are_those_with_weights_and_of_attention_of_all_sequences():
    many = ROW | dict(batch=10**6, problem_tokens=500)
    per_sequence = 2 * 10**9 / 2 + 2 * 4 * 4 * 8 * (1500 + 20)  # layers; heads; head dim; tokens seen
    assert roofline_ms(many, CONFIG, "NVIDIA H200") == pytest.approx(10**6 * per_sequence / 989.5e12 * 1e3)
    window = dataclasses.replace(CONFIG, window=100)
    per_sequence = 2 * 10**9 / 2 + 2 * 4 * 4 * 8 * 100
    assert roofline_ms(many, window, "NVIDIA H200") == pytest.approx(10**6 * per_sequence / 989.5e12 * 1e3)


def test_sparq_reads_components_of_every_key_and_few_keys_whole():
    sparse = ROW | dict(batch=10**6, sparq={"num_components": 4, "num_keys": 64}, weights_bytes_per_device=1)
    per_sequence = 1 + 2 * 4 * (2 * 4 * 1020 + 4 * 8 * 64)
    num_bytes = 1 + 1e8 + 10**6 * 20 * KEY_VALUE / 2 / 8 * 4
    expected = max(10**6 * per_sequence / 989.5e12, num_bytes / 4.8e12) * 1e3
    assert roofline_ms(sparse, CONFIG, "NVIDIA H200") == pytest.approx(expected)
