"""The most likely token of each sequence, and the sum that its probability needs, in one pass over the logits.

XLA makes two kernels of such a reduction, and neither the first of them nor what follows begins early. Here each CTA
joins up to 2,048 logits of a sequence. The last one to leave what it found joins all of that (`arrivals.py`), by
threads in a fixed order: results are the same to the bit, whichever is last.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from tree_attn.kernels.arrivals import arrive, reset
from tree_attn.kernels.interpreter import is_interpreted
from tree_attn.kernels.launch_order import runs_kernels_in_order
from tree_attn.kernels.mlir import asm_results, constant, i32, i64, int32, plus
from tree_attn.kernels.overlap import await_previous_kernel, begin_next_kernel
from tree_attn.kernels.registers import LOG2_E, launch
from tree_attn.kernels.warps import THREADS, WARPS, across

AT_ONCE = 4  # logits that a thread reads together
READS = 4  # of a thread, all on their way at once
OF_CTA = THREADS * READS * AT_ONCE  # logits
NO_TOKEN = 2**31 - 1
WORDS = 3 * WARPS + 1  # of shared memory: three numbers of each warp, and the count of those that came before
_SCALAR = plgpu.Layout.WG_SPLAT


def unsupported(shape: tuple[int, int], dtype) -> str | None:
    """Returns why the kernel cannot take such logits, `[B, V]`, or None."""
    vocab_size = shape[1]
    if jnp.dtype(dtype) != jnp.float32:
        return f"logits are float32, not {jnp.dtype(dtype).name}"
    if vocab_size % AT_ONCE or not 0 < vocab_size <= THREADS * OF_CTA:
        return f"logits are a multiple of {AT_ONCE}, up to {THREADS * OF_CTA}, not {vocab_size}"
    if is_interpreted():
        return "CTAs count arrivals, which the interpreter has no atomics for"
    if not runs_kernels_in_order():
        return "CTAs count arrivals in memory that kernels share, which XLA_FLAGS lets run at once"
    return None


@jax.jit
def most_likely(logits):
    """Returns the first token with the largest logit, int32 `[B]`; that logit, and sum exp(logit - largest), float32.

    NaN is the largest, as in `jnp.argmax`.

    Args:
      logits: float32 `[B, V]`, which `unsupported` does not refuse.
    """
    batch, vocab_size = logits.shape
    num_ctas = -(-vocab_size // OF_CTA)
    of_each = functools.partial(jax.ShapeDtypeStruct, (batch,))
    found = jax.ShapeDtypeStruct((batch, num_ctas, AT_ONCE), jnp.float32)
    _, tokens, largest, sums = launch(
        functools.partial(_choose, num_ctas),
        out_type=(found, of_each(jnp.int32), of_each(jnp.float32), of_each(jnp.float32)),
        grid=(num_ctas, batch),
        grid_names=("cta", "sequence"),
        num_threads=1,
        thread_name="warpgroup",
        name="most_likely",
    )(logits, jnp.zeros(batch, jnp.int32))
    return tokens, largest, sums


def _choose(num_ctas: int, logits_ref, counts_ref, found_ref, *result_refs):
    sequence, cta = lax.axis_index("sequence"), lax.axis_index("cta")

    def choose(words_smem):
        begin_next_kernel()
        await_previous_kernel()
        _leave(logits_ref, found_ref, words_smem, sequence, cta)
        (before,) = arrive(counts_ref, [sequence], [True], words_smem.at[pl.ds(WORDS - 1, 1)])

        @pl.when(before == num_ctas - 1)
        def _():
            reset(counts_ref, sequence)
            _join_all(found_ref, result_refs, words_smem, sequence)

    pl.run_scoped(choose, plgpu.SMEM((WORDS,), jnp.float32), collective_axes="warpgroup")


def _leave(logits_ref, found_ref, words_smem, sequence, cta) -> None:
    """Joins the CTA's logits, and writes what it found."""
    _, vocab_size = logits_ref.shape
    _, num_ctas, _ = found_ref.shape

    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * 3, _SCALAR, _SCALAR))
    def emit(_, logits, found, words, sequence, cta):
        sequence, cta = sequence.registers.item(), cta.registers.item()
        first_row, first_found = (_address(logits, sequence, 4 * vocab_size), _address(found, sequence, 16 * num_ctas))
        first_token = arith.muli(cta, int32(OF_CTA))
        read = lambda token: asm_results("ld.global.v4.f32 {$0, $1, $2, $3}, [$4];", "ffff", _plus(first_row, token, 4))
        joined = join(logits_of_thread(read, first_token, vocab_size), shared_address(words))
        with utils.when(is_first_thread()):
            place = _plus(first_found, cta, 16)
            asm_results("st.global.v4.b32 [$0], {$1, $2, $3, $3};", "", place, *map(_bits, joined))

    emit(logits_ref, found_ref, words_smem, sequence, cta)


def _join_all(found_ref, result_refs, words_smem, sequence) -> None:
    """Joins what all CTAs of a sequence have left, and writes the results."""
    _, num_ctas, _ = found_ref.shape

    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * 5, _SCALAR))
    def emit(_, found, tokens, largest, sums, words, sequence):
        sequence = sequence.registers.item()
        number, first_found = thread_number(), _address(found, sequence, 16 * num_ctas)
        place = _plus(first_found, arith.minui(number, int32(num_ctas - 1)), 16)
        top, total, token, _ = asm_results("ld.global.v4.b32 {$0, $1, $2, $3}, [$4];", "ffrr", place)
        is_one = arith.cmpi(arith.CmpIPredicate.ult, number, int32(num_ctas))
        joined = join([only_if(is_one, (top, total, token))], shared_address(words))
        with utils.when(is_first_thread()):
            for ref, x in zip((largest, sums, tokens), joined, strict=True):
                asm_results("st.global.b32 [$0], $1;", "", _address(ref, sequence, 4), _bits(x))

    emit(found_ref, *result_refs, words_smem, sequence)


def logits_of_thread(read, first_token, vocab_size: int) -> list:
    """Emits reads of a thread's logits, and returns each with the weight 1 and its token; none beyond the vocabulary.

    Args:
      read: of the number of a token, i32, returns that and the three logits behind it; first_token: of the CTA, i32.
    """
    elements, number = [], thread_number()
    tokens = [
        arith.addi(first_token, arith.muli(arith.addi(number, int32(i * THREADS)), int32(AT_ONCE)))
        for i in range(READS)
    ]  # fmt: skip
    reads = [read(arith.minui(token, int32(vocab_size - AT_ONCE))) for token in tokens]
    for token, logits in zip(tokens, reads, strict=True):
        is_one = arith.cmpi(arith.CmpIPredicate.ult, token, int32(vocab_size))
        for i, x in enumerate(logits):
            elements.append(only_if(is_one, (x, _float(1.0), arith.addi(token, int32(i)))))
    return elements


def only_if(is_one, element: tuple) -> tuple:
    """Returns a logit, its weight and its token; or, if it is none, what joins others without a trace."""
    nothing = _float(-math.inf), _float(0.0), int32(NO_TOKEN)
    return tuple(arith.select(is_one, x, other) for x, other in zip(element, nothing, strict=True))


def join(elements: list, words) -> tuple:
    """Emits a warpgroup's join of logits, or of what groups of them gave.

    Args:
      elements: of a thread: largest logit, sum of exp(logit - largest), and first token with it.
      words: the address of shared memory, three numbers of each warp.

    Returns:
      The same three of all threads.
    """
    top = functools.reduce(_larger, (x for x, _, _ in elements))
    for distance in (1, 2, 4, 8, 16):
        top = across(top, distance, _larger)
    (top,) = [functools.reduce(_larger, of_warps) for of_warps in _of_warps([top], words)]
    total, token = _float(0.0), int32(NO_TOKEN)
    for x, weight, number in elements:
        is_top = arith.cmpf(arith.CmpFPredicate.OEQ, x, top)
        # -inf less -inf is NaN.
        exponent = arith.mulf(arith.subf(x, top), _float(LOG2_E))
        factor = arith.select(is_top, _float(1.0), asm_results("ex2.approx.f32 $0, $1;", "f", exponent)[0])
        total = arith.addf(total, arith.select(_is_zero(weight), weight, arith.mulf(weight, factor)))
        is_first = arith.ori(is_top, arith.cmpf(arith.CmpFPredicate.UNO, x, x))
        token = arith.minui(token, arith.select(is_first, number, int32(NO_TOKEN)))
    for distance in (1, 2, 4, 8, 16):
        total = across(total, distance, arith.addf)
    (token,) = asm_results("redux.sync.min.u32 $0, $1, -1;", "r", token)
    totals, tokens = _of_warps([total, arith.bitcast(ir.F32Type.get(), token)], arith.addi(words, int32(4 * WARPS)))
    tokens = [arith.bitcast(i32(), x) for x in tokens]
    return top, functools.reduce(arith.addf, totals), functools.reduce(arith.minui, tokens)


def _of_warps(values: list, words) -> list[list]:
    """Emits an exchange between warps: returns, for each value, those of all warps in their order."""
    number = thread_number()
    warp, lane = arith.divui(number, int32(THREADS // WARPS)), arith.remui(number, int32(THREADS // WARPS))
    place = arith.addi(words, arith.muli(warp, int32(4 * len(values))))
    with utils.when(arith.cmpi(arith.CmpIPredicate.eq, lane, int32(0))):
        for i, x in enumerate(values):
            asm_results("st.shared.f32 [$0], $1;", "", arith.addi(place, int32(4 * i)), x)
    utils.warpgroup_barrier()
    read = lambda i: asm_results(f"ld.shared.f32 $0, [$1+{4 * i}];", "f", words)[0]
    return [[read(warp * len(values) + i) for warp in range(WARPS)] for i in range(len(values))]


def thread_number():
    """Returns the thread's number, i32."""
    return asm_results("mov.u32 $0, %tid.x;", "r")[0]


def is_first_thread():
    """Returns whether this is the CTA's first thread."""
    return arith.cmpi(arith.CmpIPredicate.eq, thread_number(), int32(0))


def shared_address(ref):
    """Returns the address of shared memory, i32."""
    return llvm.ptrtoint(i32(), utils.memref_ptr(ref))


def _address(ref, index, num_bytes: int):
    return _plus(llvm.ptrtoint(i64(), utils.memref_ptr(ref)), index, num_bytes)


def _plus(address, index, num_bytes: int):
    return plus(address, arith.muli(arith.extui(i64(), index), constant(num_bytes)))


def _bits(x):
    return x if x.type == i32() else arith.bitcast(i32(), x)


def _float(value: float):
    return arith.constant(ir.F32Type.get(), value)


def _is_zero(weight):
    return arith.cmpf(arith.CmpFPredicate.OEQ, weight, _float(0.0))


def _larger(x, y):
    """Returns the larger of two float32, or NaN if one is."""
    return asm_results("max.NaN.f32 $0, $1, $2;", "f", x, y)[0]
