"""Decoding steps of a small Llama: products by the kernel beside XLA's, and beside float32, for gpu_check.py."""

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np
from oracle_case import is_same_everywhere

# Of the largest logit. Each way rounds to bfloat16 where it does, in two layers.
TOLERANCE = 0.03
# New tokens begin a KV tile, and CTAs share those of a sequence.
PROMPT, STEPS, CAPACITY = 766, 4, 1024
# Sequences, new tokens of each, and the model's window.
CASES = (
    (1, 1, None), (2, 1, None), (3, 1, None), (4, 1, None), (1, 3, None), (2, 1, 100), (8, 1, None), (16, 1, None),
    (1, 4, None), (3, 3, None),
)  # fmt: skip


def llama_checks(num_devices: int) -> Iterator[dict]:
    """Checks logits of some steps after a prompt; every way reads XLA's tokens, from a cache of its own writing."""
    import jax
    import jax.numpy as jnp

    from tree_attn import make_mesh
    from tree_attn.models.llama import LlamaConfig, spread_over

    # Of a chain's products gate and up have fewer CTAs than others, and steps go round the ring more than once.
    shape = LlamaConfig(
        num_layers=2, hidden_size=4096, intermediate_size=1792, num_heads=16, num_kv_heads=8, head_dim=64,
        vocab_size=4096, max_position=1024,
    )  # fmt: skip
    sharding = spread_over(shape, make_mesh({"seq": num_devices}))
    ways = ["mosaic_gpu", "mosaic_gpu_chain"]
    for batch, tokens, window in CASES:
        config = dataclasses.replace(shape, window=window)
        run = functools.partial(_logits, config, sharding, batch, tokens)
        by_xla, followed, _ = run("xla", jnp.bfloat16, None)
        with jax.default_matmul_precision("highest"):
            exact, *_ = run("xla", jnp.float32, followed)
        for name in ways:
            labels = dict(what="llama", how=name, implementation=name, batch=batch, num_queries=tokens)
            labels |= {} if window is None else {"window": window}
            try:
                found, _, calls = run(name, jnp.bfloat16, followed)
                again, *_ = run(name, jnp.bfloat16, followed)
            except NotImplementedError as error:
                yield labels | dict(passed=None, reason=str(error))
                continue
            largest = float(jnp.abs(exact).max())
            error, of_xla = (float(jnp.abs(x - exact).max()) / largest for x in (found, by_xla))
            same = bool(jnp.array_equal(found, again)) and is_same_everywhere(found)
            expected = _expected_calls(name, sharding, (batch, tokens, window), config.hidden_size)
            passed = error <= TOLERANCE and same and calls == expected  # not if it is NaN
            row = dict(max_relative_error=error, of_xla=of_xla, tolerance=TOLERANCE, same_bits=same, calls=calls)
            yield labels | row | dict(passed=bool(passed))


def _expected_calls(name: str, sharding, case: tuple, hidden_size: int) -> list[int]:
    """Returns how often a step of two layers calls products, those that end in a sum, and chains.

    Over devices a layer's two sums are ends, but for those of more numbers than devices exchange.
    """
    from tree_attn.kernels.few_rows_broadcast import MAX_ROWS
    from tree_attn.reduce.activations import exchanges

    (batch, tokens, window), is_alone = case, sharding.mesh.size == 1
    if not is_alone and not exchanges(batch * tokens * hidden_size, ("seq",), sharding.mesh):
        return [7, 0, 0]  # of each layer heads, output, gate and up, down; and the head
    if name == "mosaic_gpu_chain":
        # The head; over devices the first heads too, where attention is a launch of its own; a chain of each layer.
        is_whole = tokens == 1 and batch <= MAX_ROWS and window is None
        return [1 if is_alone or is_whole else 2, 0, 2]
    return [7, 0, 0] if is_alone else [5, 4, 0]


def _logits(config, sharding, batch: int, tokens: int, products: str, dtype, followed):
    """Returns the logits of all steps, float32, the tokens that they read, and how often a step calls the kernel.

    The tokens are `followed`, or its own greedy ones. Calls are of products, of those that end in a sum, and of chains.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from tree_attn.models.llama import Llama, by_name, parameters
    from tree_attn.models.llama.storage import empty_cache

    model = Llama(config, sharding, parameters.random(sharding, dtype), products=products, unroll_layers=True)
    structure, state = nnx.split(model)
    attention = by_name("single" if sharding.mesh.size == 1 else "tree", sharding)
    cache = empty_cache(config, sharding, batch=batch, capacity=CAPACITY, dtype=dtype, stacks_layers=False)
    rng = np.random.default_rng(0)
    prompts = jnp.asarray(rng.integers(0, config.vocab_size, (batch, PROMPT)), jnp.int32)
    lengths = jnp.asarray(PROMPT - np.arange(batch), jnp.int32)
    prefill = jax.jit(lambda state, cache: nnx.merge(structure, state).prefill(prompts, lengths, cache, attention))
    decode = jax.jit(
        lambda state, tokens, cache: nnx.merge(structure, state).decode(tokens, cache, attention),
        donate_argnums=2,
    )
    text = decode.lower(state, jnp.ones((batch, tokens), jnp.int32), cache).as_text()
    calls = [text.count(f"call @multiply_{name}") for name in ("few_rows", "and_sum", "chain")]
    logits, cache = prefill(state, cache)
    last, found, read = logits, [], []
    for step in range(STEPS):
        chosen = jnp.argmax(last, axis=-1).astype(jnp.int32)[:, None] if followed is None else followed[step]
        # Further tokens of a step are any: they are verified together.
        chosen = jnp.concatenate(
            [chosen[:, :1], *[chosen[:, :1] * 7 % config.vocab_size + i for i in range(1, tokens)]], 1
        )
        logits, cache = decode(state, chosen, cache)
        read.append(chosen)
        found.append(logits)
        last = logits[:, -1]
    return jnp.stack(found), read, calls
