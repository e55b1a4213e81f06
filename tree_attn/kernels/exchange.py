"""The exchange of `reduction="fused"` in a Mosaic GPU kernel: devices write their states to all, and merge all of them.

It is a kernel of its own, or the end of LeanAttention's (`epilogue.py`). Devices can also exchange any few numbers, and
add or keep them. Sums and gathers are also ends of products (`few_rows_sum.py`, `few_rows_heads.py`).

All is by words that devices write to one another (`exchange_words.py`). `both_ways` merges (or adds) what it reads in
the order of ranks. So all devices get the same bits. A thread takes several elements at once, and reads all their words
before it waits for one: a read takes longer than all arithmetic.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, memref, scf

from tree_attn.kernels import mlir as ops
from tree_attn.kernels.exchange_words import (
    THREADS,
    WORDS_AT_ONCE,
    Buffers,
    Place,
    count_step,
    locate,
    step_number,
    transport,
)

ELEMENTS_AT_ONCE = 4  # that a thread sends, where they are loaded from arrays
LOWEST = float(np.finfo(np.float32).min)


@functools.partial(jax.jit, static_argnames="buffers")
def exchange(out, lse, rank, buffers: Buffers):
    """Merges `out [output tiles, columns, H]` and float32 `lse [output tiles, columns]` over all ranks.

    Args:
      rank: this device's, int32 `[1]`; None where a process has one device: the table then has it, which spares two
        small kernels.
    """
    results = jax.ShapeDtypeStruct(out.shape, out.dtype), jax.ShapeDtypeStruct(lse.shape, jnp.float32)
    return _exchanged("fused_exchange", _merging, (out, lse), results, rank, buffers)


@functools.partial(jax.jit, static_argnames="buffers")
def exchange_sum(x, rank, buffers: Buffers, residual=None):
    """Returns the sum of all ranks' `x [elements]`, added in float32 in the order of ranks.

    Args:
      rank: as of `exchange`.
      residual: `[elements]`, the same on all ranks, to which the sum is added before it is rounded; the result is of
        its dtype.
    """
    arrays = (x,) if residual is None else (x, residual)
    result = jax.ShapeDtypeStruct(x.shape, arrays[-1].dtype)
    (total,) = _exchanged("fused_sum", _adding, arrays, (result,), rank, buffers)
    return total


@functools.partial(jax.jit, static_argnames="buffers")
def exchange_gather(x, rank, buffers: Buffers):
    """Returns all ranks' `x [elements]` as `[ranks, elements]`; `rank` as of `exchange`."""
    gathered = jax.ShapeDtypeStruct((buffers.num_ranks, *x.shape), x.dtype)
    (gathered,) = _exchanged("fused_gather", _gathering, (x,), (gathered,), rank, buffers)
    return gathered


def _exchanged(name: str, purpose, arrays, results, rank, buffers: Buffers):
    body = functools.partial(_exchange, purpose, rank is not None, buffers)
    body.__name__ = name
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    return plgpu.kernel(
        body,
        out_type=results,
        grid=(buffers.num_ctas,),
        grid_names=("cta",),
        compiler_params=params,
        kernel_name=name,
    )(*([] if rank is None else [rank]), *arrays)


def _exchange(purpose, has_rank: bool, buffers: Buffers, *refs):
    """Emits an exchange.

    Args:
      purpose: `purpose(*refs)` returns `(count, sent, receive)`, as `both_ways` takes them.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
    def emit(_, *refs):
        place = locate(buffers, refs[0] if has_rank else None)
        step = step_number(buffers, place)
        send, receive = both_ways(*purpose(*refs[has_rank:]), buffers, place, step, buffers.num_ctas)
        send()
        count_step(buffers, place, step, buffers.num_ctas)
        receive()

    emit(*refs)


def both_ways(
    count: int, sent, receive, buffers: Buffers, place: Place, step, num_ctas: int, sent_at_once: int = ELEMENTS_AT_ONCE
):
    """Returns two functions: one emits the sending of an exchange, the other the receiving.

    Args:
      count: of elements.
      sent: `sent(elements)` returns the float32 to send of each.
      receive: `receive(elements, are_inside, received)` writes the results of those that are inside, where
        `received` is that of `Transport`.
      num_ctas: that exchange, the first ones.
      sent_at_once: elements that a thread sends at once, at the most.
    """
    at = functools.partial(arith.constant, ir.IndexType.get())
    thread, cta = gpu.thread_id(gpu.Dimension.x), gpu.block_id(gpu.Dimension.x)
    exchange, stride = transport(buffers, place, step), num_ctas * THREADS

    def each_few(at_once: int, body):
        at_once = max(1, min(at_once, -(-count // stride)))
        first = arith.addi(thread, arith.muli(cta, at(THREADS)))
        loop = scf.ForOp(first, at(count), at(stride * at_once))
        with ir.InsertionPoint(loop.body):
            elements = [arith.addi(loop.induction_variable, at(i * stride)) for i in range(at_once)]
            are_inside = [arith.cmpi(arith.CmpIPredicate.ult, element, at(count)) for element in elements]
            body([arith.minui(element, at(count - 1)) for element in elements], are_inside)
            scf.YieldOp([])

    def send_few(elements, are_inside):
        for element, is_inside, x in zip(elements, are_inside, sent(elements), strict=True):
            with mgpu.when(is_inside):
                exchange.send(element, x)

    return (
        functools.partial(each_few, sent_at_once, send_few),
        # An element may need another's words, as those of `out` need the lse's.
        functools.partial(
            each_few, WORDS_AT_ONCE // (2 * buffers.num_ranks), functools.partial(receive, received=exchange.received)
        ),
    )


def _merging(out_ref, lse_ref, merged_ref, merged_lse_ref):
    """Returns the purpose that merges states."""
    count, place, receive = merged_results(*writing(merged_ref, merged_lse_ref))

    def sent_of(element):
        output_tile, column, dim, is_lse = place(element)
        x = ops.widened(memref.load(out_ref, [output_tile, column, dim]))
        return arith.select(is_lse, memref.load(lse_ref, [output_tile, column]), x)

    return count, lambda elements: list(map(sent_of, elements)), receive


def writing(merged_ref, merged_lse_ref):
    """Returns the arguments of `merged_results` for results that are written to references."""

    def write(x, *place):
        memref.store(ops.narrowed(x, merged_ref), merged_ref, list(place))

    return ir.MemRefType(merged_ref.type).shape, write, lambda x, *place: memref.store(x, merged_lse_ref, list(place))


def merged_results(shape, write, write_lse):
    """Returns `(count, place, receive)` of an exchange of `out [output tiles, columns, H]` and lse.

    Columns vary fastest, as in LeanAttention's partial states, and lse comes after the H head dims.

    Args:
      shape: of out.
      write, write_lse: take a result, float32, and its indices.
    """
    f32 = ir.F32Type.get()
    at = functools.partial(arith.constant, ir.IndexType.get())
    output_tiles, columns, head_dim = shape

    def place(element):
        """Returns an element's output tile, column and head dim, and whether it is an lse (with the last head dim)."""
        column, rest = arith.remui(element, at(columns)), arith.divui(element, at(columns))
        output_tile, dim = arith.divui(rest, at(head_dim + 1)), arith.remui(rest, at(head_dim + 1))
        is_lse = arith.cmpi(arith.CmpIPredicate.eq, dim, at(head_dim))
        return output_tile, column, arith.minui(dim, at(head_dim - 1)), is_lse

    def lse_of(where):
        """Returns the element that is the lse of an element's row."""
        output_tile, column, *_ = where
        lse_dim = arith.addi(arith.muli(output_tile, at(head_dim + 1)), at(head_dim))
        return arith.addi(arith.muli(lse_dim, at(columns)), column)

    def receive(elements, are_inside, received):
        wheres = list(map(place, elements))
        both = [x for element, where in zip(elements, wheres) for x in (element, lse_of(where))]
        words = received(both, [is_inside for is_inside in are_inside for _ in range(2)])
        for where, is_inside in zip(wheres, are_inside, strict=True):
            xs, lses = next(words), next(words)
            with mgpu.when(is_inside):
                write_merged(xs, lses, *where)

    def write_merged(xs, lses, output_tile, column, dim, is_lse):
        top = functools.reduce(arith.maximumf, lses)
        # A finite stand-in where no rank has a key: exp(-inf - -inf) would be NaN.
        lowest = arith.constant(f32, LOWEST)
        top = arith.select(arith.cmpf(arith.CmpFPredicate.OEQ, top, arith.constant(f32, -math.inf)), lowest, top)
        log2_e = arith.constant(f32, math.log2(math.e))
        weights = [ops.exp2(arith.mulf(arith.subf(x, top), log2_e)) for x in lses]
        total = functools.reduce(arith.addf, weights)
        summed = functools.reduce(arith.addf, [arith.mulf(w, x) for w, x in zip(weights, xs)])
        zero = arith.constant(f32, 0.0)
        is_empty = arith.cmpf(arith.CmpFPredicate.OEQ, total, zero)
        result = arith.select(is_empty, zero, arith.divf(summed, total))

        branch = scf.IfOp(is_lse, has_else=True)
        with ir.InsertionPoint(branch.then_block):
            log = arith.mulf(ops.log2(total), arith.constant(f32, math.log(2)))
            merged = arith.select(is_empty, arith.constant(f32, -math.inf), arith.addf(top, log))
            write_lse(merged, output_tile, column)
            scf.YieldOp([])
        with ir.InsertionPoint(branch.else_block):
            write(result, output_tile, column, dim)
            scf.YieldOp([])

    return output_tiles * columns * (head_dim + 1), place, receive


def _adding(x_ref, *refs):
    """Returns the purpose that adds, and adds the result to a residual if there is one."""
    *residual_refs, total_ref = refs

    def receive(elements, are_inside, received):
        residuals = [_loaded(ref)(elements) for ref in residual_refs]
        of_ranks = received(elements, are_inside)
        for element, is_inside, xs, *residual in zip(elements, are_inside, of_ranks, *residuals, strict=True):
            with mgpu.when(is_inside):
                total = functools.reduce(arith.addf, [*xs, *residual])
                memref.store(ops.narrowed(total, total_ref), total_ref, [element])

    return *ir.MemRefType(x_ref.type).shape, _loaded(x_ref), receive


def _gathering(x_ref, gathered_ref):
    """Returns the purpose that keeps the numbers of all ranks."""

    def receive(elements, are_inside, received):
        of_ranks = received(elements, are_inside)
        for element, is_inside, xs in zip(elements, are_inside, of_ranks, strict=True):
            with mgpu.when(is_inside):
                for r, x in enumerate(xs):
                    rank = arith.constant(ir.IndexType.get(), r)
                    memref.store(ops.narrowed(x, gathered_ref), gathered_ref, [rank, element])

    return *ir.MemRefType(x_ref.type).shape, _loaded(x_ref), receive


def _loaded(ref):
    """Returns the function that loads elements to send, as float32."""
    return lambda elements: [ops.widened(memref.load(ref, [element])) for element in elements]
