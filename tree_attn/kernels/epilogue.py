"""The exchange of `reduction="fused"` as the end of LeanAttention's kernel, whose partial states it merges first.

Partial states stay on their device, in words like those that travel. `tests/kernels/epilogue_model.py` explores every
order in which CTAs run.
"""

import dataclasses
import functools
import math

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, memref, scf

from tree_attn.kernels import mlir as ops
from tree_attn.kernels.exchange import LOWEST, both_ways, merged_results, writing
from tree_attn.kernels.exchange_words import Buffers, Place, await_words, count_step, locate, step_number

# Partial states that a thread reads before it waits for one: a dependent load takes longer than all arithmetic. With
# more, a kernel with this end would need more than the 128 registers that let two CTAs share an SM.
PARTIALS_AT_ONCE = 9
MERGED_AT_ONCE = 2  # elements whose partial states a thread reads together; by three some take 150 registers and more
SCALAR = plgpu.Layout.WG_SPLAT


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """The exchange as the end of the kernel that makes partial states: a `tree_attn.local.Epilogue`.

    A step is then one launch. Partial states too are words of 8 bytes with the step's number, in this device's buffer.
    A merging thread reads each until the number is there, so no CTA waits for another CTA or a copy to end.

    Each of `num_ctas` CTAs begins, leaves its partial states, if any, and ends, all in its first warpgroup. The first
    `buffers.num_ctas` exchange: they wait for the other CTAs' partial states, and those wait for none. So one CTA more
    must fit at a time, which `tree_attn.reduce.fused` sees to.

    The argument `rank_ref` of all methods is the reference of `exchange`'s rank, or None.
    """

    buffers: Buffers
    num_ctas: int

    @property
    def num_exchanging(self) -> int:
        """Returns how many CTAs exchange."""
        return min(self.buffers.num_ctas, self.num_ctas)

    def begin(self, rank_ref):
        """Returns the number of the step, which the other methods take."""
        return begin_step(self.buffers, rank_ref)

    def leave(self, rank_ref, step, partial, first_dim: int, state, columns: int, head_dim: int) -> None:
        """Leaves part of partial state number `partial`, in the product's layout.

        Args:
          state: as the products' `parts` yield it, of the head dims from `first_dim` on.
          columns: of `cols`; the others are padding, and left out.
          head_dim: Hp.
        """
        acc, top, total = state
        total = total()

        def emit(place, step, partial, *state):
            step, partial = step.registers.item(), partial.registers.item()
            thread, index = gpu.thread_id(gpu.Dimension.x), ir.IndexType.get()
            first = _partial_words(self.buffers, place, arith.index_cast(index, partial), head_dim, columns)
            at = functools.partial(arith.constant, index)

            def store(x, dim, column, is_writer=None):
                is_column = arith.cmpi(arith.CmpIPredicate.ult, column, at(columns))
                with mgpu.when(is_column if is_writer is None else arith.andi(is_column, is_writer)):
                    word = arith.addi(arith.muli(dim, at(columns)), column)
                    ops.send(ops.plus(first, ops.words(word)), x, step)

            acc, *per_column = state
            acc.foreach(lambda x, where: store(x, arith.addi(where[0], at(first_dim)), where[1]))
            if first_dim > 0:
                return
            # All threads have these, and the first four have all columns.
            is_writer = arith.cmpi(arith.CmpIPredicate.ult, thread, at(4))
            for i, x in enumerate(per_column):
                x.foreach(lambda x, where, i=i: store(x, at(head_dim + i), *where, is_writer))

        column_layout = plgpu.Layout.WGMMA.reduce(0)
        self._inline(
            emit, rank_ref, (step, SCALAR), (partial, SCALAR), (acc, plgpu.Layout.WGMMA), (top, column_layout),
            (total, column_layout),
        )  # fmt: skip

    def end(self, rank_ref, step, spans_ref, out_ref, lse_ref, padded_head_dim: int) -> None:
        """Exchanges, and writes the results.

        Args:
          spans_ref: the partial states of each output tile (`lean_layout.partial_spans`).
          out_ref, lse_ref: of the results.
        """

        def emit(place, step, spans_ref, out_ref, lse_ref):
            step, results = step.registers.item(), writing(out_ref, lse_ref)
            self.exchange(place, step, spans_ref, results, padded_head_dim)
            count_step(self.buffers, place, step, self.num_ctas)

        refs = [(ref, plgpu.RefType()) for ref in (spans_ref, out_ref, lse_ref)]
        self._inline(emit, rank_ref, (step, SCALAR), *refs)

    def exchange(self, place: Place, step, spans_ref, results, padded_head_dim: int) -> None:
        """Emits the exchange of the merged states; results are arguments of `exchange.merged_results`."""
        shape, *_ = results
        merged = self.merged(place, step, spans_ref, shape, padded_head_dim)
        count, place_of, receive = merged_results(*results)
        num_ctas = self.num_exchanging
        exchanges = arith.cmpi(arith.CmpIPredicate.ult, gpu.block_id(gpu.Dimension.x), _index(num_ctas))
        with mgpu.when(exchanges):
            sent = lambda elements: merged(list(map(place_of, elements)))
            sent_at_once = min(MERGED_AT_ONCE, PARTIALS_AT_ONCE // _partials_at_once(self.num_ctas, shape))
            for way in both_ways(count, sent, receive, self.buffers, place, step, num_ctas, sent_at_once):
                way()

    def merged(self, place: Place, step, spans_ref, shape, padded_head_dim: int):
        """Returns a function of `(output tile, column, head dim, is_lse)`, several, that merges partial states."""
        words = functools.partial(_partial_words, self.buffers, place, head_dim=padded_head_dim)
        return _merging_partials(words, padded_head_dim, self.num_ctas, step, spans_ref, shape)

    def _inline(self, emit, rank_ref, *operands, returned=None):
        return inline(self.buffers, emit, rank_ref, *operands, returned=returned)


def inline(buffers: Buffers, emit, rank_ref, *operands, returned=None):
    """Emits `emit(place, *values)` into a kernel: where the buffers are, and each operand `(value, layout)`."""
    operands = ([] if rank_ref is None else [(rank_ref, plgpu.RefType())]) + list(operands)

    @plgpu.inline_mgpu(arg_types=tuple(layout for _, layout in operands), return_type=returned)
    def emitted(_, *values):
        if rank_ref is None:
            return emit(locate(buffers, None), *values)
        return emit(locate(buffers, values[0]), *values[1:])

    return emitted(*(value for value, _ in operands))


def begin_step(buffers: Buffers, rank_ref):
    """Returns the number of the step, int32, which what exchanges takes."""

    def emit(place):
        return mgpu.FragmentedArray.splat(step_number(buffers, place), (), is_signed=True)

    return inline(buffers, emit, rank_ref, returned=plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR))


def _partials_at_once(num_ctas: int, shape) -> int:
    """Returns how many partial states of an output tile a thread reads before it waits for one.

    That is about as many as an output tile of equally long ones has.
    """
    return min(-(-num_ctas // shape[0]) + 1, PARTIALS_AT_ONCE)


def _merging_partials(words, head_dim: int, num_ctas: int, step, spans_ref, shape):
    """Returns a function that merges output tiles' partial states, each thread for its elements.

    `words(partial, columns=...)` is the address of a partial state's words; each is read until it bears `step`.
    """
    f32, index = ir.F32Type.get(), ir.IndexType.get()
    at = functools.partial(arith.constant, index)
    real = functools.partial(arith.constant, f32)
    _, columns, _ = shape
    at_once = _partials_at_once(num_ctas, shape)

    def merged(wheres):
        spans = [
            [arith.index_cast(index, memref.load(spans_ref, [output_tile, at(i)])) for i in range(2)]
            for output_tile, *_ in wheres
        ]
        longest = functools.reduce(arith.maxui, [arith.subi(end, first) for first, end in spans])
        nothing = (real(LOWEST), real(0.0), real(0.0))
        loop = scf.ForOp(at(0), longest, at(at_once), list(nothing) * len(wheres))
        with ir.InsertionPoint(loop.body):
            states = _in_groups(loop.inner_iter_args, 3)
            addresses, are_parts = [], []
            for (first, end), (_, column, dim, _) in zip(spans, wheres, strict=True):
                # Another element may have more of them. Of this one those behind the last are read, and left out.
                partial = arith.minui(arith.addi(first, loop.induction_variable), end)
                for i in range(at_once):
                    following = arith.addi(partial, at(i))
                    are_parts.append(arith.cmpi(arith.CmpIPredicate.ult, following, end))
                    first_word = words(following, columns=columns)
                    for d in (at(head_dim), at(head_dim + 1), dim):
                        word = arith.addi(arith.muli(d, at(columns)), column)
                        addresses.append(ops.plus(first_word, ops.words(word)))
            of_words = [is_part for is_part in are_parts for _ in range(3)]
            payloads = await_words(addresses, of_words, step, ops.load_relaxed)
            parts = [
                [arith.select(is_part, x, other) for x, other in zip(three, nothing)]
                for is_part, three in zip(are_parts, _in_groups(payloads, 3), strict=True)
            ]
            folded = [
                x
                for state, of_element in zip(states, _in_groups(parts, at_once), strict=True)
                for x in _folded(of_element, *state)
            ]
            scf.YieldOp(folded)
        sums = _in_groups(loop.results, 3)
        return [_finished(*state, is_lse) for state, (*_, is_lse) in zip(sums, wheres, strict=True)]

    return merged


def _in_groups(values, size: int) -> list:
    """Returns values in groups of `size`, in their order."""
    values = list(values)
    return [values[first : first + size] for first in range(0, len(values), size)]


def _folded(parts, top, total, acc):
    """Returns unnormalised `(top, total, acc)` merged with those of `parts`."""
    new_top = functools.reduce(arith.maximumf, [part_top for part_top, _, _ in parts], top)
    decay = ops.exp2(arith.subf(top, new_top))
    total, acc = arith.mulf(total, decay), arith.mulf(acc, decay)
    for part_top, part_total, part_acc in parts:
        decay = ops.exp2(arith.subf(part_top, new_top))
        total = arith.addf(total, arith.mulf(decay, part_total))
        acc = arith.addf(acc, arith.mulf(decay, part_acc))
    return new_top, total, acc


def _finished(top, total, acc, is_lse):
    """Returns an element of `out`, or of lse, from the merged sums."""
    real = functools.partial(arith.constant, ir.F32Type.get())
    is_empty = arith.cmpf(arith.CmpFPredicate.OEQ, total, real(0.0))
    lse = arith.mulf(arith.addf(top, ops.log2(total)), real(math.log(2)))
    lse = arith.select(is_empty, real(-math.inf), lse)
    return arith.select(is_lse, lse, arith.select(is_empty, real(0.0), arith.divf(acc, total)))


def _index(value: int):
    return arith.constant(ir.IndexType.get(), value)


def _partial_words(buffers: Buffers, place: Place, partial, head_dim: int, columns: int):
    """Returns the address of a partial state: `columns` words for each head dim, then for the maximum and the sum."""
    size = ops.constant((head_dim + 2) * columns * ops.WORD_BYTES)
    offset = arith.muli(arith.index_cast(ops.i64(), partial), size)
    return ops.plus(place.local_base, ops.constant(buffers.partials_offset), offset)
