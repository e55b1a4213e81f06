"""The errors of wrong calls of a KV cache: each names the argument, the requirement and the value."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool

from tree_attn.arguments import (
    ATTENTION_DTYPES,
    NARROW_DTYPES,
    STORED_DTYPES,
    check_integer,
    check_lengths,
    check_window_size,
    concrete,
    is_integer,
    one_of,
    shape_and_dtype,
)
from tree_attn.array_axes import check_batch_axes
from tree_attn.cache_layer import LayerCache, LayerTuple
from tree_attn.masking import normalise_window
from tree_attn.mesh import axis_tuple, check_axes
from tree_attn.placement import check_block_size
from tree_attn.sharded import num_held_shards


class CacheFullError(ValueError):
    """More tokens than the cache has room for; nothing was overwritten."""


def check_window(window: int | None, unit: int, flags: dict[str, bool]) -> None:
    """Raises unless a cache may keep a window, with `unit` tokens in a round of blocks over all shards."""
    if window is None:
        return
    check_integer("window", window, minimum=1)
    if window % unit:
        raise ValueError(f"window must be a multiple of shards * block_size = {unit}, got {window}")
    for name, flag in flags.items():
        if flag:
            raise NotImplementedError(f"{name}=True: SparQ has no form for a cache with a window, got {window=}")


def check_create(sizes: dict[str, int], dtype, mesh, axis_name, batch_axis_name, block_size: int, scales: dict) -> None:
    """Raises ValueError unless a cache of these sizes, dtype, placement and scales can be made."""
    for name, size in sizes.items():
        check_integer(name, size, minimum=1)
    if block_size is None:
        raise ValueError("block_size must be an integer of at least 1, got None: contiguous caches do not grow evenly")
    check_block_size(block_size)
    axes = axis_tuple(axis_name)
    check_axes(axes, mesh)
    if batch_axis_name is not None:
        check_batch_axes(batch_axis_name, axes, mesh, sizes["batch"])
    dtype = _stored_dtype(dtype)
    shape = tuple(sizes[name] for name in ("num_layers", "num_kv_heads") if name in sizes)
    for name, scale in scales.items():
        _check_scale(name, scale, dtype, shape)


def _stored_dtype(dtype) -> str:
    """Returns the name of a dtype of keys and values; raises ValueError or TypeError for anything else."""
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        raise TypeError(f"dtype must be one of {', '.join(STORED_DTYPES)}, got {dtype!r}") from None
    one_of("dtype", name, STORED_DTYPES)
    return name


def check_prefix(
    num_new: int, start, cache: LayerCache | LayerTuple, lengths=None
) -> tuple[Bool[Array, ""] | None, int]:
    """Raises unless `num_new` tokens of a shard fit from `start` on, in whole blocks of every shard.

    A cache that rolls needs the lengths of the sequences. With lengths the tokens begin at 0.

    Returns:
      Whether they fit, where `start` is known only on the device, else None; and their number on all shards.
    """
    unit, num_new = cache.num_shards * cache.block_size, num_new * num_held_shards(cache.axes)
    if cache.rolls and lengths is None:
        raise ValueError("lengths must be given for a cache that keeps a window, got None")
    if (cache.rolls or lengths is not None) and not (is_integer(start) and start == 0):
        why = "for a cache that keeps a window" if cache.rolls else "where lengths are given"
        raise ValueError(f"start must be 0 {why}, got {start!r}")
    if lengths is not None:
        check_lengths("lengths", lengths, cache.shape[-4], num_new)
    if not _is_index(start):
        raise ValueError(f"start must be an integer, a multiple of shards * block_size = {unit}, got {start!r}")
    known = concrete(start)
    first = 0 if known is None else int(known)
    if first + num_new > cache.capacity:
        raise CacheFullError(
            f"cache is full: a prefix of {first + num_new} tokens does not fit a capacity of {cache.capacity}"
        )
    if num_new % unit:
        raise ValueError(f"key must hold a multiple of shards * block_size = {unit} tokens, got {num_new}")
    if first < 0 or first % unit:
        raise ValueError(f"start must be a multiple of shards * block_size = {unit} and at least 0, got {first}")
    if known is not None:
        return None, num_new
    start = jnp.asarray(start)
    return (start >= 0) & (start <= cache.capacity - num_new) & (start % unit == 0), num_new


def _is_index(x) -> bool:
    """Returns whether `x` is one integer, of Python, numpy or JAX."""
    shape, dtype = shape_and_dtype(x)
    return is_integer(x) or (shape == () and jnp.issubdtype(dtype, jnp.integer) and hasattr(x, "dtype"))


def check_sequence(sequence, other: LayerCache | LayerTuple, cache: LayerCache | LayerTuple, batch: int) -> None:
    """Raises ValueError unless `other` is one sequence that `cache` can take in the place of its `sequence`."""
    form = lambda cache: (type(cache), cache.dtype, cache.shape[:-4], cache.shape[-2:], *_kept_arrays(cache))
    placed = lambda cache: (cache.axes, cache.block_size, cache.mesh)
    fits = other.shape[-4] == 1 and other.capacity <= cache.capacity and not other.batch_axes
    fits &= other.num_slots == cache.num_slots if other.rolls else other.num_slots <= cache.num_slots
    if form(other) != form(cache) or placed(other) != placed(cache) or not fits:
        raise ValueError(
            f"other must be like this cache, of one sequence and at most {cache.capacity} tokens; got key "
            f"{other.dtype}{other.shape} beside {cache.dtype}{cache.shape}{_windows(other, cache)}"
        )
    for (name, scale), expected in zip(other.scales().items(), cache.scales().values(), strict=True):
        found, needed = (None if x is None else concrete(x) for x in (scale, expected))
        if found is not None and needed is not None and not np.array_equal(found, needed):
            raise ValueError(f"other must have this cache's {name}, {needed.tolist()}, got {found.tolist()}")
    if not _is_index(sequence):
        raise TypeError(f"sequence must be an integer, got {sequence!r}")
    row = concrete(sequence)
    if row is not None and not 0 <= row < batch:
        raise ValueError(f"sequence must lie in [0, {batch}), got {sequence}")


def check_layer(cache: LayerCache | LayerTuple, layer) -> None:
    """Raises ValueError unless `layer` names a layer of a layered cache, or is None for another."""
    layers = cache.shape[:-4]
    if bool(layers) != (layer is not None):
        raise ValueError(f"layer must be given for a layered cache, and only then: cache {cache.shape}, {layer=}")
    if isinstance(cache, LayerTuple) and not isinstance(layer, int | np.integer):
        raise ValueError(f"layer must be a Python integer for a cache that does not stack layers, got {layer!r}")
    if layer is not None and not _is_index(layer):
        raise ValueError(f"layer must be an integer, got {layer!r}")
    if isinstance(layer, int | np.integer) and not 0 <= layer < layers[0]:
        raise ValueError(f"layer must lie in [0, {layers[0]}), got {layer}")


def check_new(key, value, cache: LayerCache | LayerTuple, layer) -> None:
    """Raises ValueError unless new keys and values `[B, T, K, H]` fit `layer` of the cache."""
    check_layer(cache, layer)
    batch, _, num_kv_heads, head_dim = cache.shape[-4:]
    for name, new in (("key", key), ("value", value)):
        shape, _ = shape_and_dtype(new)
        if len(shape) != 4 or (shape[0], *shape[2:]) != (batch, num_kv_heads, head_dim):
            raise ValueError(f"{name} must have shape [B={batch}, T, K={num_kv_heads}, H={head_dim}], got {shape}")
        if not hasattr(new, "dtype"):
            raise TypeError(f"{name} must be an array, got {type(new).__name__}")
        narrows = cache.dtype.name in NARROW_DTYPES and new.dtype.name in ATTENTION_DTYPES
        if new.dtype != cache.dtype and not narrows:
            raise ValueError(f"{name} must have the cache's dtype {cache.dtype}, got {new.dtype}")
    if value.shape != key.shape:
        raise ValueError(f"value must hold as many tokens as key, T = {key.shape[1]}, got {value.shape[1]}")


def check_appended(key, value, cache: LayerCache | LayerTuple) -> None:
    """Raises ValueError as `check_new`, and if the cache has layers: they count a token once, which `append` cannot."""
    if layers := cache.shape[:-4]:
        raise ValueError(
            f"append must be called on a cache without layers, got one of num_layers={layers[0]}: call write(key, "
            "value, layer) for each layer, then advance(T) once"
        )
    check_new(key, value, cache, layer=None)


def check_query(query, cache: LayerCache | LayerTuple) -> None:
    """Raises ValueError unless a query `[B, T, N, H]` is of the cache's sequences and head dim."""
    batch, _, num_kv_heads, head_dim = cache.shape[-4:]
    if (query.shape[0], query.shape[3]) != (batch, head_dim):
        raise ValueError(
            f"query must have shape [B={batch}, T, N, H={head_dim}] for this cache, N a multiple of {num_kv_heads}, "
            f"got {tuple(query.shape)}"
        )


def check_one_new(name: str, num_new: int, cache: LayerCache | LayerTuple) -> None:
    """Raises ValueError for more than one token at a time where new tokens take the place of old ones."""
    if cache.rolls and num_new > 1:
        raise ValueError(f"{name} must be one token at a time for a cache that keeps a window, got {num_new}")


def check_counted(lengths, old_lengths, cache: LayerCache | LayerTuple, layer) -> None:
    """Raises ValueError unless a cache can hold `lengths` tokens, if they are known, and has `layer`, if not None."""
    check_lengths("lengths", lengths, *old_lengths.shape, cache.capacity)
    if layer is not None:
        check_layer(cache, layer)
    known, old = concrete(lengths), concrete(old_lengths)
    if known is None or old is None:
        return
    for b in np.flatnonzero(needs_lost_tokens(known, old, cache)):
        raise ValueError(
            f"lengths must be at least {old[b]} for sequence {b}, or 0, got {known[b]}: the cache keeps a window of "
            f"{cache.num_slots} tokens, and those before it are gone"
        )


def needs_lost_tokens(lengths, old_lengths, cache: LayerCache | LayerTuple):
    """Returns where fewer tokens need older ones than a cache that rolls has left, bool `[B]`."""
    return cache.rolls & (lengths > 0) & (lengths < old_lengths) & (old_lengths > cache.num_slots)


def check_rolling_read(query, num_new: int, attention, parameters, options: dict, cache) -> dict:
    """Returns the options of attention to a cache that rolls, without the window, which its slots are already.

    Raises:
      ValueError: more than one query or new token, another window, positions of queries, or keys to be read early.
      NotImplementedError: an attention that chooses keys by their positions.
    """
    check_one_new("query", query.shape[1], cache)
    check_one_new("num_new", num_new, cache)
    if "key_by_component" in parameters:
        raise NotImplementedError(f"attention={attention}: SparQ has no form for a cache that keeps a window")
    bound = getattr(attention, "keywords", {})
    for name in ("local_window_size", "query_positions"):
        if bound.get(name) is not None:
            raise ValueError(f"attention must not bind {name} for a cache that keeps a window, got {bound[name]!r}")
    if options.get("query_positions") is not None:
        raise ValueError("query_positions must be None for a cache that keeps a window: its slots have no order")
    if (bound | options).get("reads_keys_early", False):
        raise ValueError("reads_keys_early must be False for a cache that keeps a window: any slot may hold a new key")
    check_same_window(options.get("local_window_size"), cache)
    return {name: value for name, value in options.items() if name != "local_window_size"}


def check_same_window(local_window_size, cache: LayerCache | LayerTuple) -> None:
    """Raises ValueError for a window that is not None and not that which a cache that rolls keeps."""
    check_window_size(local_window_size)
    window = normalise_window(local_window_size)
    if local_window_size is not None and (window is None or window[0] != cache.num_slots - 1):
        raise ValueError(
            f"local_window_size must be None or ({cache.num_slots - 1}, None) for a cache that keeps a window of "
            f"{cache.num_slots} tokens, got {local_window_size!r}"
        )


def context_mesh() -> Mesh:
    """Returns the mesh of `jax.set_mesh`; raises ValueError where none is set, and inside jit."""
    context = jax.sharding.get_abstract_mesh()
    if context.empty:
        raise ValueError("mesh must be given where jax.set_mesh has set none, got None")
    try:
        return jax.sharding.get_mesh()
    except ValueError:
        raise ValueError("mesh must be given inside jit, where devices are not known, got None") from None


def _kept_arrays(cache: LayerCache | LayerTuple) -> list[bool]:
    names = "value_sum", "key_by_component", "key_scale", "value_scale"
    return [getattr(cache, name) is not None for name in names]


def _windows(*caches: LayerCache | LayerTuple) -> str:
    """Returns the windows of caches in words; nothing where none keeps one."""
    windows = [cache.num_slots if cache.rolls else None for cache in caches]
    return f", which keep windows of {' and '.join(map(str, windows))}" if any(windows) else ""


def _check_scale(name: str, scale, dtype: str, shape: tuple[int, ...]) -> None:
    if scale is None:
        if dtype == "int8":
            raise ValueError(f"{name} must be given for dtype='int8', float32 of shape {shape}, got None")
        return
    if dtype not in NARROW_DTYPES:
        raise ValueError(f"{name} must be None for dtype={dtype!r}: only {', '.join(NARROW_DTYPES)} have scales")
    is_array = hasattr(scale, "dtype")
    if not is_array or jnp.shape(scale) != shape or scale.dtype != jnp.float32:
        found = f"{scale.dtype} of shape {jnp.shape(scale)}" if is_array else type(scale).__name__
        raise ValueError(f"{name} must be float32 of shape {shape}, got {found}")
    values = concrete(scale)
    if values is not None and not (np.isfinite(values) & (values > 0)).all():
        raise ValueError(f"{name} must be positive and finite, got {values.tolist()}")
