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

Shapes in comments: O out-features of a tile, cols columns.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.kernels.few_rows_heads import read_places_of, row_of_group, turned, write_heads
from tree_attn.kernels.few_rows_layout import (
    GRAIN,
    IN_MULTIPLE,
    TENSOR_ROWS,
    FewRowsConfig,
    FewRowsShape,
    check_fits,
    fold_shape,
    turn_shape,
)
from tree_attn.kernels.few_rows_results import LAYOUT, read_residual, write_rows
from tree_attn.kernels.few_rows_sum import SumEnd
from tree_attn.kernels.overlap import await_previous_kernel, begin_next_kernel
from tree_attn.kernels.registers import LOG2_E, full, launch, load, store_transposed, tiling, transposable_layout

_REDUCTION_BYTES = 1024


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
    heads = shape.heads
    num_heads = shape.out_features // ((heads.group + 2) * heads.head_dim) * heads.group
    query = jax.ShapeDtypeStruct((shape.rows, num_heads, heads.head_dim), shape.out_dtype)
    key, value = jax.new_ref(key), jax.new_ref(value)
    arrays = {"x": x, "weights": weights, "scale": scale, "angles": angles, "slots": slots, "key": key, "value": value}
    query = _launch(arrays, query, shape, config)
    return query, jax.freeze(key), jax.freeze(value)


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
        scratch_bytes=_REDUCTION_BYTES,
        name="few_rows" if end is None else "few_rows_sum",
    )(*arrays.values())


def _multiply(names, shape: FewRowsShape, config: FewRowsConfig, end: SumEnd | None, *refs):
    stages, block_in = config.num_stages, config.block_in
    smem = functools.partial(plgpu.SMEM, dtype=shape.dtype)
    tiled = functools.partial(smem, transforms=tiling(shape.dtype, IN_MULTIPLE))
    # Tiles lie one behind another, and 64 out-features from the last tile's first are there too.
    weight_rows = (stages * shape.parts - 1) * config.stacked + TENSOR_ROWS
    columns = config.stack * shape.columns
    scratch = {"weights_smem": tiled((weight_rows, block_in)), "x_smem": tiled((stages, columns, block_in))}
    if shape.eps is not None:
        scratch["scale_smem"] = smem((stages, config.stack, block_in))
    if config.stack > 1:
        scratch["fold_smem"] = plgpu.SMEM(fold_shape(shape, config), jnp.float32)
    if shape.heads is not None:
        scratch["turn_smem"] = plgpu.SMEM(turn_shape(shape), jnp.float32)
    copies = shape.parts * (1 if shape.heads is None else config.tile // GRAIN)
    arrivals = config.stack * (copies + 1 + (shape.eps is not None))
    pl.run_scoped(
        functools.partial(_multiply_scoped, dict(zip(names, refs)), shape, config, end, refs[-1]),
        full=plgpu.Barrier(num_barriers=stages, num_arrivals=arrivals),
        free=plgpu.Barrier(num_barriers=stages),
        **scratch,
        collective_axes="warpgroup",
    )


def _multiply_scoped(
    refs, shape: FewRowsShape, config: FewRowsConfig, end: SumEnd | None, out_ref, *,
    full, free, weights_smem, x_smem, scale_smem=None, fold_smem=None, turn_smem=None,
):  # fmt: skip
    stages, stack, cols = config.num_stages, config.stack, shape.columns
    blocks = shape.in_features // (stack * config.block_in)  # stages of a tile
    first_tile = lax.axis_index("cta") * config.tiles

    def rows_of(stage, part: int, rows: int, place: int = 0, group: int = 0):
        first = ((stage * shape.parts + part) * stack + place) * config.tile + group * GRAIN
        return weights_smem.at[pl.ds(pl.multiple_of(first, GRAIN), rows)]

    def x_of(stage, place: int):
        return x_smem.at[stage, pl.ds(place * cols, cols)]

    def first_feature(tile):
        return pl.multiple_of((first_tile + tile) * config.tile, GRAIN)

    def first_pair(tile):
        return pl.multiple_of((first_tile + tile) * (config.tile // 2), GRAIN)

    @pl.when(lax.axis_index("warpgroup") == 1)
    def _move():
        def columns(step, place: int):
            block = lax.rem(step, blocks) * stack + place
            return pl.ds(pl.multiple_of(block * config.block_in, IN_MULTIPLE), config.block_in)

        def copy_weights(step, stage):
            tile = lax.div(step, blocks)
            if shape.heads is None:
                groups = [(first_feature(tile), config.tile)]
            else:
                row_of = functools.partial(row_of_group, first_pair(tile), heads=shape.heads)
                groups = [(row_of(group), GRAIN) for group in range(config.tile // GRAIN)]
            for place in range(stack):
                for part in range(shape.parts):
                    for group, (first, rows) in enumerate(groups):
                        source = refs["weights"].at[part, pl.ds(first, rows), columns(step, place)]
                        target = rows_of(stage, part, rows, place, group)
                        plgpu.copy_gmem_to_smem(source, target, full.at[stage])
                if scale_smem is not None:
                    source = refs["scale"].at[columns(step, place)]
                    plgpu.copy_gmem_to_smem(source, scale_smem.at[stage, place], full.at[stage])

        def copy_x(step, stage):
            rows = pl.ds(step * 0, cols)  # those past the last are out of bounds: read as zeros
            for place in range(stack):
                source = refs["x"].at[rows, columns(step, place)]
                plgpu.copy_gmem_to_smem(source, x_of(stage, place), full.at[stage])

        def refill(step, _):
            stage = lax.rem(step, stages)
            plgpu.barrier_wait(free.at[stage])
            copy_weights(step, stage)
            copy_x(step, stage)

        lax.fori_loop(0, stages, lambda step, _: copy_weights(step, step), None)
        if config.is_early:
            begin_next_kernel()
            await_previous_kernel()
        lax.fori_loop(0, stages, lambda step, _: copy_x(step, step), None)
        lax.fori_loop(stages, config.tiles * blocks, refill, None)

    @pl.when(lax.axis_index("warpgroup") == 0)
    def _compute():
        if config.is_early:
            await_previous_kernel()
        step = None if end is None else end.begin(refs.get("rank"))

        def release(step):
            @pl.when(step + stages < config.tiles * blocks)  # else the moving warpgroup does not wait for it
            def _():
                plgpu.barrier_arrive(free.at[lax.rem(step, stages)])

        def tile_step(tile, _):
            feature = first_feature(tile)
            residual = read_residual(refs["residual"], feature, shape, config) if shape.has_residual else None
            read_places = lambda: read_places_of(refs, first_pair(tile), shape)
            # On their way while weights are multiplied, where registers hold them: of 16 rows two CTAs fit no SM.
            places = read_places() if shape.heads is not None and cols == GRAIN else None

            def products(*accs):
                def block_step(block, squares):
                    step = tile * blocks + block
                    stage = lax.rem(step, stages)
                    plgpu.barrier_wait(full.at[stage])
                    if squares is not None:
                        for place in range(stack):
                            squares = squares + _scale(x_of(stage, place), scale_smem.at[stage, place], shape)
                        plgpu.commit_smem()
                    for part, acc in enumerate(accs):
                        plgpu.wgmma(acc, rows_of(stage, part, TENSOR_ROWS), x_smem.at[stage].transpose((1, 0)))
                    plgpu.wgmma_wait(shape.parts)  # the block before has been multiplied
                    pl.when(block > 0)(lambda: release(step - 1))
                    return squares

                squares = lax.fori_loop(0, blocks, block_step, _no_squares(shape, config))
                return tuple(acc[...] for acc in accs), squares

            acc = plgpu.ACC((TENSOR_ROWS, stack * cols), jnp.float32)
            sums, squares = pl.run_scoped(products, *[acc] * shape.parts)
            release((tile + 1) * blocks - 1)
            if stack > 1:
                sums = [_folded(x, fold_smem, shape, config) for x in sums]
            result = _finish(sums, squares, residual if end is None else None, shape)
            if end is not None:
                end.add(refs.get("rank"), step, out_ref, result, residual, feature, shape)
                return
            if shape.heads is None:
                write_rows(out_ref, result, feature, shape, config)
                return
            slots, angles = places or read_places()
            result = turned(result, angles, turn_smem)
            write_heads((out_ref, refs["key"], refs["value"]), result, slots, first_pair(tile), shape, config)

        lax.fori_loop(0, config.tiles, tile_step, None)
        if end is not None:
            end.end(refs.get("rank"), step)


def _no_squares(shape: FewRowsShape, config: FewRowsConfig):
    if shape.eps is None:
        return None
    return full(0.0, (config.block_in, shape.columns), transposable_layout())


def _scale(x_smem, scale_smem, shape: FewRowsShape):
    """Multiplies a block of x by the norm's scale, and returns the squares of what it was, float32 `[I, cols]`."""
    layout = transposable_layout()
    x = load(x_smem.transpose((1, 0)), layout).astype(jnp.float32)
    scale = load(scale_smem, layout.reduce(1)).astype(jnp.float32)
    scale = lax.broadcast_in_dim(scale + 1.0 if shape.adds_one else scale, x.shape, [0])
    store_transposed(x_smem, (x * scale).astype(shape.dtype))
    return x * x


def _folded(product, fold_smem, shape: FewRowsShape, config: FewRowsConfig):
    """Returns the sum of what a stack's blocks add to a tile, float32 `[64, cols]`; beyond the tile it is garbage."""
    fold_smem[pl.ds(0, TENSOR_ROWS)] = product
    plgpu.commit_smem()
    slice_of = lambda place: (
        pl.ds(place * config.tile, TENSOR_ROWS), pl.ds(place * shape.columns, shape.columns)
    )  # fmt: skip
    total = functools.reduce(jnp.add, [load(fold_smem.at[slice_of(place)], LAYOUT) for place in range(config.stack)])
    plgpu.commit_smem()  # all have read it
    return total


def _finish(sums, squares, residual, shape: FewRowsShape):
    """Returns the result of a tile, float32 `[64, cols]`."""
    if squares is not None:
        factor = lax.rsqrt(squares.sum(axis=0) * (1.0 / shape.in_features) + shape.eps)
        sums = [x * lax.broadcast_in_dim(factor, x.shape, [1]) for x in sums]
    if shape.activation is None:
        (result,) = sums
    else:
        gate, up = sums
        result = gate / (1.0 + jnp.exp2(gate * -LOG2_E)) * up
    return result if residual is None else result + residual
