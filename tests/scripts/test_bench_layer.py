"""The layer that `bench_layer.py` times, beside the model's, and its rows."""

import dataclasses
import json

import bench_layer
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tree_attn import make_mesh
from tree_attn.models.llama import Llama, LlamaConfig, by_name, parameters, spread_over
from tree_attn.models.llama.products import XlaProducts
from tree_attn.models.llama.projections import ForwardContext
from tree_attn.models.llama.storage import empty_cache

CONFIG = LlamaConfig(
    num_layers=1, hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=16,
    max_position=256, rms_norm_eps=bench_layer.EPS,
)  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in {"LAYERS": 2, "REPEATS": 1, "CALLS": 1, "TRIALS": 1}.items():
        monkeypatch.setattr(bench_layer, name, value)
    monkeypatch.setattr(bench_layer, "preset", lambda name: CONFIG)


def by_xla(config, x, weights, cache, lengths):
    cache = [jnp.nan_to_num(array) for array in cache]  # as a kernel does beyond the lengths
    return tuple(of.astype(x.dtype) for of in bench_layer.exact_of(config, x, weights, cache, lengths))


def test_float32_is_the_model_s_layer():
    """But for rotations, which are one angle here."""
    sharding = spread_over(CONFIG, make_mesh({"seq": 1}, jax.devices()[:1]))
    layer = Llama(CONFIG, sharding, parameters.random(sharding, jnp.float32), unroll_layers=True).layers[0]
    weights, cache = jax.tree.map(lambda x: x.astype(jnp.float32), bench_layer.drawn(CONFIG, 20, 3, 0))
    pairs = {
        "attention_norm": layer.attention_norm.scale, "heads": layer.attention.query_key_value, "mlp_norm":
        layer.mlp_norm.scale, "output": layer.attention.output, "gate_up": layer.mlp.gate_up, "down": layer.mlp.down,
    }  # fmt: skip
    for name, parameter in pairs.items():
        parameter[...] = weights[name]
    attention = by_name("single", sharding, implementation="xla")
    stored = empty_cache(CONFIG, sharding, batch=3, capacity=128, dtype=jnp.float32, stacks_layers=False)
    layers = [dataclasses.replace(stored.arrays.layers[0], key=cache[0], value=cache[1])]
    lengths = jnp.asarray([20, 3, 0], jnp.int32)
    stored = dataclasses.replace(stored, arrays=type(stored.arrays)(tuple(layers)), lengths=lengths)
    angles = jnp.full((3, 1, 1, 4), 0.6), jnp.full((3, 1, 1, 4), 0.8)

    def attend(query, key, value, cache, i):
        cache = cache.write(key, value, layer=i)
        return attention.decode(query, cache, i), cache

    context = ForwardContext(
        cosine_sine=lambda _: angles, attend=attend, sharding=sharding, token_axis=None, products=XlaProducts()
    )  # fmt: skip
    x = jax.random.normal(jax.random.key(1), (3, 1, 32))
    with jax.default_matmul_precision("highest"):
        expected, _ = layer(x, stored, 0, context)
        found, *_ = bench_layer.exact_of(CONFIG, x, weights, cache, lengths)
    np.testing.assert_allclose(found, expected, atol=2e-5)


def without_new_keys(config, x, weights, cache, lengths):
    result, _, value = by_xla(config, x, weights, cache, lengths)
    return result, cache[0], value


def reading_beyond_lengths(config, x, weights, cache, lengths):
    return tuple(of.astype(x.dtype) for of in bench_layer.exact_of(config, x, weights, cache, lengths))


def too_large(*arguments):
    result, *caches = by_xla(*arguments)
    return 1.05 * result, *caches


@pytest.mark.parametrize("layer_of", [by_xla, too_large, without_new_keys, reading_beyond_lengths])
def test_a_row_says_whether_the_results_are_near_enough(layer_of, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench_layer, "layer_of", layer_of)
    monkeypatch.setattr(bench_layer, "origin", dict)
    path, is_near = tmp_path / "rows.jsonl", layer_of is by_xla
    monkeypatch.setattr("sys.argv", ["bench_layer.py", "--contexts", "9,20", "--sequences", "2", "--out", str(path)])
    assert bench_layer.main() == (not is_near)
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["context"], row["batch"], row["passed"]) for row in found] == [(9, 2, is_near), (20, 2, is_near)]
    assert "20 x 2:" in capsys.readouterr().out
