"""An attention layer in Flax NNX that decodes over eight devices: `python3 docs/how-to/nnx_layer.py`."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from tree_attn import KVCache, make_mesh
from tree_attn.devices import ensure_devices
from tree_attn.ring_baseline import ring_prefill

BATCH, PROMPT, STEPS, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 2, 100, 4, 32, 4, 2, 16


class Attention(nnx.Module):
    """Attention with grouped heads. The weights are the module's; the cache is an argument and a result."""

    def __init__(self, rngs: nnx.Rngs):
        self.query = nnx.LinearGeneral(WIDTH, (HEADS, HEAD_DIM), use_bias=False, rngs=rngs)
        self.key = nnx.LinearGeneral(WIDTH, (KV_HEADS, HEAD_DIM), use_bias=False, rngs=rngs)
        self.value = nnx.LinearGeneral(WIDTH, (KV_HEADS, HEAD_DIM), use_bias=False, rngs=rngs)
        self.out = nnx.LinearGeneral((HEADS, HEAD_DIM), WIDTH, axis=(-2, -1), use_bias=False, rngs=rngs)

    def prefill(self, cache: KVCache, x: jax.Array) -> tuple[KVCache, jax.Array]:
        """Attends within the prompt `[B, S, width]`, and puts its keys and values into the cache."""
        cache, out = ring_prefill(cache, self.query(x), self.key(x), self.value(x))
        return cache, self.out(out)

    def __call__(self, cache: KVCache, x: jax.Array) -> tuple[KVCache, jax.Array]:
        """Attends from one new token `[B, 1, width]` to all before it and to itself."""
        cache = cache.append(self.key(x), self.value(x))
        return cache, self.out(cache.attend(self.query(x)))  # by tree_decode; attention=ring_decode is the baseline


prefill = nnx.jit(Attention.prefill)
decode = nnx.jit(Attention.__call__, donate_argnames="cache")  # the new cache takes the memory of the old one


def main():
    """Returns the layer, the inputs and the outputs of a prompt and some steps, each output the next input."""
    mesh = make_mesh({"seq": 8}, ensure_devices(8))  # eight GPUs, or eight emulated devices of the CPU
    cache = KVCache.create(
        batch=BATCH, capacity=PROMPT + STEPS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=jnp.float32,
        axis_name="seq", mesh=mesh,
    )  # fmt: skip
    everywhere = NamedSharding(mesh, PartitionSpec())
    layer = Attention(nnx.Rngs(0))
    nnx.update(layer, jax.device_put(nnx.state(layer), everywhere))  # the weights, once, not at every step
    x = jax.device_put(jax.random.normal(jax.random.key(1), (BATCH, PROMPT, WIDTH)), everywhere)
    cache, out = prefill(layer, cache, x)
    inputs, outputs = [x], [out]
    for _ in range(STEPS):
        cache.check_room(1)  # raises before a token is lost
        inputs.append(outputs[-1][:, -1:])
        cache, out = decode(layer, cache, inputs[-1])
        outputs.append(out)
    return layer, jnp.concatenate(inputs, axis=1), jnp.concatenate(outputs, axis=1), cache


if __name__ == "__main__":
    print("tokens in the cache:", main()[-1].lengths)
