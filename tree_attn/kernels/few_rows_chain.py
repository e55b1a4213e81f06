"""A chain of products of few rows in one launch, where each multiplies what the one before gives.

Each CTA runs its part of one operation after another, through one ring of stages (`few_rows_ring.py`). Weights depend
on nothing. So one warpgroup copies those of all products as stages become free, while other CTAs still multiply and
while all meet. It keeps few copies on their way at once: what CTAs tell each other waits behind these.

Another warpgroup copies x. CTAs meet between operations (`meetings.py`): each comes when it has written its part of a
result, and copies x of the next product when all have come. The kernel has no more CTAs than SMs, so all run at once.

Attention can be one of the operations: it follows the product that makes heads (`few_rows_chain_attention.py`), and a
whole layer is one launch then.

Over several devices the products with a residual end in the sum over them (`few_rows_sum.py`): each has a part of their
in-features. Heads are gathered, since each device makes some of them. Attention ends in the merge of their states. A
device is in such an exchange only when its CTAs have met after the one before. So no device overwrites what another has
not read (`tests/kernels/chain_exchange_model.py`).

A product with a residual adds the result of the last product before it that has one: these are the residual stream.

With JAX 0.12 or newer weights are read before the previous kernel has ended, and so must not be what it writes.

The interpreter has no atomics. There each product is a launch of its own.

Source: Spector et al., "Look Ma, No Bubbles! Designing a Low-Latency Megakernel for Llama-1B", 2025.
"""

import dataclasses
import enum
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.kernels.few_rows import REDUCTION_BYTES, in_rows, multiply_few_rows, multiply_into_cache, queries_of
from tree_attn.kernels.few_rows_chain_attention import AttentionLayout, CtaAttention, attention_barriers
from tree_attn.kernels.few_rows_chain_layout import fold_name, num_ctas, shared_scratch
from tree_attn.kernels.few_rows_cta import CtaProduct, full_barriers, ring_scratch
from tree_attn.kernels.few_rows_layout import GRAIN, FewRowsConfig, FewRowsShape
from tree_attn.kernels.few_rows_ring import Ring, copies_together
from tree_attn.kernels.few_rows_sum import SumEnd
from tree_attn.kernels.interpreter import is_interpreted
from tree_attn.kernels.lean_walk import run_of_cta
from tree_attn.kernels.meetings import come, meet, read_count
from tree_attn.kernels.overlap import await_previous_kernel, begin_next_kernel
from tree_attn.kernels.registers import launch

HEADS = ("angles", "slots", "key", "value")  # arguments of a product that ends in heads


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
            return _launch(x, residual, weights, scales, shapes, configs, buffers, **options)[0][-1]
        *places, key, value = heads
        key, value = jax.new_ref(key), jax.new_ref(value)
        options |= dict(zip(HEADS, (*places, key, value), strict=True)) | (tables or {})
        results, _ = _launch(x, residual, weights, scales, shapes, configs, buffers, **options)
        caches = jax.freeze(key), jax.freeze(value)
        if attention is not None:
            return results[-1], *caches
        *_, y, query = results
        return y[: shapes[0].rows], in_rows(query, shapes[-1]), *caches

    return run(x, residual, weights, scales, heads, rank, tables)


def _multiply_apart(x, residual, weights, scales, heads, shapes, configs):
    for weight, scale, shape, config in zip(weights, scales, shapes, configs, strict=True):
        stages = min(config.num_stages, config.tiles * config.blocks(shape))
        config = dataclasses.replace(config, num_stages=stages, is_early=False, rows=None)
        if shape.heads is not None:
            return x, *multiply_into_cache(x, weight, scale, *heads, shape=shape, config=config)
        x = multiply_few_rows(x, weight, scale, residual if shape.has_residual else None, shape=shape, config=config)
        residual = x if shape.has_residual else residual
    return x


def _launch(x, residual, weights, scales, shapes, configs, buffers=None, attention=None, **others):
    """Returns the results of all products, and what attention writes.

    Results that are x of a product have rows that pad them, for its copies.
    """
    rows = shapes[0].rows
    padded = shapes[0].columns if rows > GRAIN else rows  # a copy cuts x into groups of 8 rows
    arrays = {"x": jnp.pad(x, [(0, padded - rows), (0, 0)]), "residual": residual}
    # Not int32: counts do not stay zero, and the compiler may give attention's counts the same memory.
    arrays |= {"counts": jnp.zeros(len(shapes) - (attention is None), jnp.uint32)}
    if attention is not None and attention.is_cut and attention.epilogue is None:
        arrays |= {"arrivals": jnp.zeros(attention.shape.num_output_tiles, jnp.int32)}
    for number, (weight, scale) in enumerate(zip(weights, scales, strict=True)):
        arrays |= {f"weights {number}": weight, f"scale {number}": scale}
    arrays = {name: array for name, array in (arrays | others).items() if array is not None}
    results = [jax.ShapeDtypeStruct((padded, shape.out_features), shape.out_dtype) for shape in shapes]
    results[-1] = jax.ShapeDtypeStruct((rows, shapes[-1].out_features), shapes[-1].out_dtype)
    for number, shape in enumerate(shapes):
        if shape.heads is not None:
            results[number] = queries_of(shape, arrays["key"].shape[2])
    outputs = [] if attention is None else attention.outputs(padded)
    written = launch(
        functools.partial(_multiply, tuple(arrays), shapes, configs, attention, buffers),
        out_type=(*results, *outputs),
        grid=(num_ctas(configs),),
        grid_names=("cta",),
        num_threads=len(Warpgroup),
        thread_name="warpgroup",
        scratch_bytes=REDUCTION_BYTES,
        name="few_rows_chain" if buffers is None else "few_rows_chain_sum",
    )(*arrays.values())
    return written[: len(shapes)], written[len(shapes) :]


def refs_of(named: dict, outputs, shapes, attended=None) -> list[dict]:
    """Returns the arguments of each product by name; `attended` is x of the one after heads."""
    x, residual, products = named["x"], named.get("residual"), []
    for number, (shape, out) in enumerate(zip(shapes, outputs, strict=True)):
        refs = {"x": x, "weights": named[f"weights {number}"], "scale": named.get(f"scale {number}")}
        products.append(refs | {"residual": residual} | {name: named.get(name) for name in (*HEADS, "rank")})
        x, residual = out if shape.heads is None else attended, out if shape.has_residual else residual
    return products


def _multiply(names, shapes, configs, attention, buffers, *refs):
    named, written = dict(zip(names, refs)), refs[len(names) :]
    outputs, attended = written[: len(shapes)], written[len(shapes) :]
    is_cut = [buffers is not None and (shape.has_residual or shape.heads is not None) for shape in shapes]
    ends = [SumEnd(buffers, config) if cut else None for cut, config in zip(is_cut, configs)]
    assert all(end.fits for end in ends if end is not None), "out-features of a chain are 128 or more"
    # A CTA adds what it has written itself, so that it need not have met the others.
    tiles = {(config.tile, config.tiles) for shape, config in zip(shapes, configs) if shape.has_residual}
    assert len(tiles) <= 1, "products of the residual stream have the same tiles"

    def multiply(fulls, free, **smem):
        chain = _CtaChain(
            shapes=shapes, configs=configs, attention=attention, named=named, outputs=outputs, attended=attended,
            ends=ends, fulls=fulls, free=free, smem=smem,
        )  # fmt: skip
        works = {
            Warpgroup.COMPUTES: _compute, Warpgroup.MOVES_WEIGHTS: _move_weights, Warpgroup.MOVES_X: _move_x
        }  # fmt: skip
        for warpgroup, work in works.items():
            pl.when(lax.axis_index("warpgroup") == warpgroup)(functools.partial(work, chain))

    fulls = [full_barriers(shape, config) for shape, config in zip(shapes, configs)]
    if attention is not None and not copies_together():  # keys and values arrive apart
        fulls.append([plgpu.Barrier(num_barriers=configs[0].num_stages, num_arrivals=2)])
    pl.run_scoped(
        multiply,
        fulls=fulls[:1] if copies_together() else fulls,  # then all are alike
        free=plgpu.Barrier(num_barriers=configs[0].num_stages),
        **shared_scratch(shapes, configs, attention and attention.shape),
        **({} if attention is None else attention_barriers()),
        collective_axes="warpgroup",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _CtaChain:
    """The operations of a CTA, one after another in its ring, and their meetings.

    Attributes:
      named, outputs, attended: references of arguments, of products' results, and of what attention writes.
      ends, fulls: of each product its end and the barriers of copies; fulls may be one for all.
      free: barriers of the ring.
      smem: of `shared_scratch` and `attention_barriers`.
    """

    shapes: tuple[FewRowsShape, ...]
    configs: tuple[FewRowsConfig, ...]
    attention: AttentionLayout | None
    named: dict
    outputs: tuple
    attended: tuple
    ends: list
    fulls: list
    free: Any
    smem: dict

    @property
    def operations(self) -> list[tuple[int | None, Any]]:
        """Returns the products' numbers in their order, and where attention is, None; and the config of each."""
        found: list[tuple[int | None, Any]] = []
        for number, (shape, config) in enumerate(zip(self.shapes, self.configs)):
            found.append((number, config))
            if shape.heads is not None and self.attention is not None:
                found.append((None, self.attention.config))
        return found

    def run(self) -> "Iterator[CtaProduct | CtaAttention]":
        """Yields the operations as the CTA runs them; what comes of attention is read from memory, in its turn."""
        first_step: Any = 0
        attended = self.attended[0] if self.attended else None
        refs = refs_of(self.named, self.outputs, self.shapes, attended)
        for number, config in self.operations:
            ring = Ring(
                full=self.fulls[0 if len(self.fulls) == 1 else -1 if number is None else number], free=self.free,
                num_stages=self.configs[0].num_stages, in_flight=self.configs[0].in_flight, first_step=first_step,
            )  # fmt: skip
            operation = self._attention(ring) if number is None else self._product(number, refs[number], ring)
            yield operation
            num = operation.num_steps
            first_step = first_step + (num if self.has_all(config) else jnp.where(_is_here(config), num, 0))

    def run_to_end(self) -> "list[CtaProduct | CtaAttention]":
        """Returns the operations, which know the number of all steps."""
        operations = list(self.run())
        (*_, config), last = (config for _, config in self.operations), operations[-1]
        num = last.num_steps if self.has_all(config) else jnp.where(_is_here(config), last.num_steps, 0)
        num_steps = last.ring.first_step + num
        with_all = lambda ring: dataclasses.replace(ring, num_steps=num_steps)
        return [dataclasses.replace(operation, ring=with_all(operation.ring)) for operation in operations]

    def _product(self, number: int, refs: dict, ring: Ring) -> CtaProduct:
        shape, config, end = self.shapes[number], self.configs[number], self.ends[number]
        scratch = ring_scratch(shape, config)
        smem = {name: self.smem[name] for name in scratch if name not in ("fold_smem", "weights_smem")}
        if "fold_smem" in scratch:
            smem["fold_smem"] = self.smem[fold_name(scratch["fold_smem"].shape)]
        is_whole = number == 0 or self.shapes[number - 1].heads is not None  # of all devices, where others are a part
        has_offset = end is not None and shape.heads is None and is_whole
        return CtaProduct(
            shape=shape, config=config, refs=refs, out_ref=self.outputs[number], end=end, ring=ring,
            x_offset=functools.partial(end.first_of_rank, refs["rank"], shape.in_features) if has_offset else None,
            weights_smem=self.smem["ring_smem"][0], **smem,
        )  # fmt: skip

    def _attention(self, ring: Ring) -> CtaAttention:
        await_previous_kernel()  # it may have made the tables
        query = next(out for shape, out in zip(self.shapes, self.outputs) if shape.heads is not None)
        names = ("query_smem", "softmax_smem", *attention_barriers())
        return CtaAttention(
            layout=self.attention, refs=self.named | {"query": query}, outputs=self.attended, ring=ring,
            run=run_of_cta(self.named, self.attention.shape, self.attention.config),
            kv_smem=self.smem["ring_smem"][1], words_smem=self.smem["turn_smem"],
            **{name: self.smem[name] for name in names},
        )  # fmt: skip

    def has_all(self, config) -> bool:
        """Returns whether all CTAs have a part of an operation of that config."""
        return config.num_ctas == num_ctas(self.configs)

    def read_counts(self) -> list:
        """Returns the counts before the CTA comes."""
        return [read_count(self.named["counts"], number) for number in range(len(self.operations) - 1)]

    def if_here(self, number: int, body) -> None:
        """Runs `body` if the CTA has a part of operation `number`."""
        _, config = self.operations[number]
        if self.has_all(config):
            body()
        else:
            pl.when(_is_here(config))(body)

    def come_without(self, number: int) -> None:
        """Comes to the meeting after an operation of which the CTA has no part."""
        _, config = self.operations[number]
        if number < len(self.operations) - 1 and not self.has_all(config):
            pl.when(~_is_here(config))(lambda: self.come(number))

    def come(self, number: int) -> None:
        """Comes to the meeting after an operation, whose part the CTA has written."""
        come(self.named["counts"], number, num_ctas(self.configs))

    def meet(self, number: int, before) -> None:
        """Waits for the whole result of an operation."""
        meet(self.named["counts"], number, before)


def _is_here(config):
    return lax.axis_index("cta") < config.num_ctas


def _move_weights(chain: _CtaChain) -> None:
    begin_next_kernel()
    for number, operation in enumerate(chain.run()):
        chain.if_here(number, operation.move_weights)


def _move_x(chain: _CtaChain) -> None:
    await_previous_kernel()
    before = chain.read_counts()
    for number, operation in enumerate(chain.run()):

        def move(number=number, operation=operation):
            if number > 0:
                chain.meet(number - 1, before[number - 1])
            operation.move_x()

        chain.if_here(number, move)
        chain.come_without(number)  # after the counts have been read


def _compute(chain: _CtaChain) -> None:
    await_previous_kernel()
    operations = chain.run_to_end()
    for number, operation in enumerate(operations):

        def compute(number=number, operation=operation):
            operation.compute()
            if number < len(operations) - 1:
                chain.come(number)

        chain.if_here(number, compute)
