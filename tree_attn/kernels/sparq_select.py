"""SparQ's first gather on Hopper, step 1 of Algorithm 1: a few components of every key, which choose some of the keys.

`sparq_components.py` chooses the components. A CTA of `select_keys` then serves one chunk of a choice. It streams r
components of all its keys, one TMA copy each, into logits that stay in registers. Then it finds the k-th largest by
bisection over the order of floats, and lists the kept keys and their weights. `sparq_attend.py` is step 2, attention to
them.

The G queries of a group choose together: a component is read once for all of them, and the score of a key is the sum
of its shares of their softmaxes. So no score is known before all logits are. Registers may not hold all of them, a
shard has only a part, and kept keys may be weighed by them. Then `approximate_logits` writes them to memory (4 G bytes
per key, beside the 2 r that it reads) and `sparq_lists.py` reads them. To stream the components once more instead
would read 2 r more in place of 8 G: no less for G up to 8 and r from 32 on, and not from the L2 cache.

Shapes in comments: W = S / 64 rows of 64 keys, k kept keys, G queries of a group, R components read, rounded up.

Source: SparQ Attention, Algorithm 1, sections 4 (groups) and 5.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.kernels.registers import LOG2_E, LOWEST, full, launch, load, tiling
from tree_attn.kernels.sparq_shape import CHUNK, COLUMNS, SparqShape, ctas_for
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
def select_keys(key_by_component, components, weights, ends, *, shape: SparqShape):
    """Returns the best keys of each chunk, and their weight in the approximate scores; with groups if `shape.is_final`.

    Args:
      key_by_component: `[B, K, H, S]`.
      components, weights: `[choices, R]` and `[choices, G, R]` from `sparq_components.choose_components`.
      ends: int32 `[chunks, 4]`, slots within the chunk: the end of the visible ones, and the first of those that are
        kept whatever they score; two unused.
    Returns:
      slots int32 and their logits float32, `[chunks, k]`, in no order; the first min(k, visible) are defined (and
      logits only if not `shape.is_final`);
      lse of all keys for each query, float32 `[chunks, G]`; without groups `[chunks, 2]`, of all and of kept keys.
    """
    chunks = shape.choices * shape.num_chunks
    listed = functools.partial(jax.ShapeDtypeStruct, (chunks, shape.num_keys))
    return _launch_stream(
        functools.partial(_choose, shape),
        (listed(jnp.int32), listed(jnp.float32), jax.ShapeDtypeStruct((chunks, max(2, shape.group)), jnp.float32)),
        "sparq_select",
        shape,
    )(_keys_in_rows(key_by_component, shape), components, weights, ends)


@functools.partial(jax.jit, static_argnames=("shape",))
def approximate_logits(key_by_component, components, weights, ends, *, shape: SparqShape):
    """Returns the approximate logits of all keys, where all must be known before any is chosen.

    Args:
      key_by_component, components, weights, ends: as in `select_keys`.
    Returns:
      logits in log2, float32 `[choices, G, W, 64]`, defined for visible slots; lse float32 `[chunks, G]`.
    """
    width = shape.num_lists * CHUNK // shape.tile[1]
    logits, lse = _launch_stream(
        functools.partial(_write_logits, shape),
        (
            jax.ShapeDtypeStruct((shape.choices, shape.group, width, shape.tile[1]), jnp.float32),
            jax.ShapeDtypeStruct((shape.choices * shape.num_chunks, shape.group), jnp.float32),
        ),
        "sparq_logits",
        shape,
    )(_keys_in_rows(key_by_component, shape), components, weights, ends)
    return logits.reshape(shape.choices, shape.group, -1, COLUMNS), lse


def _keys_in_rows(key_by_component, shape: SparqShape):
    return key_by_component.reshape(*key_by_component.shape[:3], -1, shape.tile[1])


def _launch_stream(finish_chunk, out_type, name: str, shape: SparqShape):
    chunks, smem_bytes = shape.choices * shape.num_chunks, shape.num_stages * shape.chunk * 2
    return launch(
        functools.partial(_stream, shape, finish_chunk),
        out_type=out_type,
        grid=(ctas_for(shape, chunks, smem_bytes, shape.stream_ctas_per_sm),),
        grid_names=("cta",),
        num_threads=1,
        thread_name="warpgroup",
        scratch_bytes=4096,
        name=name,
    )


def _stream(shape: SparqShape, finish_chunk, *refs):
    stages, group, columns = shape.num_stages, shape.group, pl.cdiv(shape.num_components, 32) * 32
    pl.run_scoped(
        functools.partial(_stream_scoped, shape, finish_chunk, *refs),
        keys_smem=plgpu.SMEM((stages, *shape.tile), shape.dtype, transforms=tiling(shape.dtype, shape.tile[1])),
        # A TMA copy begins at a multiple of 128 bytes.
        components_smem=plgpu.SMEM((2, columns), jnp.int32),
        weights_smem=plgpu.SMEM((2, group, columns), jnp.float32),
        ends_smem=plgpu.SMEM((2, 32), jnp.int32),
        count_smem=plgpu.SMEM((COLUMNS,), jnp.int32),
        weight_smem=plgpu.SMEM((COLUMNS,), jnp.float32),
        inputs_full=plgpu.Barrier(num_arrivals=2 + group, num_barriers=2),
        filled=plgpu.Barrier(num_barriers=stages),
        collective_axes="warpgroup",
    )


def _stream_scoped(
    shape: SparqShape, finish_chunk, keys_ref, components_ref, weights_ref, ends_ref, *outputs,
    keys_smem, components_smem, weights_smem, ends_smem, count_smem, weight_smem, inputs_full, filled,
):  # fmt: skip
    """Calls `finish_chunk` with each chunk's logits in log2, one array per query of the group."""
    cta, num_ctas = lax.axis_index("cta"), lax.axis_size("cta")
    count, stages, layout = shape.num_components, shape.num_stages, plgpu.Layout.WGMMA
    tile, group = shape.tile, range(shape.group)
    num_own = lax.div(shape.choices * shape.num_chunks - cta + num_ctas - 1, num_ctas)

    def move_inputs(i):
        """Begins the copies of components, weights and ends of this CTA's i-th chunk, into one of two places."""
        chunk, parity = cta + i * num_ctas, lax.rem(i, 2)
        choice = lax.div(chunk, shape.num_chunks)
        pairs = [(components_ref.at[choice], components_smem.at[parity])]
        pairs += [(weights_ref.at[choice, g], weights_smem.at[parity, g]) for g in group]
        for source, smem in (*pairs, (ends_ref.at[chunk], ends_smem.at[parity])):
            plgpu.copy_gmem_to_smem(source, smem.at[pl.ds(0, source.shape[0])], inputs_full.at[parity])

    def move(i, n):
        """Begins the copy of the n-th component of the i-th chunk."""
        chunk, stage = cta + i * num_ctas, lax.rem(i * count + n, stages)
        choice, within = lax.div(chunk, shape.num_chunks), lax.rem(chunk, shape.num_chunks)
        sequence, head = shape.sequence_and_head(choice)
        # Keys beyond S are filled with zeros.
        keys = pl.ds(pl.multiple_of(within * tile[0], 8), tile[0])
        source = keys_ref.at[sequence, head, components_smem[lax.rem(i, 2), n], keys]
        plgpu.copy_gmem_to_smem(source, keys_smem.at[stage], filled.at[stage])

    def move_first(i):
        lax.fori_loop(0, min(stages, count), lambda n, _: move(i, n), None)

    move_inputs(jnp.int32(0))
    plgpu.barrier_wait(inputs_full.at[0])
    move_first(jnp.int32(0))

    def chunk_step(i, _):
        chunk, parity, is_last = cta + i * num_ctas, lax.rem(i, 2), i + 1 == num_own
        plgpu.commit_smem()  # all threads have read the last chunk's inputs
        pl.when(~is_last)(lambda: move_inputs(i + 1))

        def add_component(n, logits):
            stage = lax.rem(i * count + n, stages)
            plgpu.barrier_wait(filled.at[stage])
            component = load(keys_smem.at[stage], layout).astype(jnp.float32)
            plgpu.commit_smem()  # all have read it
            pl.when(n + stages < count)(lambda: move(i, n + stages))
            return tuple(logits[g] + component * weights_smem[parity, g, n] for g in group)

        logits = lax.fori_loop(0, count, add_component, tuple(full(0.0, tile, layout) for _ in group))

        @pl.when(~is_last)
        def _():  # the next chunk's components arrive while this one's keys are chosen
            plgpu.barrier_wait(inputs_full.at[1 - parity])
            move_first(i + 1)

        finish_chunk(chunk, logits, ends_smem.at[parity], *outputs, count_smem, weight_smem)

    lax.fori_loop(0, num_own, chunk_step, None)


def _choose(
    shape: SparqShape, chunk, logits, ends_ref, slots_ref, logits_ref, stats_ref, count_smem, weight_smem
) -> None:
    """Lists the kept keys of one chunk, and writes their weight."""
    layout = plgpu.Layout.WGMMA
    slots, is_visible, is_recent = slots_of_chunk(logits[0].shape, ends_ref)
    scalar = lambda x, operation, smem: scalar_of(x, operation, layout, smem)
    weight_of = lambda chosen, x, top: scalar(jnp.where(chosen, jnp.exp2(x - top), 0.0), "add", weight_smem)
    tops = [scalar(jnp.where(is_visible, x, LOWEST), "max", weight_smem) for x in logits]
    totals = [weight_of(is_visible, x, top) for x, top in zip(logits, tops)]
    if shape.group == 1:
        # The order of logits is the order of their shares. One array serves as both: registers limit CTAs here.
        (shares,), (top,) = logits, tops
        recent_weight = weight_of(is_recent, shares, top)
    else:
        shares = [x - (top + jnp.log2(total)) for x, top, total in zip(logits, tops, totals)]
        shares = functools.reduce(log2_of_sum, shares)
    scores = scores_of(shares, is_visible, is_recent)
    is_kept = first_largest(scores, slots, shape.chunk, shape.num_keys, counting(count_smem))
    if shape.group == 1:
        totals.append(recent_weight + weight_of(is_kept & (scores < jnp.inf), scores, top))
        tops.append(top)
    for i, (top, weight) in enumerate(zip(tops, totals)):
        stats_ref[chunk, i] = lse_of(top, weight)
    lists = [(slots + lax.rem(chunk, shape.num_chunks) * shape.chunk, slots_ref.at[chunk])]
    if not shape.is_final:  # else no caller needs the logits, and registers are saved
        lists.append((logits[0] * (1 / LOG2_E), logits_ref.at[chunk]))
    write_lists(is_kept, lists, count_smem)


def _write_logits(shape: SparqShape, chunk, logits, ends_ref, logits_ref, lse_ref, count_smem, weight_smem) -> None:
    layout, rows = plgpu.Layout.WGMMA, shape.tile[0]
    _, is_visible, _ = slots_of_chunk(logits[0].shape, ends_ref)
    scalar = lambda x, operation: scalar_of(x, operation, layout, weight_smem)
    choice, within = lax.div(chunk, shape.num_chunks), lax.rem(chunk, shape.num_chunks)
    for g, x in enumerate(logits):
        logits_ref[choice, g, pl.ds(within * rows, rows)] = x
        top = scalar(jnp.where(is_visible, x, LOWEST), "max")
        lse_ref[chunk, g] = lse_of(top, scalar(jnp.where(is_visible, jnp.exp2(x - top), 0.0), "add"))
