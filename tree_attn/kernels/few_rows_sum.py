"""The sum over devices as the end of a product of few rows, where each device has a part of the in-features.

Every device cuts out-features alike, so the same CTA of each has the same ones. It sends its results to all devices as
`exchange_words.py` does, and receives those of the others. It adds them in the order of ranks. The first rank adds the
residual to what it sends. A CTA waits for the same CTA of other devices. So all CTAs must fit a device at once, as they
do: there are no more than SMs.
"""

import dataclasses
import functools

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from tree_attn.kernels import mlir as ops
from tree_attn.kernels.epilogue import SCALAR, begin_step, inline
from tree_attn.kernels.exchange_words import MAX_CTAS, THREADS, Buffers, count_step, transport
from tree_attn.kernels.few_rows_layout import FewRowsConfig, FewRowsShape
from tree_attn.kernels.few_rows_results import LAYOUT, element_of, places, storing


@dataclasses.dataclass(frozen=True)
class SumEnd:
    """The exchange in which a product ends. Each CTA begins, sends and receives its tiles or gathers them, and ends.

    All that is in its first warpgroup.

    The argument `rank_ref` of all methods is the reference of `exchange.exchange`'s rank, or None.
    """

    buffers: Buffers
    config: FewRowsConfig

    @property
    def fits(self) -> bool:
        """Returns whether the CTAs can count the steps of all that later kernels may have."""
        return self.config.num_ctas * THREADS >= MAX_CTAS

    def begin(self, rank_ref):
        """Returns the number of the step, which the other methods take."""
        return begin_step(self.buffers, rank_ref)

    def first_of_rank(self, rank_ref, size: int):
        """Returns `rank * size`, int32: where this device's part begins."""

        def emit(place):
            rank = arith.trunci(ops.i32(), place.rank)
            first = arith.muli(rank, arith.constant(ops.i32(), size))
            return FragmentedArray.splat(first, (), is_signed=True)

        returned = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)
        return inline(self.buffers, emit, rank_ref, returned=returned)

    def send(self, rank_ref, step, result, residual, feature, shape: FewRowsShape) -> None:
        """Sends a tile's results to all devices, float32 `[64, cols]`; of the first rank with the residual, if any.

        Args:
          feature: the tile's first.
        """

        def emit(place, result, step, feature, *residual):
            at, is_inside = places(feature, shape, self.config)
            exchange = transport(self.buffers, place, step.registers.item())
            of_first = arith.cmpi(arith.CmpIPredicate.eq, place.rank, ops.constant(0))
            zero = arith.constant(ir.F32Type.get(), 0.0)
            added: list = []  # in the order in which places of the result come
            for x in residual:
                x.foreach(lambda x, _: added.append(arith.select(of_first, x, zero)))
            of_place = iter(added)

            def send_own(x, where):
                x = arith.addf(x, next(of_place)) if added else x
                with utils.when(is_inside(*where)):
                    exchange.send(element_of(shape, *at(*where)), x)

            result.foreach(send_own)

        operands = [(result, LAYOUT), (step, SCALAR), (feature, SCALAR)]
        operands += [] if residual is None else [(residual, LAYOUT)]
        inline(self.buffers, emit, rank_ref, *operands)

    def receive(self, rank_ref, step, out_ref, result, feature, shape: FewRowsShape, broadcast=None) -> None:
        """Writes the sum of what all devices have sent of a tile.

        Args:
          result, feature: of `send`; of the result only its places count.
          broadcast: as of `few_rows_results.write_rows`.
        """
        sending = [] if broadcast is None else broadcast.operands

        def emit(place, out, result, step, feature, *sending):
            store = storing(out, shape, broadcast, sending)
            at, is_inside = places(feature, shape, self.config)
            exchange = transport(self.buffers, place, step.registers.item())
            wheres: list = []
            result.foreach(lambda _, where: wheres.append(where))
            are_inside = [is_inside(*where) for where in wheres]
            of_ranks = exchange.received((element_of(shape, *at(*where)) for where in wheres), are_inside)
            for where, inside, parts in zip(wheres, are_inside, of_ranks, strict=True):
                with utils.when(inside):
                    store(functools.reduce(arith.addf, parts), at(*where))

        operands = [(out_ref, plgpu.RefType()), (result, LAYOUT), (step, SCALAR), (feature, SCALAR), *sending]
        inline(self.buffers, emit, rank_ref, *operands)

    def end(self, rank_ref, step) -> None:
        """Counts the step."""
        count_exchanges(self.buffers, rank_ref, step, self.config.num_ctas)


def count_exchanges(buffers: Buffers, rank_ref, step, num_ctas: int) -> None:
    """Counts the exchanges of a kernel of so many CTAs, of which `step` is the last."""

    def emit(place, step):
        count_step(buffers, place, step.registers.item(), num_ctas)

    inline(buffers, emit, rank_ref, (step, SCALAR))
