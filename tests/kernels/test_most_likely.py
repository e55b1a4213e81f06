"""The most likely token, by a warpgroup's threads in NumPy, against NumPy's own."""

import types

import jax.numpy as jnp
import mma_threads
import numpy as np
import pytest

from tree_attn.kernels import most_likely
from tree_attn.kernels.interpreter import interpreted_kernels
from tree_attn.models.llama.generation import sampling

THREADS = mma_threads.THREADS


def value(number, kind: str = "i32"):
    return mma_threads.Value(kind, np.full(THREADS, number, mma_threads.DTYPES[kind]))


def joined_by_cta(memory, logits, cta: int):
    """Returns what a CTA finds of float32 `[V]`: the same three numbers of all threads."""

    def read(token):
        at = token.array[:, None] + np.arange(most_likely.AT_ONCE)
        return [mma_threads.Value("f32", column) for column in logits[at].T]

    elements = most_likely.logits_of_thread(read, value(cta * most_likely.OF_CTA), len(logits))
    return most_likely.join(elements, value(memory.allocate(4 * most_likely.WORDS)))


def joined(memory, logits):
    """Returns token, largest logit and sum of float32 `[V]`, as the last CTA finds them."""
    num_ctas = -(-len(logits) // most_likely.OF_CTA)
    of_ctas = [joined_by_cta(memory, logits, cta) for cta in range(num_ctas)]
    for of_cta in of_ctas:
        assert all(len(np.unique(x.array)) == 1 for x in of_cta), "all threads have the same"
    # A thread has one CTA's; those beyond the last read the last one's, which they drop.
    nearest = np.minimum(np.arange(THREADS), num_ctas - 1)
    at = [mma_threads.Value(xs[0].kind, np.array([x.array[0] for x in xs])[nearest]) for xs in zip(*of_ctas)]
    is_one = mma_threads.Value("i1", np.arange(THREADS) < num_ctas)
    found = most_likely.join([most_likely.only_if(is_one, tuple(at))], value(memory.allocate(4 * most_likely.WORDS)))
    largest, total, token = (x.array[0] for x in found)
    return token, largest, total


@pytest.mark.parametrize("vocab_size", [4, 2048, 2052, 128256])
@pytest.mark.parametrize("special", [None, "equal", 1e4, -np.inf, np.inf, np.nan])
def test_threads_find_the_first_of_the_largest_and_the_sum(memory, vocab_size, special):
    rng = np.random.default_rng(vocab_size)
    logits = rng.normal(size=vocab_size).astype(np.float32) * 3
    if special == "equal":
        logits = np.round(logits)
    elif special == 1e4:
        logits += np.float32(special)
    elif special == -np.inf:
        logits[:] = special
    elif special is not None:
        logits[rng.choice(vocab_size, 2, replace=False)] = special
        logits[rng.integers(vocab_size)] = np.inf
    with np.errstate(invalid="ignore"):
        token, largest, total = joined(memory, logits)
        expected = np.exp(logits.astype(np.float64) - largest).sum()
    assert token == logits.argmax()
    np.testing.assert_array_equal(largest, logits[token])
    if np.isfinite(largest):
        np.testing.assert_allclose(total, expected, rtol=1e-6)


def test_the_sampler_takes_what_the_kernel_finds(monkeypatch):
    logits = jnp.array([[0.0, 2.0, 1.0, 2.0], [1.0, np.nan, 5.0, np.inf]])
    found = jnp.array([1, 1]), jnp.array([2.0, np.nan]), jnp.array([2.5, 7.0])
    calls = []
    fake = types.SimpleNamespace(unsupported=lambda *_: None, most_likely=lambda x: calls.append(x.shape) or found)
    monkeypatch.setattr("tree_attn.kernels.most_likely", fake)
    for num_shards, by_kernel in ((1, False), (2, True)):
        sampling.next_tokens(logits, sampling.Sampling(), None, num_shards, by_kernel=by_kernel)
    assert not calls
    tokens, log_p = sampling.next_tokens(logits, sampling.Sampling(), None, by_kernel=True)
    assert calls == [(2, 4)] and tokens.tolist() == [1, 1]
    np.testing.assert_allclose(log_p, [-np.log(2.5), np.nan])


@pytest.mark.parametrize(
    "shape, dtype, reason",
    [
        ((1, 128256), "bfloat16", "logits are float32, not bfloat16"),
        ((1, 49153), "float32", "a multiple of 4, up to 262144, not 49153"),
        ((1, 262148), "float32", "a multiple of 4, up to 262144, not 262148"),
        ((1, 128256), "float32", "the interpreter has no atomics"),
    ],
)
def test_other_logits_are_refused(shape, dtype, reason):
    with interpreted_kernels():
        assert reason in most_likely.unsupported(shape, dtype)


def test_kernels_that_may_run_at_once_do_not_count(monkeypatch):
    assert most_likely.unsupported((1, 4), "float32") is None
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT")
    assert "lets run at once" in most_likely.unsupported((1, 4), "float32")
