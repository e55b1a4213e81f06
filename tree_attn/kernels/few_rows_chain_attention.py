"""Attention of one query for each sequence within a chain, from the product that makes heads to that of its output.

Keys and values pass through the chain's ring: a stage holds a KV tile where it would hold weights. Those of older
tokens depend on nothing in the launch. So they are on their way, and weights behind them, while CTAs meet after the
heads. The last KV tile of an output tile may have the new token. Its copy waits for that meeting.

The schedule and what is computed are the lean kernel's (`lean_walk.py`, `lean_compute.py`). The last CTA that leaves a
partial state of an output tile merges them. Over several devices all merge, and exchange (`epilogue.py`).
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.kernels.few_rows_copies import await_copies, copy_kv_together
from tree_attn.kernels.few_rows_ring import BLOCK_IN, STAGE_ROWS, Ring, copies_together
from tree_attn.kernels.interpreter import is_interpreted
from tree_attn.kernels.kv_parts import has_broken_group
from tree_attn.kernels.lean_compute import RunCompute
from tree_attn.kernels.lean_layout import LeanConfig, LeanShape, has_whole_output_tiles, num_partials
from tree_attn.kernels.lean_merge import finished, merges_in_launch
from tree_attn.kernels.lean_products import products_of, query_tiling
from tree_attn.kernels.lean_results import store_partial
from tree_attn.kernels.lean_walk import Run, tile_slots, walk
from tree_attn.kernels.plain_copies import store_columns
from tree_attn.kernels.query_layout import QUERY_MULTIPLE
from tree_attn.kernels.registers import tiling

HEAD_DIMS = (64, 128)  # of which a stage holds a KV tile as tensor cores take it
QUERY_PLACES = 1
MERGED_ELEMENTS = 8192  # weighted values of partial states that are read together


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionLayout:
    """What is static of attention within a chain.

    shape, config: as of `lean.lean_attention`; `config.num_stages` does not count, for the ring's stages do.
    group:         query columns of an output tile, without padding
    epilogue:      the exchange with other devices in which it ends, or None
    """

    shape: LeanShape
    config: LeanConfig
    group: int
    epilogue: Any = None

    @property
    def is_cut(self) -> bool:
        """Returns whether runs may cut output tiles."""
        return not has_whole_output_tiles(self.shape, self.config)

    @property
    def merges(self) -> bool:
        """Returns whether CTAs can merge the partial states that there are."""
        return not self.is_cut or merges_in_launch(self.shape, self.config, self.merged_at_once)

    @property
    def merged_at_once(self) -> int:
        """Returns how many partial states a CTA reads together; of more, a thread has no registers for all maxima."""
        return min(8, MERGED_ELEMENTS // (self.shape.padded_head_dim * self.shape.cols))

    def outputs(self, rows: int) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes and dtypes of what it writes: the result, `[rows, N H]`, and what only CTAs read."""
        shape = self.shape
        num_features = shape.num_kv_heads * self.group * shape.head_dim
        outputs = [jax.ShapeDtypeStruct((rows, num_features), shape.dtype)]
        if self.epilogue is not None:
            return [*outputs, jax.ShapeDtypeStruct((shape.num_output_tiles, self.group), jnp.float32)]
        if not self.is_cut:
            return outputs
        count = num_partials(shape, self.config)
        accs = jax.ShapeDtypeStruct((count, shape.padded_head_dim, shape.cols), jnp.float32)
        return [*outputs, accs, jax.ShapeDtypeStruct((count, 2, shape.cols), jnp.float32)]


def unsupported_attention(shape: LeanShape, group: int) -> str | None:
    """Returns why a chain cannot have such attention, of so many query heads for each KV head; or None."""
    if shape.head_dim not in HEAD_DIMS:
        return f"a chain's attention has a head dim of {HEAD_DIMS}, not {shape.head_dim}"
    if shape.uses_mma or jnp.dtype(shape.dtype) != jnp.bfloat16:
        return f"a chain's attention reads bfloat16 with TMA, not {jnp.dtype(shape.key_dtype).name}"
    if has_broken_group(shape):
        return f"a chain's attention reads groups of 8 slots, which {shape.num_slots} slots are not"
    if shape.col_blocks > 1 or (group > QUERY_MULTIPLE and group % QUERY_MULTIPLE):
        return f"a chain's attention has up to 8 or 16 query heads for each KV head, not {group}"
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
    return {"query_smem": query, "softmax_smem": products_of(shape).scratch(shape, config)["weights_smem"]}


def attention_barriers() -> dict[str, plgpu.Barrier]:
    """Returns the barriers that attention needs beside the ring's, by the names of `CtaAttention`'s fields."""
    query = plgpu.Barrier(num_barriers=QUERY_PLACES)
    return {"query_full": query, "query_free": query, "heads_there": plgpu.Barrier(num_barriers=1)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CtaAttention:
    """Attention of a CTA, with the methods of `CtaProduct`.

    Attributes:
      refs: "query" `[B K, G, H]`, "key" and "value" `[B, S, K, H]`, and tables as `lean.lean_attention` takes them.
      outputs: references of `AttentionLayout.outputs`.
      run, ring: of the CTA.
      kv_smem: of `kv_scratch`; words_smem: 8 bytes of the computing warpgroup.
      heads_there: a barrier at which the warpgroup that moves x arrives when CTAs have met after the heads.
      others: of `attention_scratch` and `attention_barriers`.
    """

    layout: AttentionLayout
    refs: dict
    outputs: tuple
    run: Run
    ring: Ring
    kv_smem: Any
    query_smem: Any
    softmax_smem: Any
    words_smem: Any
    query_full: Any
    query_free: Any
    heads_there: Any

    @property
    def num_steps(self):
        """Returns the steps of the CTA, each of which fills a stage with a KV tile."""
        return self.run.num_kv_tiles

    def move_weights(self) -> None:
        """Copies keys and values of all steps."""
        shape, config = self.layout.shape, self.layout.config

        def move_segment(output_tile, segment):
            def move(i, _):
                kv_tile = segment.kv_tile + i
                is_last = kv_tile == output_tile.num_kv_tiles - 1
                pl.when(is_last)(self._await_heads)
                step = segment.kv_tiles_done + i
                self.ring.await_room(step)
                first, _ = tile_slots(shape, config, output_tile, kv_tile)
                self._copy_kv(step, output_tile, first)

            lax.fori_loop(0, segment.num_kv_tiles, move, None)

        walk(self.run, self.refs, shape, config, move_segment, is_first_to_read=True)

    def move_x(self) -> None:
        """Copies queries, when CTAs have met; at each step it keeps pace with the ring."""
        if copies_together():
            plgpu.barrier_arrive(self.heads_there)

        def move_segment(output_tile, segment):
            place = segment.query_place(QUERY_PLACES)
            is_taken = segment.output_tiles_done >= QUERY_PLACES
            pl.when(is_taken)(lambda: plgpu.barrier_wait(self.query_free.at[place]))
            # The columns may be more than there are: what is out of bounds is filled with zeros.
            columns = self.refs["query"].at[output_tile.index, pl.ds(output_tile.index * 0, self.layout.shape.cols)]
            plgpu.copy_gmem_to_smem(columns, self.query_smem.at[place], self.query_full.at[place])

            def keep_pace(i, _):
                step = segment.kv_tiles_done + i
                self.ring.await_free(step)
                if copies_together():
                    plgpu.barrier_arrive(self.ring.full[-1].at[self.ring.stage(step)])

            lax.fori_loop(0, segment.num_kv_tiles, keep_pace, None)

        walk(self.run, self.refs, self.layout.shape, self.layout.config, move_segment)

    def compute(self) -> None:
        """Attends, and writes the results of the output tiles that the CTA is to finish."""
        layout = self.layout
        if layout.epilogue is not None:
            self._await_heads()  # the CTAs have counted the exchange before
        products = products_of(layout.shape)(
            shape=layout.shape, config=layout.config, weights_smem=self.softmax_smem
        )  # fmt: skip
        RunCompute(
            tables=self.refs, shape=layout.shape, config=layout.config, run=self.run, epilogue=layout.epilogue,
            products=products, results=_Results(layout=layout, outputs=self.outputs), outputs=self.outputs,
            stages=_RingStages(self.ring, self.kv_smem, layout.config.block_kv), query_smem=self.query_smem,
            query_full=self.query_full, query_free=self.query_free, words_smem=self.words_smem,
            merged_at_once=layout.merged_at_once, columns=layout.group,
            writes_results=True,
        ).compute()  # fmt: skip

    def _await_heads(self) -> None:
        if copies_together():
            await_copies(self.heads_there, jnp.int32(0), 1)

    def _copy_kv(self, step, output_tile, first) -> None:
        block_kv = self.layout.config.block_kv
        barriers, stage = self.ring.full[0], self.ring.stage(step)
        arrays = [self.refs[name] for name in ("key", "value")]
        if copies_together():
            place = output_tile.sequence, first, output_tile.head
            copy_kv_together(arrays, self.kv_smem, barriers, stage, place, block_kv=block_kv)
            return
        for number, array in enumerate(arrays):
            source = array.at[output_tile.sequence, pl.ds(pl.multiple_of(first, 8), block_kv), output_tile.head]
            target = _kv_rows(self.kv_smem, stage, number, block_kv)
            plgpu.copy_gmem_to_smem(source, target, barriers.at[stage])


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Results:
    """Results as rows of x of the next product, `[rows, N H]`, and partial states, which threads write.

    The methods are those of `lean_results.CopiedResults`.
    """

    layout: AttentionLayout
    outputs: tuple

    def await_memory(self) -> None:
        """Does nothing."""

    def write(self, output_tile, first_dim: int, state) -> None:
        """Writes part of the result of an output tile."""
        acc, top, total = state
        out, _ = finished(acc, top, total())
        group, head_dim = self.layout.group, self.layout.shape.head_dim
        ref, size = self.outputs[0], group * head_dim
        if is_interpreted():
            num_tiles = math.prod(ref.shape) // size // ref.shape[0]
            row, first = lax.div(output_tile, num_tiles), lax.rem(output_tile, num_tiles) * size
            ref[row, pl.ds(first, size)] = out[:, :group].T.reshape(-1).astype(ref.dtype)
            return
        offset = output_tile * size + first_dim
        store_columns(ref, out, offset, strides=(1, head_dim), num_rows=out.shape[0], num_columns=group)

    def leave(self, partial, first_dim: int, state) -> None:
        """Writes part of partial state number `partial`."""
        store_partial(self.layout.shape, self.outputs[-2:], partial, first_dim, state)

    def end(self) -> None:
        """Does nothing: when a CTA comes to the next meeting, all that it wrote is there."""
