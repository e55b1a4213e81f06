"""Attention of one query for each sequence within a chain, from the product that makes heads to that of its output.

Keys and values pass through the chain's ring: a stage holds a KV tile where it would hold weights. Those of older
tokens depend on nothing in the launch. So they are on their way, and weights behind them, while the product of query,
key and value is multiplied. What it gives comes by words (`few_rows_chain_heads.py`): no CTA waits for all others.

The schedule and what is computed are the lean kernel's (`lean_walk.py`, `lean_compute.py`). All partial states are left
in words. CTAs merge a part of the result each, with other devices' if there are any, and broadcast it
(`few_rows_broadcast.py`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.kernels.exchange_words import Buffers
from tree_attn.kernels.few_rows_broadcast import Broadcast, BroadcastEnd
from tree_attn.kernels.few_rows_chain_heads import new_scratch, receive_heads, write_over
from tree_attn.kernels.few_rows_copies import await_copies, copy_kv_together
from tree_attn.kernels.few_rows_ring import BLOCK_IN, STAGE_ROWS, Ring
from tree_attn.kernels.kv_parts import has_broken_group
from tree_attn.kernels.lean_compute import RunCompute
from tree_attn.kernels.lean_layout import MAX_GROUP, LeanConfig, LeanShape, num_partials
from tree_attn.kernels.lean_products import products_of, query_tiling
from tree_attn.kernels.lean_walk import Run, tile_slots, walk
from tree_attn.kernels.query_layout import QUERY_MULTIPLE
from tree_attn.kernels.registers import tiling

HEAD_DIMS = (64, 128)  # of which a stage holds a KV tile as tensor cores take it
QUERY_PLACES = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionLayout:
    """Describes attention within a chain: what of it is static.

    shape, config:  as of `lean.lean_attention`, of which all output tiles leave partial states; `config.num_stages`
                    does not count, for the ring's stages do
    group:          query columns of an output tile, without padding
    buffers:        in which its result is merged with other devices' (`exchange_words.Buffers`); None: there are none
    """

    shape: LeanShape
    config: LeanConfig
    group: int
    buffers: Buffers | None = None

    @property
    def num_features(self) -> int:
        """Returns the features of a row of the result."""
        return self.shape.num_kv_heads * self.group * self.shape.head_dim

    @property
    def head_features(self) -> int:
        """Returns the features of a row of queries, keys and values."""
        return self.shape.num_kv_heads * (self.group + 2) * self.shape.head_dim

    @property
    def partials(self) -> tuple[int, int]:
        """Returns how many partial states there may be, and the words of each."""
        return num_partials(self.shape, self.config), (self.shape.padded_head_dim + 2) * self.group

    def end(self, local: Buffers) -> BroadcastEnd:
        """Returns its end; `local` are the buffers of broadcasts."""
        result = self.shape.num_output_tiles, self.group, self.shape.head_dim
        return BroadcastEnd(self.buffers or local, self.config.num_ctas, result, self.shape.num_kv_heads)


def unsupported_attention(shape: LeanShape, group: int) -> str | None:
    """Returns why a chain cannot have such attention, of so many query heads for each KV head; or None."""
    if shape.head_dim not in HEAD_DIMS:
        return f"a chain's attention has a head dim of {HEAD_DIMS}, not {shape.head_dim}"
    if shape.uses_mma or jnp.dtype(shape.dtype) != jnp.bfloat16:
        return f"a chain's attention reads bfloat16 with TMA, not {jnp.dtype(shape.key_dtype).name}"
    if has_broken_group(shape):
        return f"a chain's attention reads groups of 8 slots, which {shape.num_slots} slots are not"
    if not (group <= QUERY_MULTIPLE or group == MAX_GROUP):
        return (
            f"a chain's attention has up to {QUERY_MULTIPLE} or {MAX_GROUP} query heads for each KV head, not {group}"
        )
    return None


def keys_of_stage(head_dim: int) -> int:
    """Returns the keys of a KV tile of which a stage holds keys and values."""
    return STAGE_ROWS * BLOCK_IN // (2 * head_dim)


def kv_scratch(shape: LeanShape, num_stages: int) -> plgpu.SMEM:
    """Returns the ring's memory as keys and values lie in it: of each stage first its keys, then its values."""
    rows = num_stages * 2 * keys_of_stage(shape.head_dim)
    return plgpu.SMEM((rows, shape.head_dim), shape.dtype, transforms=tiling(shape.dtype, shape.head_dim))


def attention_scratch(shape: LeanShape) -> dict[str, plgpu.SMEM]:
    """Returns the shared memory that attention needs beside the ring, by the names of `CtaAttention`'s fields."""
    config = LeanConfig(block_kv=keys_of_stage(shape.head_dim))
    size, transforms = (QUERY_PLACES, shape.cols, shape.head_dim), query_tiling(shape, config)
    query = plgpu.SMEM(size, shape.dtype, transforms=transforms)
    products = products_of(shape).scratch(shape, config)
    return {"query_smem": query, "new_smem": new_scratch(shape.head_dim, shape.dtype)} | products


def attention_barriers() -> dict[str, plgpu.Barrier]:
    """Returns the barriers that attention needs beside the ring's, by the names of `CtaAttention`'s fields."""
    query = plgpu.Barrier(num_barriers=QUERY_PLACES)
    return {"query_full": query, "query_free": query}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CtaAttention:
    """Attention of a CTA, with the methods of `CtaProduct`.

    Attributes:
      refs: "key" and "value" `[B, S, K, H]`, "slots" of the new tokens, "rank", and tables as `lean.lean_attention`
        takes them.
      run, ring: of the CTA.
      x_broadcast: of queries, keys and values, `[B, K (G + 2) H]`; broadcast: of the result, `[B, N H]`.
      exchange_step: the number of its step with other devices, if there are any.
      kv_smem: of `kv_scratch`.
      others: of `attention_scratch` and `attention_barriers`.
    """

    layout: AttentionLayout
    refs: dict
    run: Run
    ring: Ring
    x_broadcast: Broadcast | None
    broadcast: Broadcast | None
    exchange_step: Any
    kv_smem: Any
    query_smem: Any
    weights_smem: Any
    columns_smem: Any
    new_smem: Any
    query_full: Any
    query_free: Any

    @property
    def num_steps(self):
        """Returns the steps of the CTA, each of which fills a stage with a KV tile."""
        return self.run.num_kv_tiles

    def move_weights(self) -> None:
        """Copies keys and values of all steps."""
        shape, config = self.layout.shape, self.layout.config

        def move_segment(output_tile, segment):
            def move(i, _):
                step = segment.kv_tiles_done + i
                self.ring.await_room(step)
                first, _ = tile_slots(shape, config, output_tile, segment.kv_tile + i)
                self._copy_kv(step, output_tile, first)

            lax.fori_loop(0, segment.num_kv_tiles, move, None)

        walk(self.run, self.refs, shape, config, move_segment, is_first_to_read=True)

    def move_x(self, await_all: Callable) -> None:
        """Receives queries and new keys and values; at each step it keeps pace with the ring.

        Args:
          await_all: is not needed.
        """
        shape, config = self.layout.shape, self.layout.config

        def move_segment(output_tile, segment):
            slot = self.refs["slots"][output_tile.sequence]
            place = segment.query_place(QUERY_PLACES)
            is_taken = segment.output_tiles_done >= QUERY_PLACES
            pl.when(is_taken)(lambda: plgpu.barrier_wait(self.query_free.at[place]))
            first_feature = output_tile.index * (self.layout.head_features // shape.num_kv_heads)
            received = self.query_smem.at[place], self.new_smem
            receive_heads(self.x_broadcast, first_feature, *received, group=self.layout.group)
            plgpu.barrier_arrive(self.query_full.at[place])

            def keep_pace(i, _):
                step = segment.kv_tiles_done + i
                self.ring.await_free(step)
                first_slot, _ = tile_slots(shape, config, output_tile, segment.kv_tile + i)
                within = slot - first_slot
                is_here = (within >= 0) & (within < config.block_kv)
                pl.when(is_here)(lambda: self._write_new(step, within))
                plgpu.barrier_arrive(self.ring.full[-1].at[self.ring.stage(step)])

            lax.fori_loop(0, segment.num_kv_tiles, keep_pace, None)

        walk(self.run, self.refs, shape, config, move_segment)

    def _write_new(self, step, within) -> None:
        """Writes the new key and value to their slot of a step's KV tile, when that is there."""
        await_copies(self.ring.full[0], self.ring.first_step + step, self.ring.num_stages)
        stage, block_kv = self.ring.stage(step), self.layout.config.block_kv
        rows = [(2 * stage + number) * block_kv + within for number in range(2)]
        write_over(self.new_smem, self.kv_smem, rows)

    def compute(self, tell_sent: Callable = lambda: None) -> None:
        """Attends, leaves partial states, and merges and broadcasts a part of the result.

        Args:
          tell_sent: of `CtaProduct.compute`.
        """
        shape, config, broadcast = self.layout.shape, self.layout.config, self.broadcast
        is_alone = self.layout.buffers is None
        tables = self.refs | ({"rank": broadcast.words_ref} if is_alone else {})
        smem = {"weights_smem": self.weights_smem, "columns_smem": self.columns_smem}
        products = products_of(shape)(shape=shape, config=config, **smem)
        RunCompute(
            tables=tables, shape=shape, config=config, run=self.run,
            epilogue=self.layout.end(broadcast.buffers), products=products, results=None,
            outputs=(broadcast,),
            stages=_RingStages(self.ring, self.kv_smem, config.block_kv), query_smem=self.query_smem,
            query_full=self.query_full, query_free=self.query_free, words_smem=None, merged_at_once=0,
            columns=self.layout.group, writes_results=False, step=broadcast.step if is_alone else self.exchange_step,
        ).compute()  # fmt: skip
        tell_sent()

    def _copy_kv(self, step, output_tile, first) -> None:
        block_kv = self.layout.config.block_kv
        barriers, stage = self.ring.full[0], self.ring.stage(step)
        arrays = [self.refs[name] for name in ("key", "value")]
        place = output_tile.sequence, first, output_tile.head
        copy_kv_together(arrays, self.kv_smem, barriers, stage, place, block_kv=block_kv)


def _kv_rows(kv_smem, stage, number: int, block_kv: int):
    """Returns a stage's keys, number 0, or its values, number 1."""
    return kv_smem.at[pl.ds(pl.multiple_of((2 * stage + number) * block_kv, 8), block_kv)]


@dataclasses.dataclass(frozen=True)
class _RingStages:
    """The stages of a ring: a `lean_compute.Stages`. Keys and values of a KV tile come together."""

    ring: Ring
    kv_smem: Any
    block_kv: int

    def keys(self, kv_tile):
        """Does `Stages.keys`."""
        self.ring.await_full(kv_tile)
        return _kv_rows(self.kv_smem, self.ring.stage(kv_tile), 0, self.block_kv)

    def values(self, kv_tile):
        """Does `Stages.values`."""
        return _kv_rows(self.kv_smem, self.ring.stage(kv_tile), 1, self.block_kv)

    def release_keys(self, kv_tile) -> None:
        """Does `Stages.release_keys`: the values are still read."""

    def release_values(self, kv_tile) -> None:
        """Does `Stages.release_values`."""
        self.ring.release(kv_tile)
