"""A chain of products of few rows in one launch, where each multiplies what the one before gives.

Each CTA runs its part of one operation after another, through one ring of stages (`few_rows_ring.py`). Weights depend
on nothing. So one warpgroup copies those of all products as stages become free, while other CTAs still multiply and
while all meet. It keeps few copies on their way at once: what CTAs tell each other waits behind these.

Another warpgroup copies x. CTAs meet between operations (`meetings.py`): each comes when it has written its part of a
result, and copies x of the next product when all have come. The kernel has no more CTAs than SMs, so all run at once.

Attention can be one of the operations: it follows the product that makes heads (`few_rows_chain_attention.py`), and a
whole layer is one launch then. Then, and over several devices, results of few rows are broadcast
(`few_rows_broadcast.py`). CTAs receive x of the stages whose weights wait already, and meet for the rest. A CTA reads
words of a result when it has sent its own part of that. Before, the result cannot be whole, and with fewer reads that
find nothing a token takes less time (docs/log/llama.md: "Words that a CTA reads when it has sent its own take 2 to 3 %
off a token of the 1B").

Over several devices the products with a residual end in the sum over them (`few_rows_sum.py`): each has a part of their
in-features. Where rows are few, CTAs read what each device adds, and add it themselves. Heads are gathered, since each
device makes some of them. Attention ends in the merge of their states. A device is in such an exchange only when its
CTAs have met after the one before, or have got all of its result. So no device overwrites what another has not read
(`tests/kernels/chain_exchange_model.py`).

A product with a residual adds the result of the last product before it that has one: these are the residual stream.

With JAX 0.12 or newer weights are read before the previous kernel has ended, and so must not be what it writes.

The interpreter has no atomics. There each product is a launch of its own.

Source: Spector et al., "Look Ma, No Bubbles! Designing a Low-Latency Megakernel for Llama-1B", 2025.
"""

import dataclasses
import enum
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.kernels.few_rows import in_rows, multiply_few_rows, multiply_into_cache, queries_of
from tree_attn.kernels.few_rows_broadcast import clear, words_of
from tree_attn.kernels.few_rows_chain_attention import AttentionLayout, attention_barriers
from tree_attn.kernels.few_rows_chain_cta import HEADS, CtaChain
from tree_attn.kernels.few_rows_chain_layout import broadcasts, chain_buffers, num_ctas, shared_scratch
from tree_attn.kernels.few_rows_chain_messages import Steps
from tree_attn.kernels.few_rows_layers import CtaLayers, name_of
from tree_attn.kernels.few_rows_layout import GRAIN, REDUCTION_BYTES, FewRowsConfig, FewRowsShape
from tree_attn.kernels.few_rows_moves import full_barriers
from tree_attn.kernels.few_rows_ring import copies_together
from tree_attn.kernels.few_rows_sum import SumEnd
from tree_attn.kernels.interpreter import is_interpreted
from tree_attn.kernels.overlap import await_previous_kernel, begin_next_kernel
from tree_attn.kernels.registers import launch


class Warpgroup(enum.IntEnum):
    """The warpgroups of a CTA, by what they do."""

    COMPUTES = 0
    MOVES_WEIGHTS = 1
    MOVES_X = 2


@functools.partial(jax.jit, static_argnames=("shapes", "configs", "attention", "buffers"))
def multiply_chain(
    x, residual, weights, scales, heads=None, rank=None, tables=None, *, shapes: tuple[FewRowsShape, ...],
    configs: tuple[FewRowsConfig, ...], attention: AttentionLayout | None = None, buffers=None,
):  # fmt: skip
    """Returns the last product's result, `[rows, O]`; every check is the caller's.

    With heads it also returns rotated queries `[rows, N, H]` if there is no attention, and the caches, as
    `few_rows.multiply_into_cache` does. If the last product makes them, the result is that of the one before.

    Args:
      x: `[rows, I]` of the first product; over several devices of all of them.
      residual: what the first product with a residual adds, `[rows, O]`, or None.
      weights: `[parts, O, I]` of each product; scales: `[I]` of each with `shape.eps`, else None.
      heads: angles, slots, key and value, as `multiply_into_cache` takes them, if a product ends in heads.
      configs: of `chain_configs`.
      attention: what follows the product that ends in heads, or None; tables: by name, as `lean.lean_attention` takes
        them.
      rank, buffers: as of `exchange.exchange`, where devices have parts of the in-features: products with a residual
        end in the sum over them, and heads are gathered. None: of one device.
    """
    if is_interpreted():
        assert buffers is None and attention is None, "the interpreter runs products of one device"
        return _multiply_apart(x, residual, weights, scales, heads, shapes, configs)

    @jax.custom_batching.sequential_vmap  # CTAs of two chains must not count together
    def run(x, residual, weights, scales, heads, rank, tables):
        options = dict(rank=rank, attention=attention)
        if heads is None:
            return _launch(x, residual, weights, scales, shapes, configs, buffers, **options)[-1]
        *places, key, value = heads
        key, value = jax.new_ref(key), jax.new_ref(value)
        options |= dict(zip(HEADS, (*places, key, value), strict=True)) | (tables or {})
        results = _launch(x, residual, weights, scales, shapes, configs, buffers, **options)
        caches = jax.freeze(key), jax.freeze(value)
        if attention is not None:
            return results[-1], *caches
        *_, y, query = results
        return y[: shapes[0].rows], in_rows(query, shapes[-1]), *caches

    return run(x, residual, weights, scales, heads, rank, tables)


@functools.partial(jax.jit, static_argnames=("shapes", "configs", "attention"))
def run_layers(
    x, weights, scales, places, caches, tables, *, shapes: tuple[FewRowsShape, ...],
    configs: tuple[FewRowsConfig, ...], attention: AttentionLayout,
):  # fmt: skip
    """Returns the result of the last of several layers, `[rows, O]`, and all caches; one launch of one device.

    Args:
      x: `[rows, I]` of the first.
      weights, scales: of each layer, as `multiply_chain` takes them.
      places: angles and slots, as `multiply_into_cache` takes them, of all layers.
      caches: keys and values of each layer.
      others: as of `multiply_chain`, of each layer.
    """

    @jax.custom_batching.sequential_vmap  # CTAs of two launches must not count together
    def run(x, weights, scales, places, caches, tables):
        caches = jax.tree.map(jax.new_ref, caches)
        of_layers = [
            {f"weights {i}": array for i, array in enumerate(weights)}
            | {f"scale {i}": array for i, array in enumerate(scales)}
            | dict(zip(HEADS[2:], cache, strict=True))
            for weights, scales, cache in zip(weights, scales, caches, strict=True)
        ]
        named = {name_of(name, layer): array for layer, of in enumerate(of_layers) for name, array in of.items()}
        named |= dict(zip(HEADS[:2], places, strict=True)) | tables
        options = dict(attention=attention, num_layers=len(weights))
        *_, y = _launch(x, None, (), (), shapes, configs, **options, **named)
        return y[: shapes[0].rows], jax.tree.map(jax.freeze, caches)

    return run(x, weights, scales, places, caches, tables)


def _multiply_apart(x, residual, weights, scales, heads, shapes, configs):
    for weight, scale, shape, config in zip(weights, scales, shapes, configs, strict=True):
        stages = min(config.num_stages, config.tiles * config.blocks(shape))
        config = dataclasses.replace(config, num_stages=stages, is_early=False, rows=None)
        if shape.heads is not None:
            return x, *multiply_into_cache(x, weight, scale, *heads, shape=shape, config=config)
        x = multiply_few_rows(x, weight, scale, residual if shape.has_residual else None, shape=shape, config=config)
        residual = x if shape.has_residual else residual
    return x


def _launch(
    x, residual, weights, scales, shapes, configs, buffers=None, attention=None, num_layers=None, **others
):  # fmt: skip
    """Returns the results of all products; those that are x of a product have rows that pad them, for its copies.

    With `num_layers` weights and scales are of `CtaLayers.named`, by name, among the others.
    """
    rows = shapes[0].rows
    padded = shapes[0].columns if rows > GRAIN else rows  # a copy cuts x into groups of 8 rows
    arrays = {"x": jnp.pad(x, [(0, padded - rows), (0, 0)]), "residual": residual}
    # Counts do not stay zero, and the compiler may give equal arrays the same memory: no other has such a shape.
    num_meetings = len(shapes) - (attention is None) + (num_layers is not None)
    arrays |= {"counts": jnp.zeros((1, num_meetings, 1, 1), jnp.uint32)}
    if broadcasts(shapes, configs, attention, buffers is not None):
        arrays |= {"words": words_of(chain_buffers(shapes, attention, num_layers=num_layers))}
    for number, (weight, scale) in enumerate(zip(weights, scales, strict=True)):
        arrays |= {f"weights {number}": weight, f"scale {number}": scale}
    arrays = {name: array for name, array in (arrays | others).items() if array is not None}
    results = [jax.ShapeDtypeStruct((padded, shape.out_features), shape.out_dtype) for shape in shapes]
    if num_layers is None:  # else it is x of the next layer
        results[-1] = jax.ShapeDtypeStruct((rows, shapes[-1].out_features), shapes[-1].out_dtype)
    for number, shape in enumerate(shapes):
        if shape.heads is not None and attention is None:
            results[number] = queries_of(shape, arrays["key"].shape[2])
    results = [result for result, shape in zip(results, shapes, strict=True) if _writes_result(shape, attention)]
    return launch(
        functools.partial(_multiply, tuple(arrays), shapes, configs, attention, buffers, num_layers),
        out_type=tuple(results),
        grid=(num_ctas(configs),),
        grid_names=("cta",),
        num_threads=len(Warpgroup),
        thread_name="warpgroup",
        scratch_bytes=REDUCTION_BYTES,
        name="few_rows_layers" if num_layers else "few_rows_chain" if buffers is None else "few_rows_chain_sum",
    )(*arrays.values())


def _writes_result(shape: FewRowsShape, attention: AttentionLayout | None) -> bool:
    """Returns whether a product's result is an array of the launch: attention in it gets queries by words."""
    return shape.heads is None or attention is None


def _multiply(names, shapes, configs, attention, buffers, num_layers, *refs):
    named, written = dict(zip(names, refs)), iter(refs[len(names) :])
    outputs = [next(written) if _writes_result(shape, attention) else None for shape in shapes]
    is_cut = [buffers is not None and (shape.has_residual or shape.heads is not None) for shape in shapes]
    ends = [SumEnd(buffers, config) if cut else None for cut, config in zip(is_cut, configs)]
    assert all(end.fits for end in ends if end is not None), "out-features of a chain are 128 or more"
    # A CTA adds what it has written itself, so that it need not have met the others.
    tiles = {(config.tile, config.tiles) for shape, config in zip(shapes, configs) if shape.has_residual}
    assert len(tiles) <= 1, "products of the residual stream have the same tiles"

    def multiply(fulls, free, **smem):
        options = dict(
            shapes=shapes, configs=configs, attention=attention, buffers=buffers, named=named, outputs=outputs,
            ends=ends, fulls=fulls, free=free, smem=smem,
        )  # fmt: skip
        chain = CtaChain(**options) if num_layers is None else CtaLayers(**options, num_layers=num_layers)
        works = {
            Warpgroup.COMPUTES: _compute, Warpgroup.MOVES_WEIGHTS: _move_weights, Warpgroup.MOVES_X: _move_x
        }  # fmt: skip
        for warpgroup, work in works.items():
            pl.when(lax.axis_index("warpgroup") == warpgroup)(functools.partial(work, chain))

    fulls = [full_barriers(shape, config) for shape, config in zip(shapes, configs)]
    tells = broadcasts(shapes, configs, attention, buffers is not None)
    pl.run_scoped(
        multiply,
        fulls=fulls[:1] if copies_together() else fulls,  # then all are alike
        free=plgpu.Barrier(num_barriers=configs[0].num_stages),
        **shared_scratch(shapes, configs, attention and attention.shape),
        **({} if attention is None else attention_barriers()),
        **({"sent": plgpu.Barrier(num_barriers=len(shapes) + (attention is not None))} if tells else {}),
        **({} if num_layers is None else {"x_written": plgpu.Barrier()}),
        collective_axes="warpgroup",
    )


def _move_weights(chain: CtaChain) -> None:
    begin_next_kernel()

    def move(chain, steps):
        for number, operation in enumerate(chain.run(steps)):
            chain.if_here(number, operation.move_weights)
        return operation

    chain.in_turn(Steps(), move)


def _move_x(chain: CtaChain) -> None:
    if chain.broadcasts and not chain.configs[0].is_compact:
        clear(chain.smem["x_smem"])
    if chain.attention is not None:
        clear(chain.smem["query_smem"])
    await_previous_kernel()
    chain = chain.prepared()
    before, steps = chain.read_counts(), chain.begin_steps()
    chain.send_before(steps)  # after the counts have been read

    def move(chain, steps):
        for number, operation in enumerate(chain.run(steps)):

            def move_x(chain=chain, number=number, operation=operation):
                operation.move_x(functools.partial(chain.meet, number - 1, before))

            chain.await_sent(number)
            chain.if_here(number, move_x)
            chain.come_without(number)  # after the counts have been read
        return operation

    chain.in_turn(steps, move)


def _compute(chain: CtaChain) -> None:
    await_previous_kernel()
    chain = chain.prepared()
    first_steps = chain.begin_steps()
    chain.await_before()

    def compute_all(chain, steps):
        for number, operation in enumerate(chain.run_to_end(steps)):

            def compute(chain=chain, number=number, operation=operation):
                chain.compute(number, operation)

            chain.if_here(number, compute)
        return operation

    chain.in_turn(first_steps, compute_all)
    chain.count_steps(first_steps)
