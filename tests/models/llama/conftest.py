"""Fixtures of the Llama tests: meshes, tiny random models, and SmolLM2 itself."""

import functools

import jax
import jax.numpy as jnp
import pytest

from tree_attn.mesh import make_mesh
from tree_attn.models.llama import Llama, LlamaConfig, LlamaSharding, parameters, spread_over
from tree_attn.models.llama.checkpoint import hub
from tree_attn.models.llama.checkpoint import open as load
from tree_attn.models.llama.generation import memory


@pytest.fixture(scope="session")
def sharding_over():
    """`sharding_over(config, n)`: what the commands use on `n` devices."""

    def make(config: LlamaConfig, num_devices: int) -> LlamaSharding:
        return spread_over(config, make_mesh({"seq": num_devices}, jax.devices()[:num_devices]))

    return make


@pytest.fixture(scope="session")
def tiny_config() -> LlamaConfig:
    return LlamaConfig(
        num_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=64,
        max_position=128,
    )


@pytest.fixture(scope="session")
def tiny_model(tiny_config, sharding_over):
    """`tiny_model(n)`: the same random float32 Llama on any number of devices."""

    @functools.cache
    def make(num_devices: int) -> Llama:
        sharding = sharding_over(tiny_config, num_devices)
        return Llama(tiny_config, sharding, parameters.random(sharding, jnp.float32))

    return make


@pytest.fixture(scope="session")
def cache_bytes():
    """`cache_bytes(generator, prompts, n)`: keys and values of a generation, padding included, on all devices."""

    def count(generator, prompts, max_new_tokens: int, share_prefixes: bool | None = None) -> int:
        levels = generator.layout.levels(generator.prefix_tree(prompts, share_prefixes), max_new_tokens)
        return sum(len(level.texts) * level.capacity for level in levels) * memory.bytes_per_token(generator)

    return count


@pytest.fixture(scope="session")
def smollm2_path():
    """The GGUF file of SmolLM2; the first test run of a machine downloads it."""
    return hub.resolve(hub.SMOLLM2)


@pytest.fixture(scope="session")
def smollm2(smollm2_path):
    """The opened checkpoint of SmolLM2."""
    return load.open_checkpoint(smollm2_path)
