"""SparQ's steps on one GPU: beside dense attention, and beside SparQ in XLA."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from tree_attn import attend, sparq_decode
from tree_attn.measure.steps.chains import max_errors, normals, time_steps
from tree_attn.measure.steps.step import READ_GB_PER_S

WAYS = ("sparq", "sparq, no mean", "sparq, xla", "dense, mosaic_gpu", "dense, cudnn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparqStep:
    """One step of `batch` sequences of `keys` tokens."""

    batch: int
    keys: int
    num_components: int = 32
    num_keys: int = 128
    local_window: int = 32
    num_heads: int = 32
    num_kv_heads: int = 32
    head_dim: int = 128

    @property
    def limit_us(self) -> float:
        """The time to read r components of all keys, and k keys and values, once for each KV head."""
        elements = self.keys * self.num_components + 2 * self.num_keys * self.head_dim
        return 2 * self.batch * self.num_kv_heads * elements / READ_GB_PER_S / 1e3


def time_way(case: SparqStep, way: str, n_iters: int) -> dict:
    """Returns the fields of a row: the times of a step in one of `WAYS`, and the errors beside SparQ in XLA."""
    draw = normals()
    query = draw(case.batch, 1, case.num_heads, case.head_dim)
    key, value = (draw(case.batch, case.keys, case.num_kv_heads, case.head_dim) for _ in range(2))
    if way.startswith("dense"):
        dense = functools.partial(attend, implementation=way.split(", ")[1])
        return time_steps(lambda *args: dense(*args).out, query, [(key, value)], n_iters)
    by_component = jax.jit(lambda key: key.transpose(0, 2, 3, 1))(key)
    mean = jax.jit(lambda value: value.astype(jnp.float32).mean(axis=1))(value)
    sizes = {name: getattr(case, name) for name in ("num_components", "num_keys", "local_window")}

    def step(query, key, value, by_component, mean, implementation=None):
        return sparq_decode(
            query, key, value, key_by_component=by_component, value_mean=mean, implementation=implementation,
            reallocate=way != "sparq, no mean", return_lse=True, **sizes,
        )  # fmt: skip

    timed = functools.partial(step, implementation="xla" if way == "sparq, xla" else None)
    cache = (key, value, by_component, mean)
    try:
        few = slice(0, 2)
        part = tuple(x[few] for x in cache)
        expected = jax.jit(functools.partial(step, implementation="xla"))(query[few], *part)
        errors = max_errors(jax.jit(timed)(query, *cache), expected, few)
        return time_steps(lambda *args: timed(*args)[0], query, [cache], n_iters) | {"max_errors": errors}
    except RuntimeError as error:
        return {"error": f"{type(error).__name__}: {error}"}
