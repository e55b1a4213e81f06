"""Several layers in one launch: what a CTA does for a layer, in a loop over them.

Of a launch for each layer, the last result is on its way, and the next launch's first x, while no weights are
requested: the ring is empty at the end. Here the next layer's weights fill it as this one's are read.

Each CTA has a part of every product but that of heads. A layer's x comes by words of the layer before, as all results
do within a layer (`few_rows_broadcast.py`). The first layer's is sent before the loop. What layers have in common is
read once. Of what they have of their own, a number chooses (`few_rows_of_layers.py`).

Slots of words are two here too, as `few_rows_broadcast.py` says. But who merges a head's states has waited for those
who made that head. Others may still receive x for theirs, whose words would be overwritten. So attention's results have
words of their own in a slot (`tests/kernels/layers_exchange_model.py`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.kernels.exchange_words import Buffers
from tree_attn.kernels.few_rows_broadcast import Broadcast
from tree_attn.kernels.few_rows_chain_cta import CtaChain, refs_of
from tree_attn.kernels.few_rows_chain_layout import chain_buffers, first_attended
from tree_attn.kernels.few_rows_chain_messages import Steps
from tree_attn.kernels.few_rows_of_layers import OfLayers, compute_within_loop
from tree_attn.kernels.lean_walk import Run
from tree_attn.kernels.meetings import other_side


def name_of(argument: str, layer: int) -> str:
    """Returns the name of an argument that each layer has its own of."""
    return f"{argument} of layer {layer}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CtaLayers(CtaChain):
    """The operations of one of several layers; `named` has arguments of all, by `name_of`.

    Attributes:
      num_layers: of the launch; layer: which of them this is, int32.
      attention_run: as of `run_of_attention`, if it has been read.
      others: of `CtaChain`.
    """

    num_layers: int
    layer: Any = 0
    attention_run: Run | None = None

    def of_layer(self, layer, first_step) -> "CtaLayers":
        """Returns the operations of a layer, from a step of the ring on."""
        last = name_of("", self.num_layers - 1)
        names = [name.removesuffix(last) for name in self.named if name.endswith(last)]
        of_all = lambda name: tuple(self.named[name_of(name, number)] for number in range(self.num_layers))
        named = self.named | {name: OfLayers(of_all(name), layer) for name in names}
        return dataclasses.replace(self, named=named, layer=layer, first_step=first_step)

    @property
    def refs(self) -> list[dict]:
        """Does `CtaChain.refs`: x is the result of the layer before, in the place of this one's."""
        before = {"x": self.outputs[-1], "residual": self.outputs[-1]}
        return refs_of(self.named | before, self.outputs, self.shapes)

    @property
    def begins_ring(self) -> bool:
        """Does `CtaChain.begins_ring`: the layer before sends its result."""
        return False

    @property
    def broadcasts(self) -> list[int]:
        """Does `CtaChain.broadcasts`: of the last operation too, to the next layer."""
        return list(range(len(self.operations)))

    @property
    def words(self) -> Buffers:
        """Does `CtaChain.words`."""
        return chain_buffers(self.shapes, self.attention, num_layers=self.num_layers)

    @property
    def _followed(self) -> dict[int, int]:
        return {number: (number + 1) % len(self.operations) for number in range(len(self.operations))}

    @property
    def _last(self) -> int:
        return len(self.operations) - 1

    def steps_of_layer(self, steps: Steps, layer) -> Steps:
        """Returns the first steps of a layer, of those of `begin_steps`: by the first of them it gets its x."""
        return Steps() if steps.broadcast is None else Steps(steps.broadcast + layer * len(self.sent))

    def _broadcast(self, operation: int, steps: Steps) -> Broadcast | None:
        sent = super()._broadcast(operation, steps)
        if sent is None:
            return None
        is_attended = self.operations[operation][0] is None
        first = first_attended(self.shapes, self.attention) if is_attended else 0
        # Behind x, which the layer before sends.
        return dataclasses.replace(sent, step=sent.step + 1, buffers=sent.buffers.replace(first=first))

    def _x_of(self, operation: int, steps: Steps) -> Broadcast | None:
        if operation > 0:
            return super()._x_of(operation, steps)
        return self._broadcast(self._last, self.steps_of_layer(steps, -1))

    def send_before(self, steps: Steps) -> None:
        """Sends x of the first layer, as if a layer before had ended in it."""
        number, broadcast = len(self.shapes) - 1, self._x_of(0, steps)
        options = dict(ring=None, broadcast=broadcast)
        self._product(number, self.of_layer(0, 0).refs[number], options).send_before(self.named["x"])
        plgpu.barrier_arrive(self.smem["x_written"])
        self.come(self._last)

    def await_before(self) -> None:
        """Does `CtaChain.await_before`: a CTA without heads and KV tiles would read the residual before it is there."""
        plgpu.barrier_wait(self.smem["x_written"])

    def compute(self, number: int, operation) -> None:
        """Does `CtaChain.compute`, and tells last.

        Told before the CTA came to the meeting, a token of the 1B took 0.5 to 1.4 % longer (docs/log/llama.md: "Over
        two GPUs late words and a ring that opens with x take 2 to 3 % off a token").
        """
        operation.compute()
        self.come(number)
        self.tell_sent(number)

    def await_sent(self, number: int) -> None:
        """Does `CtaChain.await_sent`, also of the layer before."""
        super().await_sent(number)
        if number == 0:
            pl.when(self.layer > 0)(lambda: plgpu.barrier_wait(self.smem["sent"].at[self._last]))

    def count_steps(self, steps: Steps) -> None:
        """Does `CtaChain.count_steps`, of all layers."""
        super().count_steps(self.steps_of_layer(steps, self.num_layers - 1))

    def run_of_attention(self) -> Run:
        """Does `CtaChain.run_of_attention`."""
        return super().run_of_attention() if self.attention_run is None else self.attention_run

    def meet(self, number: int, before: dict) -> None:
        """Does `CtaChain.meet`; counts change sides with each layer."""
        number %= len(self.operations)
        if self._meets(number):
            super().meet(number, before | {number: other_side(before[number], self.layer)})

    def prepared(self) -> "CtaLayers":
        """Does `CtaChain.prepared`: a CTA has the same run of KV tiles in all layers."""
        with_run = dataclasses.replace(self, attention_run=super().run_of_attention())
        *_, last = with_run.of_layer(0, 0).run(Steps())
        return dataclasses.replace(with_run, num_steps=with_run.end_of(last) * self.num_layers)

    def in_turn(self, steps: Steps, body: Callable) -> None:
        """Does `CtaChain.in_turn`, in a loop."""

        def step(layer, first_step):
            compute_within_loop()
            of_layer = self.of_layer(layer, first_step)
            return of_layer.end_of(body(of_layer, self.steps_of_layer(steps, layer)))

        lax.fori_loop(0, self.num_layers, step, jnp.int32(0))
