"""A chain of products of few rows in one launch: in Mosaic GPU's interpreter, and its layouts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from few_rows_cases import H200_SMS, Chain, compiled_chains
from lean_interpreter import interpreter, needs_interpreter

from tree_attn.kernels import few_rows_chain
from tree_attn.kernels.few_rows_chain_layout import chain_bytes, chain_configs, num_ctas
from tree_attn.kernels.targets import SMEM_BYTES_PER_SM

pytestmark = pytest.mark.usefixtures("time_limit")

CHAINS = [
    Chain(),
    Chain(rows=3, ctas=5, intermediate=1024, adds_one=True),
    Chain(rows=9, hidden=512, ctas=2),
    Chain(rows=3, heads=(1, 2, 32)),
]


@needs_interpreter
@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_products_of_its_layouts_are_exact_and_have_no_race(chain):
    """The interpreter has no atomics: each product is a launch of its own."""
    with interpreter() as found:
        results = jax.block_until_ready(jax.jit(chain.run)(*chain.inputs()))
    assert [races.races_found for races in found] == [False] * len(chain.shapes)
    results = results if isinstance(results, tuple) else (results,)
    for result, expected in zip(results, chain.expected(), strict=True):
        assert (result.shape, result.dtype) == (expected.shape, jnp.bfloat16)
        # Rounding may differ at each product: the float64 product of rounded inputs, and the kernel's float32.
        error = np.abs(np.asarray(result, np.float64) - expected).max()
        assert error <= 4 * float(jnp.finfo(jnp.bfloat16).eps) * np.abs(expected).max()


RINGS = [
    Chain(intermediate=256),
    Chain(intermediate=1024, ctas=5, smem_bytes=100 * 1024),  # few stages; tiles of several steps
    Chain(intermediate=256, ctas=20),  # products have CTAs of different numbers
    Chain(rows=9, ctas=4, smem_bytes=150 * 1024),
    Chain(rows=2, intermediate=256, ctas=4, heads=(1, 2, 16)),
]


@needs_interpreter
@pytest.mark.parametrize("chain", RINGS, ids=str)
def test_products_follow_one_another_in_one_ring(chain, monkeypatch):
    """In one launch, where no product takes another's result, so that CTAs need not meet."""
    products, shapes, configs = chain.products, chain.shapes, chain.configs
    _, residual, weights, scales, heads = chain.inputs()
    inputs = [product.inputs()[0] for product in (*products, chain.append) if product is not None]
    monkeypatch.setattr(few_rows_chain, "await_all", lambda *_: None)
    monkeypatch.setattr(few_rows_chain, "arrive", lambda *_: [jnp.int32(-1)])
    monkeypatch.setattr(few_rows_chain, "reset", lambda *_: None)

    def refs_of(named, outputs, shapes):
        return [
            {"x": named["x" if number == 0 else f"x {number}"], "weights": named[f"weights {number}"]}
            | {"scale": named.get(f"scale {number}"), "residual": named["residual"]}
            | {name: named.get(name) for name in few_rows_chain.HEADS}
            for number in range(len(shapes))
        ]

    monkeypatch.setattr(few_rows_chain, "refs_of", refs_of)
    more = {f"x {number}": x for number, x in enumerate(inputs) if number > 0}

    def launch(x, *arrays):
        if heads is None:
            return few_rows_chain._launch(x, *arrays, shapes, configs, **more)
        *places, key, value = heads
        caches = jax.new_ref(key), jax.new_ref(value)
        named = dict(zip(few_rows_chain.HEADS, (*places, *caches), strict=True))
        results = few_rows_chain._launch(x, *arrays, shapes, configs, **more, **named)
        return *results, *map(jax.freeze, caches)

    with interpreter() as found:
        results = jax.block_until_ready(jax.jit(launch)(inputs[0], residual, weights, scales))
    assert [races.races_found for races in found] == [False]
    wanted = []
    for number, product in enumerate(products):
        added = residual if product.shape.has_residual else None
        wanted.append(product.expected((inputs[number], weights[number], scales[number], added)))
    if heads is not None:
        wanted += chain.append.expected((inputs[-1], weights[-1], scales[-1], *heads))
    for result, expected in zip(results, wanted, strict=True):
        error = np.abs(np.asarray(result[: len(expected)], np.float64) - expected).max()
        assert error <= 4 * float(jnp.finfo(jnp.bfloat16).eps) * np.abs(expected).max()


@pytest.mark.parametrize("chain", compiled_chains(), ids=str)
def test_a_stage_of_one_product_is_a_stage_of_the_next(chain):
    configs = chain.configs
    assert {(config.num_stages, config.block_in, config.rows) for config in configs} == {
        (configs[0].num_stages, 128, 128)
    }
    assert chain_bytes(chain.shapes, configs) <= SMEM_BYTES_PER_SM - 1024
    assert configs[0].num_stages * 32 * 1024 >= 128 * 1024, "of weights on their way, for an SM"
    assert num_ctas(configs) <= H200_SMS
    for shape, config in zip(chain.shapes, configs, strict=True):
        assert config.tile * config.tiles * config.num_ctas >= shape.out_features
        assert shape.parts * config.slabs * config.stacked <= 128


def test_what_has_no_layout_has_a_reason():
    assert "multiple of 256, not 320" in chain_configs(Chain(num_features=320).shapes, 3)
    assert "a chain needs 2 stages" in chain_configs(Chain().shapes, 3, 50 * 1024)
