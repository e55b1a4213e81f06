"""SparQ's choice of keys from memory, on Hopper: from the logits of a group, or from lists that compete.

`select_by_share` lists the best keys of each part of `CHUNK` slots. `best_of` chooses among the lists of a choice.

Source: SparQ Attention, Algorithm 1, section 4 (groups).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.kernels.registers import LOG2_E, LOWEST, launch, load
from tree_attn.kernels.sparq_shape import CHUNK, COLUMNS, SparqShape
from tree_attn.kernels.sparq_top_k import (
    counting,
    first_largest,
    log2_of_sum,
    lse_of,
    scalar_of,
    scores_of,
    slots_of_chunk,
    write_lists,
)


@functools.partial(jax.jit, static_argnames=("shape",))
def select_by_share(logits, total, ends, *, shape: SparqShape):
    """Returns the best keys of each list of `CHUNK` slots.

    Args:
      logits: `[choices, G, W, 64]` from `approximate_logits`.
      total: float32 `[choices, G]`, the lse of all logits of each query; finite.
      ends: int32 `[lists, 4]`, as in `select_keys`, within each list's slots.
    Returns:
      slots int32 and their scores float32, `[lists, k]`, in no order; the first min(k, visible) are defined. A score is
      log2 of the sum of a key's shares, or infinity where the key is kept whatever it scores.
    """
    lists = shape.choices * shape.num_lists
    listed = functools.partial(jax.ShapeDtypeStruct, (lists, shape.num_keys))
    return launch(
        functools.partial(_select_by_share, shape),
        out_type=(listed(jnp.int32), listed(jnp.float32)),
        grid=(lists,),
        grid_names=("list",),
        num_threads=1,
        thread_name="warpgroup",
        scratch_bytes=4096,
        name="sparq_share",
    )(logits, total, ends)


def _select_by_share(shape: SparqShape, logits_ref, total_ref, ends_ref, slots_ref, scores_ref):
    def scoped(count_smem):
        index, rows, layout = lax.axis_index("list"), CHUNK // COLUMNS, plgpu.Layout.WGMMA
        choice, part = lax.div(index, shape.num_lists), lax.rem(index, shape.num_lists)

        def share(g):
            logits = load(logits_ref.at[choice, g, pl.ds(part * rows, rows)], layout)
            return logits - total_ref[choice, g] * LOG2_E

        shares = lax.fori_loop(1, shape.group, lambda g, shares: log2_of_sum(shares, share(g)), share(0))
        slots, is_visible, is_recent = slots_of_chunk(shares.shape, ends_ref.at[index])
        scores = scores_of(shares, is_visible, is_recent)
        is_kept = first_largest(scores, slots, CHUNK, shape.num_keys, counting(count_smem))
        lists = [(slots + part * CHUNK, slots_ref.at[index])]
        if shape.num_lists > 1 or shape.is_shard:  # else no lists compete
            lists.append((scores, scores_ref.at[index]))
        write_lists(is_kept, lists, count_smem)

    pl.run_scoped(scoped, plgpu.SMEM((COLUMNS,), jnp.int32), collective_axes="warpgroup")


@functools.partial(jax.jit, static_argnames=("shape",))
def best_of(slots, logits, recent, *, shape: SparqShape):
    """Returns the best of each choice's candidates, which several lists of `select_keys` or `select_by_share` hold.

    Args:
      slots: int32 `[choices, n]`; n up to `CHUNK`.
      logits: float32 `[choices, n]`, with groups the scores; -inf where there is no candidate.
      recent: int32 `[choices]`, the first slot of those that are kept whatever they score.
    Returns:
      slots `[choices, k]`, as `select_keys`, and the lse of the kept logits, float32 `[choices]`; undefined for scores.
    """
    choices, n = slots.shape
    padding = [(0, 0), (0, CHUNK - n)]
    slots, logits = jnp.pad(slots, padding), jnp.pad(logits, padding, constant_values=-jnp.inf)
    tiles = (choices, CHUNK // COLUMNS, COLUMNS)
    return launch(
        functools.partial(_best, shape),
        out_type=(
            jax.ShapeDtypeStruct((choices, shape.num_keys), jnp.int32),
            jax.ShapeDtypeStruct((choices,), jnp.float32),
        ),
        grid=(choices,),
        grid_names=("choice",),
        num_threads=1,
        thread_name="warpgroup",
        scratch_bytes=4096,
        name="sparq_best",
    )(slots.reshape(tiles), logits.reshape(tiles), recent)


def _best(shape: SparqShape, slots_ref, logits_ref, recent_ref, out_ref, lse_ref):
    def scoped(count_smem, weight_smem):
        choice, layout = lax.axis_index("choice"), plgpu.Layout.WGMMA
        slots, logits = (load(ref.at[choice], layout) for ref in (slots_ref, logits_ref))
        logits = logits * LOG2_E
        is_there = logits > -jnp.inf
        scores = jnp.where(is_there & (slots >= recent_ref[choice]), jnp.inf, logits)
        scalar = lambda x, operation, smem: scalar_of(x, operation, layout, smem)
        is_kept = first_largest(scores, slots, shape.num_slots, shape.num_keys, counting(count_smem))
        top = scalar(jnp.where(is_there, logits, LOWEST), "max", weight_smem)
        weight = scalar(jnp.where(is_kept, jnp.exp2(logits - top), 0.0), "add", weight_smem)
        lse_ref[choice] = lse_of(top, weight)
        write_lists(is_kept, [(slots, out_ref.at[choice])], count_smem)

    smem = functools.partial(plgpu.SMEM, (COLUMNS,))
    pl.run_scoped(scoped, smem(jnp.int32), smem(jnp.float32), collective_axes="warpgroup")
