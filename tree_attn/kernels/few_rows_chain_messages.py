"""Messages between the CTAs of a chain: results by words, and meetings, to which each comes when it has written."""

import dataclasses
from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl

from tree_attn.kernels.epilogue import begin_step
from tree_attn.kernels.exchange_words import Buffers
from tree_attn.kernels.few_rows_broadcast import Broadcast, count_steps
from tree_attn.kernels.few_rows_chain_attention import AttentionLayout
from tree_attn.kernels.few_rows_chain_layout import broadcasts, chain_buffers, comes_in_parts, num_ctas
from tree_attn.kernels.few_rows_layout import FewRowsConfig, FewRowsShape
from tree_attn.kernels.few_rows_sum import count_exchanges
from tree_attn.kernels.meetings import come, meet, read_count


class Steps(NamedTuple):
    """Numbers of a launch's first broadcast, and of its first exchange with other devices; None: there are none."""

    broadcast: Any = None
    exchange: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainMessages:
    """The ends of a chain's operations: what each sends or exchanges, and after which of them CTAs meet.

    Attributes:
      named: references of arguments.
      ends: of each product the exchange in which it ends, or None.
      others: as of `few_rows_chain.multiply_chain`.
    """

    shapes: tuple[FewRowsShape, ...]
    configs: tuple[FewRowsConfig, ...]
    attention: AttentionLayout | None
    buffers: Buffers | None
    named: dict
    ends: list

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
    def words(self) -> Buffers:
        """Returns the layout of the words in which results are sent."""
        return chain_buffers(self.shapes, self.attention)

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
            broadcast = begin_step(self.words, self.named["words"])
        if self.exchanges:
            exchange = begin_step(self.buffers, self.named.get("rank"))
        return Steps(broadcast, exchange)

    def count_steps(self, steps: Steps) -> None:
        """Counts the steps, when the CTA has got all that it reads."""
        if self.sent:
            count_steps(self._broadcast(self.sent[-1], steps), num_ctas(self.configs))
        if self.exchanges:
            last = self._exchange(self.exchanges[-1], steps)
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
            words_ref=self.named["words"], buffers=self.words,
            step=steps.broadcast + self.sent.index(operation), features=features,
        )  # fmt: skip

    def _received(self, operation: int, steps: Steps) -> Broadcast | None:
        """Returns by which broadcast CTAs get an operation's result, if they do by one."""
        if operation not in self.in_parts or steps.exchange is None:
            return self._broadcast(operation, steps)
        features = self.shapes[self.operations[operation][0]].out_features
        return Broadcast(self.named.get("rank"), self.buffers, self._exchange(operation, steps), features)

    def _x_of(self, operation: int, steps: Steps) -> Broadcast | None:
        """Returns by which broadcast an operation gets its x, if it does by one."""
        return self._received(operation - 1, steps)

    def _exchange(self, operation: int, steps: Steps):
        """Returns the number of an operation's exchange with other devices, if it ends in one."""
        if operation not in self.exchanges or steps.exchange is None:
            return None
        return steps.exchange + self.exchanges.index(operation)

    def _has_all(self, config) -> bool:
        """Returns whether all CTAs have a part of an operation of that config."""
        return config.num_ctas == num_ctas(self.configs)

    def if_here(self, number: int, body) -> None:
        """Runs `body` if the CTA has a part of operation `number`."""
        _, config = self.operations[number]
        if self._has_all(config):
            body()
        else:
            pl.when(is_here(config))(body)

    def _meets(self, number: int) -> bool:
        """Returns whether CTAs meet after an operation: the next one takes more of its result than what is received."""
        if number not in self._followed:
            return False
        product, (following, config) = self.operations[number][0], self.operations[self._followed[number]]
        if number not in self.broadcasts:
            return True
        if product is None or following is None:
            return False
        return config.tiles * config.blocks(self.shapes[following]) > config.num_stages

    @property
    def _followed(self) -> dict[int, int]:
        """Returns the operation that follows each, but the last."""
        return {number: number + 1 for number in range(len(self.operations) - 1)}

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
            pl.when(~is_here(config))(lambda: self.come(number))

    def meet(self, number: int, before: dict) -> None:
        """Waits for the whole result of an operation, if CTAs meet after it."""
        if self._meets(number):
            meet(self.named["counts"], number, before[number])


def is_here(config):
    """Returns whether the CTA has a part of an operation of that config."""
    return lax.axis_index("cta") < config.num_ctas
