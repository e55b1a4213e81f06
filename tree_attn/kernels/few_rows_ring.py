"""The ring of stages of a CTA, through which weights and x pass, and the steps of it that one operation has.

A step fills a stage. Moving warpgroups wait until computing has read what the stage held before. Each of them waits at
every step, whatever it copies then: so all agree on the barriers' phases.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.kernels.few_rows_copies import await_copies, await_copies_or_x
from tree_attn.kernels.interpreter import is_interpreted

STAGE_ROWS, BLOCK_IN = 128, 128  # of weights in a stage of a chain's ring


def copies_together() -> bool:
    """Returns whether a stage's copies arrive together; the interpreter has no inline MLIR for it."""
    return not is_interpreted()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring:
    """The steps of a CTA's ring that one operation has, from `first_step` on; its methods count steps from there.

    Attributes:
      full: barriers of the stages, at which copies arrive: of weights and of x, or one for both.
      free: barriers of the stages, at which computing arrives when it has read one.
      num_stages, in_flight: as in `FewRowsConfig`.
      is_first: whether no message is on its way when the operation begins, so that all stages may be.
      opens_with_x: whether `in_flight` stages may be as soon as x of its first step is there.
      num_steps: of all operations of the CTA; only computing needs it.
    """

    full: Sequence[Any]
    free: Any
    num_stages: int
    in_flight: int | None = None
    first_step: Any = 0
    is_first: bool = False
    opens_with_x: bool = False
    num_steps: Any = None

    def stage(self, step):
        """Returns the stage that a step fills."""
        return lax.rem(self.first_step + step, self.num_stages)

    def await_free(self, step) -> None:
        """Waits until the step's stage has been read."""
        is_refilled = self.first_step + step >= self.num_stages
        pl.when(is_refilled)(lambda: plgpu.barrier_wait(self.free.at[self.stage(step)]))

    def await_room(self, step) -> None:
        """Waits until the step's stage has been read, and few enough weights are on their way."""
        self.await_free(step)
        if self.in_flight is None or not copies_together():
            return
        # Of the first steps, x may not be there yet, but what CTAs tell each other is on its way.
        may_lack_x = step < self.num_stages
        before = self.first_step + step - jnp.where(may_lack_x, 1, self.in_flight)
        is_limited = step >= self.num_stages if self.is_first else before >= 0
        if self.opens_with_x:
            earlier = jnp.maximum(self.first_step + step - self.in_flight, 0)
            await_any = functools.partial(await_copies_or_x, self.full, before, self.first_step, earlier)
            pl.when(is_limited & may_lack_x)(functools.partial(await_any, self.num_stages))
            is_limited &= ~may_lack_x
        pl.when(is_limited)(lambda: await_copies(self.full[0], before, self.num_stages))

    def await_first_x(self) -> None:
        """Waits until x of the first step is there."""
        await_copies(self.full[-1], jnp.asarray(self.first_step, jnp.int32), self.num_stages)

    def await_full(self, step) -> None:
        """Waits until weights and x of a step are there."""
        for barriers in self.full:
            plgpu.barrier_wait(barriers.at[self.stage(step)])

    def release(self, step) -> None:
        """Lets the step's stage be filled again, if one of the CTA's later steps does."""

        @pl.when(self.first_step + step + self.num_stages < self.num_steps)  # else nothing waits for it
        def _():
            plgpu.barrier_arrive(self.free.at[self.stage(step)])
