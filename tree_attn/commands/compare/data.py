"""Random queries, keys and values for `tree-attn compare`, made on their devices, and the oracle's answer to them.

Keys and values are a function of (seed, shard, block) alone. So every device makes its own shard, and no place ever
holds all of them. The oracle can make any part of them again without the devices.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tree_attn import reference
from tree_attn.cost.step import DecodeStep

# Elements of K that the float64 oracle holds on the host. Up to the first number it checks all heads and sequences that
# fit; up to the second (1 GiB) at least one head; beyond that one head over fewer keys.
ORACLE_ELEMENTS = 1 << 25
ORACLE_MAX_ELEMENTS = 1 << 27
_BLOCK_ELEMENTS = 1 << 21  # made at a time, so that making data takes little memory beside the data
_QUERY, _KEY, _VALUE = 0, 1, 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class OracleScope:
    """The part of a step that the oracle checks: the first `batch` sequences and KV heads, over `num_keys`."""

    batch: int
    num_kv_heads: int
    num_keys: int


def make_data(step: DecodeStep, mesh: Mesh, axes: tuple[str, ...], seed: int) -> tuple[jax.Array, ...]:
    """Makes a normal query `[B, T, N, H]`, whole on every device, and key, value `[B, S, K, H]`, sharded on S.

    `axes` of the mesh share the keys, in the order of `PartitionSpec`: the shard number varies fastest along the last.
    """

    def on_shard():
        shard = jax.lax.axis_index(axes)
        starts = jnp.asarray(_block_starts(step), jnp.int32)

        def fill(which):
            def put(i, filled):
                return jax.lax.dynamic_update_slice_in_dim(filled, _block(step, seed, which, shard, i), starts[i], 1)

            shape = (step.batch, step.keys_per_device, step.num_kv_heads, step.head_dim)
            return jax.lax.fori_loop(0, len(starts), put, jnp.zeros(shape, step.dtype))

        return _query(step, seed), fill(_KEY), fill(_VALUE)

    specs = (P(), P(None, axes), P(None, axes))
    return jax.jit(jax.shard_map(on_shard, mesh=mesh, in_specs=(), out_specs=specs, check_vma=False))()


def oracle_scope(step: DecodeStep) -> OracleScope:
    """Chooses the part that the oracle checks: all if it is small, else the heads that fit, else one and fewer keys."""
    per_head = step.num_keys * step.head_dim
    if per_head > ORACLE_MAX_ELEMENTS:
        num_keys = ORACLE_MAX_ELEMENTS // step.head_dim // step.n_devices * step.n_devices
        return OracleScope(batch=1, num_kv_heads=1, num_keys=max(num_keys, step.n_devices))
    num_kv_heads = min(step.num_kv_heads, max(1, ORACLE_ELEMENTS // per_head))
    batch = min(step.batch, max(1, ORACLE_ELEMENTS // (per_head * num_kv_heads)))
    return OracleScope(batch=batch, num_kv_heads=num_kv_heads, num_keys=step.num_keys)


@functools.lru_cache(maxsize=1)  # all strategies of a step have one answer
def oracle_output(step: DecodeStep, scope: OracleScope, seed: int) -> np.ndarray:
    """Returns the float64 oracle's answer to `make_data(step, ...)` on the host, for the part in `scope`."""
    assert scope.num_keys == step.num_keys, "the step must have the scope's number of keys"
    num_heads = scope.num_kv_heads * (step.num_heads // step.num_kv_heads)
    device = jax.local_devices()[0]
    with jax.default_device(device):
        make_block = jax.jit(functools.partial(_block, step, seed), static_argnums=0)
        part = np.s_[: scope.batch, :, : scope.num_kv_heads]
        shards = []
        for which in (_KEY, _VALUE):
            whole = np.empty((scope.batch, step.num_keys, scope.num_kv_heads, step.head_dim), np.float64)
            for shard in range(step.n_devices):
                for i, start in enumerate(_block_starts(step)):
                    block = np.asarray(make_block(which, shard, i)[part])
                    first = shard * step.keys_per_device + start
                    whole[:, first : first + block.shape[1]] = block.astype(np.float64)
            shards.append(whole)
        query = np.asarray(_query(step, seed)[: scope.batch, :, :num_heads])
    return reference.attention(query, *shards)[0]


def _block_starts(step: DecodeStep) -> list[int]:
    """Returns the first key of each block of a shard; the last block starts early rather than run past the end."""
    size, total = _block_keys(step), step.keys_per_device
    return [min(start, total - size) for start in range(0, total, size)]


def _block_keys(step: DecodeStep) -> int:
    per_key = step.batch * step.num_kv_heads * step.head_dim
    return min(step.keys_per_device, max(1, _BLOCK_ELEMENTS // per_key))


def _block(step: DecodeStep, seed: int, which: int, shard, i) -> jax.Array:
    rng = jax.random.key(seed)
    for number in (which, shard, i):
        rng = jax.random.fold_in(rng, number)
    shape = (step.batch, _block_keys(step), step.num_kv_heads, step.head_dim)
    return jax.random.normal(rng, shape, jnp.float32).astype(step.dtype)


def _query(step: DecodeStep, seed: int) -> jax.Array:
    rng = jax.random.fold_in(jax.random.key(seed), _QUERY)
    shape = (step.batch, step.num_queries, step.num_heads, step.head_dim)
    return jax.random.normal(rng, shape, jnp.float32).astype(step.dtype)
