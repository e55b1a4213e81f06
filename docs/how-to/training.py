"""Training a small Llama on a mesh of data and sequence, by ring and by Ulysses: `python3 docs/how-to/training.py`."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tree_attn import PromptLayout, attend, make_mesh
from tree_attn.devices import ensure_devices
from tree_attn.ring_baseline import ring_attention, ulysses_attention

BATCH, TOKENS, STEPS, LEARNING_RATE = 4, 96, 20, 0.3
VOCABULARY, LAYERS, WIDTH, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 64, 2, 32, 64, 4, 2, 8


@dataclasses.dataclass(frozen=True)
class Strategy:
    """One way to attend: the function, the mesh's sizes, the axes of the sequence, and the order of its tokens."""

    function: Callable
    sizes: dict[str, int]
    sequence: tuple[str, ...]
    block_size: int | str | None

    @property
    def layout(self) -> PromptLayout:
        shards = int(np.prod([self.sizes[axis] for axis in self.sequence]))
        return PromptLayout(num_tokens=TOKENS, num_shards=shards, block_size=self.block_size)

    def attention(self, mesh):
        where = dict(axis_name=self.sequence, batch_axis_name="data", mesh=mesh, block_size=self.block_size)
        return functools.partial(self.function, **where)


def on_one_device(query, key, value, **_):
    return attend(query, key, value, is_causal=True).out


FLAT, SPLIT = {"seq": 4, "data": 2}, {"device": 2, "node": 2, "data": 2}  # eight devices, the fastest links first
STRATEGIES = {
    "one device": Strategy(on_one_device, {"seq": 1, "data": 1}, ("seq",), None),
    "ring, contiguous": Strategy(ring_attention, FLAT, ("seq",), None),
    "ring, striped": Strategy(ring_attention, FLAT, ("seq",), 1),
    "ring, zigzag": Strategy(ring_attention, FLAT, ("seq",), "zigzag"),
    "ring, joint": Strategy(functools.partial(ring_attention, rotation="joint"), FLAT, ("seq",), 1),
    "ring, two ways": Strategy(functools.partial(ring_attention, rotation="two_way"), FLAT, ("seq",), 1),
    "ulysses": Strategy(ulysses_attention, FLAT, ("seq",), None),
    "ulysses inside, ring outside": Strategy(ulysses_attention, SPLIT, ("device", "node"), 1),
}


class Block(nnx.Module):
    """A layer of a Llama: attention with grouped heads and rotary positions, and a gated network."""

    def __init__(self, attention: Callable, rngs: nnx.Rngs):
        linear = functools.partial(nnx.LinearGeneral, use_bias=False, rngs=rngs)
        self.attention = attention
        self.before, self.between = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
        self.query = linear(WIDTH, (HEADS, HEAD_DIM))
        self.key, self.value = linear(WIDTH, (KV_HEADS, HEAD_DIM)), linear(WIDTH, (KV_HEADS, HEAD_DIM))
        self.out = linear((HEADS, HEAD_DIM), WIDTH, axis=(-2, -1))
        self.gate, self.up, self.down = linear(WIDTH, HIDDEN), linear(WIDTH, HIDDEN), linear(HIDDEN, WIDTH)

    def __call__(self, x, positions):
        y = self.before(x)
        query, key = rotated(self.query(y), positions), rotated(self.key(y), positions)
        x = x + self.out(self.attention(query, key, self.value(y)))
        y = self.between(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Model(nnx.Module):
    """Tokens `[B, S]`, at these positions, to logits `[B, S, vocabulary]`."""

    def __init__(self, attention: Callable, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(attention, rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens, positions):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = nnx.remat(Block.__call__)(block, x, positions)  # jax.checkpoint: keeps a layer's input alone
        return self.embedding.attend(self.norm(x))


def rotated(x, positions):
    """Returns `x [B, S, N, H]` turned by its positions `[S]`: those of the stored order, whichever it is."""
    frequencies = 1e4 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = jnp.outer(positions.astype(np.float32), frequencies.astype(np.float32))[None, :, None, :]
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [left * jnp.cos(angles) - right * jnp.sin(angles), right * jnp.cos(angles) + left * jnp.sin(angles)], axis=-1
    )


def text():
    """Returns tokens `[B, S + 1]` in which each half is the same: a model that attends can learn the second one."""
    half = np.random.default_rng(0).integers(VOCABULARY, size=(BATCH, TOKENS // 2 + 1), dtype=np.int32)
    return np.concatenate([half, half], axis=1)[:, : TOKENS + 1]


def train(strategy: Strategy, num_steps: int = STEPS) -> list[float]:
    """Returns the loss of each step."""
    mesh, layout = make_mesh(strategy.sizes, ensure_devices(8)), strategy.layout
    tokens = text()
    # Inputs and targets are shifted before they are stored: neighbours in a text may lie on two devices.
    stored = [layout.store(x) for x in (tokens[:, :-1], tokens[:, 1:])]
    stored = jax.device_put(stored, NamedSharding(mesh, P("data", strategy.sequence)))
    structure, parameters = nnx.split(Model(strategy.attention(mesh), nnx.Rngs(0)))
    optimizer = optax.sgd(LEARNING_RATE, momentum=0.9)
    parameters = jax.device_put(parameters, NamedSharding(mesh, P()))
    state = optimizer.init(parameters)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(parameters, state, tokens, targets):
        def loss(parameters):
            logits = nnx.merge(structure, parameters)(tokens, layout.positions)
            return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

        value, gradients = jax.value_and_grad(loss)(parameters)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(parameters, updates), state, value

    losses = []
    for _ in range(num_steps):
        parameters, state, value = step(parameters, state, *stored)
        losses.append(float(value))
    return losses


if __name__ == "__main__":
    for name, strategy in STRATEGIES.items():
        losses = train(strategy)
        print(f"{name}: loss {losses[0]:.6f}, after {len(losses)} steps {losses[-1]:.6f}")
