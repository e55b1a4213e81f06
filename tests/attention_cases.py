"""The calls that every attention function must get right: arrays to draw, and one table of options."""

import dataclasses

import jax.numpy as jnp
import numpy as np

BATCH, KEYS, HEAD_DIM = 2, 37, 8  # a number of keys that no shard, chunk or tile divides
SINKS = np.array([0.5, -1.0, 30.0, 0.0], np.float32)  # one that outweighs every key


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
    options: dict = dataclasses.field(default_factory=dict)

    def arrays(self, seed: int = 0):
        """Draws query, key and value; `logit_size` is the standard deviation of the logits at the default scale."""
        rng = np.random.default_rng(seed)
        draw = lambda *shape, size=1.0: jnp.asarray(size * rng.normal(size=shape), self.dtype)
        return (
            draw(BATCH, self.queries, self.heads, HEAD_DIM, size=self.logit_size),
            draw(BATCH, self.keys, self.kv_heads, HEAD_DIM),
            draw(BATCH, self.keys, self.kv_heads, self.value_dim),
        )


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
    "positions_shared": CAUSAL | {"query_positions": np.array([0, 17, 200], np.int32)},
    "positions_each": CAUSAL | {"query_positions": np.array([[3, -1, 36], [9, 9, 0]], np.int32)},
    "everything": {
        "is_causal": True,
        "query_positions": np.array([[30, 11, 36], [2, 5, 7]], np.int32),
        "local_window_size": (9, None),
        "logits_soft_cap": 2.0,
        "sinks": SINKS,
        "scale": 0.7,
    },
}
