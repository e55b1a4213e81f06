"""A chain as one CTA runs it: its operations one after another, and what tells it that others have done theirs."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from tree_attn.kernels.epilogue import begin_step
from tree_attn.kernels.exchange_words import Buffers
from tree_attn.kernels.few_rows_broadcast import Broadcast, count_steps
from tree_attn.kernels.few_rows_chain_attention import AttentionLayout, CtaAttention, attention_barriers
from tree_attn.kernels.few_rows_chain_layout import broadcasts, chain_buffers, comes_in_parts, fold_name, num_ctas
from tree_attn.kernels.few_rows_cta import CtaProduct
from tree_attn.kernels.few_rows_layout import FewRowsConfig, FewRowsShape
from tree_attn.kernels.few_rows_moves import ring_scratch
from tree_attn.kernels.few_rows_ring import Ring
from tree_attn.kernels.few_rows_sum import count_exchanges
from tree_attn.kernels.lean_walk import run_of_cta
from tree_attn.kernels.meetings import come, meet, read_count
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


class Steps(NamedTuple):
    """Numbers of a launch's first broadcast, and of its first exchange with other devices; None: there are none."""

    broadcast: Any = None
    exchange: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CtaChain:
    """The operations of a CTA, which pass through its ring one after another.

    Attributes:
      named, outputs: references of arguments, and of products' results; None of what only words have.
      ends, fulls: of each product its end and the barriers of copies; fulls may be one for all.
      free: barriers of the ring.
      smem: of `shared_scratch` and `attention_barriers`.
    """

    shapes: tuple[FewRowsShape, ...]
    configs: tuple[FewRowsConfig, ...]
    attention: AttentionLayout | None
    buffers: Buffers | None
    named: dict
    outputs: tuple
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

    @property
    def broadcasts(self) -> list[int]:
        """Returns the operations whose results come by words."""
        if not broadcasts(self.shapes, self.configs, self.attention, self.buffers is not None):
            return []
        return list(range(len(self.operations) - 1))

    @property
    def in_parts(self) -> list[int]:
        """Returns those whose results come as what devices add, by the words of an exchange."""
        ranks = 0 if self.buffers is None else self.buffers.num_ranks
        comes = lambda number: number is not None and comes_in_parts(self.shapes, self.configs, number, ranks)
        return [operation for operation in self.broadcasts if ranks and comes(self.operations[operation][0])]

    @property
    def sent(self) -> list[int]:
        """Returns those whose results CTAs send one another within the device."""
        return [operation for operation in self.broadcasts if operation not in self.in_parts]

    @property
    def exchanges(self) -> list[int]:
        """Returns the operations that end in an exchange whose steps this counts; where CTAs meet, products do."""
        products = [number for number, _ in self.operations]
        is_cut = self.buffers is not None and self.broadcasts
        return [i for i, number in enumerate(products) if is_cut and (number is None or self.ends[number] is not None)]

    def begin_steps(self) -> Steps:
        """Returns the numbers of the first steps, as this CTA finds them."""
        broadcast = exchange = None
        if self.sent:
            broadcast = begin_step(chain_buffers(self.shapes, self.attention), self.named["words"])
        if self.exchanges:
            exchange = begin_step(self.buffers, self.named.get("rank"))
        return Steps(broadcast, exchange)

    def count_steps(self, steps: Steps) -> None:
        """Counts the steps, when the CTA has got all that it reads."""
        if self.sent:
            count_steps(self._broadcast(self.sent[-1], steps), num_ctas(self.configs))
        if self.exchanges:
            last = steps.exchange + (len(self.exchanges) - 1)
            count_exchanges(self.buffers, self.named.get("rank"), last, num_ctas(self.configs))

    def _broadcast(self, operation: int, steps: Steps) -> Broadcast | None:
        """Returns the broadcast of an operation's result within the device, if that is sent so."""
        if operation not in self.sent or steps.broadcast is None:
            return None
        number, _ = self.operations[operation]
        if number is None:
            features = self.attention.num_features
        else:  # heads are of all devices
            shape = self.shapes[number]
            features = shape.out_features if shape.heads is None else self.attention.head_features
        return Broadcast(
            words_ref=self.named["words"], buffers=chain_buffers(self.shapes, self.attention),
            step=steps.broadcast + self.sent.index(operation), features=features,
        )  # fmt: skip

    def _received(self, operation: int, steps: Steps) -> Broadcast | None:
        """Returns by which broadcast CTAs get an operation's result, if they do by one."""
        if operation not in self.in_parts or steps.exchange is None:
            return self._broadcast(operation, steps)
        features = self.shapes[self.operations[operation][0]].out_features
        return Broadcast(self.named.get("rank"), self.buffers, self._exchange(operation, steps), features)

    def _exchange(self, operation: int, steps: Steps):
        """Returns the number of an operation's exchange with other devices, if it ends in one."""
        if operation not in self.exchanges or steps.exchange is None:
            return None
        return steps.exchange + self.exchanges.index(operation)

    def run(self, steps: Steps) -> "Iterator[CtaProduct | CtaAttention]":
        """Yields the operations as the CTA runs them; what comes of attention is read from memory, in its turn.

        Args:
          steps: of `begin_steps`; `Steps()` for the warpgroup that moves weights, which needs none.
        """
        first_step: Any = 0
        refs = refs_of(self.named, self.outputs, self.shapes)
        for i, (number, config) in enumerate(self.operations):
            ring = Ring(
                full=self.fulls[0 if len(self.fulls) == 1 else number], free=self.free,
                num_stages=self.configs[0].num_stages, in_flight=self.configs[0].in_flight, first_step=first_step,
                is_first=i == 0 and self.attention is not None,
            )  # fmt: skip
            options = dict(
                ring=ring, x_broadcast=self._received(i - 1, steps), broadcast=self._broadcast(i, steps),
                exchange_step=self._exchange(i, steps),
            )  # fmt: skip
            operation = self._attention(options) if number is None else self._product(number, refs[number], options)
            yield operation
            num = operation.num_steps
            first_step = first_step + (num if self._has_all(config) else jnp.where(_is_here(config), num, 0))

    def run_to_end(self, steps: Steps) -> "list[CtaProduct | CtaAttention]":
        """Returns the operations, which know the number of all of the ring's steps."""
        operations = list(self.run(steps))
        (*_, config), last = (config for _, config in self.operations), operations[-1]
        num = last.num_steps if self._has_all(config) else jnp.where(_is_here(config), last.num_steps, 0)
        num_steps = last.ring.first_step + num
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
            layout=self.attention, refs=self.named,
            run=run_of_cta(self.named, self.attention.shape, self.attention.config),
            kv_smem=self.smem["ring_smem"][1], **{name: self.smem[name] for name in names}, **options,
        )  # fmt: skip

    def _has_all(self, config) -> bool:
        """Returns whether all CTAs have a part of an operation of that config."""
        return config.num_ctas == num_ctas(self.configs)

    def if_here(self, number: int, body) -> None:
        """Runs `body` if the CTA has a part of operation `number`."""
        _, config = self.operations[number]
        if self._has_all(config):
            body()
        else:
            pl.when(_is_here(config))(body)

    def _meets(self, number: int) -> bool:
        """Returns whether CTAs meet after an operation: the next one takes more of its result than what is received."""
        if not 0 <= number < len(self.operations) - 1:
            return False
        (product, _), (following, config) = self.operations[number : number + 2]
        if number not in self.broadcasts:
            return True
        if product is None or following is None:
            return False
        return config.tiles * config.blocks(self.shapes[following]) > config.num_stages

    def read_counts(self) -> dict:
        """Returns the counts of all meetings, before the CTA comes."""
        numbers = range(len(self.operations))
        return {number: read_count(self.named["counts"], number) for number in numbers if self._meets(number)}

    def come(self, number: int) -> None:
        """Comes to the meeting after an operation, if there is one, when the CTA's part is written."""
        if self._meets(number):
            come(self.named["counts"], number, num_ctas(self.configs))

    def come_without(self, number: int) -> None:
        """Comes to the meeting after an operation of which the CTA has no part."""
        _, config = self.operations[number]
        if not self._has_all(config):
            pl.when(~_is_here(config))(lambda: self.come(number))

    def meet(self, number: int, before: dict) -> None:
        """Waits for the whole result of an operation, if CTAs meet after it."""
        if self._meets(number):
            meet(self.named["counts"], number, before[number])


def _is_here(config):
    return lax.axis_index("cta") < config.num_ctas
