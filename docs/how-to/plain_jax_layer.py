"""An attention layer in plain JAX that decodes over eight devices: `python3 docs/how-to/plain_jax_layer.py`."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from tree_attn import KVCache, make_mesh, tree_decode
from tree_attn.devices import ensure_devices
from tree_attn.ring_baseline import ring_prefill

BATCH, PROMPT, STEPS, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 2, 100, 4, 32, 4, 2, 16


def init(key):
    """Returns the layer's weights."""
    shapes = {
        "query": (WIDTH, HEADS, HEAD_DIM),
        "key": (WIDTH, KV_HEADS, HEAD_DIM),
        "value": (WIDTH, KV_HEADS, HEAD_DIM),
    }
    shapes["out"] = HEADS, HEAD_DIM, WIDTH
    keys = jax.random.split(key, len(shapes))
    return {name: jax.random.normal(k, shape) / 8 for (name, shape), k in zip(shapes.items(), keys)}


def project(weights, x):
    """Returns queries, keys and values of `x [B, T, width]`, each `[B, T, heads, head_dim]`."""
    return [jnp.einsum("btd,dnh->btnh", x, weights[name]) for name in ("query", "key", "value")]


@functools.partial(jax.jit, donate_argnames="cache")  # the new cache takes the memory of the old one
def prefill(weights, cache, x):
    """Attends within the prompt, and puts its keys and values into the cache."""
    cache, out = ring_prefill(cache, *project(weights, x))
    return cache, jnp.einsum("btnh,nhd->btd", out, weights["out"])


@functools.partial(jax.jit, donate_argnames="cache")
def decode(weights, cache, x):
    """Attends from one new token to all before it and to itself."""
    query, key, value = project(weights, x)
    cache = cache.append(key, value)
    out = tree_decode(query, **cache.operands())  # keys, values, lengths, mesh and placement come from the cache
    return cache, jnp.einsum("btnh,nhd->btd", out, weights["out"])


def main():
    """Returns the weights, the inputs and the outputs of a prompt and some steps, each output the next input."""
    mesh = make_mesh({"seq": 8}, ensure_devices(8))  # eight GPUs, or eight emulated devices of the CPU
    cache = KVCache.create(
        batch=BATCH, capacity=PROMPT + STEPS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=jnp.float32,
        axis_name="seq", mesh=mesh,
    )  # fmt: skip
    everywhere = NamedSharding(mesh, PartitionSpec())
    weights = jax.device_put(init(jax.random.key(0)), everywhere)  # once, not at every step
    x = jax.device_put(jax.random.normal(jax.random.key(1), (BATCH, PROMPT, WIDTH)), everywhere)
    cache, out = prefill(weights, cache, x)
    inputs, outputs = [x], [out]
    for _ in range(STEPS):
        cache.check_room(1)  # raises before a token is lost
        inputs.append(outputs[-1][:, -1:])
        cache, out = decode(weights, cache, inputs[-1])
        outputs.append(out)
    return weights, jnp.concatenate(inputs, axis=1), jnp.concatenate(outputs, axis=1), cache


if __name__ == "__main__":
    print("tokens in the cache:", main()[-1].lengths)
