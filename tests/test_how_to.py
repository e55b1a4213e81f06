"""The programs of docs/how-to: they run, and give what dense attention gives; each page names its program."""

import importlib.util
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import dense_attention, exact_einsum

FOLDER = pathlib.Path(__file__).parent.parent / "docs" / "how-to"
PROGRAMS = sorted(FOLDER.glob("*.py"))


def load(name: str):
    """Returns the program as a module, whose `main` has not run."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def dense_layer(weights, x):
    """Returns what a layer with these weights gives for all of `x` at once."""
    query, key, value = (exact_einsum("btd,dnh->btnh", x, weights[name]) for name in ("query", "key", "value"))
    out, _ = dense_attention(query, key, value, is_causal=True)
    return exact_einsum("btnh,nhd->btd", out, weights["out"])


@pytest.mark.parametrize("name", ["plain_jax_layer", "nnx_layer"])
def test_a_layer_gives_what_dense_attention_gives(name):
    program = load(name)
    weights, inputs, outputs, cache = program.main()
    if name == "nnx_layer":
        weights = {part: getattr(weights, part).kernel[...] for part in ("query", "key", "value", "out")}
    assert inputs.shape == outputs.shape == (program.BATCH, program.PROMPT + program.STEPS, program.WIDTH)
    np.testing.assert_allclose(outputs, dense_layer(weights, inputs), atol=2e-5)
    assert cache.lengths.tolist() == 2 * [program.PROMPT + program.STEPS]
    assert len(cache.arrays.key.sharding.device_set) == 8


def test_a_mesh_of_data_and_sequence_gives_what_dense_attention_gives():
    program = load("data_and_sequence")
    (query, key, value, out), (queries, keys, values, last, cache) = program.main()
    np.testing.assert_allclose(out, dense_attention(query, key, value)[0], atol=1e-5)
    np.testing.assert_allclose(last, dense_attention(queries[:, -1:], keys, values)[0], atol=1e-5)
    batch, keys_per_sequence = cache.arrays.key.sharding.shard_shape(cache.arrays.key.shape)[:2]
    assert (batch, keys_per_sequence) == (program.BATCH // 2, 64 // 4)


@pytest.fixture(scope="module")
def training():
    program = load("training")
    return program, program.train(program.STRATEGIES["one device"])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in load("training").STRATEGIES if name != "one device"])
def test_training_gives_the_losses_of_one_device(training, name):
    """Twenty steps, with a checkpoint around each layer; a strategy takes some seconds to compile."""
    program, expected = training
    losses = program.train(program.STRATEGIES[name])
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.5, "it learns"
    np.testing.assert_allclose(losses, expected, atol=1e-5)


def test_the_program_for_slurm_goes_on_where_it_ended(tmp_path, monkeypatch):
    """In one process here; tests/slurm run it over two nodes."""
    program = load("slurm_program")
    monkeypatch.setenv("TREE_ATTN_OUT", str(tmp_path))
    monkeypatch.setattr(program, "STEPS", 2)
    program.main()
    before = (tmp_path / "sums.jsonl").read_text()
    monkeypatch.setattr(program, "STEPS", 3)
    program.main()
    rows = (tmp_path / "sums.jsonl").read_text()
    assert rows.startswith(before)
    rows = [json.loads(row) for row in rows.splitlines()]
    assert [(row["step"], row["devices"]) for row in rows] == [(step, len(jax.devices())) for step in range(3)]
    shapes = [(1, 1, heads, 16) for heads in (4, 2, 2)]
    drawn = [
        [jax.random.normal(key, shape) for key, shape in zip(jax.random.split(jax.random.key(step), 3), shapes)]
        for step in range(3)
    ]
    query, key, value = (jnp.concatenate(parts, axis=1) for parts in zip(*drawn))
    out, _ = dense_attention(query, key, value, is_causal=True)
    np.testing.assert_allclose([row["sum"] for row in rows], out.sum(axis=(0, 2, 3)), atol=1e-4)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_page_explains_each_program(program):
    assert [page.stem for page in FOLDER.glob("*.md") if f"[{program.name}]({program.name})" in page.read_text()]
