"""Every example of every docstring runs, on eight CPU devices, and gives what it shows.

Examples use names such as `query` and `mesh` that they do not make. `GIVEN` makes those that an example names, once.
The Python blocks of the README run in tests/test_readme.py.
"""

import ast
import doctest
import functools
import importlib
import pathlib
import types
from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_imports import MODULES

import tree_attn
from tree_attn import KVCache, PrefixLevel, attend, make_mesh, ring_baseline, topology
from tree_attn.cost import machine
from tree_attn.models import llama
from tree_attn.models.llama import parameters
from tree_attn.models.llama.checkpoint import hub
from tree_attn.models.llama.checkpoint.open import open_checkpoint
from tree_attn.models.llama.generation import memory, prefix_tree

PACKAGES = tree_attn, ring_baseline, llama
B, T, N, K, H, S = 2, 2, 4, 2, 64, 256
# Docstrings whose examples need what a test has not.
NOT_HERE = {
    "tree_attn.cluster.join.initialize": "starts with other processes",
    "tree_attn.commands.doctor.calibrate.measure_machine": "writes the costs of GPUs' links",
    "tree_attn.commands.options.check_at_least": "needs a parsed command line",
    "tree_attn.devices.visible_gpus": "lists GPUs",
    "tree_attn.kernels.interpreter.interpreted_kernels": "runs minutes; tests/kernels interpret kernels",
    "tree_attn.commands.phases.phase": "draws on stderr what some command does",
    "tree_attn.measure.device_time.device_time": "needs a GPU's profiler",
    "tree_attn.measure.hlo.summarize": "shows the numbers of one program",
    "tree_attn.measure.latency.latency_us": "times chains; tests/measure has shorter ones",
    "tree_attn.measure.links.measure_axes": "times transfers for seconds; tests/measure has shorter ones",
    "tree_attn.measure.links.neighbour_gb_per_s": "times transfers for seconds; tests/measure has shorter ones",
    "tree_attn.measure.provenance.clocks_during": "needs a GPU",
    "tree_attn.reduce.activations.sum_activations": "runs within the model's shard_map",
    "tree_attn.models.llama.checkpoint.huggingface.from_safetensors": "needs a folder of weights",
    "tree_attn.models.llama.evaluation.scorer.Scorer": "needs samples of a text",
}
SLOW = ("models.llama.checkpoint", "models.llama.generation.generat", "models.llama.generation.int8", "memory.predict")


def draw(*shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), dtype)


def cache(batch: int = B):
    return KVCache.create(
        batch=batch, capacity=S, num_kv_heads=K, head_dim=H, dtype=jnp.float32, mesh=given("mesh"), axis_name="seq"
    )


def token():
    return draw(B, 1, K, H)


def step_of_mine(cache, query, key, value):
    cache = cache.append(key, value)
    return cache, cache.attend(query)


def tiny_model():
    config = given("config")
    sharding = llama.spread_over(config, make_mesh({"seq": 2}))
    return llama.Llama(config, sharding, parameters.random(sharding, jnp.float32))


def checkpoint():
    return open_checkpoint(hub.resolve("smollm2"))


def sum_over_devices(x):
    along = functools.partial(jax.shard_map, mesh=given("mesh"), in_specs=P("seq"), out_specs=P())
    return along(lambda x: functools.reduce(lambda y, _: jax.lax.psum(jnp.sin(y), "seq") / 8, range(3), x))(x)


GIVEN = {
    "query": lambda: draw(B, T, N, H),
    "key": lambda: draw(B, S, K, H),
    "value": lambda: draw(B, S, K, H),
    "source": lambda: draw(B, T, N, H),
    "lengths": lambda: jnp.array([200, 30]),
    "mesh": lambda: make_mesh({"seq": 8}),
    "devices": jax.devices,
    "levels": lambda: [PrefixLevel(key=given("key")[:1], value=given("value")[:1], sequences=((0, 1),))],
    "cache": cache,
    "prefix_key": lambda: draw(S, K, H),
    "prefix_value": lambda: draw(S, K, H),
    "partial_states": lambda: jax.tree.map(
        lambda x: jnp.stack(5 * [x]), attend(given("query"), given("key"), given("value"))
    ),
    "config": lambda: llama.LlamaConfig(
        num_layers=2, hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, head_dim=64, vocab_size=256,
        max_position=512,
    ),
    "model": tiny_model,
    "sharding": lambda: given("model").sharding,
    "attention": lambda: llama.by_name("tree", given("sharding")),
    "generator": lambda: llama.Generator(given("model"), given("attention")),
    "prompt": lambda: [1, 2, 3],
    "my_text": lambda: list(range(64)),
    "samples": lambda: llama.generate(given("generator"), [[1, 2, 3]], max_new_tokens=3, num_samples=4),
    "checkpoint": checkpoint,
    "tokenizer": lambda: given("checkpoint").tokenizer,
    "tokens": lambda: range(3),
    "f": lambda: sum_over_devices,
    "x": lambda: jnp.ones(8),
    "by_rows_over_eight_devices": lambda: NamedSharding(given("mesh"), P("seq")),
}  # fmt: skip
MODULES_IN_EXAMPLES = {
    "P": P, "Unpack": Unpack, "functools": functools, "hub": hub, "jax": jax, "jnp": jnp, "machine": machine,
    "memory": memory, "np": np, "parameters": parameters, "pathlib": pathlib, "topology": topology,
}  # fmt: skip
# What one docstring needs otherwise: names, and their values.
OF_ONE = {
    "tree_attn.cache.KVCache": {"cache": cache, "key": token, "value": token, "step_of_mine": lambda: step_of_mine},
    "tree_attn.cache.KVCache.with_sequence": {"cache": lambda: cache(4), "cache_of_the_prompt": lambda: cache(1)},
    "tree_attn.cache_reads.CacheReads.attend": {"cache": cache, "key": token, "value": token},
    "tree_attn.cache_reads.CacheReads.operands": {"cache": cache, "layer": lambda: None},
    "tree_attn.models.llama.generation.conversation.Conversation": {
        "tokenizer": lambda: types.SimpleNamespace(encode_chat=lambda messages: [1, 2, 3]), "messages": lambda: [],
    },
    "tree_attn.models.llama.generation.generator.Generator": {
        "tokenizer": lambda: types.SimpleNamespace(encode=lambda text: [1, 2, 3])  # within the tiny model's vocabulary
    },
    "tree_attn.models.llama.generation.prefix_tree.PrefixTree.descendants": {
        "tree": lambda: prefix_tree.share([[1, 2, 3], [1, 2, 4]], min_shared=1)
    },
    "tree_attn.placement.PromptLayout": {"x": lambda: draw(B, 250, H)},
    "tree_attn.ragged.lean_decode": {
        "query": lambda: draw(3, T, N, H), "key": lambda: draw(2053, K, H), "value": lambda: draw(2053, K, H),
    },
    "tree_attn.ragged.paged_decode": {
        "key_pages": lambda: draw(5, 128, K, H), "value_pages": lambda: draw(5, 128, K, H),
    },
    "tree_attn.shared_prefix.hydragen_decode": {
        "prompt_key": lambda: draw(S, K, H), "prompt_value": lambda: draw(S, K, H),
        "query": lambda: draw(64, T, N, H), "key": lambda: draw(64, 8, K, H), "value": lambda: draw(64, 8, K, H),
        "lengths": lambda: jnp.full(64, 5),
    },
    "tree_attn.ring_baseline.attention.ring_attention": {"S": lambda: S, "query": lambda: draw(B, S, N, H)},
    "tree_attn.ring_baseline.ulysses.ulysses_attention": {"query": lambda: draw(B, S, N, H)},
    "tree_attn.ring_baseline.prefill.ring_prefill": {"cache": cache, "query": lambda: draw(B, S, N, H)},
    "tree_attn.prefix_level.PrefixLevel": {"key": lambda: draw(2, S, K, H), "value": lambda: draw(2, S, K, H)},
}  # fmt: skip


@functools.cache
def given(name: str):
    return GIVEN[name]()


def examples():
    """Yields the name, module and text of each docstring with examples."""
    documented = (ast.ClassDef, ast.FunctionDef)

    def visit(node, name):
        text = ast.get_docstring(node) if isinstance(node, documented) else None
        if text and ">>>" in text:
            yield name, text
        for child in ast.iter_child_nodes(node):
            yield from visit(child, f"{name}.{child.name}" if isinstance(child, documented) else name)

    for module, path in sorted(MODULES.items()):
        source = path.read_text()
        for name, text in visit(ast.parse(source), module) if ">>>" in source else ():
            yield name, module, text


class OnlyWhatIsShown(doctest.OutputChecker):
    """Compares what an example prints only where the example shows it."""

    def check_output(self, want, got, optionflags):
        return not want or super().check_output(want, got, optionflags)


def names_in(code: types.CodeType) -> set[str]:
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*inner)


def marked(name, module, text):
    return pytest.param(name, module, text, id=name, marks=[pytest.mark.slow] if name_is_slow(name) else [])


def name_is_slow(name: str) -> bool:
    return any(part in name for part in SLOW)


@pytest.mark.parametrize("name, module, text", [marked(*found) for found in examples() if found[0] not in NOT_HERE])
def test_example(name, module, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = doctest.DocTestParser().get_examples(text)
    names = set().union(*(names_in(compile(example.source, name, "exec")) for example in found))
    public = {public: getattr(package, public) for package in PACKAGES for public in package.__all__}
    values = {given_name: make() for given_name, make in OF_ONE.get(name, {}).items()}
    values |= {given_name: given(given_name) for given_name in GIVEN if given_name in names - set(values)}
    globs = public | vars(importlib.import_module(module)) | MODULES_IN_EXAMPLES | values
    test = doctest.DocTest(found, globs, name, None, None, None)
    runner = doctest.DocTestRunner(OnlyWhatIsShown(), verbose=False, optionflags=doctest.ELLIPSIS)
    report = []
    assert runner.run(test, out=report.append).failed == 0, "".join(report)


def test_what_is_left_out_exists():
    names = {name for name, _, _ in examples()}
    assert set(NOT_HERE) <= names
    assert set(OF_ONE) <= names
