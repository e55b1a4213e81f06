"""Memory of compiled programs."""

import jax
import jax.numpy as jnp

from tree_attn.measure.memory import compiled_memory, runtime_peak_memory_bytes


def test_compiled_memory_counts_arguments_outputs_and_temporaries():
    compiled = jax.jit(lambda x: jnp.dot(jnp.dot(x, x), x)).lower(jnp.ones((64, 64))).compile()
    memory = compiled_memory(compiled)
    assert memory.argument_bytes == 64 * 64 * 4
    assert memory.output_bytes == 64 * 64 * 4
    assert memory.temp_bytes >= 64 * 64 * 4
    assert memory.peak_bytes == memory.argument_bytes + memory.output_bytes + memory.temp_bytes


def test_donated_memory_counts_once():
    compiled = jax.jit(lambda x: x + 1, donate_argnums=0).lower(jnp.ones(1024)).compile()
    memory = compiled_memory(compiled)
    assert memory.alias_bytes == 4096
    assert memory.peak_bytes == 4096 + memory.temp_bytes


def test_runtime_memory_is_unknown_on_cpu():
    assert runtime_peak_memory_bytes(jax.devices("cpu")) is None
