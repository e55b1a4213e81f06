"""Times a layer of a Llama in one launch on a Hopper GPU, in a chain of layers, and checks one beside float32.

    python3 scripts/bench_layer.py --config llama-3.2-1b --contexts 1024,8192 --out FILE

Weights are random. Eight layers have their own, more than the GPU's cache holds. A call of the program runs them four
times, and calls follow one another without a wait. So a layer's time has its launch, and a 32nd of the small kernels
that a step has once. The limit is reading weights and cache at the datasheet's 4.8 TB/s. The file gets a row for each
context. It exits with 1 if a result is not near enough.
"""

import argparse
import functools
import math
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from benching import origin

from tree_attn.kernels.few_rows_chain_call import NewHeads, Norm, WholeLayer
from tree_attn.measure import rows
from tree_attn.measure.steps.step import READ_GB_PER_S
from tree_attn.models.llama.config import LlamaConfig
from tree_attn.models.llama.presets import preset

LAYERS, REPEATS, CALLS, TRIALS = 8, 4, 40, 5
TOLERANCE = 0.02  # of the largest result: queries, states and results are rounded on the way
EPS = 1e-5


def main() -> int:
    """Runs from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="llama-3.2-1b", help="a preset")
    parser.add_argument("--contexts", default="1024", help="tokens in the cache, e.g. 1024,8192")
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--out", type=pathlib.Path, help="JSONL file, appended to")
    args = parser.parse_args()
    found = [measured(args.config, int(context), args.sequences) for context in args.contexts.split(",")]
    writer = None if args.out is None else rows.MeasuredRows(args.out)
    for row in found:
        print(
            f"{row['config']}, {row['context']:,} x {row['batch']}: {row['layer_us_median']:.1f} us a layer", flush=True
        )
        if writer is not None:
            writer.append(row | origin())
    return int(not all(row["passed"] for row in found))


def measured(name: str, context: int, batch: int) -> dict:
    """Returns a row: a layer's time and limit, and how far a result is from float32."""
    config = preset(name)
    layers = [drawn(config, context, batch, seed) for seed in range(LAYERS)]
    lengths = jnp.full(batch, context, jnp.int32) - jnp.arange(batch)
    x = jax.random.normal(jax.random.key(LAYERS), (batch, 1, config.hidden_size), jnp.bfloat16)
    run = functools.partial(layer_of, config)
    error, same = compared(run, functools.partial(exact_of, config), x, layers[0], lengths)

    @functools.partial(jax.jit, donate_argnums=2)
    def steps(x, weights, caches):
        for _ in range(REPEATS):
            for i, of_layer in enumerate(weights):
                x, *caches[i] = run(x, of_layer, caches[i], lengths)
            x = (0.1 * x).astype(x.dtype)
        return x, caches

    weights, caches = [of for of, _ in layers], [cache for _, cache in layers]
    x, caches = jax.block_until_ready(steps(x, weights, caches))
    times = []
    for _ in range(TRIALS):
        start = time.perf_counter()
        for _ in range(CALLS):
            x, caches = steps(x, weights, caches)
        x.block_until_ready()
        times.append((time.perf_counter() - start) / (CALLS * REPEATS * LAYERS) * 1e6)
    read = sum(array.nbytes for array in weights[0].values())
    read += 2 * batch * context * config.num_kv_heads * config.head_dim * x.dtype.itemsize
    return {
        "config": name, "context": context, "batch": batch, "layer_us_median": statistics.median(times),
        "layer_us_min": min(times), "limit_us": read / READ_GB_PER_S / 1e3,
        "max_relative_error": error if math.isfinite(error) else None,
        "same_bits": same, "tolerance": TOLERANCE, "passed": same and error <= TOLERANCE,
    }  # fmt: skip


def compared(run, exact, x, layer, lengths) -> tuple[float, bool]:
    """Returns the largest error beside float32, and whether three runs agree to the bit.

    Compared are results and caches. In an empty cache the new token is all that attention sees. What lies beyond the
    lengths is NaN, but for float32.
    """
    errors, are_same = [], []
    weights, cache = layer
    for before in (lengths, jnp.zeros_like(lengths)):
        with jax.default_matmul_precision("highest"):
            wanted = jax.jit(exact)(x, weights, cache, before)
        is_beyond = (jnp.arange(cache[0].shape[1])[None] > before[:, None])[:, :, None, None]
        spoilt = [jnp.where(is_beyond, jnp.nan, array).astype(array.dtype) for array in cache]
        found = []
        for _ in range(3):
            result, *caches = (array.astype(jnp.float32) for array in jax.jit(run)(x, weights, spoilt, before))
            found.append((result, *(jnp.where(is_beyond, 0, array) for array in caches)))
        wanted = wanted[0], *(jnp.where(is_beyond, 0, array) for array in wanted[1:])
        errors += [float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in zip(found[0], wanted, strict=True)]
        are_same += [bool(jnp.array_equal(a, b)) for again in found for a, b in zip(found[0], again, strict=True)]
    return float(np.max(errors)), all(are_same)  # which is NaN if one is


def drawn(config: LlamaConfig, context: int, batch: int, seed: int) -> tuple[dict, list]:
    """Returns the weights of a layer by name, and its keys and values, with room for a few tokens more."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    shapes = {
        "attention_norm": (hidden,), "heads": (config.num_kv_heads, config.group_size + 2, head_dim, hidden),
        "output": (hidden, config.num_heads, head_dim), "mlp_norm": (hidden,), "gate_up": (2, inner, hidden),
        "down": (hidden, inner),
    }  # fmt: skip
    fan_in = {"heads": hidden, "output": config.num_heads * head_dim, "gate_up": hidden, "down": inner}
    stored = (batch, -(-(context + 64) // 128) * 128, config.num_kv_heads, head_dim)
    keys = iter(jax.random.split(jax.random.key(seed), len(shapes) + 2))
    draw = lambda shape, size: (size * jax.random.normal(next(keys), shape)).astype(jnp.bfloat16)
    weights = {name: draw(shape, fan_in.get(name, 1) ** -0.5) for name, shape in shapes.items()}
    return weights, [draw(stored, 1.0) for _ in range(2)]


def layer_of(config: LlamaConfig, x, weights: dict, cache, lengths):
    """Returns a layer's result by the kernel, and its keys and values."""
    cosine = jnp.full((x.shape[0], 1, 1, config.head_dim // 2), 0.6, jnp.float32)
    norm = lambda name: Norm(scale=weights[name], eps=EPS)
    heads = NewHeads(
        norm=norm("attention_norm"), weights=weights["heads"], key=cache[0], value=cache[1], slots=lengths[:, None],
        cosine_sine=(cosine, jnp.full_like(cosine, 0.8)),
    )  # fmt: skip
    return WholeLayer(
        x=x, heads=heads, spans=(jnp.zeros((1, 1), jnp.int32), lengths[:, None] + 1), scale=config.head_dim**-0.5,
        output=weights["output"], gate_up=weights["gate_up"], down=weights["down"], norm=norm("mlp_norm"),
        activation="silu",
    ).run()  # fmt: skip


def exact_of(config: LlamaConfig, x, weights: dict, cache, lengths):
    """Returns a layer's result, and its keys and values, in float32, unrounded."""
    x, weights, (key, value) = jax.tree.map(lambda array: array.astype(jnp.float32), (x, weights, cache))
    norm = lambda x, scale: x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPS) * scale[None, None]
    heads = jnp.einsum("btd,kghd->btkgh", norm(x, weights["attention_norm"]), weights["heads"])

    def rotated(x):
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([0.6 * first - 0.8 * second, 0.6 * second + 0.8 * first], axis=-1)

    sequence = jnp.arange(len(x))
    key = key.at[sequence, lengths].set(rotated(heads[:, 0, :, -2]))
    value = value.at[sequence, lengths].set(heads[:, 0, :, -1])
    logits = jnp.einsum("btkgh,bskh->bkgts", rotated(heads[:, :, :, :-2]), key) * config.head_dim**-0.5
    is_seen = jnp.arange(key.shape[1])[None] <= lengths[:, None]
    weights_of_keys = jax.nn.softmax(jnp.where(is_seen[:, None, None, None], logits, -jnp.inf), axis=-1)
    attended = jnp.einsum("bkgts,bskh->btkgh", weights_of_keys, value).reshape(*x.shape[:2], -1, config.head_dim)
    x = x + jnp.einsum("btnh,dnh->btd", attended, weights["output"])
    gate, up = jnp.einsum("btd,cfd->cbtf", norm(x, weights["mlp_norm"]), weights["gate_up"])
    return x + (jax.nn.silu(gate) * up) @ weights["down"].T, key, value


if __name__ == "__main__":
    raise SystemExit(main())
