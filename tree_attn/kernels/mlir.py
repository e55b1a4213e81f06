"""What the kernels that exchange are written with: MLIR and PTX by a short name.

All are emitted where they are called, into the kernel that is being written. Addresses are i64.
"""

import functools

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from tree_attn.kernels.ptx import asm

WORD_BYTES = 8  # 4 of payload, 4 of the step's number


def exp2(x):
    return asm("ex2.approx.f32 $0, $1;", ir.F32Type.get(), x)


def log2(x):
    return asm("lg2.approx.f32 $0, $1;", ir.F32Type.get(), x)


def widened(x):
    """As float32."""
    return x if x.type == ir.F32Type.get() else arith.extf(ir.F32Type.get(), x)


def narrowed(x, ref):
    """Float32 in the dtype of `ref`."""
    dtype = ir.MemRefType(ref.type).element_type
    return x if x.type == dtype else arith.truncf(dtype, x)


def kernel_launch():
    """The launch of the kernel that is being written."""
    op = ir.InsertionPoint.current.block.owner
    while op.name != "gpu.launch":
        op = op.parent
    return op


def i32():
    return ir.IntegerType.get_signless(32)


def i64():
    return ir.IntegerType.get_signless(64)


def constant(value: int):
    return arith.constant(i64(), value)


def plus(*addresses):
    return functools.reduce(arith.addi, addresses)


def words(element):
    """Bytes of so many words."""
    return arith.muli(arith.index_cast(i64(), element), constant(WORD_BYTES))


def load(address):
    return asm("ld.global.u32 $0, [$1];", i32(), address)


def load_relaxed(address):
    """A word, which other CTAs may be writing meanwhile."""
    return asm("ld.relaxed.gpu.global.b64 $0, [$1];", i64(), address)


def store(address, x):
    asm("st.global.u32 [$0], $1;", None, address, x)


def send(address, x, step):
    """One store of 8 bytes, which a reader sees whole or not at all."""
    asm("{ .reg .b64 word; mov.b64 word, {$1, $2}; st.relaxed.sys.global.b64 [$0], word; }", None, address, x, step)


def receive(address, step):
    """Waits until the word at `address` bears `step`, and returns what it holds."""
    return asm(
        "{ .reg .pred is_old; .reg .b32 number; .reg .b64 word; "
        "AGAIN: ld.relaxed.sys.global.b64 word, [$1]; mov.b64 {$0, number}, word; "
        "setp.ne.u32 is_old, number, $2; @is_old bra AGAIN; }",
        ir.F32Type.get(),
        address,
        step,
    )
