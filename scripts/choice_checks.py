"""The most likely token of random and of special logits, by the kernel beside NumPy in float64, for gpu_check.py."""

from collections.abc import Iterator

import numpy as np

# Of the sum of exp(logit - largest): exponents are rounded, and added up by threads.
TOLERANCE = 1e-5
SHAPES = ((1, 4), (3, 2052), (2, 49152), (1, 128256), (4, 128256), (1, 262144))
VALUES = ("normal", "equal ones", "near 1e4", "minus infinity", "infinity", "NaN")


def choice_checks() -> Iterator[dict]:
    """Checks tokens, largest logits and sums; each is computed twice."""
    import jax
    import jax.numpy as jnp

    from tree_attn.kernels import most_likely

    for batch, vocab_size in SHAPES:
        for values in VALUES:
            labels = dict(what="choice", implementation="mosaic_gpu", batch=batch, vocab_size=vocab_size, values=values)
            reason = most_likely.unsupported((batch, vocab_size), jnp.float32)
            if reason is not None:
                yield labels | dict(passed=None, reason=reason)
                continue
            logits = drawn(values, batch, vocab_size)
            found, again = (jax.device_get(most_likely.most_likely(jnp.asarray(logits))) for _ in range(2))
            tokens, largest, sums = expected(logits)
            right = bool(np.array_equal(found[0], tokens) and np.array_equal(found[1], largest, equal_nan=True))
            finite = np.isfinite(largest)
            error = float(np.max(np.abs(found[2] / sums - 1)[finite], initial=0.0))
            same = all(np.array_equal(x, y, equal_nan=True) for x, y in zip(found, again, strict=True))
            passed = right and same and error <= TOLERANCE
            row = dict(right_tokens=right, max_relative_error=error, tolerance=TOLERANCE, same_bits=same)
            yield labels | row | dict(passed=passed)


def drawn(values: str, batch: int, vocab_size: int) -> np.ndarray:
    """Returns float32 logits `[batch, vocab_size]`."""
    rng = np.random.default_rng(vocab_size)
    logits = rng.normal(size=(batch, vocab_size)).astype(np.float32) * 3
    if values == "equal ones":
        return np.round(logits)
    if values == "near 1e4":
        return logits + np.float32(1e4)
    special = {"minus infinity": -np.inf, "infinity": np.inf, "NaN": np.nan}
    if values == "minus infinity":
        logits[0] = -np.inf
    elif values in special:
        logits[:, rng.choice(vocab_size, 2, replace=False)] = special[values]
        logits[:, rng.integers(vocab_size)] = np.inf
    return logits


def expected(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns tokens, largest logits, and sums in float64."""
    tokens = logits.argmax(axis=-1)  # of NaN the first, if there is one
    largest = np.take_along_axis(logits, tokens[:, None], axis=-1)
    with np.errstate(invalid="ignore"):
        sums = np.exp(logits.astype(np.float64) - largest).sum(axis=-1)
    return tokens.astype(np.int32), largest[:, 0], sums
