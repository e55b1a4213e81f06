"""The parameters of a Llama: each is declared once, and a source turns the declaration into an array.

The model's constructor calls `create(parameter)` for every parameter that it has. The source is `create`: shapes only
(`abstract`), random numbers (`random`), another model (`moved`), or a file (`checkpoint/huggingface.py`, `gguf.py`).
"""

import dataclasses
import functools
import itertools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from tree_attn.models.llama.sharding import LlamaSharding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of the model, before it exists.

    Attributes:
      name: its path in the model: `layers.attention.output` is `model.layers.attention.output`.
      shape: the whole shape; parameters of layers have the layers stacked along dimension 0.
      axes: one logical axis per dimension; `layers` is dimension 0 of the stacked ones.
      fan_in: inputs summed into one output, which scales a random start; None for a norm's scale, which starts at 1.
      layer: index of its layer; None: it stacks all layers, or belongs to none.
      parts: the checkpoint's tensors that it joins, in order along the dimension whose axis is None: the last component
        of each one's name, and its size there. `()`: it is one tensor.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    fan_in: int | None = None
    layer: int | None = None
    parts: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"axes must name each dimension of shape={self.shape}, got {self.axes!r}")
        if self.parts and sum(size for _, size in self.parts) != self.shape[self.part_axis]:
            raise ValueError(
                f"parts must add up to dimension {self.part_axis} of shape={self.shape}, got {self.parts!r}"
            )

    @property
    def is_stacked(self) -> bool:
        """True if dimension 0 counts layers."""
        return self.axes[0] == "layers"

    @property
    def part_axis(self) -> int:
        """The dimension along which its parts lie one after another."""
        return self.axes.index(None) if self.parts else 0

    def apart(self) -> tuple["Parameter", ...]:
        """Returns its parts, each declared by itself; one tensor is its own only part."""
        if not self.parts:
            return (self,)
        owner, axis = self.name.rpartition(".")[0], self.part_axis
        return tuple(
            dataclasses.replace(
                self, name=f"{owner}.{name}", shape=(*self.shape[:axis], size, *self.shape[axis + 1 :]), parts=()
            )
            for name, size in self.parts
        )


Create = Callable[[Parameter], Any]


def of_layer(create: Create, layer: int) -> Create:
    """Returns a source of one layer's part of each parameter that is declared for all layers."""
    return lambda parameter: create(
        dataclasses.replace(parameter, shape=parameter.shape[1:], axes=parameter.axes[1:], layer=layer)
    )


def abstract(sharding: LlamaSharding | None, dtype: DTypeLike) -> Create:
    """Returns a source of shapes, dtypes and shardings (None: without): enough to lower a program, or to count.

    Nothing is allocated.
    """

    def create(parameter: Parameter) -> jax.ShapeDtypeStruct:
        if sharding is None:
            return jax.ShapeDtypeStruct(parameter.shape, jnp.dtype(dtype))
        sharding.check_divides(parameter.shape, parameter.axes, parameter.name)
        return jax.ShapeDtypeStruct(parameter.shape, jnp.dtype(dtype), sharding=sharding.named(*parameter.axes))

    return create


Index = tuple[slice, ...]
ReadSlice = Callable[[Parameter, int | None, Index], np.ndarray]
CheckTensor = Callable[[Parameter, int | None], None]


def check_tensors(check: CheckTensor, parameter: Parameter) -> None:
    """Calls `check(part, layer)` for each tensor of a checkpoint that makes up a parameter."""
    for layer in range(parameter.shape[0]) if parameter.is_stacked else (parameter.layer,):
        for part in parameter.apart():
            check(part, layer)


def checked(check: CheckTensor) -> Create:
    """Returns a source of shapes, as `abstract`, that calls `check(part, layer)` for each tensor of a checkpoint."""

    def create(parameter: Parameter) -> jax.ShapeDtypeStruct:
        check_tensors(check, parameter)
        return abstract(None, jnp.float32)(parameter)

    return create


def from_slices(
    sharding: LlamaSharding,
    dtype: DTypeLike,
    read: ReadSlice,
    on_bytes: Callable[[int], None] | None = None,
    check: CheckTensor | None = None,
) -> Create:
    """Returns a source that reads a file piece by piece: each device's slice goes from the file to that device.

    Args:
      sharding: maps the parameters to devices.
      dtype: of the stored parameters.
      read: `(parameter, layer, index) -> array` returns a slice of one tensor of the file, in any float dtype, shaped
        like the parameter without its `layers` dimension; `layer` is None for a parameter that belongs to no layer. A
        parameter of several parts is read part by part, each whole along the dimension that they share.
      on_bytes: called with the number of bytes that each read placed, for a progress bar.
      check: `(parameter, layer)` raises if the file lacks that tensor. It is called for all tensors of a parameter
        before any of them is read, or anything is allocated for them.

    The host holds one slice of one parameter at a time.
    """
    dtype = jnp.dtype(dtype)

    def read_parts(parameter: Parameter, layer: int | None, index: Index) -> np.ndarray:
        pieces = [read(part, layer, index) for part in parameter.apart()]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, parameter.part_axis - parameter.is_stacked)

    def read_layers(parameter: Parameter, index: Index) -> np.ndarray:
        if not parameter.is_stacked:
            return np.asarray(read_parts(parameter, parameter.layer, index), dtype)
        layers, *rest = index
        layers = range(*layers.indices(parameter.shape[0]))
        pieces = None
        for i, layer in enumerate(layers):
            piece = read_parts(parameter, layer, tuple(rest))
            if pieces is None:
                pieces = np.empty((len(layers), *piece.shape), dtype)
            pieces[i] = piece
        return pieces

    def create(parameter: Parameter) -> jax.Array:
        sharding.check_divides(parameter.shape, parameter.axes, parameter.name)
        if check is not None:
            check_tensors(check, parameter)

        def callback(index: Index) -> np.ndarray:
            piece = read_layers(parameter, index)
            if on_bytes is not None:
                on_bytes(piece.nbytes)
            return piece

        return jax.make_array_from_callback(parameter.shape, sharding.named(*parameter.axes), callback)

    return create


def random(sharding: LlamaSharding, dtype: DTypeLike, seed: int = 0) -> Create:
    """Returns a source of normal numbers over the square root of the fan-in; norms' scales are 1.

    They are the same on any number of devices, and whether layers are stacked or not. Each device draws its own part,
    so that billions take seconds on GPUs.
    """

    def draw(part: Parameter) -> jax.Array:
        # The name keys the stream, so that a parameter does not change when another one is added.
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(part.name.encode()))
        if part.layer is not None:
            key = jax.random.fold_in(key, part.layer)
        return _draw(key, part.shape, part.fan_in, part.is_stacked, jnp.dtype(dtype), sharding.named(*part.axes))

    def create(parameter: Parameter) -> jax.Array:
        sharding.check_divides(parameter.shape, parameter.axes, parameter.name)
        drawn = [draw(part) for part in parameter.apart()]
        return drawn[0] if len(drawn) == 1 else _joined(drawn, parameter.part_axis, sharding.named(*parameter.axes))

    return create


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _draw(key: jax.Array, shape, fan_in: int | None, is_stacked: bool, dtype: jnp.dtype, sharding: NamedSharding):
    normal = lambda key, shape: (jax.random.normal(key, shape, jnp.float32) * fan_in**-0.5).astype(dtype)
    if fan_in is None:
        drawn = jnp.ones(shape, dtype)
    elif is_stacked:
        drawn = jax.vmap(lambda layer: normal(jax.random.fold_in(key, layer), shape[1:]))(jnp.arange(shape[0]))
    else:
        drawn = normal(key, shape)
    return jax.lax.with_sharding_constraint(drawn, sharding)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _joined(parts: Sequence[jax.Array], axis: int, sharding: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(jnp.concatenate(parts, axis), sharding)


def moved(model: nnx.Module, sharding: LlamaSharding) -> Create:
    """Returns a source that moves the parameters of another model, with layers stacked or not."""

    def create(parameter: Parameter) -> jax.Array:
        sharding.check_divides(parameter.shape, parameter.axes, parameter.name)
        return jax.device_put(_array_of(model, parameter), sharding.named(*parameter.axes))

    return create


def _array_of(model: nnx.Module, parameter: Parameter) -> jax.Array:
    first, *rest = parameter.name.split(".")
    array = lambda module: functools.reduce(getattr, rest, module)[...]
    owner = getattr(model, first)
    if isinstance(owner, nnx.List):
        return jnp.stack([array(x) for x in owner]) if parameter.layer is None else array(owner[parameter.layer])
    return array(owner) if parameter.layer is None else array(owner)[parameter.layer]


def checkpoint_shape(parameter: Parameter) -> tuple[int, ...]:
    """Returns the shape of one layer's tensor in a checkpoint, where heads and head dim are one axis."""
    sizes = [(axis == "embed", size) for size, axis in zip(parameter.shape, parameter.axes) if axis != "layers"]
    return tuple(math.prod(size for _, size in run) for _, run in itertools.groupby(sizes, key=lambda item: item[0]))


def checkpoint_places(parameter: Parameter, index: Index) -> tuple[np.ndarray, ...]:
    """Returns the places along each dimension of the checkpoint's tensor that `index` picks from one layer.

    The tensor's dimensions are those of `checkpoint_shape`; the places of several axes count the last one fastest.
    """
    first = int(parameter.is_stacked)
    dimensions = list(zip(parameter.axes[first:], parameter.shape[first:], index, strict=True))
    places = []
    for _, run in itertools.groupby(dimensions, key=lambda dimension: dimension[0] == "embed"):
        _, sizes, slices = zip(*run)
        places.append(np.arange(math.prod(sizes)).reshape(sizes)[slices].reshape(-1))
    return tuple(places)


def picked_shape(parameter: Parameter, index: Index) -> tuple[int, ...]:
    """Returns the shape of what `index` picks from one layer of a parameter."""
    sizes = parameter.shape[int(parameter.is_stacked) :]
    return tuple(len(range(size)[part]) for size, part in zip(sizes, index, strict=True))
