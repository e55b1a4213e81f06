"""The benchmark of products: its bytes, and its steps by both ways, the kernel's in the interpreter."""

import bench_products
import jax
import pytest
from bench_products import Case
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.kernels import few_rows_call, few_rows_chain_call
from tree_attn.kernels.interpreter import interpreted_kernels
from tree_attn.models.llama import LlamaConfig, presets


def test_bytes_are_those_of_all_weights():
    case = lambda part, config="llama-3.1-8b": Case(config=config, part=part, rows=1)
    assert case("query_key_value").weight_bytes == 2 * 4096 * 6144
    assert case("gate_up").weight_bytes == 2 * 4096 * 28672
    assert case("layer").weight_bytes == 2 * 4096 * (6144 + 4096 + 28672 + 14336)
    assert case("head", "llama-3.2-1b").limit_us == pytest.approx(2 * 2048 * 128256 / 4.8e6)
    assert case("output").copies == 6  # 34 MB each: 200 MB


@pytest.mark.parametrize("part", ["head", "query_key_value"])
def test_a_product_is_made_whole_before_it_is_cut(part):
    case = Case(config="llama-3.2-1b", part=part, rows=1)
    of = lambda *size: jax.ShapeDtypeStruct(size, "bfloat16")
    (product,) = case.products
    weights = of(1, product.out_features, product.in_features), of(product.in_features)
    program = str(jax.make_jaxpr(case.step("xla", {}))(of(1, product.in_features), weights))
    assert program.index("dot_general") < program.index("optimization_barrier") < program.rindex("slice")


def test_arguments_name_cases_and_layouts():
    assert bench_products.runs(["xla", "few_rows"], "num_stages=4,") == [
        ("xla", ""), ("few_rows", "num_stages=4"), ("few_rows", ""),
    ]  # fmt: skip
    assert bench_products.parse_layout("num_stages=4+block_in=128") == {"num_stages": 4, "block_in": 128}
    assert bench_products.parse_layout("") == {}


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="runs with JAX 0.11 or newer, whose interpreter knows transposed operands"
)
@pytest.mark.parametrize("part", ["gate_up", pytest.param("layer", marks=pytest.mark.slow)])
def test_steps_agree(part, monkeypatch):
    config = LlamaConfig(
        num_layers=1, hidden_size=128, intermediate_size=256, num_heads=16, num_kv_heads=1, head_dim=16, vocab_size=64,
        max_position=32,
    )  # fmt: skip
    monkeypatch.setattr(presets, "preset", lambda name: config)
    monkeypatch.setattr(few_rows_call, "num_sms", lambda: 1)
    monkeypatch.setattr(few_rows_chain_call, "num_sms", lambda: 1)
    case = Case(config="tiny", part=part, rows=2)
    assert bench_products.check(case, "xla", "")
    with interpreted_kernels(), plgpu.force_gpu_interpret_mode():
        assert bench_products.check(case, "few_rows", "")
        if part == "layer":
            assert bench_products.check(case, "chain", "")
