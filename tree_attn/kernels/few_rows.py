"""Products of few rows on Hopper, `y = x W^T`: weights are streamed through shared memory at the speed of reads.

Each CTA has out-features of its own (`few_rows_layout.py`). Of its two warpgroups one moves and one multiplies:
- Weights come a tile of out-features and a block of in-features at a time, a stage. The stages fill most of an SM's
  memory, so that enough is in flight. x, and its norm's scale, come with them a block at a time.
- Operands are swapped, `y^T = W x^T`: the 64 rows of the tensor core are out-features, its 8 or 16 columns rows of x.
  Of a tile with fewer the rest is what lies behind it, whose results are dropped.
- With `config.stack` the 64 rows are several blocks of a small tile, and the columns as many of x. Sums of a block's
  own are added at the end.
- The norm is applied in two parts. x is multiplied by the scale where it lies; `1 / sqrt(mean(x^2) + eps)`, of
  which the sum is made on the way, multiplies the result.
- Activation, residual and rounding come at the end, in registers.

With `config.is_early` (JAX 0.12 or newer) weights are read before the previous kernel has ended, and so must not be
what it writes. Everything else waits for its end.

How a CTA runs a product is in `few_rows_cta.py`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.kernels.few_rows_cta import CtaProduct
from tree_attn.kernels.few_rows_layout import GRAIN, REDUCTION_BYTES, FewRowsConfig, FewRowsShape, check_fits
from tree_attn.kernels.few_rows_moves import full_barriers, ring_scratch
from tree_attn.kernels.few_rows_ring import Ring
from tree_attn.kernels.few_rows_sum import SumEnd
from tree_attn.kernels.overlap import await_previous_kernel, begin_next_kernel
from tree_attn.kernels.registers import launch


@functools.partial(jax.jit, static_argnames=("shape", "config"))
def multiply_few_rows(x, weights, scale=None, residual=None, *, shape: FewRowsShape, config: FewRowsConfig):
    """Returns `[rows, O]`; every check but the layout's is the caller's.

    Args:
      x: `[rows, I]`; weights: `[parts, O, I]`; scale: `[I]`, where `shape.eps`; residual: `[rows, O]`, where
        `shape.has_residual`.
    """
    out = jax.ShapeDtypeStruct((shape.rows, shape.out_features), shape.out_dtype)
    return _launch({"x": x, "weights": weights, "scale": scale, "residual": residual}, out, shape, config)


@functools.partial(jax.jit, static_argnames=("shape", "config", "buffers"))
def multiply_and_sum(x, weights, residual, rank, *, shape: FewRowsShape, config: FewRowsConfig, buffers):
    """Returns `[rows, O]`, the sum over devices of their products, and of the residual if there is one.

    Args:
      x, weights: as in `multiply_few_rows`, of this device's in-features; residual: `[rows, O]`, or None.
      rank, buffers: as of `exchange.exchange`.
    """
    out = jax.ShapeDtypeStruct((shape.rows, shape.out_features), shape.out_dtype)
    arrays = {"x": x, "weights": weights, "residual": residual, "rank": rank}
    return _launch(arrays, out, shape, config, SumEnd(buffers, config))


@functools.partial(jax.jit, static_argnames=("shape", "config"))
def multiply_into_cache(x, weights, scale, angles, slots, key, value, *, shape: FewRowsShape, config: FewRowsConfig):
    """Returns rotated queries `[rows, N, H]`, and the caches with rotated keys and values written to their slots.

    Args:
      x, weights, scale: as in `multiply_few_rows`; out-features are `shape.heads`'.
      angles: float32 `[2, rows, H/2]`, cosines and sines.
      slots: int32 `[columns]`, the slot of each row in its sequence; nothing is written where there is none.
      key, value: `[B, S, K, H]`, written in place where they are not used any more.
    """
    key, value = jax.new_ref(key), jax.new_ref(value)
    arrays = {"x": x, "weights": weights, "scale": scale, "angles": angles, "slots": slots, "key": key, "value": value}
    query = _launch(arrays, queries_of(shape, key.shape[2]), shape, config)
    return in_rows(query, shape), jax.freeze(key), jax.freeze(value)


def queries_of(shape: FewRowsShape, num_kv_heads: int) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of the queries, `[rows K, G, H]`, in which a product with heads ends.

    Args:
      num_kv_heads: K, of all devices.
    """
    heads = shape.heads
    return jax.ShapeDtypeStruct((shape.rows * num_kv_heads, heads.group, heads.head_dim), shape.out_dtype)


def in_rows(query, shape: FewRowsShape):
    """Returns queries of `queries_of` as `[rows, N, H]`."""
    return query.reshape(shape.rows, -1, shape.heads.head_dim)


def _launch(arrays: dict, out, shape: FewRowsShape, config: FewRowsConfig, end: SumEnd | None = None):
    """Launches the kernel, which writes `out`, and those of `arrays` that are refs; it may end in a sum of devices."""
    check_fits(shape, config)
    if shape.rows > GRAIN:  # a copy cuts x into groups of 8 rows, of which the last must be whole
        arrays["x"] = jnp.pad(arrays["x"], [(0, shape.columns - shape.rows), (0, 0)])
    arrays = {name: array for name, array in arrays.items() if array is not None}
    return launch(
        functools.partial(_multiply, tuple(arrays), shape, config, end),
        out_type=out,
        grid=(config.num_ctas,),
        grid_names=("cta",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_bytes=REDUCTION_BYTES,
        name="few_rows" if end is None else "few_rows_sum",
    )(*arrays.values())


def _multiply(names, shape: FewRowsShape, config: FewRowsConfig, end: SumEnd | None, *refs):
    def multiply(full, free, **scratch):
        num_steps = config.tiles * config.blocks(shape)
        ring = Ring(full=full, free=free, num_stages=config.num_stages, num_steps=num_steps)
        refs_of_names = dict(zip(names, refs))
        product = CtaProduct(
            shape=shape, config=config, end=end, refs=refs_of_names, out_ref=refs[-1], ring=ring, **scratch
        )  # fmt: skip
        pl.when(lax.axis_index("warpgroup") == 1)(lambda: _move(product))
        pl.when(lax.axis_index("warpgroup") == 0)(lambda: _compute(product))

    pl.run_scoped(
        multiply,
        full=full_barriers(shape, config),
        free=plgpu.Barrier(num_barriers=config.num_stages),
        **ring_scratch(shape, config),
        collective_axes="warpgroup",
    )


def _move(product: CtaProduct) -> None:
    num_ahead = min(product.config.num_stages, product.num_steps)  # whose weights wait for nothing
    lax.fori_loop(0, num_ahead, product.copy_weights, None)
    if product.config.is_early:
        begin_next_kernel()
        await_previous_kernel()
    lax.fori_loop(0, num_ahead, product.copy_x, None)
    lax.fori_loop(num_ahead, product.num_steps, product.refill, None)


def _compute(product: CtaProduct) -> None:
    if product.config.is_early:
        await_previous_kernel()
    product.compute()
