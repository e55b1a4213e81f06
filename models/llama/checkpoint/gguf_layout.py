"""The layout of a GGUF file: metadata and tensors by name, with every length held to the file's size before it is used.

The reader of the `gguf` package makes several arrays for each element of the metadata, and reads on beyond the end of
the file. So the package gives the types and their sizes, and dequantizes; the bytes are walked here. See
docs/log/llama.md: "A walk over a GGUF file opens it in a tenth of the time of its package's reader".
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import dataclasses
import math
import struct
from typing import Any

import numpy as np

from tree_attn.models.llama.checkpoint.reading import shortened

# The numbers of a metadata value's types, with the codes of `struct` for those of one size.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY, _UINT32 = 7, 8, 9, 4
_MAX_DIMENSIONS = 4
# A model of 405 billion parameters has 1,138 tensors.
_MAX_ENTRIES = 100_000


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """A metadata value that is read when asked for: its type and first byte, and of an array the elements."""

    type: int
    start: int
    element_type: int | None = None
    count: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GGUFTensor:
    """One tensor: its shape, slowest dimension first, its type by the package's name, and its range of bytes."""

    name: str
    shape: tuple[int, ...]
    tensor_type: Any
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        """The number of rows, runs of the fastest dimension; 1 without dimensions."""
        return math.prod(self.shape[:-1])


class Layout:
    """The layout of a GGUF file.

    Attributes:
      data: the file's bytes, uint8.
      values: metadata by key; `get` reads them.
      tensors: tensors by name.

    Raises:
      ValueError: the bytes break the format; the message says where.
    """

    def __init__(self, data: np.ndarray, package: Any):
        self.data = data
        self._bytes = memoryview(data)
        self._at = 0
        if bytes(self._bytes[:4]) != b"GGUF":
            raise ValueError("it does not begin with 'GGUF'")
        self._at = 4
        version = self._number("I")
        if version not in (2, 3):
            reason = "is big-endian" if version and not version & 0xFFFF else f"has version {version}"
            raise ValueError(f"it {reason}; this reads versions 2 and 3, little-endian")
        num_tensors, num_values = self._number("Q"), self._number("Q")
        if max(num_tensors, num_values) > _MAX_ENTRIES:
            raise ValueError(f"it has {num_tensors} tensors and {num_values} metadata, at most {_MAX_ENTRIES} are read")
        self.values: dict[str, Value] = {}
        for _ in range(num_values):
            key = self._text("a key")
            if key in self.values:
                raise ValueError(f"metadata {shortened(key)} occurs twice")
            self.values[key] = self._value(key, self._number("I"))
        infos = [self._tensor_info(package) for _ in range(num_tensors)]
        self.tensors = self._placed(infos)

    def get(self, key: str) -> Any:
        """Returns a metadata value; raises ValueError for text that is not UTF-8."""
        value = self.values[key]
        if value.type == _STRING:
            return self._string_at(value.start, key)[0]
        if value.type != _ARRAY:
            return struct.unpack_from("<" + _NUMBERS[value.type], self._bytes, value.start)[0]
        if value.element_type in _NUMBERS:
            code = _NUMBERS[value.element_type]
            return np.frombuffer(self._bytes, np.dtype("<" + code), value.count, value.start).tolist()
        strings, at = [], value.start
        for _ in range(value.count):
            text, at = self._string_at(at, key)
            strings.append(text)
        return strings

    def _string_at(self, start: int, key: str) -> tuple[str, int]:
        """Returns the string whose length is at a place that was walked before, and the place behind it."""
        stop = start + 8 + struct.unpack_from("<Q", self._bytes, start)[0]
        try:
            return str(self._bytes[start + 8 : stop], "utf-8"), stop
        except UnicodeDecodeError:
            raise ValueError(f"metadata {shortened(key)} holds text that is not UTF-8") from None

    def _skip(self, num_bytes: int, noun: str) -> int:
        """Moves on by as many bytes, and returns where they begin."""
        start, self._at = self._at, self._at + num_bytes
        if self._at > len(self._bytes):
            raise ValueError(f"{noun} of {num_bytes} bytes at byte {start} of a file of {len(self._bytes)}")
        return start

    def _number(self, code: str) -> int:
        return struct.unpack_from("<" + code, self._bytes, self._skip(struct.calcsize(code), "a number"))[0]

    def _text(self, noun: str) -> str:
        num_bytes = self._number("Q")
        start = self._skip(num_bytes, noun)
        return str(self._bytes[start : start + num_bytes], "utf-8")

    def _value(self, key: str, value_type: int) -> Value:
        start = self._at
        if value_type in _NUMBERS:
            self._numbers(key, value_type, 1)
            return Value(type=value_type, start=start)
        if value_type == _STRING:
            self._strings(key, 1)
            return Value(type=value_type, start=start)
        if value_type != _ARRAY:
            raise ValueError(f"metadata {shortened(key)} has the unknown type {value_type}")
        element_type, count = self._number("I"), self._number("Q")
        start = self._at
        if element_type in _NUMBERS:
            self._numbers(key, element_type, count)
        elif element_type == _STRING:
            self._strings(key, count)
        else:
            raise ValueError(f"metadata {shortened(key)} is an array of type {element_type}: neither numbers nor texts")
        return Value(type=value_type, start=start, element_type=element_type, count=count)

    def _numbers(self, key: str, value_type: int, count: int) -> None:
        size = struct.calcsize(_NUMBERS[value_type])
        start = self._skip(size * count, f"metadata {shortened(key)}, {count} numbers")
        if value_type == _BOOL and self.data[start : start + count].max(initial=0) > 1:
            raise ValueError(f"metadata {shortened(key)} must be 0 or 1 for false or true")

    def _strings(self, key: str, count: int) -> None:
        at, view, end = self._at, self._bytes, len(self._bytes)
        read_length = struct.Struct("<Q").unpack_from
        for number in range(count):
            if at + 8 > end:
                raise ValueError(f"metadata {shortened(key)}: text {number} of {count} lies beyond the file's end")
            at += 8 + read_length(view, at)[0]
            if at > end:
                raise ValueError(f"metadata {shortened(key)}: text {number} of {count} ends at byte {at} of {end}")
        self._at = at

    def _tensor_info(self, package: Any) -> tuple[str, tuple[int, ...], Any, int, int]:
        """Returns a tensor's name, shape, type, offset in the data and number of bytes."""
        name = self._text("a tensor's name")
        num_dimensions = self._number("I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"tensor {shortened(name)} has {num_dimensions} dimensions, at most {_MAX_DIMENSIONS} are")
        shape = tuple(self._number("Q") for _ in range(num_dimensions))[::-1]
        type_number, offset = self._number("I"), self._number("Q")
        try:
            tensor_type = package.GGMLQuantizationType(type_number)
            block_size, block_bytes = package.GGML_QUANT_SIZES[tensor_type]
        except (ValueError, KeyError):
            raise ValueError(f"tensor {shortened(name)} has the unknown type {type_number}") from None
        if (shape[-1] if shape else 1) % block_size:
            raise ValueError(
                f"tensor {shortened(name)}: {tensor_type.name} has blocks of {block_size}, got {list(shape)}"
            )
        return name, shape, tensor_type, offset, math.prod(shape) // block_size * block_bytes

    def _placed(self, infos: list[tuple[str, tuple[int, ...], Any, int, int]]) -> dict[str, GGUFTensor]:
        """Returns the tensors by name; raises ValueError unless they cover the data, one after another."""
        alignment = self._alignment()
        aligned = lambda place: -(-place // alignment) * alignment
        first = aligned(self._at)
        tensors: dict[str, GGUFTensor] = {}
        end = expected = first
        for name, shape, tensor_type, offset, num_bytes in sorted(infos, key=lambda info: (info[3], info[4])):
            if name in tensors:
                raise ValueError(f"tensor {shortened(name)} occurs twice")
            if first + offset != expected:
                raise ValueError(
                    f"tensor {shortened(name)} is at byte {offset} of the data, expected {expected - first}: "
                    f"tensors must follow one another, aligned to {alignment} bytes"
                )
            end = expected + num_bytes
            if end > len(self._bytes):
                raise ValueError(f"tensor {shortened(name)} ends at byte {end} of a file of {len(self._bytes)}")
            tensors[name] = GGUFTensor(name=name, shape=shape, tensor_type=tensor_type, start=expected, stop=end)
            expected = aligned(end)
        if len(self._bytes) > max(expected, self._at):
            raise ValueError(f"{len(self._bytes) - end} bytes follow the last tensor, which ends at byte {end}")
        return tensors

    def _alignment(self) -> int:
        value = self.values.get("general.alignment")
        if value is None:
            return 32
        alignment = self.get("general.alignment") if value.type == _UINT32 else None
        if not alignment or alignment & (alignment - 1):
            raise ValueError("general.alignment must be a power of two, of type uint32")
        return alignment
