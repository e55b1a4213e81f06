"""The contracts of local attention, as types: with its backends, and with the exchange that ends a kernel.

`tree_attn.local` calls a `Backend`, and hands an `Exchange` of `tree_attn.reduce` to it; a kernel calls its `Epilogue`.
"""

from typing import Any, Protocol, runtime_checkable

import jax

from tree_attn.masking import Visibility
from tree_attn.state import SoftmaxState


@runtime_checkable
class Backend(Protocol):
    """A module of this folder: one way to compute attention on one device.

    key and value may be float8_e4m3fn or int8. `scales` is None or float32 `[2, K]`: each head's scale of keys and of
    values. Sinks are merged by the caller.
    """

    def unavailable(self) -> str | None:
        """Returns why the backend cannot run on this machine, or None."""

    def unsupported(
        self, query, key, value, *, logits_soft_cap: float | None, visible: Visibility, scales=None
    ) -> str | None:
        """Returns which option of a call the backend cannot do, or None."""

    def attend(
        self, query, key, value, *, scale: float, logits_soft_cap: float | None, visible: Visibility, scales=None
    ) -> SoftmaxState:
        """Computes the state; arguments are checked already. `mosaic_gpu` also takes `merge_with` and `exchange`."""


@runtime_checkable
class Exchange(Protocol):
    """The merge with the states of other devices, as a backend sees it: `tree_attn.reduce.fused` has the one there is.

    A backend whose kernel leaves partial states asks for an `epilogue` first, and ends its kernel in it. Every other
    backend calls `merge` on its finished state.
    """

    @property
    def rank(self) -> jax.Array | None:
        """This device's rank, int32 `[1]`, as kernels take it; None where each process has one device."""

    def merge(self, state: SoftmaxState) -> SoftmaxState:
        """Returns the state over all devices, in a kernel of its own."""

    def epilogue(
        self, result: jax.ShapeDtypeStruct, num_ctas: int, num_partials: int, padded_head_dim: int
    ) -> "Epilogue | None":
        """Returns the exchange as the end of a kernel that makes partial states; None if this kernel cannot end in it.

        Args:
          result: the merged `out`, `[output tiles, columns, H]`.
          num_ctas: of the kernel.
          num_partials: the partial states that it leaves, each of `columns` columns and `padded_head_dim` head dims.
        """


@runtime_checkable
class Epilogue(Protocol):
    """The exchange inside a kernel. `tree_attn.kernels.lean` calls it, in the first warpgroup of each CTA.

    Each CTA calls `begin` once, `leave` once for each partial state that it makes, and `end` once. `rank_ref` is the
    reference of `Exchange.rank`, or None.
    """

    def begin(self, rank_ref: Any) -> Any:
        """Returns the number of the step, which `leave` and `end` take."""

    def leave(
        self, rank_ref: Any, step: Any, partial: Any, first_dim: int, state: Any, columns: int, head_dim: int
    ) -> None:
        """Leaves part of partial state number `partial`, of the head dims from `first_dim` on.

        That is `acc [head dims, cols]`, `top [cols]` and a function that returns `total [cols]`, unnormalised.
        """

    def end(self, rank_ref: Any, step: Any, spans_ref: Any, out_ref: Any, lse_ref: Any, padded_head_dim: int) -> None:
        """Merges the partial states of all devices into the results; `spans_ref` has those of each output tile."""
