"""A batch over two groups of four devices, each sequence over a group: `python3 docs/how-to/data_and_sequence.py`."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tree_attn import KVCache, make_mesh, tree_decode
from tree_attn.devices import ensure_devices

BATCH, KEYS, HEADS, KV_HEADS, HEAD_DIM = 4, 256, 4, 2, 16


def draw(seed, tokens, heads):
    return jax.random.normal(jax.random.key(seed), (BATCH, tokens, heads, HEAD_DIM))


def arrays_of_your_own(mesh):
    """Returns query, key, value and attention, for keys that are sharded over both axes of the mesh."""
    by_data, by_both = NamedSharding(mesh, P("data")), NamedSharding(mesh, P("data", "seq"))
    query = jax.device_put(draw(0, 1, HEADS), by_data)
    key, value = (jax.device_put(draw(seed, KEYS, KV_HEADS), by_both) for seed in (1, 2))
    attention = functools.partial(tree_decode, axis_name="seq", batch_axis_name="data", mesh=mesh)
    return query, key, value, jax.jit(attention)(query, key, value)


@functools.partial(jax.jit, donate_argnums=0)
def decode(cache, query, key, value):
    cache = cache.append(key, value)
    return cache, cache.attend(query)  # the cache knows both axes


def a_cache(mesh):
    """Returns queries, keys and values of two steps, the attention of the last one, and the cache."""
    cache = KVCache.create(
        batch=BATCH, capacity=64, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=jnp.float32, mesh=mesh,
        axis_name="seq", batch_axis_name="data",
    )  # fmt: skip
    steps = [(draw(i, 1, HEADS), draw(i + 1, 1, KV_HEADS), draw(i + 2, 1, KV_HEADS)) for i in (3, 6)]
    for step in steps:
        cache, out = decode(cache, *step)
    query, key, value = (jnp.concatenate(tokens, axis=1) for tokens in zip(*steps))
    return query, key, value, out, cache


def main():
    """Returns what both ways give; nothing is sent over the axis "data" in either."""
    mesh = make_mesh({"seq": 4, "data": 2}, ensure_devices(8))
    return arrays_of_your_own(mesh), a_cache(mesh)


if __name__ == "__main__":
    (*_, out), (*_, cache) = main()
    print("attention:", out.shape, "over", dict(out.sharding.mesh.shape))
    print("keys of the cache:", cache.arrays.key.sharding.spec)
