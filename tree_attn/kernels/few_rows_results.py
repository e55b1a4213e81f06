"""Plain results of products of few rows: what is added to a tile before it is written, and its writing, by element.

Rows and out-features of a tile end anywhere, so that no copy of whole tiles fits. Shapes are those of `few_rows.py`.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

from tree_attn.kernels.few_rows_layout import GRAIN, TENSOR_ROWS, FewRowsConfig, FewRowsShape
from tree_attn.kernels.interpreter import is_interpreted
from tree_attn.kernels.mlir import narrowed, widened
from tree_attn.kernels.registers import full

LAYOUT = plgpu.Layout.WGMMA


def read_residual(ref, feature, shape: FewRowsShape, config: FewRowsConfig):
    """Returns what is to be added to a tile, float32 `[64, cols]`; where there is nothing, numbers of other places."""
    size = (TENSOR_ROWS, shape.columns)
    if is_interpreted():
        beyond = [(0, size[1] - shape.rows), (0, size[0])]
        whole = jnp.pad(ref[: shape.rows].astype(jnp.float32), beyond).T
        return lax.dynamic_slice(whole, (feature, 0), size)
    result = plgpu.ShapeDtypeStruct(size, jnp.float32, layout=LAYOUT)

    @plgpu.inline_mgpu(arg_types=(LAYOUT, plgpu.RefType(), plgpu.Layout.WG_SPLAT), return_type=result)
    def emit(_, zeros, ref, feature):
        at, _ = places(feature, shape, config)
        # Without a branch all reads are on their way together.
        read = lambda _, place: widened(memref.load(ref, at(*place)))
        return zeros.foreach(read, create_array=True)

    return emit(full(0.0, size, LAYOUT), ref, feature)


def write_rows(ref, result, feature, shape: FewRowsShape, config: FewRowsConfig, broadcast=None) -> None:
    """Writes a tile's result, from float32 `[64, cols]` to `[rows, O]`.

    Args:
      broadcast: sends it to all CTAs too (`few_rows_broadcast.Broadcast`); or None.
    """
    if is_interpreted():

        def write_part(i, _):
            first = i * GRAIN

            @pl.when(feature + first < shape.out_features)
            def _():
                part = lax.dynamic_slice_in_dim(result, first, GRAIN)[:, : shape.rows].T
                ref[: shape.rows, pl.ds(feature + first, GRAIN)] = part.astype(ref.dtype)

        lax.fori_loop(0, config.tile // GRAIN, write_part, None)
        return

    sending = [] if broadcast is None else broadcast.operands
    layouts = (layout for _, layout in sending)

    @plgpu.inline_mgpu(arg_types=(LAYOUT, plgpu.RefType(), plgpu.Layout.WG_SPLAT, *layouts))
    def emit(_, result, ref, feature, *sending):
        at, is_inside = places(feature, shape, config)
        store = storing(ref, shape, broadcast, sending)

        def write(x, place):
            with utils.when(is_inside(*place)):
                store(x, at(*place))

        result.foreach(write)

    emit(result, ref, feature, *(value for value, _ in sending))


def storing(ref, shape: FewRowsShape, broadcast, sending):
    """Returns a function `(x, [row, feature])` that writes a number of a result, and broadcasts it.

    Args:
      broadcast, sending: of `write_rows`, and the values of its operands in the kernel; or None, and none.
    """
    send = None if broadcast is None else broadcast.transport(*sending).send

    def store(x, place):
        if send is not None:
            send(element_of(shape, *place), x)
        memref.store(narrowed(x, ref), ref, place)

    return store


def element_of(shape: FewRowsShape, row, feature):
    """Returns the number of an element of a result, an index."""
    return arith.addi(arith.muli(row, arith.constant(ir.IndexType.get(), shape.out_features)), feature)


def places(feature, shape: FewRowsShape, config: FewRowsConfig):
    """Returns functions of a place in a tile: its nearest indices `(row, feature)`, and whether these are its own."""
    index = ir.IndexType.get()
    constant = lambda value: arith.constant(index, value)
    feature = arith.index_cast(index, feature.registers.item())

    def at(i, column):
        inside = arith.minui(arith.addi(feature, i), constant(shape.out_features - 1))
        return [arith.minui(column, constant(shape.rows - 1)), inside]

    def is_inside(i, column):
        below = lambda x, end: arith.cmpi(arith.CmpIPredicate.ult, x, constant(end))
        in_tile = arith.andi(below(i, config.tile), below(arith.addi(feature, i), shape.out_features))
        return arith.andi(in_tile, below(column, shape.rows))

    return at, is_inside
