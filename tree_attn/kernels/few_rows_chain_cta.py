"""A chain as one CTA runs it: its operations one after another."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.kernels.few_rows_chain_attention import CtaAttention, attention_barriers
from tree_attn.kernels.few_rows_chain_layout import fold_name
from tree_attn.kernels.few_rows_chain_messages import ChainMessages, Steps, is_here
from tree_attn.kernels.few_rows_cta import CtaProduct
from tree_attn.kernels.few_rows_moves import ring_scratch
from tree_attn.kernels.few_rows_ring import Ring
from tree_attn.kernels.lean_walk import Run, run_of_cta
from tree_attn.kernels.overlap import await_previous_kernel

HEADS = ("angles", "slots", "key", "value")  # arguments of a product that ends in heads


def refs_of(named: dict, outputs, shapes) -> list[dict]:
    """Returns the arguments of each product by name; x is None where attention gives it."""
    x, residual, products = named["x"], named.get("residual"), []
    for number, (shape, out) in enumerate(zip(shapes, outputs, strict=True)):
        refs = {"x": x, "weights": named[f"weights {number}"], "scale": named.get(f"scale {number}")}
        products.append(refs | {"residual": residual} | {name: named.get(name) for name in (*HEADS, "rank")})
        x, residual = out if shape.heads is None else None, out if shape.has_residual else residual
    return products


@dataclasses.dataclass(frozen=True, kw_only=True)
class CtaChain(ChainMessages):
    """The operations of a CTA, which pass through its ring one after another.

    Attributes:
      outputs: references of products' results; None of what only words have.
      fulls: of each product the barriers of copies; they may be one for all.
      free: barriers of the ring.
      smem: of `shared_scratch` and `attention_barriers`.
      first_step: of the ring; num_steps: of all layers, if there are several.
      others: of `ChainMessages`.
    """

    outputs: tuple
    fulls: list
    free: Any
    smem: dict
    first_step: Any = 0
    num_steps: Any = None

    def prepared(self) -> "CtaChain":
        """Returns the chain with what is read once, and not for each layer."""
        return self

    def in_turn(self, steps: Steps, body: Callable) -> None:
        """Calls `body(chain, steps)` for each layer; it returns the last operation, as `run` yields it.

        Args:
          steps: of `begin_steps`, or `Steps()`.
        """
        body(self, steps)

    def send_before(self, steps: Steps) -> None:
        """Sends what the first operation receives, if it does."""

    def await_before(self) -> None:
        """Waits, in the computing warpgroup, until what is sent so is written."""

    def compute(self, number: int, operation: "CtaProduct | CtaAttention") -> None:
        """Computes an operation of which the CTA has a part, tells when that is sent, and comes to the meeting."""
        operation.compute(functools.partial(self.tell_sent, number))
        self.come(number)

    def tell_sent(self, number: int) -> None:
        """Tells, in the computing warpgroup, that the CTA has sent its part of an operation's result.

        Each operation has a barrier, for the next may need no x that is received.
        """
        if number in self.broadcasts:
            plgpu.barrier_arrive(self.smem["sent"].at[number])

    def await_sent(self, number: int) -> None:
        """Waits, where x of an operation is received, until the CTA has sent its part of the one before.

        Until then a result is not whole. Of heads a CTA needs a part, and waits too.
        """
        if number - 1 in self.broadcasts:
            self.if_here(number - 1, lambda: plgpu.barrier_wait(self.smem["sent"].at[number - 1]))

    @property
    def refs(self) -> list[dict]:
        """Returns the arguments of each product by name."""
        return refs_of(self.named, self.outputs, self.shapes)

    @property
    def begins_ring(self) -> bool:
        """Returns whether nothing is on its way when the first operation begins: messages would wait behind weights."""
        return self.attention is not None

    @property
    def opens_with_x(self) -> bool:
        """Returns `Ring.opens_with_x`: where results are broadcast. Where CTAs meet instead it was not timed."""
        return bool(self.broadcasts)

    def run(self, steps: Steps) -> "Iterator[CtaProduct | CtaAttention]":
        """Yields the operations as the CTA runs them; what comes of attention is read from memory, in its turn.

        Args:
          steps: of `begin_steps`; `Steps()` for the warpgroup that moves weights, which needs none.
        """
        first_step, refs = self.first_step, self.refs
        for i, (number, config) in enumerate(self.operations):
            ring = Ring(
                full=self.fulls[0 if len(self.fulls) == 1 else number], free=self.free,
                num_stages=self.configs[0].num_stages, in_flight=self.configs[0].in_flight, first_step=first_step,
                is_first=i == 0 and self.begins_ring, opens_with_x=self.opens_with_x,
            )  # fmt: skip
            options = dict(
                ring=ring, x_broadcast=self._x_of(i, steps), broadcast=self._broadcast(i, steps),
                exchange_step=self._exchange(i, steps),
            )  # fmt: skip
            operation = self._attention(options) if number is None else self._product(number, refs[number], options)
            yield operation
            num = operation.num_steps
            first_step = first_step + (num if self._has_all(config) else jnp.where(is_here(config), num, 0))

    def end_of(self, last: "CtaProduct | CtaAttention"):
        """Returns the step of the ring after the last operation's, which is that operation's of this CTA."""
        _, config = self.operations[-1]
        num = last.num_steps if self._has_all(config) else jnp.where(is_here(config), last.num_steps, 0)
        return last.ring.first_step + num

    def run_to_end(self, steps: Steps) -> "list[CtaProduct | CtaAttention]":
        """Returns the operations, which know the number of all of the ring's steps."""
        operations = list(self.run(steps))
        num_steps = self.end_of(operations[-1]) if self.num_steps is None else self.num_steps
        with_all = lambda ring: dataclasses.replace(ring, num_steps=num_steps)
        return [dataclasses.replace(operation, ring=with_all(operation.ring)) for operation in operations]

    def _product(self, number: int, refs: dict, options: dict) -> CtaProduct:
        shape, config, end = self.shapes[number], self.configs[number], self.ends[number]
        scratch = ring_scratch(shape, config)
        smem = {name: self.smem[name] for name in scratch if name not in ("fold_smem", "weights_smem")}
        if "fold_smem" in scratch:
            smem["fold_smem"] = self.smem[fold_name(scratch["fold_smem"].shape)]
        is_whole = number == 0 or self.shapes[number - 1].heads is not None  # of all devices, where others are a part
        has_offset = end is not None and shape.heads is None and is_whole
        return CtaProduct(
            shape=shape, config=config, refs=refs, out_ref=self.outputs[number], end=end,
            x_offset=functools.partial(end.first_of_rank, refs["rank"], shape.in_features) if has_offset else None,
            weights_smem=self.smem["ring_smem"][0], **smem, **options,
        )  # fmt: skip

    def _attention(self, options: dict) -> CtaAttention:
        await_previous_kernel()  # it may have made the tables
        names = ("query_smem", "weights_smem", "columns_smem", "new_smem", *attention_barriers())
        return CtaAttention(
            layout=self.attention, refs=self.named, run=self.run_of_attention(),
            kv_smem=self.smem["ring_smem"][1], **{name: self.smem[name] for name in names}, **options,
        )  # fmt: skip

    def run_of_attention(self) -> Run:
        """Returns the CTA's run of KV tiles."""
        return run_of_cta(self.named, self.attention.shape, self.attention.config)
