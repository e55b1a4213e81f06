"""Shapes of products of few rows, and how these are cut over the CTAs of a GPU.

Weights are cut along the out-features, 8 at a time: that is a row of tiles of shared memory. Each CTA then has whole
results, and no two of them have anything to merge. The shapes of Llama 3.2 1B and Llama 3.1 8B leave no more than 4 %
of an H200 idle so (`tests/kernels/test_few_rows.py`). One product leaves 36 of 132 SMs: that of the 1B which ends in
rotation.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from tree_attn.kernels.registers import RESERVED_SMEM_BYTES, WRITES_IN_PLACE
from tree_attn.kernels.targets import SMEM_BYTES_PER_SM

MAX_ROWS = 16
COMPACT_ROWS = 4  # of x, up to which it is not padded (`few_rows_mma.py`)
GRAIN = 8  # out-features that are copied together, at the least
TENSOR_ROWS = 64  # out-features that the tensor core multiplies at once
IN_MULTIPLE = 64  # elements of a row of tiles: 128 bytes
BLOCKS_IN = (256, 128, 64)  # in-features of a stage: a copy has up to 256
STAGE_BYTES = 32 * 1024  # of weights, at the most
STACKED_TILE = 16  # out-features of the largest tiles of which blocks are stacked
STACKED_BLOCK_IN = 128
MIN_STAGES = 2  # with fewer nothing is read while something is multiplied
TILE_COST = 4  # out-features that would take the time of one more tile: its end, and x once more
CTA_BYTES = 192 * 1024  # of all stages, where one CTA has an SM
OVERLAPPED_CTA_BYTES = 104 * 1024  # of all stages, where the next kernel's CTA is there too
REDUCTION_BYTES = 1024  # that Pallas takes for reductions across warps
OTHER_BYTES = 3 * 1024  # for barriers, for these reductions, and for gaps between arrays, which are aligned
ACTIVATIONS = ("silu",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heads:
    """Describes out-features `[K, G + 2, H]`: of each KV head its queries, key and value.

    head_dim:  H
    group:     G, query heads of a KV head
    tokens:    rows of a sequence
    """

    head_dim: int
    group: int
    tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewRowsShape:
    """Describes what is computed: `y = x W^T`, and what goes before and after it.

    rows:          of x, which are padded to `columns` of the tensor core, or not if they are few
    parts:         weights of one input: 2 with an activation (gate and up), else 1
    activation:    one of `ACTIVATIONS`, or None
    eps:           of the norm of x, or None
    adds_one:      whether the norm's factor is one more than its scale
    has_residual:  whether something is added to the result
    heads:         of out-features that are rotated, and of which keys and values go to a cache; or None
    """

    rows: int
    in_features: int
    out_features: int
    parts: int
    dtype: Any
    out_dtype: Any
    activation: str | None = None
    eps: float | None = None
    adds_one: bool = False
    has_residual: bool = False
    heads: Heads | None = None

    @property
    def grain(self) -> int:
        """Out-features of which tiles are multiples: with heads 8 of each half of a head."""
        return GRAIN if self.heads is None else 2 * GRAIN

    @property
    def columns(self) -> int:
        """Rows of x, padded to a multiple of 8."""
        return -(-self.rows // 8) * 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewRowsConfig:
    """Describes how it is computed.

    tile:         out-features of a tile of weights, and of the other part's as many
    tiles:        tiles of each CTA, one after another
    num_ctas:     CTAs
    block_in:     in-features of a block
    num_stages:   stages in flight
    stack:        blocks of a stage, which the tensor core multiplies at once: the out-features of each are some of its
                  64 rows, the rows of x some of its columns, and what does not belong together is dropped
    slabs:        stacks of a stage and a part, which are multiplied one after another
    is_early:     whether weights are read before the previous kernel has ended
    shares_sm:    whether an SM has room for a CTA of the next kernel too
    rows:         of weights that a stage has room for, or None: as many as it needs
    is_compact:   whether x has no rows in shared memory that pad it (`few_rows_mma.py`); of up to `COMPACT_ROWS`, in
                  blocks of 128 or more in-features
    in_flight:    stages whose weights are on their way at once, at most `num_stages`, or None: all that are free; in a
                  product's first `num_stages` steps one is, or all if it is a whole layer's first; where results are
                  broadcast one is until x of the first step is there
    """

    tile: int
    tiles: int
    num_ctas: int
    block_in: int
    num_stages: int
    is_early: bool = False
    shares_sm: bool = False
    stack: int = 1
    slabs: int = 1
    rows: int | None = None
    in_flight: int | None = None
    is_compact: bool = False

    @property
    def stacked(self) -> int:
        """Rows of the tensor core that a tile has."""
        return self.stack * self.tile

    @property
    def in_features_of_stage(self) -> int:
        """In-features of all blocks of a stage."""
        return self.slabs * self.stack * self.block_in

    def blocks(self, shape: FewRowsShape) -> int:
        """Returns the stages of a tile, one after another."""
        return shape.in_features // self.in_features_of_stage

    def x_rows(self, shape: FewRowsShape) -> int:
        """Returns the rows of a block of x in shared memory."""
        return shape.rows if self.is_compact else shape.columns

    def stage_rows(self, shape: FewRowsShape) -> int:
        """Returns the rows of shared memory from the weights of one stage to those of the next."""
        return shape.parts * self.slabs * self.stacked if self.rows is None else self.rows


def unsupported(
    rows: int, out_features: int, in_features: int, dtype, activation: str | None = None, *, has_norm: bool = False
) -> str | None:
    """Returns why the kernel cannot multiply these, or None."""
    if not 1 <= rows <= MAX_ROWS:
        return f"few rows are 1 to {MAX_ROWS}, not {rows}"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"few rows are multiplied in bfloat16 and float16, not {jnp.dtype(dtype).name}"
    if has_norm and jnp.dtype(dtype) == jnp.float16:
        return "few rows have a norm in bfloat16, not float16: x times the scale is rounded first, and could overflow"
    if in_features % IN_MULTIPLE or out_features % GRAIN or not in_features or not out_features:
        return (
            f"few rows need in-features of a multiple of {IN_MULTIPLE} and out-features of a multiple of {GRAIN}, "
            f"not {in_features} and {out_features}"
        )
    if activation not in (None, *ACTIVATIONS):
        return f"few rows have activation {', '.join(ACTIVATIONS)}, not {activation}"
    return None


def unsupported_cache(head_dim: int, dtype, cache_dtype) -> str | None:
    """Returns why the kernel cannot rotate such heads and write them to such a cache, or None."""
    if jax.__version_info__ < WRITES_IN_PLACE:
        return f"a kernel writes in place from JAX 0.11 on, not with {jax.__version__}"
    if head_dim % (2 * GRAIN):
        return f"few rows are rotated at head dims of a multiple of {2 * GRAIN}, not {head_dim}"
    if jnp.dtype(dtype) != jnp.dtype(cache_dtype):
        return f"few rows are written in their own dtype, {jnp.dtype(dtype).name}, not {jnp.dtype(cache_dtype).name}"
    return None


def block_bytes(shape: FewRowsShape, tile: int, block_in: int) -> int:
    """Returns the shared memory of a block: weights, rows of x, and the norm's scale."""
    per_feature = shape.parts * tile + shape.columns + (shape.eps is not None)
    return per_feature * block_in * jnp.dtype(shape.dtype).itemsize


@functools.cache
def few_rows_config(
    shape: FewRowsShape, sms: int, is_early: bool = False, shares_sm: bool | None = None
) -> FewRowsConfig:  # fmt: skip
    """Returns a layout by arithmetic: as even as tiles of 8 out-features allow, and as many stages as an SM holds.

    Blocks of small tiles are stacked, until they fill the tensor core's rows (docs/log/llama.md: "The products' kernel
    is exact on an H200, and takes 7 % off a layer of the 8B").

    Args:
      sms: streaming multiprocessors, each of which gets one CTA.
      is_early, shares_sm: of `FewRowsConfig`; by default a layout that is early shares an SM.
    """
    shares_sm = is_early if shares_sm is None else shares_sm
    tile, tiles = tiles_of_cta(-(-shape.out_features // sms), shape.grain)
    num_ctas = -(-shape.out_features // (tile * tiles))
    weight_bytes = shape.parts * tile * jnp.dtype(shape.dtype).itemsize
    block_in = next(size for size in BLOCKS_IN if shape.in_features % size == 0 and size * weight_bytes <= STAGE_BYTES)
    stack = TENSOR_ROWS // tile
    if tile > STACKED_TILE or shape.in_features % (stack * STACKED_BLOCK_IN):
        stack = 1
    while True:
        config = FewRowsConfig(
            tile=tile, tiles=tiles, num_ctas=num_ctas, block_in=block_in if stack == 1 else STACKED_BLOCK_IN,
            num_stages=0, is_early=is_early, shares_sm=shares_sm, stack=stack,
        )  # fmt: skip
        budget = (OVERLAPPED_CTA_BYTES if shares_sm else CTA_BYTES) + OTHER_BYTES - smem_bytes(shape, config)
        stages = budget // (stack * block_bytes(shape, tile, config.block_in))
        if stages >= MIN_STAGES or stack == 1:
            break
        stack //= 2
    stages = min(max(MIN_STAGES, stages), tiles * (shape.in_features // (stack * config.block_in)))
    return dataclasses.replace(config, num_stages=stages)


def tiles_of_cta(out_features: int, grain: int = GRAIN) -> tuple[int, int]:
    """Returns the size of tiles, and their number, that hold so many out-features in the least time."""
    if out_features <= TENSOR_ROWS:
        return -(-out_features // grain) * grain, 1
    sizes = range(TENSOR_ROWS, TENSOR_ROWS // 2 - 1, -grain)
    choices = [(size, -(-out_features // size)) for size in sizes]
    return min(choices, key=lambda choice: choice[1] * (choice[0] + TILE_COST))


def beyond_bytes(shape: FewRowsShape, rows: int, block_in: int) -> int:
    """Returns the bytes behind the last `rows` that the tensor core reads with them, whatever they hold."""
    return (TENSOR_ROWS - rows) * block_in * jnp.dtype(shape.dtype).itemsize


def fold_shape(shape: FewRowsShape, config: FewRowsConfig) -> tuple[int, int]:
    """Returns the shape of the tensor core's result in shared memory, from which the parts of a stack are added."""
    columns = shape.columns if config.is_compact else config.stack * shape.columns
    return TENSOR_ROWS + config.stacked - config.tile, columns


def turn_shape(shape: FewRowsShape) -> tuple[int, int]:
    """Returns the shape of results in shared memory, from which each row is read with the rows 8 before and behind."""
    return TENSOR_ROWS + 2 * GRAIN, shape.columns


def turns_in_fold(shape: FewRowsShape, config: FewRowsConfig) -> bool:
    """Returns whether results are turned where they have been folded, which has the columns and no fewer rows."""
    (rows, columns), (fold_rows, fold_columns) = turn_shape(shape), fold_shape(shape, config)
    return config.stack > 1 and columns == fold_columns and rows <= fold_rows


def smem_bytes(shape: FewRowsShape, config: FewRowsConfig) -> int:
    """Returns the shared memory of a CTA."""
    blocks = config.num_stages * config.slabs * config.stack
    stages = blocks * block_bytes(shape, config.tile, config.block_in)
    fold = 4 * math.prod(fold_shape(shape, config)) if config.stack > 1 else 0
    has_turn = shape.heads is not None and not turns_in_fold(shape, config)
    turn = 4 * math.prod(turn_shape(shape)) if has_turn else 0
    return stages + beyond_bytes(shape, config.stacked, config.block_in) + fold + turn + OTHER_BYTES


def check_fits(shape: FewRowsShape, config: FewRowsConfig) -> None:
    """Raises ValueError where a layout does not fit the shape or an SM."""
    ctas = 2 if config.shares_sm else 1
    room = SMEM_BYTES_PER_SM // ctas - RESERVED_SMEM_BYTES
    if smem_bytes(shape, config) > room:
        raise ValueError(f"config must need at most {room} bytes of shared memory, got {config} for {shape}")
    of_stage = config.in_features_of_stage
    if config.is_compact and (shape.rows > COMPACT_ROWS or config.block_in < BLOCKS_IN[1]):
        needed = f"up to {COMPACT_ROWS} rows, and blocks of {BLOCKS_IN[1]} in-features or more"
        raise ValueError(f"config.is_compact takes {needed}, got {shape.rows} rows and {config.block_in} in-features")
    is_cut = config.tile % shape.grain or config.stacked > TENSOR_ROWS or shape.in_features % of_stage
    if is_cut or config.tile * config.tiles * config.num_ctas < shape.out_features:
        raise ValueError(f"config must have tiles that cover {shape}, got {config}")
    if not 1 <= config.num_stages <= config.tiles * (shape.in_features // of_stage):
        raise ValueError(f"config must have no more stages than {shape} fills, got {config}")
