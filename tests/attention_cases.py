"""The calls that every attention function must get right: arrays to draw, and one table of options."""

import dataclasses

import jax.numpy as jnp
import numpy as np

BATCH, KEYS, HEAD_DIM = 2, 37, 8  # a number of keys that no shard, chunk or tile divides
SINKS = np.array([0.5, -1.0, 30.0, 0.0], np.float32)  # one that outweighs every key
HEAD_SCALES = {"key_scale": np.array([0.3, 1.7], np.float32), "value_scale": np.array([5.1, 0.2], np.float32)}


def rounded(x: np.ndarray, dtype):
    """Returns an array of JAX that NumPy has rounded: XLA would compile that for each shape."""
    return jnp.asarray(x.astype(jnp.dtype(dtype)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call: how many queries and heads, and the options. Lengths are passed apart, since they are traced."""

    queries: int = 3
    heads: int = 4
    kv_heads: int = 2
    value_dim: int = HEAD_DIM
    keys: int = KEYS
    logit_size: float = 1.0
    dtype: str = "float32"
    stored_dtype: str | None = None  # of key and value, where it is not the query's
    options: dict = dataclasses.field(default_factory=dict)

    def arrays(self, seed: int = 0):
        """Draws query, key and value; `logit_size` is the standard deviation of the logits at the default scale."""
        rng = np.random.default_rng(seed)
        draw = lambda *shape, size=1.0, dtype=self.stored_dtype or self.dtype: rounded(
            size * rng.normal(size=shape), dtype
        )
        size = 8.0 if self.stored_dtype == "int8" else 1.0  # of integers, more than -1, 0 and 1
        return (
            draw(BATCH, self.queries, self.heads, HEAD_DIM, size=self.logit_size, dtype=self.dtype),
            draw(BATCH, self.keys, self.kv_heads, HEAD_DIM, size=size),
            draw(BATCH, self.keys, self.kv_heads, self.value_dim, size=size),
        )


NARROW = {
    "float8_float32": Case(stored_dtype="float8_e4m3fn"),
    "float8_bfloat16": Case(dtype="bfloat16", stored_dtype="float8_e4m3fn", value_dim=5),
    "float8_float16": Case(dtype="float16", stored_dtype="float8_e4m3fn", heads=6),
    "int8_float32": Case(stored_dtype="int8", value_dim=5),
    "int8_bfloat16": Case(dtype="bfloat16", stored_dtype="int8"),
}
CAUSAL = {"is_causal": True}
OPTIONS = {
    "plain": {},
    "causal": CAUSAL,
    "window": {"local_window_size": 5},
    "window_left": {"local_window_size": (4, None)},
    "window_right": {"local_window_size": (None, 2)},
    "window_pair_causal": CAUSAL | {"local_window_size": (6, 1)},
    "window_zero": {"local_window_size": 0},
    "soft_cap": {"logits_soft_cap": 1.5},
    "sinks": {"sinks": SINKS},
    "scale": {"scale": 0.11},
    "key_scale": {"key_scale": HEAD_SCALES["key_scale"]},
    "value_scale": {"value_scale": HEAD_SCALES["value_scale"]},
    "positions_shared": CAUSAL | {"query_positions": np.array([0, 17, 200], np.int32)},
    "positions_each": CAUSAL | {"query_positions": np.array([[3, -1, 36], [9, 9, 0]], np.int32)},
    "everything": {
        "is_causal": True,
        "query_positions": np.array([[30, 11, 36], [2, 5, 7]], np.int32),
        "local_window_size": (9, None),
        "logits_soft_cap": 2.0,
        "sinks": SINKS,
        "scale": 0.7,
        **HEAD_SCALES,
    },
}


def multiplied_out(key, value, *, key_scale=None, value_scale=None, **options):
    """Multiplies key and value by their scales, for a function without those options; returns the other options too."""
    key, value = (
        np.asarray(x).astype(np.float64) * (1.0 if scale is None else scale[:, None].astype(np.float64))
        for x, scale in ((key, key_scale), (value, value_scale))
    )
    return key, value, options
