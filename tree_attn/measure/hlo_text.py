"""Reads the text of an HLO module into computations and instructions, and works out how often a while loop runs."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

# Bits of one element. Types that are not data (token, opaque) hold none; s4 and u4 are packed two to a byte.
_DTYPE_BITS = {
    "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32,
    "s64": 64, "u64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128, "token": 0, "opaque": 0,
    "f4e2m1fn": 4,
}  # fmt: skip

_NAME = r"%?([\w.\-]+)"
_COMPUTATION = re.compile(rf"^(ENTRY\s+)?{_NAME}\s*(\(.*)?\{{\s*$")
_INSTRUCTION = re.compile(rf"^\s+(ROOT\s+)?{_NAME}\s+=\s+(.*)$")
_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,<=]*)\]")
_CALLED = {
    attribute: re.compile(rf"\b{attribute}={_NAME}")
    for attribute in ("to_apply", "calls", "condition", "body", "true_computation", "false_computation")
}
_CALLED_LISTS = {
    attribute: re.compile(rf"\b{attribute}=\{{([^}}]*)\}}")
    for attribute in ("branch_computations", "called_computations")
}
_KNOWN_TRIP_COUNT = re.compile(r'known_trip_count"?\s*[:=]\s*\{\s*"?n"?\s*[:=]\s*"?(\d+)')
# What only moves or renames a scalar, on the way from a loop's counter to its comparison.
_FORWARDING = ("copy", "bitcast", "convert", "reshape", "optimization-barrier")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of HLO: `name = type opcode(operands), attributes`."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    literal: str  # the text between the parentheses: what `constant(5)` and `parameter(0)` hold
    attributes: str
    is_root: bool

    def called(self, attribute: str) -> str | None:
        match = _CALLED[attribute].search(self.attributes)
        return match and match.group(1)

    def called_list(self, attribute: str) -> list[str]:
        match = _CALLED_LISTS[attribute].search(self.attributes)
        return re.findall(_NAME, match.group(1)) if match else []


Computation = Mapping[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Module:
    """A parsed HLO module: computations by name, the entry's name, the number of devices if the header has it."""

    computations: Mapping[str, Computation]
    entry: str
    num_devices: int | None


def parse(hlo_text: str) -> Module:
    """Parses `lowered.as_text(dialect="hlo")` or `compiled.as_text()`.

    Raises:
        TypeError: `hlo_text` is not a string.
        ValueError: there is no `HloModule ... ENTRY` in it (StableHLO text, for example).
    """
    if not isinstance(hlo_text, str):
        raise TypeError(f"hlo_text must be the text of an HLO module, got {type(hlo_text).__name__}")
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = None, None
    for line in hlo_text.splitlines():
        if current is None:
            if (match := _COMPUTATION.match(line)) and not line.startswith("HloModule"):
                current = computations.setdefault(match.group(2), {})
                entry = match.group(2) if match.group(1) else entry
        elif line.startswith("}"):
            current = None
        elif match := _INSTRUCTION.match(line):
            instruction = _parse_instruction(match.group(2), match.group(3), bool(match.group(1)))
            current[instruction.name] = instruction
    if "HloModule" not in hlo_text or entry is None:
        raise ValueError(
            'hlo_text must be an HLO module with an ENTRY computation, as lowered.as_text(dialect="hlo") and '
            f"compiled.as_text() give, got text that starts {hlo_text[:60]!r}"
        )
    return Module(computations, entry, _num_devices(hlo_text))


def type_bytes(type_text: str) -> int:
    """Bytes of a type as HLO prints it, tuples summed: `type_bytes("(f32[2,3]{1,0}, bf16[4])")` is 32."""
    bits = 0
    for dtype, dimensions in _ARRAY.findall(type_text):
        size = 1
        for dimension in filter(None, dimensions.split(",")):
            size *= int(dimension.lstrip("<="))  # "<=8" is a dynamic size with its bound
        bits += size * _dtype_bits(dtype)
    return -(-bits // 8)


def first_dtype(type_text: str) -> str:
    """The dtype of the first array of a type as HLO prints it, for example "f32"."""
    match = _ARRAY.search(type_text)
    return match.group(1) if match else ""


def replica_group_size(attributes: str, num_devices: int | None) -> int | None:
    """How many devices exchange data in one group of a collective, or None if the text does not say.

    Reads the three ways XLA writes groups: `{{0,1},{2,3}}`, `[2,4]<=[8]` and `mesh['a'=4,'b'=2] {'a'}`.
    """
    if match := re.search(r"replica_groups=\{(\{[\d,{} ]*\})\}", attributes):
        return max(len(group.split(",")) for group in re.findall(r"\{([\d, ]+)\}", match.group(1)))
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", attributes):
        return int(match.group(2))
    if match := re.search(r"replica_groups=(?:@?\w+)?\[((?:'[^']*'=\d+,?\s*)*)\][^{]*\{([^}]*)\}", attributes):
        return _mesh_group_size(match.group(1), match.group(2))
    return num_devices  # "{}" means one group of everybody


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """How many times a `while` runs its body, or None if that cannot be read from the text.

    From XLA's own `known_trip_count` where it is present; otherwise from a condition `counter < limit` (or <=, >, >=,
    !=) whose counter starts at a constant, grows by a constant, and whose limit is a constant or is passed through.
    """
    if match := _KNOWN_TRIP_COUNT.search(loop.attributes):
        return int(match.group(1))
    condition = module.computations.get(loop.called("condition") or "")
    body = module.computations.get(loop.called("body") or "")
    if condition is None or body is None:
        return None
    tracer = _Tracer(module)
    comparison = tracer.value(_Scope(condition), _root(condition).name)
    start = tracer.value(_Scope(computation), loop.operands[0])
    step = tracer.value(_Scope(body), _root(body).name)
    return _count_steps(comparison, start, step)


def _count_steps(comparison: Any, start: Any, step: Any) -> int | None:
    if not (isinstance(comparison, tuple) and comparison[0] == "compare"):
        return None
    _, direction, left, right = comparison
    if left[0] != "element":  # "limit > counter" is "counter < limit"
        left, right, direction = right, left, {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(direction, direction)
    counter = left[1] if left[0] == "element" else None
    first = _constant(_element(start, counter))
    stride = _stride(_element(step, counter), counter)
    limit = _limit(right, start, step)
    if None in (counter, first, stride, limit) or stride == 0:
        return None
    span = {"LT": limit - first, "LE": limit - first + 1, "GT": first - limit, "GE": first - limit + 1}
    if direction == "NE":
        return (limit - first) // stride if (limit - first) % stride == 0 and (limit - first) // stride >= 0 else None
    if direction not in span or (stride > 0) != (direction in ("LT", "LE")):
        return None
    return max(0, -(-span[direction] // abs(stride)))


def _limit(value: Any, start: Any, step: Any) -> int | None:
    """The loop's limit: a constant of the condition, or an element of the carry that the body hands on unchanged."""
    if value[0] == "element" and _element(step, value[1]) == value:
        return _constant(_element(start, value[1]))
    return _constant(value)


def _constant(value: Any) -> int | None:
    return value[1] if value[0] == "constant" else None


def _stride(value: Any, counter: int | None) -> int | None:
    if value[0] != "add":
        return None
    for one, other in (value[1:], value[:0:-1]):
        if one == ("element", counter) and other[0] == "constant":
            return other[1]
    return None


def _element(value: Any, index: int | None) -> Any:
    if value[0] == "tuple" and index is not None and index < len(value[1]):
        return value[1][index]()
    if value == ("parameter",):
        return ("element", index)
    return ("unknown",)


def _root(computation: Computation) -> Instruction:
    return next(instruction for instruction in computation.values() if instruction.is_root)


@dataclasses.dataclass(frozen=True)
class _Scope:
    """A computation, and what its parameters are bound to where it was called from (None: the loop's own carry)."""

    computation: Computation
    arguments: tuple[str, ...] = ()
    caller: "_Scope | None" = None


@dataclasses.dataclass(frozen=True)
class _Tracer:
    """Follows a scalar back to a constant or to an element of the loop's carry, through fusions, calls and copies."""

    module: Module

    def value(self, scope: _Scope, name: str) -> tuple:
        instruction = scope.computation.get(name)
        if instruction is None:
            return ("unknown",)
        opcode = instruction.opcode
        if opcode == "constant":
            is_integer = re.fullmatch(r"-?\d+", instruction.literal)
            return ("constant", int(instruction.literal)) if is_integer else ("unknown",)
        if opcode == "parameter":
            if scope.caller is None:
                return ("parameter",)
            return self.value(scope.caller, scope.arguments[int(instruction.literal)])
        if opcode in _FORWARDING:
            return self.value(scope, instruction.operands[0])
        if opcode == "tuple":
            return ("tuple", [lambda operand=operand: self.value(scope, operand) for operand in instruction.operands])
        if opcode == "get-tuple-element":
            index = re.search(r"index=(\d+)", instruction.attributes)
            return _element(self.value(scope, instruction.operands[0]), int(index.group(1)))
        if opcode in ("add", "subtract"):
            left, right = (self.value(scope, operand) for operand in instruction.operands)
            if opcode == "subtract":
                right = ("constant", -right[1]) if right[0] == "constant" else ("unknown",)
            return ("add", left, right)
        if opcode == "compare":
            direction = re.search(r"direction=(\w+)", instruction.attributes).group(1)
            return ("compare", direction, *(self.value(scope, operand) for operand in instruction.operands))
        called = instruction.called("calls") or instruction.called("to_apply")
        if opcode in ("fusion", "call") and called in self.module.computations:
            inner = self.module.computations[called]
            return self.value(_Scope(inner, instruction.operands, scope), _root(inner).name)
        return ("unknown",)


def _parse_instruction(name: str, rest: str, is_root: bool) -> Instruction:
    type_end = _type_end(rest)
    opcode, _, tail = rest[type_end:].strip().partition("(")
    close = _closing(tail)
    inside = tail[:close]
    operands = tuple(part.split()[-1].lstrip("%") for part in _split(inside) if part.strip())
    return Instruction(name, rest[:type_end], opcode.strip(), operands, inside.strip(), tail[close + 1 :], is_root)


def _type_end(rest: str) -> int:
    """Where the type ends: at the first space outside brackets (a tuple's type has spaces within its parentheses)."""
    depth = 0
    for position, character in enumerate(rest):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == " " and depth == 0:
            return position
    return len(rest)


def _closing(text: str) -> int:
    """Where the parenthesis closes that was opened just before `text`."""
    depth = 1
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return position
    return len(text)


def _split(text: str) -> Iterator[str]:
    """The parts of `text` between commas that are outside brackets."""
    depth, start = 0, 0
    for position, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 0:
            yield text[start:position]
            start = position + 1
    yield text[start:]


def _dtype_bits(dtype: str) -> int:
    if dtype in _DTYPE_BITS:
        return _DTYPE_BITS[dtype]
    if re.match(r"f8e\d", dtype):
        return 8
    raise ValueError(f"the HLO text has a dtype of unknown size, {dtype!r}")


def _mesh_group_size(mesh_axes: str, group_axes: str) -> int:
    sizes = {axis: int(size) for axis, size in re.findall(r"'([^']*)'=(\d+)", mesh_axes)}
    group = 1
    for axis, part in re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", group_axes):
        group *= int(part) if part else sizes[axis]
    return group


def _num_devices(hlo_text: str) -> int | None:
    header = hlo_text[: hlo_text.find("\n")]
    counts = [int(count) for count in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)]
    if not counts:
        return None
    total = 1
    for count in counts:
        total *= count
    return total
