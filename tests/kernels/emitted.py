"""Runs what kernels emit by MLIR's operations and PTX, thread by thread: Pallas' interpreter knows neither.

Threads take turns where they wait for a word in memory, so devices that exchange can be run together.
"""

import itertools
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from jax._src.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

PLACES = ("gpu.thread_id", "gpu.block_id")
TERMINATORS = ("scf.yield", "scf.condition", "func.return")
OF_INTEGERS = {
    "addi": operator.add, "subi": operator.sub, "muli": operator.mul, "andi": operator.and_, "ori": operator.or_,
    "xori": operator.xor, "divui": operator.floordiv, "remui": operator.mod, "minui": min, "maxui": max,
    "shrui": operator.rshift,
    "extui": int, "trunci": int, "index_cast": int,
}  # fmt: skip
OF_FLOATS = {
    "addf": operator.add, "subf": operator.sub, "mulf": operator.mul, "divf": operator.truediv, "maximumf": np.maximum
}  # fmt: skip
COMPARISONS = {0: operator.eq, 1: operator.ne, 6: operator.lt, 9: operator.ge}  # of unsigned integers


class Memory:
    """Words of 8 bytes by address, which all devices read and write; one that was never written is zero.

    shared: bfloat16 and float32 of one CTA's shared memory, by address
    shuffled: what threads of one CTA give others of their warp, by the number of the shuffle and the thread's
    """

    def __init__(self):
        """Has no word yet."""
        self.words: dict[int, int] = {}
        self.shared: dict[int, ml_dtypes.bfloat16 | np.float32] = {}
        self.shuffled: dict[tuple[int, int], np.float32] = {}

    def write(self, address: int, payload: np.float32, number: int) -> None:
        """Writes a word as `ops.send` does."""
        assert address % 8 == 0
        self.words[address] = int(np.float32(payload).view(np.uint32)) | (number & 0xFFFFFFFF) << 32


class Operation(NamedTuple):
    """An operation: its name, the numbers of its operands and results, and its blocks.

    compute:  takes the operands, and returns the result; None of an operation that has other effects
    """

    name: str
    operands: list[int]
    results: list[int]
    blocks: list["Block"]
    compute: Callable | None
    text: str


class Block(NamedTuple):
    """A block: the numbers of its arguments, and its operations."""

    arguments: list[int]
    operations: list[Operation]


def emitted(emit: Callable, shapes: list[tuple[int, ...]], dtypes: list[str]) -> Block:
    """Returns what `emit(*refs)` emits, for references of these shapes."""
    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.create()
        kinds = [ir.MemRefType.get(shape, ir.Type.parse(dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)]
        with ir.InsertionPoint(module.body):
            function = func.FuncOp("emitted", (kinds, []))
            with ir.InsertionPoint(function.add_entry_block()) as point:
                emit(*point.block.arguments)
                func.ReturnOp([])
        assert module.operation.verify()
        return _read(function.regions[0].blocks[0], {})


def _read(block, numbers: dict) -> Block:
    number = lambda value: numbers.setdefault(value, len(numbers))
    arguments, operations = [number(argument) for argument in block.arguments], []
    for op in block.operations:
        op = op.operation
        operands = [number(operand) for operand in op.operands]
        blocks = [_read(region.blocks[0], numbers) for region in op.regions if len(region.blocks)]
        text = str(ir.StringAttr(op.attributes["asm_string"]).value) if op.name == "llvm.inline_asm" else ""
        compute = _computing(op) if op.name.startswith("arith.") else None
        operations.append(Operation(op.name, operands, list(map(number, op.results)), blocks, compute, text))
    return Block(arguments, operations)


def _computing(op) -> Callable:
    """Returns the function of operands that an operation of arithmetic is."""
    kind, name = str(op.results[0].type), op.name.removeprefix("arith.")
    if name == "constant":
        attribute = op.attributes["value"]
        value = np.float32(ir.FloatAttr(attribute).value) if kind == "f32" else ir.IntegerAttr(attribute).value
        return lambda: value
    if name == "select":
        return lambda is_first, first, second: first if is_first else second
    if name == "bitcast":
        return lambda x: np.uint32(x).view(np.float32)
    if name == "cmpf":
        assert ir.IntegerAttr(op.attributes["predicate"]).value == 1, "ordered and equal"
        return lambda x, y: int(x == y)
    if kind == "f32":
        return OF_FLOATS[name]
    masks = [(1 << _bits(operand.type)) - 1 for operand in op.operands]
    if name == "cmpi":
        compare, (mask, _) = COMPARISONS[ir.IntegerAttr(op.attributes["predicate"]).value], masks
        return lambda x, y: int(compare(x & mask, y & mask))
    compute, mask = OF_INTEGERS[name], (1 << _bits(op.results[0].type)) - 1
    return lambda *xs: compute(*(x & m for x, m in zip(xs, masks))) & mask


def _bits(kind) -> int:
    return 64 if str(kind) == "index" else int(str(kind)[1:])


def run(threads: list[Iterator[None]]) -> None:
    """Runs threads until all have ended; in each turn one goes on until it waits."""
    idle = 0
    with np.errstate(all="ignore"):
        while threads:
            waiting = [thread for thread in threads if next(thread, "ended") is None]
            idle = 0 if len(waiting) < len(threads) else idle + 1
            assert idle < 100, "all threads wait for ever"
            threads = waiting


def threads_of(block: Block, arrays: list, memory: Memory, num_ctas: int, num_threads: int) -> list[Iterator[None]]:
    """Returns the threads of a launch; each yields where it waits."""
    every = itertools.product(range(num_ctas), range(num_threads))
    return [_Thread(memory, *place).start(block, arrays) for place in every]


class _Thread:
    def __init__(self, memory: Memory, cta: int, number: int):
        self.memory, self.places, self.values = memory, dict(zip(PLACES, (number, cta))), {}
        self.shuffles = 0

    def start(self, block: Block, arrays: list) -> Iterator[None]:
        yield from self._run(block, arrays)

    def _run(self, block: Block, arguments: list):
        """Runs a block's operations, and returns the operands of its terminator."""
        values = self.values
        values.update(zip(block.arguments, arguments, strict=True))
        for op in block.operations:
            operands = [values[operand] for operand in op.operands]
            if op.compute is not None:
                values[op.results[0]] = op.compute(*operands)
            elif op.name in TERMINATORS:
                return operands
            elif op.name in PLACES:
                values[op.results[0]] = self.places[op.name]
            elif op.text.startswith("shfl.sync.bfly"):
                values[op.results[0]] = yield from self._shuffle(op.text, *operands)
            elif op.name == "llvm.inline_asm":
                values[op.results[0]] = self._asm(op.text, operands)
            elif op.name == "memref.load":
                values[op.results[0]] = operands[0][tuple(operands[1:])]
            elif op.name == "memref.store":
                operands[1][tuple(operands[2:])] = operands[0]
            else:
                found = yield from self._structured(op, operands)
                values.update(zip(op.results, found, strict=True))
        return []

    def _structured(self, op: Operation, operands: list):
        if op.name == "scf.if":
            chosen = op.blocks[:1] if operands[0] else op.blocks[1:]
            for block in chosen:
                yield from self._run(block, [])
            return []
        if op.name == "scf.for":
            first, end, stride, *carried = operands
            for number in range(first, end, stride):
                carried = yield from self._run(op.blocks[0], [number, *carried])
            return carried
        assert op.name == "scf.while"
        before, after = op.blocks
        while True:
            is_waiting, *found = yield from self._run(before, operands)
            if not is_waiting:
                return found
            yield
            operands = yield from self._run(after, found)

    def _shuffle(self, text: str, x):
        """Returns what the thread at a distance has, when that has come to the same shuffle."""
        self.shuffles += 1
        number, distance = self.places["gpu.thread_id"], int(re.search(r"\$1, (\d+), 31", text)[1])
        self.memory.shuffled[self.shuffles, number] = x
        other = self.shuffles, number ^ distance
        while other not in self.memory.shuffled:
            yield
        return self.memory.shuffled[other]

    def _asm(self, text: str, operands: list) -> Any:
        if text.startswith("ld.relaxed."):
            return self.memory.words.get(operands[0], 0)
        if "st.relaxed.sys.global.b64 [$0], word" in text:
            return self.memory.write(*operands)
        if found := re.search(r"(ld|st)\.shared\.(b16|f32) .*\[\$[01]\+(\d+)\]", text):
            address = operands[0] + int(found[3])
            if found[1] == "ld":
                return np.float32(self.memory.shared[address])
            self.memory.shared[address] = (ml_dtypes.bfloat16 if found[2] == "b16" else np.float32)(operands[1])
            return None
        return {"ex2": np.exp2, "lg2": np.log2}[text[:3]](operands[0])
