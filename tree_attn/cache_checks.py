"""The errors of wrong calls of a KV cache: each names the argument, the requirement and the value."""

import jax
import jax.numpy as jnp
import numpy as np

from tree_attn.arguments import ATTENTION_DTYPES, NARROW_DTYPES, STORED_DTYPES, concrete, one_of
from tree_attn.cache_layer import LayerCache, LayerTuple
from tree_attn.mesh import axis_tuple, check_axes
from tree_attn.placement import check_block_size


class CacheFullError(ValueError):
    """More tokens than the cache has room for; nothing was overwritten."""


def check_create(sizes: dict[str, int], dtype, mesh, axis_name, block_size: int, scales: dict) -> None:
    """Raises ValueError unless a cache of these sizes, dtype, placement and scales can be made."""
    for name, size in sizes.items():
        if not isinstance(size, int | np.integer) or size < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {size!r}")
    if block_size is None:
        raise ValueError("block_size must be an integer of at least 1, got None: contiguous caches do not grow evenly")
    check_block_size(block_size)
    check_axes(axis_tuple(axis_name), mesh)
    one_of("dtype", jnp.dtype(dtype).name, STORED_DTYPES)
    shape = tuple(sizes[name] for name in ("num_layers", "num_kv_heads") if name in sizes)
    for name, scale in scales.items():
        _check_scale(name, scale, jnp.dtype(dtype).name, shape)


def check_prefix(num_new: int, start, cache: LayerCache | LayerTuple) -> None:
    """Raises unless `num_new` tokens fit from `start` on, in whole blocks of every shard."""
    unit = cache.num_shards * cache.block_size
    end = num_new + (start if isinstance(start, int | np.integer) else 0)
    if end > cache.capacity:
        raise CacheFullError(f"cache is full: a prefix of {end} tokens does not fit a capacity of {cache.capacity}")
    if num_new % unit:
        raise ValueError(f"key must hold a multiple of shards * block_size = {unit} tokens, got {num_new}")
    if end % unit:
        raise ValueError(f"start must be a multiple of shards * block_size = {unit}, got {start}")


def check_sequence(sequence, other: LayerCache | LayerTuple, cache: LayerCache | LayerTuple) -> None:
    """Raises ValueError unless `other` is one sequence that `cache` can take in the place of its `sequence`."""
    like = lambda cache: (jax.tree.structure(cache), cache.dtype, cache.shape[:-4], cache.shape[-2:])
    batch = cache.shape[-4]
    if like(other) != like(cache) or other.shape[-4] != 1 or other.capacity > cache.capacity:
        raise ValueError(
            f"other must be like this cache, of one sequence and at most {cache.capacity} tokens; got key "
            f"{other.dtype}{other.shape} beside {cache.dtype}{cache.shape}"
        )
    if isinstance(sequence, int | np.integer) and not 0 <= sequence < batch:
        raise ValueError(f"sequence must lie in [0, {batch}), got {sequence}")


def check_new(key, value, cache: LayerCache | LayerTuple, layer) -> None:
    """Raises ValueError unless new keys and values `[B, T, K, H]` fit `layer` of the cache."""
    *layers, batch, _, num_kv_heads, head_dim = cache.shape
    if bool(layers) != (layer is not None):
        raise ValueError(f"layer must be given for a layered cache, and only then: cache {cache.shape}, {layer=}")
    if isinstance(cache, LayerTuple) and not isinstance(layer, int | np.integer):
        raise ValueError(f"layer must be a Python integer for a cache that does not stack layers, got {layer!r}")
    if isinstance(layer, int | np.integer) and not 0 <= layer < layers[0]:
        raise ValueError(f"layer must lie in [0, {layers[0]}), got {layer}")
    for name, new in (("key", key), ("value", value)):
        shape = jnp.shape(new)
        if len(shape) != 4 or (shape[0], *shape[2:]) != (batch, num_kv_heads, head_dim):
            raise ValueError(f"{name} must have shape [B={batch}, T, K={num_kv_heads}, H={head_dim}], got {shape}")
        narrows = cache.dtype.name in NARROW_DTYPES and new.dtype.name in ATTENTION_DTYPES
        if new.dtype != cache.dtype and not narrows:
            raise ValueError(f"{name} must have the cache's dtype {cache.dtype}, got {new.dtype}")
    if value.shape != key.shape:
        raise ValueError(f"value must hold as many tokens as key, T = {key.shape[1]}, got {value.shape[1]}")


def _check_scale(name: str, scale, dtype: str, shape: tuple[int, ...]) -> None:
    if scale is None:
        if dtype == "int8":
            raise ValueError(f"{name} must be given for dtype='int8', float32 of shape {shape}, got None")
        return
    if dtype not in NARROW_DTYPES:
        raise ValueError(f"{name} must be None for dtype={dtype!r}: only {', '.join(NARROW_DTYPES)} have scales")
    if jnp.shape(scale) != shape or scale.dtype != jnp.float32:
        raise ValueError(f"{name} must be float32 of shape {shape}, got {scale.dtype} of shape {jnp.shape(scale)}")
    values = concrete(scale)
    if values is not None and not (np.isfinite(values) & (values > 0)).all():
        raise ValueError(f"{name} must be positive and finite, got {values.tolist()}")
