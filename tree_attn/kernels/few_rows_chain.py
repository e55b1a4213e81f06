"""A chain of products of few rows in one launch, where each multiplies what the one before gives.

Each CTA runs its part of one product after another, through one ring of stages. Weights depend on nothing. So one
warpgroup copies those of all products as stages become free, while other CTAs still multiply and while all meet. It
keeps few copies on their way at once: what CTAs tell each other waits behind these.

Another warpgroup copies x. CTAs meet between products (`meetings.py`): each comes when it has written its part of a
result, and copies x of the next product when all have come. The kernel has no more CTAs than SMs, so all run at once.

Over several devices the products with a residual end in the sum over them (`few_rows_sum.py`): each has a part of their
in-features. The next layer's heads are gathered, since each device makes some of them. A device is in such an exchange
only when its CTAs have met after the one before. So no device overwrites what another has not read
(`tests/kernels/chain_exchange_model.py`).

A product with a residual adds the result of the last product before it that has one: these are the residual stream.

With JAX 0.12 or newer weights are read before the previous kernel has ended, and so must not be what it writes.

The interpreter has no atomics. There each product is a launch of its own.

Source: Spector et al., "Look Ma, No Bubbles! Designing a Low-Latency Megakernel for Llama-1B", 2025.
"""

import dataclasses
import enum
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.kernels.few_rows import REDUCTION_BYTES, multiply_few_rows, multiply_into_cache, queries_of
from tree_attn.kernels.few_rows_chain_layout import fold_name, num_ctas, shared_scratch
from tree_attn.kernels.few_rows_cta import CtaProduct, copies_together, full_barriers, ring_scratch
from tree_attn.kernels.few_rows_layout import GRAIN, FewRowsConfig, FewRowsShape
from tree_attn.kernels.few_rows_sum import SumEnd
from tree_attn.kernels.interpreter import is_interpreted
from tree_attn.kernels.meetings import come, meet, read_count
from tree_attn.kernels.overlap import await_previous_kernel, begin_next_kernel
from tree_attn.kernels.registers import launch

HEADS = ("angles", "slots", "key", "value")  # arguments of a product that ends in heads


class Warpgroup(enum.IntEnum):
    """The warpgroups of a CTA, by what they do."""

    COMPUTES = 0
    MOVES_WEIGHTS = 1
    MOVES_X = 2


@functools.partial(jax.jit, static_argnames=("shapes", "configs", "buffers"))
def multiply_chain(
    x, residual, weights, scales, heads=None, rank=None, *, shapes: tuple[FewRowsShape, ...],
    configs: tuple[FewRowsConfig, ...], buffers=None,
):  # fmt: skip
    """Returns the last product's result, `[rows, O]`; every check is the caller's.

    If the last product ends in heads, returns the result before it, and what `few_rows.multiply_into_cache` does.

    Args:
      x: `[rows, I]` of the first product; over several devices of all of them.
      residual: what the first product with a residual adds, `[rows, O]`, or None.
      weights: `[parts, O, I]` of each product; scales: `[I]` of each with `shape.eps`, else None.
      heads: angles, slots, key and value, as `multiply_into_cache` takes them, if the last product ends in heads.
      configs: of `chain_configs`.
      rank, buffers: as of `exchange.exchange`, where devices have parts of the in-features: products with a residual
        end in the sum over them, and heads are gathered. None: of one device.
    """
    if is_interpreted():
        assert buffers is None, "the interpreter runs one device"
        return _multiply_apart(x, residual, weights, scales, heads, shapes, configs)

    @jax.custom_batching.sequential_vmap  # CTAs of two chains must not count together
    def run(x, residual, weights, scales, heads, rank):
        if heads is None:
            return _launch(x, residual, weights, scales, shapes, configs, buffers, rank=rank)[-1]
        *places, key, value = heads
        key, value = jax.new_ref(key), jax.new_ref(value)
        named = dict(zip(HEADS, (*places, key, value), strict=True))
        *_, y, query = _launch(x, residual, weights, scales, shapes, configs, buffers, rank=rank, **named)
        return y[: shapes[0].rows], query, jax.freeze(key), jax.freeze(value)

    return run(x, residual, weights, scales, heads, rank)


def _multiply_apart(x, residual, weights, scales, heads, shapes, configs):
    for weight, scale, shape, config in zip(weights, scales, shapes, configs, strict=True):
        stages = min(config.num_stages, config.tiles * config.blocks(shape))
        config = dataclasses.replace(config, num_stages=stages, is_early=False, rows=None)
        if shape.heads is not None:
            return x, *multiply_into_cache(x, weight, scale, *heads, shape=shape, config=config)
        x = multiply_few_rows(x, weight, scale, residual if shape.has_residual else None, shape=shape, config=config)
        residual = x if shape.has_residual else residual
    return x


def _launch(x, residual, weights, scales, shapes, configs, buffers=None, **others):
    """Returns the results of all products; of all but the last with rows that pad them, for the copies of x."""
    rows = shapes[0].rows
    padded = shapes[0].columns if rows > GRAIN else rows  # a copy cuts x into groups of 8 rows
    arrays = {"x": jnp.pad(x, [(0, padded - rows), (0, 0)]), "residual": residual}
    # Not int32: counts do not stay zero, and the compiler may give attention's counts the same memory.
    arrays |= {"counts": jnp.zeros(len(shapes) - 1, jnp.uint32)}
    for number, (weight, scale) in enumerate(zip(weights, scales, strict=True)):
        arrays |= {f"weights {number}": weight, f"scale {number}": scale}
    arrays = {name: array for name, array in (arrays | others).items() if array is not None}
    results = [jax.ShapeDtypeStruct((padded, shape.out_features), shape.out_dtype) for shape in shapes]
    last = shapes[-1]
    if last.heads is not None:
        results[-1] = queries_of(last, 1 if buffers is None else buffers.num_ranks)
    else:
        results[-1] = jax.ShapeDtypeStruct((rows, last.out_features), last.out_dtype)
    return launch(
        functools.partial(_multiply, tuple(arrays), shapes, configs, buffers),
        out_type=tuple(results),
        grid=(num_ctas(configs),),
        grid_names=("cta",),
        num_threads=len(Warpgroup),
        thread_name="warpgroup",
        scratch_bytes=REDUCTION_BYTES,
        name="few_rows_chain" if buffers is None else "few_rows_chain_sum",
    )(*arrays.values())


def refs_of(named: dict, outputs, shapes) -> list[dict]:
    """Returns the arguments of each product by name."""
    x, residual, products = named["x"], named.get("residual"), []
    for number, (shape, out) in enumerate(zip(shapes, outputs, strict=True)):
        refs = {"x": x, "weights": named[f"weights {number}"], "scale": named.get(f"scale {number}")}
        products.append(refs | {"residual": residual} | {name: named.get(name) for name in (*HEADS, "rank")})
        x, residual = out, out if shape.has_residual else residual
    return products


def _multiply(names, shapes, configs, buffers, *refs):
    named, outputs = dict(zip(names, refs)), refs[len(names) :]
    is_cut = [buffers is not None and (shape.has_residual or shape.heads is not None) for shape in shapes]
    ends = [SumEnd(buffers, config) if cut else None for cut, config in zip(is_cut, configs)]
    assert all(end.fits for end in ends if end is not None), "out-features of a chain are 128 or more"
    # A CTA adds what it has written itself, so that it need not have met the others.
    tiles = {(config.tile, config.tiles) for shape, config in zip(shapes, configs) if shape.has_residual}
    assert len(tiles) <= 1, "products of the residual stream have the same tiles"

    def multiply(fulls, **ring):
        fulls = fulls * (len(shapes) // len(fulls))
        of_products = zip(refs_of(named, outputs, shapes), outputs, fulls, ends, strict=True)
        products = list(_products_of_cta(of_products, shapes, configs, ring))
        meetings = _Meetings(counts_ref=named["counts"], configs=configs)
        works = {
            Warpgroup.COMPUTES: _compute, Warpgroup.MOVES_WEIGHTS: _move_weights, Warpgroup.MOVES_X: _move_x
        }  # fmt: skip
        for warpgroup, work in works.items():
            pl.when(lax.axis_index("warpgroup") == warpgroup)(functools.partial(work, products, meetings))

    fulls = [full_barriers(shape, config) for shape, config in zip(shapes, configs)]
    pl.run_scoped(
        multiply,
        fulls=fulls[:1] if copies_together() else fulls,  # then all are alike
        free=plgpu.Barrier(num_barriers=configs[0].num_stages),
        **shared_scratch(shapes, configs),
        collective_axes="warpgroup",
    )


def _products_of_cta(of_products, shapes, configs, ring: dict):
    """Yields the products as the CTA runs them, one after another in its ring.

    Args:
      of_products: arguments, result, barriers and end of each.
    """
    steps = []
    for shape, config in zip(shapes, configs):
        num = config.tiles * config.blocks(shape)
        steps.append(num if _has_all(config, configs) else jnp.where(_is_here(config), num, 0))
    for number, (shape, config, (refs, out_ref, full, end)) in enumerate(zip(shapes, configs, of_products)):
        scratch = ring_scratch(shape, config)
        smem = {name: ring[name] for name in ("free", *scratch) if name != "fold_smem"}
        if "fold_smem" in scratch:
            smem["fold_smem"] = ring[fold_name(scratch["fold_smem"].shape)]
        yield CtaProduct(
            shape=shape, config=config, refs=refs, out_ref=out_ref, full=full, end=end,
            x_offset=None
            if number > 0 or end is None
            else functools.partial(end.first_of_rank, refs["rank"], shape.in_features),
            first_step=sum(steps[:number]), num_ring_steps=sum(steps), **smem,
        )  # fmt: skip


def _has_all(config: FewRowsConfig, configs) -> bool:
    return config.num_ctas == num_ctas(configs)


def _is_here(config: FewRowsConfig):
    return lax.axis_index("cta") < config.num_ctas


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Meetings:
    """The meetings of a CTA after each product but the last."""

    counts_ref: Any
    configs: tuple[FewRowsConfig, ...]

    def read(self) -> list:
        """Returns the counts before the CTA comes."""
        return [read_count(self.counts_ref, number) for number in range(len(self.configs) - 1)]

    def if_here(self, number: int, body) -> None:
        """Runs `body` if the CTA has a part of product `number`."""
        if _has_all(self.configs[number], self.configs):
            body()
        else:
            pl.when(_is_here(self.configs[number]))(body)

    def come_without(self, number: int) -> None:
        """Comes to the meeting after a product of which the CTA has no part."""
        if number < len(self.configs) - 1 and not _has_all(self.configs[number], self.configs):
            pl.when(~_is_here(self.configs[number]))(lambda: self.come(number))

    def come(self, number: int) -> None:
        """Comes to the meeting after a product, whose part the CTA has written."""
        come(self.counts_ref, number, num_ctas(self.configs))

    def meet(self, number: int, before) -> None:
        """Waits for the whole result of a product."""
        meet(self.counts_ref, number, before)


def _move_weights(products: list[CtaProduct], meetings: _Meetings) -> None:
    begin_next_kernel()
    for number, product in enumerate(products):
        move = functools.partial(lax.fori_loop, 0, product.num_steps, product.move_weights, None)
        meetings.if_here(number, move)


def _move_x(products: list[CtaProduct], meetings: _Meetings) -> None:
    await_previous_kernel()
    before = meetings.read()
    for number, product in enumerate(products):

        def move(number=number, product=product):
            if number > 0:
                meetings.meet(number - 1, before[number - 1])
            lax.fori_loop(0, product.num_steps, product.move_x, None)

        meetings.if_here(number, move)
        meetings.come_without(number)  # after the counts have been read


def _compute(products: list[CtaProduct], meetings: _Meetings) -> None:
    await_previous_kernel()
    for number, product in enumerate(products):

        def compute(number=number, product=product):
            product.compute()
            if number < len(products) - 1:
                meetings.come(number)

        meetings.if_here(number, compute)
