"""The energy view: attention is the gradient of F, the covariance of the values its Hessian, on one device or many."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tree_attn import make_mesh, reference
from tree_attn.energy_function import attention_moments, energy

B, T, N, K, H, S = 2, 3, 4, 2, 5, 24


def _arrays(logit_size=1.0):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return logit_size * draw(B, T, N, H), draw(B, S, K, H), draw(B, S, K, H)


def _oracle_moments(query, key, value, lengths):
    """Mean, covariance and third cumulant of the values in float64, one query at a time."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    shape = (B, T, N)
    mean, cov, third = np.zeros((*shape, H)), np.zeros((*shape, H, H)), np.zeros((*shape, H, H, H))
    for b, t, n in np.ndindex(shape):
        sees = np.arange(S) < min(lengths[b], lengths[b] - T + t + 1)
        v, logits = value[b, sees, n // (N // K)], key[b, sees, n // (N // K)] @ query[b, t, n] * H**-0.5
        weights = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        mean[b, t, n] = weights @ v
        centred = v - mean[b, t, n]
        cov[b, t, n] = np.einsum("s,si,sj->ij", weights, centred, centred)
        third[b, t, n] = np.einsum("s,si,sj,sk->ijk", weights, centred, centred, centred)
    return mean, cov, third


def test_energy_is_the_log_sum_exp_of_the_tilted_logits():
    query, key, value = _arrays()
    zeta = jnp.asarray(np.random.default_rng(1).normal(size=query.shape), jnp.float32)
    tilted_key = np.concatenate([key, value], -1)
    tilted_query = np.concatenate([np.asarray(query) * H**-0.5, zeta], -1)
    _, expected = reference.attention(tilted_query, tilted_key, value, scale=1.0)
    np.testing.assert_allclose(energy(query, key, value, zeta), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_devices", [None, 3, 8])
def test_gradient_is_attention_and_higher_derivatives_are_cumulants(num_devices):
    query, key, value = _arrays()
    lengths = np.array([S - 1, 7], np.int32)
    options = dict(key_value_seq_lengths=lengths, is_causal=True)
    if num_devices:
        options |= dict(axis_name="seq", mesh=make_mesh({"seq": num_devices}), block_size=None)
    gradient = jax.jit(jax.grad(lambda zeta: energy(query, key, value, zeta, **options).sum()))(jnp.zeros_like(query))
    out, _ = reference.attention(query, key, value, key_value_seq_lengths=lengths, is_causal=True)
    np.testing.assert_allclose(gradient, out, rtol=1e-5, atol=1e-6)

    moments = jax.jit(lambda q, k, v: attention_moments(q, k, v, order=3, **options))(query, key, value)
    for moment, expected in zip(moments, _oracle_moments(query, key, value, lengths), strict=True):
        np.testing.assert_allclose(moment, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_devices", [None, 3])
def test_safe_softmax_huge_logits_and_queries_that_see_nothing(num_devices):
    query, key, value = _arrays(logit_size=1e4)
    sinks = jnp.linspace(-1.0, 1.0, N)
    options = dict(key_value_seq_lengths=np.array([S, 0], np.int32))
    if num_devices:
        options |= dict(axis_name="seq", mesh=make_mesh({"seq": num_devices}), block_size=None)
    at_zero = jax.jit(lambda z, sinks: energy(query, key, value, z, sinks=sinks, **options))
    value_of_f = at_zero(jnp.zeros_like(query), None)
    assert np.all(np.isneginf(value_of_f[1])) and np.all(np.isfinite(value_of_f[0]))
    gradient = jax.jit(jax.grad(lambda z: at_zero(z, None)[0].sum()))(jnp.zeros_like(query))
    out, _ = reference.attention(query, key, value)
    np.testing.assert_allclose(gradient[0], out[0], rtol=1e-5, atol=1e-5)
    assert np.all(gradient[1] == 0)
    with_sinks = at_zero(jnp.zeros_like(query), sinks)
    np.testing.assert_allclose(with_sinks[1], np.broadcast_to(sinks, (T, N)), rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-6, 1e-38, 1e-3, None, 1e5], ids=str)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_neither_a_small_scale_nor_a_narrow_dtype_overflows(dtype, scale):
    query, key, value = (x.astype(dtype) for x in _arrays())
    zeta = jnp.asarray(np.random.default_rng(1).normal(size=query.shape) * 10, dtype)
    tilted_key = np.concatenate([key, value], -1).astype(np.float64)
    factor = H**-0.5 if scale is None else scale
    tilted_query = np.concatenate([np.asarray(query, np.float64) * factor, np.asarray(zeta, np.float64)], -1)
    _, expected = reference.attention(tilted_query, tilted_key, np.asarray(value), scale=1.0)
    np.testing.assert_allclose(energy(query, key, value, zeta, scale=scale), expected, rtol=1e-5, atol=1e-5)
    gradient = jax.grad(lambda zeta: energy(query, key, value, zeta, scale=scale).sum())(jnp.zeros_like(query))
    out, _ = reference.attention(query, key, value, scale=factor)
    np.testing.assert_allclose(gradient.astype(np.float32), out, rtol=2**-7, atol=2**-9)


def test_sharded_energy_crosses_the_devices_with_one_max_and_one_sum():
    query, key, value = _arrays()
    mesh = make_mesh({"seq": 8})
    f = jax.jit(lambda q, k, v, z: energy(q, k, v, z, axis_name="seq", mesh=mesh))
    text = f.lower(query, key, value, jnp.zeros_like(query)).compile().as_text()
    assert text.count(" all-reduce(") == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q, k, v: energy(q, k, v, q[:, :1]), r"source must have shape .*got \(2, 1, 4, 5\)"),
        (
            lambda q, k, v: energy(q, k, v, q.astype(jnp.bfloat16)),
            r"source must have query's dtype float32, got bfloat16",
        ),
        (lambda q, k, v: energy(q, k, v, q, scale=0), r"scale must not be 0"),
        (lambda q, k, v: attention_moments(q, k, v, order=0), r"order must be an integer from 1 to 4, got 0"),
    ],
)
def test_wrong_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call(*_arrays())
