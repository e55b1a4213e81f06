"""SparQ's first gather on Hopper, step 1 of Algorithm 1: a few components of every key, which choose some of the keys.

`choose_components` comes first, then `select_keys`. A CTA of the second serves one chunk of a choice. It streams r
components of all its keys, one TMA copy each, into logits that stay in registers. Then it finds the k-th largest by
bisection over the order of floats, and lists the kept keys and their weights. `sparq_attend.py` is step 2, attention to
them.

The G queries of a group choose together: a component is read once for all of them, and the score of a key is the sum
of its shares of their softmaxes. So no score is known before all logits are. Registers may not hold all of them, a
shard has only a part, and kept keys may be weighed by them. Then `approximate_logits` writes them to memory (4 G bytes
per key, beside the 2 r that it reads) and `select_by_share` reads them. To stream the components once more instead
would read 2 r more in place of 8 G: no less for G up to 8 and r from 32 on, and not from the L2 cache.

Shapes in comments: W = S / 64 rows of 64 keys, k kept keys, H head dim, G queries of a group, R components read,
rounded up.

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

COMPARED = 8  # components that all others are compared with at a time: registers limit CTAs


@functools.partial(jax.jit, static_argnames=("coverage", "shape"))
def choose_components(query, *, coverage: float | None, shape: SparqShape):
    """Returns the components in which the queries of each group are largest, and their weights.

    Args:
      query: `[choices, G, H]`.
      coverage: the share of a query's size that the temperature takes these components to have; None: the share that
        they do have.
    Returns:
      components int32 `[choices, R]`, the largest first, of equals the earlier; weights float32 `[choices, G, R]`:
      the query times the scale and log2(e), over the temperature. R is r, rounded up to a multiple of 8.
    """
    columns = pl.cdiv(shape.num_components, 8) * 8
    padded = jnp.pad(query, [(0, 0), (0, 0), (0, shape.padded_head_dim - shape.head_dim)])
    return launch(
        functools.partial(_choose_components, coverage, shape),
        out_type=(
            jax.ShapeDtypeStruct((shape.choices, columns), jnp.int32),
            jax.ShapeDtypeStruct((shape.choices, shape.group, columns), jnp.float32),
        ),
        grid=(shape.choices,),
        grid_names=("choice",),
        num_threads=1,
        thread_name="warpgroup",
        scratch_bytes=4096,
        name="sparq_components",
    )(padded)


def _choose_components(coverage: float | None, shape: SparqShape, query_ref, *outputs):
    columns = outputs[0].shape[1]
    pl.run_scoped(
        functools.partial(_choose_components_scoped, coverage, shape, query_ref, *outputs),
        components_smem=plgpu.SMEM((columns,), jnp.int32),
        # A TMA copy begins at a multiple of 128 bytes.
        weights_smem=plgpu.SMEM((shape.group, pl.cdiv(columns, 32) * 32), jnp.float32),
        size_smem=plgpu.SMEM((shape.padded_head_dim,), jnp.float32),
        scalar_smem=plgpu.SMEM((COLUMNS,), jnp.float32),
        collective_axes="warpgroup",
    )


def _choose_components_scoped(
    coverage: float | None, shape: SparqShape, query_ref, components_ref, weights_ref, *,
    components_smem, weights_smem, size_smem, scalar_smem,
):  # fmt: skip
    """Ranks each component by comparing it with all."""
    layout, padded, columns = plgpu.Layout.WGMMA, shape.padded_head_dim, components_ref.shape[1]
    spread = lambda x, axis, last: lax.broadcast_in_dim(x, (padded, last), [axis])
    iota = lambda axis, last: plgpu.broadcasted_iota(jnp.int32, (padded, last), axis, layout=layout)
    choice = lax.axis_index("choice")

    def sizes(query, axis, place):
        # A widened 16-bit float ends in zero bits, which have room for the place: so no two sizes are equal.
        return spread(lax.bitcast_convert_type(jnp.abs(query), jnp.int32), axis, COMPARED) + (padded - 1 - place)

    def count_larger(block, larger):
        first = block * COMPARED
        others = load(query_ref.at[choice, 0, pl.ds(first, COMPARED)], layout.reduce(0)).astype(jnp.float32)
        return larger + jnp.where(sizes(others, 1, first + iota(1, COMPARED)) > size, 1, 0)

    def count_larger_sums(block, larger):
        """Counts like `count_larger`, but compares places apart: sums have no zero bits for them."""
        first = block * COMPARED
        others = spread(load(size_smem.at[pl.ds(first, COMPARED)], layout.reduce(0)), 1, COMPARED)
        is_earlier = first + iota(1, COMPARED) < iota(0, COMPARED)
        return larger + jnp.where((others > size) | ((others == size) & is_earlier), 1, 0)

    query_of = lambda g: load(query_ref.at[choice, g], layout.reduce(1)).astype(jnp.float32)
    query = query_of(0)
    if shape.group == 1:
        size, count = sizes(query, 0, iota(0, COMPARED)), count_larger
    else:
        total_size = functools.reduce(jnp.add, [jnp.abs(query_of(g)) for g in range(shape.group)])
        size_smem[...] = total_size
        plgpu.commit_smem()
        size, count = spread(total_size, 0, COMPARED), count_larger_sums
    none = plgpu.layout_cast(jnp.zeros((padded, COMPARED), jnp.int32), layout)
    rank = lax.fori_loop(0, padded // COMPARED, count, none).sum(axis=1)  # [H]
    is_it = spread(rank, 0, columns) == iota(1, columns)  # [H, R]
    components_smem[...] = jnp.where(is_it, iota(0, columns), 0).sum(axis=0)

    def weigh(g, query):
        kept_query = jnp.where(is_it, spread(query, 0, columns), 0.0).sum(axis=0)  # [R]
        if coverage is not None:
            temperature = coverage**-0.5
        else:
            total = lambda x: scalar_of(x, "add", layout.reduce(1), scalar_smem)
            whole, part = total(jnp.abs(query)), total(jnp.where(rank < shape.num_components, jnp.abs(query), 0.0))
            temperature = jnp.where(part > 0, lax.rsqrt(part / whole), 1.0)
        weights_smem[g, pl.ds(0, columns)] = kept_query * (shape.scale * LOG2_E * temperature)

    weigh(0, query)
    if shape.group > 1:  # one at a time: registers limit CTAs here too
        lax.fori_loop(1, shape.group, lambda g, _: weigh(g, query_of(g)), None)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(components_smem, components_ref.at[choice])
    for g in range(shape.group):
        plgpu.copy_smem_to_gmem(weights_smem.at[g, pl.ds(0, columns)], weights_ref.at[choice, g])
    plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("shape",))
def select_keys(key_by_component, components, weights, ends, *, shape: SparqShape):
    """Returns the best keys of each chunk, and their weight in the approximate scores; with groups if `shape.is_final`.

    Args:
      key_by_component: `[B, K, H, S]`.
      components, weights: `[choices, R]` and `[choices, G, R]` from `choose_components`.
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
