"""Zeros in place of the values of a KV tile that are no sequence's keys, so that no NaN among them meets a weight."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.kernels.kv_parts import has_broken_group
from tree_attn.kernels.lean_layout import GRAIN, LeanShape
from tree_attn.kernels.registers import load, store_transposed, transposable_layout


def zero_garbage(values, span, first_slot, shape: LeanShape, is_trimmed) -> None:
    """Puts zeros in place of the values of a KV tile that are not the sequence's: beyond its end, if packed before it.

    A weight of zero does not make zero of what may be NaN. Only tiles at an end are written.

    Args:
      values: `[kv, Hp]`, in shared memory, as stored. All of a warpgroup's threads call this.
      span: from `span_of_keys`. None: TMA fills what is beyond the last slot with zeros.
      first_slot: slot of the first of the values.
      is_trimmed: zeros follow the `GRAIN`, or the page of a gathered KV tile, that has the end (`trims_tiles`).
    """
    if span is None:
        return
    start, end = span
    is_beyond = first_slot + values.shape[0] > end

    def is_key(shape_of_slots, axis, first, layout):
        slots = plgpu.broadcasted_iota(jnp.int32, shape_of_slots, axis, layout=layout) + first
        return (slots >= start) & (slots < end) if shape.is_packed else slots < end

    _zero_ends(values, span, first_slot, is_beyond, is_key, shape, is_trimmed)


def _zero_ends(values, span, first_slot, is_beyond, is_key, shape: LeanShape, is_trimmed) -> None:
    """Zeros garbage `GRAIN` slots at a time, from the one that has the end on."""
    block_kv, padded = values.shape
    start, end = span
    layout = transposable_layout()  # as loaded, so that JAX 0.10 finds the layouts of all between
    width = min(padded, 64)  # of more at once, some kernels need more registers than they have

    def zero(grain, _):
        for column in range(0, padded, width):
            part = values.at[pl.ds(pl.multiple_of(grain * GRAIN, GRAIN), GRAIN), pl.ds(column, width)]
            found = load(part.transpose((1, 0)), layout)
            nothing = plgpu.layout_cast(jnp.zeros(found.shape, found.dtype), layout)
            is_inside = is_key((width, GRAIN), 1, first_slot + grain * GRAIN, layout)
            store_transposed(part, jnp.where(is_inside, found, nothing))

    @pl.when(is_beyond)
    def _():
        num_seen = jnp.maximum(end - first_slot, 0)
        grains = shape.page_size // GRAIN if shape.is_gathered else 1  # that are read together
        trimmed, whole = jnp.maximum(pl.cdiv(num_seen, grains * GRAIN), 1) * grains, block_kv // GRAIN
        is_known = isinstance(is_trimmed, bool)
        read = (trimmed if is_trimmed else whole) if is_known else jnp.where(is_trimmed, trimmed, whole)
        lax.fori_loop(lax.div(num_seen, GRAIN), read, zero, None)
        plgpu.commit_smem()

    if shape.is_packed:

        @pl.when(first_slot < start)
        def _():
            if has_broken_group(shape):  # a KV tile that ends with the array may begin long before
                lax.fori_loop(0, pl.cdiv(jnp.minimum(start - first_slot, block_kv), GRAIN), zero, None)
            else:
                zero(jnp.int32(0), None)
            plgpu.commit_smem()
