"""The product of query, key and value that ends in rotation and the cache's write, in Mosaic GPU's interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_same_bits
from few_rows_cases import H200_SMS, Append, compiled_appends
from lean_interpreter import interpreter, needs_interpreter

from tree_attn.kernels.few_rows_layout import check_fits, few_rows_config, unsupported_cache

pytestmark = pytest.mark.usefixtures("time_limit")

APPENDS = [
    Append(),  # two tiles of a CTA, of 24 pairs: they cross heads of 16
    Append(batch=3, tokens=2, kv_heads=1, group=3, head_dim=16, in_features=256, ctas=4),
    Append(batch=2, kv_heads=1, group=1, head_dim=48, in_features=64, ctas=5, adds_one=True),
    Append(batch=9, kv_heads=1, group=1, head_dim=16, in_features=64, ctas=1, is_early=True),
]


def interpreted(append: Append, inputs=None):
    with interpreter() as found:
        result = jax.block_until_ready(jax.jit(append.run)(*(inputs or append.inputs())))
    assert [races.races_found for races in found] == [False]
    return result


@needs_interpreter
@pytest.mark.parametrize("append", APPENDS, ids=str)
def test_it_is_exact_and_has_no_race(append):
    *_, key, value = append.inputs()
    for found, expected, before in zip(interpreted(append), append.expected(), (None, key, value), strict=True):
        assert (found.shape, found.dtype) == (expected.shape, jnp.dtype(append.dtype))
        error = np.abs(np.asarray(found, np.float64) - expected).max()
        assert error <= 3 * float(jnp.finfo(append.dtype).eps) * np.abs(expected).max()
        if before is not None:  # slots that are no token's keep their bits
            is_old = expected == np.asarray(before, np.float64)
            np.testing.assert_array_equal(np.asarray(found)[is_old], np.asarray(before)[is_old])


@needs_interpreter
def test_two_runs_agree_to_the_bit():
    assert_same_bits(interpreted(APPENDS[0]), interpreted(APPENDS[0]))


@needs_interpreter
def test_nothing_is_written_to_slots_that_are_not_there():
    append = Append(batch=2, kv_heads=1, group=1)
    x, weights, scale, angles, slots, key, value = append.inputs()
    beyond = jnp.asarray([-1, append.slots] * 4, slots.dtype)
    _, *caches = interpreted(append, [x, weights, scale, angles, beyond, key, value])
    assert_same_bits(caches, [key, value])


@needs_interpreter
def test_a_value_takes_nothing_from_its_partner():
    """Values are not rotated: NaN in one feature stays there."""
    append = Append(kv_heads=1, group=1)
    inputs = append.inputs()
    first = append.head_dim * 2  # of the value's features
    inputs[1] = inputs[1].at[0, first].set(jnp.nan)
    query, key, value = interpreted(append, inputs)
    assert not np.isnan(np.asarray(query)).any() and not np.isnan(np.asarray(key)).any()
    assert np.argwhere(np.isnan(np.asarray(value)))[:, -1].tolist() == [0]


@pytest.mark.parametrize("append", compiled_appends(), ids=str)
def test_tiles_are_whole_pairs_and_fit(append):
    """Each CTA has 8 features of one half of a head with 8 of the other; the 1B leaves 36 of 132 SMs idle so."""
    shape, config = append.shape, few_rows_config(append.shape, H200_SMS, append.is_early)
    check_fits(shape, config)
    assert config.tile % 16 == 0
    assert config.tile * config.tiles * config.num_ctas == shape.out_features
    assert config.num_ctas == (128 if append.head_dim == 128 else 96)


def test_caches_that_it_cannot_write_have_a_reason(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11))
    assert unsupported_cache(128, "bfloat16", "bfloat16") is None
    assert "multiple of 16, not 40" in unsupported_cache(40, "bfloat16", "bfloat16")
    assert "bfloat16, not float8_e4m3fn" in unsupported_cache(128, "bfloat16", "float8_e4m3fn")
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert "from JAX 0.11 on" in unsupported_cache(128, "bfloat16", "bfloat16")
