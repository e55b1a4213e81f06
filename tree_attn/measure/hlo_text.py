"""Reads the text of an HLO module into computations and instructions.

JAX's own objects of a module do not serve: in JAX 0.10 an instruction of theirs has neither type nor attributes, and a
module does not say which computation is its entry.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping

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


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of HLO: `name = type opcode(operands), attributes`."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    literal: str  # the text between the parentheses, for `constant(5)` and `parameter(0)`
    attributes: str
    is_root: bool

    def called_computation(self, attribute: str) -> str | None:
        """Returns the name of the computation in an attribute such as "to_apply"; None without it."""
        match = _CALLED[attribute].search(self.attributes)
        return match and match.group(1)

    def called_computations(self, attribute: str) -> list[str]:
        """Returns the names in an attribute that lists computations, such as "branch_computations"."""
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
    """Returns the bytes of a type as HLO prints it, tuples summed: `type_bytes("(f32[2,3]{1,0}, bf16[4])")` is 32."""
    bits = 0
    for dtype, dimensions in _ARRAY.findall(type_text):
        size = 1
        for dimension in filter(None, dimensions.split(",")):
            size *= int(dimension.lstrip("<="))  # "<=8" is a dynamic size with its bound
        bits += size * _dtype_bits(dtype)
    return -(-bits // 8)


def first_dtype(type_text: str) -> str:
    """Returns the dtype of the first array of a type as HLO prints it, for example "f32"."""
    match = _ARRAY.search(type_text)
    return match.group(1) if match else ""


def replica_group_size(attributes: str, num_devices: int | None) -> int | None:
    """Returns the number of devices in one group of a collective; `num_devices` if the text writes "all of them".

    Reads XLA's three ways to write groups: `{{0,1},{2,3}}`, `[2,4]<=[8]` and `mesh['a'=4,'b'=2] {'a'}`.
    """
    if match := re.search(r"replica_groups=\{(\{[\d,{} ]*\})\}", attributes):
        return max(len(group.split(",")) for group in re.findall(r"\{([\d, ]+)\}", match.group(1)))
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", attributes):
        return int(match.group(2))
    if match := re.search(r"replica_groups=(?:@?\w+)?\[((?:'[^']*'=\d+,?\s*)*)\][^{]*\{([^}]*)\}", attributes):
        return _mesh_group_size(match.group(1), match.group(2))
    return num_devices  # "{}" means one group of all devices


def _parse_instruction(name: str, rest: str, is_root: bool) -> Instruction:
    type_end = _type_end(rest)
    opcode, _, tail = rest[type_end:].strip().partition("(")
    close = _closing(tail)
    inside = tail[:close]
    operands = tuple(part.split()[-1].lstrip("%") for part in _split(inside) if part.strip())
    return Instruction(name, rest[:type_end], opcode.strip(), operands, inside.strip(), tail[close + 1 :], is_root)


def _type_end(rest: str) -> int:
    """Returns the end of the type: the first space outside brackets (a tuple's type has spaces in its parentheses)."""
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
    """Returns the position of the parenthesis that closes the one opened just before `text`."""
    depth = 1
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return position
    return len(text)


def _split(text: str) -> Iterator[str]:
    """Yields the parts of `text` between commas that are outside brackets."""
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
