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


def polled(addresses, are_wanted, step, scope: str, depth: int, first=None):
    """Reads words until the wanted ones bear the step, with `depth` reads on their way; returns the words, i64."""
    import os
    space = int(os.environ.get("SPACE", "200"))
    n, depth = len(addresses), abs(depth)
    operands = [*addresses]
    operands += [arith.extui(i32(), w) for w in are_wanted] if are_wanted is not None else []
    first = [x for x in first] if first is not None else []
    at_step = n + n + (n if are_wanted is not None else 0) + len(first)
    wanted_at = lambda i: f"${2 * n + i}"
    first_at = 2 * n + (n if are_wanted is not None else 0)
    operands += first + [step]
    lines = ["{", f".reg .b64 v<{depth * n}>;", ".reg .b32 lo, num;", ".reg .pred p, q;"]
    if are_wanted is not None:
        lines.append(f".reg .pred w<{n}>;")
        lines += [f"setp.ne.u32 w{i}, {wanted_at(i)}, 0;" for i in range(n)]
    reload, sleep = os.environ.get("RELOAD"), int(os.environ.get("SLEEP", "0"))
    lds = lambda k: [f"ld.relaxed.{scope}.global.b64 v{k * n + i}, [${n + i}];" for i in range(n)]
    lines.append(f".reg .pred m<{n}>;")

    def again(k):
        loads = lds(k)
        if reload:
            loads = [f"@m{i} {load}" for i, load in enumerate(loads)]
        return ([f"nanosleep.u32 {sleep};"] if sleep else []) + loads

    def check(k, label):
        out = ["setp.ne.u32 p, 0, 0;"]
        for i in range(n):
            out.append(f"mov.b64 {{lo, num}}, v{k * n + i};")
            if are_wanted is None:
                out.append(f"setp.ne.u32 m{i}, num, ${at_step};")
            else:
                out.append(f"setp.ne.and.u32 m{i}, num, ${at_step}, w{i};")
            out.append(f"or.pred p, p, m{i};")
        out += ["vote.sync.any.pred q, p, 0xffffffff;", f"@!q bra {label};"]
        return out

    if first:
        lines += [f"mov.b64 v{i}, ${first_at + i};" for i in range(n)]
        lines += check(0, "D0") + again(0)
    else:
        lines += lds(0)
    for k in range(1, depth):
        if space:
            lines.append(f"nanosleep.u32 {space};")
        lines += lds(k)
    lines.append("LP:")
    for k in range(depth):
        lines += check(k, f"D{k}") + again(k)
    lines.append("bra LP;")
    for k in range(depth):
        lines.append(f"D{k}:")
        lines += [f"mov.b64 ${i}, v{k * n + i};" for i in range(n)] + ["bra END;"]
    lines += ["END:", "}"]
    kinds = [i64()] * n
    constraints = ",".join(["=&l"] * n + [_LETTERS[str(x.type)] for x in operands])
    kind = kinds[0] if n == 1 else llvm.StructType.get_literal(kinds)
    out = llvm.inline_asm(kind, operands, "\n".join(lines), constraints, has_side_effects=True)
    return [out] if n == 1 else [llvm.extractvalue(kinds[i], out, [i]) for i in range(n)]


def store(address, x):
    """Writes an i32 to a global address."""
    asm("st.global.u32 [$0], $1;", None, address, x)


def send(address, x, step):
    """Writes payload and step number as one word of 8 bytes, which a reader sees whole or not at all."""
    asm("{ .reg .b64 word; mov.b64 word, {$1, $2}; st.relaxed.sys.global.b64 [$0], word; }", None, address, x, step)
