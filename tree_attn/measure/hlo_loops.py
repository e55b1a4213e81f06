"""Reads the trip counts of while loops from the text of an HLO module."""

import dataclasses
import re
from typing import Any

from tree_attn.measure import hlo_text

_KNOWN_TRIP_COUNT = re.compile(r'known_trip_count"?\s*[:=]\s*\{\s*"?n"?\s*[:=]\s*"?(\d+)')
# Operations that only move or rename a scalar, on the way from a loop's counter to its comparison.
_FORWARDING = ("copy", "bitcast", "convert", "reshape", "optimization-barrier")


def trip_count(module: hlo_text.Module, computation: hlo_text.Computation, loop: hlo_text.Instruction) -> int | None:
    """Returns the number of times that a `while` runs its body, or None if the text does not reveal it.

    XLA's own `known_trip_count` is taken if present. Otherwise the condition has to be `counter < limit` (or <=, >, >=,
    !=). The counter has to start at a constant and to grow by a constant; the limit is a constant or is passed through.
    """
    if match := _KNOWN_TRIP_COUNT.search(loop.attributes):
        return int(match.group(1))
    condition = module.computations.get(loop.called_computation("condition") or "")
    body = module.computations.get(loop.called_computation("body") or "")
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
    """Returns the loop's limit: a constant of the condition, or an element of the carry that the body leaves as is."""
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


def _root(computation: hlo_text.Computation) -> hlo_text.Instruction:
    return next(instruction for instruction in computation.values() if instruction.is_root)


@dataclasses.dataclass(frozen=True)
class _Scope:
    """A computation, and the arguments of its call in the caller's scope (None: parameters are the loop's carry)."""

    computation: hlo_text.Computation
    arguments: tuple[str, ...] = ()
    caller: "_Scope | None" = None


@dataclasses.dataclass(frozen=True)
class _Tracer:
    """Follows a scalar back to a constant or to an element of the loop's carry, through fusions, calls and copies."""

    module: hlo_text.Module

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
        called = instruction.called_computation("calls") or instruction.called_computation("to_apply")
        if opcode in ("fusion", "call") and called in self.module.computations:
            inner = self.module.computations[called]
            return self.value(_Scope(inner, instruction.operands, scope), _root(inner).name)
        return ("unknown",)
