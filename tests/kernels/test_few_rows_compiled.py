"""Products of few rows, compiled ahead of time for Hopper: no register is spilled, and CTAs fit an SM."""

import pytest
from few_rows_cases import (
    compiled_appends,
    compiled_chains,
    compiled_layers,
    compiled_products,
    compiled_several,
    more_compiled_products,
    more_compiled_several,
)
from test_lean_compiled import assert_fits, of_variants, pytestmark, report_of  # noqa: F401

MAX_REGISTERS = 128  # with which two CTAs of 256 threads fit an SM


@pytest.fixture(scope="module")
def compiled():
    return report_of("compile_few_rows.py")


@pytest.fixture(scope="module")
def more_compiled():
    return report_of("compile_few_rows.py", "more")


@pytest.mark.parametrize(
    "fixture, product", of_variants([*compiled_products(), *compiled_appends()], more_compiled_products()), ids=str
)
def test_it_spills_no_register_and_its_ctas_fit(fixture, product, request):
    ctas_per_sm, kernels, *_ = request.getfixturevalue(fixture)[str(product)]
    assert_fits("few_rows", kernels["few_rows"], ctas_per_sm)
    assert kernels["few_rows"][0] <= MAX_REGISTERS


@pytest.mark.parametrize("chain", compiled_chains(), ids=str)
def test_a_chain_spills_no_register(chain, compiled):
    ctas_per_sm, kernels, *_ = compiled[str(chain)]
    registers, spilled = kernels["few_rows_chain"]
    assert (ctas_per_sm, spilled) == (1, 0)
    assert registers <= (112 if chain.rows <= 8 else 136)


@pytest.mark.parametrize("layer", compiled_layers(), ids=str)
def test_a_layer_spills_no_register(layer, compiled):
    """Three warpgroups of a CTA have up to 168 registers a thread."""
    ctas_per_sm, kernels, *_ = compiled[str(layer)]
    assert (ctas_per_sm, kernels["few_rows_chain"][1]) == (1, 0)


@pytest.mark.parametrize("fixture, several", of_variants(compiled_several(), more_compiled_several()), ids=str)
def test_several_layers_spill_no_register(fixture, several, request):
    """In a loop the compiler would hold in registers what is alike in all layers, for there is room for it."""
    ctas_per_sm, kernels, *_ = request.getfixturevalue(fixture)[str(several)]
    assert (ctas_per_sm, kernels["few_rows_layers"][1]) == (1, 0)
