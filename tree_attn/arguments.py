"""The shared vocabulary: the attention options, declared once, and the checks of arguments.

A wrong call is one clear error before anything is compiled or moved.
"""

import dataclasses
import functools
import inspect
import numbers
import typing
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import AbstractArray, Array, Float, Int

ATTENTION_DTYPES = ("float32", "bfloat16", "float16")
NARROW_DTYPES = ("float8_e4m3fn", "int8")  # caches may keep keys and values in these, beside a wider query
STORED_DTYPES = (*ATTENTION_DTYPES, *NARROW_DTYPES)  # of key and value
INT32 = np.iinfo(np.int32)  # of positions and lengths
_SMALLEST, _LARGEST = (float(x) for x in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))
# Such a cap bends no logit: float32 has those that it would bend 1e19 apart. Quotients by it would become 0.
_LEAST_IDLE_CAP = 1e30
AnyArray = jax.Array | np.ndarray
WindowSide = int | np.integer
#: A window of unequal sides, `(left, right)`; None is unlimited.
Window = tuple[WindowSide | None, WindowSide | None]
_Function = TypeVar("_Function", bound=Callable)


class RaggedOptionArguments(TypedDict, total=False):
    """The attention options that say nothing about lengths and positions: those of packed and paged batches.

    Meanings: `tree_attn.attend`.
    """

    is_causal: bool
    local_window_size: WindowSide | Window | None
    logits_soft_cap: float | None
    sinks: Float[AnyArray, " N"] | None
    scale: float | None
    key_scale: Float[AnyArray, " K"] | None
    value_scale: Float[AnyArray, " K"] | None
    implementation: str | None


class OptionArguments(RaggedOptionArguments, total=False):
    """The attention options, as keyword arguments. Meanings: `tree_attn.attend`.

    An option is declared here, or in the class above, and nowhere else: `AttentionOptions` has one field for each, and
    `takes_options` writes them into the signatures of the functions that take them.
    """

    key_value_seq_lengths: Int[AnyArray, " B"] | None
    query_positions: Int[AnyArray, "B T"] | Int[AnyArray, " T"] | None
    reads_keys_early: bool


_DEFAULTS = {"is_causal": False, "reads_keys_early": False}  # None for every other option
_OPTIONS = typing.get_type_hints(OptionArguments)


def _is_array(annotation) -> bool:
    return any(isinstance(x, type) and issubclass(x, AbstractArray) for x in typing.get_args(annotation))


_ARRAYS = tuple(name for name, annotation in _OPTIONS.items() if _is_array(annotation))


_Fields: Any = dataclasses.make_dataclass(
    "_Fields",
    [(name, annotation, _DEFAULTS.get(name)) for name, annotation in _OPTIONS.items()],
    frozen=True,
    kw_only=True,
)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=_ARRAYS,
    meta_fields=[name for name in _OPTIONS if name not in _ARRAYS],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionOptions(_Fields):
    """The attention options as one argument: a field for each of `OptionArguments`. Meanings: `tree_attn.attend`.

    Arrays are pytree leaves, the other fields are static. `check` raises; the constructor does not, because JAX
    rebuilds pytrees around placeholders.

    Example:
      >>> options = AttentionOptions(is_causal=True, scale=0.1)
    """

    def __post_init__(self) -> None:
        for name in _ARRAYS:
            object.__setattr__(self, name, as_leaf(getattr(self, name)))
        # NumPy compares an integer with a tuple element by element, and JAX's caches compare the static fields.
        if isinstance(self.local_window_size, np.integer):
            object.__setattr__(self, "local_window_size", int(self.local_window_size))

    def check(self, query, key, value, *, num_keys: int) -> None:
        """Raises ValueError or TypeError, naming the argument, unless options and arrays fit each other.

        `num_keys` counts the keys of all shards. Values of lengths are checked only where they are concrete; inside
        jit they are clipped to `[0, num_keys]` instead.
        """
        batch, num_queries, num_heads, _ = query.shape
        if self.key_value_seq_lengths is not None:
            check_lengths("key_value_seq_lengths", self.key_value_seq_lengths, batch, num_keys)
        check_flag("is_causal", self.is_causal)
        _check_positions(self.query_positions, batch, num_queries)
        check_window_size(self.local_window_size)
        check_flag("reads_keys_early", self.reads_keys_early)
        cap, scale = self.logits_soft_cap, self.scale
        if cap is not None and not (is_real(cap) and _SMALLEST <= cap <= _LARGEST):
            raise ValueError(
                f"logits_soft_cap must be None or a number from {_SMALLEST:.2g} to {_LARGEST:.2g}, got {cap!r}"
            )
        if scale is not None and not (is_real(scale) and abs(scale) <= _LARGEST):
            allowed = f"None (H ** -0.5), or at most {_LARGEST:.2g} in size and a finite Python number"
            raise ValueError(f"scale must be {allowed}, got {scale!r}")
        if self.sinks is not None:
            check_array("sinks", self.sinks, "floats", jnp.floating, f"[N] = ({num_heads},)", (num_heads,))
        for name in ("key_scale", "value_scale"):
            check_head_scale(name, getattr(self, name), num_kv_heads=key.shape[-2])

    @property
    def soft_cap(self) -> float | None:
        """The cap of the logits; None where none of them comes near it."""
        cap = self.logits_soft_cap
        return None if cap is None or cap >= _LEAST_IDLE_CAP else float(cap)

    def head_scales(self, num_kv_heads: int) -> Float[Array, "2 K"] | None:
        """Returns `key_scale` over `value_scale` as kernels take them, float32 `[2, K]`; None where both are None."""
        if self.key_scale is None and self.value_scale is None:
            return None
        ones = jnp.ones(num_kv_heads, jnp.float32)
        return jnp.stack(
            [ones if scale is None else jnp.asarray(scale) for scale in (self.key_scale, self.value_scale)]
        )


def takes_options(
    *, without: tuple[str, ...] = (), only: tuple[str, ...] | None = None, **defaults
) -> Callable[[_Function], _Function]:
    """Declares that the keyword arguments `**options` of a function are attention options.

    The function annotates them `Unpack[OptionArguments]`, or another class of options, which type checkers read.
    `help` and `inspect.signature` show each option with its annotation and default.

    Args:
      without: options of that class that the function does not take.
      only: the options that it takes, where these are the shorter list; None: all but `without`.
      defaults: the defaults that differ from those of `AttentionOptions`.
    Returns:
      A decorator. The decorated function raises TypeError for a keyword argument that it does not take, with its name
      and the keyword arguments that there are.

    Example:
      >>> @takes_options(without=("sinks",), is_causal=True)
      ... def prefill(query, key, value, **options: Unpack[OptionArguments]):
      ...     return AttentionOptions(**options)
    """

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        *parameters, keywords = signature.parameters.values()
        (declared,) = typing.get_args(keywords.annotation)
        options = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults.get(field.name, field.default),
                annotation=field.type,
            )
            for field in dataclasses.fields(AttentionOptions)
            if field.name in typing.get_type_hints(declared) and field.name not in without
            if only is None or field.name in only
        ]
        keyword_only = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
        keyword_only += [option.name for option in options]
        known = {*keyword_only, *(parameter.name for parameter in parameters)}
        flags = [parameter.name for parameter in parameters if isinstance(parameter.default, bool)]

        @functools.wraps(function)
        def checked(*args, **keyword_arguments):
            for name in keyword_arguments:
                if name not in known:
                    raise TypeError(
                        f"{function.__name__}() got an unexpected keyword argument {name!r}; "
                        f"its keyword arguments are {', '.join(keyword_only)}"
                    )
            for name in flags:
                check_flag(name, keyword_arguments.get(name, False))
            return function(*args, **(defaults | keyword_arguments))

        checked.__signature__ = signature.replace(parameters=[*parameters, *options])  # type: ignore[attr-defined]
        return typing.cast(_Function, checked)

    return decorate


def default_scale(scale: float | None, head_dim: int) -> float:
    """Returns `scale`, or the field's default `head_dim ** -0.5`."""
    return float(head_dim) ** -0.5 if scale is None else float(scale)


def one_of(name: str, value, allowed) -> None:
    """Raises ValueError unless `value` is one of `allowed`."""
    if not any(isinstance(value, type(x)) and value == x for x in allowed):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def check_flag(name: str, value) -> None:
    """Raises TypeError unless `value` is True or False, of Python or numpy."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def is_integer(x) -> bool:
    """Returns whether `x` is an integer of Python or numpy, and no bool."""
    return isinstance(x, int | np.integer) and not isinstance(x, bool)


def is_real(x) -> bool:
    """Returns whether `x` is a real number of Python or numpy, and no bool."""
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


def check_integer(name: str, value, *, minimum: int, maximum: int | None = None) -> None:
    """Raises ValueError unless `value` is an integer from `minimum` to `maximum`; None: without an upper bound."""
    if not is_integer(value) or value < minimum or (maximum is not None and value > maximum):
        upper = "" if maximum is None else f" and at most {maximum}"
        raise ValueError(f"{name} must be an integer of at least {minimum}{upper}, got {value!r}")


def check_arrays(query, key, value) -> None:
    """Raises ValueError or TypeError unless query `[B, T, N, H]`, key and value `[B, S, K, H]` belong together."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        layout = "[B, T, N, H]" if name == "query" else "[B, S, K, H]"
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise TypeError(f"{name} must be an array {layout}, got {type(x).__name__}")
        if len(x.shape) != 4:
            raise ValueError(f"{name} must be {layout}, got shape {tuple(x.shape)}")
    check_dtypes(query, key, value)
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(f"value must agree with key {tuple(key.shape)} in B, S and K, got shape {tuple(value.shape)}")
    if key.shape[0] != query.shape[0]:
        raise ValueError(f"key must have the batch size of query, {query.shape[0]}, got {key.shape[0]}")
    if key.shape[3] != query.shape[3]:
        raise ValueError(f"key must have the head dim of query, {query.shape[3]}, got {key.shape[3]}")
    for name, shape, sizes in (
        ("query", query.shape, query.shape), ("key", key.shape, key.shape[2:]), ("value", value.shape, value.shape[3:])
    ):  # fmt: skip
        if min(sizes) < 1:
            raise ValueError(f"{name} must not have empty axes, got {tuple(shape)}")
    if query.shape[2] % key.shape[2]:
        raise ValueError(f"query heads must be a multiple of key heads, got N={query.shape[2]} and K={key.shape[2]}")


def check_dtypes(query, key, value, key_name: str = "key", value_name: str = "value") -> None:
    """Raises ValueError unless all three have one float dtype, or key and value are both of one of `NARROW_DTYPES`."""
    for name, x in (("query", query), (key_name, key), (value_name, value)):
        allowed = ATTENTION_DTYPES if name == "query" else STORED_DTYPES
        if str(x.dtype) not in allowed:
            raise ValueError(f"{name}.dtype must be one of {', '.join(allowed)}, got {x.dtype}")
    if key.dtype != value.dtype or str(key.dtype) not in (str(query.dtype), *NARROW_DTYPES):
        raise ValueError(
            f"query, {key_name} and {value_name} must have one dtype, got query {query.dtype}, {key_name} {key.dtype}, "
            f"{value_name} {value.dtype}; of other dtype than query, {key_name} and {value_name} must both be "
            f"{' or '.join(NARROW_DTYPES)}"
        )


def check_exchanged_heads(num_heads: int, num_kv_heads: int, num_parts: int) -> None:
    """Raises ValueError, with the numbers, unless each of `num_parts` devices can have as many heads.

    Each then has the same number of query heads with their KV heads, in `tree_attn.ring_baseline.ulysses_attention`.
    """
    if num_heads % num_parts or (num_kv_heads % num_parts and num_parts % num_kv_heads):
        raise ValueError(
            f"ulysses_attention needs a number of query heads that the {num_parts} devices of its first axis divide, "
            f"and KV heads that they divide or that divide them, got N={num_heads} and K={num_kv_heads}; "
            "ring_attention takes any"
        )


def check_lengths(name: str, lengths, batch: int | None, num_keys: int) -> None:
    """Raises ValueError or TypeError unless lengths are integers `[B]`, and in `[0, num_keys]` where they are at hand.

    Args:
      batch: B; None: one length, without an axis.
    """
    shape, layout = ((), "()") if batch is None else ((batch,), f"[B] = ({batch},)")
    check_array(name, lengths, "integers", jnp.integer, layout, shape)
    values = concrete(lengths)
    if values is not None and values.size and (values.min() < 0 or values.max() > num_keys):
        raise ValueError(f"{name} must lie in [0, {num_keys}] (the number of keys), got {values.tolist()}")


def _check_positions(positions, batch: int, num_queries: int) -> None:
    if positions is None:
        return
    allowed = ((batch, num_queries), (num_queries,))
    check_array("query_positions", positions, "integers", jnp.integer, f"[B, T] or [T], {allowed}", *allowed)
    values = concrete(positions)
    if values is not None and values.size and (values.min() < INT32.min or values.max() > INT32.max):
        raise ValueError(f"query_positions must fit into int32, got {values.tolist()}")


def check_window_size(window) -> None:
    """Raises ValueError unless `window` is None, an integer of at least 0, or a pair of these."""
    if window is None:
        return
    pair = window if isinstance(window, tuple) else (window,)
    is_side = lambda side: is_integer(side) and side >= 0
    if isinstance(window, tuple) and (len(window) != 2 or not all(side is None or is_side(side) for side in pair)):
        raise ValueError(f"local_window_size must be (left, right), each None or an integer >= 0, got {window!r}")
    if not isinstance(window, tuple) and not is_side(window):
        raise ValueError(f"local_window_size must be None, an integer >= 0 or a pair, got {window!r}")


def check_head_scale(name: str, scale, num_kv_heads: int) -> None:
    """Raises ValueError unless a scale is None or float32 `[K]`."""
    shape, dtype = shape_and_dtype(scale)
    if scale is not None and (shape != (num_kv_heads,) or dtype != jnp.float32):
        raise ValueError(f"{name} must be float32 of shape [K] = ({num_kv_heads},), got {dtype} of shape {shape}")


def check_array(name: str, x, kinds: str, kind: type, layout: str, *shapes: tuple[int, ...]) -> None:
    """Raises TypeError unless `x` holds numbers; ValueError unless it has one of these shapes and a dtype of `kind`."""
    shape, dtype = shape_and_dtype(x)
    if dtype.kind in "OUS":  # what numpy makes of anything that is not numbers
        raise TypeError(f"{name} must be an array of {kinds}, got {x!r}")
    if shape not in shapes:
        raise ValueError(f"{name} must have shape {layout}, got {shape}")
    if not jnp.issubdtype(dtype, kind):
        raise ValueError(f"{name} must be {kinds}, got dtype {dtype}")


def shape_and_dtype(x) -> tuple[tuple[int, ...], np.dtype]:
    """Returns those of an array, or of what numpy makes of anything else: object, where that is no array."""
    try:
        x = x if hasattr(x, "shape") and hasattr(x, "dtype") else np.asarray(x)
    except (ValueError, TypeError):  # lists of unequal lengths, or of what a program under way will make
        x = np.empty((), object)
    return tuple(x.shape), x.dtype


def as_leaf(x):
    """Returns a list or tuple of numbers as one array, where a pytree would have a leaf for each; else `x` itself."""
    if type(x) not in (list, tuple):
        return x
    try:
        array = np.asarray(x)
    except (ValueError, TypeError):  # lists of unequal lengths, or of what a program under way will make
        return x
    return array if array.dtype.kind in "biuf" else x


def clip_to_int32(x: AnyArray, low: int = INT32.min, high: int = INT32.max) -> Int[Array, "*shape"]:
    """Returns integers of any dtype clipped to `[low, high]`, which holds 0, as int32; no value wraps."""
    x = x if isinstance(x, jax.Array) else np.asarray(x)
    limits = jnp.iinfo(x.dtype)
    low, high = max(low, int(limits.min)), min(high, int(limits.max))
    is_within = low == limits.min and high == limits.max
    return jnp.asarray(x if is_within else x.clip(low, high), jnp.int32)


def concrete(x) -> np.ndarray | None:
    """Returns the values of `x` if they are at hand without waiting for a program under way to be traced, else None."""
    if isinstance(x, jax.core.Tracer) or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return None
    return np.asarray(x)
