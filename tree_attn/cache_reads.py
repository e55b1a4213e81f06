"""Reading a KV cache: attention to it, and the arguments that attention needs with its arrays."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from tree_attn.arguments import AnyArray, check_integer, check_lengths
from tree_attn.cache_checks import CacheFullError, check_layer, check_one_new, check_query, check_rolling_read
from tree_attn.cache_layer import LayerCache, LayerTuple
from tree_attn.decode import tree_decode
from tree_attn.mesh import AxisName
from tree_attn.sharded import is_local

OPERANDS = (
    "key", "value", "key_value_seq_lengths", "key_scale", "value_scale", "axis_name", "mesh", "batch_axis_name",
    "block_size",
)  # fmt: skip
T = TypeVar("T")
Arrays = Array | tuple[Array, ...]  # in one array, or one array per layer


class _OfArrays(Generic[T]):
    """An attribute of `KVCache` that is its arrays' attribute of the same name."""

    def __set_name__(self, cache_type, name: str) -> None:
        self._name = name

    def __get__(self, cache, cache_type=None) -> T:
        return getattr(cache.arrays, self._name) if cache is not None else self


class CacheReads:
    """The methods of `KVCache` that read it."""

    arrays: LayerCache | LayerTuple
    lengths: Int[Array, " B"]
    overflowed: Bool[Array, " B"]

    key, value = _OfArrays[Arrays](), _OfArrays[Arrays]()
    value_sum, key_by_component = _OfArrays[Arrays | None](), _OfArrays[Arrays | None]()
    key_scale, value_scale = _OfArrays[Arrays | None](), _OfArrays[Arrays | None]()
    shape, dtype = _OfArrays[tuple[int, ...]](), _OfArrays[jnp.dtype]()
    capacity, num_slots, rolls = _OfArrays[int](), _OfArrays[int](), _OfArrays[bool]()
    num_shards, block_size = _OfArrays[int](), _OfArrays[int]()
    mesh, axis_name, batch_axis_name = _OfArrays[Mesh](), _OfArrays[AxisName](), _OfArrays[AxisName | None]()

    def attend(
        self,
        query: Float[AnyArray, "B T N H"],
        *,
        layer: int | Array | None = None,
        attention: Callable[..., Any] = tree_decode,
        num_new: int = 0,
        **options: Any,
    ) -> Any:
        """Attends to the tokens held: `attention(query, **self.operands(layer, num_new=num_new), **options)`.

        Keys, values, lengths, scales, mesh, axis and placement come from the cache, and `num_new` is passed on. An attention with `value_mean` or
        `key_by_component`, such as `sparq_decode`, gets these too, where the cache keeps them. (Causal queries after
        one another see fewer values than are held: they get no mean.)

        A cache that keeps a window (`KVCache.create`) has nothing else in its slots, in no order. So one query at a
        time attends to all of them, and `local_window_size` may be left out.

        Args:
          query: `[B, T, N, H]`, the same on every device of the sequence.
          layer: of a layered cache; traced too, where layers are stacked.
          attention: `tree_decode`, `ring_decode`, `sparq_decode`, or another function with their keywords.
          num_new: tokens of each sequence that `write` has written and `advance` has not counted yet. All others were
            written before: `tree_decode` gets it as `num_new`, unless it is 0.
          options: other options of `attention`, such as `is_causal` (for T > 1), `reduction` or `return_lse`.
        Returns:
          As `attention` does.
        Raises:
          ValueError: a query of other sequences or of another head dim; an option that comes from the cache; `layer`
            does not fit; an operand that `attention` does not take; more than one query, another window or positions,
            where the cache keeps a window.
          NotImplementedError: `sparq_decode`, where the cache keeps a window.
          Others: as `attention` does.

        Example:
          >>> cache = cache.append(key, value)
          >>> out = cache.attend(query)
          >>> out = cache.attend(query, attention=sparq_decode, num_components=32, num_keys=128)
        """
        if not callable(attention):
            raise TypeError(f"attention must be a function such as tree_decode, got {attention!r}")
        if not hasattr(query, "dtype"):
            raise TypeError(f"query must be an array [B, T, N, H], got {type(query).__name__}")
        if len(query.shape) != 4:
            raise ValueError(f"query must be [B, T, N, H], got shape {tuple(query.shape)}")
        check_query(query, self.arrays)
        parameters = inspect.signature(attention).parameters
        self._check_attend(attention, parameters, options)
        check_integer("num_new", num_new, minimum=0)
        if self.rolls:
            options = check_rolling_read(query, num_new, attention, parameters, options, self.arrays)
        run = lambda: attention(query, **self._read(query, layer, num_new, attention, parameters, options), **options)
        # Outside jit, to take a layer, new lengths or a mean runs programs: `attention` checks its arguments before.
        runs_programs = layer is not None or num_new or self.rolls or self.arrays.value_sum is not None
        if runs_programs and not isinstance(self.lengths, jax.core.Tracer):
            jax.eval_shape(lambda: (run(), None)[1])
        return run()

    def operands(self, layer: int | Array | None = None, *, num_new: int = 0) -> dict[str, Any]:
        """Returns the keyword arguments that attention to one layer needs, for functions that `attend` does not call.

        They are `key`, `value`, `key_value_seq_lengths`, `key_scale`, `value_scale`, `axis_name`, `mesh`,
        `batch_axis_name` and `block_size`; `mesh` is None inside a `shard_map`. Where the cache keeps a window, the
        lengths are at most its slots, which are in no order: only one query, the newest token's, may read them.

        Args:
          layer, num_new: as in `attend`.
        Raises:
          ValueError: `layer` or `num_new` does not fit.

        Example:
          >>> out = hydragen_decode(query, levels, **cache.operands(layer))
        """
        check_layer(self.arrays, layer)
        check_integer("num_new", num_new, minimum=0)
        check_one_new("num_new", num_new, self.arrays)
        arrays = self.arrays
        is_in_shard_map = is_local(arrays.axes) or bool(jax.sharding.get_abstract_mesh().manual_axes)
        return {
            "key": _of_layer(arrays.key, layer),
            "value": _of_layer(arrays.value, layer),
            "key_value_seq_lengths": self._num_seen(num_new),
            **arrays.scales(layer),
            "axis_name": arrays.axis_name,
            "mesh": None if is_in_shard_map else arrays.mesh,
            "batch_axis_name": arrays.batch_axis_name,
            "block_size": arrays.block_size,
        }

    def specs(self) -> Self:
        """Returns the `PartitionSpec` of each array, as a cache of them: for `in_specs` and `out_specs`."""
        batch: Any = P(self.arrays.batch_axes)
        return dataclasses.replace(self, arrays=self.arrays.specs(), lengths=batch, overflowed=batch)  # type: ignore

    def check_room(self, num_tokens: int) -> None:
        """Raises CacheFullError unless every sequence has room for `num_tokens` more (waits for pending steps).

        It names the first sequence without room, its length and the capacity. Where processes have parts of the batch,
        all of them call it, and all raise alike.

        Raises:
          TypeError: within `jit`, where lengths are not known; `num_tokens` is no integer.
        """
        check_integer("num_tokens", num_tokens, minimum=0)
        if isinstance(self.lengths, jax.core.Tracer):
            raise TypeError("check_room must be called outside jit: within it the cache's lengths are not known")
        lengths, overflowed = (_of_all_processes(x) for x in (self.lengths, self.overflowed))
        capacity = self.arrays.capacity
        for b in np.flatnonzero(overflowed | (lengths + num_tokens > capacity)):
            was = " (an earlier write was refused already, or its window is gone)" if overflowed[b] else ""
            raise CacheFullError(
                f"cache is full: sequence {b} holds {lengths[b]} of {capacity} tokens, no room for {num_tokens} "
                f"more{was}; create it with a larger capacity"
            )

    def scales(self, layer: int | Array | None = None) -> dict[str, Float[Array, "*L K"] | None]:
        """Returns the `key_scale` and `value_scale` that attention needs with these keys and values."""
        if layer is not None:
            check_layer(self.arrays, layer)
        return self.arrays.scales(layer)

    def value_mean(self, lengths: Int[Array, " B"], layer: int | Array | None = None) -> Float[Array, "B K H"]:
        """Returns the mean of each sequence's values, float32 `[B, K, H]`; 0 where it has none. It reads the sums only.

        Args:
          lengths: int32 `[B]`, how many there are: between `write` and `advance` more than `self.lengths`.
          layer: of a layered cache.
        Raises:
          ValueError: the cache was created without `keeps_value_sum`; `lengths` or `layer` does not fit.
        """
        if self.arrays.value_sum is None:
            raise ValueError("value_sum is not kept: create the cache with keeps_value_sum=True")
        if layer is not None:
            check_layer(self.arrays, layer)
        check_lengths("lengths", lengths, *self.lengths.shape, self.capacity)
        lengths = jnp.asarray(lengths)
        total = _of_layer(self.arrays.value_sum, layer)
        return total / jnp.maximum(lengths, 1).astype(jnp.float32)[:, None, None]

    def _read(self, query, layer, num_new: int, attention, parameters, options: dict[str, Any]) -> dict[str, Any]:
        """Returns the keyword arguments that come from the cache, for a function of these parameters."""
        operands = self.operands(layer, num_new=num_new)
        operands = {name: x for name, x in operands.items() if x is not None}
        if "key_by_component" in parameters and self.arrays.key_by_component is not None:
            operands["key_by_component"] = _of_layer(self.arrays.key_by_component, layer)
        # Of causal queries each sees fewer values than the next: the mean is that of the last alone.
        all_options = getattr(attention, "keywords", {}) | options  # a partial's too
        is_one_mean = query.shape[1] == 1 or not all_options.get("is_causal", False)
        if "value_mean" in parameters and self.arrays.value_sum is not None and is_one_mean:
            operands["value_mean"] = self.value_mean(operands["key_value_seq_lengths"], layer)
        # Slots of a window are in no order. Without `num_new`, tokens may have been written and counted just before.
        if "num_new" in parameters and num_new and not self.rolls:
            operands["num_new"] = num_new
        return operands

    def _check_attend(self, attention: Callable[..., Any], parameters, options: dict[str, Any]) -> None:
        """Raises ValueError for options that come from the cache, and for a function that does not take those."""
        passed = options.keys() | getattr(attention, "keywords", {}).keys()
        for name in (*OPERANDS, "value_mean", "key_by_component"):
            if name in passed:
                raise ValueError(f"{name} must not be given to attend: it comes from the cache")
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        for name in () if takes_any else OPERANDS:
            if name not in parameters and getattr(self.arrays, name, True) is not None:
                raise ValueError(f"attention must take {name}, which comes from the cache; got {attention}")

    def _num_seen(self, num_new: int) -> Int[Array, " B"]:
        """Returns how many slots of each sequence a query after `num_new` tokens sees."""
        lengths = self._with_new(num_new)[0] if num_new else self.lengths
        return jnp.minimum(lengths, self.num_slots) if self.rolls else lengths

    def _with_new(self, num_new: int) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
        """Returns the lengths with `num_new` tokens more, where there is room for them, and where there is."""
        longer = self.lengths + min(num_new, self.capacity + 1)  # within int32, whatever the number
        has_room = longer <= self.arrays.capacity
        return jnp.where(has_room, longer, self.lengths) if num_new else self.lengths, has_room


def _of_all_processes(x: Array) -> np.ndarray:
    """Returns an array's values. Where other processes alone have parts of it, all processes must call this."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(x, tiled=True)


def _of_layer(arrays, layer: int | Array | None):
    """Returns one layer of an array or of a tuple of arrays; all of it where there are no layers."""
    return arrays if layer is None else arrays[layer]
