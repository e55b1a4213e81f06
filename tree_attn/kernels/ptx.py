"""PTX within a Pallas kernel: what Mosaic GPU has no operation for."""

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm


def asm(text: str, result: ir.Type | None, *operands: ir.Value) -> ir.Value:
    """Emits `text`, in which `$0`, `$1`, ... stand for the result, if there is one, and the operands, in this order.

    It is neither moved nor left out. Types are i32, i64 and f32.
    """
    letters = {"i32": "r", "i64": "l", "f32": "f"}
    constraints = ([] if result is None else [f"={letters[str(result)]}"]) + [letters[str(x.type)] for x in operands]
    result = ir.Type.parse("!llvm.void") if result is None else result
    return llvm.inline_asm(result, list(operands), text, ",".join(constraints), has_side_effects=True)
