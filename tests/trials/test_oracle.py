"""The trials' oracle: values beside another implementation, gradients beside finite differences."""

import numpy as np
import pytest
from dense import dense_attention

from . import oracle

RNG_SHAPES = dict(query=(2, 3, 4, 5), key=(2, 6, 2, 5), value=(2, 6, 2, 3), sinks=(4,), source=(2, 3, 4, 3))


def drawn() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape) for name, shape in RNG_SHAPES.items()}


def seen(window=(3, 1), is_causal=True) -> np.ndarray:
    lengths = np.array([6, 2])
    return oracle.visible(6, lengths, oracle.last_positions(lengths, 3), is_causal=is_causal, window=window)


@pytest.mark.parametrize("cap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 2, (3, 1), (None, 0)])
def test_values_are_those_of_a_dense_implementation(cap, window):
    arrays = {name: x.astype(np.float32) for name, x in drawn().items() if name != "source"}
    exact = oracle.attention(**arrays, sees=seen(window), scale=0.3, cap=cap)
    options = dict(key_value_seq_lengths=np.array([6, 2], np.int32), is_causal=True, scale=0.3, logits_soft_cap=cap)
    out, lse = dense_attention(**arrays, **options, local_window_size=window)
    np.testing.assert_allclose(out, exact.out, atol=1e-5)
    np.testing.assert_allclose(lse, exact.lse, atol=1e-5)


@pytest.mark.parametrize("name", sorted(RNG_SHAPES))
@pytest.mark.parametrize("cap", [None, 0.7])
def test_gradients_are_those_of_finite_differences(name, cap):
    arrays, rng = drawn(), np.random.default_rng(1)

    def state(**changed):
        return oracle.attention(**(arrays | changed), sees=seen(), scale=0.3, cap=cap)

    exact = state()
    of_out, of_lse = rng.normal(size=exact.out.shape), rng.normal(size=exact.lse.shape)
    gradient = exact.gradient(of_out, of_lse)[name]
    if name in ("key", "value"):  # one copy for each query head
        gradient = gradient.reshape(2, 6, 2, 2, -1).sum(3)
    direction = rng.normal(size=arrays[name].shape)
    loss = lambda s: float((s.out * of_out).sum() + np.where(np.isfinite(s.lse), s.lse * of_lse, 0).sum())
    above, below = (state(**{name: arrays[name] + step * direction}) for step in (1e-5, -1e-5))
    assert abs((loss(above) - loss(below)) / 2e-5 - (gradient * direction).sum()) < 1e-6


def test_windows_and_positions_of_any_size():
    whole = oracle.visible(4, [4], [[0]], window=2**40)
    assert whole.all()
    assert not oracle.visible(4, [4], [[2**31 - 1]], window=(2, None)).any()
    assert oracle.visible(4, [4], [[-(2**31)]], window=(0, 2**31 + 1))[0, 0].tolist() == [True, True, False, False]


def test_a_query_that_is_nan_is_seen_in_its_own_rows_only():
    arrays = drawn()
    arrays["query"][0, 1, 2, 3] = np.nan
    exact = oracle.attention(**arrays, sees=seen(), scale=0.3)
    is_nan = np.isnan(exact.lse)
    assert is_nan[0, 1, 2] and is_nan.sum() == 1
