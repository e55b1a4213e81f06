"""How parameters come to be: each is declared once, and a source turns the declaration into an array.

The model's constructor calls `create(parameter)` for every parameter it has. What `create` does decides what is built:
shapes only (`abstract`), random numbers (`random`), or the tensors of a file (`weights.py`, `gguf.py`).
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from models.llama.sharding import LlamaSharding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of the model, before it exists.

    Attributes:
      name: its path in the model: `layers.attention.query` is `model.layers.attention.query`.
      shape: the whole shape; parameters of layers have the layers stacked along dimension 0.
      axes: one logical axis per dimension; `layers` is dimension 0 of the stacked ones.
      fan_in: inputs summed into one output, which scales a random start; None for a norm's scale, which starts at 1.
      layer: the only layer that it is of; None: of all layers stacked, or of none.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    fan_in: int | None = None
    layer: int | None = None

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"axes={self.axes!r}: must name each dimension of shape={self.shape}")

    @property
    def is_stacked(self) -> bool:
        """Whether dimension 0 counts layers."""
        return self.axes[0] == "layers"


Create = Callable[[Parameter], Any]


def of_layer(create: Create, layer: int) -> Create:
    """Makes one layer's part of each parameter that is declared for all layers."""
    return lambda parameter: create(
        dataclasses.replace(parameter, shape=parameter.shape[1:], axes=parameter.axes[1:], layer=layer)
    )


def abstract(sharding: LlamaSharding, dtype: DTypeLike) -> Create:
    """Parameters as shapes, dtypes and shardings: enough to lower or to count bytes, and nothing is allocated."""

    def create(parameter: Parameter) -> jax.ShapeDtypeStruct:
        sharding.check_divides(parameter.shape, parameter.axes, parameter.name)
        return jax.ShapeDtypeStruct(parameter.shape, jnp.dtype(dtype), sharding=sharding.named(*parameter.axes))

    return create


Index = tuple[slice, ...]
ReadSlice = Callable[[Parameter, int | None, Index], np.ndarray]


def from_slices(
    sharding: LlamaSharding, dtype: DTypeLike, read: ReadSlice, on_bytes: Callable[[int], None] | None = None
) -> Create:
    """Parameters read piece by piece: each device's slice goes from the file to that device.

    Args:
      sharding: where the parameters go.
      dtype: what they are stored as.
      read: `(parameter, layer, index) -> array` gives a slice of one tensor of the file, in any float dtype, shaped
        like the parameter without its `layers` dimension; `layer` is None where the parameter is of no layer.
      on_bytes: told how many bytes each read placed, for a progress bar.

    The host holds one slice of one parameter at a time.
    """
    dtype = jnp.dtype(dtype)

    def read_layers(parameter: Parameter, index: Index) -> np.ndarray:
        if not parameter.is_stacked:
            return np.asarray(read(parameter, parameter.layer, index), dtype)
        layers, *rest = index
        layers = range(*layers.indices(parameter.shape[0]))
        pieces = None
        for i, layer in enumerate(layers):
            piece = read(parameter, layer, tuple(rest))
            if pieces is None:
                pieces = np.empty((len(layers), *piece.shape), dtype)
            pieces[i] = piece
        return pieces

    def create(parameter: Parameter) -> jax.Array:
        sharding.check_divides(parameter.shape, parameter.axes, parameter.name)

        def callback(index: Index) -> np.ndarray:
            piece = read_layers(parameter, index)
            if on_bytes is not None:
                on_bytes(piece.nbytes)
            return piece

        return jax.make_array_from_callback(parameter.shape, sharding.named(*parameter.axes), callback)

    return create


def random(sharding: LlamaSharding, dtype: DTypeLike, seed: int = 0) -> Create:
    """Normal numbers over the square root of the fan-in, norms' scales 1; the same on any number of devices.

    They are the same whether layers are stacked or not, and made where they go, so that billions take seconds on GPUs.
    """

    def create(parameter: Parameter) -> jax.Array:
        sharding.check_divides(parameter.shape, parameter.axes, parameter.name)
        # The name keys the stream, so that a parameter does not change when another one is added.
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(parameter.name.encode()))
        if parameter.layer is not None:
            key = jax.random.fold_in(key, parameter.layer)
        where = sharding.named(*parameter.axes)
        return _draw(key, parameter.shape, parameter.fan_in, parameter.is_stacked, jnp.dtype(dtype), where)

    return create


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _draw(key: jax.Array, shape, fan_in: int | None, is_stacked: bool, dtype: jnp.dtype, where: NamedSharding):
    normal = lambda key, shape: (jax.random.normal(key, shape, jnp.float32) * fan_in**-0.5).astype(dtype)
    if fan_in is None:
        drawn = jnp.ones(shape, dtype)
    elif is_stacked:
        drawn = jax.vmap(lambda layer: normal(jax.random.fold_in(key, layer), shape[1:]))(jnp.arange(shape[0]))
    else:
        drawn = normal(key, shape)
    return jax.lax.with_sharding_constraint(drawn, where)


def moved(model: nnx.Module, sharding: LlamaSharding) -> Create:
    """The parameters of a model that exists, put elsewhere, with layers stacked or not."""

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
    """The shape of one layer's tensor in a checkpoint, where heads and head dimension are one."""
    shape: list[int] = []
    for size, axis in zip(parameter.shape, parameter.axes, strict=True):
        if axis == "head_dim":
            shape[-1] *= size
        elif axis != "layers":
            shape.append(size)
    return tuple(shape)
