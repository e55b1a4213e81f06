"""The end of the product of query, key and value: rotation, and the cache's new keys and values.

A CTA has whole pairs of out-features, `d` and `d + H/2` of a head. Its tile is groups of 16: 8 features of the first
half of a head, and their partners of the second. So the partner of a row of the tensor core is 8 rows before or behind
it. The result goes through shared memory once, and is read from there shifted by 8 rows both ways.

Queries are results of the kernel, or broadcast in it. Keys and values are written to their slots of the cache in place.
A pair is numbered through all heads: pair p is feature `p % (H/2)` of head `p // (H/2)`, where a KV head has its
queries, key and value.

Where each device of several makes some KV heads, it sends them to all others, and writes those of all.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

from tree_attn.kernels.epilogue import SCALAR
from tree_attn.kernels.exchange_words import Buffers, locate, transport
from tree_attn.kernels.few_rows_layout import GRAIN, TENSOR_ROWS, FewRowsConfig, FewRowsShape, Heads
from tree_attn.kernels.few_rows_of_layers import all_refs, grouped, layer_of, of_layer
from tree_attn.kernels.few_rows_results import LAYOUT
from tree_attn.kernels.interpreter import is_interpreted
from tree_attn.kernels.mlir import narrowed
from tree_attn.kernels.registers import full, load


def row_of_group(first_pair, group: int, *, heads: Heads):
    """Returns the first of the 8 rows of weights that lie in a tile from row `8 group` on."""
    half = heads.head_dim // 2
    pair = first_pair + group // 2 * GRAIN
    return pl.multiple_of(lax.div(pair, half) * heads.head_dim + lax.rem(pair, half) + group % 2 * half, GRAIN)


def read_places_of(refs: dict, first_pair, shape: FewRowsShape):
    """Returns each row's slot, int32 `[64, cols]`, and the angles of a tile, of `_read_angles`."""
    slots = load(refs["slots"], LAYOUT.reduce(0))
    slots = lax.broadcast_in_dim(slots, (TENSOR_ROWS, shape.columns), [1])
    return slots, _read_angles(refs["angles"], first_pair, shape)


def _read_angles(ref, first_pair, shape: FewRowsShape):
    """Returns cosines and sines of a tile, float32 `[64, cols]`: 1 and 0 for values, which are not rotated."""
    size, heads = (TENSOR_ROWS, shape.columns), shape.heads
    if is_interpreted():
        row = jnp.arange(TENSOR_ROWS, dtype=jnp.int32)
        pair = first_pair + row // (2 * GRAIN) * GRAIN + row % GRAIN
        half = heads.head_dim // 2
        is_value = (pair // half % (heads.group + 2) == heads.group + 1)[:, None]
        beyond = [(0, 0), (0, size[1] - shape.rows), (0, 0)]
        cosine, sine = jnp.pad(ref[...], beyond)[:, :, pair % half].transpose(0, 2, 1)
        return jnp.where(is_value, 1.0, cosine), jnp.where(is_value, 0.0, sine)
    result = plgpu.ShapeDtypeStruct(size, jnp.float32, layout=LAYOUT)

    def of(which: int, of_value: float):
        @plgpu.inline_mgpu(arg_types=(LAYOUT, plgpu.RefType(), plgpu.Layout.WG_SPLAT), return_type=result)
        def emit(_, zeros, ref, pair):
            def read(_, place):
                i, column = place
                _, member, feature = _place_of(i, pair, heads)
                feature = arith.remui(feature, _index(heads.head_dim // 2))
                row = arith.minui(column, _index(shape.rows - 1))
                angle = memref.load(ref, [_index(which), row, feature])
                is_value = _is(member, heads.group + 1)
                return arith.select(is_value, arith.constant(ir.F32Type.get(), of_value), angle)

            # Without a branch all reads are on their way together.
            return zeros.foreach(read, create_array=True)

        return emit(full(0.0, size, LAYOUT), ref, first_pair)

    return of(0, 1.0), of(1, 0.0)


def turned(x, angles, turn_smem):
    """Returns the tile with each pair turned by its angle."""
    cosine, sine = angles
    turn_smem[pl.ds(GRAIN, TENSOR_ROWS)] = x
    plgpu.commit_smem()
    before, behind = (load(turn_smem.at[pl.ds(first, TENSOR_ROWS)], LAYOUT) for first in (0, 2 * GRAIN))
    plgpu.commit_smem()  # all have read it
    is_first = (plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=LAYOUT) & GRAIN) == 0
    partner = jnp.where(is_first, -behind, before)
    # What is not rotated takes nothing from its partner, NaN neither.
    return jnp.where(sine == 0.0, x * cosine, x * cosine + partner * sine)


@dataclasses.dataclass(frozen=True)
class Gathering:
    """The exchange by which all devices get all heads, of which each makes some KV heads with their queries.

    rank_ref, buffers: as of `exchange.exchange`; step: its number.
    """

    rank_ref: Any
    buffers: Buffers
    step: Any


def write_heads(
    refs, result, slots, first_pair, shape: FewRowsShape, config: FewRowsConfig, gathering: Gathering | None = None,
    broadcast=None,
) -> None:  # fmt: skip
    """Writes a tile's queries to `[rows K, G, H]`, and its keys and values to their slots of `[B, S, K, H]`.

    Args:
      refs: of queries, keys and values; queries are None where all are broadcast.
      result: float32 `[64, cols]`; slots: of `read_places_of`.
      gathering: sends the tile to all devices, and writes theirs too: K is then of all devices.
      broadcast: sends all of it to the CTAs of this device (`few_rows_broadcast.Broadcast`), as `[rows, K (G + 2) H]`;
        or None.
    """
    if is_interpreted():
        _interpreted_write(refs, result, slots, first_pair, shape, config)
        return
    operands = [(result, LAYOUT), (slots, LAYOUT), (first_pair, SCALAR)]
    refs = [ref for ref in refs if ref is not None]
    operands += [(jnp.int32(layer_of(refs)), SCALAR)]
    operands += [(array, plgpu.RefType()) for ref in refs for array in all_refs(ref)]
    operands += [] if broadcast is None else broadcast.operands
    if gathering is None:

        @plgpu.inline_mgpu(arg_types=tuple(layout for _, layout in operands))
        def emit(ctx, *values):
            write = _Writer(ctx, refs, *values, shape=shape, config=config, broadcast=broadcast)
            result = values[0]
            result.foreach(lambda x, where: write(write.take_slot(), where, [x]))

        emit(*(value for value, _ in operands))
        return

    has_rank = gathering.rank_ref is not None
    operands += [(gathering.rank_ref, plgpu.RefType())] * has_rank + [(gathering.step, SCALAR)]

    @plgpu.inline_mgpu(arg_types=tuple(layout for _, layout in operands))
    def emit_gathering(ctx, *values):
        *values, step = values
        *values, rank = values if has_rank else (*values, None)
        place = locate(gathering.buffers, rank)
        write, result = _Writer(ctx, refs, *values, shape=shape, config=config, broadcast=broadcast), values[0]
        exchange, wheres = transport(gathering.buffers, place, step.registers.item()), []

        def send_own(x, where):
            wheres.append(where)
            with utils.when(write.is_inside(where)):
                exchange.send(write.element(where), x)

        result.foreach(send_own)
        of_ranks = exchange.received(map(write.element, wheres), map(write.is_inside, wheres))
        for where, parts in zip(wheres, of_ranks, strict=True):
            write(write.take_slot(), where, parts)

    emit_gathering(*(value for value, _ in operands))


class _Writer:
    """Writes elements of a tile to queries or a cache, and broadcasts them."""

    def __init__(
        self, ctx, refs, _, slots, pair, layer, *arrays, shape: FewRowsShape, config: FewRowsConfig, broadcast=None
    ):  # fmt: skip
        self.send = None
        if broadcast is not None:
            *arrays, words, step = arrays
            self.send = broadcast.transport(words, step).send
        layer = layer.registers.item()
        *query, key, value = (of_layer(ctx, of_ref, layer) for of_ref in grouped(arrays, refs))
        self.query, self.caches, self.pair = query[0] if query else None, (key, value), pair
        self.shape, self.heads, self.tile = shape, shape.heads, config.tile
        self.num_kv_heads = shape.out_features // ((shape.heads.group + 2) * shape.heads.head_dim)
        self._slots: list = []  # in the order in which places of the result come
        slots.foreach(lambda slot, _: self._slots.append(arith.index_cast(ir.IndexType.get(), slot)))

    def take_slot(self):
        """Returns the slot of the next place of the result."""
        return self._slots.pop(0)

    def is_inside(self, where):
        """Returns whether a place is of this tile, of a row, and of a head."""
        i, row = where
        kv_head, *_ = _place_of(i, self.pair, self.heads)
        is_inside = arith.andi(_below(i, self.tile), _below(row, self.shape.rows))
        return arith.andi(is_inside, _below(kv_head, self.num_kv_heads))

    def element(self, where):
        """Returns the number of a place's element among those of a device."""
        i, row = where
        kv_head, member, feature = _place_of(i, self.pair, self.heads)
        head = arith.addi(arith.muli(kv_head, _index(self.heads.group + 2)), member)
        column = arith.addi(arith.muli(head, _index(self.heads.head_dim)), feature)
        return arith.addi(arith.muli(row, _index(self.shape.out_features)), column)

    def __call__(self, slot, where, of_ranks) -> None:
        """Writes what each device has at a place, if the place is inside."""
        i, row = where
        kv_head, member, feature = _place_of(i, self.pair, self.heads)
        is_inside = self.is_inside(where)
        is_query = arith.andi(is_inside, _below(member, self.heads.group))
        sequence = arith.divui(row, _index(self.heads.tokens))
        _, num_slots, num_kv_heads, _ = ir.MemRefType(self.caches[0].type).shape
        has_slot = arith.andi(is_inside, _below(slot, num_slots))  # unsigned: none is below 0
        for rank, x in enumerate(of_ranks):
            of_all = arith.addi(kv_head, _index(rank * self.num_kv_heads))
            of_row = arith.addi(arith.muli(row, _index(num_kv_heads)), of_all)
            if self.send is not None:
                head = arith.addi(arith.muli(of_row, _index(self.heads.group + 2)), member)
                with utils.when(is_inside):
                    self.send(arith.addi(arith.muli(head, _index(self.heads.head_dim)), feature), x)
            if self.query is not None:
                with utils.when(is_query):
                    memref.store(narrowed(x, self.query), self.query, [of_row, member, feature])
            for number, cache in enumerate(self.caches):
                with utils.when(arith.andi(has_slot, _is(member, self.heads.group + number))):
                    memref.store(narrowed(x, cache), cache, [sequence, slot, of_all, feature])


def _interpreted_write(refs, result, slots, first_pair, shape: FewRowsShape, config: FewRowsConfig) -> None:
    half = shape.heads.head_dim // 2
    for first in range(0, config.tile, GRAIN):
        pair = first_pair + first // (2 * GRAIN) * GRAIN
        place = lax.div(pair, half), pl.ds(lax.rem(pair, half) + first // GRAIN % 2 * half, GRAIN)
        parts = result[first : first + GRAIN, : shape.rows].T
        pl.when(2 * pair < shape.out_features)(
            functools.partial(_interpreted_write_group, refs, parts, slots, place, shape.heads)
        )


def _interpreted_write_group(refs, parts, slots, place, heads: Heads) -> None:
    """Writes 8 features of a head, `[rows, 8]`."""
    (query_ref, *caches), (head, features) = refs, place
    kv_head, member = lax.div(head, heads.group + 2), lax.rem(head, heads.group + 2)
    num_kv_heads = caches[0].shape[2]

    def write_row(row, _):
        slot = slots[0, row]
        part = lax.dynamic_index_in_dim(parts, row, keepdims=False)

        @pl.when(member < heads.group)
        def _():
            query_ref[row * num_kv_heads + kv_head, member, features] = part.astype(query_ref.dtype)

        def write(ref):
            ref[lax.div(row, heads.tokens), slot, kv_head, features] = part.astype(ref.dtype)

        for number, ref in enumerate(caches):
            has_slot = (slot >= 0) & (slot < ref.shape[1])
            pl.when(has_slot & (member == heads.group + number))(functools.partial(write, ref))

    lax.fori_loop(0, parts.shape[0], write_row, None)


def _place_of(i, pair, heads: Heads):
    """Returns the KV head of row i of a tile that begins with `pair`, which of its heads, and the feature in that."""
    half = _index(heads.head_dim // 2)
    group, within = arith.divui(i, _index(2 * GRAIN)), arith.remui(i, _index(2 * GRAIN))
    pair = arith.index_cast(ir.IndexType.get(), pair.registers.item())
    pair = arith.addi(pair, arith.addi(arith.muli(group, _index(GRAIN)), arith.remui(within, _index(GRAIN))))
    head, feature = arith.divui(pair, half), arith.remui(pair, half)
    feature = arith.addi(feature, arith.muli(arith.divui(within, _index(GRAIN)), half))
    size = _index(heads.group + 2)
    return arith.divui(head, size), arith.remui(head, size), feature


def _index(value: int):
    return arith.constant(ir.IndexType.get(), value)


def _below(x, end: int):
    return arith.cmpi(arith.CmpIPredicate.ult, x, _index(end))


def _is(x, value: int):
    return arith.cmpi(arith.CmpIPredicate.eq, x, _index(value))
