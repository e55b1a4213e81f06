"""Layouts of a chain of products of few rows over the CTAs of a GPU: all products share the stages of one ring.

A stage is 128 rows of weights by 128 in-features, whatever the product. These are gate and up of 64 out-features. Or
they are two slabs of as many blocks of a tile as fill the tensor core's 64 rows, if there are as many. Attention's are
the keys and the values of a KV tile. So a stage that one operation has read is one of the next.
"""

import dataclasses
import itertools
import math
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.kernels.exchange_words import Buffers
from tree_attn.kernels.few_rows_broadcast import MAX_ROWS, local_buffers
from tree_attn.kernels.few_rows_chain_attention import QUERY_PLACES, AttentionLayout, attention_scratch, kv_scratch
from tree_attn.kernels.few_rows_layout import (
    COMPACT_ROWS,
    TENSOR_ROWS,
    FewRowsConfig,
    FewRowsShape,
    tiles_of_cta,
)
from tree_attn.kernels.few_rows_moves import ring_scratch
from tree_attn.kernels.few_rows_ring import BLOCK_IN, STAGE_ROWS
from tree_attn.kernels.kv_parts import BARRIER_BYTES
from tree_attn.kernels.lean_layout import LeanShape
from tree_attn.kernels.registers import RESERVED_SMEM_BYTES
from tree_attn.kernels.targets import SMEM_BYTES_PER_SM

ALIGNMENT = 1024  # bytes: arrays in shared memory begin at multiples of it
NUM_RING_BARRIERS = 3  # of each stage: weights, x, and that it has been read
STACKS = (8, 4, 2, 1)
MAX_X_ROWS = 64  # of a stage: x takes as much memory as weights of so many out-features
MIN_STAGES = 2
# Stages of weights on their way to a CTA when x is there. Before, it is one, but in a whole layer's first product. What
# CTAs tell each other waits behind weights, 1.3 us for each stage on an H100 (docs/log/llama.md).
IN_FLIGHT = 3
# Stages for which x is not padded: the 1B gains two, and a token takes 6 % less. The 8B gains one, and takes 3 % more.
MORE_STAGES = 2


def chain_configs(
    shapes: tuple[FewRowsShape, ...],
    sms: int,
    smem_bytes: int = SMEM_BYTES_PER_SM - RESERVED_SMEM_BYTES,
    attention: LeanShape | None = None,
    may_be_compact: bool = False,
) -> tuple[FewRowsConfig, ...] | str:
    """Returns a layout for each product of a chain, or why there is none.

    Args:
      sms: streaming multiprocessors, each of which gets one CTA.
      smem_bytes: shared memory of a CTA.
      attention: what is in the chain of it, or None.
      may_be_compact: whether x need not be padded, where the ring has so many more stages that it pays.
    """
    configs = []
    for shape in shapes:
        tile, tiles = tiles_of_cta(-(-shape.out_features // sms), shape.grain)
        if shape.in_features % BLOCK_IN:
            return f"a chain's in-features are a multiple of {BLOCK_IN}, not {shape.in_features}"
        slabs = STAGE_ROWS // TENSOR_ROWS // shape.parts
        slabs = slabs if shape.in_features % (slabs * BLOCK_IN) == 0 else 1
        stack = next(stack for stack in STACKS if stack == 1 or _stacks(shape, tile, slabs, stack))
        config = FewRowsConfig(
            tile=tile, tiles=tiles, num_ctas=-(-shape.out_features // (tile * tiles)), block_in=BLOCK_IN, num_stages=1,
            is_early=True, stack=stack, slabs=slabs, rows=STAGE_ROWS,
        )  # fmt: skip
        configs.append(config)
    padded = _filled(shapes, configs, smem_bytes, attention)
    if isinstance(padded, str) or not may_be_compact or shapes[0].rows > COMPACT_ROWS:
        return padded
    compact = [dataclasses.replace(config, is_compact=True) for config in configs]
    compact = _filled(shapes, compact, smem_bytes, attention)
    return compact if compact[0].num_stages - padded[0].num_stages >= MORE_STAGES else padded


def _filled(
    shapes: tuple[FewRowsShape, ...], configs: list[FewRowsConfig], smem_bytes: int, attention: LeanShape | None
) -> tuple[FewRowsConfig, ...] | str:  # fmt: skip
    """Returns the layouts with as many stages as so much memory holds, or why these are too few."""
    of_stages = lambda stages: tuple(
        dataclasses.replace(config, num_stages=stages, in_flight=min(IN_FLIGHT, stages)) for config in configs
    )
    bytes_of = lambda stages: chain_bytes(shapes, of_stages(stages), attention)
    # One by one: as arrays are aligned, not every stage takes the same.
    stages = next(stages for stages in itertools.count() if bytes_of(stages + 1) > smem_bytes)
    if stages < MIN_STAGES:
        needed = bytes_of(MIN_STAGES)
        return f"a chain needs {MIN_STAGES} stages, which take {needed} bytes, and {smem_bytes} bytes hold {stages}"
    return of_stages(stages)


def _stacks(shape: FewRowsShape, tile: int, slabs: int, stack: int) -> bool:
    is_small = stack * tile <= TENSOR_ROWS and slabs * stack * shape.columns <= MAX_X_ROWS
    return is_small and shape.in_features % (slabs * stack * BLOCK_IN) == 0


def broadcasts(
    shapes: tuple[FewRowsShape, ...], configs: tuple[FewRowsConfig, ...], attention: AttentionLayout | None,
    is_cut: bool,
) -> bool:  # fmt: skip
    """Returns whether a chain broadcasts results: with attention, and over several devices, where rows are few.

    Args:
      is_cut: whether devices have parts of the products.
    """
    return attention is not None or (
        is_cut and shapes[0].rows <= MAX_ROWS and tells_all_reads(shapes, configs, has_attention=False)
    )


def tells_all_reads(
    shapes: tuple[FewRowsShape, ...], configs: tuple[FewRowsConfig, ...], *, has_attention: bool
) -> bool:  # fmt: skip
    """Returns whether each CTA sends something of each tile for which it receives x, where x may be overwritten.

    What it sends tells that it has received x. The last CTA's last tile may have no out-feature, and then it sends
    nothing of it. That does no harm where it copies that tile's x, or no later result is broadcast in the place of x,
    two operations on.
    """
    num_operations = len(shapes) + has_attention
    for number, (shape, config) in enumerate(zip(shapes, configs, strict=True)):
        operation = number + (has_attention and number > 0)  # attention follows the heads, the first product
        of_attention = has_attention and operation == 2  # all of it is received; else what the ring holds
        if receives_in_vain(shape, config, of_attention) and 0 < operation <= num_operations - 3:
            return False
    return True


def receives_in_vain(shape: FewRowsShape, config: FewRowsConfig, receives_all: bool = False) -> bool:
    """Returns whether a CTA receives x for a tile without out-features."""
    of_last = shape.out_features - (config.num_ctas - 1) * config.tiles * config.tile
    first_empty = -(-of_last // config.tile)  # of the last CTA's tiles
    is_received = receives_all or first_empty * config.blocks(shape) < config.num_stages
    return first_empty < config.tiles and is_received


def comes_in_parts(
    shapes: tuple[FewRowsShape, ...], configs: tuple[FewRowsConfig, ...], number: int, num_ranks: int
) -> bool:  # fmt: skip
    """Returns whether CTAs receive what each device adds to the result of product `number`, and add it themselves.

    So x takes one trip over the link, and none from the CTA that adds. Words are as many as devices, so rows are few.

    The exchange after the next one overwrites the words. A device is in it only when it has all of the next one's
    result. Other devices' CTAs that sent that had read the words before. One without a part of the following product
    reads those of its tiles, and sends nothing. So each CTA must have a part, or CTAs must meet before that product.
    And none may receive x for a tile of which it sends nothing.
    """
    if number + 1 == len(shapes) or not shapes[number].has_residual or shapes[0].rows * num_ranks > MAX_ROWS:
        return False
    shape, config = shapes[number + 1], configs[number + 1]
    meets = config.tiles * config.blocks(shape) > config.num_stages
    return (meets or config.num_ctas == num_ctas(configs)) and not receives_in_vain(shape, config)


def chain_buffers(shapes, attention: AttentionLayout | None, *, num_layers: int | None = None) -> Buffers:
    """Returns the layout of the words in which a chain broadcasts.

    Of several layers attention's results lie behind others, from `first_attended` on. A CTA merges them when the heads
    that it needs have been attended with. By then others may still receive x for heads, two steps before.
    """
    sizes = [shape.rows * shape.out_features for shape in shapes]
    if attention is None:
        return local_buffers(max(sizes))
    count = max(*sizes, shapes[0].rows * attention.head_features)
    behind = 0 if num_layers is None else shapes[0].rows * attention.num_features
    return local_buffers(count + behind, *attention.partials)


def first_attended(shapes, attention: AttentionLayout) -> int:
    """Returns the number of the first word of attention's results in a launch of several layers."""
    return chain_buffers(shapes, attention).capacity


def num_ctas(configs: tuple[FewRowsConfig, ...]) -> int:
    """Returns the CTAs of a chain; a product may have fewer."""
    return max(config.num_ctas for config in configs)


def shared_scratch(shapes, configs, attention: LeanShape | None = None) -> dict[str, Any]:
    """Returns the shared memory that all operations of a chain use, by the names of their fields.

    Those of `fold_smem` are of several shapes: one array for each is called by `fold_name`. `ring_smem` is the ring's
    memory as weights lie in it, and as keys and values do if there is attention.
    """
    scratch: dict[str, Any] = {}
    for shape, config in zip(shapes, configs, strict=True):
        for name, smem in ring_scratch(shape, config).items():
            name = fold_name(smem.shape) if name == "fold_smem" else name
            if name not in scratch or scratch[name].shape < smem.shape:
                scratch[name] = smem
    ring = [scratch.pop("weights_smem")]
    if attention is not None:
        scratch |= attention_scratch(attention)
        ring.append(kv_scratch(attention, configs[0].num_stages))
    return scratch | {"ring_smem": ring if attention is None else plgpu.RefUnion(*ring)}


def fold_name(shape: tuple[int, int]) -> str:
    """Returns a name for the shared memory in which products fold sums of this shape."""
    return "fold_smem_{}_{}".format(*shape)


def chain_bytes(shapes, configs, attention: LeanShape | None = None) -> int:
    """Returns the bytes of shared memory of a chain's CTA, where Pallas begins each array at a multiple of 1,024.

    Pallas' reductions would take more, and a chain has none.
    """

    def size(smem) -> int:
        num_bytes = math.prod(smem.shape) * jnp.dtype(smem.dtype).itemsize
        return -(-num_bytes // ALIGNMENT) * ALIGNMENT

    scratch = shared_scratch(shapes, configs)
    if attention is not None:
        scratch |= attention_scratch(attention)
    arrays = sum(map(size, (*scratch.pop("ring_smem"), *scratch.values())))
    num_operations = len(shapes) + (attention is not None)
    of_attention = 0 if attention is None else 2 * QUERY_PLACES
    # One for each operation, and one that several layers need.
    num_barriers = NUM_RING_BARRIERS * configs[0].num_stages + num_operations + 1 + of_attention
    return arrays + BARRIER_BYTES * num_barriers
