"""The components of keys that SparQ reads, on Hopper: those in which a choice's queries are largest.

Shapes in comments: H head dim, G queries of a group, R components read, rounded up.

Source: SparQ Attention, Algorithm 1, step 1, and section 4 (groups).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.kernels.registers import LOG2_E, launch, load
from tree_attn.kernels.sparq_shape import COLUMNS, SparqShape
from tree_attn.kernels.sparq_top_k import scalar_of

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
