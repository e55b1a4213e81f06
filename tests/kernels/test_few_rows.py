"""The kernel for products of few rows, in Mosaic GPU's interpreter, and its layouts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_same_bits
from few_rows_cases import ADDED, GATED, H200_SMS, LLAMA_1B, LLAMA_8B, NORMED, Product
from lean_interpreter import has_race, interpreter, needs_interpreter
from test_lean_races import mutant

from tree_attn.kernels import few_rows, few_rows_ring
from tree_attn.kernels.few_rows_layout import check_fits, few_rows_config, unsupported

pytestmark = pytest.mark.usefixtures("time_limit")

STACKED = {"stack": 2, "block_in": 64, "num_stages": 2}
PRODUCTS = [
    Product(),  # the last of three CTAs has fewer out-features than its tile
    Product(rows=3, options=NORMED),
    Product(rows=8, in_features=64, out_features=8, options=ADDED),  # one CTA, one block
    Product(rows=9, in_features=320, options=NORMED | {"adds_one": True}),
    Product(rows=16, out_features=400, ctas=2, options=NORMED | GATED | ADDED),  # several tiles for each CTA
    Product(rows=5, out_features=1000, ctas=2, options={"out_dtype": "float32"}),
    Product(rows=2, dtype="float16", options=ADDED),
    Product(
        rows=2, in_features=512, out_features=200, layout={"tile": 16, "tiles": 5, "num_stages": 2, "block_in": 64}
    ),
    Product(is_early=True, options=GATED),
    Product(rows=3, in_features=512, options=NORMED | GATED | ADDED, ctas=6, layout=STACKED),
    Product(rows=9, in_features=512, out_features=72, ctas=5, layout=STACKED | {"tile": 16, "stack": 4}),
]


def interpreted(product: Product):
    with interpreter() as found:
        result = jax.block_until_ready(jax.jit(product.run)(*product.inputs()))
    assert [races.races_found for races in found] == [False]
    return result


@needs_interpreter
@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_it_is_exact_and_has_no_race(product):
    result, expected, shape = interpreted(product), product.expected(), product.shape
    assert (result.shape, result.dtype) == (expected.shape, shape.out_dtype)
    rounding = lambda dtype: float(jnp.finfo(dtype).eps)
    # The result is rounded once; and so is x after its norm's scale.
    relative = max(rounding(shape.out_dtype), 1e-6) + (2 * rounding(shape.dtype) if shape.eps else 0)
    assert np.abs(np.asarray(result, np.float64) - expected).max() <= relative * np.abs(expected).max()


@needs_interpreter
def test_two_runs_agree_to_the_bit():
    assert_same_bits(interpreted(PRODUCTS[1]), interpreted(PRODUCTS[1]))


@needs_interpreter
def test_rows_do_not_reach_one_another():
    """NaN in one row is in no other's result."""
    product = Product(rows=3, options=NORMED | GATED)
    x, *others = product.inputs()
    with interpreter():
        result = np.asarray(jax.jit(product.run)(x.at[1].set(jnp.nan), *others))
    assert np.isnan(result[1]).all()
    np.testing.assert_array_equal(result[::2], np.asarray(interpreted(product))[::2])


# All 64 rows of the tensor core are a tile's own: the race detector would take others for read too early.
WHOLE = Product(in_features=512, out_features=256, layout={"tile": 64, "tiles": 2, "num_ctas": 2, "block_in": 64})


@needs_interpreter
@pytest.mark.usefixtures("watched_products")
@pytest.mark.parametrize("options", [{}, NORMED | GATED], ids="+".join)
def test_operands_are_there_when_they_are_multiplied_and_stay_until_they_have_been(options):
    interpreted(Product(rows=2, in_features=512, out_features=256, options=options, layout=WHOLE.layout))


@needs_interpreter
@pytest.mark.usefixtures("watched_products")
@pytest.mark.parametrize("barrier", ["barriers.at[self.stage(step)]", "self.free.at[self.stage(step)]"])
def test_a_wait_that_is_left_out_is_found(barrier, monkeypatch):
    monkeypatch.setattr(few_rows, "Ring", mutant(few_rows_ring, f"plgpu.barrier_wait({barrier})").Ring)
    assert has_race(WHOLE, or_is_unawaited=True)  # whichever thread comes first


MODELS = [(1, shape) for shape in (*LLAMA_1B, *LLAMA_8B)] + [(16, shape) for shape in LLAMA_8B]


@pytest.mark.parametrize("is_early, shares_sm", [(False, None), (True, None), (True, False)])
@pytest.mark.parametrize(("rows", "shape"), MODELS, ids=str)
def test_work_is_even_and_enough_is_in_flight(rows, shape, is_early, shares_sm):
    in_features, out_features, options = shape
    product = Product(rows=rows, in_features=in_features, out_features=out_features, options=options, ctas=H200_SMS)
    shape, config = product.shape, few_rows_config(product.shape, H200_SMS, is_early, shares_sm)
    check_fits(shape, config)
    assert config.shares_sm == (is_early and shares_sm is None)
    of_cta = config.tile * config.tiles
    assert (config.num_ctas - 1) * of_cta < out_features <= config.num_ctas * of_cta
    assert out_features / H200_SMS >= 0.96 * of_cta
    in_flight = config.num_stages * shape.parts * config.stacked * config.block_in * shape.dtype.itemsize
    assert in_flight * (2 if config.shares_sm else 1) >= 64 * 1024  # of weights, for an SM


@pytest.mark.parametrize("is_early", [False, True])
def test_every_shape_that_is_supported_has_a_layout_that_fits(is_early):
    rng = np.random.default_rng(7)
    for _ in range(3000):
        options = [{}, NORMED, ADDED, NORMED | GATED, NORMED | {"out_dtype": "float32"}][rng.integers(5)]
        sizes = {"in_features": 64 * int(2 ** rng.uniform(0, 8)), "out_features": 8 * int(2 ** rng.uniform(0, 14))}
        product = Product(rows=int(rng.integers(1, 17)), options=options, **sizes)
        sms = int(rng.choice([16, 78, 114, 132]))
        check_fits(product.shape, few_rows_config(product.shape, sms, is_early))


@pytest.mark.parametrize("rows, block_in", [(5, 128), (1, 64)])
def test_x_is_padded_where_the_kernel_needs_it(rows, block_in):
    product = Product(rows=rows, layout={"block_in": block_in})
    message = "config.is_compact takes up to 4 rows, and blocks of 128 in-features or more, "
    with pytest.raises(ValueError, match=f"{message}got {rows} rows and {block_in} in-features"):
        check_fits(product.shape, dataclasses.replace(product.config, is_compact=True))


def test_small_tiles_fill_the_tensor_core_by_stacked_blocks():
    """Llama 3.2 1B's output and down products have such tiles; larger ones were not measured stacked."""
    stack_of = lambda i, o, options, **more: (
        Product(in_features=i, out_features=o, options=options, ctas=H200_SMS, **more).config.stack
    )
    assert [stack_of(*shape) for shape in LLAMA_1B] == [1, 4, 1, 4, 1]
    assert [stack_of(*shape) for shape in LLAMA_8B] == [1] * 5
    assert stack_of(8192, 1024, ADDED) == 8  # tiles of 8
    assert stack_of(8192 + 128, 2048, ADDED) == 1  # blocks of a stage do not divide the in-features


def test_a_layout_that_does_not_fit_is_refused():
    product = Product()
    for layout, reason in (
        ({"num_ctas": 2}, "tiles that cover"),
        ({"num_stages": 200}, "bytes of shared memory"),
        ({"num_stages": 2}, "no more stages than"),
    ):
        with pytest.raises(ValueError, match=reason):
            dataclasses.replace(product, layout=layout).run(*product.inputs())


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ((1, 4096, 4096, "bfloat16", "silu"), None),
        ((17, 4096, 4096, "bfloat16"), "1 to 16, not 17"),
        ((1, 4096, 4096, "float32"), "bfloat16 and float16, not float32"),
        ((1, 4096, 4000, "bfloat16"), "not 4000 and 4096"),
        ((1, 100, 4096, "bfloat16"), "not 4096 and 100"),
        ((1, 4096, 4096, "bfloat16", "gelu_tanh"), "silu, not gelu_tanh"),
    ],
)
def test_what_it_cannot_multiply_has_a_reason(call, reason):
    found = unsupported(*call)
    assert found is None if reason is None else reason in found


def test_a_norm_in_float16_has_a_reason():
    assert unsupported(1, 4096, 4096, "float16") is None
    assert "norm in bfloat16, not float16" in unsupported(1, 4096, 4096, "float16", has_norm=True)
