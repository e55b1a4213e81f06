"""The many-query kernel for Hopper: attention of many query rows over keys that they share, as a common prefix.

It has the schedule of `lean.py` and the other orientation, S = Q K^T and O = P V: queries are the rows of a tensor
core. Sequences that share keys turn the products of a decode step from matrix by vector into matrix by matrix. Reading
K and V then takes little time, and the tensor cores are to be kept busy. Per CTA:
- one warpgroup moves (TMA, or `cp.async` of query rows), two compute, 64 query rows each, and share the K and V that
  arrive;
- the two take turns: while the tensor core multiplies for one, the other has its softmax;
- the weights P go from registers to the tensor core.
Where a block has 64 rows, the CTA has two streams instead: each has a run of its own, one warpgroup that moves and one
that computes. While one waits for its next output tile, the other computes.

Most shapes have fewer blocks of query rows than there are CTAs. So runs of KV tiles are equal here too, whatever output
tiles they cut, and `tall_merge.py` merges the partial states. Output tiles that a run holds whole are written at once,
where there are registers for that (`writes_uncut`).

A few queries of a large group are rows too (`lean_layout.is_few_query_rows`). Each then has a range of keys of its own.
The kernel looks at it only in KV tiles that some row does not see whole.

Sources: Hydragen, section 3.2; LeanAttention, section 4.3, for the schedule; FlashAttention-3, section 3.1, for turns.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.kernels.kv_parts import has_broken_group
from tree_attn.kernels.lean_layout import ROWS, LeanConfig, LeanShape, has_whole_output_tiles, num_partials
from tree_attn.kernels.lean_walk import run_of_cta
from tree_attn.kernels.overlap import await_previous_kernel
from tree_attn.kernels.query_layout import QUERY_MULTIPLE, is_by_rows
from tree_attn.kernels.registers import WRITES_IN_PLACE, launch
from tree_attn.kernels.tall_cta import COMPUTING, TallCta, tall_scratch
from tree_attn.kernels.tall_merge import merge_cut, merge_partials


def registers_of(shape: LeanShape, has_rows: bool) -> tuple[int, int]:
    """Returns the registers per thread of a warpgroup that computes, and of one that moves.

    Of 504 for three, or 512 for four, those that compute need most, for accumulators. To copy KV tiles in parts, from
    pages for few queries, or queries row by row, takes more.
    """
    if shape.streams > 1:
        return 200, 56
    is_paged = shape.page_size is not None and (shape.is_gathered or shape.mask == "columns")
    if not (has_broken_group(shape) or has_rows or is_paged):
        return 240, 24
    return (224, 56) if shape.head_dim <= 128 else (232, 40)


@functools.partial(jax.jit, static_argnames=("shape", "config"))
def tall_attention(
    query, key, value, *, sequences=None, runs=None, columns=None, pages=None, scales=None, merge_with=None,
    shape: LeanShape, config: LeanConfig,
):  # fmt: skip
    """Computes `lean.lean_attention` for `shape.is_many_query`, a head dim that 64 divides, and one dtype.

    Args:
      query: `[B, T, N, H]`.
      sequences, runs, columns, pages, scales, merge_with: as in `lean.lean_attention`.
    Returns:
      out like `query`, lse float32 `[output tiles, cols]`.
    """
    tables = {"sequences": sequences, "runs": runs, "columns": columns, "pages": pages, "scales": scales}
    results = (
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        jax.ShapeDtypeStruct((shape.num_output_tiles, shape.cols), jnp.float32),
    )
    partials = _partials(shape, config)
    if has_whole_output_tiles(shape, config):
        return _launch_runs(query, key, value, tables, shape, config, results)
    if merge_with is None and writes_uncut(shape, query.shape[1]):
        attended = _launch_runs(query, key, value, tables, shape, config, (*results, *partials))
        return merge_cut(attended[2:], attended[:2], sequences, runs, shape, config)
    attended = _launch_runs(query, key, value, tables, shape, config, partials)
    return merge_partials(attended, results, sequences, merge_with, shape, config)


@functools.partial(jax.jit, static_argnames=("shape", "config"))
def tall_partials(query, key, value, *, shape: LeanShape, config: LeanConfig, **tables):
    """Computes the partial states of all output tiles, which no kernel here merges; arguments of `tall_attention`.

    Returns:
      float32 `[partial states, halves, 64, H]`, sums of values weighted by `2^(x - max)`, x logits in base 2; and
      `[partial states, halves, 2, 64]`, max and the sum of those weights. `lean_layout.partials_of` says which are an
      output tile's. Where half a block has no queries it has none.
    """
    return _launch_runs(query, key, value, tables, shape, config, _partials(shape, config))


def _partials(shape: LeanShape, config: LeanConfig):
    """Returns the shapes and dtypes of what `tall_partials` returns."""
    count, halves = num_partials(shape, config), shape.cols // ROWS
    accs = jax.ShapeDtypeStruct((count, halves, ROWS, shape.head_dim), jnp.float32)
    return accs, jax.ShapeDtypeStruct((count, halves, 2, ROWS), jnp.float32)


def _launch_runs(query, key, value, tables, shape: LeanShape, config: LeanConfig, outputs):
    """Launches the first kernel.

    Args:
      tables: by name; None where there is none.
      outputs: shapes and dtypes of what it writes: out and lse, of all output tiles or of uncut ones; then accs and
        stats, if it leaves partial states.
    """
    tables = {name: table for name, table in tables.items() if table is not None}
    return launch(
        functools.partial(_attend_runs, tuple(tables), shape, config),
        out_type=outputs,
        grid=(pl.cdiv(config.num_ctas, shape.streams),),
        grid_names=("cta",),
        num_threads=COMPUTING + shape.streams,
        thread_name="warpgroup",
        name="tall_attention" if shape.streams == 1 else "tall_streams",
    )(query, key, value, *tables.values())


def writes_uncut(shape: LeanShape, num_queries: int) -> bool:
    """Returns whether the first kernel writes the results of output tiles that its runs hold whole.

    It leaves partial states of the others beside them. TMA writes results if 8 divides `num_queries`. Threads write
    those of few queries. Larger heads, and blocks of more of them, take registers.
    """
    is_able = shape.head_dim <= 128 and jax.__version_info__ >= WRITES_IN_PLACE
    if shape.group is not None:
        return is_able
    is_able &= num_queries % QUERY_MULTIPLE == 0 and shape.cols // shape.tokens <= 4
    return is_able and not shape.is_gathered  # with many masks it spills a register


def run_number(cta, stream, shape: LeanShape, config: LeanConfig):
    """Returns the number of a stream's run; from `config.num_ctas` on there is none. The first runs have a CTA each."""
    return cta + stream * pl.cdiv(config.num_ctas, shape.streams)


def _attend_runs(names, shape: LeanShape, config: LeanConfig, query_ref, key_ref, value_ref, *refs):
    refs_by_name = {"query_ref": query_ref, "key_ref": key_ref, "value_ref": value_ref}
    refs_by_name |= {"tables": dict(zip(names, refs)), "outputs": refs[len(names) :]}
    pl.run_scoped(
        functools.partial(_attend_run, shape, config, refs_by_name),
        **tall_scratch(shape, config, query_ref),
        collective_axes="warpgroup",
    )


def _attend_run(shape: LeanShape, config: LeanConfig, refs: dict, **smem) -> None:
    warpgroup, cta = lax.axis_index("warpgroup"), lax.axis_index("cta")
    stream, half = 0, warpgroup  # the half only where it computes
    if shape.streams > 1:
        stream, half = jnp.where(warpgroup < COMPUTING, warpgroup, warpgroup - COMPUTING), 0
        cta = run_number(cta, stream, shape, config)
    computing, moving = registers_of(shape, is_by_rows(shape, refs["query_ref"]))
    # The merge does not begin early: its CTAs would crowd on the few SMs that this kernel leaves registers on.
    await_previous_kernel()
    run = run_of_cta(refs["tables"], shape, config, jnp.minimum(cta, config.num_ctas - 1))
    if config.num_ctas % shape.streams:  # the last stream has no run
        run = dataclasses.replace(run, num_kv_tiles=jnp.where(cta < config.num_ctas, run.num_kv_tiles, 0))
    number = dict(warpgroup=warpgroup, cta=cta, stream=stream, half=half)
    of_cta = TallCta(shape=shape, config=config, run=run, **number, **refs, **smem)

    @pl.when(warpgroup >= COMPUTING)
    def _move():
        plgpu.set_max_registers(moving, action="decrease")
        of_cta.move()

    @pl.when(warpgroup < COMPUTING)
    def _compute():
        plgpu.set_max_registers(computing, action="increase")
        of_cta.compute()
