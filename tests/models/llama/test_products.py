"""Products of new tokens with weights: by XLA, and by the kernel for few rows, here in the interpreter."""

import collections
import contextlib
import dataclasses
import functools
import logging
from unittest import mock

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from lean_interpreter import arguments_by_numpy

from tree_attn.cache import KVCache
from tree_attn.kernels import few_rows_call, few_rows_chain_call, targets
from tree_attn.kernels.exchange_words import Buffers
from tree_attn.kernels.few_rows_chain_call import AfterAttention, NewHeads, Norm
from tree_attn.kernels.interpreter import interpreted_kernels
from tree_attn.kernels.launch_order import KERNELS_ARE_RECORDED
from tree_attn.kernels.overlap import overlaps
from tree_attn.local import mosaic_gpu
from tree_attn.mesh import make_mesh
from tree_attn.models.llama import (
    Llama,
    LlamaConfig,
    by_name,
    chained_products,
    parameters,
    product_choice,
    spread_over,
)
from tree_attn.models.llama.chained_products import ChainedProducts, ChainedProductsOfShards
from tree_attn.models.llama.layers import RMSNorm
from tree_attn.models.llama.model import unrolls_steps
from tree_attn.models.llama.products import Branch, FewRowsProducts, ProductsOfShards, XlaProducts
from tree_attn.models.llama.projections import ForwardContext
from tree_attn.models.llama.rope import apply_rotation
from tree_attn.models.llama.sharding import LlamaSharding
from tree_attn.models.llama.storage import empty_cache
from tree_attn.reduce import peer_memory

# Every product has out-features of a multiple of 8 and in-features of a multiple of 64.
SHAPE = dict(num_layers=1, hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, head_dim=16)
needs_interpreter = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="runs with JAX 0.11 or newer, whose interpreter knows transposed operands"
)


@pytest.fixture
def on_one_sm(monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "unavailable", lambda: None)
    monkeypatch.setattr(few_rows_call, "num_sms", lambda: 1)
    monkeypatch.setattr(few_rows_chain_call, "num_sms", lambda: 1)


def logits_by(name, config, sharding, is_apart=False):
    """Returns the logits of two new tokens in each of three sequences; layers are stacked, or lie apart."""
    create = parameters.random(sharding, jnp.bfloat16)
    model = Llama(config, sharding, create, products=name, unroll_layers=is_apart)
    cache = empty_cache(config, sharding, batch=3, capacity=8, dtype=jnp.bfloat16, stacks_layers=not is_apart)
    tokens = jnp.asarray([[3, 1], [4, 1], [5, 9]], jnp.int32)
    attention = by_name("single" if sharding.mesh.size == 1 else "tree", sharding)
    with contextlib.ExitStack() as stack:
        if sharding.mesh.size == 1:
            stack.enter_context(arguments_by_numpy())
            stack.enter_context(interpreted_kernels())
            stack.enter_context(plgpu.force_gpu_interpret_mode())
        return np.asarray(jax.jit(lambda: model.decode(tokens, cache, attention)[0])(), np.float32)


@needs_interpreter
@pytest.mark.parametrize(
    ("options", "is_apart", "name"),
    [
        ({}, False, "mosaic_gpu"),
        ({}, True, "mosaic_gpu"),
        ({"post_norms": True, "norms_add_one": True, "query_key_value_bias": True}, True, "mosaic_gpu"),
        ({"norms_add_one": True, "num_layers": 2}, True, "mosaic_gpu_chain"),
    ],
    ids=str,
)
def test_a_step_by_the_kernel_is_a_step_by_xla(options, is_apart, name, sharding_over, on_one_sm):
    shape = CHAINED if name == "mosaic_gpu_chain" else SHAPE
    config = LlamaConfig(**shape | options, vocab_size=64, max_position=32)
    expected = logits_by("xla", config, sharding_over(config, 1), is_apart)
    logits = logits_by(name, config, sharding_over(config, 1), is_apart)
    assert abs(logits - expected).max() <= 0.03 * abs(expected).max()  # each path rounds to bfloat16 where it does
    assert (logits != expected).any(), "the kernel multiplied"


def test_none_is_the_kernel_where_it_runs(tiny_config, sharding_over, monkeypatch, caplog):
    one = sharding_over(tiny_config, 1)
    two = spread_over(tiny_config, make_mesh({"seq": 2}, jax.devices()[:2]))
    default = functools.partial(product_choice.by_name, None, unrolls_layers=True)
    with caplog.at_level(logging.INFO, "tree_attn"):
        assert default(one) == XlaProducts()
    assert "mosaic_gpu needs an NVIDIA GPU" in caplog.text
    monkeypatch.setattr(mosaic_gpu, "unavailable", lambda: None)
    assert default(one) == XlaProducts(), "a model on CPUs, where there is a GPU too"
    monkeypatch.setattr(LlamaSharding, "is_on_gpus", True)
    with caplog.at_level(logging.INFO, "tree_attn"):
        assert default(one, unrolls_layers=False) == FewRowsProducts(max_rows=16)
    assert "mosaic_gpu, for up to 16 tokens" in caplog.text
    chains = jax.__version_info__ >= (0, 11)  # whose kernels read what they have written
    name = "mosaic_gpu_chain" if chains else "mosaic_gpu"
    assert isinstance(default(one), ChainedProducts) == chains
    assert isinstance(default(two), ChainedProductsOfShards) == chains
    assert not chains or not default(two).joins_attention
    names = lambda sharding, *rows: [default(sharding).name_of(of) for of in rows]
    assert names(one, 1, 16, 17) == [name, name, "xla"]
    assert names(two, 1, 3, 4) == ([name, name, "xla"] if chains else ["xla"] * 3)
    assert default(two, unrolls_layers=False) == XlaProducts()
    named = product_choice.by_name("mosaic_gpu", two, unrolls_layers=True)
    assert named == ProductsOfShards(two) and named.name_of(16) == "mosaic_gpu"
    with targets.assumed("8.9"):
        assert default(one) == XlaProducts()


def multiplied(x, weights, scale=None, residual=None, *, shape, config):
    """Does what the kernel does: the interpreter runs no kernels of two devices at once."""
    wide = x.astype(jnp.float32)
    if scale is not None:
        norm = jax.lax.rsqrt(jnp.square(wide).mean(axis=-1, keepdims=True) + shape.eps)
        wide = wide * norm * (scale.astype(jnp.float32) + float(shape.adds_one))[None]
    parts = jnp.einsum("bi,poi->pbo", wide, weights.astype(jnp.float32))
    result = parts[0] if shape.activation is None else jax.nn.silu(parts[0]) * parts[1]
    result = result if residual is None else result + residual.astype(jnp.float32)
    return result.astype(shape.out_dtype)


@pytest.mark.parametrize(
    "options", [{}, {"post_norms": True, "norms_add_one": True, "query_key_value_bias": True}], ids=str
)
@pytest.mark.parametrize("num_devices", [2, 4])
def test_devices_multiply_by_their_parts_as_xla_does(options, num_devices, on_one_sm, monkeypatch):
    """Each has half of the MLP and of the vocabulary, and a KV head with its queries; of four each has all heads."""
    multiply = mock.Mock(side_effect=multiplied)
    monkeypatch.setattr(few_rows_call, "multiply_few_rows", multiply)
    config = LlamaConfig(**SHAPE | {"intermediate_size": 512}, vocab_size=64, max_position=32, **options)
    sharding = spread_over(config, make_mesh({"seq": num_devices}, jax.devices()[:num_devices]))
    expected = logits_by("xla", config, sharding, is_apart=True)
    assert not multiply.called
    logits = logits_by("mosaic_gpu", config, sharding, is_apart=True)
    assert abs(logits - expected).max() <= 0.03 * abs(expected).max()
    shapes = [call.args[1].shape for call in multiply.call_args_list]
    heads = [(1, 64, 64)] if num_devices == 2 else []
    rest = (1, 64, 64 // num_devices), (2, 512 // num_devices, 64), (1, 64, 512 // num_devices)
    assert shapes == [*heads, *[x for x in rest if x[2] % 64 == 0], (1, 64 // num_devices, 64)]


@needs_interpreter
def test_a_layer_has_four_products_on_two_gpus(on_one_sm, monkeypatch):
    """Two of them end in the sum over the GPUs."""
    monkeypatch.setattr(peer_memory, "peer_memory", lambda groups, num_bytes: 0x5D00_0000_0000)
    monkeypatch.setattr(peer_memory, "check_platform", lambda devices: None)
    monkeypatch.setattr(few_rows_call, "num_sms", lambda: 132)
    config = LlamaConfig(
        **SHAPE | {"num_layers": 3, "hidden_size": 128, "head_dim": 32}, vocab_size=64, max_position=32
    )
    sharding = spread_over(config, make_mesh({"seq": 2}, jax.devices()[:2]))
    create = parameters.random(sharding, jnp.bfloat16)
    model = Llama(config, sharding, create, unroll_layers=True, products="mosaic_gpu")
    attention = by_name("tree", sharding, implementation="xla", reduction="gather")
    cache = empty_cache(config, sharding, batch=1, capacity=16, dtype=jnp.bfloat16, stacks_layers=False)
    decode = jax.jit(lambda: model.decode(jnp.ones((1, 8), jnp.int32), cache, attention)[0])
    text = decode.trace().lower(lowering_platforms=("cuda",)).as_text()
    calls = [text.count(f"call @multiply_{name}") for name in ("few_rows", "and_sum")]
    assert calls == [3 * 2 + 1, 3 * 2]


def chained(x, residual, weights, scales, heads=None, *, rank, shapes, configs, buffers):
    """Does what a chain does over devices along "seq"."""
    features = shapes[0].in_features
    x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index("seq") * features, features, axis=1)
    for weight, scale, shape in zip(weights, scales, shapes):
        options = {"out_dtype": jnp.dtype(jnp.float32), "has_residual": False} if shape.has_residual else {}
        product = multiplied(x, weight, scale, shape=dataclasses.replace(shape, **options), config=None)
        if shape.has_residual:
            total = residual.astype(jnp.float32) + jax.lax.psum(product, "seq")
            product = residual = total.astype(residual.dtype)
        if shape.heads is not None:
            return x, *appended(product, heads, shape)
        x = product
    return x


def appended(product, heads, shape):
    """Returns rotated queries of all devices, and a cache of one sequence with keys and values at their slots."""
    (cosine, sine), slots, key, value = heads
    rows, (head_dim, group) = product.shape[0], (shape.heads.head_dim, shape.heads.group)
    members = product.reshape(rows, -1, group + 2, head_dim)
    turned = apply_rotation(members[None].reshape(1, rows, -1, head_dim), (cosine[None, :, None], sine[None, :, None]))
    turned = turned.reshape(members.shape)
    members = jnp.concatenate([turned[:, :, : group + 1], members[:, :, group + 1 :]], axis=2)
    members = jax.lax.all_gather(members, "seq", axis=1, tiled=True)
    sequence = jnp.arange(rows) // shape.heads.tokens
    put = lambda stored, new: stored.at[sequence, slots[:rows]].set(new, mode="drop")
    queries = members[:, :, :group].reshape(rows, -1, head_dim)
    return queries, put(key, members[:, :, group]), put(value, members[:, :, group + 1])


@needs_interpreter
@pytest.mark.parametrize("num_devices", [2, 4])
def test_a_chain_over_devices_multiplies_and_adds_their_parts(num_devices, on_one_sm, monkeypatch):
    """The exchange runs on GPUs only, so that this is the arithmetic, and the parts of each device."""
    chain = mock.Mock(side_effect=chained)
    monkeypatch.setattr(few_rows_chain_call, "multiply_chain", chain)
    monkeypatch.setattr(few_rows_call, "multiply_few_rows", multiplied)
    monkeypatch.setattr(chained_products, "exchanges", lambda *_: True)
    buffers = Buffers(table=0, num_ranks=num_devices, capacity=1024)
    monkeypatch.setattr(chained_products.fused, "meeting", lambda *_: (None, buffers))
    config = LlamaConfig(
        **CHAINED | {"num_layers": 2, "num_kv_heads": 4, "head_dim": 32, "intermediate_size": 512}, vocab_size=64,
        max_position=32,
    )  # fmt: skip
    sharding = spread_over(config, make_mesh({"seq": num_devices}, jax.devices()[:num_devices]))
    expected = logits_by("xla", config, sharding, is_apart=True)
    assert not chain.called
    logits = logits_by("mosaic_gpu_chain", config, sharding, is_apart=True)
    assert abs(logits - expected).max() <= 0.03 * abs(expected).max()
    first, last = chain.call_args_list
    features, part = config.num_heads * config.head_dim // num_devices, config.intermediate_size // num_devices
    hidden = config.hidden_size
    of_layer = [(1, hidden, features), (2, part, hidden), (1, hidden, part)]
    assert [x.shape for x in last.args[2]] == of_layer
    assert [x.shape for x in first.args[2]] == [*of_layer, (1, 4 // num_devices * (4 + 2) * 32, hidden)]


@needs_interpreter
def test_over_devices_a_layer_without_an_exchange_is_not_chained(on_one_sm, monkeypatch, caplog):
    """Two CPUs have no exchange, so that XLA adds."""
    monkeypatch.setattr(few_rows_call, "multiply_few_rows", multiplied)
    config = LlamaConfig(**CHAINED | {"num_kv_heads": 4}, vocab_size=64, max_position=32)
    sharding = spread_over(config, make_mesh({"seq": 2}, jax.devices()[:2]))
    expected = logits_by("xla", config, sharding, is_apart=True)
    with caplog.at_level(logging.INFO, "tree_attn"):
        logits = logits_by("mosaic_gpu_chain", config, sharding, is_apart=True)
    assert abs(logits - expected).max() <= 0.03 * abs(expected).max()
    assert "layer 0 is not chained: over several devices a chain needs the exchange kernel" in caplog.text


@needs_interpreter
@pytest.mark.parametrize("attention_name", [pytest.param("single", marks=pytest.mark.thorough), "tree"])
def test_tokens_after_prompts_by_the_kernel_are_those_by_xla(attention_name, sharding_over, on_one_sm):
    """Both read XLA's greedy tokens, each from a cache of its own writing."""
    config = LlamaConfig(**SHAPE | {"num_layers": 2}, vocab_size=64, max_position=32)
    sharding = sharding_over(config, 1)
    attention = by_name(attention_name, sharding)
    prompts, lengths = jnp.asarray([[3, 1, 4, 1], [5, 9, 2, 0]], jnp.int32), jnp.asarray([4, 3], jnp.int32)

    # Drawn here, for a program that draws takes longer to compile than its steps.
    create = parameters.random(sharding, jnp.bfloat16)
    make = functools.partial(Llama, config, sharding, create, unroll_layers=True)

    def steps(model, followed):
        cache = empty_cache(config, sharding, batch=2, capacity=16, dtype=jnp.bfloat16, stacks_layers=False)
        logits, cache = model.prefill(prompts, lengths, cache, attention)
        found = [logits]
        for step in range(2):  # the second reads what the first has written
            tokens = found[-1].argmax(axis=-1) if followed is None else followed[step].argmax(axis=-1)
            logits, cache = model.decode(tokens[:, None].astype(jnp.int32), cache, attention)
            found.append(logits[:, 0])
        return jnp.stack(found)

    expected = jax.jit(functools.partial(steps, make(products="xla"), None))()
    with arguments_by_numpy(), interpreted_kernels(), plgpu.force_gpu_interpret_mode():
        logits = jax.jit(functools.partial(steps, make(products="mosaic_gpu")))(expected)
    assert (logits != expected).any(), "the kernel multiplied"
    for got, by_xla in zip(np.asarray(logits), np.asarray(expected), strict=True):
        tolerance = 0.03 * abs(by_xla).max()  # as in a step
        assert abs(got - by_xla).max() <= tolerance
        chosen = np.take_along_axis(by_xla, got.argmax(axis=-1)[:, None], axis=-1)[:, 0]
        assert (chosen >= by_xla.max(axis=-1) - 2 * tolerance).all()


def branch_of(tokens: int, dtype) -> Branch:
    scale = parameters.Parameter(name="scale", shape=(64,), axes=("embed",))
    norm = RMSNorm(scale, 1e-5, lambda parameter: jnp.linspace(0.5, 2, 64).astype(dtype))
    return Branch(x=jnp.sin(jnp.arange(tokens * 64.0)).reshape(1, tokens, 64).astype(dtype), norm=norm)


def test_xla_multiplies_rows_beyond_the_limit(caplog):
    weights = jnp.linspace(-1, 1, 8 * 64).reshape(8, 64).astype(jnp.bfloat16)
    with caplog.at_level(logging.INFO, "tree_attn"):
        found = FewRowsProducts(max_rows=8).project(branch_of(9, jnp.bfloat16), weights)
    np.testing.assert_array_equal(found, XlaProducts().project(branch_of(9, jnp.bfloat16), weights))
    assert "at most 8, not 9" in caplog.text


@needs_interpreter
def test_the_kernel_multiplies_as_xla_does(on_one_sm):
    branch, weights = branch_of(5, jnp.bfloat16), jnp.cos(jnp.arange(24 * 64.0)).reshape(3, 8, 64).astype(jnp.bfloat16)
    with arguments_by_numpy(), interpreted_kernels(), plgpu.force_gpu_interpret_mode():
        found = jax.jit(lambda: FewRowsProducts().project(branch, weights))()
    expected = XlaProducts().project(branch, weights)
    assert found.shape == expected.shape == (1, 5, 3, 8)
    error, largest = (float(abs(x.astype(jnp.float32)).max()) for x in (found - expected, expected))
    assert error <= 0.02 * largest


@needs_interpreter
@pytest.mark.parametrize("name", [name for name in product_choice.PRODUCTS if name != "mosaic_gpu_chain"])
def test_a_layer_has_four_products_on_gpus(name, sharding_over, on_one_sm, monkeypatch):
    """Lowered for CUDA: the kernel is called for each and for the head, of new tokens and not of prompts.

    The product of query, key and value writes the cache, and nothing else does.
    """
    monkeypatch.setattr("tree_attn.kernels.overlap.overlaps", lambda *_: True)
    monkeypatch.setattr(few_rows_call, "overlaps", lambda: True)
    config = LlamaConfig(**SHAPE | {"num_layers": 3}, vocab_size=64, max_position=32)
    sharding = sharding_over(config, 1)
    create = parameters.random(sharding, jnp.bfloat16)
    model = Llama(config, sharding, create, unroll_layers=True, products=name)
    tokens, lengths = jnp.ones((1, 8), jnp.int32), jnp.full(1, 8, jnp.int32)
    attention = by_name("single", sharding, implementation="xla")
    cache = empty_cache(config, sharding, batch=1, capacity=16, dtype=jnp.bfloat16, stacks_layers=False)
    calls = {"decode": lambda: model.decode(tokens, cache, attention)[0],
             "prefill": lambda: model.prefill(tokens, lengths, cache, attention)[0]}  # fmt: skip
    lowered = {which: jax.jit(f).trace().lower(lowering_platforms=("cuda",)).as_text() for which, f in calls.items()}
    names = "call @multiply_few_rows", "call @multiply_into_cache"
    counts = {which: [text.count(name) for name in names] for which, text in lowered.items()}
    assert counts == {"decode": [0, 0] if name == "xla" else [3 * 3 + 1, 3], "prefill": [0, 0]}
    assert ("scatter" in lowered["decode"]) == (name == "xla")


def calls_of(jaxpr) -> collections.Counter:
    """Returns how often a traced program calls each jitted function; its kernels need not be lowered for that."""
    called = collections.Counter()
    for equation in jaxpr.eqns:
        called[equation.params.get("name")] += equation.primitive.name in ("jit", "pjit")
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            called += calls_of(inner)
    return called


# In-features are multiples of 128.
CHAINED = SHAPE | {"hidden_size": 256, "intermediate_size": 256, "num_heads": 16, "num_kv_heads": 1}


@needs_interpreter
@pytest.mark.parametrize(
    ("options", "num_tokens", "expected", "reason"),
    [
        # The head; the first layer's query, key and value; and the rest of each layer.
        ({}, 8, [1, 1, 3], None),
        ({}, 17, [0, 0, 0], "append by xla: few rows are 1 to 16, not 17"),
        ({"query_key_value_bias": True}, 8, [1 + 3, 0, 3], "layer 0 is not chained to layer 1: a chain makes queries"),
        ({"post_norms": True}, 8, [1 + 3 * 3, 3, 0], "layer 0 is not chained: a chain has no norms after"),
    ],
    ids=["chained", "many tokens", "biases", "norms"],
)
def test_a_layer_is_attention_and_one_launch(
    options, num_tokens, expected, reason, sharding_over, on_one_sm, caplog
):  # fmt: skip
    config = LlamaConfig(**CHAINED | {"num_layers": 3}, vocab_size=64, max_position=32, **options)
    sharding = sharding_over(config, 1)
    model = Llama(
        config, sharding, parameters.random(sharding, jnp.bfloat16), unroll_layers=True, products="mosaic_gpu_chain"
    )
    attention = by_name("single", sharding, implementation="xla")
    cache = empty_cache(config, sharding, batch=1, capacity=32, dtype=jnp.bfloat16, stacks_layers=False)
    decode = jax.jit(lambda tokens: model.decode(tokens, cache, attention)[0])
    with caplog.at_level(logging.INFO, "tree_attn"):
        called = calls_of(decode.trace(jnp.ones((1, num_tokens), jnp.int32)).jaxpr)
    assert [called[f"multiply_{name}"] for name in ("few_rows", "into_cache", "chain")] == expected
    assert reason is None or reason in caplog.text


RUNS_TOGETHER = jax.__version_info__ >= KERNELS_ARE_RECORDED
TOGETHER = [1, 0, 0, 1] if RUNS_TOGETHER else [1, 0, 2, 0]


@needs_interpreter
@pytest.mark.parametrize(
    ("options", "num_tokens", "batch", "expected", "reason"),
    [
        ({}, 1, 1, TOGETHER, None),  # the head, and all layers
        ({}, 1, 4, TOGETHER, None),
        ({"num_layers": 17}, 1, 1, [1, 0, 0, 2] if RUNS_TOGETHER else [1, 0, 17, 0], None),
        ({"num_layers": 1}, 1, 1, [1, 0, 1, 0], "layers 0 to 0 are not one launch: a launch has 2 to 16 layers, not 1"),
        ({"window": 6}, 1, 1, [1, 1, 2, 0], "attention in a launch has not run with a window"),
        ({}, 2, 1, [1, 1, 2, 0], "a launch attends with one query of each sequence, not 2"),
        ({}, 1, 5, [1, 1, 2, 0], "a chain attends with one query of each of up to 4 sequences"),
        ({"head_dim": 80}, 1, 1, [1, 1, 2, 0], "a chain's attention has a head dim of (64, 128)"),
        ({"num_heads": 32}, 1, 1, [1, 1, 2, 0], "a chain's attention has up to 8 or 16 query heads"),
        ({"implementation": "xla"}, 1, 1, [1, 1, 2, 0], "attention is one that a launch does not replace"),
        ({"reduction": "gather"}, 1, 1, [1, 1, 2, 0], "attention is one that a launch does not replace"),
        ({"dtype": jnp.float8_e4m3fn}, 1, 1, [1 + 2, 0, 2, 0], "in their own dtype, bfloat16, not float8_e4m3fn"),
        ({"query_key_value_bias": True}, 1, 1, [1 + 2, 0, 2, 0], "a chain makes queries"),
    ],
    ids=[
        "together", "four sequences", "17 layers", "one layer", "window", "two tokens", "many sequences", "head dim",
        "group", "implementation", "reduction", "cache", "biases",
    ],
)  # fmt: skip
def test_layers_of_one_token_are_one_launch(
    options, num_tokens, batch, expected, reason, sharding_over, on_one_sm, monkeypatch, caplog
):  # fmt: skip
    monkeypatch.setattr("tree_attn.local.mosaic_gpu.unavailable", lambda: None)
    of_attention = {name: x for name, x in options.items() if name in ("implementation", "reduction")}
    dtype = options.get("dtype", jnp.bfloat16)
    options = {name: x for name, x in options.items() if name not in (*of_attention, "dtype")}
    config = LlamaConfig(**CHAINED | {"num_layers": 2, "head_dim": 64} | options, vocab_size=64, max_position=32)
    sharding = sharding_over(config, 1)
    model = Llama(
        config, sharding, parameters.random(sharding, jnp.bfloat16), unroll_layers=True, products="mosaic_gpu_chain"
    )
    attention = by_name("tree", sharding, **of_attention)
    cache = empty_cache(config, sharding, batch=batch, capacity=32, dtype=dtype, stacks_layers=False)
    decode = jax.jit(lambda tokens: model.decode(tokens, cache, attention)[0])
    with caplog.at_level(logging.INFO, "tree_attn"):
        called = calls_of(decode.trace(jnp.ones((batch, num_tokens), jnp.int32)).jaxpr)
    names = "multiply_few_rows", "multiply_into_cache", "multiply_chain", "run_layers"
    assert [called[name] for name in names] == expected
    assert reason is None or reason in caplog.text
    if num_tokens == 1 and "head_dim" not in options and "num_heads" not in options:  # else planning finds it
        has_whole_layers = expected[:2] == [1, 0]
        assert unrolls_steps(model, cache, attention) == (has_whole_layers and overlaps())
        assert not unrolls_steps(model, cache, attention, prefixes=("one",))


def test_what_cannot_be_a_chain_has_a_reason(on_one_sm, monkeypatch):
    for module in ("few_rows_layout", "few_rows_chain_call"):
        monkeypatch.setattr(f"tree_attn.kernels.{module}.WRITES_IN_PLACE", (0, 10))
    of = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype)
    norm = Norm(scale=of(256), eps=1e-5)
    weights = {"output": of(256, 4, 64), "gate_up": of(2, 512, 256), "down": of(256, 512)}
    one = AfterAttention(attended=of(1, 1, 4, 64), x=of(1, 1, 256), norm=norm, activation="silu", **weights)
    reason = lambda **changes: dataclasses.replace(one, **changes).plan()
    assert not isinstance(reason(), str)
    assert "multiple of 128, not 64" in reason(output=of(256, 1, 64))
    assert "one dtype" in reason(gate_up=of(2, 512, 256, dtype=jnp.float16))
    assert "one dtype" in reason(norm=Norm(scale=of(256, dtype=jnp.float32), eps=1e-5))
    assert "one dtype" in reason(x=of(1, 1, 256, dtype=jnp.float32))
    assert "1 to 16, not 17" in reason(attended=of(17, 1, 4, 64), x=of(17, 1, 256))
    assert "silu, not gelu_tanh" in reason(activation="gelu_tanh")
    heads = NewHeads(
        norm=norm, weights=of(1, 4, 16, 256), key=of(1, 8, 1, 16, dtype=jnp.int8), value=None, slots=None,
        cosine_sine=(None, None),
    )  # fmt: skip
    assert "bfloat16, not int8" in reason(following=heads)
    assert not isinstance(reason(following=dataclasses.replace(heads, key=of(1, 8, 1, 16))), str)
    with pytest.raises(ValueError, match="1 to 16, not 17"):
        dataclasses.replace(one, attended=of(17, 1, 4, 64), x=of(17, 1, 256)).run()
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT")
    assert "lets run at once" in reason()
    monkeypatch.setattr("tree_attn.kernels.few_rows_chain_call.WRITES_IN_PLACE", (99,))
    assert "from JAX 0.11 on" in reason()


def cache_of(lengths=(0, 8, 3), **options):
    """Returns a cache with 8 slots of each sequence, of two layers apart, full of ones."""
    mesh = make_mesh({"seq": 1}, jax.devices()[:1])
    shape = dict(batch=3, capacity=8, num_kv_heads=1, head_dim=16, num_layers=2, mesh=mesh, axis_name="seq")
    cache = KVCache.create(**shape | dict(dtype=jnp.bfloat16, stacks_layers=False) | options)
    return dataclasses.replace(jax.tree.map(jnp.ones_like, cache), lengths=jnp.asarray(lengths, jnp.int32))


def append_arguments():
    branch = branch_of(3, jnp.bfloat16)
    branch = dataclasses.replace(branch, x=branch.x.reshape(3, 1, 64))
    weights = jnp.cos(jnp.arange(4 * 16 * 64.0)).reshape(1, 4, 16, 64).astype(jnp.bfloat16)
    angles = jnp.linspace(0, 5, 3 * 8).reshape(3, 1, 1, 8)
    return branch, weights, (jnp.cos(angles), jnp.sin(angles))


@needs_interpreter
def test_the_product_of_new_tokens_rotates_and_writes_as_xla_does(on_one_sm):
    """A sequence without room stays as it is, and so does the other layer."""
    branch, weights, rotation = append_arguments()
    cache = cache_of()
    with arguments_by_numpy(), interpreted_kernels(), plgpu.force_gpu_interpret_mode():
        query, appended = jax.jit(lambda cache: FewRowsProducts().append(branch, weights, rotation, cache, 1))(cache)
    heads = XlaProducts().project(branch, weights)
    expected = cache.write(apply_rotation(heads[:, :, :, 2], rotation), heads[:, :, :, 3], layer=1)
    expected_query = apply_rotation(heads[:, :, :, :2].reshape(3, 1, 2, 16), rotation)
    is_new = np.asarray(expected.arrays.key[1] != 1)
    assert np.argwhere(is_new.any(axis=(2, 3))).tolist() == [[0, 0], [2, 3]]
    pairs = [(query, expected_query), *zip(jax.tree.leaves(appended), jax.tree.leaves(expected), strict=True)]
    for found, wanted in pairs:
        assert found.shape == wanted.shape
        found, wanted = (np.asarray(x, np.float32) for x in (found, wanted))
        assert abs(found - wanted).max() <= 0.02 * abs(wanted).max()
    np.testing.assert_array_equal(np.asarray(appended.arrays.key[1])[~is_new], 1)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"stacks_layers": True}, "layers that lie apart"),
        ({"dtype": jnp.float8_e4m3fn}, "bfloat16, not float8_e4m3fn"),
        ({"dtype": jnp.int8, "key_scale": jnp.ones((2, 1)), "value_scale": jnp.ones((2, 1))}, "without scales"),
        ({"keeps_value_sum": True}, "keys and values alone"),
        ({"window": 4, "lengths": (0, 1, 2)}, "of all tokens"),
    ],
    ids=str,
)
def test_a_cache_that_the_kernel_cannot_write_is_xlas_with_a_reason(options, reason, caplog, monkeypatch):
    monkeypatch.setattr("tree_attn.kernels.few_rows_layout.WRITES_IN_PLACE", (0, 10))
    branch, weights, rotation = append_arguments()
    assert XlaProducts().append(branch, weights, rotation, cache_of(), 0) is None
    with caplog.at_level(logging.INFO, "tree_attn"):
        assert FewRowsProducts().append(branch, weights, rotation, cache_of(**options), 0) is None
    assert reason in caplog.text


@pytest.mark.parametrize(
    ("dtype", "tokens", "activation", "reason"),
    [("bfloat16", 17, "silu", "not 17"), ("float32", 1, "silu", "not float32"), ("bfloat16", 1, "gelu_tanh", "silu")],
)
def test_what_the_kernel_cannot_multiply_is_xlas_with_a_reason(dtype, tokens, activation, reason, caplog):
    branch = branch_of(tokens, dtype)
    weights = jnp.linspace(-1, 1, 2 * 8 * 64).reshape(2, 8, 64).astype(dtype)
    with caplog.at_level(logging.INFO, "tree_attn"):
        found = FewRowsProducts().gate(branch, activation, weights)
    np.testing.assert_array_equal(found, XlaProducts().gate(branch, activation, weights))
    assert reason in caplog.text


def test_the_head_begins_early_and_shares_no_sm(monkeypatch):
    found = []
    monkeypatch.setattr(few_rows_call, "few_rows_product", lambda x, kernel, **options: found.append(options) or x)
    branch, table = branch_of(1, jnp.bfloat16), jnp.zeros((64, 64), jnp.bfloat16)
    FewRowsProducts(is_early=True).logits(branch, table)
    assert [(options["is_early"], options["shares_sm"]) for options in found] == [(True, False)]


def test_beside_chains_products_of_layers_do_not_read_early(monkeypatch):
    found = []
    monkeypatch.setattr(chained_products, "_run_chained", lambda *arguments: found.append(arguments[-1].products))
    products = ChainedProducts(is_early=True, max_rows=3)
    context = ForwardContext(cosine_sine=None, attend=None, sharding=None, token_axis=None, products=products)
    products.run_layers([], jnp.zeros((3, 1, 64)), None, context)
    assert found == [FewRowsProducts(is_early=False, max_rows=3)]
    x, _ = products.run_layers([], jnp.zeros((4, 1, 64)), None, context)
    assert len(found) == 1 and x.shape == (4, 1, 64), "more rows than it takes"


def test_a_choice_that_cannot_run_is_refused(tiny_config, sharding_over, monkeypatch):
    one = sharding_over(tiny_config, 1)
    two = spread_over(tiny_config, make_mesh({"seq": 2}, jax.devices()[:2]))
    assert product_choice.by_name("xla", two, unrolls_layers=False) == XlaProducts()
    with pytest.raises(ValueError, match=r"products must be None or one of .* got 'cublas'"):
        product_choice.by_name("cublas", one, unrolls_layers=True)
    with pytest.raises(NotImplementedError, match="'mosaic_gpu': mosaic_gpu needs an NVIDIA GPU"):
        product_choice.by_name("mosaic_gpu", one, unrolls_layers=True)
    monkeypatch.setattr(mosaic_gpu, "unavailable", lambda: None)
    other_axes = LlamaSharding(mesh=make_mesh({"data": 2, "seq": 2}, jax.devices()[:4]))
    with pytest.raises(NotImplementedError, match=r"all axes of the mesh, \('seq', 'data'\), got 'seq'"):
        product_choice.by_name("mosaic_gpu", other_axes, unrolls_layers=True)
    with pytest.raises(NotImplementedError, match=r"weights that are cut, and none of .*'heads'"):
        product_choice.by_name("mosaic_gpu", LlamaSharding(mesh=two.mesh), unrolls_layers=True)
    with targets.assumed("8.9"), pytest.raises(NotImplementedError, match="which Hopper GPUs have"):
        product_choice.by_name("mosaic_gpu", one, unrolls_layers=True)
    monkeypatch.setattr("tree_attn.kernels.overlap.overlaps", lambda *_: True)
    chained = lambda **options: product_choice.by_name("mosaic_gpu_chain", one, **options)
    assert chained(unrolls_layers=True) == ChainedProducts(is_early=True)
    assert chained(unrolls_layers=True).name_of(16) == "mosaic_gpu_chain"
    with pytest.raises(NotImplementedError, match="read ahead: unroll_layers must be True"):
        chained(unrolls_layers=False)
    over_two = product_choice.by_name("mosaic_gpu_chain", two, unrolls_layers=True)
    assert over_two == ChainedProductsOfShards(two) and over_two.name_of(1) == "mosaic_gpu_chain"
    monkeypatch.setattr("tree_attn.kernels.overlap.overlaps", lambda *_: False)
    assert chained(unrolls_layers=True) == ChainedProducts(is_early=False)
