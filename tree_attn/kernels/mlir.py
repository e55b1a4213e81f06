"""MLIR and PTX by short names, for what Pallas has no operation for.

Every function emits its operations into the kernel that is being written. Addresses are i64.
"""

import functools

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

WORD_BYTES = 8  # of a word that is exchanged: 4 of payload, 4 of the step's number
_LETTERS = {"i16": "h", "i32": "r", "i64": "l", "f32": "f"}  # of the types in PTX's constraints


def asm(text: str, result: ir.Type | None, *operands: ir.Value) -> ir.Value:
    """Emits the PTX `text`, in which `$0`, `$1`, ... stand for the result, if there is one, and the operands in order.

    The compiler neither moves it nor leaves it out. Types are i16, i32, i64 and f32.
    """
    (out,) = asm_results(text, "" if result is None else _LETTERS[str(result)], *operands)
    return out


def asm_results(text: str, results: str, *operands: ir.Value, moves: bool = False) -> list:
    """Emits PTX as `asm` does, with a result for each letter of `results`; with `moves` the compiler may move it.

    Letters are PTX's constraints: "h" for i16, "r" for i32, "l" for i64, "f" for f32.
    """
    kinds = [ir.Type.parse({letter: name for name, letter in _LETTERS.items()}[x]) for x in results]
    constraints = ",".join([f"={x}" for x in results] + [_LETTERS[str(x.type)] for x in operands])
    if len(kinds) == 0:
        kind = ir.Type.parse("!llvm.void")
    else:
        kind = kinds[0] if len(kinds) == 1 else llvm.StructType.get_literal(kinds)
    out = llvm.inline_asm(kind, list(operands), text, constraints, has_side_effects=not moves)
    if len(kinds) <= 1:
        return [out]
    return [llvm.extractvalue(kind, out, [i]) for i, kind in enumerate(kinds)]


def exp2(x):
    """Returns `2 ** x`, as the hardware approximates it."""
    return asm("ex2.approx.f32 $0, $1;", ir.F32Type.get(), x)


def log2(x):
    """Returns the binary logarithm of `x`, as the hardware approximates it."""
    return asm("lg2.approx.f32 $0, $1;", ir.F32Type.get(), x)


def widened(x):
    """Returns a float as float32."""
    return x if x.type == ir.F32Type.get() else arith.extf(ir.F32Type.get(), x)


def narrowed(x, ref):
    """Returns a float32 in the dtype of `ref`."""
    dtype = ir.MemRefType(ref.type).element_type
    return x if x.type == dtype else arith.truncf(dtype, x)


def kernel_launch():
    """Returns the launch operation of the kernel that is being written."""
    op = ir.InsertionPoint.current.block.owner
    while op.name != "gpu.launch":
        op = op.parent
    return op


def i32():
    """Returns the type of 32-bit integers."""
    return ir.IntegerType.get_signless(32)


def i64():
    """Returns the type of 64-bit integers."""
    return ir.IntegerType.get_signless(64)


def constant(value: int):
    """Returns an i64."""
    return arith.constant(i64(), value)


def int32(value: int):
    """Returns an i32."""
    return arith.constant(i32(), value)


def plus(*addresses):
    """Returns the sum of i64."""
    return functools.reduce(arith.addi, addresses)


def words(count):
    """Returns the bytes of `count` words; the count is an index."""
    return arith.muli(arith.index_cast(i64(), count), constant(WORD_BYTES))


def load(address):
    """Returns the i32 at a global address."""
    return asm("ld.global.u32 $0, [$1];", i32(), address)


def load_relaxed(address):
    """Returns a word that other CTAs may be writing meanwhile."""
    return asm("ld.relaxed.gpu.global.b64 $0, [$1];", i64(), address)


def load_from_peers(address):
    """Returns a word that other devices may be writing meanwhile."""
    return asm("ld.relaxed.sys.global.b64 $0, [$1];", i64(), address)


def store(address, x):
    """Writes an i32 to a global address."""
    asm("st.global.u32 [$0], $1;", None, address, x)


def send(address, x, step):
    """Writes payload and step number as one word of 8 bytes, which a reader sees whole or not at all."""
    asm("{ .reg .b64 word; mov.b64 word, {$1, $2}; st.relaxed.sys.global.b64 [$0], word; }", None, address, x, step)
